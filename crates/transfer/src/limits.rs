//! All limits of this crate, with checks of the relations between them.

use towline_wire::limits::{BODY_BYTES_MAX, FRAGMENT_BYTES_MAX};

/// Most parts of one global aggregate.
pub const PARTS_MAX: usize = 1024;
/// Most slices of one owner's buffers that a request may name. A part may be of many slices, and a request
/// may name the same part many times.
pub const SLICES_MAX: usize = 16 * PARTS_MAX;
/// Most distinct owners in one global aggregate.
pub const HOMES_MAX: usize = 64;
/// Most addresses of one node.
pub const ADDRESSES_MAX: usize = 4;
/// Longest packed global aggregate, with its parts, its homes and their addresses, which may be paths.
pub const DESCRIPTOR_BYTES_MAX: usize = 64 * 1024;
/// Longest message from one program to another.
pub const MESSAGE_BYTES_MAX: usize = 64 * 1024;
/// Bytes of messages that a peer may have sent and the program has not received yet.
pub const MESSAGE_WINDOW_BYTES: usize = 2 * MESSAGE_BYTES_MAX;
/// Bytes that a message counts at least, so that the window also bounds the number of messages.
pub const MESSAGE_COST_BYTES: usize = 256;
/// Leases that one peer may hold on a node's buffers, and write-backs that it may have in progress.
pub const LEASES_MAX: usize = 256;
/// Messages that may wait for a peer that does not read. A link whose peer requests more is closed.
pub const QUEUED_MAX: usize = 8192;
/// Fragments of one transfer that are granted in advance.
pub const FRAGMENTS_AHEAD: u64 = 4;
/// Most parts, and memories, of one mapping request; the memories' descriptors have to fit into a socket.
pub const MAPPED_PARTS_MAX: usize = 16;
/// Most regions of one direct read.
pub const REGIONS_MAX: usize = 256;
/// Time limit in seconds for a greeting, and for a peer to use memory that was granted to it.
pub const STALL_SECONDS: u64 = 30;

/// Most parts of data pushed with a message; they have to fit into its body.
pub const PUSHED_PARTS_MAX: usize = 256;

const _: () = assert!(MESSAGE_BYTES_MAX + 28 * PUSHED_PARTS_MAX + 32 <= BODY_BYTES_MAX);
const _: () = assert!(DESCRIPTOR_BYTES_MAX <= MESSAGE_BYTES_MAX);
const _: () = assert!(PARTS_MAX * 36 < DESCRIPTOR_BYTES_MAX);
const _: () = assert!(FRAGMENT_BYTES_MAX.is_power_of_two());
