//! A server inside the program changes nothing for the programs that it starts.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

#[test]
fn programs_keep_their_umask_beside_an_embedded_server() {
    let served = tempfile::tempdir().unwrap();
    let script = "umask 027; towline=$1; dir=$2; \
                  exec $towline run --serve $dir --at /d -- sh -c 'echo x > /d/f; mkdir /d/d'";
    let status = Command::new("sh")
        .args(["-c", script, "sh", env!("CARGO_BIN_EXE_towline"), served.path().to_str().unwrap()])
        .status()
        .unwrap();
    assert!(status.success());
    let mode = |name: &str| {
        std::fs::metadata(served.path().join(name)).unwrap().permissions().mode() & 0o777
    };
    assert_eq!((mode("f"), mode("d")), (0o640, 0o750));
}
