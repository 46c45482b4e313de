//! The ways on which the bytes of files leave a server. Whatever the way, the bytes are right; that it is the one
//! meant, only the counters tell.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod common;

use common::{CREATE, counter_in, pattern, setup};
use towline_client::{Client, LinkKind, Options};
use towline_server::EngineWish;

const KIB: usize = 1024;

/// More than messages and statistics have besides the bytes of a file.
const BESIDES: u64 = 24 << 10;

/// The bytes that have been copied to be sent, sent from pages of files, and lent.
fn ways(client: &Client) -> [u64; 3] {
    // Its core has counted everything that it has sent to this client before.
    let told = client.statistics().unwrap();
    ["bytes_sent_copied", "bytes_sent_file", "bytes_lent"].map(|name| counter_in(&told, name))
}

/// Returns the ways of the bytes that a read gets, which are to be these.
fn moved(client: &Client, data: &[u8], read: impl FnOnce(&mut [u8]) -> usize) -> [u64; 3] {
    let mut buffer = vec![0; data.len()];
    let before = ways(client);
    assert_eq!(read(&mut buffer), data.len());
    let after = ways(client);
    assert!(buffer == data, "{} bytes", data.len());
    [0, 1, 2].map(|way| after[way] - before[way])
}

#[test]
fn each_read_leaves_on_the_way_meant() {
    let setup = setup(EngineWish::Automatic);
    for transport in &setup.transports {
        let client = Client::connect(transport, Options::default()).unwrap();
        for export in ["dir", "mem"] {
            let root = client.attach(export.as_bytes()).unwrap();
            // Those from 32 KiB on refer to pages.
            for length in [4 * KIB, 16 * KIB, 28 * KIB, 32 * KIB, 64 * KIB, 1024 * KIB, 4096 * KIB]
            {
                let data = pattern(length, length as u8);
                root.write_path(b"file", CREATE, 0o600, &data).unwrap();
                let all = length as u64;
                let is_large = length >= 32 * KIB;
                let is_shared = client.link_kind() == LinkKind::Shm;
                let file = if is_large && !is_shared { all } else { 0 };
                let lent = if is_large && is_shared && export == "mem" { all } else { 0 };
                let opened = root.open(b"file", 0, 0).unwrap();
                let by_name = |buffer: &mut [u8]| root.read_path(b"file", 0, buffer).unwrap();
                let open = |buffer: &mut [u8]| opened.read_at(buffer, 0).unwrap();
                for (how, [copied, by_file, by_loan]) in [
                    ("by name", moved(&client, &data, by_name)),
                    ("open", moved(&client, &data, open)),
                ] {
                    let what = format!("{length} bytes of {export}, {how}, over {transport:?}");
                    assert_eq!(by_loan, lent, "{what}");
                    // The little that a full socket leaves of a block of memory is copied.
                    assert!((file / 2..=file).contains(&by_file), "{what}: {by_file} by reference");
                    let rest = all - by_file - by_loan;
                    assert!((rest..rest + BESIDES).contains(&copied), "{what}: {copied} copied");
                }
            }
        }
    }
}
