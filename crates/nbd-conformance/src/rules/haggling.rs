//! Options in general: the form of replies, unknown options, lengths, order.

use crate::client::haggle::{be32, check_string, option_message};
use crate::client::{Haggle, Mode, Session, info_data};
use crate::rule::{Level::*, Problem, Rule, Seen};
use crate::target::{NOBODYS_NAME, Target};
use crate::wire::*;
use crate::{ensure, skip};

const SECTION: &str = "Fixed newstyle negotiation";

pub(super) const RULES: &[Rule] = &[
    Rule::new(
        "option.reply-form",
        SECTION,
        Must,
        "each reply has the reply magic and repeats the option",
        reply_form,
    ),
    Rule::new(
        "option.unknown",
        "Baseline",
        Must,
        "unknown options get ERR_UNSUP and the next message is understood",
        unknown,
    ),
    Rule::new(
        "option.unknown-with-data",
        "Baseline",
        Must,
        "data of an unknown option is skipped",
        unknown_with_data,
    ),
    Rule::new(
        "option.zero",
        "Baseline",
        Must,
        "option 0 and the withdrawn PEEK_EXPORT get ERR_UNSUP",
        unregistered,
    ),
    Rule::new(
        "option.unknown-large",
        "Termination of the session during option haggling",
        Should,
        "an unknown option with 16 KiB of data is answered with an error, not a disconnect",
        unknown_large,
    ),
    Rule::new(
        "option.huge-length",
        "Termination of the session during option haggling",
        Should,
        "an option that claims 4 GiB of data ends this session at most, not the server",
        huge_length,
    ),
    Rule::new(
        "option.error-text",
        "Option reply types",
        Must,
        "data of an error reply is a string for the user",
        error_text,
    ),
    Rule::new(
        "option.order",
        SECTION,
        Must,
        "LIST, INFO, STRUCTURED_REPLY, EXTENDED_HEADERS and unknown options work in every order",
        order,
    ),
    Rule::new(
        "option.many",
        "Termination of the session during option haggling",
        Should,
        "sixteen options before GO are answered, not taken for an attack",
        many,
    ),
    Rule::new(
        "option.byte-by-byte",
        SECTION,
        Must,
        "an option is understood however the stream is cut",
        byte_by_byte,
    ),
    Rule::new(
        "option.pipelined",
        SECTION,
        May,
        "options sent before the reply to the last one get their replies in order, or a disconnect",
        pipelined,
    ),
    Rule::new(
        "option.bad-magic",
        "Termination of the session during option haggling",
        Should,
        "an option without IHAVEOPT is not acted upon",
        bad_magic,
    ),
    Rule::new(
        "option.no-tls-required",
        "NOTLS mode",
        Must,
        "a server that refuses STARTTLS never says ERR_TLS_REQD",
        no_tls_required,
    ),
];

fn reply_form(target: &Target) -> Seen {
    let mut haggle = Haggle::open(target)?;
    haggle.option(OPT_LIST, &[])?;
    haggle.option(OPT_INFO, &info_data(&target.export, &[]))?;
    haggle.option(OPT_UNKNOWN, &[])?;
    Ok("LIST, INFO and an unknown option answered in form".to_owned())
}

/// Sends an option that the server cannot know, and fails unless the server says so and stays in step.
fn unsupported(target: &Target, option: u32, data: &[u8]) -> Result<(), Problem> {
    let mut haggle = Haggle::open(target)?;
    let answer = haggle.option(option, data)?;
    ensure!(
        answer.last.kind == REP_ERR_UNSUP && answer.replies.is_empty(),
        "option {option:#x} with {} bytes: {}",
        data.len(),
        answer.outcome()
    );
    haggle.in_step(target)
}

fn unknown(target: &Target) -> Seen {
    for option in [OPT_UNKNOWN, 12, u32::MAX] {
        unsupported(target, option, &[])?;
    }
    Ok("ERR_UNSUP, in step".to_owned())
}

fn unknown_with_data(target: &Target) -> Seen {
    for length in [1, 7, 1000] {
        unsupported(target, OPT_UNKNOWN, &vec![0x49; length])?;
    }
    // The server must not mistake data that looks like an option for one.
    unsupported(target, OPT_UNKNOWN, &option_message(OPT_ABORT, &[]))?;
    Ok("ERR_UNSUP, in step".to_owned())
}

fn unregistered(target: &Target) -> Seen {
    unsupported(target, 0, &[])?;
    unsupported(target, OPT_PEEK_EXPORT, &[])?;
    Ok("ERR_UNSUP, in step".to_owned())
}

fn unknown_large(target: &Target) -> Seen {
    let mut haggle = Haggle::open(target)?;
    let answer = haggle.option(OPT_UNKNOWN, &[0x49; 16 << 10])?;
    ensure!(answer.last.kind & REP_ERROR != 0, "{}", answer.outcome());
    haggle.in_step(target)?;
    Ok(answer.outcome())
}

fn huge_length(target: &Target) -> Seen {
    let mut haggle = Haggle::open(target)?;
    let mut message = option_message(OPT_INFO, &[]);
    message[12..].copy_from_slice(&u32::MAX.to_be_bytes());
    haggle.link.send(&message)?;
    haggle.link.half_close();
    let answer = haggle.link.recv_until_closed()?;
    Haggle::open(target)?.in_step(target).map_err(|problem| problem.during("next client"))?;
    Ok(if answer.is_empty() { "disconnect" } else { "answer, then disconnect" }.to_owned())
}

fn error_text(target: &Target) -> Seen {
    let mut haggle = Haggle::open(target)?;
    let mut texts = Vec::new();
    let cases = [
        (OPT_UNKNOWN, vec![]),
        (OPT_LIST, vec![1]),
        (OPT_INFO, info_data(NOBODYS_NAME, &[])),
        (OPT_INFO, vec![0, 0]),
        (OPT_STRUCTURED_REPLY, vec![1]),
    ];
    for (option, data) in cases {
        let answer = haggle.option(option, &data)?;
        if !answer.is_ack() && !answer.last.data.is_empty() {
            texts.push(check_string("error message", &answer.last.data)?);
        } else {
            ensure!(!answer.is_ack() || answer.last.data.is_empty(), "ACK with data");
        }
    }
    Ok(match texts.first() {
        Some(text) => format!("{} messages, such as {text:?}", texts.len()),
        None => "no messages".to_owned(),
    })
}

fn order(target: &Target) -> Seen {
    let options = [
        (OPT_LIST, vec![]),
        (OPT_INFO, info_data(&target.export, &[])),
        (OPT_STRUCTURED_REPLY, vec![]),
        (OPT_UNKNOWN, vec![0; 3]),
        (OPT_EXTENDED_HEADERS, vec![]),
    ];
    // The answer to each option alone.
    let mut alone = Vec::new();
    for (option, data) in &options {
        alone.push(Haggle::open(target)?.option(*option, data)?.last.kind);
    }
    let extended = alone[4] == REP_ACK;
    // Extended headers override structured replies, so some of the orders leave them out.
    let mut orders = permutations(options.len());
    orders.extend(permutations(options.len() - 1));
    for order in &orders {
        let names: Vec<_> = order.iter().map(|&index| options[index].0).collect();
        let during = |problem: Problem| problem.during(format_args!("options {names:?}, GO"));
        let mut haggle = Haggle::open(target)?;
        let mut mode = Mode::Simple;
        for &index in order {
            let (option, data) = &options[index];
            let kind = haggle.option(*option, data).map_err(during)?.last.kind;
            let expected = match (*option, mode) {
                (OPT_STRUCTURED_REPLY, Mode::Extended) => REP_ERR_EXT_HEADER_REQD,
                _ => alone[index],
            };
            ensure!(
                kind == expected,
                "options {names:?}: {option} answered with {}, alone or by the text with {}",
                reply_name(kind),
                reply_name(expected)
            );
            mode = match (*option, kind) {
                (OPT_STRUCTURED_REPLY, REP_ACK) => Mode::Structured,
                (OPT_EXTENDED_HEADERS, REP_ACK) => Mode::Extended,
                _ => mode,
            };
        }
        let mut session = Session::go(haggle, target, mode).map_err(during)?;
        session.in_step(target).map_err(during)?;
    }
    let extended = if extended { "" } else { " (EXTENDED_HEADERS not offered)" };
    Ok(format!("{} orders, the same answers in each{extended}", orders.len()))
}

/// Returns every permutation of `0..count`.
fn permutations(count: usize) -> Vec<Vec<usize>> {
    let mut all = vec![Vec::new()];
    for next in 0..count {
        let extend = |order: &Vec<usize>| {
            (0..=next)
                .map(|place| {
                    let mut order = order.clone();
                    order.insert(place, next);
                    order
                })
                .collect::<Vec<_>>()
        };
        all = all.iter().flat_map(extend).collect();
    }
    all
}

fn many(target: &Target) -> Seen {
    let mut haggle = Haggle::open(target)?;
    for count in 1..=16 {
        haggle
            .in_step(target)
            .map_err(|problem| problem.during(format_args!("option number {count}")))?;
    }
    Session::go(haggle, target, Mode::Simple)?.in_step(target)?;
    Ok("all answered".to_owned())
}

fn byte_by_byte(target: &Target) -> Seen {
    let mut haggle = Haggle::open(target)?;
    haggle.link.send_slowly(&option_message(OPT_INFO, &info_data(&target.export, &[INFO_NAME])))?;
    haggle.answer(OPT_INFO)?.export()?;
    haggle.in_step(target)?;
    Ok("understood".to_owned())
}

fn pipelined(target: &Target) -> Seen {
    let mut haggle = Haggle::open(target)?;
    let mut message = option_message(OPT_UNKNOWN, &[1, 2, 3]);
    message.extend(option_message(OPT_INFO, &info_data(&target.export, &[])));
    message.extend(option_message(OPT_GO, &info_data(&target.export, &[])));
    haggle.link.send(&message)?;
    let first = haggle.answer(OPT_UNKNOWN)?;
    ensure!(first.last.kind == REP_ERR_UNSUP, "first of three: {}", first.outcome());
    haggle.answer(OPT_INFO)?.export()?;
    let (size, flags) = haggle.answer(OPT_GO)?.export()?;
    Session::new(haggle.link, Mode::Simple, size, flags, None).in_step(target)?;
    Ok("replies in order".to_owned())
}

fn bad_magic(target: &Target) -> Seen {
    let mut haggle = Haggle::open(target)?;
    let mut message = option_message(OPT_LIST, &[]);
    message[0] ^= 0xff;
    haggle.link.send(&message)?;
    haggle.link.half_close();
    let answer = haggle.link.recv_until_closed()?;
    let kind = answer.get(12..16).map(be32);
    let acted = kind.is_some_and(|kind| kind & REP_ERROR == 0);
    ensure!(!acted, "answered with {}", reply_name(kind.unwrap_or(0)));
    Haggle::open(target)?.in_step(target).map_err(|problem| problem.during("next client"))?;
    Ok(if answer.is_empty() { "disconnect" } else { "error, then disconnect" }.to_owned())
}

fn no_tls_required(target: &Target) -> Seen {
    let mut haggle = Haggle::open(target)?;
    let tls = haggle.option(OPT_STARTTLS, &[])?;
    if tls.is_ack() {
        skip!("server offers TLS");
    }
    for option in [OPT_LIST, OPT_STRUCTURED_REPLY, OPT_UNKNOWN] {
        let answer = haggle.option(option, &[])?;
        ensure!(answer.last.kind != REP_ERR_TLS_REQD, "option {option}: ERR_TLS_REQD");
    }
    for name in [target.export.as_str(), NOBODYS_NAME] {
        let answer = haggle.option(OPT_INFO, &info_data(name, &[]))?;
        ensure!(answer.last.kind != REP_ERR_TLS_REQD, "INFO for {name:?}: ERR_TLS_REQD");
    }
    Ok(format!("STARTTLS: {}", reply_name(tls.last.kind)))
}
