//! `CMD_FLUSH` and `CMD_CACHE`.

use crate::client::{Request, Session};
use crate::rule::{Level::*, Problem, Rule, Seen};
use crate::target::Target;
use crate::wire::*;
use crate::{ensure, skip};

pub(super) const RULES: &[Rule] = &[
    Rule::new("flush.works", "NBD_CMD_FLUSH", Must, "FLUSH, once announced, succeeds", works),
    Rule::new(
        "flush.unknown-flag",
        "Error values",
        Should,
        "FLUSH with an unknown flag gets EINVAL",
        unknown_flag,
    ),
    Rule::new(
        "flush.range",
        "NBD_CMD_FLUSH",
        May,
        "FLUSH with an offset and a length gets EINVAL or is done; the connection stays in step",
        range,
    ),
    Rule::new(
        "flush.unannounced",
        "Transmission flags",
        Should,
        "FLUSH that was not announced does not put the connection out of step",
        unannounced,
    ),
    Rule::new(
        "cache.harmless",
        "NBD_CMD_CACHE",
        Must,
        "CACHE, once announced, is answered and changes nothing",
        cache,
    ),
    Rule::new(
        "cache.unknown-flag",
        "NBD_CMD_CACHE",
        Must,
        "CACHE, once announced, is refused with flags the server does not know",
        cache_unknown_flag,
    ),
    Rule::new(
        "cache.unannounced",
        "NBD_CMD_CACHE",
        Should,
        "CACHE that was not announced is answered, and the connection stays in step",
        cache_unannounced,
    ),
    Rule::new(
        "cache.beyond-end",
        "Block size constraints",
        Should,
        "CACHE beyond the end gets an error, and the connection stays in step",
        cache_beyond_end,
    ),
];

fn works(target: &Target) -> Seen {
    target.each_mode(|session| {
        session.need(FLAG_SEND_FLUSH, "SEND_FLUSH")?;
        session.succeed(&Request::new(CMD_FLUSH, 0, 0))?;
        Ok("success".to_owned())
    })
}

fn unknown_flag(target: &Target) -> Seen {
    target.each_mode(|session| {
        session.need(FLAG_SEND_FLUSH, "SEND_FLUSH")?;
        let reply = session.transact(&Request::new(CMD_FLUSH, 0, 0).with(CMD_FLAG_UNKNOWN))?;
        session.in_step(target)?;
        ensure!(reply.error == EINVAL, "{}", reply.outcome());
        Ok("EINVAL".to_owned())
    })
}

fn range(target: &Target) -> Seen {
    target.each_mode(|session| {
        session.need(FLAG_SEND_FLUSH, "SEND_FLUSH")?;
        let reply = session.transact(&Request::new(CMD_FLUSH, 512, 512))?;
        session.in_step(target)?;
        ensure!(matches!(reply.error, 0 | EINVAL), "{}", reply.outcome());
        Ok(reply.outcome())
    })
}

fn unannounced(target: &Target) -> Seen {
    target.each_mode(|session| {
        if session.has(FLAG_SEND_FLUSH) {
            skip!("SEND_FLUSH is announced");
        }
        let reply = session.transact(&Request::new(CMD_FLUSH, 0, 0))?;
        session.in_step(target)?;
        Ok(reply.outcome())
    })
}

/// Runs a check in every mode if CACHE is announced.
fn each_cache(
    target: &Target,
    check: impl Fn(&mut Session) -> Result<String, Problem>,
) -> Result<String, Problem> {
    target.each_mode(|session| {
        session.need(FLAG_SEND_CACHE, "SEND_CACHE")?;
        check(session)
    })
}

fn cache(target: &Target) -> Seen {
    each_cache(target, |session| {
        let length = target.clip(64 << 10);
        let before = session.read(0, length)?;
        let reply = session.transact(&Request::new(CMD_CACHE, 0, length))?;
        ensure!(session.read(0, length)? == before, "contents changed");
        Ok(reply.outcome())
    })
}

fn cache_unknown_flag(target: &Target) -> Seen {
    each_cache(target, |session| {
        let request = Request::new(CMD_CACHE, 0, target.clip(4096)).with(CMD_FLAG_UNKNOWN);
        let reply = session.transact(&request)?;
        session.in_step(target)?;
        ensure!(reply.error != 0, "success");
        Ok(reply.outcome())
    })
}

fn cache_unannounced(target: &Target) -> Seen {
    target.each_mode(|session| {
        if session.has(FLAG_SEND_CACHE) {
            skip!("SEND_CACHE is announced");
        }
        let reply = session.transact(&Request::new(CMD_CACHE, 0, target.clip(4096)))?;
        session.in_step(target)?;
        Ok(reply.outcome())
    })
}

fn cache_beyond_end(target: &Target) -> Seen {
    each_cache(target, |session| {
        let block = target.block();
        for offset in [session.size, u64::MAX - block + 1] {
            let request = Request::new(CMD_CACHE, offset, block);
            let reply = session.transact(&request)?;
            session.in_step(target)?;
            ensure!(reply.error != 0, "{request}: success");
        }
        Ok("refused".to_owned())
    })
}
