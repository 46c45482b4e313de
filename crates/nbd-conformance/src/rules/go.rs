//! `OPT_GO` and the transmission flags that it returns.

use super::info::ALL;
use crate::client::{Haggle, Info, Mode, Session, info_data};
use crate::rule::{Level::*, Problem, Rule, Seen};
use crate::target::{NOBODYS_NAME, Target};
use crate::wire::*;
use crate::{ensure, skip};

const SECTION: &str = "NBD_OPT_INFO and NBD_OPT_GO";
const FLAGS: &str = "Transmission flags";

pub(super) const RULES: &[Rule] = &[
    Rule::new(
        "go.enters",
        SECTION,
        Must,
        "after the ACK to GO, without any padding, requests are answered",
        enters,
    ),
    Rule::new(
        "go.enters-padded-client",
        SECTION,
        Must,
        "nor is there padding for a client that did not ask to leave it out",
        enters_padded_client,
    ),
    Rule::new(
        "go.after-failure",
        SECTION,
        Must,
        "after a GO that failed haggling goes on, and another GO can succeed",
        after_failure,
    ),
    Rule::new(
        "go.same-as-info",
        SECTION,
        Must,
        "GO right after INFO with the same data gives the same information",
        same_as_info,
    ),
    Rule::new(
        "go.block-size-required",
        SECTION,
        Must,
        "ERR_BLOCK_SIZE_REQD is not sent to who asked for the block size",
        block_size_required,
    ),
    Rule::new(
        "go.without-block-size",
        "Block size constraints",
        Should,
        "a client that does not ask for block sizes is not refused",
        without_block_size,
    ),
    Rule::new("flags.has-flags", FLAGS, Must, "HAS_FLAGS is set", has_flags),
    Rule::new(
        "flags.df",
        FLAGS,
        Must,
        "SEND_DF is clear unless replies in chunks were negotiated",
        df,
    ),
    Rule::new(
        "flags.fast-zero",
        FLAGS,
        Must,
        "SEND_FAST_ZERO is clear unless SEND_WRITE_ZEROES is set",
        fast_zero,
    ),
    Rule::new(
        "flags.payload",
        "NBD_OPT_EXTENDED_HEADERS",
        Should,
        "BLOCK_STAT_PAYLOAD is announced only with extended headers",
        payload,
    ),
    Rule::new(
        "flags.steady",
        FLAGS,
        Should,
        "size and flags are the same on each connection",
        steady,
    ),
];

fn enters(target: &Target) -> Seen {
    let mut haggle = Haggle::open(target)?;
    let answer = haggle.option(OPT_GO, &info_data(&target.export, &[]))?;
    ensure!(answer.last.kind != REP_ERR_UNSUP, "ERR_UNSUP: GO is part of the baseline");
    let (size, flags) = answer.export()?;
    Session::new(haggle.link, Mode::Simple, size, flags, None).in_step(target)?;
    Ok(format!("{size} bytes, flags {flags:#x}"))
}

fn enters_padded_client(target: &Target) -> Seen {
    let mut haggle = Haggle::open_with(target, C_FIXED_NEWSTYLE)?;
    let answer = haggle.option(OPT_GO, &info_data(&target.export, &[]))?;
    let (size, flags) = answer.export()?;
    Session::new(haggle.link, Mode::Simple, size, flags, None).in_step(target)?;
    Ok("no padding".to_owned())
}

fn after_failure(target: &Target) -> Seen {
    let mut haggle = Haggle::open(target)?;
    let bad = if target.profile.accepts_any_name {
        haggle.option(OPT_GO, &[0, 0, 0])?
    } else {
        haggle.option(OPT_GO, &info_data(NOBODYS_NAME, &[]))?
    };
    ensure!(!bad.is_ack(), "GO that has to fail: ACK");
    Session::go(haggle, target, Mode::Simple)?.in_step(target)?;
    Ok(format!("{}, then success", bad.outcome()))
}

fn same_as_info(target: &Target) -> Seen {
    let sorted = |answer: crate::client::Answer| -> Result<Vec<Vec<u8>>, Problem> {
        answer.export()?;
        let mut replies: Vec<_> = answer.replies.into_iter().map(|reply| reply.data).collect();
        replies.sort();
        Ok(replies)
    };
    let mut haggle = Haggle::open(target)?;
    haggle.option(OPT_STRUCTURED_REPLY, &[])?;
    let data = info_data(&target.export, &ALL);
    let info = sorted(haggle.option(OPT_INFO, &data)?)?;
    let go = sorted(haggle.option(OPT_GO, &data)?)?;
    ensure!(info == go, "INFO: {info:02x?}; GO: {go:02x?}");
    Ok(format!("{} replies", go.len()))
}

fn block_size_required(target: &Target) -> Seen {
    for option in [OPT_INFO, OPT_GO] {
        let data = info_data(&target.export, &[INFO_BLOCK_SIZE]);
        let answer = Haggle::open(target)?.option(option, &data)?;
        ensure!(answer.last.kind != REP_ERR_BLOCK_SIZE_REQD, "{}", answer.outcome());
    }
    Ok("not sent".to_owned())
}

fn without_block_size(target: &Target) -> Seen {
    let answer = Haggle::open(target)?.option(OPT_GO, &info_data(&target.export, &[]))?;
    if answer.last.kind == REP_ERR_BLOCK_SIZE_REQD {
        let announced = answer.infos()?.iter().any(|info| matches!(info, Info::BlockSize(_)));
        ensure!(false, "{} (sizes sent first: {announced})", answer.outcome());
    }
    answer.export()?;
    Ok("accepted".to_owned())
}

fn has_flags(target: &Target) -> Seen {
    target.each_mode(|session| {
        ensure!(session.has(FLAG_HAS_FLAGS), "flags {:#x}", session.flags);
        Ok(format!("flags {:#x}", session.flags))
    })
}

fn df(target: &Target) -> Seen {
    let session = Session::open(target, Mode::Simple)?;
    ensure!(!session.has(FLAG_SEND_DF), "flags {:#x}", session.flags);
    Ok(format!("flags {:#x}", session.flags))
}

fn fast_zero(target: &Target) -> Seen {
    target.each_mode(|session| {
        if !session.has(FLAG_SEND_FAST_ZERO) {
            skip!("SEND_FAST_ZERO is not announced");
        }
        ensure!(session.has(FLAG_SEND_WRITE_ZEROES), "flags {:#x}", session.flags);
        Ok("both are set".to_owned())
    })
}

fn payload(target: &Target) -> Seen {
    target.each_mode(|session| {
        let announced = session.has(FLAG_BLOCK_STAT_PAYLOAD);
        ensure!(session.mode == Mode::Extended || !announced, "flags {:#x}", session.flags);
        Ok(if announced { "announced" } else { "not announced" }.to_owned())
    })
}

fn steady(target: &Target) -> Seen {
    for mode in &target.profile.modes {
        // One after the other, because the server need not accept two clients at a time.
        let facts = || Session::open(target, *mode).map(|session| (session.size, session.flags));
        let (first, second) = (facts()?, facts()?);
        ensure!(first == second, "{mode}: size and flags {first:x?}, then {second:x?}");
    }
    Ok("the same twice".to_owned())
}
