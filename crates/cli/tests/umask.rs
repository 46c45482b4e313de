//! A server within the program does not affect the programs that it starts, and knows who they are.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

const TOWLINE: &str = env!("CARGO_BIN_EXE_towline");

/// Creates a file and directories from programs of a run, with umask 027 and then 077.
fn make_below(served: &Path) {
    let script = "umask 027; exec \"$0\" run --serve \"$1\" --at /d -- \
                  sh -c 'echo x > /d/f; mkdir /d/d; umask 077; mkdir /d/later'";
    let run = Command::new("sh").args(["-c", script, TOWLINE]).arg(served).status().unwrap();
    assert!(run.success());
}

/// In a directory with a default access control list, that list alone counts, as locally.
#[test]
fn a_umask_does_not_count_where_access_control_lists_are_handed_down() {
    // Entries of the owner, the user 1234, the group, the mask and others: tag, permissions, number.
    let entries = [
        (1_u16, 7_u16, u32::MAX),
        (2, 7, 1234),
        (4, 5, u32::MAX),
        (16, 7, u32::MAX),
        (32, 5, u32::MAX),
    ];
    let mut list = 2_u32.to_le_bytes().to_vec();
    for (tag, rights, number) in entries {
        list.extend(tag.to_le_bytes().into_iter().chain(rights.to_le_bytes()));
        list.extend(number.to_le_bytes());
    }
    let served = tempfile::tempdir().unwrap();
    let flags = rustix::fs::XattrFlags::empty();
    if rustix::fs::setxattr(served.path(), "system.posix_acl_default", &list, flags).is_err() {
        return println!("SKIPPED: no access control lists here");
    }
    make_below(served.path());
    let mode = |name: &str| {
        std::fs::metadata(served.path().join(name)).unwrap().permissions().mode() & 0o777
    };
    assert_eq!((mode("f"), mode("d"), mode("later")), (0o664, 0o775, 0o775));
}

#[test]
fn programs_keep_their_umask_beside_an_embedded_server() {
    let served = tempfile::tempdir().unwrap();
    make_below(served.path());
    let mode = |name: &str| {
        std::fs::metadata(served.path().join(name)).unwrap().permissions().mode() & 0o777
    };
    assert_eq!((mode("f"), mode("d"), mode("later")), (0o640, 0o750, 0o700));
}

/// Its first connection is made as the other user, and the server accepts no other identity on it.
#[test]
fn a_process_that_was_another_user_is_root_again() {
    let served = tempfile::tempdir().unwrap();
    if std::fs::metadata(served.path()).unwrap().uid() != 0 {
        return println!("SKIPPED: needs root");
    }
    std::fs::set_permissions(served.path(), Permissions::from_mode(0o755)).unwrap();
    std::fs::write(served.path().join("f"), "text").unwrap();
    std::fs::set_permissions(served.path().join("f"), Permissions::from_mode(0o600)).unwrap();
    let script = "$> = 65534; print open(F, '<', '/d/f') ? 1 : 0; \
                  $> = 0; open(F, '<', '/d/f') or die \"$!\"; print <F>";
    let output = Command::new(TOWLINE)
        .args(["run", "--serve"])
        .arg(served.path())
        .args(["--at", "/d", "--", "perl", "-e", script])
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "0text", "{output:?}");
}
