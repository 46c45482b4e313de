//! Several connections to one export: what `CAN_MULTI_CONN` promises.

use super::pattern::pattern;
use crate::client::{Mode, Request, Session};
use crate::rule::{Level::*, Problem, Rule, Seen};
use crate::target::Target;
use crate::wire::*;
use crate::{ensure, skip};

const SECTION: &str = "NBD_FLAG_CAN_MULTI_CONN";

/// Connections opened at once.
const CONNECTIONS: usize = 4;

pub(super) const RULES: &[Rule] = &[
    Rule::new(
        "multi.same-export",
        SECTION,
        Must,
        "connections open at once show the same export",
        same_export,
    ),
    Rule::writing(
        "multi.flush",
        SECTION,
        Must,
        "after write and flush on one connection, the others read what was written",
        flush,
    ),
    Rule::writing(
        "multi.fua",
        SECTION,
        Must,
        "after a FUA write on one connection, the others read what was written",
        fua,
    ),
    Rule::writing(
        "multi.flush-elsewhere",
        SECTION,
        Must,
        "a flush on one connection makes writes answered on another visible to all",
        flush_elsewhere,
    ),
];

fn open(target: &Target) -> Result<Vec<Session>, Problem> {
    if target.profile.flags & FLAG_CAN_MULTI_CONN == 0 {
        skip!("CAN_MULTI_CONN is not announced");
    }
    (0..CONNECTIONS).map(|_| Session::open(target, Mode::Simple)).collect()
}

fn open_writable(target: &Target) -> Result<Vec<Session>, Problem> {
    if target.profile.flags & FLAG_READ_ONLY != 0 {
        skip!("export is read-only");
    }
    open(target)
}

fn same_export(target: &Target) -> Seen {
    let mut sessions = open(target)?;
    let length = target.clip(64 << 10);
    let first = sessions[0].read(0, length)?;
    for session in &mut sessions {
        let facts = (session.size, session.flags);
        ensure!(session.read(0, length)? == first, "other data");
        ensure!(facts.0 == target.profile.size, "size {} and {}", facts.0, target.profile.size);
    }
    Ok(format!("{CONNECTIONS} connections"))
}

/// Fails unless every connection reads the data at offset 0.
fn all_read(sessions: &mut [Session], data: &[u8]) -> Result<(), Problem> {
    for (number, session) in sessions.iter_mut().enumerate() {
        let found = session.read(0, data.len() as u64)?;
        ensure!(found == data, "connection {number} of {CONNECTIONS} reads other bytes");
    }
    Ok(())
}

fn flush(target: &Target) -> Seen {
    let mut sessions = open_writable(target)?;
    sessions[0].need(FLAG_SEND_FLUSH, "SEND_FLUSH")?;
    for round in 0..sessions.len() {
        let data = pattern(target.seed + 20 + round as u64, target.clip(64 << 10));
        // Read on every connection first, so that a private cache of a connection would show.
        for session in &mut sessions {
            session.read(0, data.len() as u64)?;
        }
        sessions[round].succeed(&Request::write(0, &data))?;
        sessions[round].succeed(&Request::new(CMD_FLUSH, 0, 0))?;
        all_read(&mut sessions, &data)?;
    }
    Ok(format!("{CONNECTIONS} connections"))
}

fn fua(target: &Target) -> Seen {
    let mut sessions = open_writable(target)?;
    sessions[0].need(FLAG_SEND_FUA, "SEND_FUA")?;
    for round in 0..sessions.len() {
        let data = pattern(target.seed + 30 + round as u64, target.clip(64 << 10));
        for session in &mut sessions {
            session.read(0, data.len() as u64)?;
        }
        sessions[round].succeed(&Request::write(0, &data).with(CMD_FLAG_FUA))?;
        all_read(&mut sessions, &data)?;
    }
    Ok(format!("{CONNECTIONS} connections"))
}

fn flush_elsewhere(target: &Target) -> Seen {
    let mut sessions = open_writable(target)?;
    sessions[0].need(FLAG_SEND_FLUSH, "SEND_FLUSH")?;
    let data = pattern(target.seed + 40, target.clip(64 << 10));
    sessions[0].succeed(&Request::write(0, &data))?;
    sessions[1].succeed(&Request::new(CMD_FLUSH, 0, 0))?;
    all_read(&mut sessions, &data)?;
    Ok(format!("{CONNECTIONS} connections"))
}
