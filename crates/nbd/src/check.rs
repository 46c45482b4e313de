//! All rules that a request must obey, in one place.

use crate::constants::{
    PAYLOAD_BYTES_MAX, SKIP_BYTES_MAX, command_flag as flag, transmission_flag,
};
use crate::{Agreement, Command, Error, Form, ProtocolError, Request};

/// Why a request is not carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The error that the client gets.
    pub error: Error,
    /// Text for humans.
    pub text: &'static str,
}

/// The result of [`check`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checked {
    /// The command, or the reason for refusing it.
    pub outcome: Result<Command, Refusal>,
    /// Bytes that follow the header, whether the request is refused or not.
    pub payload: u64,
}

fn refuse(error: Error, text: &'static str) -> Result<Command, Refusal> {
    Err(Refusal { error, text })
}

/// Checks a request against the agreement.
///
/// # Errors
/// The payload is longer than `SKIP_BYTES_MAX`.
pub(crate) fn check(request: &Request, agreed: &Agreement) -> Result<Checked, ProtocolError> {
    let extended = agreed.form == Form::Extended;
    let command = Command::of(request.kind);
    // QEMU (8.2 to at least 10.0) sends the payload of each write, but not the flag that extended headers demand.
    let payload = if command == Some(Command::Write) || extended && request.has(flag::PAYLOAD_LEN) {
        request.length
    } else {
        0
    };
    if payload > SKIP_BYTES_MAX {
        return Err(ProtocolError("payload is longer than anything this server offered to take"));
    }
    let outcome = match command {
        Some(command) => rules(command, request, agreed, payload),
        None => refuse(Error::Inval, "unknown command"),
    };
    Ok(Checked { outcome, payload })
}

fn rules(
    command: Command,
    request: &Request,
    agreed: &Agreement,
    payload: u64,
) -> Result<Command, Refusal> {
    let export = &agreed.export;
    let extended = agreed.form == Form::Extended;
    if command == Command::Disconnect {
        return Ok(command);
    }
    let own_flags = match command {
        Command::Read if export.flags(agreed.form) & transmission_flag::SEND_DF != 0 => flag::DF,
        Command::Write if extended => flag::PAYLOAD_LEN,
        Command::WriteZeroes => flag::NO_HOLE | flag::FAST_ZERO,
        Command::BlockStatus if extended => flag::REQ_ONE | flag::PAYLOAD_LEN,
        Command::BlockStatus => flag::REQ_ONE,
        _ => 0,
    };
    if request.flags & !(own_flags | export.command_flags()) != 0 {
        return refuse(Error::Inval, "flag does not belong to this command");
    }
    let changes = matches!(command, Command::Write | Command::Trim | Command::WriteZeroes);
    if changes && export.read_only {
        return refuse(Error::Perm, "export is read-only");
    }
    if matches!(command, Command::Read | Command::Write)
        && request.length > u64::from(PAYLOAD_BYTES_MAX)
    {
        return refuse(Error::Inval, "length is beyond the largest payload");
    }
    match command {
        Command::Flush => {
            if request.offset != 0 || request.length != 0 {
                return refuse(Error::Inval, "a flush has neither offset nor length");
            }
            return Ok(command);
        }
        Command::BlockStatus => {
            if agreed.contexts.is_empty() {
                return refuse(Error::Inval, "no metadata context was chosen");
            }
            if request.has(flag::PAYLOAD_LEN) {
                // The payload contains the range.
                let ids = payload.checked_sub(8);
                return match ids {
                    Some(bytes) if bytes.is_multiple_of(4) && bytes <= 4096 => Ok(command),
                    _ => refuse(Error::Inval, "malformed list of metadata contexts"),
                };
            }
        }
        _ => {}
    }
    range(command, request, agreed)?;
    Ok(command)
}

/// Checks that the range of a request is not empty, lies inside the export and is aligned to blocks.
pub(crate) fn range(
    command: Command,
    request: &Request,
    agreed: &Agreement,
) -> Result<(), Refusal> {
    let export = &agreed.export;
    let inside = request.offset.checked_add(request.length).is_some_and(|end| end <= export.size);
    if !inside {
        let grows = matches!(command, Command::Write | Command::WriteZeroes);
        let error = if grows { Error::NoSpc } else { Error::Inval };
        return Err(Refusal { error, text: "range is beyond the end of the export" });
    }
    if request.length == 0 {
        return Err(Refusal { error: Error::Inval, text: "length is zero" });
    }
    let mask = u64::from(export.block_minimum) - 1;
    if (request.offset | request.length) & mask != 0 {
        return Err(Refusal { error: Error::Inval, text: "range is not aligned to blocks" });
    }
    Ok(())
}
