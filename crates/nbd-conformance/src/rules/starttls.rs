//! `OPT_STARTTLS`. The kit does not speak TLS; it tests only what comes before the TLS handshake.

use crate::client::haggle::option_message;
use crate::client::{Haggle, info_data};
use crate::rule::{Level::*, Rule, Seen};
use crate::target::Target;
use crate::wire::*;
use crate::{ensure, skip};

pub(super) const RULES: &[Rule] = &[
    Rule::new(
        "starttls.answer",
        "NBD_OPT_STARTTLS",
        Must,
        "STARTTLS is answered with ACK or an error the text permits",
        answer,
    ),
    Rule::new(
        "starttls.data",
        "NBD_OPT_STARTTLS",
        Must,
        "STARTTLS with data is not acknowledged, and the connection stays in step",
        data,
    ),
    Rule::new(
        "starttls.refused",
        "NOTLS mode",
        Must,
        "haggling goes on after STARTTLS was refused, and keeps what was negotiated",
        refused,
    ),
    Rule::new(
        "starttls.no-plain-text",
        "FORCEDTLS mode",
        Must,
        "after ACK nothing is answered in plain text, and a failed handshake ends the session",
        no_plain_text,
    ),
];

fn answer(target: &Target) -> Seen {
    let answer = Haggle::open(target)?.option(OPT_STARTTLS, &[])?;
    let permitted = matches!(
        answer.last.kind,
        REP_ACK | REP_ERR_UNSUP | REP_ERR_POLICY | REP_ERR_PLATFORM | REP_ERR_SHUTDOWN
    );
    ensure!(permitted, "{}", answer.outcome());
    ensure!(answer.replies.is_empty(), "{} replies before the final one", answer.replies.len());
    Ok(answer.outcome())
}

fn data(target: &Target) -> Seen {
    let mut haggle = Haggle::open(target)?;
    let answer = haggle.option(OPT_STARTTLS, &[1, 2, 3])?;
    ensure!(!answer.is_ack(), "ACK");
    haggle.in_step(target)?;
    Ok(answer.outcome())
}

fn refused(target: &Target) -> Seen {
    let mut haggle = Haggle::open(target)?;
    let structured = haggle.option(OPT_STRUCTURED_REPLY, &[])?.is_ack();
    let answer = haggle.option(OPT_STARTTLS, &[])?;
    if answer.is_ack() {
        skip!("server offers TLS");
    }
    haggle.in_step(target)?;
    let mode =
        if structured { crate::client::Mode::Structured } else { crate::client::Mode::Simple };
    crate::client::Session::go(haggle, target, mode)?.in_step(target)?;
    Ok(format!("{}, {mode} as before", answer.outcome()))
}

fn no_plain_text(target: &Target) -> Seen {
    let mut haggle = Haggle::open(target)?;
    if !haggle.option(OPT_STARTTLS, &[])?.is_ack() {
        skip!("server does not offer TLS");
    }
    // The server may have ended the session already.
    let _ = haggle.link.send(&option_message(OPT_INFO, &info_data(&target.export, &[])));
    haggle.link.half_close();
    let answer = haggle.link.recv_until_closed()?;
    let plain = OPTION_REPLY_MAGIC.to_be_bytes();
    ensure!(!answer.windows(8).any(|window| window == plain), "an option reply in plain text");
    Ok("session ended".to_owned())
}
