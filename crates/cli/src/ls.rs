//! `towline ls`: lists remote directories as `ls` does, and the exports and disks of servers.

use crate::remote::{Place, Remotes};
use crate::report::{Failure, Outcome, Report};
use crate::text::{self, Owners, escaped, human, json_attr, json_name, shown};
use crate::time::{Zone, now};
use crate::walk::Walk;
use clap::ArgAction;
use serde_json::{Map, Value};
use std::collections::VecDeque;
use std::io::{self, BufWriter, IsTerminal, StdoutLock, Write};
use std::process::ExitCode;
use towline_client::{Attr, Batch, DirEntry, Errno, Operation, Url};

const EXAMPLES: &str = "\
Examples:
  towline ls towline://host                  exports and disks of a server
  towline ls -l towline://host/data/dir
  towline ls -lR --json towline://host/data  one JSON object a line

Exit status: 0 all listed, 1 something was not, 2 wrong usage.";

/// Arguments of `ls`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES, disable_help_flag = true)]
pub(crate) struct Args {
    /// Print one line each: mode, links, owner, group, size, time, name.
    #[arg(short)]
    long: bool,
    /// List directories recursively.
    #[arg(short = 'R', long)]
    recursive: bool,
    /// Show names that begin with a dot, too.
    #[arg(short, long)]
    all: bool,
    /// Show a directory itself, not its contents.
    #[arg(short, long)]
    directory: bool,
    /// Show sizes with units.
    #[arg(short, long)]
    human_readable: bool,
    /// Show owner and group as numbers.
    #[arg(short, long)]
    numeric: bool,
    /// Do not sort: print names as the server sends them.
    #[arg(short = 'U', long)]
    unsorted: bool,
    /// Print one JSON object per line, with all attributes.
    #[arg(long)]
    json: bool,
    /// Print help.
    #[arg(long, action = ArgAction::Help)]
    help: Option<bool>,
    /// What to list.
    #[arg(required = true, value_name = "URL")]
    urls: Vec<String>,
}

impl Args {
    fn needs_attributes(&self) -> bool {
        self.long || self.json || self.recursive
    }
}

struct Listing<'a> {
    args: &'a Args,
    report: Report,
    out: BufWriter<StdoutLock<'static>>,
    terminal: bool,
    owners: Owners,
    zone: Zone,
    now: i64,
    /// Something was printed, so an empty line goes before the next heading, and standard output must accept it.
    printed: bool,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> ExitCode {
    let stdout = io::stdout().lock();
    let mut listing = Listing {
        args,
        report: Report::new("ls"),
        terminal: stdout.is_terminal(),
        out: BufWriter::with_capacity(256 * 1024, stdout),
        owners: Owners::new(args.numeric || !args.long || args.json),
        zone: Zone::local(),
        now: now(),
        printed: false,
    };
    listing.arguments();
    if listing.printed {
        let flushed = listing.out.flush();
        listing.report.output(flushed);
    }
    listing.report.status()
}

impl Listing<'_> {
    fn arguments(&mut self) {
        let remotes = Remotes::default();
        let mut directories = VecDeque::new();
        let mut files = Vec::new();
        for text in &self.args.urls {
            match Url::parse(text) {
                Ok(url) if url.export.is_empty() => {
                    let result = self.exports(&remotes, &url);
                    self.report.check(text, result);
                }
                _ => match argument(&remotes, text, !self.args.directory && !self.args.long) {
                    Ok((place, attr)) if attr.is_directory() && !self.args.directory => {
                        directories.push_back(place);
                    }
                    Ok((place, attr)) => files.push((place, attr)),
                    Err(failure) => self.report.error(text, failure),
                },
            }
        }
        let rows = files.iter().map(|(place, attr)| {
            let name = escaped_url(place);
            self.row(place, name.into_bytes(), Some(*attr), false)
        });
        let rows: Vec<Row> = rows.collect();
        self.print(&rows);
        let headings = self.args.recursive || self.args.urls.len() > 1;
        for place in directories {
            self.tree(place, headings);
        }
    }

    fn exports(&mut self, remotes: &Remotes, url: &Url) -> Outcome<()> {
        let client = remotes.client(url)?;
        let mut names = client.exports()?;
        names.sort_unstable();
        for name in names {
            let line = if self.args.json {
                let mut object = Map::new();
                json_name(&mut object, "export", &name);
                Value::Object(object).to_string().into_bytes()
            } else {
                shown(&name, self.terminal)
            };
            self.line(&line);
        }
        let mut disks = client.disks()?;
        disks.sort_unstable();
        for (name, description) in disks {
            let line = if self.args.json {
                let mut object = Map::new();
                json_name(&mut object, "disk", name.as_bytes());
                object.insert("description".into(), description.into());
                Value::Object(object).to_string().into_bytes()
            } else {
                let name = shown(name.as_bytes(), self.terminal);
                let description = shown(description.as_bytes(), self.terminal);
                [&name[..], b"\tdisk, ", &description].concat()
            };
            self.line(&line);
        }
        Ok(())
    }

    /// Lists a directory and, if requested, all directories below it in order.
    fn tree(&mut self, place: Place, headings: bool) {
        let attributes = self.args.needs_attributes();
        let start = |place: &mut Place| {
            *place = place.clone().shortened(0).ok()?;
            place.base.start_list_path(place.path(), 0, attributes).ok()
        };
        let mut walk = Walk::new(place);
        while let Some((place, started)) = walk.take(start) {
            match self.directory(&place, started, headings) {
                Ok(below) => walk.enter(below),
                Err(failure) => self.report.error(&place, failure),
            }
        }
    }

    fn directory(
        &mut self,
        place: &Place,
        started: Option<Operation<Batch>>,
        heading: bool,
    ) -> Outcome<Vec<Place>> {
        let place = place.clone().shortened(0)?;
        let attributes = self.args.needs_attributes();
        let operation = match started {
            Some(operation) => operation,
            None => place.base.start_list_path(place.path(), 0, attributes)?,
        };
        let (mut entries, mut end) = operation.wait()?;
        if heading && !self.args.json {
            let between: &[u8] = if self.printed { b"\n" } else { b"" };
            let heading = [between, escaped_url(&place).as_bytes(), b":"].concat();
            self.line(&heading);
        }
        let mut below = Vec::new();
        let mut directory = None;
        loop {
            let cookie = entries.last().map_or(0, |entry| entry.cookie);
            if !end && !self.args.unsorted {
                // Sorting needs all entries.
                let open = open_once(&mut directory, &place)?;
                let (more, last) = open.list(cookie, attributes)?;
                entries.extend(more);
                end = last;
                continue;
            }
            self.batch(&place, entries, &mut below);
            if end {
                return Ok(below);
            }
            (entries, end) = open_once(&mut directory, &place)?.list(cookie, attributes)?;
        }
    }

    fn batch(&mut self, place: &Place, mut entries: Vec<DirEntry>, below: &mut Vec<Place>) {
        entries.retain(|entry| {
            let dots = entry.name == b"." || entry.name == b"..";
            !dots && (self.args.all || !entry.name.starts_with(b"."))
        });
        if !self.args.unsorted {
            entries.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        }
        let mut rows = Vec::with_capacity(entries.len());
        for entry in entries {
            let child = place.child(&entry.name);
            let mut attr = entry.attr;
            if attr.is_none() && self.args.needs_attributes() {
                match child.base.stat_path(child.path(), false) {
                    Ok(found) => attr = Some(found),
                    Err(error) if error.errno() == Errno::ENOENT => continue,
                    Err(error) => self.report.error(&child, error.into()),
                }
            }
            if self.args.recursive && attr.is_some_and(|attr| attr.is_directory()) {
                below.push(child.clone());
            }
            rows.push(self.row(&child, shown(&entry.name, self.terminal), attr, true));
        }
        self.print(&rows);
    }

    fn row(&self, place: &Place, name: Vec<u8>, attr: Option<Attr>, inside: bool) -> Row {
        let link = attr.filter(|attr| attr.is_symlink() && (self.args.long || self.args.json));
        // A link that cannot be read is shown without its target, as `ls` does.
        let target = link.and_then(|_| place.base.read_link(place.path()).ok());
        if self.args.json {
            return Row { cells: Vec::new(), name: json(place, attr.as_ref(), target, inside) };
        }
        let mut name = name;
        if let Some(target) = target {
            name.extend_from_slice(b" -> ");
            name.extend(shown(&target, self.terminal));
        }
        let cells = if self.args.long { self.cells(attr.as_ref()) } else { Vec::new() };
        Row { cells, name }
    }

    fn cells(&self, attr: Option<&Attr>) -> Vec<String> {
        let Some(attr) = attr else { return vec!["?".to_owned(); 6] };
        let size = match attr.mode & towline_wire::attr::TYPE_MASK {
            towline_wire::attr::TYPE_BLOCK | towline_wire::attr::TYPE_CHARACTER => {
                let (major, minor) = text::device(attr.rdev);
                format!("{major}, {minor}")
            }
            _ if self.args.human_readable => human(attr.size),
            _ => attr.size.to_string(),
        };
        vec![
            text::mode(attr.mode),
            attr.links.to_string(),
            self.owners.user(attr.uid),
            self.owners.group(attr.gid),
            size,
            self.zone.brief(attr.modified, self.now),
        ]
    }

    fn print(&mut self, rows: &[Row]) {
        let widths = widths(rows);
        for row in rows {
            let line = aligned(row, &widths);
            self.line(&line);
        }
    }

    fn line(&mut self, line: &[u8]) {
        self.printed = true;
        let written = self.out.write_all(line).and_then(|()| self.out.write_all(b"\n"));
        self.report.output(written);
    }
}

struct Row {
    cells: Vec<String>,
    name: Vec<u8>,
}

/// Aligns columns of numbers to the right.
const RIGHT: [bool; 6] = [false, true, false, false, true, true];

fn widths(rows: &[Row]) -> [usize; 6] {
    let mut widths = [0; 6];
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(&row.cells) {
            *width = (*width).max(cell.chars().count());
        }
    }
    widths
}

fn aligned(row: &Row, widths: &[usize; 6]) -> Vec<u8> {
    let mut line = String::new();
    for ((cell, width), right) in row.cells.iter().zip(widths).zip(RIGHT) {
        let cell = if right { format!("{cell:>width$} ") } else { format!("{cell:<width$} ") };
        line.push_str(&cell);
    }
    [line.as_bytes(), &row.name].concat()
}

fn json(place: &Place, attr: Option<&Attr>, target: Option<Vec<u8>>, inside: bool) -> Vec<u8> {
    let mut object = Map::new();
    if inside {
        json_name(&mut object, "name", place.name());
    }
    object.insert("url".to_owned(), place.to_string().into());
    if let Some(attr) = attr {
        json_attr(&mut object, attr);
    }
    if let Some(target) = target {
        json_name(&mut object, "target", &target);
    }
    Value::Object(object).to_string().into_bytes()
}

fn escaped_url(place: &Place) -> String {
    escaped(place.to_string().as_bytes())
}

/// Looks up an argument. A link is followed if requested, or if the argument ends in a slash.
fn argument(remotes: &Remotes, text: &str, follow: bool) -> Outcome<(Place, Attr)> {
    let place = remotes.place(text)?;
    let follow = follow || place.full().ends_with(b"/");
    let leads_nowhere = [Errno::ENOENT, Errno::EXDEV, Errno::ELOOP];
    let attr = match place.base.stat_path(place.path(), follow) {
        // A dangling link, or one that leads out of the export, is listed itself.
        Err(error) if leads_nowhere.contains(&error.errno()) => {
            place.base.stat_path(place.path(), false).map_err(Failure::from)?
        }
        result => result?,
    };
    Ok((place, attr))
}

fn open_once<'a>(
    directory: &'a mut Option<towline_client::File>,
    place: &Place,
) -> Outcome<&'a towline_client::File> {
    if let Some(open) = directory {
        return Ok(open);
    }
    let open = place.base.open(place.path(), crate::remote::flag::DIRECTORY, 0)?;
    Ok(directory.insert(open))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned() {
        let row = |cells: [&str; 6], name: &str| Row {
            cells: cells.map(str::to_owned).to_vec(),
            name: name.into(),
        };
        let rows = [
            row(["-rw-r--r--", "1", "root", "é", "7", "Jan  1 00:00"], "a"),
            row(["drwxr-xr-x", "12", "me", "users", "4096", "Jan  1  1970"], "b"),
        ];
        let widths = widths(&rows);
        let lines: Vec<String> =
            rows.iter().map(|row| String::from_utf8(aligned(row, &widths)).unwrap()).collect();
        assert_eq!(lines[0], "-rw-r--r--  1 root é        7 Jan  1 00:00 a");
        assert_eq!(lines[1], "drwxr-xr-x 12 me   users 4096 Jan  1  1970 b");
        let plain = Row { cells: Vec::new(), name: b"\xff".to_vec() };
        assert_eq!(aligned(&plain, &[0; 6]), b"\xff");
    }
}
