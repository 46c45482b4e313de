//! `towline disk info`.

use super::end::{End, Named, failed, remote};
use crate::remote::Remotes;
use crate::report::{Failure, Outcome};
use crate::text::{escaped, human};
use serde_json::{Value, json};
use std::ffi::OsString;
use towline_attach::nbd::Source;

const EXAMPLES: &str = "\
Examples:
  towline disk info towline://host                             all disks of a server
  towline disk info --json towline://host/vm1
  towline disk info nbd+unix:///vm1?socket=/run/nbd.sock

Exit status: 0 all well, 1 an operation failed, 2 wrong usage.";

/// Arguments of `disk info`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// One JSON object a line.
    #[arg(long)]
    json: bool,
    /// A disk, or a Towline server for all of its disks.
    #[arg(value_name = "DISK")]
    pub(super) disk: OsString,
}

/// Runs the command.
pub(super) fn run(args: &Args, remotes: &Remotes) -> Outcome<String> {
    let rows = match Named::of(&args.disk) {
        Named::Towline(text) => towline(text, remotes)?,
        Named::Nbd(text) => vec![nbd(text)?],
        Named::File(path) => {
            let file = End::open(remotes, &args.disk, false, false)?;
            let name = path.to_string_lossy();
            vec![json!({"name": name, "size": file.size(), "block_minimum": file.block()})]
        }
    };
    let mut out = String::new();
    for row in rows {
        if args.json {
            out += &format!("{row}\n");
        } else {
            out += &text(&row);
        }
    }
    Ok(out)
}

/// Formats a disk: its name, and below it one property a line.
fn text(row: &Value) -> String {
    let Value::Object(fields) = row else { return String::new() };
    let mut out = String::new();
    if let Some(Value::String(name)) = fields.get("name") {
        out += &format!("{}:\n", escaped(name.as_bytes()));
    }
    let size = fields.iter().filter(|(key, _)| *key == "size");
    let others = fields.iter().filter(|(key, _)| *key != "name" && *key != "size");
    for (key, value) in size.chain(others) {
        let key = key.replace('_', " ");
        let value = match value {
            Value::String(text) => escaped(text.as_bytes()),
            Value::Bool(true) => "yes".to_owned(),
            Value::Bool(false) => "no".to_owned(),
            Value::Number(number) if key == "size" => {
                format!("{number} ({})", human(number.as_u64().unwrap_or_default()))
            }
            other => other.to_string(),
        };
        out += &format!("  {key}: {value}\n");
    }
    out
}

fn towline(text: &str, remotes: &Remotes) -> Outcome<Vec<Value>> {
    let (url, client) = remotes.server(text)?;
    if !url.path.is_empty() {
        return Err(Failure::new("a disk has no path in it: towline://HOST/DISK"));
    }
    let known = client.disks()?;
    let names = match url.export.is_empty() {
        true => known.iter().map(|(name, _)| name.clone()).collect(),
        false => vec![String::from_utf8_lossy(&url.export).into_owned()],
    };
    let mut rows = Vec::new();
    for name in names {
        let disk = match url.export.is_empty() {
            true => client.disk(name.as_bytes()).map_err(|e| Failure::from(e).about(&name))?,
            false => remote(remotes, text)?,
        };
        let info = disk.info();
        let described = known.iter().find(|(other, _)| *other == name);
        rows.push(json!({
            "name": name,
            "description": described.map_or("", |(_, description)| description),
            "size": info.size,
            "block_minimum": info.block_minimum,
            "block_preferred": info.block_preferred,
            "read_only": info.read_only,
            "rotational": info.rotational,
            "identity": format!("{:016x}", info.identity),
        }));
    }
    Ok(rows)
}

fn nbd(text: &str) -> Outcome<Value> {
    let source = Source::parse(text).map_err(Failure::new)?;
    let connection = source.connect().map_err(|error| failed(&source, &error))?;
    let told = connection.geometry;
    connection.leave();
    Ok(json!({
        "name": source.to_string(),
        "size": told.size,
        "block_minimum": told.block_minimum,
        "block_preferred": told.block_preferred,
        "transfer_maximum": told.transfer_maximum,
        "read_only": told.read_only,
        "rotational": told.rotational,
        "can_flush": told.flush,
        "can_fua": told.fua,
        "can_trim": told.trim,
        "can_zero": told.zero,
        "can_multi_conn": told.connections,
    }))
}
