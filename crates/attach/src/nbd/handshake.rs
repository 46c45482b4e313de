//! The handshake of an NBD client: GO, preceded by the options that a copy uses.

use super::bytes::{be16, be32, be64};
use crate::{Error, Geometry};
use std::fmt::Display;
use std::io::{Read, Write};
use std::time::{Duration, Instant};
use towline_nbd::constants::{
    INIT_MAGIC, OPTION_BYTES_MAX, OPTION_MAGIC, OPTION_REPLY_MAGIC, PAYLOAD_BYTES_MAX,
    STRING_BYTES_MAX, client_flag, info, option, option_reply, server_flag, transmission_flag,
};

/// Maximum number of replies to one option.
const REPLIES_MAX: usize = 1000;
/// The largest minimum block size that the protocol allows.
const BLOCK_MINIMUM_MAX: u32 = 1 << 16;
/// The metadata context that tells what is allocated.
const ALLOCATION: &str = "base:allocation";

/// The result of the handshake.
pub(super) struct Agreed {
    /// Size, block sizes and abilities of the disk.
    pub(super) geometry: Geometry,
    /// Transmission flags.
    pub(super) flags: u16,
    /// The name of the disk that was asked for by the empty name, if the server tells.
    pub(super) name: Option<String>,
    /// The shortest time the server took to answer an option.
    pub(super) round_trip: Duration,
    /// Number of the metadata context that tells what is allocated, if the server has it.
    pub(super) allocation: Option<u32>,
}

/// Negotiates a disk; with `chunks` also structured replies and extents, if the server has them. `what`
/// names the server in errors.
pub(super) fn agree<S: Read + Write>(
    stream: &mut S,
    name: &str,
    chunks: bool,
    what: &dyn Display,
) -> Result<Agreed, Error> {
    if name.len() > STRING_BYTES_MAX {
        return Err(Error::Refused(format!("{what}: the name of the disk is too long")));
    }
    let mut asking = Asking { stream, what, round_trip: Duration::MAX };
    let mut greeting = [0; 18];
    asking.read(&mut greeting)?;
    if be64(&greeting[0..]) != INIT_MAGIC {
        return Err(Error::Protocol("not an NBD server: wrong greeting"));
    }
    let flags = be16(&greeting[16..]);
    if be64(&greeting[8..]) != OPTION_MAGIC || flags & server_flag::FIXED_NEWSTYLE == 0 {
        return Err(Error::Protocol("it only speaks the oldstyle handshake"));
    }
    let mut ours = client_flag::FIXED_NEWSTYLE;
    if flags & server_flag::NO_ZEROES != 0 {
        ours |= client_flag::NO_ZEROES;
    }
    asking.write(&ours.to_be_bytes())?;
    // A server refuses an option that it does not know, and the handshake goes on without it.
    let chunks = chunks && asking.ask(option::STRUCTURED_REPLY, &[], |_, _| Ok(()))?.is_none();
    let allocation = if chunks { asking.allocation(name)? } else { None };
    let (geometry, flags, name) = asking.go(name)?;
    Ok(Agreed { geometry, flags, name, round_trip: asking.round_trip, allocation })
}

/// The option phase of the handshake.
struct Asking<'a, S> {
    stream: &'a mut S,
    what: &'a dyn Display,
    /// The shortest time until an answer so far.
    round_trip: Duration,
}

/// Why the server refused an option: its error and its text.
struct Refused {
    kind: u32,
    text: String,
}

impl<S: Read + Write> Asking<'_, S> {
    fn failed(&self, error: std::io::Error) -> Error {
        match error.kind() {
            std::io::ErrorKind::UnexpectedEof => Error::system(self.what)(std::io::Error::new(
                error.kind(),
                "the server closed the connection during the handshake",
            )),
            _ => Error::system(self.what)(error),
        }
    }

    fn read(&mut self, target: &mut [u8]) -> Result<(), Error> {
        self.stream.read_exact(target).map_err(|error| self.failed(error))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.stream.write_all(bytes).map_err(|error| self.failed(error))
    }

    /// Sends an option and passes all replies but the last to `each`. The last one tells whether the
    /// server refused it.
    fn ask(
        &mut self,
        option: u32,
        data: &[u8],
        mut each: impl FnMut(u32, &[u8]) -> Result<(), Error>,
    ) -> Result<Option<Refused>, Error> {
        let mut out = OPTION_MAGIC.to_be_bytes().to_vec();
        out.extend(option.to_be_bytes());
        out.extend((data.len() as u32).to_be_bytes());
        out.extend(data);
        let asked = Instant::now();
        self.write(&out)?;
        for answers in 0..REPLIES_MAX {
            let mut head = [0; 20];
            self.read(&mut head)?;
            if answers == 0 {
                self.round_trip = self.round_trip.min(asked.elapsed());
            }
            let (kind, length) = (be32(&head[12..]), be32(&head[16..]) as usize);
            if be64(&head) != OPTION_REPLY_MAGIC || be32(&head[8..]) != option {
                return Err(Error::Protocol("the reply is for another option"));
            }
            if length > OPTION_BYTES_MAX {
                return Err(Error::Protocol("option reply too long"));
            }
            let mut body = vec![0; length];
            self.read(&mut body)?;
            match kind {
                option_reply::ACK => return Ok(None),
                kind if kind & 1 << 31 != 0 => {
                    let text = String::from_utf8_lossy(&body).into_owned();
                    return Ok(Some(Refused { kind, text }));
                }
                kind => each(kind, &body)?,
            }
        }
        Err(Error::Protocol("too many replies about the disk"))
    }

    /// Asks for the number of the metadata context that tells what is allocated.
    fn allocation(&mut self, name: &str) -> Result<Option<u32>, Error> {
        let mut data = (name.len() as u32).to_be_bytes().to_vec();
        data.extend(name.as_bytes());
        data.extend(1_u32.to_be_bytes());
        data.extend((ALLOCATION.len() as u32).to_be_bytes());
        data.extend(ALLOCATION.as_bytes());
        let mut number = None;
        let refused = self.ask(option::SET_META_CONTEXT, &data, |kind, body| {
            if kind == option_reply::META_CONTEXT && body.len() > 4 {
                number = (&body[4..] == ALLOCATION.as_bytes()).then(|| be32(body)).or(number);
            }
            Ok(())
        })?;
        Ok(number.filter(|_| refused.is_none()))
    }

    fn go(&mut self, name: &str) -> Result<(Geometry, u16, Option<String>), Error> {
        let wanted: &[u16] =
            if name.is_empty() { &[info::BLOCK_SIZE, info::NAME] } else { &[info::BLOCK_SIZE] };
        let mut data = (name.len() as u32).to_be_bytes().to_vec();
        data.extend(name.as_bytes());
        data.extend((wanted.len() as u16).to_be_bytes());
        data.extend(wanted.iter().flat_map(|kind| kind.to_be_bytes()));
        let mut export = None;
        let mut blocks = None;
        let mut told = None;
        let refused = self.ask(option::GO, &data, |kind, body| {
            if kind != option_reply::INFO || body.len() < 2 {
                return Err(Error::Protocol("unexpected option reply"));
            }
            match (be16(body), body.len()) {
                (info::EXPORT, 12) => export = Some((be64(&body[2..]), be16(&body[10..]))),
                (info::BLOCK_SIZE, 14) => {
                    blocks = Some([be32(&body[2..]), be32(&body[6..]), be32(&body[10..])]);
                }
                (info::NAME, _) if name.is_empty() => {
                    told = std::str::from_utf8(&body[2..]).ok().map(str::to_owned);
                }
                (info::EXPORT | info::BLOCK_SIZE, _) => {
                    return Err(Error::Protocol("information of the wrong length"));
                }
                _ => (),
            }
            Ok(())
        })?;
        let what = self.what;
        match refused {
            None => {
                let (size, flags) = export.ok_or(Error::Protocol("it did not report a size"))?;
                geometry(size, flags, blocks).map(|geometry| (geometry, flags, told))
            }
            Some(Refused { kind: option_reply::ERR_UNKNOWN, .. }) => {
                Err(Error::Refused(format!("{what}: the server has no such disk")))
            }
            Some(Refused { kind, text }) => {
                let text = if text.is_empty() { format!("error {kind:#x}") } else { text };
                Err(Error::Refused(format!("{what}: the server refused: {text:?}")))
            }
        }
    }
}

/// Checks what the server told about the disk.
fn geometry(size: u64, flags: u16, blocks: Option<[u32; 3]>) -> Result<Geometry, Error> {
    let [minimum, preferred, maximum] = blocks.unwrap_or([1, 4096, PAYLOAD_BYTES_MAX]);
    if !minimum.is_power_of_two()
        || minimum > BLOCK_MINIMUM_MAX
        || !preferred.is_power_of_two()
        || preferred < minimum
        || maximum < minimum
    {
        return Err(Error::Protocol("impossible block sizes"));
    }
    if size > i64::MAX as u64 {
        return Err(Error::Protocol("impossible size"));
    }
    let has = |flag| flags & flag != 0;
    Ok(Geometry {
        size,
        block_minimum: minimum,
        block_preferred: preferred,
        // Long requests are cut into parts of this length, which have to be whole blocks.
        transfer_maximum: maximum.min(PAYLOAD_BYTES_MAX) / minimum * minimum,
        read_only: has(transmission_flag::READ_ONLY),
        rotational: has(transmission_flag::ROTATIONAL),
        flush: has(transmission_flag::SEND_FLUSH),
        fua: has(transmission_flag::SEND_FUA),
        trim: has(transmission_flag::SEND_TRIM),
        zero: has(transmission_flag::SEND_WRITE_ZEROES),
        connections: has(transmission_flag::CAN_MULTI_CONN),
    })
}

#[cfg(test)]
mod tests {
    use super::geometry;

    #[test]
    fn requests_can_be_cut_into_whole_blocks() {
        let longest = |blocks| geometry(1 << 20, 1, Some(blocks)).map(|g| g.transfer_maximum).ok();
        assert_eq!(longest([512, 4096, 1_000_000]), Some(999_936));
        assert_eq!(longest([1, 4096, u32::MAX]), Some(32 << 20));
        assert_eq!(longest([1 << 16, 1 << 16, 1 << 16]), Some(1 << 16));
        // The protocol forbids these.
        for blocks in [[1 << 26, 1 << 26, u32::MAX], [3, 4, 8], [512, 256, 4096], [512, 512, 511]] {
            assert_eq!(longest(blocks), None, "{blocks:?}");
        }
    }
}
