use super::{Ended, Haggle, Progress};
use crate::constants::{
    INIT_MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, REPLIES_BYTES_MAX, option, option_reply,
};
use crate::{Agreement, Catalogue, Form, Offer, ProtocolError};
use proptest::prelude::*;

struct One;

fn offer() -> Offer {
    Offer {
        name: "disk".into(),
        description: "a disk".into(),
        size: 1 << 20,
        block_minimum: 512,
        block_preferred: 4096,
        read_only: false,
        rotational: false,
        zeroes_fast: true,
        whole_reads: true,
        contexts: vec!["base:allocation".into(), "x:y".into()],
    }
}

impl Catalogue for One {
    fn find(&self, name: &[u8]) -> Option<Offer> {
        (name.is_empty() || name == b"disk").then(offer)
    }

    fn list(&self) -> Vec<(String, String)> {
        vec![("disk".into(), "a disk".into()), ("other".into(), String::new())]
    }
}

/// A client that records what the server sends.
#[derive(Default)]
struct Client {
    haggle: Haggle,
    out: Vec<u8>,
    ended: Option<Ended>,
}

impl Client {
    fn new(flags: u32) -> Self {
        let mut this = Self::default();
        this.send(&flags.to_be_bytes()).unwrap();
        this
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), ProtocolError> {
        let Progress { used, ended } = self.haggle.receive(bytes, &mut self.out, &One)?;
        assert!(used == bytes.len() || ended.is_some(), "used {used} of {}", bytes.len());
        self.ended = ended;
        Ok(())
    }

    /// Sends an option and returns the type and payload of each reply.
    fn option(&mut self, option: u32, payload: &[u8]) -> Vec<(u32, Vec<u8>)> {
        self.out.clear();
        self.send(&option_bytes(option, payload)).unwrap();
        replies(&self.out, option)
    }

    fn agreed(self) -> Agreement {
        match self.ended {
            Some(Ended::Agreed(agreed)) => *agreed,
            other => panic!("no agreement: {other:?}"),
        }
    }
}

fn option_bytes(option: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
    bytes.extend_from_slice(&option.to_be_bytes());
    bytes.extend_from_slice(&(payload.len() as u32).to_be_bytes());
    bytes.extend_from_slice(payload);
    bytes
}

fn replies(mut bytes: &[u8], option: u32) -> Vec<(u32, Vec<u8>)> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        assert_eq!(bytes[..8], OPTION_REPLY_MAGIC.to_be_bytes());
        assert_eq!(bytes[8..12], option.to_be_bytes());
        let kind = u32::from_be_bytes(bytes[12..16].try_into().unwrap());
        let length = u32::from_be_bytes(bytes[16..20].try_into().unwrap()) as usize;
        found.push((kind, bytes[20..20 + length].to_vec()));
        bytes = &bytes[20 + length..];
    }
    found
}

fn string(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes()[..], text].concat()
}

fn info(name: &[u8], kinds: &[u16]) -> Vec<u8> {
    let mut bytes = string(name);
    bytes.extend_from_slice(&(kinds.len() as u16).to_be_bytes());
    kinds.iter().for_each(|kind| bytes.extend_from_slice(&kind.to_be_bytes()));
    bytes
}

fn queries(name: &[u8], queries: &[&[u8]]) -> Vec<u8> {
    let mut bytes = string(name);
    bytes.extend_from_slice(&(queries.len() as u32).to_be_bytes());
    queries.iter().for_each(|query| bytes.extend_from_slice(&string(query)));
    bytes
}

fn kinds(replies: &[(u32, Vec<u8>)]) -> Vec<u32> {
    replies.iter().map(|(kind, _)| *kind).collect()
}

const ACK: u32 = option_reply::ACK;

#[test]
fn the_greeting_is_fixed_newstyle_without_zeroes() {
    let greeting = Haggle::greeting();
    assert_eq!(greeting[..8], INIT_MAGIC.to_be_bytes());
    assert_eq!(greeting[8..16], OPTION_MAGIC.to_be_bytes());
    assert_eq!(greeting[16..], [0, 3]);
}

#[test]
fn go_tells_and_agrees() {
    let mut client = Client::new(3);
    let replies = client.option(option::GO, &info(b"disk", &[1, 2, 3]));
    let told: Vec<u16> = replies[..replies.len() - 1]
        .iter()
        .map(|(kind, payload)| {
            assert_eq!(*kind, option_reply::INFO);
            u16::from_be_bytes([payload[0], payload[1]])
        })
        .collect();
    assert_eq!(told, [0, 1, 2, 3]);
    assert_eq!(replies.last().unwrap(), &(ACK, Vec::new()));
    let agreed = client.agreed();
    assert_eq!(agreed.form, Form::Simple);
    assert_eq!(agreed.export.size, 1 << 20);
}

#[test]
fn info_may_come_often_and_an_unknown_export_does_not_end_haggling() {
    let mut client = Client::new(1);
    for _ in 0..3 {
        let replies = client.option(option::INFO, &info(b"", &[]));
        assert_eq!(kinds(&replies).last(), Some(&ACK));
    }
    let unknown = client.option(option::GO, &info(b"nothing", &[]));
    assert_eq!(kinds(&unknown), [option_reply::ERR_UNKNOWN]);
    assert_eq!(kinds(&client.option(option::GO, &info(b"", &[]))).last(), Some(&ACK));
}

#[test]
fn export_name_has_zeroes_unless_both_want_none() {
    for (flags, bytes) in [(1, 134), (3, 10)] {
        let mut client = Client::new(flags);
        client.out.clear();
        client.send(&option_bytes(option::EXPORT_NAME, b"disk")).unwrap();
        assert_eq!(client.out.len(), bytes);
        assert_eq!(client.agreed().form, Form::Simple);
    }
    let mut client = Client::new(3);
    client.option(option::EXTENDED_HEADERS, &[]);
    assert!(client.send(&option_bytes(option::EXPORT_NAME, b"disk")).is_err());
}

/// Clients from before GO ask so, and break no rule: the text leaves only hanging up.
#[test]
fn export_name_of_no_export_is_no_broken_rule() {
    let mut client = Client::new(3);
    client.out.clear();
    client.send(&option_bytes(option::EXPORT_NAME, b"nothing")).unwrap();
    assert!(matches!(client.ended, Some(Ended::Refused(_))), "{:?}", client.ended);
    assert!(client.out.is_empty());
}

#[test]
fn forms_of_reply_are_agreed_in_any_order() {
    let mut client = Client::new(3);
    assert_eq!(kinds(&client.option(option::STRUCTURED_REPLY, &[])), [ACK]);
    assert_eq!(kinds(&client.option(option::STRUCTURED_REPLY, &[])), [ACK], "a repeat is harmless");
    assert_eq!(kinds(&client.option(option::EXTENDED_HEADERS, &[])), [ACK]);
    let again = client.option(option::STRUCTURED_REPLY, &[]);
    assert_eq!(kinds(&again), [option_reply::ERR_EXT_HEADER_REQD]);
    client.option(option::GO, &info(b"", &[]));
    assert_eq!(client.agreed().form, Form::Extended);
}

#[test]
fn what_cannot_be_is_refused_and_the_stream_stays_in_step() {
    let mut client = Client::new(3);
    assert_eq!(kinds(&client.option(99, b"whatever")), [option_reply::ERR_UNSUP]);
    assert_eq!(kinds(&client.option(option::STARTTLS, &[])), [option_reply::ERR_POLICY]);
    for option in
        [option::LIST, option::STRUCTURED_REPLY, option::EXTENDED_HEADERS, option::STARTTLS]
    {
        assert_eq!(kinds(&client.option(option, b"x")), [option_reply::ERR_INVALID], "{option}");
    }
    for payload in [&b""[..], b"\0\0\0\x09disk", &info(b"disk", &[1])[..9], &[0xff; 8]] {
        assert_eq!(kinds(&client.option(option::GO, payload)), [option_reply::ERR_INVALID]);
    }
    let long = vec![0; 70_000];
    assert_eq!(kinds(&client.option(option::INFO, &long)), [option_reply::ERR_TOO_BIG]);
    let list = client.option(option::LIST, &[]);
    assert_eq!(kinds(&list), [option_reply::SERVER, option_reply::SERVER, ACK]);
    assert_eq!(list[0].1, [&b"\0\0\0\x04disk"[..], b"a disk"].concat());
    assert_eq!(kinds(&client.option(option::ABORT, &[])), [ACK]);
    assert!(matches!(client.ended, Some(Ended::Aborted)));
}

#[test]
fn strangers_are_hung_up_on() {
    assert!(Client::default().send(&4u32.to_be_bytes()).is_err(), "unknown client flags");
    let mut client = Client::new(3);
    assert!(client.send(&[0; 16]).is_err(), "no magic number");
}

#[test]
fn contexts_are_chosen_for_an_export() {
    let context = option_reply::META_CONTEXT;
    let mut client = Client::new(3);
    let early = client.option(option::SET_META_CONTEXT, &queries(b"disk", &[b"base:allocation"]));
    assert_eq!(kinds(&early), [option_reply::ERR_INVALID], "needs structured replies");
    client.option(option::STRUCTURED_REPLY, &[]);
    let list = |client: &mut Client, asked: &[&[u8]]| {
        kinds(&client.option(option::LIST_META_CONTEXT, &queries(b"disk", asked)))
    };
    assert_eq!(list(&mut client, &[]), [context, context, ACK]);
    assert_eq!(list(&mut client, &[b"base:"]), [context, ACK]);
    assert_eq!(list(&mut client, &[b"foreign:thing", b"x:y"]), [context, ACK]);
    let set = |client: &mut Client, asked: &[&[u8]]| {
        kinds(&client.option(option::SET_META_CONTEXT, &queries(b"disk", asked)))
    };
    assert_eq!(set(&mut client, &[b"base:"]), [ACK], "wildcards only list");
    assert_eq!(set(&mut client, &[b"base:allocation", b"x:y"]), [context, context, ACK]);
    assert_eq!(set(&mut client, &[b"x:y"]), [context, ACK], "replaces the set");
    client.option(option::GO, &info(b"disk", &[]));
    let agreed = client.agreed();
    assert_eq!(agreed.contexts.iter().map(|c| c.number).collect::<Vec<_>>(), [1]);
    // Contexts do not apply to another name, even of the same export.
    let mut client = Client::new(3);
    client.option(option::STRUCTURED_REPLY, &[]);
    set(&mut client, &[b"x:y"]);
    client.option(option::GO, &info(b"", &[]));
    assert!(client.agreed().contexts.is_empty());
}

/// As that of a file with a long path can be.
#[test]
fn a_description_is_no_longer_than_the_protocol_allows() {
    struct Wordy;

    fn description() -> String {
        "de".to_owned() + &"\u{fffd}".repeat(2000)
    }

    impl Catalogue for Wordy {
        fn find(&self, _: &[u8]) -> Option<Offer> {
            Some(Offer { description: description(), ..offer() })
        }

        fn list(&self) -> Vec<(String, String)> {
            vec![("disk".into(), description())]
        }
    }

    let mut haggle = Haggle::default();
    haggle.receive(&3u32.to_be_bytes(), &mut Vec::new(), &Wordy).unwrap();
    let mut ask = |number, payload: &[u8]| {
        let mut out = Vec::new();
        haggle.receive(&option_bytes(number, payload), &mut out, &Wordy).unwrap();
        replies(&out, number)
    };
    let cut = &description()[..4094];
    assert_eq!(ask(option::LIST, b"")[0].1, [&string(b"disk")[..], cut.as_bytes()].concat());
    let told = ask(option::INFO, &info(b"disk", &[2]));
    assert!(told.iter().any(|(_, payload)| payload[2..] == *cut.as_bytes()));
}

#[test]
fn replies_that_are_not_sent_do_not_pile_up() {
    const COUNT: usize = 20_000;
    let stream = [&3u32.to_be_bytes()[..], &option_bytes(option::LIST, &[]).repeat(COUNT)].concat();
    let (mut haggle, mut out) = (Haggle::default(), Vec::new());
    let (mut used, mut answered) = (0, 0);
    while used < stream.len() {
        let progress = haggle.receive(&stream[used..], &mut out, &One).unwrap();
        assert!(out.len() < REPLIES_BYTES_MAX + 1024, "{} bytes", out.len());
        assert!(progress.used > 0, "nothing is unsent");
        used += progress.used;
        answered += replies(&out, option::LIST).iter().filter(|(kind, _)| *kind == ACK).count();
        out.clear();
    }
    assert_eq!(answered, COUNT);
}

fn any_option() -> impl Strategy<Value = Vec<u8>> {
    let payload = prop_oneof![
        proptest::collection::vec(any::<u8>(), 0..40),
        Just(info(b"disk", &[1, 2, 3])),
        Just(queries(b"disk", &[b"base:allocation"])),
    ];
    (0u32..14, payload).prop_map(|(option, payload)| option_bytes(option, &payload))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn however_bytes_are_cut_the_outcome_is_the_same(
        options in proptest::collection::vec(any_option(), 0..8),
        cuts in proptest::collection::vec(1usize..40, 1..60),
    ) {
        let stream = [&3u32.to_be_bytes()[..], &options.concat()].concat();
        let run = |pieces: &mut dyn Iterator<Item = usize>| {
            let (mut haggle, mut out, mut held) = (Haggle::default(), Vec::new(), Vec::new());
            let mut rest = &stream[..];
            loop {
                let count = pieces.next().unwrap_or(usize::MAX).min(rest.len());
                let done = rest.is_empty();
                held.extend_from_slice(&rest[..count]);
                rest = &rest[count..];
                match haggle.receive(&held, &mut out, &One) {
                    Err(error) => return (out, Some(error.0)),
                    Ok(Progress { ended: Some(_), .. }) => return (out, Some("ended")),
                    Ok(Progress { used, ended: None }) => drop(held.drain(..used)),
                }
                if done {
                    return (out, None);
                }
            }
        };
        let whole = run(&mut std::iter::empty());
        let cut = run(&mut cuts.into_iter());
        prop_assert_eq!(whole, cut);
    }

    #[test]
    fn garbage_does_no_harm(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let mut out = Vec::new();
        let mut haggle = Haggle::default();
        if let Ok(progress) = haggle.receive(&bytes, &mut out, &One) {
            prop_assert!(progress.used <= bytes.len());
        }
    }
}
