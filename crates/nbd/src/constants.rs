//! Every number of the protocol, and the limits we hold ourselves to.

/// First eight bytes of a server.
pub const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Second eight bytes of a server, and the first of each option.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// First bytes of each reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// First bytes of a request of 28 bytes.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// First bytes of a request of 32 bytes.
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// First bytes of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// First bytes of a structured reply chunk.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
/// First bytes of an extended reply chunk.
pub const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Flags of the server's greeting.
pub mod server_flag {
    /// Errors of options are told, not answered by hanging up.
    pub const FIXED_NEWSTYLE: u16 = 1;
    /// The 124 zeroes may be left out.
    pub const NO_ZEROES: u16 = 2;
}

/// Flags of the client's answer to the greeting.
pub mod client_flag {
    /// The client knows fixed newstyle.
    pub const FIXED_NEWSTYLE: u32 = 1;
    /// The client wants no 124 zeroes.
    pub const NO_ZEROES: u32 = 2;
}

/// Options of the handshake.
pub mod option {
    /// Use this export, the old way.
    pub const EXPORT_NAME: u32 = 1;
    /// End.
    pub const ABORT: u32 = 2;
    /// Name all exports.
    pub const LIST: u32 = 3;
    /// Encrypt.
    pub const STARTTLS: u32 = 5;
    /// Tell about this export.
    pub const INFO: u32 = 6;
    /// Use this export.
    pub const GO: u32 = 7;
    /// Replies in chunks.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// Which metadata contexts are there?
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Use these metadata contexts.
    pub const SET_META_CONTEXT: u32 = 10;
    /// 64-bit lengths, replies in chunks.
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Types of replies to options.
pub mod option_reply {
    /// Done.
    pub const ACK: u32 = 1;
    /// An export's name.
    pub const SERVER: u32 = 2;
    /// Information about an export.
    pub const INFO: u32 = 3;
    /// A metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// Unknown option.
    pub const ERR_UNSUP: u32 = 0x8000_0001;
    /// Not allowed here.
    pub const ERR_POLICY: u32 = 0x8000_0002;
    /// Malformed.
    pub const ERR_INVALID: u32 = 0x8000_0003;
    /// No such export.
    pub const ERR_UNKNOWN: u32 = 0x8000_0006;
    /// The server is about to end.
    pub const ERR_SHUTDOWN: u32 = 0x8000_0007;
    /// Too long.
    pub const ERR_TOO_BIG: u32 = 0x8000_0009;
    /// Extended headers were agreed on; this option makes no sense any more.
    pub const ERR_EXT_HEADER_REQD: u32 = 0x8000_000a;
}

/// Kinds of information about an export.
pub mod info {
    /// Size and transmission flags.
    pub const EXPORT: u16 = 0;
    /// Its name.
    pub const NAME: u16 = 1;
    /// A text for humans.
    pub const DESCRIPTION: u16 = 2;
    /// Block sizes.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Flags that tell what an export can do.
pub mod transmission_flag {
    /// Always set.
    pub const HAS_FLAGS: u16 = 1;
    /// No changes.
    pub const READ_ONLY: u16 = 1 << 1;
    /// FLUSH is there.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// FUA is there.
    pub const SEND_FUA: u16 = 1 << 3;
    /// Seeks cost time.
    pub const ROTATIONAL: u16 = 1 << 4;
    /// TRIM is there.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// WRITE_ZEROES is there.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// The flag DF is there.
    pub const SEND_DF: u16 = 1 << 7;
    /// Several connections see one cache, and a flush on one covers all.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// CACHE is there.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// The flag FAST_ZERO is there.
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
    /// Soft disconnect.
    pub const DISC: u16 = 2;
    /// Make what was written durable.
    pub const FLUSH: u16 = 3;
    /// The contents are no longer needed.
    pub const TRIM: u16 = 4;
    /// Bring into the cache.
    pub const CACHE: u16 = 5;
    /// Write zeroes.
    pub const WRITE_ZEROES: u16 = 6;
    /// Metadata.
    pub const BLOCK_STATUS: u16 = 7;
}

/// Flags of commands.
pub mod command_flag {
    /// Durable before the reply.
    pub const FUA: u16 = 1;
    /// Zeroes have to be allocated.
    pub const NO_HOLE: u16 = 1 << 1;
    /// At most one chunk of data.
    pub const DF: u16 = 1 << 2;
    /// One extent for each context.
    pub const REQ_ONE: u16 = 1 << 3;
    /// Fail rather than write zeroes one by one.
    pub const FAST_ZERO: u16 = 1 << 4;
    /// The length is that of a payload which follows.
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// Types of reply chunks.
pub mod chunk {
    /// Nothing; ends a reply.
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

/// The errors that may travel. Anything else becomes one of them in [`Error::of`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
#[allow(missing_docs, clippy::exhaustive_enums)] // named like the errno they are; the text fixes the set
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
    /// The protocol's error for an `errno` of Linux.
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

    /// A text for humans.
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

/// Longest string, by the protocol's text.
pub const STRING_BYTES_MAX: usize = 4096;
/// Longest payload of an option that is looked at; longer ones are skipped and refused.
pub const OPTION_BYTES_MAX: usize = 64 * 1024;
/// Options in one handshake: more are an attack. Clients that list a server ask twice for each export.
pub const OPTIONS_MAX: u32 = 65536;
/// Largest payload of a request or a chunk: what clients may assume without asking.
pub const PAYLOAD_BYTES_MAX: u32 = 32 * 1024 * 1024;
/// Largest payload of a request that is skipped to stay in step; longer ones end the connection.
pub const SKIP_BYTES_MAX: u64 = 64 * 1024 * 1024;
/// Extents in one chunk.
pub const EXTENTS_MAX: usize = 32 * 1024;

const _: () = assert!(OPTION_BYTES_MAX > 2 * STRING_BYTES_MAX);
const _: () = assert!(SKIP_BYTES_MAX >= PAYLOAD_BYTES_MAX as u64);
