//! Compares the two trees at the end.

use crate::said::{Said, Shown};
use rustix::fs::AtFlags;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use towline_client::File;

/// Bytes read at once.
const PIECE: usize = 1 << 20;

/// Compares names, attributes, contents, links and extended attributes of everything in both.
pub(crate) fn compare(local: &Path, remote: &File) -> Result<(), String> {
    let wrong = |what: &str, ours: &dyn std::fmt::Debug, theirs: &dyn std::fmt::Debug| {
        Err(format!("{what} in {}\n  ours:   {ours:?}\n  theirs: {theirs:?}", local.display()))
    };
    let mut theirs: Vec<Vec<u8>> = std::fs::read_dir(local)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_vec())
        .collect();
    theirs.sort_unstable();
    let entries = remote.list_all(true).map_err(|e| format!("listing: {e}"))?;
    let mut ours: Vec<Vec<u8>> = entries.iter().map(|entry| entry.name.clone()).collect();
    ours.sort_unstable();
    if ours != theirs {
        return wrong("names", &ours, &theirs);
    }
    for entry in &entries {
        let path = local.join(std::ffi::OsStr::from_bytes(&entry.name));
        let shown = path.display();
        let attr = remote.stat_path(&entry.name, false).map_err(|e| format!("{shown}: {e}"))?;
        let listed = entry.attr.ok_or_else(|| format!("{shown}: listed without attributes"))?;
        let stat = rustix::fs::statat(rustix::fs::CWD, &path, AtFlags::SYMLINK_NOFOLLOW).unwrap();
        let theirs = Shown::of_stat(&stat);
        for ours in [Shown::of(&attr), Shown::of(&listed)] {
            if ours != theirs {
                return Err(format!("{shown}\n  ours:   {ours:?}\n  theirs: {theirs:?}"));
            }
        }
        let ours = remote.list_xattrs(&entry.name, false).map_err(|e| format!("{shown}: {e}"))?;
        let ours = Said::of_xattrs(ours.into_iter());
        let mut list = vec![0; 65536];
        let count = rustix::fs::llistxattr(&path, &mut list).unwrap_or(0);
        let names = list[..count].split(|byte| *byte == 0).map(<[u8]>::to_vec);
        if ours != Said::of_xattrs(names) {
            return wrong("extended attributes", &ours, &&list[..count]);
        }
        if attr.is_symlink() {
            let ours = remote.read_link(&entry.name).map_err(|e| format!("{shown}: {e}"))?;
            let theirs = std::fs::read_link(&path).unwrap().into_os_string().into_vec();
            if ours != theirs {
                return wrong("link", &ours, &theirs);
            }
        } else if attr.is_directory() {
            let below = remote.open(&entry.name, 0, 0).map_err(|e| format!("{shown}: {e}"))?;
            compare(&path, &below)?;
        } else if attr.is_file() {
            contents(&path, &remote.open(&entry.name, 0, 0).map_err(|e| format!("{shown}: {e}"))?)?;
        }
    }
    Ok(())
}

fn contents(local: &Path, remote: &File) -> Result<(), String> {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::open(local).unwrap();
    let (mut ours, mut theirs) = (vec![0; PIECE], vec![0; PIECE]);
    let mut offset = 0;
    loop {
        let shown = local.display();
        let count = remote.read_at(&mut ours, offset).map_err(|e| format!("{shown}: {e}"))?;
        let expected = file.read_at(&mut theirs, offset).unwrap();
        if ours[..count] != theirs[..expected] {
            let same = ours.iter().zip(&theirs).take_while(|(a, b)| a == b).count();
            return Err(format!(
                "{shown}: {count} and {expected} bytes at {offset} differ from {} on",
                offset + same as u64
            ));
        }
        if count == 0 {
            return Ok(());
        }
        offset += count as u64;
    }
}
