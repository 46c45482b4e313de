//! `CMD_WRITE_ZEROES` and `CMD_TRIM`: writes without a payload.

use super::area::{Area, each_read_only, each_writable, refused_unchanged};
use super::pattern::is_zero;
use crate::client::{Mode, Request, Session};
use crate::rule::{Level::*, Problem, Rule, Seen};
use crate::target::Target;
use crate::wire::*;
use crate::{ensure, skip};

const ZEROES: &str = "NBD_CMD_WRITE_ZEROES";
const TRIM: &str = "NBD_CMD_TRIM";

pub(super) const RULES: &[Rule] = &[
    Rule::writing(
        "zeroes.data",
        ZEROES,
        Must,
        "the range reads as zeroes and nothing else changes",
        data,
    ),
    Rule::writing(
        "zeroes.no-hole",
        "NBD_CMD_FLAG_NO_HOLE",
        Must,
        "NO_HOLE is supported, and the range reads as zeroes",
        no_hole,
    ),
    Rule::writing(
        "zeroes.no-hole-status",
        "base:allocation metadata context",
        Should,
        "what was zeroed with NO_HOLE is not reported as a hole",
        no_hole_status,
    ),
    Rule::writing(
        "zeroes.fua",
        "NBD_CMD_FLAG_FUA",
        Must,
        "FUA, once announced, is accepted with WRITE_ZEROES and TRIM",
        fua,
    ),
    Rule::writing(
        "zeroes.fast",
        "NBD_CMD_FLAG_FAST_ZERO",
        Must,
        "FAST_ZERO, once announced, zeroes the range or fails with ENOTSUP",
        fast,
    ),
    Rule::writing(
        "zeroes.fast-unchanged",
        "NBD_CMD_FLAG_FAST_ZERO",
        Should,
        "ENOTSUP leaves the contents alone",
        fast_unchanged,
    ),
    Rule::writing(
        "zeroes.fast-unannounced",
        ZEROES,
        Should,
        "FAST_ZERO that was not announced gets EINVAL",
        fast_unannounced,
    ),
    Rule::writing(
        "zeroes.beyond-end",
        ZEROES,
        Should,
        "WRITE_ZEROES beyond the end gets ENOSPC, or EINVAL, and writes nothing",
        beyond_end,
    ),
    Rule::writing(
        "zeroes.large",
        "Block size constraints",
        Should,
        "an effect longer than the largest payload does not end the connection",
        large,
    ),
    Rule::writing(
        "zeroes.zero-length",
        ZEROES,
        Should,
        "WRITE_ZEROES of length 0 does not end the connection",
        zero_length,
    ),
    Rule::writing(
        "zeroes.unknown-flag",
        "Error values",
        Should,
        "WRITE_ZEROES with DF, REQ_ONE or an unknown flag gets EINVAL and writes nothing",
        unknown_flag,
    ),
    Rule::writing(
        "zeroes.read-only",
        ZEROES,
        Should,
        "WRITE_ZEROES on a read-only export gets EPERM",
        read_only,
    ),
    Rule::writing(
        "trim.neighbours",
        TRIM,
        Must,
        "TRIM changes nothing outside its range",
        neighbours,
    ),
    Rule::writing(
        "trim.then-write",
        TRIM,
        Must,
        "what was trimmed can be written and read again",
        then_write,
    ),
    Rule::writing(
        "trim.beyond-end",
        "Error values",
        Should,
        "TRIM beyond the end gets EINVAL",
        trim_beyond_end,
    ),
    Rule::writing(
        "trim.zero-length",
        TRIM,
        Should,
        "TRIM of length 0 does not end the connection",
        trim_zero_length,
    ),
    Rule::writing(
        "trim.unknown-flag",
        "Error values",
        Should,
        "TRIM with NO_HOLE or an unknown flag gets EINVAL",
        trim_unknown_flag,
    ),
    Rule::writing(
        "trim.read-only",
        "Error values",
        Should,
        "TRIM on a read-only export gets EPERM",
        trim_read_only,
    ),
];

/// Runs a check in every mode if WRITE_ZEROES is announced.
fn each_zeroes(
    target: &Target,
    check: impl Fn(&mut Session) -> Result<String, Problem>,
) -> Result<String, Problem> {
    each_writable(target, |session| {
        session.need(FLAG_SEND_WRITE_ZEROES, "SEND_WRITE_ZEROES")?;
        check(session)
    })
}

/// Runs a check in every mode if TRIM is announced.
fn each_trim(
    target: &Target,
    check: impl Fn(&mut Session) -> Result<String, Problem>,
) -> Result<String, Problem> {
    each_writable(target, |session| {
        session.need(FLAG_SEND_TRIM, "SEND_TRIM")?;
        check(session)
    })
}

fn zeroes(area: &Area) -> Request {
    Request::new(CMD_WRITE_ZEROES, area.middle(), area.length)
}

fn trim(area: &Area) -> Request {
    Request::new(CMD_TRIM, area.middle(), area.length)
}

fn zero(area: &Area) -> Vec<u8> {
    vec![0; area.length as usize]
}

fn data(target: &Target) -> Seen {
    each_zeroes(target, |session| {
        for length in [target.block(), 4096, 64 << 10, 1 << 20] {
            let area = Area::fill(session, target, length)?;
            session.succeed(&zeroes(&area))?;
            area.check(session, Some(&zero(&area)))?;
        }
        Ok("read as zeroes".to_owned())
    })
}

fn no_hole(target: &Target) -> Seen {
    each_zeroes(target, |session| {
        let area = Area::fill(session, target, 64 << 10)?;
        session.succeed(&zeroes(&area).with(CMD_FLAG_NO_HOLE))?;
        area.check(session, Some(&zero(&area)))?;
        Ok("read as zeroes".to_owned())
    })
}

fn no_hole_status(target: &Target) -> Seen {
    each_zeroes(target, |session| {
        let allocation = target.profile.contexts.iter().any(|name| name == "base:allocation");
        if session.mode == Mode::Simple || !allocation {
            skip!("base:allocation is not offered");
        }
        let area = Area::fill(session, target, 64 << 10)?;
        session.succeed(&zeroes(&area).with(CMD_FLAG_NO_HOLE))?;
        session.link.half_close();
        let mut session = Session::open_with_contexts(target, session.mode, &["base:allocation"])?;
        let context = session.contexts[0].0;
        let request = Request::new(CMD_BLOCK_STATUS, area.middle(), area.length);
        let reply = session.transact(&request)?;
        let mut rest = area.length;
        for extent in reply.extents(context)? {
            let hole = extent.status & STATE_HOLE != 0 && rest > 0;
            ensure!(!hole, "block status says that the range is a hole");
            rest = rest.saturating_sub(extent.length);
        }
        Ok("no hole".to_owned())
    })
}

fn fua(target: &Target) -> Seen {
    each_writable(target, |session| {
        session.need(FLAG_SEND_FUA, "SEND_FUA")?;
        let area = Area::fill(session, target, 4096)?;
        let mut commands = Vec::new();
        if session.has(FLAG_SEND_WRITE_ZEROES) {
            session.succeed(&zeroes(&area).with(CMD_FLAG_FUA))?;
            area.check(session, Some(&zero(&area)))?;
            commands.push("WRITE_ZEROES");
        }
        if session.has(FLAG_SEND_TRIM) {
            session.succeed(&trim(&area).with(CMD_FLAG_FUA))?;
            commands.push("TRIM");
        }
        if commands.is_empty() {
            skip!("neither WRITE_ZEROES nor TRIM is announced");
        }
        Ok(format!("accepted with {}", commands.join(", ")))
    })
}

fn fast(target: &Target) -> Seen {
    each_zeroes(target, |session| {
        session.need(FLAG_SEND_FAST_ZERO, "SEND_FAST_ZERO")?;
        let mut seen = Vec::new();
        for extra in [0, CMD_FLAG_NO_HOLE] {
            let area = Area::fill(session, target, 64 << 10)?;
            let reply = session.transact(&zeroes(&area).with(CMD_FLAG_FAST_ZERO | extra))?;
            ensure!(matches!(reply.error, 0 | ENOTSUP), "{}", reply.outcome());
            let zero = zero(&area);
            area.check(session, (reply.error == 0).then_some(zero.as_slice()))?;
            seen.push(reply.outcome());
        }
        Ok(format!("{}, with NO_HOLE {}", seen[0], seen[1]))
    })
}

fn fast_unchanged(target: &Target) -> Seen {
    each_zeroes(target, |session| {
        session.need(FLAG_SEND_FAST_ZERO, "SEND_FAST_ZERO")?;
        let mut tried = 0;
        for extra in [0, CMD_FLAG_NO_HOLE] {
            let area = Area::fill(session, target, 64 << 10)?;
            let reply = session.transact(&zeroes(&area).with(CMD_FLAG_FAST_ZERO | extra))?;
            if reply.error == ENOTSUP {
                area.check(session, Some(area.original_middle()))?;
                tried += 1;
            }
        }
        if tried == 0 {
            skip!("server was always fast");
        }
        Ok("unchanged".to_owned())
    })
}

fn fast_unannounced(target: &Target) -> Seen {
    each_zeroes(target, |session| {
        if session.has(FLAG_SEND_FAST_ZERO) {
            skip!("SEND_FAST_ZERO is announced");
        }
        let area = Area::fill(session, target, 4096)?;
        let request = zeroes(&area).with(CMD_FLAG_FAST_ZERO);
        refused_unchanged(session, target, &area, &request, &[EINVAL])?;
        Ok("EINVAL".to_owned())
    })
}

/// Returns requests whose ranges reach beyond the end.
fn beyond(target: &Target, command: u16, size: u64) -> Vec<Request> {
    let block = target.block();
    vec![
        Request::new(command, size.div_ceil(block) * block, block),
        Request::new(command, target.usable() - block.min(target.usable()), 2 * block),
        Request::new(command, u64::MAX - block + 1, block),
    ]
}

fn beyond_end(target: &Target) -> Seen {
    each_zeroes(target, |session| {
        let area = Area::fill(session, target, 4096)?;
        let mut seen = Vec::new();
        for request in beyond(target, CMD_WRITE_ZEROES, session.size) {
            refused_unchanged(session, target, &area, &request, &[ENOSPC, EINVAL])?;
            seen.push(session.transact(&request)?.outcome());
        }
        seen.dedup();
        Ok(seen.join(", "))
    })
}

fn large(target: &Target) -> Seen {
    each_zeroes(target, |session| {
        let whole = target.usable().min(u64::from(u32::MAX) / target.block() * target.block());
        if whole <= target.payload_max() {
            skip!("the export is not larger than the largest payload");
        }
        let reply = session.transact(&Request::new(CMD_WRITE_ZEROES, 0, whole))?;
        session.in_step(target)?;
        if reply.error == 0 {
            let end = whole - target.block();
            ensure!(is_zero(&session.read(end, target.block())?), "not zero at {end}");
        }
        Ok(format!("{whole} bytes: {}", reply.outcome()))
    })
}

fn zero_length(target: &Target) -> Seen {
    each_zeroes(target, |session| {
        let reply = session.transact(&Request::new(CMD_WRITE_ZEROES, 0, 0))?;
        session.in_step(target)?;
        Ok(reply.outcome())
    })
}

fn unknown_flag(target: &Target) -> Seen {
    each_zeroes(target, |session| {
        let area = Area::fill(session, target, 4096)?;
        for flag in [CMD_FLAG_DF, CMD_FLAG_REQ_ONE, CMD_FLAG_UNKNOWN] {
            let request = zeroes(&area).with(flag);
            refused_unchanged(session, target, &area, &request, &[EINVAL])?;
        }
        Ok("EINVAL, nothing written".to_owned())
    })
}

fn read_only(target: &Target) -> Seen {
    each_read_only(target, |session| {
        session.need(FLAG_SEND_WRITE_ZEROES, "SEND_WRITE_ZEROES")?;
        let reply = session.transact(&Request::new(CMD_WRITE_ZEROES, 0, target.clip(512)))?;
        ensure!(reply.error == EPERM, "{}", reply.outcome());
        Ok("EPERM".to_owned())
    })
}

fn neighbours(target: &Target) -> Seen {
    each_trim(target, |session| {
        for length in [target.block(), 4096, 64 << 10, 1 << 20] {
            let area = Area::fill(session, target, length)?;
            session.succeed(&trim(&area))?;
            area.check(session, None)?;
        }
        Ok("unchanged".to_owned())
    })
}

fn then_write(target: &Target) -> Seen {
    each_trim(target, |session| {
        let area = Area::fill(session, target, 64 << 10)?;
        session.succeed(&trim(&area))?;
        session.succeed(&Request::write(area.middle(), area.original_middle()))?;
        area.check(session, Some(area.original_middle()))?;
        Ok(format!("{} bytes", area.length))
    })
}

fn trim_beyond_end(target: &Target) -> Seen {
    each_trim(target, |session| {
        let area = Area::fill(session, target, 4096)?;
        for request in beyond(target, CMD_TRIM, session.size) {
            refused_unchanged(session, target, &area, &request, &[EINVAL])?;
        }
        Ok("EINVAL".to_owned())
    })
}

fn trim_zero_length(target: &Target) -> Seen {
    each_trim(target, |session| {
        let reply = session.transact(&Request::new(CMD_TRIM, 0, 0))?;
        session.in_step(target)?;
        Ok(reply.outcome())
    })
}

fn trim_unknown_flag(target: &Target) -> Seen {
    each_trim(target, |session| {
        let area = Area::fill(session, target, 4096)?;
        for flag in [CMD_FLAG_NO_HOLE, CMD_FLAG_DF, CMD_FLAG_UNKNOWN] {
            let request = trim(&area).with(flag);
            refused_unchanged(session, target, &area, &request, &[EINVAL])?;
        }
        Ok("EINVAL, nothing trimmed".to_owned())
    })
}

fn trim_read_only(target: &Target) -> Seen {
    each_read_only(target, |session| {
        session.need(FLAG_SEND_TRIM, "SEND_TRIM")?;
        let reply = session.transact(&Request::new(CMD_TRIM, 0, target.clip(512)))?;
        ensure!(reply.error == EPERM, "{}", reply.outcome());
        Ok("EPERM".to_owned())
    })
}
