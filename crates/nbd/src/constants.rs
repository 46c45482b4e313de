//! Every number of the protocol, and the limits that this server sets itself.

/// First eight bytes that a server sends.
pub const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Second eight bytes that a server sends, and the first eight of each option.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// First bytes of each reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// First bytes of a compact request (28 bytes).
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// First bytes of an extended request (32 bytes).
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// First bytes of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// First bytes of a structured reply chunk.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
/// First bytes of an extended reply chunk.
pub const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Flags of the server's greeting.
pub mod server_flag {
    /// The server answers a bad option with an error instead of hanging up.
    pub const FIXED_NEWSTYLE: u16 = 1;
    /// The server can omit the 124 zero bytes.
    pub const NO_ZEROES: u16 = 2;
}

/// Flags of the client's reply to the greeting.
pub mod client_flag {
    /// The client knows the fixed newstyle handshake.
    pub const FIXED_NEWSTYLE: u32 = 1;
    /// The client does not want the 124 zero bytes.
    pub const NO_ZEROES: u32 = 2;
}

/// Options of the handshake.
pub mod option {
    /// Chooses an export and ends the handshake; the old form of GO.
    pub const EXPORT_NAME: u32 = 1;
    /// Ends the handshake and the connection.
    pub const ABORT: u32 = 2;
    /// Lists all exports.
    pub const LIST: u32 = 3;
    /// Starts encryption.
    pub const STARTTLS: u32 = 5;
    /// Asks for information about an export.
    pub const INFO: u32 = 6;
    /// Chooses an export and ends the handshake.
    pub const GO: u32 = 7;
    /// Asks for replies in chunks.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// Lists the metadata contexts.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Chooses metadata contexts.
    pub const SET_META_CONTEXT: u32 = 10;
    /// Asks for 64-bit lengths and replies in chunks.
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Types of replies to options.
pub mod option_reply {
    /// Success; ends the replies to an option.
    pub const ACK: u32 = 1;
    /// An export's name.
    pub const SERVER: u32 = 2;
    /// Information about an export.
    pub const INFO: u32 = 3;
    /// A metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// Unknown option.
    pub const ERR_UNSUP: u32 = 0x8000_0001;
    /// The server's policy forbids the option.
    pub const ERR_POLICY: u32 = 0x8000_0002;
    /// The option is malformed.
    pub const ERR_INVALID: u32 = 0x8000_0003;
    /// No such export.
    pub const ERR_UNKNOWN: u32 = 0x8000_0006;
    /// The server is about to exit.
    pub const ERR_SHUTDOWN: u32 = 0x8000_0007;
    /// The option is too long.
    pub const ERR_TOO_BIG: u32 = 0x8000_0009;
    /// Extended headers are already agreed on, so this option no longer makes sense.
    pub const ERR_EXT_HEADER_REQD: u32 = 0x8000_000a;
}

/// Kinds of information about an export.
pub mod info {
    /// Size and transmission flags.
    pub const EXPORT: u16 = 0;
    /// The export's name.
    pub const NAME: u16 = 1;
    /// Text for humans.
    pub const DESCRIPTION: u16 = 2;
    /// Block sizes.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Flags that say what an export can do.
pub mod transmission_flag {
    /// Always set.
    pub const HAS_FLAGS: u16 = 1;
    /// The export refuses changes.
    pub const READ_ONLY: u16 = 1 << 1;
    /// The server supports FLUSH.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// The server supports FUA.
    pub const SEND_FUA: u16 = 1 << 3;
    /// Seeks cost time.
    pub const ROTATIONAL: u16 = 1 << 4;
    /// The server supports TRIM.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// The server supports WRITE_ZEROES.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// The server supports the flag DF.
    pub const SEND_DF: u16 = 1 << 7;
    /// All connections see the same cache, and a flush on one covers them all.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// The server supports CACHE.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// The server supports the flag FAST_ZERO.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
    /// BLOCK_STATUS may carry a list of contexts.
    pub const BLOCK_STAT_PAYLOAD: u16 = 1 << 12;
}

/// Commands.
pub mod command {
    /// Read.
    pub const READ: u16 = 0;
    /// Write.
    pub const WRITE: u16 = 1;
    /// Disconnect after all requests are answered.
    pub const DISC: u16 = 2;
    /// Make answered writes durable.
    pub const FLUSH: u16 = 3;
    /// Discard contents that are no longer needed.
    pub const TRIM: u16 = 4;
    /// Read into the cache.
    pub const CACHE: u16 = 5;
    /// Write zeroes.
    pub const WRITE_ZEROES: u16 = 6;
    /// Report metadata (extents).
    pub const BLOCK_STATUS: u16 = 7;
}

/// Flags of commands.
pub mod command_flag {
    /// The change is durable before the reply.
    pub const FUA: u16 = 1;
    /// The zeroes have to be allocated.
    pub const NO_HOLE: u16 = 1 << 1;
    /// Reply with at most one chunk of data.
    pub const DF: u16 = 1 << 2;
    /// Report one extent for each context.
    pub const REQ_ONE: u16 = 1 << 3;
    /// Fail rather than write zeroes as slowly as data.
    pub const FAST_ZERO: u16 = 1 << 4;
    /// The length field is the length of a payload that follows.
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// Types of reply chunks.
pub mod chunk {
    /// No content; only ends a reply.
    pub const NONE: u16 = 0;
    /// Data at an offset.
    pub const OFFSET_DATA: u16 = 1;
    /// Zeroes at an offset.
    pub const OFFSET_HOLE: u16 = 2;
    /// Extents with 32-bit lengths.
    pub const BLOCK_STATUS: u16 = 5;
    /// Extents with 64-bit lengths.
    pub const BLOCK_STATUS_EXT: u16 = 6;
    /// An error.
    pub const ERROR: u16 = (1 << 15) + 1;
    /// An error at an offset.
    pub const ERROR_OFFSET: u16 = (1 << 15) + 2;
    /// Flag: the last chunk of its reply.
    pub const FLAG_DONE: u16 = 1;
}

/// The errors that may be sent. [`Error::of`] maps any other error to one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
#[allow(missing_docs, clippy::exhaustive_enums)] // named after their errno; the protocol fixes the set
pub enum Error {
    Perm = 1,
    Io = 5,
    NoMem = 12,
    Inval = 22,
    NoSpc = 28,
    Overflow = 75,
    NotSup = 95,
    Shutdown = 108,
}

impl Error {
    /// Returns the protocol's error for a Linux `errno`.
    #[must_use]
    pub fn of(errno: i32) -> Self {
        match errno {
            // EPERM, EROFS, EACCES
            1 | 30 | 13 => Self::Perm,
            12 => Self::NoMem,
            22 => Self::Inval,
            // ENOSPC, EDQUOT, EFBIG
            28 | 122 | 27 => Self::NoSpc,
            75 => Self::Overflow,
            // ENOTSUP
            95 => Self::NotSup,
            108 => Self::Shutdown,
            _ => Self::Io,
        }
    }

    /// Returns a text for humans.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::Perm => "operation not permitted",
            Self::Io => "input/output error",
            Self::NoMem => "cannot allocate memory",
            Self::Inval => "invalid argument",
            Self::NoSpc => "no space left on device",
            Self::Overflow => "value too large",
            Self::NotSup => "operation not supported",
            Self::Shutdown => "the server is shutting down",
        }
    }
}

/// Longest string that the protocol allows.
pub const STRING_BYTES_MAX: usize = 4096;
/// Longest option payload that is parsed; longer ones are skipped and refused.
pub const OPTION_BYTES_MAX: usize = 64 * 1024;
/// Maximum number of options in one handshake; more are taken for an attack. Clients that list a server's
/// exports send two for each of them.
pub const OPTIONS_MAX: u32 = 65536;
/// While this many bytes of replies to options are unsent, no further option is processed. A few bytes ask for
/// the whole list of exports.
pub const REPLIES_BYTES_MAX: usize = 1024 * 1024;
/// Largest payload of a request or chunk: the size that clients may assume without asking.
pub const PAYLOAD_BYTES_MAX: u32 = 32 * 1024 * 1024;
/// Largest request payload that is skipped to keep the stream in step; a longer one ends the connection.
pub const SKIP_BYTES_MAX: u64 = 64 * 1024 * 1024;
/// Reads of up to this many bytes must not fail for the flag DF where the server announces it.
pub const WHOLE_BYTES: u64 = 64 * 1024;
/// Maximum number of extents in one chunk.
pub const EXTENTS_MAX: usize = 32 * 1024;

const _: () = assert!(OPTION_BYTES_MAX > 2 * STRING_BYTES_MAX);
const _: () = assert!(SKIP_BYTES_MAX >= PAYLOAD_BYTES_MAX as u64);
