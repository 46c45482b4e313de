//! The configuration file of a server.

use super::exports::{self, parse_bytes};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::path::PathBuf;
use towline_net::address::Address;
use towline_server::{DiskExport, Export, ExportKind, RateLimit};

/// Event loops to choose from.
#[derive(clap::ValueEnum, Clone, Copy, Debug, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Engine {
    /// io_uring, or epoll if io_uring is not available.
    Auto,
    /// io_uring only; otherwise the server does not start.
    Uring,
    /// epoll.
    Epoll,
}

/// The contents of a configuration file.
#[derive(Default)]
pub(crate) struct FileSettings {
    pub(crate) exports: Vec<Export>,
    pub(crate) disks: Vec<DiskExport>,
    pub(crate) listen: Vec<Address>,
    /// Text, as `metrics`: this module is fuzzed without those that read them.
    pub(crate) nbd: Vec<String>,
    pub(crate) buffer_limit: Option<u64>,
    pub(crate) fragment: Option<u64>,
    pub(crate) cores: Option<usize>,
    pub(crate) engine: Option<Engine>,
    pub(crate) spin_us: Option<u32>,
    pub(crate) identity: bool,
    pub(crate) no_root_squash: bool,
    pub(crate) insecure: bool,
    pub(crate) metrics: Option<String>,
    pub(crate) state: Option<PathBuf>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Raw {
    #[serde(default)]
    listen: Vec<String>,
    #[serde(default)]
    nbd: Vec<String>,
    buffer_limit: Option<String>,
    fragment: Option<String>,
    cores: Option<usize>,
    engine: Option<Engine>,
    spin_us: Option<u32>,
    #[serde(default)]
    identity: bool,
    #[serde(default)]
    no_root_squash: bool,
    #[serde(default)]
    insecure: bool,
    metrics: Option<String>,
    state: Option<PathBuf>,
    #[serde(default)]
    export: BTreeMap<String, RawExport>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct RawExport {
    dir: Option<PathBuf>,
    mem: Option<String>,
    disk: Option<String>,
    /// Limit on the requests of each client per second.
    iops: Option<NonZeroU64>,
    bandwidth: Option<String>,
    #[serde(default)]
    read_only: bool,
}

/// Parses the text of a configuration file.
pub(crate) fn parse(text: &str) -> Result<FileSettings, String> {
    let raw: Raw = toml::from_str(text).map_err(|error| placed(text, &error))?;
    let (mut exports, mut disks) = (Vec::new(), Vec::new());
    for (name, export) in raw.export {
        let wrong = |what| format!("export \"{name}\": {what}");
        let operations = export.iops.map_or(0, NonZeroU64::get);
        let mut limit = RateLimit { operations, bytes: 0 };
        if let Some(bytes) = &export.bandwidth {
            limit.bytes = parse_bytes(bytes).map_err(wrong)?;
        }
        let kind = match (export.dir, export.mem, export.disk) {
            (Some(path), None, None) => ExportKind::Directory(path),
            (None, Some(size), None) => ExportKind::Memory(parse_bytes(&size).map_err(wrong)?),
            (None, None, Some(disk)) => {
                let mut disk = exports::disk(&name, disk.as_bytes()).map_err(wrong)?;
                disk.read_only |= export.read_only;
                if limit.operations > 0 {
                    disk.limit.operations = limit.operations;
                }
                if limit.bytes > 0 {
                    disk.limit.bytes = limit.bytes;
                }
                disks.push(disk);
                continue;
            }
            _ => return Err(wrong("expected one of dir, mem and disk".to_owned())),
        };
        exports.push(Export { name, kind, read_only: export.read_only, limit });
    }
    Ok(FileSettings {
        exports,
        disks,
        nbd: raw.nbd,
        listen: raw.listen.iter().map(|a| Address::parse(a)).collect::<Result<_, _>>()?,
        buffer_limit: size_of("buffer-limit", raw.buffer_limit.as_deref())?,
        fragment: size_of("fragment", raw.fragment.as_deref())?,
        cores: raw.cores,
        engine: raw.engine,
        spin_us: raw.spin_us,
        identity: raw.identity,
        no_root_squash: raw.no_root_squash,
        insecure: raw.insecure,
        metrics: raw.metrics,
        state: raw.state,
    })
}

/// Returns the message with its place, all on one line, as logs need it.
fn placed(text: &str, error: &toml::de::Error) -> String {
    let message = error.message().lines().collect::<Vec<_>>().join(", ");
    let Some(before) = error.span().and_then(|span| text.get(..span.start)) else {
        return message;
    };
    let line = before.matches('\n').count() + 1;
    let column = before.chars().rev().take_while(|character| *character != '\n').count() + 1;
    format!("line {line}, column {column}: {message}")
}

fn size_of(key: &str, text: Option<&str>) -> Result<Option<u64>, String> {
    text.map(parse_bytes).transpose().map_err(|error| format!("{key}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::parse;
    use std::path::Path;
    use towline_server::{CacheMode, DiskKind};

    #[test]
    fn a_file_says_all_that_flags_say() {
        let read = parse(
            "nbd = [\"127.0.0.1:2\"]\nlisten = [\"tcp://127.0.0.1:1\"]\nbuffer-limit = \"1M\"\ncores = 3\nengine = \"epoll\"\nspin-us = 0\n\
             identity = true\nno-root-squash = true\ninsecure = true\nmetrics = \"127.0.0.1:9\"\nstate = \"/s\"\n\
             [export.a]\ndir = \"/a\"\nread-only = true\n[export.b]\nmem = \"2K\"\niops = 5\n\
             [export.d]\ndisk = \"/d:direct\"\niops = 100\nbandwidth = \"1M\"\n",
        )
        .unwrap();
        assert_eq!(
            (read.exports.len(), read.cores, read.buffer_limit, read.spin_us),
            (2, Some(3), Some(1 << 20), Some(0))
        );
        assert_eq!(read.exports[1].limit.operations, 5);
        assert!(read.disks.len() == 1 && read.nbd.len() == 1);
        assert_eq!((read.disks[0].limit.operations, read.disks[0].limit.bytes), (100, 1 << 20));
        assert!(read.identity && read.no_root_squash && read.insecure && read.metrics.is_some());
        assert_eq!(read.state.as_deref(), Some(Path::new("/s")));
        let named = parse("[export.\"a=b\"]\ndisk = \"/d=e\"\n").unwrap().disks.remove(0);
        let path = DiskKind::File("/d=e".into(), CacheMode::Cached);
        assert_eq!((named.name.as_str(), named.kind), ("a=b", path));
    }

    #[test]
    fn mistakes_are_named() {
        assert!(parse("buffer-limit = \"much\"").err().unwrap().contains("buffer-limit"));
        assert!(parse("listem = []").err().unwrap().contains("listem"));
        assert!(parse("[export.a]\nmem = \"0\"\n").err().unwrap().contains("\"a\""));
        assert!(parse("[export.a]\n").err().unwrap().contains("\"a\""));
    }

    #[test]
    fn mistakes_are_placed_on_one_line() {
        for (text, place) in [
            ("cores = 1\nspin-us = \"\u{e9}\", 2\n", "line 2, column 14: "),
            ("listem = []", "line 1, column 1: unknown field `listem`, expected one of "),
            ("\ncores = \"x\"", "line 2, column 9: invalid type: string \"x\", expected usize"),
            ("[export.a]\nmem = \"1M\"\n[export.a]\n", "line 3, column 9: duplicate key"),
            ("[export.a\n", "line 1, column 10: unclosed table"),
        ] {
            let said = parse(text).err().unwrap();
            assert!(said.starts_with(place) && !said.contains('\n'), "{said}");
        }
    }
}
