//! Every limit of this crate, with the relations between them checked.

use towline_wire::limits::{BODY_BYTES_MAX, FRAGMENT_BYTES_MAX};

/// Most parts of one global aggregate.
pub const PARTS_MAX: usize = 1024;
/// Most different owners in one global aggregate.
pub const HOMES_MAX: usize = 64;
/// Most addresses of one node.
pub const ADDRESSES_MAX: usize = 4;
/// Longest packed global aggregate: parts, and homes with addresses that are paths.
pub const DESCRIPTOR_BYTES_MAX: usize = 64 * 1024;
/// Longest message of a program to another.
pub const MESSAGE_BYTES_MAX: usize = 64 * 1024;
/// Bytes of messages that a peer may have sent and the program has not taken yet.
pub const MESSAGE_WINDOW_BYTES: usize = 2 * MESSAGE_BYTES_MAX;
/// What a message counts at least, so that the window bounds their number too.
pub const MESSAGE_COST_BYTES: usize = 256;
/// Leases that one peer may hold on buffers of a node, and write-backs that it may have under way.
pub const LEASES_MAX: usize = 256;
/// Messages that may wait for a peer which does not read; one that asks for more is cut off.
pub const QUEUED_MAX: usize = 8192;
/// Fragments of one transfer that are granted ahead.
pub const FRAGMENTS_AHEAD: u64 = 4;
/// Parts that one mapping request may name: their descriptors have to fit into a socket.
pub const MAPPED_PARTS_MAX: usize = 16;
/// Regions that one direct read may name.
pub const REGIONS_MAX: usize = 256;
/// Time for a greeting, and for a peer to use memory that was granted to it, in seconds.
pub const STALL_SECONDS: u64 = 30;

/// Parts of what is pushed with a message: they have to fit into its body.
pub const PUSHED_PARTS_MAX: usize = 256;

const _: () = assert!(MESSAGE_BYTES_MAX + 28 * PUSHED_PARTS_MAX + 32 <= BODY_BYTES_MAX);
const _: () = assert!(DESCRIPTOR_BYTES_MAX <= MESSAGE_BYTES_MAX);
const _: () = assert!(PARTS_MAX * 36 < DESCRIPTOR_BYTES_MAX);
const _: () = assert!(FRAGMENT_BYTES_MAX.is_power_of_two());
