//! `towline bench disk` measures what it says it does.
#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

use serde_json::Value;
use std::collections::BTreeSet;
use std::process::Command;

fn bench(arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_towline"));
    let done = command.args(["bench", "disk"]).args(arguments).output().unwrap();
    let (out, err) =
        (String::from_utf8(done.stdout).unwrap(), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success(), "{arguments:?}: {err}");
    out
}

#[test]
fn the_experiments_of_the_paper() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let place = directory.path().to_str().unwrap();
    let (plot, json) = (format!("{place}/p.svg"), format!("{place}/p.json"));
    let text = bench(&[
        "--paper",
        "--dir",
        place,
        "--span",
        "2M",
        "--sizes",
        "64K,1M",
        "--outstanding",
        "1,2",
        "--rounds",
        "1",
        "--secs",
        "0.01",
        "--plot",
        &plot,
        "--json",
        &json,
    ]);
    assert!(text.contains("Plain disk, reads, 2 outstanding"), "{text}");
    let figures: Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    let points = figures["points"].as_array().unwrap();
    let name = |point: &Value, what: &str| point[what].as_str().unwrap().to_owned();
    let of = |disk: &str, writes: bool| -> BTreeSet<String> {
        let is = |p: &&Value| name(p, "disk") == disk && p["writes"] == writes;
        points.iter().filter(is).map(|point| name(point, "system")).collect()
    };
    let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    let reads: BTreeSet<String> =
        set(&["staged", "sendfile", "direct", "synchronised", "streams", "network"]);
    assert_eq!(of("stripe", false), reads);
    let more: BTreeSet<String> = set(&["disk", "formula"]);
    assert_eq!(of("plain", false), &reads | &more);
    assert_eq!(of("plain", true), set(&["staged", "synchronised", "disk"]));
    assert!(points.iter().all(|p| p["bytes_per_s"].as_f64().unwrap() > 0.0), "{points:?}");
    // What a read waits for is no longer than the read.
    for point in points.iter().filter(|point| point["first_data_us"].is_f64()) {
        assert!(point["first_data_us"].as_f64() <= point["request_us"].as_f64(), "{point}");
    }
    let rows = figures["interference"].as_array().unwrap().len();
    assert!(rows == 3 || (rows == 0 && std::thread::available_parallelism().unwrap().get() == 1));
    let svg = std::fs::read_to_string(plot).unwrap();
    assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
    assert!(svg.contains("Stripe disk, writes, 2 outstanding"));
    let left: Vec<_> = std::fs::read_dir(place).unwrap().collect();
    assert_eq!(left.len(), 2, "test files are gone: {left:?}");
}

#[test]
fn what_cannot_be_measured_is_refused() {
    let refused = |arguments: &[&str], expected: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_towline"));
        let done = command.args(["bench", "disk"]).args(arguments).output().unwrap();
        let text = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(!done.status.success() && text.contains(expected), "{arguments:?}: {text}");
    };
    refused(&[], "--paper");
    refused(&["--paper", "--sizes", "5K"], "--sizes");
    refused(&["--paper", "--dir", "/no/such/place"], "/no/such/place");
    refused(&["--nbd", "unix:///no/such/socket"], "/no/such/socket");
    refused(&["--nbd", "nowhere"], "HOST:PORT");
}
