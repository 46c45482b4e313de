//! The first phase of NBD, from the side of the client: one option, GO.

use crate::{Error, Geometry};
use std::fmt::Display;
use std::io::{Read, Write};
use towline_nbd::constants::{
    INIT_MAGIC, OPTION_BYTES_MAX, OPTION_MAGIC, OPTION_REPLY_MAGIC, PAYLOAD_BYTES_MAX,
    STRING_BYTES_MAX, client_flag, info, option, option_reply, server_flag, transmission_flag,
};

/// Answers to one option that are read before the server is taken for a mad one.
const REPLIES_MAX: usize = 1000;

/// Agrees on a disk; `what` names the server in errors.
pub(super) fn agree<S: Read + Write>(
    stream: &mut S,
    name: &str,
    what: &dyn Display,
) -> Result<(Geometry, u16), Error> {
    if name.len() > STRING_BYTES_MAX {
        return Err(Error::Refused(format!("{what}: the name of the disk is too long")));
    }
    let failed = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::UnexpectedEof => Error::system(what)(std::io::Error::new(
            error.kind(),
            "the server hung up in the handshake",
        )),
        _ => Error::system(what)(error),
    };
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting).map_err(failed)?;
    if be64(&greeting[0..]) != INIT_MAGIC {
        return Err(Error::Protocol("it does not begin like an NBD server"));
    }
    let flags = be16(&greeting[16..]);
    if be64(&greeting[8..]) != OPTION_MAGIC || flags & server_flag::FIXED_NEWSTYLE == 0 {
        return Err(Error::Protocol("it knows only the oldstyle handshake"));
    }
    let mut ours = client_flag::FIXED_NEWSTYLE;
    if flags & server_flag::NO_ZEROES != 0 {
        ours |= client_flag::NO_ZEROES;
    }
    let mut out = ours.to_be_bytes().to_vec();
    out.extend(OPTION_MAGIC.to_be_bytes());
    out.extend(option::GO.to_be_bytes());
    out.extend((name.len() as u32 + 8).to_be_bytes());
    out.extend((name.len() as u32).to_be_bytes());
    out.extend(name.as_bytes());
    out.extend(1_u16.to_be_bytes());
    out.extend(info::BLOCK_SIZE.to_be_bytes());
    stream.write_all(&out).map_err(failed)?;
    let mut export = None;
    let mut blocks = None;
    for _ in 0..REPLIES_MAX {
        let mut head = [0; 20];
        stream.read_exact(&mut head).map_err(failed)?;
        let (kind, length) = (be32(&head[12..]), be32(&head[16..]) as usize);
        if be64(&head) != OPTION_REPLY_MAGIC || be32(&head[8..]) != option::GO {
            return Err(Error::Protocol("no answer to the option GO"));
        }
        if length > OPTION_BYTES_MAX {
            return Err(Error::Protocol("an answer that is too long"));
        }
        let mut body = vec![0; length];
        stream.read_exact(&mut body).map_err(failed)?;
        match kind {
            option_reply::ACK => {
                let (size, flags) = export.ok_or(Error::Protocol("it tells no size"))?;
                return geometry(size, flags, blocks).map(|geometry| (geometry, flags));
            }
            option_reply::INFO if length >= 2 => match (be16(&body), length) {
                (info::EXPORT, 12) => export = Some((be64(&body[2..]), be16(&body[10..]))),
                (info::BLOCK_SIZE, 14) => {
                    blocks = Some([be32(&body[2..]), be32(&body[6..]), be32(&body[10..])]);
                }
                (info::EXPORT | info::BLOCK_SIZE, _) => {
                    return Err(Error::Protocol("information of a wrong length"));
                }
                _ => (),
            },
            option_reply::ERR_UNKNOWN => {
                return Err(Error::Refused(format!("{what}: the server has no such disk")));
            }
            _ => {
                let text = String::from_utf8_lossy(&body);
                let text = if text.is_empty() { format!("error {kind:#x}") } else { text.into() };
                return Err(Error::Refused(format!("{what}: the server refused: {text:?}")));
            }
        }
    }
    Err(Error::Protocol("it does not stop to tell about the disk"))
}

/// What a disk is like, by what the server told.
fn geometry(size: u64, flags: u16, blocks: Option<[u32; 3]>) -> Result<Geometry, Error> {
    let [minimum, preferred, maximum] = blocks.unwrap_or([1, 4096, PAYLOAD_BYTES_MAX]);
    if !minimum.is_power_of_two()
        || !preferred.is_power_of_two()
        || preferred < minimum
        || maximum < minimum
    {
        return Err(Error::Protocol("block sizes that cannot be"));
    }
    if size > i64::MAX as u64 {
        return Err(Error::Protocol("a size that cannot be"));
    }
    let has = |flag| flags & flag != 0;
    Ok(Geometry {
        size,
        block_minimum: minimum,
        block_preferred: preferred,
        transfer_maximum: maximum.min(PAYLOAD_BYTES_MAX),
        read_only: has(transmission_flag::READ_ONLY),
        rotational: has(transmission_flag::ROTATIONAL),
        flush: has(transmission_flag::SEND_FLUSH),
        fua: has(transmission_flag::SEND_FUA),
        trim: has(transmission_flag::SEND_TRIM),
        zero: has(transmission_flag::SEND_WRITE_ZEROES),
        connections: has(transmission_flag::CAN_MULTI_CONN),
    })
}

fn be16(bytes: &[u8]) -> u16 {
    u16::from_be_bytes([bytes[0], bytes[1]])
}

fn be32(bytes: &[u8]) -> u32 {
    u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

fn be64(bytes: &[u8]) -> u64 {
    u64::from(be32(bytes)) << 32 | u64::from(be32(&bytes[4..]))
}
