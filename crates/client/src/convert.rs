//! Converts results of requests to what calls return, and arguments to what requests carry.

use crate::Error;
use towline_wire::limits::{NAME_BYTES_MAX, PATH_BYTES_MAX};
use towline_wire::request::{NO_FOLLOW, open_flag, write_flag};
use towline_wire::{Attr, Errno, Reply};

pub(crate) fn attributes(reply: Reply<'_>) -> Result<Attr, Error> {
    match reply {
        Reply::Attributes { attr } => Ok(attr),
        _ => Err(unexpected()),
    }
}

pub(crate) fn number(reply: Reply<'_>) -> Result<u64, Error> {
    match reply {
        Reply::Number { value } => Ok(value),
        _ => Err(unexpected()),
    }
}

/// The number of bytes written, of `length` that were sent, and where they begin.
pub(crate) fn wrote(reply: Reply<'_>, length: usize) -> Result<(usize, u64), Error> {
    match reply {
        Reply::Wrote { length: wrote, offset } if wrote as usize <= length => {
            Ok((wrote as usize, offset))
        }
        _ => Err(unexpected()),
    }
}

pub(crate) fn bytes(reply: Reply<'_>) -> Result<Vec<u8>, Error> {
    match reply {
        Reply::Bytes { value } => Ok(value.to_vec()),
        _ => Err(unexpected()),
    }
}

pub(crate) fn done(_: Reply<'_>) -> Result<(), Error> {
    Ok(())
}

pub(crate) fn unexpected() -> Error {
    towline_wire::ProtocolError { what: "result of the wrong kind", at: 0 }.into()
}

pub(crate) fn flag(follow: bool) -> u32 {
    if follow { 0 } else { NO_FOLLOW }
}

/// Flags for the writes of a file that was opened with these flags.
pub(crate) fn write_flags(open_flags: u32) -> u32 {
    if open_flags & open_flag::APPEND != 0 { write_flag::APPEND } else { 0 }
}

/// Fails as a local call would for a path that no kernel would take.
pub(crate) fn check(path: &[u8]) -> Result<&[u8], Error> {
    check_text(path, PATH_BYTES_MAX, Errno::ENAMETOOLONG)?;
    let too_long = |name: &[u8]| name.len() > NAME_BYTES_MAX;
    if too_long(path) && path.split(|b| *b == b'/').any(too_long) {
        return Err(Errno::ENAMETOOLONG.into());
    }
    Ok(path)
}

/// [`check`] for the name of an extended attribute.
pub(crate) fn check_xattr(name: &[u8]) -> Result<&[u8], Error> {
    check_text(name, NAME_BYTES_MAX, Errno::ERANGE)
}

/// Fails for a text with a zero byte, and with `too_long` for one of more than `most` bytes. Such a
/// text must not be sent: the server takes the request for illegal and closes the connection, and
/// the client would send the request again on each new one.
pub(crate) fn check_text(text: &[u8], most: usize, too_long: Errno) -> Result<&[u8], Error> {
    if text.contains(&0) {
        return Err(Errno::EINVAL.into());
    }
    if text.len() > most { Err(too_long.into()) } else { Ok(text) }
}
