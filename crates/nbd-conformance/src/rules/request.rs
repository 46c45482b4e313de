//! Requests in general: cookies, unknown commands and flags, many in flight, broken headers.

use crate::client::session::encode;
use crate::client::{Mode, Request, Session};
use crate::rule::{Level::*, Rule, Seen};
use crate::target::Target;
use crate::wire::*;
use crate::{ensure, skip};

pub(super) const RULES: &[Rule] = &[
    Rule::new(
        "request.cookie",
        "Transmission",
        Must,
        "each reply repeats the cookie of its request, whatever its value",
        cookie,
    ),
    Rule::new(
        "request.cookie-reuse",
        "Transmission",
        Must,
        "a cookie that is no longer in flight may be used again",
        cookie_reuse,
    ),
    Rule::new(
        "request.in-flight",
        "Transmission",
        Must,
        "of many requests in flight each is answered once and rightly",
        in_flight,
    ),
    Rule::new(
        "request.byte-by-byte",
        "Request message",
        Must,
        "a request is understood however the stream is cut",
        byte_by_byte,
    ),
    Rule::new(
        "request.unknown-command",
        "Error values",
        Should,
        "an unknown command gets EINVAL",
        unknown_command,
    ),
    Rule::new(
        "request.unknown-command-in-step",
        "Baseline",
        Must,
        "an unknown command does not put the connection out of step",
        unknown_command_in_step,
    ),
    Rule::new(
        "request.unknown-flag",
        "Error values",
        Should,
        "a read with an unknown command flag gets EINVAL",
        unknown_flag,
    ),
    Rule::new(
        "request.misplaced-flag",
        "Error values",
        Should,
        "a read with a flag documented for other commands gets EINVAL",
        misplaced_flag,
    ),
    Rule::new(
        "request.fua-everywhere",
        "Command flags",
        Must,
        "FUA, once announced, is accepted with every command",
        fua_everywhere,
    ),
    Rule::new(
        "request.fua-unannounced",
        "Error values",
        Should,
        "FUA that was not announced gets EINVAL",
        fua_unannounced,
    ),
    Rule::new(
        "request.bad-magic",
        "Terminating the transmission phase",
        Should,
        "a request with a wrong magic is not answered with success; the server goes on for others",
        bad_magic,
    ),
];

fn cookie(target: &Target) -> Seen {
    target.each_mode(|session| {
        let read = Request::read(0, target.clip(512));
        let cookies = [0, 1, u64::MAX, 0x6744_6698_668e_33ef, 0x0102_0304_0506_0708];
        for cookie in cookies {
            session.send_as(cookie, &read)?;
            session.wait(cookie)?;
        }
        Ok(format!("{} values", cookies.len()))
    })
}

fn cookie_reuse(target: &Target) -> Seen {
    target.each_mode(|session| {
        for _ in 0..10 {
            session.send_as(77, &Request::read(0, target.clip(512)))?;
            session.wait(77)?;
        }
        Ok("10 requests with one cookie".to_owned())
    })
}

fn in_flight(target: &Target) -> Seen {
    const COUNT: u64 = 256;
    target.each_mode(|session| {
        let length = target.clip(4096);
        if length == 0 {
            skip!("export has no block");
        }
        let places = target.usable() / length;
        let offset = |number: u64| number.wrapping_mul(0x9e37_79b9) % places * length;
        let cookies: Vec<_> = (0..COUNT)
            .map(|number| session.send(&Request::read(offset(number), length)))
            .collect::<Result<_, _>>()?;
        let mut replies = Vec::new();
        for cookie in cookies {
            replies.push(session.wait(cookie)?.data()?);
        }
        for (number, data) in (0..COUNT).zip(replies) {
            let alone = session.read(offset(number), length)?;
            ensure!(data == alone, "read at {} differs from the same alone", offset(number));
        }
        Ok(format!("{COUNT} reads of {length}"))
    })
}

fn byte_by_byte(target: &Target) -> Seen {
    target.each_mode(|session| {
        let read = Request::read(0, target.clip(512));
        let message = session.encode(5, &read);
        session.expect_reply(5, &read);
        session.link.send_slowly(&message)?;
        session.wait(5)?.data()?;
        Ok("understood".to_owned())
    })
}

fn unknown_command(target: &Target) -> Seen {
    target.each_mode(|session| {
        for command in [CMD_UNKNOWN, 9, u16::MAX] {
            let reply = session.transact(&Request::new(command, 0, 0))?;
            ensure!(reply.error == EINVAL, "command {command}: {}", reply.outcome());
        }
        Ok("EINVAL".to_owned())
    })
}

fn unknown_command_in_step(target: &Target) -> Seen {
    target.each_mode(|session| {
        // Offset and length of an unknown command have no meaning; in particular, no payload follows.
        for (offset, length) in [(0, 0), (0, 4096), (u64::MAX, u64::from(u32::MAX))] {
            let reply = session.transact(&Request::new(CMD_UNKNOWN, offset, length))?;
            ensure!(reply.error != 0, "success");
            session.in_step(target)?;
        }
        Ok("in step".to_owned())
    })
}

fn unknown_flag(target: &Target) -> Seen {
    target.each_mode(|session| {
        let read = Request::read(0, target.clip(512)).with(CMD_FLAG_UNKNOWN);
        let reply = session.transact(&read)?;
        session.in_step(target)?;
        ensure!(reply.error == EINVAL, "{}", reply.outcome());
        Ok("EINVAL".to_owned())
    })
}

fn misplaced_flag(target: &Target) -> Seen {
    target.each_mode(|session| {
        let flags = [
            (CMD_FLAG_NO_HOLE, "NO_HOLE"),
            (CMD_FLAG_REQ_ONE, "REQ_ONE"),
            (CMD_FLAG_FAST_ZERO, "FAST_ZERO"),
        ];
        for (flag, name) in flags {
            let reply = session.transact(&Request::read(0, target.clip(512)).with(flag))?;
            session.in_step(target)?;
            ensure!(reply.error == EINVAL, "READ with {name}: {}", reply.outcome());
        }
        Ok("EINVAL for NO_HOLE, REQ_ONE, FAST_ZERO".to_owned())
    })
}

fn fua_everywhere(target: &Target) -> Seen {
    target.each_mode(|session| {
        session.need(FLAG_SEND_FUA, "SEND_FUA")?;
        session.succeed(&Request::read(0, target.clip(512)).with(CMD_FLAG_FUA))?;
        let mut commands = vec!["READ"];
        if session.has(FLAG_SEND_FLUSH) {
            session.succeed(&Request::new(CMD_FLUSH, 0, 0).with(CMD_FLAG_FUA))?;
            commands.push("FLUSH");
        }
        if session.has(FLAG_SEND_CACHE) {
            let cache = Request::new(CMD_CACHE, 0, target.clip(512)).with(CMD_FLAG_FUA);
            session.succeed(&cache)?;
            commands.push("CACHE");
        }
        Ok(format!("accepted with {}", commands.join(", ")))
    })
}

fn fua_unannounced(target: &Target) -> Seen {
    target.each_mode(|session| {
        if session.has(FLAG_SEND_FUA) {
            skip!("SEND_FUA is announced");
        }
        let reply = session.transact(&Request::read(0, target.clip(512)).with(CMD_FLAG_FUA))?;
        ensure!(reply.error == EINVAL, "{}", reply.outcome());
        Ok("EINVAL".to_owned())
    })
}

fn bad_magic(target: &Target) -> Seen {
    let modes = target.profile.modes.clone();
    ensure!(!modes.is_empty(), "the export cannot be opened");
    for mode in modes {
        let mut session = Session::open(target, mode)?;
        let mut message = encode(mode, 0, 1, &Request::read(0, target.clip(512)));
        message[..4].copy_from_slice(&0x1256_0953_u32.to_be_bytes());
        session.link.send(&message)?;
        session.link.half_close();
        let answer = session.link.recv_until_closed()?;
        // A successful reply of any form is at least this long: a simple header and the data.
        let success = answer.len() as u64 >= 16 + target.clip(512);
        ensure!(!success, "{mode}: {} bytes of answer", answer.len());
        drop(session);
        Session::open(target, Mode::Simple)?.in_step(target)?;
    }
    Ok("connection ended".to_owned())
}
