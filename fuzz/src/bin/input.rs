//! Fuzzes the receiver of messages: bytes that arrive in pieces give the same messages as in one piece.
#![no_main]

use towline_net::{Counters, Incoming, Input, Link, Sink, Target, local_pair};
use towline_wire::limits::BODY_BYTES_MAX;
use towline_wire::{Header, ProtocolError};

/// A message: its header, body and payload.
type Message = (Vec<u8>, Vec<u8>, Vec<u8>);

#[derive(Default)]
struct Collect {
    messages: Vec<Message>,
    place: Vec<u8>,
    expects_bulk: bool,
}

impl Sink for Collect {
    fn message(
        &mut self,
        header: &Header,
        body: &[u8],
        payload: &[u8],
    ) -> Result<(), ProtocolError> {
        let bulk = std::mem::take(&mut self.place);
        let payload = if payload.is_empty() { bulk } else { payload.to_vec() };
        assert_eq!(body.len(), header.body_bytes as usize);
        // Bulk data for odd slots is discarded.
        assert!(payload.len() == header.payload_bytes as usize || header.slot % 2 == 1);
        self.messages.push((header.to_bytes().to_vec(), body.to_vec(), payload));
        Ok(())
    }

    fn place(&mut self, header: &Header, _: &[u8], done: usize, rest: usize) -> Option<Target<'_>> {
        if header.slot % 2 == 1 {
            return None;
        }
        assert_eq!(done + rest, header.payload_bytes as usize);
        self.place.resize(header.payload_bytes as usize, 0);
        Some(Target::Own(&mut self.place[done..done + rest]))
    }

    fn expects_bulk(&self) -> bool {
        self.expects_bulk
    }
}

fn receive(near: &Link, input: &mut Input, sink: &mut Collect, counters: &Counters) -> bool {
    let mut scratch = vec![0; BODY_BYTES_MAX + 64 * 1024];
    loop {
        match input.receive(near, &mut scratch, None, sink, counters) {
            Ok(Incoming::Progress) => {}
            Ok(Incoming::Drained) => return true,
            Ok(Incoming::Closed) | Err(_) => return false,
        }
    }
}

/// Returns the received messages, and whether all bytes were valid.
fn messages(pieces: &mut dyn Iterator<Item = &[u8]>, expects_bulk: bool) -> (Vec<Message>, bool) {
    let (near, far) = local_pair();
    let counters = Counters::default();
    let (mut input, mut sink) = (Input::default(), Collect { expects_bulk, ..Collect::default() });
    for piece in pieces {
        let sent = far.send(&[piece], &counters);
        assert_eq!(sent.ok(), Some(piece.len()));
        if !receive(&near, &mut input, &mut sink, &counters) {
            return (sink.messages, false);
        }
    }
    (sink.messages, true)
}

libfuzzer_sys::fuzz_target!(|data: (u8, &[u8])| {
    let (how, data) = data;
    if data.is_empty() || data.len() > 100_000 {
        return;
    }
    let whole = messages(&mut std::iter::once(data), false);
    let cut = 1 + usize::from(how >> 1);
    assert_eq!(messages(&mut data.chunks(cut), how & 1 == 1), whole, "in pieces of {cut}");
});
