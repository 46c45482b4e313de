//! A reply as messages: data in fragments, then the results.

use crate::lane::Lane;
use towline_mem::{Aggregate, Segment};
use towline_session::slots::Slots;
use towline_wire::limits::{FRAGMENT_BYTES_MAX, LISTING_BYTES_MAX};
use towline_wire::{Header, Kind};

/// Largest piece of data that rides in the reply itself. Listings always do.
fn fits_reply(data: &Aggregate, is_read: bool) -> bool {
    let limit = if is_read { FRAGMENT_BYTES_MAX } else { LISTING_BYTES_MAX };
    // A file that shrinks while it is sent is told of by a message between data and reply.
    let file = data.slices().any(|slice| matches!(slice.segment, Segment::File(_)));
    data.len() <= limit as u64 && !file
}

/// Results up to this length are copied.
const COPIED_BYTES_MAX: usize = 1024;

/// Queues a reply on a lane, with its data, which it takes. The slot is free then; with `remember` it keeps header and results.
pub(crate) fn send_reply(
    lane: Option<&mut Lane>,
    slots: &mut Slots,
    mut header: Header,
    results: &[u8],
    data: &mut Aggregate,
    is_read: bool,
    remember: bool,
) {
    let (slot, sequence) = (header.slot, header.sequence);
    let mut sent = 0;
    let mut out = lane.map(|lane| &mut lane.out);
    while !fits_reply(data, is_read) {
        let fragment = data.split_to(FRAGMENT_BYTES_MAX as u64);
        let mut head = Header::new(Kind::Data, slot, sequence);
        head.offset = sent;
        head.payload_bytes = fragment.len() as u32;
        sent += fragment.len();
        if let Some(out) = &mut out {
            out.push_begun([&head.to_bytes(), b""], fragment, slot, sequence);
        }
    }
    if sent > 0 {
        header.offset = sent;
    }
    header.payload_bytes = data.len() as u32;
    let head = header.to_bytes();
    slots.answer(slot, remember.then_some([&head, results]));
    let Some(out) = out else { return };
    if results.len() > COPIED_BYTES_MAX {
        let mut message = Aggregate::from_vec(results.to_vec());
        message.concatenate(std::mem::take(data));
        out.push_begun([&head, b""], message, slot, sequence);
    } else if data.is_empty() {
        out.push_short([&head, results]);
    } else {
        out.push_begun([&head, results], std::mem::take(data), slot, sequence);
    }
}
