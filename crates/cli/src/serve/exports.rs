//! The grammar of exports and sizes on the command line and in the configuration file.

use std::path::PathBuf;
use towline_server::{Export, ExportKind};

/// `NAME=PATH[:ro]`.
pub(crate) fn parse_directory(text: &str) -> Result<Export, String> {
    let (name, path, read_only) = parse(text)?;
    if path.is_empty() {
        return Err("no path after \"=\"".into());
    }
    Ok(Export { name, kind: ExportKind::Directory(PathBuf::from(path)), read_only })
}

/// `NAME=SIZE[:ro]`.
pub(crate) fn parse_memory(text: &str) -> Result<Export, String> {
    let (name, size, read_only) = parse(text)?;
    Ok(Export { name, kind: ExportKind::Memory(parse_bytes(&size)?), read_only })
}

/// Splits off the name and the options, and undoes the escapes of what is between.
fn parse(text: &str) -> Result<(String, String, bool), String> {
    let (name, rest) = text.split_once('=').ok_or("expected NAME=...")?;
    let mut parts = vec![String::new()];
    let mut characters = rest.chars();
    while let Some(character) = characters.next() {
        match character {
            ':' => parts.push(String::new()),
            '\\' => {
                let escaped = characters.next().ok_or("backslash at the end")?;
                parts.last_mut().ok_or("no value")?.push(escaped);
            }
            other => parts.last_mut().ok_or("no value")?.push(other),
        }
    }
    let value = parts.remove(0);
    let mut read_only = false;
    for option in &parts {
        match option.as_str() {
            "ro" => read_only = true,
            "rw" => read_only = false,
            other => {
                return Err(format!(
                    "unknown option \":{other}\" (a colon in a path is written \"\\:\")"
                ));
            }
        }
    }
    Ok((name.to_owned(), value, read_only))
}

/// A number of bytes: digits and perhaps K, M, G or T (powers of 1024).
pub(crate) fn parse_bytes(text: &str) -> Result<u64, String> {
    let wrong =
        || format!("\"{text}\" is no size; expected digits and perhaps K, M, G or T, such as 2G");
    let (digits, factor) = match text.char_indices().last() {
        Some((at, 'k' | 'K')) => (&text[..at], 1u64 << 10),
        Some((at, 'm' | 'M')) => (&text[..at], 1 << 20),
        Some((at, 'g' | 'G')) => (&text[..at], 1 << 30),
        Some((at, 't' | 'T')) => (&text[..at], 1 << 40),
        _ => (text, 1),
    };
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    number.checked_mul(factor).filter(|bytes| *bytes > 0).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exports_are_read() {
        let export = parse_directory("a=/srv/x\\:y:ro").unwrap();
        assert_eq!(
            export,
            Export {
                name: "a".into(),
                kind: ExportKind::Directory("/srv/x:y".into()),
                read_only: true
            }
        );
        assert_eq!(parse_memory("m=2G").unwrap().kind, ExportKind::Memory(2 << 30));
        for bad in ["a", "a=", "a=/x:zz", "a=/x\\"] {
            assert!(parse_directory(bad).is_err(), "{bad}");
        }
        for bad in ["", "G", "0", "-1", "1X", "99999999999T"] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
    }
}
