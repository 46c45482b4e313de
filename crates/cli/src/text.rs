//! Formats names, sizes, modes and attributes for display.

use nix::unistd::{Group, User};
use serde_json::{Map, Value, json};
use std::cell::RefCell;
use std::collections::HashMap;
use towline_client::Attr;
use towline_wire::attr::{
    TYPE_BLOCK, TYPE_CHARACTER, TYPE_DIRECTORY, TYPE_FIFO, TYPE_SOCKET, TYPE_SYMLINK,
};

/// Returns the name unchanged or, for a terminal, with everything escaped that could upset it.
pub(crate) fn shown(name: &[u8], terminal: bool) -> Vec<u8> {
    if terminal { escaped(name).into_bytes() } else { name.to_vec() }
}

/// Returns the name as text, with control characters and bytes that are not UTF-8 escaped as in C.
pub(crate) fn escaped(name: &[u8]) -> String {
    let mut text = String::with_capacity(name.len());
    for chunk in name.utf8_chunks() {
        text.push_str(&on_one_line(&chunk.valid().replace('\\', "\\\\")));
        for byte in chunk.invalid() {
            text.push_str(&format!("\\x{byte:02x}"));
        }
    }
    text
}

/// Returns the text with control characters escaped as in C. Backslashes stay as they are, since messages
/// contain them.
pub(crate) fn on_one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '\n' => line.push_str("\\n"),
            '\t' => line.push_str("\\t"),
            c if c.is_control() => line.extend(c.escape_unicode()),
            c => line.push(c),
        }
    }
    line
}

/// Formats a number of bytes with a unit (powers of 1024) as `ls -h` does: rounded up, with one decimal below
/// ten.
pub(crate) fn human(bytes: u64) -> String {
    const UNITS: &[u8] = b"KMGTPE";
    if bytes < 1024 {
        return bytes.to_string();
    }
    let mut unit = 0;
    let mut scale = 1024_u64;
    // 1023.1 of one unit would be rounded up to 1024, so it must be shown as 1.0 of the next.
    while unit + 1 < UNITS.len() && bytes.div_ceil(scale) >= 1024 {
        unit += 1;
        scale <<= 10;
    }
    let tenths = (u128::from(bytes) * 10).div_ceil(u128::from(scale));
    let unit = char::from(UNITS[unit]);
    if tenths < 100 {
        format!("{}.{}{unit}", tenths / 10, tenths % 10)
    } else {
        format!("{}{unit}", bytes.div_ceil(scale))
    }
}

/// The ten characters that `ls -l` shows for a mode.
pub(crate) fn mode(mode: u32) -> String {
    let mut text = String::with_capacity(10);
    text.push(type_letter(mode));
    for (shift, special, letter) in [(6, 0o4000, 's'), (3, 0o2000, 's'), (0, 0o1000, 't')] {
        let bits = mode >> shift;
        text.push(if bits & 4 != 0 { 'r' } else { '-' });
        text.push(if bits & 2 != 0 { 'w' } else { '-' });
        text.push(match (mode & special != 0, bits & 1 != 0) {
            (true, true) => letter,
            (true, false) => letter.to_ascii_uppercase(),
            (false, true) => 'x',
            (false, false) => '-',
        });
    }
    text
}

fn type_letter(mode: u32) -> char {
    match mode & towline_wire::attr::TYPE_MASK {
        TYPE_DIRECTORY => 'd',
        TYPE_SYMLINK => 'l',
        TYPE_CHARACTER => 'c',
        TYPE_BLOCK => 'b',
        TYPE_FIFO => 'p',
        TYPE_SOCKET => 's',
        _ => '-',
    }
}

/// The file type as a word.
pub(crate) fn type_name(mode: u32) -> &'static str {
    match type_letter(mode) {
        'd' => "directory",
        'l' => "symbolic link",
        'c' => "character device",
        'b' => "block device",
        'p' => "fifo",
        's' => "socket",
        _ => "regular file",
    }
}

/// Major and minor of a device number.
pub(crate) fn device(rdev: u64) -> (u32, u32) {
    (rustix::fs::major(rdev), rustix::fs::minor(rdev))
}

/// Adds a name to a JSON object as text, and also in hexadecimal if it is not valid UTF-8.
pub(crate) fn json_name(object: &mut Map<String, Value>, key: &str, name: &[u8]) {
    object.insert(key.to_owned(), String::from_utf8_lossy(name).into());
    if std::str::from_utf8(name).is_err() {
        let hex: String = name.iter().map(|byte| format!("{byte:02x}")).collect();
        object.insert(format!("{key}_hex"), hex.into());
    }
}

/// Adds all attributes to a JSON object.
pub(crate) fn json_attr(object: &mut Map<String, Value>, attr: &Attr) {
    let time = |t: &towline_client::Timestamp| json!([t.seconds, t.nanoseconds]);
    let fields = json!({
        "type": type_name(attr.mode), "mode": format!("{:04o}", attr.mode & 0o7777),
        "size": attr.size, "blocks": attr.blocks, "inode": attr.inode, "links": attr.links,
        "uid": attr.uid, "gid": attr.gid, "rdev": attr.rdev, "block_bytes": attr.block_bytes,
        "change": attr.change, "accessed": time(&attr.accessed), "modified": time(&attr.modified),
        "changed": time(&attr.changed), "created": time(&attr.created),
    });
    if let Value::Object(fields) = fields {
        object.extend(fields);
    }
}

/// The names of users and groups in this machine's user database (nsswitch.conf(5)).
pub(crate) struct Owners {
    numeric: bool,
    users: Names,
    groups: Names,
}

/// What was looked up.
type Names = RefCell<HashMap<u32, String>>;

impl Owners {
    /// With `numeric` nothing is looked up, and numbers are shown.
    pub(crate) fn new(numeric: bool) -> Self {
        Self { numeric, users: Names::default(), groups: Names::default() }
    }

    /// Returns the name of a user, or else the number.
    pub(crate) fn user(&self, uid: u32) -> String {
        self.name(&self.users, uid, || Some(User::from_uid(uid.into()).ok()??.name))
    }

    /// Returns the name of a group, or else the number.
    pub(crate) fn group(&self, gid: u32) -> String {
        self.name(&self.groups, gid, || Some(Group::from_gid(gid.into()).ok()??.name))
    }

    fn name(&self, known: &Names, id: u32, look_up: impl FnOnce() -> Option<String>) -> String {
        if self.numeric {
            return id.to_string();
        }
        let mut known = known.borrow_mut();
        known.entry(id).or_insert_with(|| look_up().unwrap_or_else(|| id.to_string())).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_upset_a_terminal() {
        assert_eq!(escaped("plain é".as_bytes()), "plain é");
        assert_eq!(escaped(b"a\nb\x1b[2J\xff\\"), "a\\nb\\u{1b}[2J\\xff\\\\");
        assert_eq!(shown(b"\xff\n", false), b"\xff\n");
    }

    #[test]
    fn sizes_are_rounded_up() {
        for (bytes, text) in [
            (0, "0"),
            (1023, "1023"),
            (1024, "1.0K"),
            (1025, "1.1K"),
            (10 * 1024, "10K"),
            (10 * 1024 + 1, "11K"),
            (1024 * 1024 - 1, "1.0M"),
            (1 << 30, "1.0G"),
            (u64::MAX, "16E"),
        ] {
            assert_eq!(human(bytes), text, "{bytes}");
        }
    }

    #[test]
    fn modes_look_as_in_ls() {
        for (bits, text) in [
            (0o100_644, "-rw-r--r--"),
            (0o041_777, "drwxrwxrwt"),
            (0o104_755, "-rwsr-xr-x"),
            (0o102_640, "-rw-r-S---"),
            (0o120_777, "lrwxrwxrwx"),
            (0o010_600, "prw-------"),
        ] {
            assert_eq!(mode(bits), text);
        }
    }

    #[test]
    fn owners_without_a_name_are_numbers() {
        let owners = Owners::new(false);
        assert_eq!((&*owners.user(0), &*owners.group(0)), ("root", "root"));
        assert_eq!(owners.user(3_000_000_000), "3000000000");
        assert_eq!(Owners::new(true).user(0), "0");
    }
}
