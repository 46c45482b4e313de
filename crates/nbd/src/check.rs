//! Every rule that a request has to keep, in one place.

use crate::constants::{PAYLOAD_BYTES_MAX, SKIP_BYTES_MAX, command_flag as flag};
use crate::{Agreement, Command, Error, Form, ProtocolError, Request};

/// A request that will not be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// What the client is told.
    pub error: Error,
    /// For humans.
    pub text: &'static str,
}

/// Outcome of [`check`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checked {
    /// The command, unless refused.
    pub outcome: Result<Command, Refusal>,
    /// Bytes that follow the header, whatever the outcome.
    pub payload: u64,
}

fn refuse(error: Error, text: &'static str) -> Result<Command, Refusal> {
    Err(Refusal { error, text })
}

/// Checks a request against what was agreed.
///
/// # Errors
/// The payload that would have to be skipped is absurd.
pub(crate) fn check(request: &Request, agreed: &Agreement) -> Result<Checked, ProtocolError> {
    let extended = agreed.form == Form::Extended;
    let command = Command::of(request.kind);
    // A compact header tells of a payload by its type alone.
    let payload = if extended && request.has(flag::PAYLOAD_LEN)
        || !extended && command == Some(Command::Write)
    {
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
        Command::Read if agreed.form >= Form::Structured => flag::DF,
        Command::Write if extended => flag::PAYLOAD_LEN,
        Command::WriteZeroes => flag::NO_HOLE | flag::FAST_ZERO,
        Command::BlockStatus if extended => flag::REQ_ONE | flag::PAYLOAD_LEN,
        Command::BlockStatus => flag::REQ_ONE,
        _ => 0,
    };
    if request.flags & !(own_flags | export.command_flags()) != 0 {
        return refuse(Error::Inval, "flag does not belong to this command");
    }
    if command == Command::Write && extended && !request.has(flag::PAYLOAD_LEN) {
        return refuse(Error::Inval, "a write has to carry PAYLOAD_LEN");
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
                // The range comes with the payload.
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

/// The range of a request lies inside the export and on block boundaries.
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
