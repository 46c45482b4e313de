use super::{Handler, Receiver};
use crate::constants::{EXTENDED_REQUEST_MAGIC, REQUEST_MAGIC, command, command_flag as flag};
use crate::{Agreement, Command, Context, Error, Form, Offer, Refusal, Request};
use proptest::prelude::*;

/// A call of the handler; for writes with the bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Told {
    Command(Command, u64, u64, u64, Vec<usize>),
    Write(u64, u64, Vec<u8>),
    Refused(u64, Error),
}

#[derive(Default)]
struct Log {
    told: Vec<Told>,
    /// Writes of at most this length are taken at once.
    now: usize,
    /// The write being received, and how far it has come.
    filling: Option<(u64, u64, Vec<u8>, usize)>,
    /// How many more requests are taken; `None`: any number.
    room: Option<usize>,
    /// Cookies of the announced requests.
    upcoming: Vec<u64>,
}

/// The handler refuses long writes at this offset.
const REFUSED: u64 = 8192;

impl Handler for Log {
    fn is_full(&self) -> bool {
        self.room == Some(0)
    }

    fn upcoming(&mut self, request: &Request) {
        self.upcoming.push(request.cookie);
    }

    fn command(&mut self, command: Command, request: &Request, contexts: &[Context]) {
        let contexts = contexts.iter().map(|c| c.number).collect();
        let Request { cookie, offset, length, .. } = *request;
        self.told.push(Told::Command(command, cookie, offset, length, contexts));
        if let Some(room) = &mut self.room {
            *room -= 1;
        }
    }

    fn refuse(&mut self, request: &Request, refusal: Refusal) {
        self.told.push(Told::Refused(request.cookie, refusal.error));
    }

    fn write_now(&mut self, request: &Request, payload: &[u8]) -> bool {
        if payload.len() > self.now {
            return false;
        }
        self.told.push(Told::Write(request.cookie, request.offset, payload.to_vec()));
        true
    }

    fn write_begin(&mut self, request: &Request) -> Result<(), Refusal> {
        if request.offset == REFUSED {
            return Err(Refusal { error: Error::Perm, text: "" });
        }
        let bytes = vec![0; request.length as usize];
        self.filling = Some((request.cookie, request.offset, bytes, 0));
        Ok(())
    }

    fn put(&mut self, new: &[u8]) -> usize {
        let (_, _, bytes, at) = self.filling.as_mut().unwrap();
        assert!(new.len() <= bytes.len() - *at, "no more than is missing");
        // In pieces, as from a pool.
        let count = new.len().min(7);
        bytes[*at..*at + count].copy_from_slice(&new[..count]);
        *at += count;
        if *at == bytes.len() {
            let (cookie, offset, bytes, _) = self.filling.take().unwrap();
            self.told.push(Told::Write(cookie, offset, bytes));
        }
        count
    }
}

fn agreement(form: Form) -> Agreement {
    let export = Offer {
        name: "disk".into(),
        description: String::new(),
        size: 1 << 20,
        block_minimum: 512,
        block_preferred: 4096,
        read_only: false,
        rotational: false,
        zeroes_fast: true,
        whole_reads: true,
        contexts: vec!["base:allocation".into(), "x:y".into()],
    };
    let contexts = vec![Context { number: 0 }, Context { number: 1 }];
    Agreement { export, form, contexts }
}

fn request(form: Form, flags: u16, kind: u16, cookie: u64, offset: u64, length: u64) -> Vec<u8> {
    let extended = form == Form::Extended;
    let magic = if extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
    let mut bytes = magic.to_be_bytes().to_vec();
    bytes.extend_from_slice(&flags.to_be_bytes());
    bytes.extend_from_slice(&kind.to_be_bytes());
    bytes.extend_from_slice(&cookie.to_be_bytes());
    bytes.extend_from_slice(&offset.to_be_bytes());
    let length = length.to_be_bytes();
    bytes.extend_from_slice(if extended { &length } else { &length[4..] });
    bytes
}

fn tell(agreed: Agreement, bytes: &[u8]) -> Vec<Told> {
    let (mut receiver, mut log) = (Receiver::new(agreed), Log { now: 512, ..Log::default() });
    let received = receiver.receive(bytes, &mut log).unwrap();
    assert_eq!(received.used, bytes.len(), "all is used");
    log.told
}

/// Returns the outcome of one request without payload.
fn one(form: Form, flags: u16, kind: u16, offset: u64, length: u64) -> Result<Command, Error> {
    match &tell(agreement(form), &request(form, flags, kind, 1, offset, length))[..] {
        [Told::Command(command, 1, ..)] => Ok(*command),
        [Told::Refused(1, error)] => Err(*error),
        other => panic!("{other:?}"),
    }
}

#[test]
fn ranges_are_checked() {
    let end = 1 << 20;
    for form in [Form::Simple, Form::Structured, Form::Extended] {
        assert_eq!(one(form, 0, command::READ, 0, 512), Ok(Command::Read));
        assert_eq!(one(form, 0, command::READ, end - 512, 512), Ok(Command::Read));
        assert_eq!(one(form, 0, command::READ, end, 512), Err(Error::Inval));
        assert_eq!(one(form, 0, command::READ, u64::MAX - 511, 512), Err(Error::Inval));
        assert_eq!(one(form, 0, command::TRIM, end, 512), Err(Error::Inval));
        assert_eq!(one(form, 0, command::WRITE_ZEROES, end, 512), Err(Error::NoSpc));
        assert_eq!(one(form, 0, command::READ, 1, 512), Err(Error::Inval), "misaligned");
        assert_eq!(one(form, 0, command::READ, 0, 511), Err(Error::Inval), "misaligned");
        assert_eq!(one(form, 0, command::READ, 0, 0), Err(Error::Inval));
        assert_eq!(one(form, 0, command::READ, 0, 64 << 20), Err(Error::Inval));
        assert_eq!(one(form, 0, command::FLUSH, 0, 0), Ok(Command::Flush));
        assert_eq!(one(form, 0, command::FLUSH, 0, 512), Err(Error::Inval));
        assert_eq!(one(form, 0, 77, 0, 512), Err(Error::Inval), "unknown command");
    }
}

#[test]
fn flags_belong_to_commands() {
    let structured = Form::Structured;
    assert_eq!(one(structured, flag::DF, command::READ, 0, 512), Ok(Command::Read));
    assert_eq!(one(Form::Simple, flag::DF, command::READ, 0, 512), Err(Error::Inval));
    assert_eq!(one(structured, flag::FUA, command::READ, 0, 512), Ok(Command::Read));
    assert_eq!(one(structured, flag::NO_HOLE, command::READ, 0, 512), Err(Error::Inval));
    let zeroes = flag::NO_HOLE | flag::FAST_ZERO | flag::FUA;
    assert_eq!(one(structured, zeroes, command::WRITE_ZEROES, 0, 512), Ok(Command::WriteZeroes));
    let status = one(structured, flag::REQ_ONE, command::BLOCK_STATUS, 0, 512);
    assert_eq!(status, Ok(Command::BlockStatus));
    assert_eq!(one(structured, 1 << 15, command::CACHE, 0, 512), Err(Error::Inval));
}

#[test]
fn a_read_only_export_refuses_changes_and_skips_their_payload() {
    let mut agreed = agreement(Form::Simple);
    agreed.export.read_only = true;
    let mut bytes = request(Form::Simple, 0, command::WRITE, 1, 0, 512);
    bytes.extend_from_slice(&[7; 512]);
    for kind in [command::TRIM, command::WRITE_ZEROES] {
        bytes.extend_from_slice(&request(Form::Simple, 0, kind, 2, 0, 512));
    }
    bytes.extend_from_slice(&request(Form::Simple, 0, command::READ, 3, 0, 512));
    let perm = |cookie| Told::Refused(cookie, Error::Perm);
    let read = Told::Command(Command::Read, 3, 0, 512, vec![0, 1]);
    assert_eq!(tell(agreed, &bytes), [perm(1), perm(2), perm(2), read]);
}

#[test]
fn payloads_are_placed_taken_or_skipped() {
    let form = Form::Extended;
    let payload = |count: u64| (0..count).map(|i| i as u8).collect::<Vec<u8>>();
    let mut bytes = Vec::new();
    let mut add = |flags, kind, cookie, offset, length: u64, count: u64| {
        bytes.extend_from_slice(&request(form, flags, kind, cookie, offset, length));
        bytes.extend_from_slice(&payload(count));
    };
    let with = flag::PAYLOAD_LEN;
    add(with, command::WRITE, 1, 0, 512, 512);
    add(with, command::WRITE, 2, 512, 1024, 1024);
    add(with, command::WRITE, 8, REFUSED, 1024, 1024);
    // As QEMU does.
    add(0, command::WRITE, 3, 0, 512, 512);
    add(with, command::WRITE, 4, 1 << 20, 512, 512);
    add(with, command::READ, 5, 0, 40, 40);
    add(with, 99, 6, 0, 33, 33);
    add(0, command::READ, 7, 0, 512, 0);
    assert_eq!(
        tell(agreement(form), &bytes),
        [
            Told::Write(1, 0, payload(512)),
            Told::Write(2, 512, payload(1024)),
            Told::Refused(8, Error::Perm),
            Told::Write(3, 0, payload(512)),
            Told::Refused(4, Error::NoSpc),
            Told::Refused(5, Error::Inval),
            Told::Refused(6, Error::Inval),
            Told::Command(Command::Read, 7, 0, 512, vec![0, 1]),
        ]
    );
}

#[test]
fn a_status_may_name_its_contexts() {
    let form = Form::Extended;
    let status = |ids: &[u32]| {
        let length = 8 + 4 * ids.len() as u64;
        let flags = flag::PAYLOAD_LEN;
        let mut bytes = request(form, flags, command::BLOCK_STATUS, 1, 512, length);
        bytes.extend_from_slice(&4096u64.to_be_bytes());
        ids.iter().for_each(|id| bytes.extend_from_slice(&id.to_be_bytes()));
        tell(agreement(form), &bytes)
    };
    let told = |contexts| vec![Told::Command(Command::BlockStatus, 1, 512, 4096, contexts)];
    assert_eq!(status(&[2]), told(vec![1]));
    assert_eq!(status(&[2, 1]), told(vec![1, 0]));
    for wrong in [&[][..], &[3], &[1, 1]] {
        assert_eq!(status(wrong), [Told::Refused(1, Error::Inval)], "{wrong:?}");
    }
    let odd = request(form, flag::PAYLOAD_LEN, command::BLOCK_STATUS, 1, 0, 9);
    let odd = [&odd[..], &[0; 9]].concat();
    assert_eq!(tell(agreement(form), &odd), [Told::Refused(1, Error::Inval)]);
}

#[test]
fn what_cannot_be_in_step_ends_the_connection() {
    let mut receiver = Receiver::new(agreement(Form::Simple));
    assert!(receiver.receive(&[0; 28], &mut Log::default()).is_err(), "no magic number");
    let absurd = request(Form::Extended, flag::PAYLOAD_LEN, command::WRITE, 1, 0, u64::MAX);
    let mut receiver = Receiver::new(agreement(Form::Extended));
    assert!(receiver.receive(&absurd, &mut Log::default()).is_err());
}

#[test]
fn nothing_behind_a_disconnect_is_looked_at_and_a_full_handler_is_spared() {
    let read = request(Form::Simple, 0, command::READ, 1, 0, 512);
    let end = request(Form::Simple, 0, command::DISC, 0, 0, 0);
    let mut receiver = Receiver::new(agreement(Form::Simple));
    let mut log = Log { room: Some(2), ..Log::default() };
    let stream = [&read[..], &read, &read, &end, &read].concat();
    let received = receiver.receive(&stream, &mut log).unwrap();
    assert!(received.blocked && received.used == 56 && log.told.len() == 2);
    log.room = None;
    let received = receiver.receive(&stream[56..], &mut log).unwrap();
    assert!(received.disconnect && log.told.len() == 3);
}

#[test]
fn the_next_request_is_announced_where_all_of_its_header_is_there() {
    let form = Form::Simple;
    let read = |cookie| request(form, 0, command::READ, cookie, 0, 512);
    let write = [&request(form, 0, command::WRITE, 2, 0, 512)[..], &[9; 512]].concat();
    let stream = [read(1), write, read(3), read(4)].concat();
    for (cut, expected) in [(0, &[2, 3, 4][..]), (1, &[2, 3]), (28, &[2, 3]), (29, &[2])] {
        let (mut receiver, mut log) =
            (Receiver::new(agreement(form)), Log { now: 512, ..Log::default() });
        receiver.receive(&stream[..stream.len() - cut], &mut log).unwrap();
        assert_eq!(log.upcoming, expected, "{cut} bytes are missing");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn however_bytes_are_cut_the_requests_are_the_same(
        form in prop_oneof![Just(Form::Simple), Just(Form::Structured), Just(Form::Extended)],
        requests in proptest::collection::vec((0u16..40, 0u16..9, 0u64..4, 0u64..6), 0..12),
        cuts in proptest::collection::vec(1usize..900, 1..40),
    ) {
        let mut stream = Vec::new();
        for (cookie, (flags, kind, offset, length)) in requests.into_iter().enumerate() {
            if kind == command::DISC {
                continue;
            }
            let (offset, length) = (offset * 300_000, length * 256);
            stream.extend_from_slice(&request(form, flags, kind, cookie as u64, offset, length));
            let has_payload = kind == command::WRITE
                || form == Form::Extended && flags & flag::PAYLOAD_LEN != 0;
            let payload = if has_payload { length as usize } else { 0 };
            stream.extend((0..payload).map(|i| (i / 3) as u8));
        }
        let whole = tell(agreement(form), &stream);
        let (mut receiver, mut log) = (Receiver::new(agreement(form)), Log::default());
        let (mut held, mut rest, mut cuts) = (Vec::new(), &stream[..], cuts.into_iter().cycle());
        while !rest.is_empty() {
            let count = cuts.next().unwrap().min(rest.len());
            held.extend_from_slice(&rest[..count]);
            rest = &rest[count..];
            let received = receiver.receive(&held, &mut log).unwrap();
            held.drain(..received.used);
        }
        prop_assert!(held.is_empty());
        prop_assert_eq!(whole, log.told);
    }

    #[test]
    fn garbage_does_no_harm(
        form in prop_oneof![Just(Form::Simple), Just(Form::Structured), Just(Form::Extended)],
        bytes in proptest::collection::vec(any::<u8>(), 0..300),
        magic in any::<bool>(),
    ) {
        let mut stream = bytes;
        if magic && stream.len() >= 4 {
            stream[..4].copy_from_slice(&request(form, 0, 0, 0, 0, 0)[..4]);
        }
        let mut receiver = Receiver::new(agreement(form));
        if let Ok(received) = receiver.receive(&stream, &mut Log { now: 1 << 30, ..Log::default() }) {
            prop_assert!(received.used <= stream.len());
        }
    }
}
