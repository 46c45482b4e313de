//! `CMD_WRITE`.

use super::area::{Area, each_read_only, each_writable, refused_unchanged};
use super::pattern::{Random, pattern};
use super::read::difference;
use crate::client::{Mode, Request, Session};
use crate::rule::{Level::*, Rule, Seen};
use crate::target::Target;
use crate::wire::*;
use crate::{ensure, skip};

const SECTION: &str = "NBD_CMD_WRITE";

pub(super) const RULES: &[Rule] = &[
    Rule::writing(
        "write.data",
        SECTION,
        Must,
        "what was written is read back, and nothing else changes",
        data,
    ),
    Rule::writing(
        "write.random",
        SECTION,
        Must,
        "random writes and reads, many in flight, agree with a model",
        random,
    ),
    Rule::writing("write.ends", SECTION, Must, "the first and the last block can be written", ends),
    Rule::writing(
        "write.other-connection",
        SECTION,
        Must,
        "a later connection reads what was written",
        other_connection,
    ),
    Rule::writing(
        "write.fua",
        "NBD_CMD_FLAG_FUA",
        Must,
        "FUA, once announced, is accepted with writes, and they are done",
        fua,
    ),
    Rule::writing(
        "write.byte-by-byte",
        "Request message",
        Must,
        "a write is understood however the stream is cut",
        byte_by_byte,
    ),
    Rule::writing(
        "write.large",
        "Block size constraints",
        Should,
        "a payload of the announced maximum, or of almost 32 MiB, is taken",
        large,
    ),
    Rule::writing(
        "write.zero-length",
        SECTION,
        Should,
        "a write of length 0 does not end the connection",
        zero_length,
    ),
    Rule::writing(
        "write.beyond-end",
        "Error values",
        Should,
        "a write beyond the end gets ENOSPC, or EINVAL",
        beyond_end,
    ),
    Rule::writing(
        "write.beyond-end-in-step",
        SECTION,
        Must,
        "a write beyond the end fails and its payload is not taken for a request",
        beyond_end_in_step,
    ),
    Rule::writing(
        "write.unknown-flag",
        "Error values",
        Should,
        "a write with an unknown flag gets EINVAL, its payload is skipped, and nothing is written",
        unknown_flag,
    ),
    Rule::writing(
        "write.misplaced-flag",
        "Error values",
        Should,
        "a write with a flag documented for other commands gets EINVAL",
        misplaced_flag,
    ),
    Rule::writing(
        "write.misaligned",
        "Block size constraints",
        Should,
        "a write that is not aligned to the announced minimum gets EINVAL",
        misaligned,
    ),
    Rule::writing(
        "write.read-only",
        "Error values",
        Should,
        "a write to a read-only export gets EPERM",
        read_only,
    ),
    Rule::writing(
        "write.read-only-unchanged",
        "Transmission flags",
        Must,
        "a write to a read-only export fails, and changes nothing",
        read_only_unchanged,
    ),
    Rule::writing(
        "write.client-gone",
        "Terminating the transmission phase",
        Should,
        "clients that vanish within a write's payload do no harm",
        client_gone,
    ),
    Rule::writing(
        "disc.outstanding-writes",
        "NBD_CMD_DISC",
        Must,
        "writes sent before DISC are done",
        disc_outstanding,
    ),
];

fn data(target: &Target) -> Seen {
    each_writable(target, |session| {
        let area = Area::fill(session, target, 64 << 10)?;
        let new = pattern(target.seed + 1, area.length);
        session.succeed(&Request::write(area.middle(), &new))?;
        area.check(session, Some(&new))?;
        let block = target.block();
        let part = pattern(target.seed + 2, block);
        session.succeed(&Request::write(area.middle(), &part))?;
        let mut expected = new;
        expected[..block as usize].copy_from_slice(&part);
        area.check(session, Some(&expected))?;
        Ok(format!("{} and {block} bytes", area.length))
    })
}

fn random(target: &Target) -> Seen {
    const ROUNDS: u64 = 40;
    const IN_FLIGHT: u64 = 16;
    each_writable(target, |session| {
        let block = target.block();
        // One slot for each request in flight: overlapping requests would make their order matter.
        let slot = target.share(IN_FLIGHT, 128 << 10);
        if slot == 0 {
            skip!("export has less than {IN_FLIGHT} blocks");
        }
        let mut random = Random::new(target.seed);
        let mut model = vec![0; (slot * IN_FLIGHT) as usize];
        for number in 0..IN_FLIGHT {
            let data = vec![0; slot as usize];
            session.succeed(&Request::write(number * slot, &data))?;
        }
        let mut bytes = 0;
        for round in 0..ROUNDS {
            let mut flying = Vec::new();
            for number in 0..IN_FLIGHT {
                let start = random.below(slot / block) * block;
                let length = (1 + random.below((slot - start) / block)) * block;
                let offset = number * slot + start;
                let range = offset as usize..(offset + length) as usize;
                bytes += length;
                let request = if random.below(2) == 0 {
                    let data = pattern(random.next(), length);
                    model[range.clone()].copy_from_slice(&data);
                    Request::write(offset, &data)
                } else {
                    Request::read(offset, length)
                };
                let cookie = session.send(&request)?;
                flying.push((cookie, request, range));
            }
            for (cookie, request, range) in flying {
                let reply = session.wait(cookie)?;
                ensure!(reply.error == 0, "{request}: {}", reply.outcome());
                if request.command == CMD_READ {
                    let wrong = difference(&reply.bytes, &model[range]);
                    ensure!(wrong.is_none(), "round {round}, {request}: wrong byte at {wrong:?}");
                }
            }
        }
        for number in 0..IN_FLIGHT {
            let found = session.read(number * slot, slot)?;
            let start = (number * slot) as usize;
            let wrong = difference(&found, &model[start..start + slot as usize]);
            ensure!(wrong.is_none(), "at the end: wrong byte at {wrong:?} of slot {number}");
        }
        Ok(format!("{} requests, {bytes} bytes, seed {}", ROUNDS * IN_FLIGHT, target.seed))
    })
}

fn ends(target: &Target) -> Seen {
    each_writable(target, |session| {
        let block = target.block().min(target.usable());
        let last = target.usable() - block;
        for offset in [0, last] {
            let new = pattern(target.seed + offset, block);
            session.succeed(&Request::write(offset, &new))?;
            ensure!(session.read(offset, block)? == new, "other bytes at {offset}");
        }
        Ok(format!("at 0 and {last}"))
    })
}

fn other_connection(target: &Target) -> Seen {
    each_writable(target, |session| {
        let length = target.clip(4096);
        let new = pattern(target.seed + 3, length);
        session.succeed(&Request::write(0, &new))?;
        let disc = session.encode(1, &Request::new(CMD_DISC, 0, 0));
        session.link.send(&disc)?;
        session.link.recv_until_closed()?;
        let found = Session::open(target, session.mode)?.read(0, length)?;
        ensure!(found == new, "other bytes");
        Ok(format!("{length} bytes"))
    })
}

fn fua(target: &Target) -> Seen {
    each_writable(target, |session| {
        session.need(FLAG_SEND_FUA, "SEND_FUA")?;
        let area = Area::fill(session, target, 4096)?;
        let new = pattern(target.seed + 4, area.length);
        session.succeed(&Request::write(area.middle(), &new).with(CMD_FLAG_FUA))?;
        area.check(session, Some(&new))?;
        Ok(format!("{} bytes", area.length))
    })
}

fn byte_by_byte(target: &Target) -> Seen {
    each_writable(target, |session| {
        let area = Area::fill(session, target, target.block())?;
        let new = pattern(target.seed + 5, area.length);
        let write = Request::write(area.middle(), &new);
        let message = session.encode(11, &write);
        session.expect_reply(11, &write);
        session.link.send_slowly(&message)?;
        let reply = session.wait(11)?;
        ensure!(reply.error == 0, "{}", reply.outcome());
        area.check(session, Some(&new))?;
        Ok("understood".to_owned())
    })
}

fn large(target: &Target) -> Seen {
    let length = target.clip(PORTABLE_PAYLOAD_MAX - target.block());
    each_writable(target, |session| {
        let new = pattern(target.seed + 6, length);
        session.succeed(&Request::write(0, &new))?;
        let found = session.read(0, length)?;
        let wrong = difference(&found, &new);
        ensure!(wrong.is_none(), "wrong byte at {wrong:?}");
        Ok(format!("{length} bytes"))
    })
}

fn zero_length(target: &Target) -> Seen {
    each_writable(target, |session| {
        if session.mode == Mode::Extended {
            skip!("PAYLOAD_LEN demands a length that is not 0");
        }
        let reply = session.transact(&Request::write(0, &[]))?;
        session.in_step(target)?;
        Ok(reply.outcome())
    })
}

fn beyond(target: &Target, size: u64) -> Vec<Request> {
    let block = target.block();
    let data = vec![0x77; 2 * block as usize];
    vec![
        Request::write(size.div_ceil(block) * block, &data[..block as usize]),
        Request::write(target.usable() - block.min(target.usable()), &data),
        Request::write(u64::MAX - block + 1, &data[..block as usize]),
    ]
}

fn beyond_end(target: &Target) -> Seen {
    each_writable(target, |session| {
        let mut seen = Vec::new();
        for request in beyond(target, session.size) {
            let reply = session.transact(&request)?;
            ensure!(matches!(reply.error, ENOSPC | EINVAL), "{request}: {}", reply.outcome());
            seen.push(reply.outcome());
        }
        seen.dedup();
        Ok(seen.join(", "))
    })
}

fn beyond_end_in_step(target: &Target) -> Seen {
    each_writable(target, |session| {
        for request in beyond(target, session.size) {
            let reply = session.transact(&request)?;
            ensure!(reply.error != 0, "{request}: success");
            session.in_step(target)?;
        }
        Ok("in step".to_owned())
    })
}

fn unknown_flag(target: &Target) -> Seen {
    each_writable(target, |session| {
        let area = Area::fill(session, target, 4096)?;
        let data = pattern(target.seed + 7, area.length);
        let request = Request::write(area.middle(), &data).with(CMD_FLAG_UNKNOWN);
        refused_unchanged(session, target, &area, &request, &[EINVAL])?;
        Ok("EINVAL, nothing written".to_owned())
    })
}

fn misplaced_flag(target: &Target) -> Seen {
    each_writable(target, |session| {
        let area = Area::fill(session, target, 4096)?;
        let data = pattern(target.seed + 8, area.length);
        for flag in [CMD_FLAG_NO_HOLE, CMD_FLAG_REQ_ONE, CMD_FLAG_DF, CMD_FLAG_FAST_ZERO] {
            let request = Request::write(area.middle(), &data).with(flag);
            refused_unchanged(session, target, &area, &request, &[EINVAL])?;
        }
        Ok("EINVAL, nothing written".to_owned())
    })
}

fn misaligned(target: &Target) -> Seen {
    let block = target.block();
    if target.profile.blocks.is_none() || block == 1 {
        skip!("no minimum block size above 1 is announced");
    }
    each_writable(target, |session| {
        let area = Area::fill(session, target, 4 * block)?;
        let data = pattern(target.seed + 9, block);
        let half = block / 2;
        for (offset, length) in [(half, block), (0, half), (half, half)] {
            let request = Request::write(area.middle() + offset, &data[..length as usize]);
            refused_unchanged(session, target, &area, &request, &[EINVAL])?;
        }
        Ok("EINVAL, nothing written".to_owned())
    })
}

fn read_only(target: &Target) -> Seen {
    each_read_only(target, |session| {
        let reply = session.transact(&Request::write(0, &vec![0; target.clip(512) as usize]))?;
        session.in_step(target)?;
        ensure!(reply.error == EPERM, "{}", reply.outcome());
        Ok("EPERM".to_owned())
    })
}

fn read_only_unchanged(target: &Target) -> Seen {
    each_read_only(target, |session| {
        let length = target.clip(512);
        let before = session.read(0, length)?;
        let other: Vec<u8> = before.iter().map(|byte| !byte).collect();
        let mut requests = vec![Request::write(0, &other)];
        requests.push(Request::new(CMD_WRITE_ZEROES, 0, length));
        requests.push(Request::new(CMD_TRIM, 0, length));
        for request in requests {
            let reply = session.transact(&request)?;
            ensure!(reply.error != 0, "{request}: success");
            ensure!(session.read(0, length)? == before, "{request}: contents changed");
        }
        Ok("refused".to_owned())
    })
}

fn client_gone(target: &Target) -> Seen {
    each_writable(target, |session| {
        for _ in 0..10 {
            let mut gone = Session::open(target, session.mode)?;
            let data = pattern(target.seed + 10, target.clip(64 << 10));
            let message = gone.encode(1, &Request::write(0, &data));
            gone.link.send(&message[..message.len() / 2])?;
        }
        Session::open(target, session.mode)?.in_step(target)?;
        Ok("10 clients gone within a payload".to_owned())
    })
}

fn disc_outstanding(target: &Target) -> Seen {
    const COUNT: u64 = 8;
    each_writable(target, |session| {
        let length = target.share(COUNT, 64 << 10);
        if length == 0 {
            skip!("export has less than {COUNT} blocks");
        }
        let data = |number| pattern(target.seed + 11 + number, length);
        for number in 0..COUNT {
            session.send(&Request::write(number * length, &data(number)))?;
        }
        let disc = session.encode(1, &Request::new(CMD_DISC, 0, 0));
        session.link.send(&disc)?;
        session.link.recv_until_closed()?;
        let mut next = Session::open(target, session.mode)?;
        for number in 0..COUNT {
            let found = next.read(number * length, length)?;
            ensure!(found == data(number), "write {number} of {COUNT} was not done");
        }
        Ok(format!("{COUNT} writes done"))
    })
}
