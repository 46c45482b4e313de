//! A reply as messages: data in fragments, then the results.

use crate::lane::Lane;
use std::sync::Arc;
use towline_mem::{Aggregate, Segment};
use towline_session::slots::Slots;
use towline_wire::limits::{FRAGMENT_BYTES_MAX, HEADER_BYTES, LISTING_BYTES_MAX};
use towline_wire::{Header, Kind};

/// Largest piece of data that rides in the reply itself. Listings always do.
fn fits_reply(data: &Aggregate, is_read: bool) -> bool {
    let limit = if is_read { FRAGMENT_BYTES_MAX } else { LISTING_BYTES_MAX };
    // A file that shrinks while it is sent is told of by a message between data and reply.
    let file = data.slices().any(|slice| matches!(slice.segment, Segment::File(_)));
    data.len() <= limit as u64 && !file
}

/// Replies without data up to this length are copied.
const COPIED_BYTES_MAX: usize = 1024;

/// Queues a reply on a lane. The slot is free then; with `remember` it keeps header and results.
pub(crate) fn send_reply(
    mut lane: Option<&mut Lane>,
    slots: &mut Slots,
    mut header: Header,
    mut results: Vec<u8>,
    mut data: Aggregate,
    is_read: bool,
    remember: bool,
) {
    let mut fragments = Vec::new();
    let mut offset = 0;
    while !fits_reply(&data, is_read) {
        let fragment = data.split_to(FRAGMENT_BYTES_MAX as u64);
        let mut head = Header::new(Kind::Data, header.slot, header.sequence);
        head.offset = offset;
        head.payload_bytes = fragment.len() as u32;
        offset += fragment.len();
        fragments.push((head, fragment));
    }
    if offset > 0 {
        header.offset = offset;
    }
    header.payload_bytes = data.len() as u32;
    // In front of them in their own memory, which has room.
    let length = results.len();
    results.resize(length + HEADER_BYTES, 0);
    results.copy_within(..length, HEADER_BYTES);
    results[..HEADER_BYTES].copy_from_slice(&header.to_bytes());
    slots.answer(header.slot, remember.then_some(&results));
    if let Some(lane) = lane.as_deref_mut()
        && data.is_empty()
        && fragments.is_empty()
        && results.len() <= COPIED_BYTES_MAX
    {
        return lane.out.push_short(&results);
    }
    let Some(lane) = lane else { return };
    for (head, mut fragment) in fragments {
        let head = head.to_bytes().to_vec();
        let length = head.len() as u64;
        fragment.prepend(Segment::Host(Arc::new(head)), 0, length);
        lane.out.push(fragment, header.slot, header.sequence);
    }
    let mut message = Aggregate::from_vec(results);
    if !data.is_empty() {
        message.concatenate(data);
    }
    lane.out.push(message, header.slot, header.sequence);
}
