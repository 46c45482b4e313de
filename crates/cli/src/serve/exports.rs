//! Parses exports and sizes on the command line and in the configuration file. Paths are bytes; everything
//! else is text.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::time::Duration;
use towline_server::{CacheMode, DataPath, DiskExport, DiskKind, Export, ExportKind};

/// Parses `NAME=PATH[:ro][:iops=N][:bandwidth=SIZE]`.
pub(crate) fn parse_directory(text: impl AsRef<OsStr>) -> Result<Export, String> {
    parse(text.as_ref(), |path| match path.is_empty() {
        true => Err("no path after \"=\"".into()),
        false => Ok(ExportKind::Directory(PathBuf::from(path))),
    })
}

/// Parses `NAME=SIZE[:ro][:iops=N][:bandwidth=SIZE]`.
pub(crate) fn parse_memory(text: &str) -> Result<Export, String> {
    parse(text.as_ref(), |size| Ok(ExportKind::Memory(parse_bytes(&size.to_string_lossy())?)))
}

/// Parses `NAME=PATH[:ro][:direct|:cached|:read-direct][:staged|:sendfile|:zero-copy][:serial]
/// [:iops=N][:bandwidth=SIZE][:block=SIZE][:preferred=SIZE][:depth=N][:default]`.
/// Instead of the path there may be `mem:SIZE`, `stripe:CHUNK:PATH,PATH...` or
/// `delay:SIZE:MICROSECONDS:BYTES` (bytes per second).
pub(crate) fn parse_disk(text: impl AsRef<OsStr>) -> Result<DiskExport, String> {
    let (name, value) = named(text.as_ref())?;
    disk(name, value)
}

/// Parses what is behind `NAME=` in the text that [`parse_disk`] takes.
pub(crate) fn disk(name: &str, value: &[u8]) -> Result<DiskExport, String> {
    let mut parts = split(value)?.into_iter();
    let first = parts.next().unwrap_or_default();
    let mut need = |what: &str| {
        let missing = || format!("no {what} after \"{}:\"", first.display());
        parts.next().ok_or_else(missing)
    };
    let kind = match first.to_str() {
        Some("") => return Err("no path after \"=\"".into()),
        Some("mem") => DiskKind::Memory(parse_bytes(&need("size")?.to_string_lossy())?),
        Some("stripe") => {
            let chunk = parse_bytes(&need("chunk size")?.to_string_lossy())?;
            let paths = need("paths")?;
            let paths = paths.as_bytes().split(|byte| *byte == b',');
            let paths = paths.map(|path| PathBuf::from(OsStr::from_bytes(path))).collect();
            DiskKind::Stripe(chunk, paths, CacheMode::default())
        }
        Some("delay") => {
            let size = parse_bytes(&need("size")?.to_string_lossy())?;
            let latency = need("latency")?.to_string_lossy().into_owned();
            let latency = digits(&latency)
                .ok_or_else(|| format!("\"{latency}\" is not a number of microseconds"))?;
            let bandwidth = need("bandwidth")?.to_string_lossy().into_owned();
            let bandwidth = if bandwidth == "0" { 0 } else { parse_bytes(&bandwidth)? };
            DiskKind::Delay(size, Duration::from_micros(latency), bandwidth)
        }
        _ => DiskKind::File(PathBuf::from(&first), CacheMode::default()),
    };
    let options = parts.map(option).collect::<Result<Vec<_>, _>>()?;
    let mut disk = DiskExport::new(name, kind);
    let modes = |option: &&String| matches!(option.as_str(), "cached" | "direct" | "read-direct");
    if let Some(second) = options.iter().filter(modes).nth(1) {
        return Err(format!("option \":{second}\": only one mode can be given"));
    }
    for option in options {
        match option.split_once('=') {
            Some(("iops", amount)) => disk.limit.operations = parse_count(amount)?,
            Some(("bandwidth", amount)) => disk.limit.bytes = parse_bytes(amount)?,
            Some(("block", amount)) => disk.shape.block = parse_block(amount)?,
            Some(("preferred", amount)) => disk.shape.preferred = parse_block(amount)?,
            Some(("depth", amount)) => disk.shape.depth = parse_depth(amount)?,
            Some(_) => return Err(unknown(&option)),
            None => set(&mut disk, &option)?,
        }
    }
    disk.shape.check_for_any().map_err(|error| error.to_string())?;
    Ok(disk)
}

/// Applies an option that consists of one word.
fn set(disk: &mut DiskExport, option: &str) -> Result<(), String> {
    let mode = match option {
        "ro" => {
            disk.read_only = true;
            return Ok(());
        }
        "default" => {
            disk.is_default = true;
            return Ok(());
        }
        "serial" => {
            disk.delivery.serial = true;
            return Ok(());
        }
        "staged" | "sendfile" | "zero-copy" if disk.delivery.path != DataPath::Auto => {
            return Err(format!("option \":{option}\": only one data path can be given"));
        }
        "staged" => {
            disk.delivery.path = DataPath::Staged;
            return Ok(());
        }
        "sendfile" => {
            disk.delivery.path = DataPath::Sendfile;
            return Ok(());
        }
        "zero-copy" => {
            disk.delivery.path = DataPath::ZeroCopy;
            return Ok(());
        }
        "cached" => CacheMode::Cached,
        "direct" => CacheMode::Direct,
        "read-direct" => CacheMode::ReadDirect,
        other => return Err(unknown(other)),
    };
    match &mut disk.kind {
        DiskKind::File(_, place) | DiskKind::Stripe(_, _, place) => *place = mode,
        _ => return Err(format!("option \":{option}\" requires a file or device")),
    }
    Ok(())
}

fn unknown(option: &str) -> String {
    format!("unknown option \":{option}\" (a colon in a path is written \"\\:\")")
}

/// Converts an option to text; it is not a path.
fn option(part: OsString) -> Result<String, String> {
    part.into_string().map_err(|part| unknown(&part.to_string_lossy()))
}

/// Splits off the name.
fn named(text: &OsStr) -> Result<(&str, &[u8]), String> {
    let text = text.as_bytes();
    let equals = text.iter().position(|byte| *byte == b'=').ok_or("expected NAME=...")?;
    let name = std::str::from_utf8(&text[..equals]).map_err(|_| "names of exports are UTF-8")?;
    if name.is_empty() {
        return Err("no name before \"=\"".into());
    }
    Ok((name, &text[equals + 1..]))
}

/// Splits a value at colons and removes escapes.
fn split(value: &[u8]) -> Result<Vec<OsString>, String> {
    let (mut parts, mut part) = (Vec::new(), Vec::new());
    let mut bytes = value.iter().copied();
    while let Some(byte) = bytes.next() {
        match byte {
            b':' => parts.push(OsString::from_vec(std::mem::take(&mut part))),
            b'\\' => part.push(bytes.next().ok_or("backslash at the end")?),
            other => part.push(other),
        }
    }
    parts.push(OsString::from_vec(part));
    Ok(parts)
}

/// Parses an export of files; `kind` parses its value.
fn parse(
    text: &OsStr,
    kind: impl Fn(&OsStr) -> Result<ExportKind, String>,
) -> Result<Export, String> {
    let (name, value) = named(text)?;
    let mut parts = split(value)?;
    let value = parts.remove(0);
    let mut export = Export::new(name, kind(&value)?);
    export.check_name().map_err(|what| format!("export \"{name}\": {what}"))?;
    for part in parts {
        let option = option(part)?;
        match option.split_once('=') {
            None if option == "ro" => export.read_only = true,
            Some(("iops", amount)) => export.limit.operations = parse_count(amount)?,
            Some(("bandwidth", amount)) => export.limit.bytes = parse_bytes(amount)?,
            _ => return Err(unknown(&option)),
        }
    }
    Ok(export)
}

/// Parses a number of requests per second, which must not be zero.
fn parse_count(text: &str) -> Result<u64, String> {
    let number = digits(text).filter(|number| *number > 0);
    number.ok_or_else(|| format!("\"{text}\" is not a number of requests per second"))
}

/// Parses a block length. The disk decides whether it is possible.
fn parse_block(text: &str) -> Result<u32, String> {
    let bytes = parse_bytes(text)?;
    u32::try_from(bytes).map_err(|_| format!("\"{text}\" is too large for a block"))
}

/// Parses a number of simultaneous requests, which must not be zero.
fn parse_depth(text: &str) -> Result<u32, String> {
    let number = digits(text).and_then(|number| u32::try_from(number).ok());
    let number = number.filter(|number| *number > 0);
    number.ok_or_else(|| format!("\"{text}\" is not a number of requests"))
}

/// Parses a number without a sign, which `str::parse` would take.
fn digits(text: &str) -> Option<u64> {
    text.parse().ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Parses a number of bytes: digits and an optional K, M, G or T (powers of 1024).
pub(crate) fn parse_bytes(text: &str) -> Result<u64, String> {
    let wrong = || {
        format!(
            "\"{text}\" is not a size; expected digits and an optional K, M, G or T, such as 2G"
        )
    };
    let (count, factor) = match text.char_indices().last() {
        Some((at, 'k' | 'K')) => (&text[..at], 1u64 << 10),
        Some((at, 'm' | 'M')) => (&text[..at], 1 << 20),
        Some((at, 'g' | 'G')) => (&text[..at], 1 << 30),
        Some((at, 't' | 'T')) => (&text[..at], 1 << 40),
        _ => (text, 1),
    };
    let number = digits(count).ok_or_else(wrong)?;
    if number == 0 {
        return Err(format!("\"{text}\" is nothing; expected at least 1 byte"));
    }
    number.checked_mul(factor).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;
    use towline_server::{Delivery, RateLimit, Shape};

    #[test]
    fn disks_are_read() {
        let disk = |text| parse_disk(text).unwrap();
        let file = |mode| DiskKind::File("/a:b".into(), mode);
        assert_eq!(disk("d=/a\\:b").kind, file(CacheMode::Cached));
        assert_eq!(disk("d=/a\\:b:direct").kind, file(CacheMode::Direct));
        let both = disk("d=/a\\:b:ro:read-direct");
        assert!(both.read_only && both.kind == file(CacheMode::ReadDirect));
        let serial = disk("d=/a\\:b:direct:zero-copy:serial");
        assert_eq!(serial.kind, file(CacheMode::Direct));
        assert_eq!(serial.delivery, Delivery { path: DataPath::ZeroCopy, serial: true });
        assert_eq!(disk("d=mem:4G:staged").delivery.path, DataPath::Staged);
        let limited = disk("d=/a\\:b:iops=500:direct:bandwidth=20M");
        assert_eq!(limited.limit, RateLimit { operations: 500, bytes: 20 << 20 });
        assert_eq!(limited.kind, file(CacheMode::Direct));
        let shaped = disk("d=/a\\:b:block=4K:preferred=64K:depth=16:default");
        assert_eq!(shaped.shape, Shape { block: 4096, preferred: 65536, depth: 16 });
        assert!(shaped.is_default && !disk("d=/a").is_default);
        for bad in ["d=/a:block=0", "d=/a:block=3", "d=/a:block=8G", "d=/a:preferred=100"] {
            assert!(parse_disk(bad).is_err(), "{bad}");
        }
        for bad in ["d=/a:depth=0", "d=/a:depth", "d=/a:depth=1025"] {
            assert!(parse_disk(bad).is_err(), "{bad}");
        }
        for bad in ["d=/a:iops=0", "d=/a:iops=x", "d=/a:bandwidth=0", "d=/a:speed=1"] {
            assert!(parse_disk(bad).is_err(), "{bad}");
        }
        assert_eq!(disk("d=mem:4G").kind, DiskKind::Memory(4 << 30));
        let paths = vec!["/a".into(), "/b".into()];
        let stripe = DiskKind::Stripe(65536, paths, CacheMode::Direct);
        assert_eq!(disk("d=stripe:64K:/a,/b:direct").kind, stripe);
        let delay = DiskKind::Delay(1 << 20, Duration::from_micros(50), 1 << 30);
        assert_eq!(disk("d=delay:1M:50:1G").kind, delay);
        for bad in [
            "d",
            "=/a",
            "d=",
            "d=mem",
            "d=mem:",
            "d=mem:1G:direct",
            "d=/x:zz",
            "d=/x:staged:sendfile",
            "d=/x:direct:cached",
            "d=stripe:64K",
        ] {
            assert!(parse_disk(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn exports_are_read() {
        let export = parse_directory("a=/srv/x\\:y:ro").unwrap();
        let expected = Export::new("a", ExportKind::Directory("/srv/x:y".into()));
        assert_eq!(export, Export { read_only: true, ..expected });
        // File names are bytes.
        let bytes = |bytes: &[u8]| OsStr::from_bytes(bytes).to_owned();
        let export = parse_directory(bytes(b"a=/\xff\\:\\\\\xc3:ro")).unwrap();
        assert_eq!(export.kind, ExportKind::Directory(bytes(b"/\xff:\\\xc3").into()));
        assert!(export.read_only);
        let stripe = parse_disk(bytes(b"d=stripe:64K:/\xff,/b")).unwrap().kind;
        let paths = vec![bytes(b"/\xff").into(), "/b".into()];
        assert_eq!(stripe, DiskKind::Stripe(65536, paths, CacheMode::Cached));
        assert!(parse_disk(bytes(b"d=/\xff:direct")).is_ok());
        for bad in [&b"\xff=/a"[..], b"a=/a:\xff", b"a=/a:iops=\xff"] {
            assert!(parse_directory(bytes(bad)).is_err() && parse_disk(bytes(bad)).is_err());
        }
        let limited = parse_memory("m=2G:iops=10:bandwidth=1M").unwrap();
        assert_eq!(limited.limit, RateLimit { operations: 10, bytes: 1 << 20 });
        assert_eq!(parse_memory("m=2G").unwrap().kind, ExportKind::Memory(2 << 30));
        for bad in
            ["a", "=/x", "a=", "a=/x:zz", "a=/x\\", "a=/x:iops=0", "a=/x:bandwidth", "a=/x:ro=1"]
        {
            assert!(parse_directory(bad).is_err(), "{bad}");
        }
        for bad in ["", "G", "0", "-1", "+1", "+1K", "1X", "99999999999T"] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
        for bad in ["d=/a:iops=+1", "d=/a:depth=+1", "d=delay:1M:+5:1G"] {
            assert!(parse_disk(bad).is_err(), "{bad}");
        }
    }
}
