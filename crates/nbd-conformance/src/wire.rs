//! Constants of the protocol text, under the names used there (without the prefix `NBD_`).
//!
//! All integers on the wire are big-endian.
#![allow(missing_docs)] // documented in the protocol text under the same names

pub const GREETING_MAGIC: u64 = 0x4e42_444d_4147_4943;
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
pub const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Longest string that the text allows, in bytes.
pub const STRING_MAX: usize = 4096;
/// Number of zero bytes at the end of the reply to `OPT_EXPORT_NAME`, unless both sides agreed to omit them.
pub const EXPORT_NAME_PADDING: usize = 124;
/// Largest payload in bytes that clients may send if the server announces no limit.
pub const PORTABLE_PAYLOAD_MAX: u64 = 32 << 20;
/// Length in bytes up to which a read with the DF flag must work.
pub const DF_LENGTH_MIN: u64 = 65_536;

pub const FLAG_FIXED_NEWSTYLE: u16 = 1 << 0;
pub const FLAG_NO_ZEROES: u16 = 1 << 1;
pub const C_FIXED_NEWSTYLE: u32 = 1 << 0;
pub const C_NO_ZEROES: u32 = 1 << 1;

pub const FLAG_HAS_FLAGS: u16 = 1 << 0;
pub const FLAG_READ_ONLY: u16 = 1 << 1;
pub const FLAG_SEND_FLUSH: u16 = 1 << 2;
pub const FLAG_SEND_FUA: u16 = 1 << 3;
pub const FLAG_ROTATIONAL: u16 = 1 << 4;
pub const FLAG_SEND_TRIM: u16 = 1 << 5;
pub const FLAG_SEND_WRITE_ZEROES: u16 = 1 << 6;
pub const FLAG_SEND_DF: u16 = 1 << 7;
pub const FLAG_CAN_MULTI_CONN: u16 = 1 << 8;
pub const FLAG_SEND_CACHE: u16 = 1 << 10;
pub const FLAG_SEND_FAST_ZERO: u16 = 1 << 11;
pub const FLAG_BLOCK_STAT_PAYLOAD: u16 = 1 << 12;

pub const OPT_EXPORT_NAME: u32 = 1;
pub const OPT_ABORT: u32 = 2;
pub const OPT_LIST: u32 = 3;
pub const OPT_PEEK_EXPORT: u32 = 4;
pub const OPT_STARTTLS: u32 = 5;
pub const OPT_INFO: u32 = 6;
pub const OPT_GO: u32 = 7;
pub const OPT_STRUCTURED_REPLY: u32 = 8;
pub const OPT_LIST_META_CONTEXT: u32 = 9;
pub const OPT_SET_META_CONTEXT: u32 = 10;
pub const OPT_EXTENDED_HEADERS: u32 = 11;
/// An unregistered option.
pub const OPT_UNKNOWN: u32 = 0x6b69_7400;

pub const REP_ACK: u32 = 1;
pub const REP_SERVER: u32 = 2;
pub const REP_INFO: u32 = 3;
pub const REP_META_CONTEXT: u32 = 4;
pub const REP_ERROR: u32 = 1 << 31;
pub const REP_ERR_UNSUP: u32 = REP_ERROR + 1;
pub const REP_ERR_POLICY: u32 = REP_ERROR + 2;
pub const REP_ERR_INVALID: u32 = REP_ERROR + 3;
pub const REP_ERR_PLATFORM: u32 = REP_ERROR + 4;
pub const REP_ERR_TLS_REQD: u32 = REP_ERROR + 5;
pub const REP_ERR_UNKNOWN: u32 = REP_ERROR + 6;
pub const REP_ERR_SHUTDOWN: u32 = REP_ERROR + 7;
pub const REP_ERR_BLOCK_SIZE_REQD: u32 = REP_ERROR + 8;
pub const REP_ERR_TOO_BIG: u32 = REP_ERROR + 9;
pub const REP_ERR_EXT_HEADER_REQD: u32 = REP_ERROR + 10;

pub const INFO_EXPORT: u16 = 0;
pub const INFO_NAME: u16 = 1;
pub const INFO_DESCRIPTION: u16 = 2;
pub const INFO_BLOCK_SIZE: u16 = 3;
/// An unregistered information type.
pub const INFO_UNKNOWN: u16 = 0x6b69;

pub const CMD_READ: u16 = 0;
pub const CMD_WRITE: u16 = 1;
pub const CMD_DISC: u16 = 2;
pub const CMD_FLUSH: u16 = 3;
pub const CMD_TRIM: u16 = 4;
pub const CMD_CACHE: u16 = 5;
pub const CMD_WRITE_ZEROES: u16 = 6;
pub const CMD_BLOCK_STATUS: u16 = 7;
/// An unregistered command.
pub const CMD_UNKNOWN: u16 = 0x6b69;

pub const CMD_FLAG_FUA: u16 = 1 << 0;
pub const CMD_FLAG_NO_HOLE: u16 = 1 << 1;
pub const CMD_FLAG_DF: u16 = 1 << 2;
pub const CMD_FLAG_REQ_ONE: u16 = 1 << 3;
pub const CMD_FLAG_FAST_ZERO: u16 = 1 << 4;
pub const CMD_FLAG_PAYLOAD_LEN: u16 = 1 << 5;
/// An unregistered command flag.
pub const CMD_FLAG_UNKNOWN: u16 = 1 << 14;

pub const REPLY_FLAG_DONE: u16 = 1 << 0;
pub const REPLY_NONE: u16 = 0;
pub const REPLY_OFFSET_DATA: u16 = 1;
pub const REPLY_OFFSET_HOLE: u16 = 2;
pub const REPLY_BLOCK_STATUS: u16 = 5;
pub const REPLY_BLOCK_STATUS_EXT: u16 = 6;
pub const REPLY_ERROR_BIT: u16 = 1 << 15;
pub const REPLY_ERROR: u16 = REPLY_ERROR_BIT + 1;
pub const REPLY_ERROR_OFFSET: u16 = REPLY_ERROR_BIT + 2;

pub const STATE_HOLE: u64 = 1 << 0;
pub const STATE_ZERO: u64 = 1 << 1;

pub const EPERM: u32 = 1;
pub const EIO: u32 = 5;
pub const ENOMEM: u32 = 12;
pub const EINVAL: u32 = 22;
pub const ENOSPC: u32 = 28;
pub const EOVERFLOW: u32 = 75;
pub const ENOTSUP: u32 = 95;
pub const ESHUTDOWN: u32 = 108;

/// Returns the name of an error value in a reply.
pub fn error_name(error: u32) -> String {
    let name = match error {
        0 => "success",
        EPERM => "EPERM",
        EIO => "EIO",
        ENOMEM => "ENOMEM",
        EINVAL => "EINVAL",
        ENOSPC => "ENOSPC",
        EOVERFLOW => "EOVERFLOW",
        ENOTSUP => "ENOTSUP",
        ESHUTDOWN => "ESHUTDOWN",
        other => return format!("error {other}, which the text does not define"),
    };
    name.to_owned()
}

/// Returns the name of the type of an option reply.
pub fn reply_name(kind: u32) -> String {
    let name = match kind {
        REP_ACK => "ACK",
        REP_SERVER => "SERVER",
        REP_INFO => "INFO",
        REP_META_CONTEXT => "META_CONTEXT",
        REP_ERR_UNSUP => "ERR_UNSUP",
        REP_ERR_POLICY => "ERR_POLICY",
        REP_ERR_INVALID => "ERR_INVALID",
        REP_ERR_PLATFORM => "ERR_PLATFORM",
        REP_ERR_TLS_REQD => "ERR_TLS_REQD",
        REP_ERR_UNKNOWN => "ERR_UNKNOWN",
        REP_ERR_SHUTDOWN => "ERR_SHUTDOWN",
        REP_ERR_BLOCK_SIZE_REQD => "ERR_BLOCK_SIZE_REQD",
        REP_ERR_TOO_BIG => "ERR_TOO_BIG",
        REP_ERR_EXT_HEADER_REQD => "ERR_EXT_HEADER_REQD",
        other => return format!("reply type {other:#x}"),
    };
    name.to_owned()
}

/// Returns the name of a command.
pub fn command_name(command: u16) -> String {
    let name = match command {
        CMD_READ => "READ",
        CMD_WRITE => "WRITE",
        CMD_DISC => "DISC",
        CMD_FLUSH => "FLUSH",
        CMD_TRIM => "TRIM",
        CMD_CACHE => "CACHE",
        CMD_WRITE_ZEROES => "WRITE_ZEROES",
        CMD_BLOCK_STATUS => "BLOCK_STATUS",
        other => return format!("command {other}"),
    };
    name.to_owned()
}
