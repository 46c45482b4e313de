//! Every limit of the protocol, in one place, with the relations between them checked.

/// Bytes of a message header.
pub const HEADER_BYTES: usize = 32;
/// Longest file name, in bytes (`NAME_MAX` of Linux).
pub const NAME_BYTES_MAX: usize = 255;
/// Longest path, in bytes, without a terminating zero (`PATH_MAX` of Linux less one).
pub const PATH_BYTES_MAX: usize = 4095;
/// Longest extended attribute value (`XATTR_SIZE_MAX` of Linux).
pub const XATTR_BYTES_MAX: usize = 65536;
/// Longest body of one message: two paths and an extended attribute fit.
pub const BODY_BYTES_MAX: usize = 80 * 1024;
/// Most operations in one compound.
pub const COMPOUND_OPS_MAX: usize = 16;
/// Largest payload that may ride in a request without a grant.
pub const INLINE_BYTES_MAX: usize = 16 * 1024;
/// Largest payload of one data message, and the most one grant allows.
pub const FRAGMENT_BYTES_MAX: usize = 256 * 1024;
/// Grants of one write that may wait for their data at once.
pub const GRANTS_MAX: usize = 2;
/// Largest read or write in one request.
pub const TRANSFER_BYTES_MAX: usize = 8 * 1024 * 1024;
/// Largest directory listing in one reply.
pub const LISTING_BYTES_MAX: usize = 1024 * 1024;
/// Most bytes of events in one reply.
pub const EVENTS_BYTES_MAX: usize = 64 * 1024;
/// Shorter reads are never lent: copying them costs less than describing where they stand.
pub const LENT_BYTES_MIN: usize = 32 * 1024;
/// Most extents of one lent read: one for each page of the longest, and its two ends.
pub const LENT_EXTENTS_MAX: usize = TRANSFER_BYTES_MAX / 4096 + 2;
/// Most memory that the blocks take which one lane has on loan.
pub const LENT_BYTES_MAX: u64 = 2 * TRANSFER_BYTES_MAX as u64;
/// Outstanding requests of a session.
pub const SLOTS_MAX: usize = 64;
/// Open files of a session.
pub const OPEN_FILES_MAX: usize = 65536;
/// Largest reply that the server keeps for replay.
pub const REPLAY_BYTES_MAX: usize = 512;
/// A session without a lane ends after this many seconds: its files close, its locks fall.
pub const SESSION_LEASE_SECONDS: u64 = 90;
/// The same for a session of a family: its open files stay with the family, and its locks are those
/// of a process that ended.
pub const FAMILY_LEASE_SECONDS: u64 = 3;
/// Time for a client to finish the handshake or to use a grant, in seconds.
pub const CLIENT_STALL_SECONDS: u64 = 30;
/// How long a client may use the leave to send data ahead of its grant, in milliseconds.
pub const AHEAD_MILLISECONDS: u64 = 1000;
/// How long the server keeps the buffer for that, in seconds.
pub const AHEAD_KEPT_SECONDS: u64 = 4;
/// A TCP peer on another machine that does not even acknowledge anything for so many seconds is gone.
pub const PEER_SILENCE_SECONDS: u64 = 30;
/// How long a client tries to replace a lost lane before an operation fails, in seconds.
pub const RECONNECT_SECONDS: u64 = 60;
/// After a restart of a server that remembers its sessions, new locks wait at most so many seconds
/// for clients that had locks before.
pub const LOCK_GRACE_SECONDS: u64 = 30;
/// The port of a server where none is named.
pub const DEFAULT_PORT: u16 = 7440;

const _: () = assert!(INLINE_BYTES_MAX <= FRAGMENT_BYTES_MAX);
const _: () = assert!(FRAGMENT_BYTES_MAX <= TRANSFER_BYTES_MAX);
const _: () = assert!(2 * PATH_BYTES_MAX + XATTR_BYTES_MAX < BODY_BYTES_MAX);
const _: () = assert!(EVENTS_BYTES_MAX <= LISTING_BYTES_MAX);
const _: () = assert!(12 * LENT_EXTENTS_MAX + 4 + REPLAY_BYTES_MAX <= BODY_BYTES_MAX);
const _: () = assert!(SLOTS_MAX <= u64::BITS as usize, "sets of slots are words");
const _: () = assert!(AHEAD_MILLISECONDS < 1000 * AHEAD_KEPT_SECONDS);
const _: () = assert!(LOCK_GRACE_SECONDS < SESSION_LEASE_SECONDS);
