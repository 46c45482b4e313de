//! `towline stat`: all attributes of files.

use crate::ahead::Ahead;
use crate::remote::{Place, Remotes};
use crate::report::{Outcome, Report};
use crate::text::{self, Owners, json_attr, json_name, shown};
use crate::time::Zone;
use serde_json::{Map, Value};
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use towline_client::{Attr, Timestamp};

const EXAMPLES: &str = "\
Examples:
  towline stat towline://host/data/file
  towline stat --json towline://host/data/a towline://host/data/b

Exit status: 0 all shown, 1 some could not be, 2 wrong usage.";

/// Arguments of `stat`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Follow symbolic links.
    #[arg(short = 'L', long)]
    dereference: bool,
    /// Print one JSON object per line.
    #[arg(long)]
    json: bool,
    /// Files.
    #[arg(required = true, value_name = "URL")]
    urls: Vec<String>,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> ExitCode {
    let report = Report::new("stat");
    let remotes = Remotes::default();
    let (owners, zone) = (Owners::new(false), Zone::local());
    let mut out = io::stdout().lock();
    let terminal = out.is_terminal();
    let follow = args.dereference;
    let mut looks = Ahead::new(&remotes, args.urls.iter().map(String::as_str), |place| {
        place.base.start_stat_path(place.path(), follow)
    });
    for url in &args.urls {
        let place = remotes.place(url);
        let ahead = looks.next();
        let looked = place.and_then(|place| look(place, ahead, follow));
        let Some((place, attr, target)) = report.check(url, looked) else {
            continue;
        };
        let text = if args.json {
            json(&place, &attr, target.as_deref())
        } else {
            full(&place, &attr, target.as_deref().map(|t| shown(t, terminal)), &owners, &zone)
        };
        report.output(out.write_all(&text));
    }
    report.output(out.flush());
    report.status()
}

fn look(
    place: Place,
    ahead: Option<Attr>,
    follow: bool,
) -> Outcome<(Place, Attr, Option<Vec<u8>>)> {
    let attr = ahead.map_or_else(|| place.base.stat_path(place.path(), follow), Ok)?;
    let target = if attr.is_symlink() { Some(place.base.read_link(place.path())?) } else { None };
    Ok((place, attr, target))
}

fn json(place: &Place, attr: &Attr, target: Option<&[u8]>) -> Vec<u8> {
    let mut object = Map::new();
    json_name(&mut object, "name", place.name());
    object.insert("url".to_owned(), place.to_string().into());
    json_attr(&mut object, attr);
    if let Some(target) = target {
        json_name(&mut object, "target", target);
    }
    let mut line = Value::Object(object).to_string().into_bytes();
    line.push(b'\n');
    line
}

fn full(
    place: &Place,
    attr: &Attr,
    target: Option<Vec<u8>>,
    owners: &Owners,
    zone: &Zone,
) -> Vec<u8> {
    let mut text = format!("  File: {place}").into_bytes();
    if let Some(target) = target {
        text.extend_from_slice(b" -> ");
        text.extend(target);
    }
    let device = match attr.mode & towline_wire::attr::TYPE_MASK {
        towline_wire::attr::TYPE_BLOCK | towline_wire::attr::TYPE_CHARACTER => {
            let (major, minor) = text::device(attr.rdev);
            format!("  Device type: {major},{minor}")
        }
        _ => String::new(),
    };
    let created = match attr.created {
        Timestamp { seconds: 0, nanoseconds: 0, .. } => "-".to_owned(),
        time => zone.full(time),
    };
    text.extend_from_slice(
        format!(
            "\n  Size: {:<15} Blocks: {:<10} IO Block: {:<6} {}\n Inode: {:<15} Links: {}{device}\n\
             Access: ({:04o}/{})  Uid: ({}/{})   Gid: ({}/{})\n\
             Access: {}\nModify: {}\nChange: {}\n Birth: {created}\n",
            attr.size,
            attr.blocks,
            attr.block_bytes,
            text::type_name(attr.mode),
            attr.inode,
            attr.links,
            attr.mode & 0o7777,
            text::mode(attr.mode),
            attr.uid,
            owners.user(attr.uid),
            attr.gid,
            owners.group(attr.gid),
            zone.full(attr.accessed),
            zone.full(attr.modified),
            zone.full(attr.changed),
        )
        .as_bytes(),
    );
    text
}
