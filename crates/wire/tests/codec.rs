//! Every decoder accepts arbitrary bytes, and decoding an encoded value returns the same value.
#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

use proptest::prelude::*;
use towline_wire::codec::Field;
use towline_wire::entry::{Entries, Entry};
use towline_wire::event::{self, Event, Events};
use towline_wire::reply::parse_results;
use towline_wire::request::{encode_compound, parse_compound};
use towline_wire::{Attr, Header, Hello, Kind, Reply, Request, Welcome};

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let _ = parse_compound(&bytes);
        let _ = parse_results(&bytes);
        let _ = Hello::parse(&bytes);
        let _ = Welcome::parse(&bytes);
        let _ = Entries::new(&bytes).count();
        let _ = Events::new(&bytes).count();
        if let Some(head) = bytes.first_chunk() {
            let _ = Header::parse(head);
        }
    }

    #[test]
    fn a_cut_or_changed_request_never_panics(cut in 0usize..200, at in 0usize..200, value: u8) {
        let mut body = encode_compound(&[
            Request::Open { base: 7, flags: 2, mode: 0o644, path: b"some/path" },
            Request::Write { handle: 9, offset: 1 << 40, length: 5, flags: 0 },
            Request::Rename { base: 1, flags: 0, path: b"a", new_base: 2, new_path: b"b" },
        ]);
        let length = body.len();
        body[at % length] = value;
        let _ = parse_compound(&body[..cut.min(length)]);
        let _ = parse_compound(&body);
    }

    #[test]
    fn requests_come_back(base: u64, flags: u32, path in proptest::collection::vec(1u8.., 0..300), offset: u64) {
        let requests = [
            Request::Stat { base, flags, path: &path },
            Request::Read { handle: base, offset, length: flags },
            Request::Symlink { base, path: &path, target: &path },
            Request::Watch { handle: base, mask: flags },
            Request::Events { seen: offset },
        ];
        let body = encode_compound(&requests);
        prop_assert_eq!(&parse_compound(&body).unwrap()[..], &requests[..]);
    }

    #[test]
    fn replies_come_back(handle: u64, size: u64, value in proptest::collection::vec(any::<u8>(), 0..100)) {
        let attr = Attr { size, inode: handle, mode: 0o100_644, ..Attr::default() };
        let events = Reply::Events { next: size, lost: 1, length: 9 };
        let replies = [Reply::Opened { handle, attr }, Reply::Bytes { value: &value }, events, Reply::Failed { errno: 2 }];
        let mut body = Vec::new();
        replies.iter().for_each(|reply| reply.encode(&mut body));
        prop_assert_eq!(&parse_results(&body).unwrap()[..], &replies[..]);
    }

    #[test]
    fn entries_come_back(cookie: u64, name in "[a-z\u{e9}]{1,40}", known: bool) {
        let attr = known.then(|| Attr { inode: 3, ..Attr::default() });
        let entry = Entry { cookie, inode: 3, file_type: 8, name: name.as_bytes(), attr };
        let mut bytes = Vec::new();
        entry.encode(&mut bytes);
        prop_assert_eq!(bytes.len(), entry.encoded_bytes());
        prop_assert_eq!(Entries::new(&bytes).collect::<Result<Vec<_>, _>>().unwrap(), vec![entry]);
    }

    #[test]
    fn events_come_back(handle: u64, bit in 0u32..12, cookie: u32, name in "[a-z\u{e9}]{0,40}", count in 0usize..5) {
        let event = Event { handle, mask: 1 << bit | event::ISDIR, cookie, name: name.as_bytes() };
        let events = vec![event; count];
        let mut bytes = Vec::new();
        events.iter().for_each(|event| event.encode(&mut bytes));
        prop_assert_eq!(bytes.len(), count * event.encoded_bytes());
        prop_assert_eq!(Events::new(&bytes).collect::<Result<Vec<_>, _>>().unwrap(), events);
    }

    #[test]
    fn headers_come_back(slot in 0u16..64, sequence: u32, body in 0u32..80_000, payload in 0u32..200_000, offset: u64) {
        let mut header = Header::new(Kind::Data, slot, sequence);
        (header.body_bytes, header.payload_bytes, header.offset) = (body, payload, offset);
        prop_assert_eq!(Header::parse(&header.to_bytes()).unwrap(), header);
    }
}
