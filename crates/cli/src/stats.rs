//! `towline stats`: shows a server's counters and stage times as tables.

use crate::remote::Remotes;
use crate::report::{Failure, Outcome, Report};
use crate::text::on_one_line;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

const EXAMPLES: &str = "\
Stages of a request: T_server = T_storage + T_data + T_control - T_overlapped, T_disk is within
T_storage. T_storage and T_control are measured for one request for files in 16. T_data is also the
time to send the data of answers, after T_server.

Examples:
  towline stats towline://host
  towline stats --watch 2 towline://host      rates per second, every 2 seconds
  towline stats --json towline://host | jq .stages

Exit status: 0 shown, 1 the server could not be asked, 2 wrong usage.";

/// Arguments of `stats`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Print the server's statistics as one line of JSON.
    #[arg(long)]
    json: bool,
    /// Ask again every SECS seconds and show rates.
    #[arg(long, value_name = "SECS", value_parser = seconds)]
    watch: Option<Duration>,
    /// The server.
    #[arg(value_name = "URL")]
    url: String,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let wrong = "expected seconds, from 0.1 to 86400";
    let seconds: f64 = text.parse().map_err(|_| wrong)?;
    if !(0.1..=86_400.0).contains(&seconds) {
        return Err(wrong.to_owned());
    }
    Ok(Duration::from_secs_f64(seconds))
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> ExitCode {
    let report = Report::new("stats");
    report.check(&args.url, show(args, &report));
    report.status()
}

fn show(args: &Args, report: &Report) -> Outcome<()> {
    let remotes = Remotes::default();
    let (_, client) = remotes.server(&args.url)?;
    let mut out = io::stdout().lock();
    let mut before: Option<(Instant, Numbers)> = None;
    loop {
        let text = client.statistics()?;
        // Not before: the server may have been away for a while.
        let now = Instant::now();
        if args.json {
            report.output(writeln!(out, "{text}"));
        } else {
            let value: Value = serde_json::from_str(&text).map_err(|error| {
                Failure::new(format!(
                    "the statistics are not JSON ({error}): is the server another version?"
                ))
            })?;
            let found = Found::of(&value);
            let rates = before.as_ref().map(|(then, old)| (now - *then, old));
            let mut page = found.tables(rates);
            if args.watch.is_some() {
                page.push('\n');
            }
            report.output(out.write_all(page.as_bytes()));
            before = Some((now, found.numbers));
        }
        report.output(out.flush());
        let Some(interval) = args.watch else { return Ok(()) };
        std::thread::sleep(interval.saturating_sub(now.elapsed()));
    }
}

/// Counters and levels by name.
type Numbers = BTreeMap<String, f64>;

/// A row in a table of histograms: its name and its figures.
type Row = (String, Map<String, Value>);

/// The contents of a server's statistics. It works for any names, since it goes by the types of the values.
#[derive(Default)]
struct Found {
    numbers: Numbers,
    texts: BTreeMap<String, String>,
    /// Histograms by group.
    stages: BTreeMap<String, Vec<Row>>,
}

impl Found {
    fn of(value: &Value) -> Self {
        let mut found = Self::default();
        found.add("", value);
        found
    }

    fn add(&mut self, name: &str, value: &Value) {
        match value {
            Value::Object(fields) if is_histogram(fields) => {
                let (group, row) = name.rsplit_once('.').unwrap_or(("", name));
                let rows = self.stages.entry(group.to_owned()).or_default();
                rows.push((row.to_owned(), fields.clone()));
            }
            Value::Object(fields) => {
                for (key, value) in fields {
                    self.add(&joined(name, key), value);
                }
            }
            Value::Array(values) => {
                for (index, value) in values.iter().enumerate() {
                    self.add(&joined(name, &index.to_string()), value);
                }
            }
            Value::Number(number) => {
                self.numbers.insert(name.to_owned(), number.as_f64().unwrap_or(0.0));
            }
            Value::String(text) => drop(self.texts.insert(name.to_owned(), text.clone())),
            Value::Bool(truth) => drop(self.texts.insert(name.to_owned(), truth.to_string())),
            Value::Null => (),
        }
    }

    /// Returns true if the server was started within this time.
    fn is_new(&self, time: Duration) -> bool {
        self.numbers.get("uptime_seconds").is_some_and(|uptime| *uptime < time.as_secs_f64())
    }

    fn tables(&self, since: Option<(Duration, &Numbers)>) -> String {
        // A server that was started since has counted from zero.
        let since = since.filter(|(interval, _)| !self.is_new(*interval));
        let mut rows: Vec<Vec<String>> = Vec::new();
        for (name, text) in &self.texts {
            rows.push(vec![name.clone(), text.clone()]);
        }
        for (name, number) in &self.numbers {
            let mut row = vec![name.clone(), figure(*number)];
            if let Some((interval, before)) = since {
                let grown = number - before.get(name).copied().unwrap_or(0.0);
                row.push(format!("{}/s", figure(grown / interval.as_secs_f64())));
            }
            rows.push(row);
        }
        let mut text = aligned(&rows);
        for (group, histograms) in &self.stages {
            let columns = columns(histograms);
            let mut rows = vec![[vec![group.clone()], columns.clone()].concat()];
            for (name, fields) in histograms {
                let cells = columns.iter().map(|column| {
                    fields.get(column).and_then(Value::as_f64).map_or("-".to_owned(), figure)
                });
                rows.push([vec![name.clone()], cells.collect()].concat());
            }
            text.push('\n');
            text.push_str(&aligned(&rows));
        }
        text
    }
}

/// Returns true for a group of figures that contains a quantile.
fn is_histogram(fields: &Map<String, Value>) -> bool {
    fields.keys().any(|key| key.starts_with("p50") || key.starts_with("p99"))
        && fields.values().all(Value::is_number)
}

/// The columns of a table of histograms, in reading order.
fn columns(histograms: &[Row]) -> Vec<String> {
    const ORDER: [&str; 7] = ["count", "min", "mean", "p50", "p9", "p99", "max"];
    let mut columns: Vec<String> = Vec::new();
    for (_, fields) in histograms {
        columns.extend(
            fields.keys().filter(|key| !columns.contains(key)).cloned().collect::<Vec<_>>(),
        );
    }
    let rank = |name: &String| {
        let found = ORDER.iter().rposition(|start| name.starts_with(start));
        (found.unwrap_or(ORDER.len()), name.len())
    };
    columns.sort_by(|a, b| rank(a).cmp(&rank(b)).then_with(|| a.cmp(b)));
    columns
}

fn joined(name: &str, key: &str) -> String {
    if name.is_empty() { key.to_owned() } else { format!("{name}.{key}") }
}

/// Formats whole numbers without decimals, and all others with one decimal or, below 1, with two significant
/// digits, so that a slow rate is not shown as zero.
fn figure(number: f64) -> String {
    if number.fract() == 0.0 && number.abs() < 1e15 {
        return format!("{number:.0}");
    }
    let decimals = (1.0 - number.abs().log10().floor()).clamp(1.0, 9.0);
    format!("{number:.*}", decimals as usize)
}

/// Aligns names to the left and figures to the right. Escapes control characters: the server chooses the names.
fn aligned(rows: &[Vec<String>]) -> String {
    let escaped = |row: &Vec<String>| row.iter().map(|cell| on_one_line(cell)).collect();
    let rows: Vec<Vec<String>> = rows.iter().map(escaped).collect();
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.len()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in &rows {
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let cell = match column {
                0 => format!("{cell:<width$}"),
                _ => format!("  {cell:>width$}"),
            };
            text.push_str(&cell);
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn whatever_a_server_tells_is_shown() {
        let value = json!({
            "engine": "io_uring",
            "counters": { "requests": 30, "replays": 0 },
            "cores": [ { "lanes": 2 } ],
            "stages": {
                "T_server": {
                    "count": 5, "max_us": 9.25, "p50_us": 1.5, "mean_us": 2, "p999_us": 8,
                    "p99_us": 7,
                },
                "T_disk": {
                    "count": 0, "max_us": 0, "p50_us": 0, "mean_us": 0, "p999_us": 0, "p99_us": 0,
                },
            },
        });
        let found = Found::of(&value);
        let text = found.tables(None);
        assert!(text.contains("engine             io_uring\n"), "{text}");
        assert!(text.contains("counters.requests        30\n"), "{text}");
        assert!(text.contains("cores.0.lanes             2\n"), "{text}");
        let heading = "stages    count  mean_us  p50_us  p99_us  p999_us  max_us\n";
        assert!(text.contains(heading), "{text}");
        assert!(
            text.contains("T_server      5        2     1.5       7        8     9.2\n"),
            "{text}"
        );
        let before = Numbers::from([("counters.requests".to_owned(), 10.0)]);
        let text = found.tables(Some((Duration::from_secs(2), &before)));
        assert!(text.contains("30  10/s\n"), "{text}");
    }

    #[test]
    fn a_server_that_was_started_meanwhile_has_no_rates() {
        let before = Numbers::from([("requests".to_owned(), 10.0)]);
        for (uptime, is_same) in [(2.5, true), (1.5, false)] {
            let found = Found::of(&json!({ "requests": 14, "uptime_seconds": uptime }));
            let text = found.tables(Some((Duration::from_secs(2), &before)));
            assert_eq!(text.contains("/s"), is_same, "{text}");
        }
    }

    #[test]
    fn a_server_cannot_upset_a_terminal() {
        let upset = "a\u{1b}[2J\n";
        let found =
            Found::of(&json!({ upset: { upset: 1, "s": upset, "t": { "p50": 1, upset: 2 } } }));
        let text = found.tables(None);
        assert_eq!(text.matches("a\\u{1b}[2J\\n").count(), 6, "{text}");
        assert!(!text.contains('\u{1b}') && text.lines().count() == 5, "{text}");
    }

    #[test]
    fn small_figures_are_not_shown_as_zero() {
        for (number, shown) in [
            (0.0, "0"),
            (1e15, "1000000000000000.0"),
            (1234.56, "1234.6"),
            (9.25, "9.2"),
            (0.5, "0.50"),
            (-0.25, "-0.25"),
            (0.042, "0.042"),
            (1.0 / 86_400.0, "0.000012"),
            (1e-300, "0.000000000"),
        ] {
            assert_eq!(figure(number), shown);
        }
    }

    #[test]
    fn intervals_have_limits() {
        assert_eq!(seconds("2"), Ok(Duration::from_secs(2)));
        for wrong in ["0", "-1", "x", "NaN", "1e9"] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
    }
}
