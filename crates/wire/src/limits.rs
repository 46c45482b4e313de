//! Every limit of the protocol, with compile-time checks of the relations between them.

/// Size of a message header in bytes.
pub const HEADER_BYTES: usize = 32;
/// Longest file name, in bytes (`NAME_MAX` of Linux).
pub const NAME_BYTES_MAX: usize = 255;
/// Longest path, in bytes, without a terminating zero (`PATH_MAX` of Linux minus one).
pub const PATH_BYTES_MAX: usize = 4095;
/// Longest value of an extended attribute, in bytes (`XATTR_SIZE_MAX` of Linux).
pub const XATTR_BYTES_MAX: usize = 65536;
/// Longest body of one message: two paths and an extended attribute fit.
pub const BODY_BYTES_MAX: usize = 80 * 1024;
/// Most operations in one compound.
pub const COMPOUND_OPS_MAX: usize = 16;
/// Largest payload that a request may carry without a grant.
pub const INLINE_BYTES_MAX: usize = 16 * 1024;
/// Most parts of a file that one request writes.
pub const PARTS_MAX: usize = 1024;
/// Most bytes to be written in one data message, and the most one grant allows.
pub const FRAGMENT_BYTES_MAX: usize = 256 * 1024;
/// Most bytes that were read in one message.
pub const READ_BYTES_MAX: usize = 1024 * 1024;
/// Most grants of one write whose data may be outstanding at once.
pub const GRANTS_MAX: usize = TRANSFER_BYTES_MAX / FRAGMENT_BYTES_MAX;
/// Largest read or write in one request.
pub const TRANSFER_BYTES_MAX: usize = 8 * 1024 * 1024;
/// Largest directory listing in one reply.
pub const LISTING_BYTES_MAX: usize = 1024 * 1024;
/// Most bytes of events in one reply.
pub const EVENTS_BYTES_MAX: usize = 64 * 1024;
/// Shortest read that is lent: sending a shorter one costs less than describing its location.
pub const LENT_BYTES_MIN: usize = 2 * 1024;
/// Most extents of one lent read: one for each page of the longest read, and its two ends.
pub const LENT_EXTENTS_MAX: usize = TRANSFER_BYTES_MAX / 4096 + 2;
/// Most memory that one lane may have on loan, counted in whole blocks.
pub const LENT_BYTES_MAX: u64 = 2 * TRANSFER_BYTES_MAX as u64;
/// Most outstanding requests of a session.
pub const SLOTS_MAX: usize = 64;
/// Most open files of a session.
pub const OPEN_FILES_MAX: usize = 65536;
/// Largest reply that the server keeps for replay.
pub const REPLAY_BYTES_MAX: usize = 512;
/// A session without a lane ends after this many seconds: its files are closed and its locks released.
pub const SESSION_LEASE_SECONDS: u64 = 90;
/// The same for a session of a family. The family keeps its open files; the locks of a process are
/// released if no other session speaks for it, nor reports the ends of processes.
pub const FAMILY_LEASE_SECONDS: u64 = 3;
/// Most sessions without a lane on one core.
pub const LANELESS_SESSIONS_MAX: usize = 4096;
/// Time for a client to finish the handshake, or to send a byte of what it was granted, in seconds.
pub const CLIENT_STALL_SECONDS: u64 = 30;
/// How long a client may use an advance grant, in milliseconds.
pub const AHEAD_MILLISECONDS: u64 = 1000;
/// How long the server keeps the buffer of an advance grant, in seconds.
pub const AHEAD_KEPT_SECONDS: u64 = 4;
/// A TCP peer on another machine is considered gone if nothing arrives from it, not even an
/// acknowledgement, for this many seconds.
pub const PEER_SILENCE_SECONDS: u64 = 30;
/// How long a client tries to replace a lost lane before an operation fails, in seconds.
pub const RECONNECT_SECONDS: u64 = 60;
/// After a restart, a server that remembers its sessions holds their locks for this many seconds. Those of
/// clients that are not back by then are released.
pub const LOCK_GRACE_SECONDS: u64 = 30;
/// Default port of a server.
pub const DEFAULT_PORT: u16 = 7440;

const _: () = assert!(INLINE_BYTES_MAX <= FRAGMENT_BYTES_MAX);
const _: () = assert!(FRAGMENT_BYTES_MAX <= TRANSFER_BYTES_MAX);
// A reply carries a listing or data, and data has a checksum of 4 bytes for each 4 KiB in the body.
const _: () = assert!(READ_BYTES_MAX <= LISTING_BYTES_MAX);
const _: () = assert!(READ_BYTES_MAX / 4096 * 4 <= BODY_BYTES_MAX);
const _: () = assert!(2 * PATH_BYTES_MAX + XATTR_BYTES_MAX < BODY_BYTES_MAX);
const _: () = assert!(EVENTS_BYTES_MAX <= LISTING_BYTES_MAX);
const _: () = assert!(12 * LENT_EXTENTS_MAX + 4 + REPLAY_BYTES_MAX <= BODY_BYTES_MAX);
const _: () = assert!(12 * PARTS_MAX < BODY_BYTES_MAX);
const _: () = assert!(SLOTS_MAX <= u64::BITS as usize, "sets of slots are words");
const _: () = assert!(AHEAD_MILLISECONDS < 1000 * AHEAD_KEPT_SECONDS);
const _: () = assert!(LOCK_GRACE_SECONDS < SESSION_LEASE_SECONDS);
