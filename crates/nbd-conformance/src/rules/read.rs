//! `CMD_READ`.

use crate::client::{Mode, Request, Session};
use crate::rule::{Level::*, Rule, Seen};
use crate::target::Target;
use crate::wire::*;
use crate::{ensure, skip};

const SECTION: &str = "NBD_CMD_READ";

pub(super) const RULES: &[Rule] = &[
    Rule::new("read.whole", SECTION, Must, "every part of the export can be read", whole),
    Rule::new(
        "read.parts-agree",
        SECTION,
        Must,
        "a long read gives the same bytes as short ones",
        parts_agree,
    ),
    Rule::new("read.modes-agree", SECTION, Must, "every mode reads the same bytes", modes_agree),
    Rule::new("read.last-byte", SECTION, Must, "the last block can be read", last_block),
    Rule::new(
        "read.zero-length",
        SECTION,
        Should,
        "a read of length 0 does not end the connection",
        zero_length,
    ),
    Rule::new(
        "read.beyond-end",
        "Error values",
        Should,
        "a read at, across or far beyond the end gets EINVAL",
        beyond_end,
    ),
    Rule::new(
        "read.beyond-end-in-step",
        SECTION,
        Must,
        "a read beyond the end fails, without data, and the connection stays in step or ends",
        beyond_end_in_step,
    ),
    Rule::new(
        "read.misaligned",
        "Block size constraints",
        Should,
        "a read that is not aligned to the announced minimum gets EINVAL",
        misaligned,
    ),
    Rule::new(
        "read.large",
        "Block size constraints",
        Should,
        "a read of the announced maximum, or of almost 32 MiB, is answered",
        large,
    ),
    Rule::new(
        "read.too-large",
        "Block size constraints",
        Should,
        "a read above the announced maximum gets EINVAL",
        too_large,
    ),
    Rule::new(
        "read.df",
        "NBD_CMD_FLAG_DF",
        Must,
        "DF reads of up to 64 KiB come in one content chunk",
        df,
    ),
    Rule::new(
        "read.df-large",
        "NBD_CMD_FLAG_DF",
        Must,
        "a long DF read comes in one content chunk or fails with EOVERFLOW",
        df_large,
    ),
    Rule::new(
        "read.df-unannounced",
        "Error values",
        Should,
        "DF that was not announced gets EINVAL",
        df_unannounced,
    ),
];

fn whole(target: &Target) -> Seen {
    const READ_MAX: u64 = 256 << 20;
    let mut session = Session::open(target, Mode::Simple)?;
    let end = target.usable().min(READ_MAX);
    let mut offset = 0;
    while offset < end {
        let length = target.clip((1 << 20).min(end - offset));
        let data = session.read(offset, length)?;
        ensure!(data.len() as u64 == length, "{} bytes of {length} at {offset}", data.len());
        offset += length;
    }
    Ok(format!("{end} of {} bytes", target.profile.size))
}

fn parts_agree(target: &Target) -> Seen {
    target.each_mode(|session| {
        let length = target.clip(256 << 10);
        let long = session.read(0, length)?;
        let piece = target.clip(4096);
        let mut short = Vec::new();
        while (short.len() as u64) < length {
            let offset = short.len() as u64;
            short.extend(session.read(offset, piece.min(length - offset))?);
        }
        ensure!(long == short, "first difference at {:?}", difference(&long, &short));
        Ok(format!("{length} bytes"))
    })
}

/// Returns the index of the first byte that differs, if any.
pub(super) fn difference(left: &[u8], right: &[u8]) -> Option<usize> {
    if left.len() != right.len() {
        return Some(left.len().min(right.len()));
    }
    left.iter().zip(right).position(|(left, right)| left != right)
}

fn modes_agree(target: &Target) -> Seen {
    if target.profile.modes.len() < 2 {
        skip!("server offers one mode only");
    }
    let length = target.clip(1 << 20);
    let simple = Session::open(target, Mode::Simple)?.read(0, length)?;
    target.each_chunked_mode(|session| {
        let data = session.read(0, length)?;
        ensure!(data == simple, "first difference at {:?}", difference(&data, &simple));
        Ok(format!("{length} bytes"))
    })
}

fn last_block(target: &Target) -> Seen {
    target.each_mode(|session| {
        let block = target.block();
        let offset = target.usable().saturating_sub(block);
        let data = session.read(offset, block.min(target.usable()))?;
        Ok(format!("{} bytes at {offset}", data.len()))
    })
}

fn zero_length(target: &Target) -> Seen {
    target.each_mode(|session| {
        let reply = session.transact(&Request::read(0, 0))?;
        session.in_step(target)?;
        Ok(reply.outcome())
    })
}

/// Returns reads beyond the end, including some whose end overflows.
fn beyond(target: &Target, size: u64) -> Vec<Request> {
    let block = target.block();
    vec![
        Request::read(size, block),
        Request::read(target.usable().saturating_sub(block), 2 * block),
        Request::read(u64::MAX - block + 1, block),
        Request::read(1 << 63, block),
    ]
}

fn beyond_end(target: &Target) -> Seen {
    target.each_mode(|session| {
        for request in beyond(target, session.size) {
            let reply = Session::open(target, session.mode)?.transact(&request)?;
            ensure!(reply.error == EINVAL, "{request}: {}", reply.outcome());
        }
        Ok("EINVAL".to_owned())
    })
}

fn beyond_end_in_step(target: &Target) -> Seen {
    target.each_mode(|session| {
        let (mode, mut ended) = (session.mode, false);
        for request in beyond(target, session.size) {
            let mut session = Session::open(target, mode)?;
            let refused = session.transact(&request).and_then(|reply| {
                ensure!(reply.error != 0, "{request}: success");
                session.in_step(target)
            });
            match refused {
                // The text lets a server hang up after an error.
                Err(_) if session.link.has_ended() => ended = true,
                refused => refused?,
            }
        }
        Ok(if ended { "connection ended" } else { "in step" }.to_owned())
    })
}

fn misaligned(target: &Target) -> Seen {
    let block = target.block();
    if target.profile.blocks.is_none() || block == 1 {
        skip!("no minimum block size above 1 is announced");
    }
    target.each_mode(|session| {
        for (offset, length) in [(1, block), (0, block - 1), (block / 2, block / 2)] {
            let request = Request::read(offset, length);
            let reply = session.transact(&request)?;
            session.in_step(target)?;
            ensure!(reply.error == EINVAL, "{request}: {}", reply.outcome());
        }
        Ok("EINVAL".to_owned())
    })
}

fn large(target: &Target) -> Seen {
    let length = target.clip(PORTABLE_PAYLOAD_MAX - target.block());
    target.each_mode(|session| {
        session.read(0, length)?;
        Ok(format!("{length} bytes"))
    })
}

fn too_large(target: &Target) -> Seen {
    let Some(blocks) = target.profile.blocks.filter(|blocks| blocks.maximum != u32::MAX) else {
        skip!("no maximum block size is announced");
    };
    let length = u64::from(blocks.maximum) + target.block();
    if length > target.usable() {
        skip!("the export is not larger than the maximum of {} bytes", blocks.maximum);
    }
    target.each_mode(|session| {
        let reply = session.transact(&Request::read(0, length))?;
        session.in_step(target)?;
        ensure!(reply.error == EINVAL, "{length} bytes: {}", reply.outcome());
        Ok("EINVAL".to_owned())
    })
}

fn df(target: &Target) -> Seen {
    target.each_chunked_mode(|session| {
        session.need(FLAG_SEND_DF, "SEND_DF")?;
        for length in [target.block(), 4096, DF_LENGTH_MIN] {
            let request = Request::read(0, target.clip(length)).with(CMD_FLAG_DF);
            let reply = session.succeed(&request)?;
            ensure!(reply.pieces.len() == 1, "{request}: {} chunks", reply.pieces.len());
        }
        Ok("one chunk".to_owned())
    })
}

fn df_large(target: &Target) -> Seen {
    target.each_chunked_mode(|session| {
        session.need(FLAG_SEND_DF, "SEND_DF")?;
        let length = target.clip(8 << 20);
        let reply = session.transact(&Request::read(0, length).with(CMD_FLAG_DF))?;
        let chunks = reply.pieces.len();
        let kept = match reply.error {
            0 => chunks == 1,
            EOVERFLOW => chunks == 0 && length > DF_LENGTH_MIN,
            _ => false,
        };
        ensure!(kept, "{length} bytes: {}, {chunks} chunks", reply.outcome());
        Ok(format!("{length} bytes: {}, {chunks} chunk", reply.outcome()))
    })
}

fn df_unannounced(target: &Target) -> Seen {
    target.each_mode(|session| {
        if session.has(FLAG_SEND_DF) {
            skip!("SEND_DF is announced");
        }
        let reply = session.transact(&Request::read(0, target.clip(512)).with(CMD_FLAG_DF))?;
        session.in_step(target)?;
        ensure!(reply.error == EINVAL, "{}", reply.outcome());
        Ok("EINVAL".to_owned())
    })
}
