//! Sends a reply as messages: data that does not fit beside the results, then the results.

use crate::lane::Lane;
use towline_mem::Aggregate;
use towline_net::LinkKind;
use towline_session::slots::Slots;
use towline_wire::limits::{LISTING_BYTES_MAX, READ_BYTES_MAX};
use towline_wire::{Header, Kind};

/// What the reply message itself carries.
#[derive(Clone, Copy)]
pub(crate) enum Carries {
    /// A listing, always complete.
    Listing,
    /// The last part of the data read.
    Read,
}

impl Carries {
    fn takes(self, data: &Aggregate) -> bool {
        let limit = match self {
            Self::Listing => LISTING_BYTES_MAX,
            Self::Read => READ_BYTES_MAX,
        };
        data.len() <= limit as u64
    }
}

/// Results of up to this many bytes are copied.
const COPIED_BYTES_MAX: usize = 1024;

/// Queues a reply on a lane and takes its data. The slot is then free; with `remember` it keeps header and
/// results.
pub(crate) fn send_reply(
    lane: Option<&mut Lane>,
    slots: &mut Slots,
    mut header: Header,
    results: &[u8],
    data: &mut Aggregate,
    carries: Carries,
    remember: bool,
) {
    let (slot, sequence) = (header.slot, header.sequence);
    let mut sent = 0;
    // Shared memory has the data copied into its ring anyway.
    let is_socket = lane.as_ref().is_some_and(|lane| lane.link.kind() != LinkKind::Shm);
    let mut out = lane.map(|lane| &mut lane.out);
    while !carries.takes(data) {
        let part = data.split_to(READ_BYTES_MAX as u64);
        let mut head = Header::new(Kind::Data, slot, sequence);
        head.offset = sent;
        head.payload_bytes = part.len() as u32;
        sent += part.len();
        if let Some(out) = &mut out {
            // If it cannot be read, the lane ends and the client sends the request again (`Served::promise_broken`).
            out.push_promised([&head.to_bytes(), b""], part);
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
        out.push_promised([&head, b""], message);
    } else if data.is_empty() {
        out.push_short([&head, results]);
    } else if !(is_socket && out.push_small([&head, results], data)) {
        out.push_promised([&head, results], std::mem::take(data));
    }
}
