//! The end of transmission: DISC, half-closed connections, clients that vanish.

use crate::client::{Mode, Request, Session};
use crate::ensure;
use crate::rule::{Level::*, Problem, Rule, Seen};
use crate::target::Target;
use crate::wire::*;

const SECTION: &str = "Terminating the transmission phase";

pub(super) const RULES: &[Rule] = &[
    Rule::new(
        "disc.closes",
        SECTION,
        Must,
        "after DISC the server closes the connection without a reply",
        closes,
    ),
    Rule::new(
        "disc.outstanding",
        "NBD_CMD_DISC",
        Must,
        "requests sent before DISC are handled",
        outstanding,
    ),
    Rule::new(
        "end.half-closed",
        SECTION,
        Should,
        "a client that closes its side gets the connection closed, and does no harm",
        half_closed,
    ),
    Rule::new(
        "end.client-gone",
        SECTION,
        Should,
        "clients that vanish with requests in flight do no harm",
        client_gone,
    ),
    Rule::new(
        "end.client-gone-in-request",
        SECTION,
        Should,
        "clients that vanish within a request do no harm",
        client_gone_in_request,
    ),
];

/// Runs a check on a new session in each mode, and fails if the next client is not served.
fn each(target: &Target, check: impl Fn(Session) -> Result<(), Problem>) -> Result<(), Problem> {
    ensure!(!target.profile.modes.is_empty(), "the export cannot be opened");
    for mode in &target.profile.modes {
        let during = |problem: Problem| problem.during(mode);
        check(Session::open(target, *mode)?).map_err(during)?;
        let next = Session::open(target, *mode).and_then(|mut next| next.in_step(target));
        next.map_err(|problem| problem.during("next client"))?;
    }
    Ok(())
}

fn closes(target: &Target) -> Seen {
    each(target, |mut session| {
        session.in_step(target)?;
        let disc = session.encode(9, &Request::new(CMD_DISC, 0, 0));
        session.link.send(&disc)?;
        let rest = session.link.recv_until_closed()?;
        ensure!(rest.is_empty(), "{} bytes after DISC", rest.len());
        Ok(())
    })?;
    Ok("closed".to_owned())
}

fn outstanding(target: &Target) -> Seen {
    const COUNT: u64 = 16;
    each(target, |mut session| {
        let length = target.clip(4096);
        let mut cookies = Vec::new();
        for _ in 0..COUNT {
            cookies.push(session.send(&Request::read(0, length))?);
        }
        let disc = session.encode(9, &Request::new(CMD_DISC, 0, 0));
        session.link.send(&disc)?;
        for (number, cookie) in cookies.into_iter().enumerate() {
            let reply = session.wait(cookie);
            reply.map_err(|problem| problem.during(format_args!("read {number} before DISC")))?;
        }
        let rest = session.link.recv_until_closed()?;
        ensure!(rest.is_empty(), "{} bytes after the last reply", rest.len());
        Ok(())
    })?;
    Ok(format!("{COUNT} reads answered, then closed"))
}

fn half_closed(target: &Target) -> Seen {
    each(target, |mut session| {
        session.in_step(target)?;
        session.link.half_close();
        let rest = session.link.recv_until_closed()?;
        ensure!(rest.is_empty(), "{} bytes", rest.len());
        Ok(())
    })?;
    Ok("closed".to_owned())
}

fn client_gone(target: &Target) -> Seen {
    for _ in 0..10 {
        each(target, |mut session| {
            for _ in 0..32 {
                session.send(&Request::read(0, target.clip(256 << 10)))?;
            }
            Ok(())
        })?;
    }
    Ok("10 clients of each mode gone with 32 reads in flight".to_owned())
}

fn client_gone_in_request(target: &Target) -> Seen {
    each(target, |mut session| {
        let message = session.encode(1, &Request::read(0, target.clip(512)));
        Ok(session.link.send(&message[..message.len() / 2])?)
    })?;
    let mut session = Session::open(target, Mode::Simple)?;
    session.in_step(target)?;
    Ok("gone within the header".to_owned())
}
