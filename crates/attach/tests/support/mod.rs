//! A scripted NBD server: the handshake.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

/// The transmission flag that every server sends.
pub(crate) const HAS_FLAGS: u16 = 1;
const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;

pub(crate) fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

/// The name of the disk that the empty name stands for.
pub(crate) const DEFAULT: &str = "the first one";

/// Agrees to everything that the client proposes, until it is ready for requests to a disk of this size. Returns the
/// name that it asked for.
pub(crate) fn handshake(stream: &mut UnixStream, size: u64, flags: u16) -> std::io::Result<String> {
    let mut greeting = b"NBDMAGIC".to_vec();
    greeting.extend(OPTION_MAGIC.to_be_bytes());
    greeting.extend(3_u16.to_be_bytes());
    stream.write_all(&greeting)?;
    stream.read_exact(&mut [0; 4])?;
    loop {
        let mut head = [0; 16];
        stream.read_exact(&mut head)?;
        let option = u32::from_be_bytes(head[8..12].try_into().unwrap());
        let mut body = vec![0; u32::from_be_bytes(head[12..].try_into().unwrap()) as usize];
        stream.read_exact(&mut body)?;
        let mut answer = |kind: u32, body: &[u8]| {
            let mut out = 0x0003_e889_0455_65a9_u64.to_be_bytes().to_vec();
            out.extend(words(&[option, kind, body.len() as u32]));
            out.extend(body);
            stream.write_all(&out)
        };
        match option {
            // SET_META_CONTEXT, GO.
            10 => answer(4, &[&[0, 0, 0, 9], &b"base:allocation"[..]].concat())?,
            7 => {
                answer(3, &[&[0, 0], &size.to_be_bytes()[..], &flags.to_be_bytes()].concat())?;
                // Kinds of information follow the name: NAME is told if it is asked for.
                if body[..4] == [0; 4] && body[6..].chunks(2).any(|kind| kind == [0, 1]) {
                    answer(3, &[&[0, 1], DEFAULT.as_bytes()].concat())?;
                }
            }
            _ => {}
        }
        answer(1, &[])?;
        if option == 7 {
            let end = 4 + u32::from_be_bytes(body[..4].try_into().unwrap()) as usize;
            return Ok(String::from_utf8(body[4..end].to_vec()).unwrap());
        }
    }
}
