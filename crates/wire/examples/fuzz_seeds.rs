//! Writes a few valid inputs for each fuzz target, from which the fuzzers start:
//! `fuzz_seeds DIRECTORY`.

use std::path::Path;
use towline_wire::codec::Field;
use towline_wire::entry::Entry;
use towline_wire::event::{self, Event};
use towline_wire::hello::{MAGIC, VERSION};
use towline_wire::request::{CURRENT, encode_compound, lock};
use towline_wire::{Attr, Header, Hello, Kind, Reply, Request, Timestamp, Welcome};

/// The handle of the first file that a session of epoch 1 opens.
const ROOT: u64 = 1 << 32;

/// Three bytes at offset 1, none at offset 2.
const PARTS: &[u8] = &[1, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

fn requests() -> Vec<Vec<Request<'static>>> {
    use Request::*;
    let now = Timestamp::NOW;
    vec![
        vec![Attach { name: b"m" }],
        vec![
            Open { base: ROOT, flags: 0o102, mode: 0o644, path: b"f" },
            Write { handle: CURRENT, offset: 5, length: 9, flags: 0 },
            Read { handle: CURRENT, offset: 0, length: 100 },
        ],
        vec![Write { handle: ROOT + 1, offset: 0, length: 70_000, flags: 1 }],
        vec![Stat { base: ROOT, flags: 1, path: b"f" }, Access { base: ROOT, mode: 7, path: b"f" }],
        vec![SetAttr {
            base: ROOT,
            flags: 0,
            valid: 31,
            mode: 0o600,
            uid: 1,
            gid: 2,
            size: 3,
            accessed: now,
            modified: Timestamp::new(4, 5),
            path: b"f",
        }],
        vec![
            MakeDir { base: ROOT, mode: 0o755, path: b"d" },
            Symlink { base: ROOT, path: b"d/s", target: b"../f" },
            ReadLink { base: ROOT, path: b"d/s" },
            MakeNode { base: ROOT, mode: 0o010_600, rdev: 0, path: b"d/n" },
            Link { base: ROOT, flags: 4, path: b"d/s", new_base: ROOT, new_path: b"g" },
            Rename { base: ROOT, flags: 2, path: b"g", new_base: ROOT, new_path: b"d" },
            Unlink { base: ROOT, flags: 0, path: b"d" },
        ],
        vec![
            SetXattr { base: ROOT, flags: 0, how: 1, path: b"f", name: b"user.a", value: b"v" },
            GetXattr { base: ROOT, flags: 0, path: b"f", name: b"user.a" },
            ListXattr { base: ROOT, flags: 0, path: b"f" },
            RemoveXattr { base: ROOT, flags: 0, path: b"f", name: b"user.a" },
        ],
        vec![
            Allocate { handle: ROOT + 1, mode: 3, offset: 4096, length: 8192 },
            Seek { handle: ROOT + 1, offset: 0, whence: 4 },
            PathOf { handle: ROOT + 1 },
            CopyRange {
                handle: ROOT + 1,
                offset: 0,
                new_handle: ROOT + 1,
                new_offset: 1 << 17,
                length: 1 << 16,
            },
            Sync { handle: ROOT + 1, kind: 1 },
            StatFs { handle: ROOT },
        ],
        vec![
            Lock {
                handle: ROOT + 1,
                owner: 0,
                family: lock::OPEN_FILE,
                kind: lock::EXCLUSIVE,
                wait: 1,
                start: 0,
                length: 10,
            },
            TestLock { handle: ROOT + 1, owner: 7, family: 0, kind: 0, start: 5, length: 0 },
            ProcessEnded { owner: 7 },
        ],
        vec![ReadDir { handle: ROOT, cookie: 0, length: 4096, attributes: 1 }],
        vec![ReadPath { base: ROOT, flags: 0, length: 4096, path: b"f" }],
        vec![WriteParts { handle: ROOT + 1, parts: PARTS }],
        vec![Inquire { what: 1 }],
        vec![Watch { handle: ROOT, mask: event::ALL }],
        vec![Bind { handle: ROOT + 1, bound: 1 }],
        vec![HandOver { session: 2, secret: 3, process: 7 }],
        vec![Unlink { base: ROOT, flags: 0, path: b"f" }],
        vec![Events { seen: 0 }],
        vec![Close { handle: ROOT + 1 }],
    ]
}

fn replies() -> Vec<u8> {
    let attr = Attr { mode: 0o100_644, size: 9, ..Attr::default() };
    let replies = [
        Reply::Done {},
        Reply::Opened { handle: ROOT, attr },
        Reply::Attributes { attr },
        Reply::Wrote { length: 3, offset: 4 },
        Reply::Bytes { value: b"value" },
        Reply::Listed { end: 1, length: 100 },
        Reply::Events { next: 5, lost: 1, length: 100 },
        Reply::Failed { errno: 2 },
    ];
    let mut bytes = Vec::new();
    replies.iter().for_each(|reply| reply.encode(&mut bytes));
    bytes
}

fn entries() -> Vec<u8> {
    let mut bytes = Vec::new();
    for (cookie, attr) in [(1, None), (2, Some(Attr::default()))] {
        Entry { cookie, inode: 7, file_type: 8, name: b"name", attr }.encode(&mut bytes);
    }
    bytes
}

fn events() -> Vec<u8> {
    let mut bytes = Vec::new();
    for (mask, cookie) in [(event::CREATE | event::ISDIR, 0), (event::MOVED_FROM, 9)] {
        Event { handle: ROOT, mask, cookie, name: b"name" }.encode(&mut bytes);
    }
    Event { handle: ROOT, mask: event::IGNORED, cookie: 0, name: b"" }.encode(&mut bytes);
    bytes
}

fn messages() -> Vec<u8> {
    let mut bytes = Vec::new();
    for (kind, body, payload) in [
        (Kind::Request, 20, 30),
        (Kind::Data, 0, 5000),
        (Kind::Reply, 9, 40_000),
        (Kind::Cancel, 0, 0),
        (Kind::Processor, 0, 0),
    ] {
        for slot in 0..2 {
            let mut header = Header::new(kind, slot, 1);
            (header.body_bytes, header.payload_bytes) = (body, payload);
            bytes.extend(header.to_bytes());
            bytes.extend((0..body + payload).map(|i| i as u8));
        }
    }
    bytes
}

/// Returns client flags and options of the NBD handshake.
fn nbd_options() -> Vec<u8> {
    let option = |number: u32, data: &[u8]| {
        let mut bytes = b"IHAVEOPT".to_vec();
        bytes.extend(number.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        bytes
    };
    let mut bytes = 3u32.to_be_bytes().to_vec();
    bytes.extend(option(3, b""));
    bytes.extend(option(8, b""));
    bytes.extend(option(10, b"\0\0\0\x01d\0\0\0\x01\0\0\0\x0fbase:allocation"));
    bytes.extend(option(7, b"\0\0\0\x01d\0\x01\0\x03"));
    bytes
}

/// Returns one NBD request of each kind.
fn nbd_requests() -> Vec<u8> {
    let mut bytes = vec![0];
    for (command, length) in [(0u16, 4096u32), (1, 512), (7, 65536), (4, 4096), (3, 0), (2, 0)] {
        bytes.extend(0x2560_9513u32.to_be_bytes());
        bytes.extend(0u16.to_be_bytes());
        bytes.extend(command.to_be_bytes());
        bytes.extend(9u64.to_be_bytes());
        bytes.extend(8192u64.to_be_bytes());
        bytes.extend(length.to_be_bytes());
        if command == 1 {
            bytes.extend([7; 512]);
        }
    }
    bytes
}

/// Returns what an NBD server may send to our client; the first byte says in which phase.
fn nbd_answers() -> Vec<Vec<u8>> {
    let answer = |option: u32, kind: u32, data: &[u8]| {
        let numbers = [option, kind, data.len() as u32].map(u32::to_be_bytes).concat();
        [&0x0003_e889_0455_65a9u64.to_be_bytes()[..], &numbers, data].concat()
    };
    let chunk = |flags: u16, kind: u16, cookie: u64, data: &[u8]| {
        let head = [&0x668e_33efu32.to_be_bytes()[..], &flags.to_be_bytes(), &kind.to_be_bytes()];
        [&head.concat()[..], &cookie.to_be_bytes(), &(data.len() as u32).to_be_bytes(), data]
            .concat()
    };
    let simple = |cookie: u64, error: u32| {
        let head = [0x6744_6698, error].map(u32::to_be_bytes).concat();
        [&head[..], &cookie.to_be_bytes()].concat()
    };
    // Size 1 MiB, the flags that every disk has, flush and FUA.
    let export = b"\0\0\0\0\0\0\0\x10\0\0\0\x0d";
    let blocks = b"\0\x03\0\0\x02\0\0\0\x10\0\x02\0\0\0";
    let handshake = |which: u8| {
        let greeting = [&[which][..], b"NBDMAGICIHAVEOPT\0\x03"].concat();
        let context = answer(10, 4, b"\0\0\0\x01base:allocation");
        let structured = [answer(8, 1, b""), context, answer(10, 1, b"")].concat();
        let info =
            [answer(7, 3, export), answer(7, 3, blocks), answer(7, 3, b"\0\x01vm1")].concat();
        [greeting, structured, info, answer(7, 1, b"")].concat()
    };
    let refused = [b"\0NBDMAGICIHAVEOPT\0\x03".to_vec(), answer(8, 1 << 31 | 1, b"")];
    let refused = [refused.concat(), answer(7, 1 << 31 | 6, b"no such disk")].concat();
    let extents = b"\0\0\0\x01\0\x08\0\0\0\0\0\0\0\x08\0\0\0\0\0\x03";
    let extents = [vec![2], chunk(1, 5, 0, extents)].concat();
    // Cookies have the number of the connection and the place of the request.
    let cookie = |place: u64| 1 << 32 | place;
    let short = [&0u64.to_be_bytes()[..], &[7; 16]].concat();
    let hole = [1 << 32, 1024 << 32].map(u64::to_be_bytes).concat();
    let rest = [&((1u64 << 32) + 1024).to_be_bytes()[..], &[8; 1024]].concat();
    let replies = [
        vec![3, 30, 0],
        chunk(1, 1, cookie(0), &short),
        chunk(0, 2, cookie(1), &hole[..12]),
        chunk(0, 1, cookie(1), &rest),
        chunk(1, 0, cookie(1), b""),
        simple(cookie(2), 5),
        simple(cookie(3), 0),
    ]
    .concat();
    let old = [vec![3, 20, 0], simple(cookie(0), 0), vec![9; 16], simple(cookie(3), 28)].concat();
    let error = chunk(1, 1 << 15 | 1, cookie(1), b"\0\0\0\x05\0\x03bad");
    vec![
        handshake(0),
        handshake(1),
        refused,
        extents,
        replies,
        old,
        [vec![3, 9, 0], error].concat(),
    ]
}

/// Notes of a run, one of each kind.
const NOTES: &[u8] = b"began\0/bin/sh\narmed\0/a b\nuntrapped\0x\nthread\0\xff\n\
    refused\0static\0/bin/busybox\nunreached\0setuid\0/bin/su\nopened\x00577\0/data/f\n\
    functions\0open\0openat\0stat\n";

/// Lines of a copy's journal after its title: pieces with and without a checksum; the last line is torn.
const PIECES: &str = "{\"offset\":0,\"length\":8388608,\"sum\":1}\n\
    {\"offset\":8388608,\"length\":4096,\"sum\":null}\n{\"offset\":16";

/// The title of the copy that the fuzz target assumes.
const TITLE: &str = "{\"source\":\"a\",\"source_is\":{\"is\":\"1\",\"size\":3,\"sure\":true},\
    \"target\":\"b\",\"target_is\":{\"is\":\"2\",\"size\":3,\"sure\":false}}\n";

/// Returns the size and modification time of a source, and the text in a partial copy of it.
fn stamp(size: u64, seconds: i64, nanoseconds: u32, says: &str) -> Vec<u8> {
    let mut bytes = size.to_le_bytes().to_vec();
    bytes.extend(seconds.to_le_bytes());
    bytes.extend(nanoseconds.to_le_bytes());
    bytes.extend(says.as_bytes());
    bytes
}

fn main() {
    let directory = std::env::args_os().nth(1).expect("a directory");
    let write = |target: &str, number: usize, bytes: &[u8]| {
        let directory = Path::new(&directory).join(target);
        std::fs::create_dir_all(&directory).expect("a directory for seeds");
        std::fs::write(directory.join(format!("seed{number}")), bytes).expect("room for a seed");
    };
    let mut all = Vec::new();
    for (number, requests) in requests().iter().enumerate() {
        let body = encode_compound(requests);
        write("request", number, &body);
        all.extend((body.len() as u16).to_le_bytes());
        all.extend(body);
    }
    write("compound", 0, &all);
    write("reply", 0, &replies());
    write("entries", 0, &entries());
    write("events", 0, &events());
    write("handshake", 0, &Header::new(Kind::Request, 3, 4).to_bytes());
    let (mut hello, mut welcome) = (Vec::new(), Vec::new());
    Hello { magic: MAGIC, version: VERSION, ..Hello::default() }.encode(&mut hello);
    Welcome { magic: MAGIC, version: VERSION, ..Welcome::default() }.encode(&mut welcome);
    write("handshake", 1, &hello);
    write("handshake", 2, &welcome);
    for (number, url) in [
        "towline://host:7440/data/some/dir",
        "towline://[::1]/x",
        "towline+unix:///data/a%20b%3F?socket=/run/t.sock",
        "towline+shm:///data/%FF?socket=/run/t%23.sock",
        "unix:///run/t.sock",
    ]
    .into_iter()
    .enumerate()
    {
        write("url", number, url.as_bytes());
    }
    write("input", 0, &messages());
    write("nbd_haggle", 0, &nbd_options());
    write("nbd_requests", 0, &nbd_requests());
    for (number, answers) in nbd_answers().iter().enumerate() {
        write("nbd_client", number, answers);
    }
    let config = "listen = [\"unix:///s\"]\nbuffer-limit = \"1M\"\nengine = \"epoll\"\n\
                  [export.a]\ndir = \"/a\\\\:b\"\nread-only = true\n[export.b]\nmem = \"2K\"\n";
    write("config", 0, config.as_bytes());
    for (number, line) in ["GET /metrics HTTP/1.1\r\n", "GET /?a=b HTTP/1.1\r\n", "POST /metrics "]
        .into_iter()
        .enumerate()
    {
        write("http", number, format!("{line}Host: x\r\n\r\n").as_bytes());
    }
    // Packets with two files, with one, and with none.
    for (number, files) in [2, 1, 0].into_iter().enumerate() {
        write("hold", number, &[&[1 + number as u8][..], &[7; 32].repeat(files)].concat());
    }
    write("notes", 0, NOTES);
    write("journal", 0, PIECES.as_bytes());
    write("journal", 1, [TITLE, PIECES].concat().as_bytes());
    write("stamp", 0, &stamp(10, -3, 7, "10 -3.000000007 5"));
    // A stamp of which the target writes the first words itself.
    write("stamp", 1, &stamp(1 << 40, 1_700_000_000, 999_999_999, "18446744073709551615"));
    write("config", 1, b"name=/srv/x\\:y:ro");
}
