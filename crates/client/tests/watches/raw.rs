//! Clients that disappear without a word, or ask for impossible things.

use super::common::{Raw, eventually, hello, hello_message, request, setup};
use super::names;
use towline_client::{Errno, Happening};
use towline_server::EngineWish;
use towline_wire::event::{self, Events};
use towline_wire::reply::parse_results;
use towline_wire::{Hello, Kind, Reply, Request};

/// A session that speaks raw bytes, and its open root.
struct Speaker {
    raw: Raw,
    session: Hello,
    root: u64,
}

impl Speaker {
    fn begin(port: u16) -> Self {
        let (mut raw, welcome) = Raw::greeted(port);
        let session = Hello { session: welcome.session, secret: welcome.secret, ..hello() };
        raw.send(&request(0, 1, &[Request::Attach { name: b"dir" }], 0));
        let (_, body) = raw.receive().unwrap();
        let Some(Reply::Opened { handle, .. }) = parse_results(&body).unwrap().pop() else {
            panic!("no root")
        };
        Self { raw, session, root: handle }
    }

    /// Continues over another connection.
    fn come_back(&mut self, port: u16) {
        self.raw = Raw::connect(port);
        self.raw.send(&hello_message(&self.session));
        assert_eq!(self.raw.receive().unwrap().0.kind, Kind::Welcome);
    }

    fn send(&mut self, slot: u16, sequence: u32, what: Request<'_>) {
        self.raw.send(&request(slot, sequence, &[what], 0));
    }

    /// Returns the next answer: its slot, its result, and its events.
    fn answer(&mut self) -> (u16, Result<(u64, bool), Errno>, Vec<Happening>) {
        let (header, bytes) = self.raw.receive().expect("thrown out");
        let (body, payload) = bytes.split_at(header.body_bytes as usize);
        let events = Events::new(payload).map(|event| event.unwrap().into()).collect();
        let said = match parse_results(body).unwrap()[..] {
            [Reply::Events { next, lost, length }] => {
                assert_eq!(length as usize, payload.len());
                Ok((next, lost != 0))
            }
            [Reply::Number { value }] => Ok((value, false)),
            [Reply::Failed { errno }] => Err(Errno(errno)),
            ref other => panic!("{other:?}"),
        };
        (header.slot, said, events)
    }
}

#[test]
fn who_asks_and_disappears_is_told_when_it_is_back() {
    let setup = setup(EngineWish::Automatic);
    let mut speaker = Speaker::begin(setup.port());
    let mask = event::CREATE;
    speaker.send(1, 1, Request::Watch { handle: speaker.root, mask });
    let (_, first, _) = speaker.answer();
    let (mut seen, _) = first.unwrap();
    for sequence in 1..20 {
        let asks = Request::Events { seen };
        speaker.send(2, sequence, asks);
        // Once this is answered, the request for events waits.
        speaker.send(3, sequence, Request::Watch { handle: speaker.root, mask });
        assert_eq!(speaker.answer().0, 3);
        if sequence % 2 == 0 {
            speaker.come_back(setup.port());
            speaker.send(2, sequence, asks);
        }
        if sequence % 3 == 0 {
            speaker.raw = Raw::connect(setup.port());
        }
        let name = format!("f{sequence}");
        std::fs::write(setup.data.join(&name), b"").unwrap();
        if sequence % 3 == 0 {
            speaker.come_back(setup.port());
            speaker.send(2, sequence, asks);
        }
        let (_, said, told) = speaker.answer();
        assert_eq!(names(&told, event::CREATE), [&name]);
        // The answer is lost. It is given again over another connection, with what has happened
        // since.
        speaker.come_back(setup.port());
        let late = format!("late{sequence}");
        std::fs::write(setup.data.join(&late), b"").unwrap();
        eventually("what has happened is told to who asks again", || {
            speaker.come_back(setup.port());
            speaker.send(2, sequence, asks);
            let (_, said, told) = speaker.answer();
            (seen, _) = said.unwrap();
            assert_eq!(told[0].name, name.as_bytes());
            told.len() == 2 && told[1].name == late.as_bytes()
        });
        assert_eq!(seen, said.unwrap().0 + 1);
    }
}

#[test]
fn a_client_cannot_ask_for_what_there_is_not() {
    let setup = setup(EngineWish::Automatic);
    let mut speaker = Speaker::begin(setup.port());
    let handle = speaker.root;
    let all = [
        (handle, 0, Errno::EINVAL),
        (handle, event::IGNORED, Errno::EINVAL),
        (handle, event::ALL | 0x1000, Errno::EINVAL),
        (handle, u32::MAX, Errno::EINVAL),
        (0, event::CREATE, Errno::EBADF),
        (handle + 1, event::CREATE, Errno::EBADF),
        (u64::MAX, event::CREATE, Errno::EBADF),
        (handle | 1 << 63, event::CREATE, Errno::EBADF),
    ];
    for (sequence, (handle, mask, errno)) in (1..).zip(all) {
        speaker.send(1, sequence, Request::Watch { handle, mask });
        assert_eq!(speaker.answer().1, Err(errno), "{mask:#x} of {handle:#x}");
    }
    // A client without a number gets one. An absurd number is answered at once, as lost.
    speaker.send(2, 1, Request::Events { seen: 0 });
    let (next, lost) = speaker.answer().1.unwrap();
    assert!(next != 0 && !lost);
    for (sequence, absurd) in (2..).zip([1, next - 1, next + 1, u64::MAX]) {
        speaker.send(2, sequence, Request::Events { seen: absurd });
        assert_eq!(speaker.answer().1, Ok((next, true)), "{absurd:#x}");
    }
    // Of many requests that wait, all but the last are answered with nothing.
    for slot in 3..63 {
        speaker.send(slot, 1, Request::Events { seen: next });
    }
    for slot in 3..62 {
        assert_eq!(speaker.answer(), (slot, Ok((next, false)), vec![]));
    }
    speaker.send(1, 9, Request::Watch { handle, mask: event::CREATE });
    assert_eq!(speaker.answer().1, Ok((next, false)));
    std::fs::write(setup.data.join("made"), b"").unwrap();
    let (slot, said, told) = speaker.answer();
    assert_eq!((slot, said, told.len()), (62, Ok((next + 1, false)), 1));
    // A request must not wait for events in a compound with others.
    let together = [Request::Watch { handle, mask: 1 }, Request::Events { seen: 0 }];
    speaker.raw.send(&request(1, 10, &together, 0));
    assert!(speaker.raw.thrown_out());
    setup.client().attach(b"dir").unwrap().stat().unwrap();
}
