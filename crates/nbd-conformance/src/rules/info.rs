//! `OPT_INFO`: information about an export without opening it.

use crate::client::haggle::{Answer, BlockSizes, check_string};
use crate::client::{Haggle, Info, info_data};
use crate::rule::{Level::*, Problem, Rule, Seen};
use crate::target::{NOBODYS_NAME, Target};
use crate::wire::*;
use crate::{ensure, skip};

const SECTION: &str = "NBD_OPT_INFO and NBD_OPT_GO";

/// Every information type that the text defines.
pub(super) const ALL: [u16; 4] = [INFO_EXPORT, INFO_NAME, INFO_DESCRIPTION, INFO_BLOCK_SIZE];

pub(super) const RULES: &[Rule] = &[
    Rule::new(
        "info.export",
        "NBD_INFO_EXPORT",
        Must,
        "INFO sends INFO_EXPORT with 12 bytes before ACK, whatever was asked for",
        export,
    ),
    Rule::new("info.goes-on", SECTION, Must, "haggling goes on after INFO", goes_on),
    Rule::new(
        "info.unknown-export",
        SECTION,
        Must,
        "an export that does not exist gets ERR_UNKNOWN, and haggling goes on",
        unknown_export,
    ),
    Rule::new(
        "info.unknown-export-silent",
        SECTION,
        Should,
        "no information is sent on an export that does not exist",
        unknown_export_silent,
    ),
    Rule::new(
        "info.unknown-request",
        SECTION,
        Must,
        "requests for unknown information are ignored",
        unknown_request,
    ),
    Rule::new(
        "info.each-request",
        "NBD_REP_INFO",
        Must,
        "each information type alone is answered in form",
        each_request,
    ),
    Rule::new("info.once", "NBD_REP_INFO", Should, "each information type appears once", once),
    Rule::new(
        "info.strings",
        "Conventions",
        Must,
        "name and description are valid strings",
        strings,
    ),
    Rule::new(
        "info.name-listed",
        "NBD_INFO_NAME",
        Should,
        "the canonical name is one of those listed",
        name_listed,
    ),
    Rule::new(
        "info.block-sizes",
        "Block size constraints",
        Must,
        "minimum, preferred and maximum block size are powers and multiples as demanded",
        block_sizes,
    ),
    Rule::new(
        "info.block-sizes-useful",
        "Block size constraints",
        Should,
        "the size is a multiple of the minimum, the maximum at least 1 MiB",
        block_sizes_useful,
    ),
    Rule::new(
        "info.short-data",
        "NBD_REP_ERR_INVALID",
        Should,
        "INFO with data too short to be one gets ERR_INVALID",
        short_data,
    ),
    Rule::new(
        "info.name-beyond-data",
        "NBD_REP_ERR_INVALID",
        Should,
        "a name longer than the option's data gets ERR_INVALID",
        name_beyond_data,
    ),
    Rule::new(
        "info.count-mismatch",
        "NBD_REP_ERR_INVALID",
        Should,
        "a number of requests that the data does not hold gets ERR_INVALID",
        count_mismatch,
    ),
    Rule::new(
        "info.long-name",
        "Conventions",
        Should,
        "a name of 4096 bytes is answered with an error, not a disconnect",
        long_name,
    ),
];

/// Opens a connection and asks for information; skips if the server does not know the option.
fn ask(target: &Target, requests: &[u16]) -> Result<Answer, Problem> {
    let mut haggle = Haggle::open(target)?;
    let answer = haggle.option(OPT_INFO, &info_data(&target.export, requests))?;
    if answer.last.kind == REP_ERR_UNSUP {
        skip!("server does not know INFO");
    }
    ensure!(answer.is_ack(), "{}", answer.outcome());
    Ok(answer)
}

fn export(target: &Target) -> Seen {
    let answer = Haggle::open(target)?.option(OPT_INFO, &info_data(&target.export, &[]))?;
    ensure!(answer.last.kind != REP_ERR_UNSUP, "ERR_UNSUP: INFO is part of the baseline");
    let (size, flags) = answer.export()?;
    ask(target, &[INFO_NAME])?.export()?;
    Ok(format!("{size} bytes, flags {flags:#x}"))
}

fn goes_on(target: &Target) -> Seen {
    let mut haggle = Haggle::open(target)?;
    haggle.option(OPT_INFO, &info_data(&target.export, &[]))?.export()?;
    let answer = haggle.option(OPT_UNKNOWN, &[])?;
    ensure!(answer.last.kind == REP_ERR_UNSUP, "next option: {}", answer.outcome());
    haggle.in_step(target)?;
    Ok("next options answered".to_owned())
}

fn ask_unknown(target: &Target) -> Result<Answer, Problem> {
    if target.profile.accepts_any_name {
        skip!("server takes every export name");
    }
    let mut haggle = Haggle::open(target)?;
    let answer = haggle.option(OPT_INFO, &info_data(NOBODYS_NAME, &ALL))?;
    haggle.in_step(target)?;
    Ok(answer)
}

fn unknown_export(target: &Target) -> Seen {
    let answer = ask_unknown(target)?;
    ensure!(matches!(answer.last.kind, REP_ERR_UNKNOWN | REP_ERR_TLS_REQD), "{}", answer.outcome());
    Ok(answer.outcome())
}

fn unknown_export_silent(target: &Target) -> Seen {
    let answer = ask_unknown(target)?;
    ensure!(answer.replies.is_empty(), "{} replies before the error", answer.replies.len());
    Ok("none".to_owned())
}

fn unknown_request(target: &Target) -> Seen {
    ask(target, &[INFO_UNKNOWN])?.export()?;
    let many: Vec<u16> = (0..100).map(|number| INFO_UNKNOWN + number).collect();
    ask(target, &many)?.export()?;
    Ok("one and a hundred ignored".to_owned())
}

fn each_request(target: &Target) -> Seen {
    let mut sent = Vec::new();
    for request in ALL {
        let answer = ask(target, &[request])?;
        answer.export()?;
        let has = |info: &Info| {
            matches!(
                (request, info),
                (INFO_NAME, Info::Name(_))
                    | (INFO_DESCRIPTION, Info::Description(_))
                    | (INFO_BLOCK_SIZE, Info::BlockSize(_))
                    | (INFO_EXPORT, Info::Export { .. })
            )
        };
        if answer.infos()?.iter().any(has) {
            sent.push(["EXPORT", "NAME", "DESCRIPTION", "BLOCK_SIZE"][usize::from(request)]);
        }
    }
    Ok(format!("sent on request: {}", sent.join(", ")))
}

fn once(target: &Target) -> Seen {
    let answer = ask(target, &ALL)?;
    let mut kinds: Vec<_> = answer.replies.iter().map(|reply| reply.data.get(..2)).collect();
    let count = kinds.len();
    kinds.sort_unstable();
    kinds.dedup();
    ensure!(kinds.len() == count, "{count} replies, {} types", kinds.len());
    Ok(format!("{count} types"))
}

fn strings(target: &Target) -> Seen {
    let mut seen = Vec::new();
    for info in ask(target, &ALL)?.infos()? {
        match info {
            Info::Name(name) => seen.push(format!("name {:?}", check_string("name", &name)?)),
            Info::Description(text) => {
                seen.push(format!("description {:?}", check_string("description", &text)?));
            }
            _ => {}
        }
    }
    if seen.is_empty() {
        skip!("server sends neither name nor description");
    }
    Ok(seen.join(", "))
}

fn name_listed(target: &Target) -> Seen {
    let name = ask(target, &[INFO_NAME])?.infos()?.into_iter().find_map(|info| match info {
        Info::Name(name) => Some(String::from_utf8_lossy(&name).into_owned()),
        _ => None,
    });
    let Some(name) = name else { skip!("server sends no name") };
    if target.profile.exports.is_empty() {
        skip!("server lists no names");
    }
    ensure!(target.profile.exports.contains(&name), "{name:?} is not listed");
    Ok(format!("{name:?}"))
}

fn sizes(target: &Target) -> Result<(u64, BlockSizes), Problem> {
    let answer = ask(target, &[INFO_BLOCK_SIZE])?;
    match answer.block_sizes()? {
        Some(sizes) => Ok((answer.export()?.0, sizes)),
        None => skip!("server announces no block sizes"),
    }
}

fn block_sizes(target: &Target) -> Seen {
    let (size, BlockSizes { minimum, preferred, maximum }) = sizes(target)?;
    let all = format!("minimum {minimum}, preferred {preferred}, maximum {maximum}");
    ensure!(minimum.is_power_of_two() && minimum <= 1 << 16, "{all}: minimum");
    ensure!(
        preferred.is_power_of_two() && preferred >= minimum.max(512),
        "{all}: preferred is no power of two at least as large as the minimum and 512"
    );
    ensure!(
        maximum == u32::MAX || maximum % minimum == 0,
        "{all}: maximum is neither a multiple of the minimum nor 2^32 - 1"
    );
    ensure!(
        u64::from(maximum) >= size.min(preferred.into()),
        "{all}: maximum is below preferred and the size {size}"
    );
    Ok(all)
}

fn block_sizes_useful(target: &Target) -> Seen {
    let (size, BlockSizes { minimum, maximum, .. }) = sizes(target)?;
    ensure!(size % u64::from(minimum.max(1)) == 0, "size {size}, minimum {minimum}");
    ensure!(
        u64::from(maximum) >= size.min(1 << 20),
        "maximum {maximum} for an export of {size} bytes"
    );
    Ok(format!("size {size}, minimum {minimum}, maximum {maximum}"))
}

/// Fails unless INFO with this data gets `ERR_INVALID` and the connection stays in step.
fn invalid(target: &Target, data: &[u8]) -> Result<(), Problem> {
    let mut haggle = Haggle::open(target)?;
    let answer = haggle.option(OPT_INFO, data)?;
    if answer.last.kind == REP_ERR_UNSUP {
        skip!("server does not know INFO");
    }
    ensure!(answer.last.kind == REP_ERR_INVALID, "data {data:02x?}: {}", answer.outcome());
    haggle.in_step(target)
}

fn short_data(target: &Target) -> Seen {
    for length in [0, 3, 4, 5] {
        invalid(target, &vec![0; length])?;
    }
    Ok("ERR_INVALID for 0, 3, 4, 5 bytes, in step".to_owned())
}

fn name_beyond_data(target: &Target) -> Seen {
    for length in [1_u32, 2, 4096, u32::MAX - 5, u32::MAX] {
        let mut data = length.to_be_bytes().to_vec();
        data.extend_from_slice(&[0, 0]);
        invalid(target, &data)?;
    }
    Ok("ERR_INVALID, in step".to_owned())
}

fn count_mismatch(target: &Target) -> Seen {
    let mut more = info_data(&target.export, &[]);
    let count = more.len() - 1;
    more[count] = 1;
    invalid(target, &more)?;
    let mut fewer = info_data(&target.export, &[INFO_NAME]);
    let count = fewer.len() - 3;
    fewer[count] = 0;
    invalid(target, &fewer)?;
    Ok("ERR_INVALID for more and for fewer, in step".to_owned())
}

fn long_name(target: &Target) -> Seen {
    let mut haggle = Haggle::open(target)?;
    let answer = haggle.option(OPT_INFO, &info_data(&"n".repeat(STRING_MAX), &[]))?;
    haggle.in_step(target)?;
    ensure!(target.profile.accepts_any_name || !answer.is_ack(), "ACK");
    Ok(answer.outcome())
}
