//! `OPT_ABORT`: the clean end of haggling.

use crate::client::Haggle;
use crate::client::haggle::option_message;
use crate::ensure;
use crate::rule::{Level::*, Rule, Seen};
use crate::target::Target;
use crate::wire::*;

const SECTION: &str = "NBD_OPT_ABORT";

pub(super) const RULES: &[Rule] = &[
    Rule::new("abort.ack", SECTION, Must, "ABORT is answered with ACK", ack),
    Rule::new(
        "abort.end",
        "Termination of the session during option haggling",
        Must,
        "nothing follows the ACK, and the connection ends with the client's end",
        end,
    ),
    Rule::new("abort.data", SECTION, Should, "data sent with ABORT is ignored", data),
    Rule::new(
        "abort.client-gone",
        SECTION,
        Should,
        "a client that does not wait for the ACK does no harm",
        client_gone,
    ),
];

fn ack(target: &Target) -> Seen {
    let answer = Haggle::open(target)?.option(OPT_ABORT, &[])?;
    ensure!(answer.is_ack() && answer.replies.is_empty(), "{}", answer.outcome());
    Ok("ACK".to_owned())
}

fn end(target: &Target) -> Seen {
    let mut haggle = Haggle::open(target)?;
    haggle.option(OPT_ABORT, &[])?;
    haggle.link.half_close();
    let rest = haggle.link.recv_until_closed()?;
    ensure!(rest.is_empty(), "{} bytes after the ACK", rest.len());
    Ok("connection ended".to_owned())
}

fn data(target: &Target) -> Seen {
    let answer = Haggle::open(target)?.option(OPT_ABORT, b"goodbye")?;
    ensure!(answer.is_ack(), "{}", answer.outcome());
    Ok("ACK".to_owned())
}

fn client_gone(target: &Target) -> Seen {
    for _ in 0..20 {
        let mut haggle = Haggle::open(target)?;
        haggle.link.send(&option_message(OPT_ABORT, &[]))?;
    }
    Haggle::open(target)?.in_step(target).map_err(|problem| problem.during("next client"))?;
    Ok("20 clients gone, the next one served".to_owned())
}
