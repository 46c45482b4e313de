//! `CMD_BLOCK_STATUS`. Rules on the form of status chunks are in `chunk.rs`.

use super::pattern::is_zero;
use crate::client::{Extent, Mode, Request, Session};
use crate::rule::{Level::*, Problem, Rule, Seen};
use crate::target::Target;
use crate::wire::*;
use crate::{ensure, skip};

const SECTION: &str = "NBD_CMD_BLOCK_STATUS";
const ALLOCATION: &str = "base:allocation";

pub(super) const RULES: &[Rule] = &[
    Rule::new(
        "status.walk",
        SECTION,
        Must,
        "the whole export can be walked extent by extent",
        walk,
    ),
    Rule::new(
        "status.zero-reads-zero",
        "base:allocation metadata context",
        Must,
        "what has STATE_ZERO reads as zeroes",
        zero_reads_zero,
    ),
    Rule::new(
        "status.reserved-bits",
        "base:allocation metadata context",
        Should,
        "only STATE_HOLE and STATE_ZERO are set",
        reserved_bits,
    ),
    Rule::new(
        "status.differs",
        SECTION,
        Should,
        "neighbouring extents have different status",
        differs,
    ),
    Rule::new(
        "status.aligned",
        SECTION,
        Must,
        "extents are multiples of the announced minimum block size",
        aligned,
    ),
    Rule::new(
        "status.req-one",
        "NBD_CMD_FLAG_REQ_ONE",
        Must,
        "with REQ_ONE each context has one extent, not longer than asked",
        req_one,
    ),
    Rule::new(
        "status.contexts",
        SECTION,
        Must,
        "with several contexts each has one chunk, and the same extents as alone",
        contexts,
    ),
    Rule::new(
        "status.unselected",
        "Metadata querying",
        Should,
        "block status without a selected context gets EINVAL",
        unselected,
    ),
    Rule::new(
        "status.beyond-end",
        SECTION,
        Should,
        "block status beyond the end gets EINVAL",
        beyond_end,
    ),
    Rule::new(
        "status.zero-length",
        SECTION,
        Should,
        "block status of length 0 does not end the connection",
        zero_length,
    ),
    Rule::new(
        "status.misplaced-flag",
        "Error values",
        Should,
        "block status with DF or NO_HOLE gets EINVAL",
        misplaced_flag,
    ),
    Rule::new(
        "status.filter",
        "NBD_FLAG_BLOCK_STAT_PAYLOAD",
        Must,
        "a payload limits the reply to the contexts it names; unknown ones get EINVAL",
        filter,
    ),
];

/// Runs a check on sessions with base:allocation, in each mode that replies in chunks.
fn each(
    target: &Target,
    check: impl Fn(&mut Session, u32) -> Result<String, Problem>,
) -> Result<String, Problem> {
    if !target.profile.contexts.iter().any(|name| name == ALLOCATION) {
        skip!("base:allocation is not offered");
    }
    target.each_chunked_mode(|session| {
        let mode = session.mode;
        // Contexts are selected while haggling, so a new session replaces the plain one.
        session.link.half_close();
        *session = Session::open_with_contexts(target, mode, &[ALLOCATION])?;
        let [(context, _)] = session.contexts.as_slice() else {
            return Err(Problem::Fail("base:allocation was not selected".to_owned()));
        };
        let context = *context;
        check(session, context)
    })
}

/// Returns the largest length of a block status request in compact form.
fn step(target: &Target) -> u64 {
    u64::from(u32::MAX) / target.block() * target.block()
}

/// Returns every extent of the export up to its last whole block, with its offset.
fn extents(
    session: &mut Session,
    target: &Target,
    context: u32,
) -> Result<Vec<(u64, Extent)>, Problem> {
    const REQUESTS_MAX: usize = 100_000;
    let mut all = Vec::new();
    let mut offset = 0;
    for _ in 0..REQUESTS_MAX {
        if offset >= target.usable() {
            return Ok(all);
        }
        let length = step(target).min(target.usable() - offset);
        let reply = session.transact(&Request::new(CMD_BLOCK_STATUS, offset, length))?;
        for extent in reply.extents(context)? {
            ensure!(extent.length > 0, "extent of length 0 at {offset}");
            all.push((offset, *extent));
            offset = offset.saturating_add(extent.length);
        }
    }
    Err(Problem::Fail(format!("not at the end after {REQUESTS_MAX} requests")))
}

fn walk(target: &Target) -> Seen {
    each(target, |session, context| {
        let all = extents(session, target, context)?;
        let (offset, last) = all.last().ok_or(Problem::Skip("export is empty".to_owned()))?;
        let end = offset.saturating_add(last.length);
        ensure!(end <= session.size, "last extent ends at {end}, beyond {}", session.size);
        Ok(format!("{} extents", all.len()))
    })
}

fn zero_reads_zero(target: &Target) -> Seen {
    const READ_MAX: u64 = 64 << 20;
    each(target, |session, context| {
        let mut read = 0;
        for (start, extent) in extents(session, target, context)? {
            if extent.status & STATE_ZERO == 0 {
                continue;
            }
            let end = (start + extent.length).min(target.usable());
            let mut offset = start;
            while offset < end && read < READ_MAX {
                let length = target.clip((1 << 20).min(end - offset)).max(target.block());
                let data = session.read(offset, length)?;
                ensure!(is_zero(&data), "bytes that are not zero in the zero extent at {start}");
                offset += length;
                read += length;
            }
        }
        if read == 0 {
            skip!("no extent has STATE_ZERO");
        }
        Ok(format!("{read} bytes"))
    })
}

fn reserved_bits(target: &Target) -> Seen {
    each(target, |session, context| {
        for (offset, extent) in extents(session, target, context)? {
            let reserved = extent.status & !(STATE_HOLE | STATE_ZERO);
            ensure!(reserved == 0, "bits {reserved:#x} at {offset}");
        }
        Ok("none else".to_owned())
    })
}

fn differs(target: &Target) -> Seen {
    each(target, |session, context| {
        let length = step(target).min(target.usable());
        let reply = session.transact(&Request::new(CMD_BLOCK_STATUS, 0, length))?;
        let extents = reply.extents(context)?;
        let same = extents.windows(2).filter(|pair| pair[0].status == pair[1].status).count();
        ensure!(same == 0, "{same} of {} neighbours have the same status", extents.len());
        Ok(format!("{} extents", extents.len()))
    })
}

fn aligned(target: &Target) -> Seen {
    if target.profile.blocks.is_none() {
        skip!("no minimum block size is announced");
    }
    each(target, |session, context| {
        for (offset, extent) in extents(session, target, context)? {
            ensure!(extent.length % target.block() == 0, "{} at {offset}", extent.length);
        }
        Ok(format!("multiples of {}", target.block()))
    })
}

fn req_one(target: &Target) -> Seen {
    each(target, |session, context| {
        for length in [target.block(), target.clip(64 << 10), step(target).min(target.usable())] {
            let request = Request::new(CMD_BLOCK_STATUS, 0, length).with(CMD_FLAG_REQ_ONE);
            let reply = session.transact(&request)?;
            let extents = reply.extents(context)?;
            ensure!(extents.len() == 1, "{request}: {} extents", extents.len());
            ensure!(extents[0].length <= length, "{request}: {} bytes", extents[0].length);
        }
        Ok("one extent".to_owned())
    })
}

fn contexts(target: &Target) -> Seen {
    let names: Vec<_> = target.profile.contexts.iter().map(String::as_str).collect();
    if names.len() < 2 {
        skip!("server offers {} metadata contexts", names.len());
    }
    let request = Request::new(CMD_BLOCK_STATUS, 0, target.clip(1 << 20));
    let mut session = Session::open_with_contexts(target, Mode::Structured, &names)?;
    let together = session.succeed(&request)?;
    if let Some(found) = together.violations.first() {
        return Err(Problem::Fail(found.text.clone()));
    }
    for (id, name) in session.contexts.clone() {
        let mut session = Session::open_with_contexts(target, Mode::Structured, &[&name])?;
        let alone = session.succeed(&request)?;
        let [(_, alone)] = alone.statuses.as_slice() else {
            return Err(Problem::Fail(format!("{name} alone: {} chunks", alone.statuses.len())));
        };
        ensure!(together.extents(id)? == alone, "{name}: other extents than alone");
    }
    Ok(names.join(", "))
}

fn unselected(target: &Target) -> Seen {
    target.each_mode(|session| {
        let reply = session.transact(&Request::new(CMD_BLOCK_STATUS, 0, target.clip(512)))?;
        session.in_step(target)?;
        ensure!(reply.error == EINVAL, "{}", reply.outcome());
        Ok("EINVAL".to_owned())
    })
}

fn beyond_end(target: &Target) -> Seen {
    each(target, |session, _| {
        let block = target.block();
        for (offset, length) in [(session.size, block), (u64::MAX - block + 1, block)] {
            let request = Request::new(CMD_BLOCK_STATUS, offset, length);
            let reply = session.transact(&request)?;
            session.in_step(target)?;
            ensure!(reply.error == EINVAL, "{request}: {}", reply.outcome());
        }
        Ok("EINVAL".to_owned())
    })
}

fn zero_length(target: &Target) -> Seen {
    each(target, |session, _| {
        let reply = session.transact(&Request::new(CMD_BLOCK_STATUS, 0, 0))?;
        session.in_step(target)?;
        Ok(reply.outcome())
    })
}

fn misplaced_flag(target: &Target) -> Seen {
    each(target, |session, _| {
        for flag in [CMD_FLAG_DF, CMD_FLAG_NO_HOLE, CMD_FLAG_FAST_ZERO, CMD_FLAG_UNKNOWN] {
            let request = Request::new(CMD_BLOCK_STATUS, 0, target.clip(512)).with(flag);
            let reply = session.transact(&request)?;
            session.in_step(target)?;
            ensure!(reply.error == EINVAL, "{request}: {}", reply.outcome());
        }
        Ok("EINVAL".to_owned())
    })
}

fn filter(target: &Target) -> Seen {
    let names: Vec<_> = target.profile.contexts.iter().map(String::as_str).collect();
    if names.is_empty() {
        skip!("server offers no metadata contexts");
    }
    let mut session = Session::open_with_contexts(target, Mode::Extended, &names)?;
    session.need(FLAG_BLOCK_STAT_PAYLOAD, "BLOCK_STAT_PAYLOAD")?;
    let length = target.clip(1 << 20);
    let request = |ids: &[u32]| {
        let mut payload = length.to_be_bytes().to_vec();
        payload.extend(ids.iter().flat_map(|id| id.to_be_bytes()));
        let mut request = Request::new(CMD_BLOCK_STATUS, 0, payload.len() as u64);
        request.payload = payload;
        request.with(CMD_FLAG_PAYLOAD_LEN)
    };
    for (id, name) in session.contexts.clone() {
        let reply = session.succeed(&request(&[id]))?;
        let ids: Vec<_> = reply.statuses.iter().map(|(id, _)| *id).collect();
        ensure!(ids == [id], "filter for {name} ({id}): chunks of {ids:?}");
    }
    let unknown = session.contexts.iter().map(|(id, _)| *id).max().unwrap_or(0).wrapping_add(1);
    let mut half = request(&[unknown]);
    half.payload.pop();
    half.length -= 1;
    for bad in [request(&[unknown]), half] {
        let reply = session.transact(&bad)?;
        session.in_step(target)?;
        ensure!(reply.error == EINVAL, "payload {:02x?}: {}", bad.payload, reply.outcome());
    }
    Ok("limited; EINVAL for an unknown context and a bad length".to_owned())
}
