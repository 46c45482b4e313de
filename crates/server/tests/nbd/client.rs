//! A small NBD client that sends what tests ask for and shows each reply.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Form of replies to agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    Simple,
    Structured,
    Extended,
}

pub(crate) const READ: u16 = 0;
pub(crate) const WRITE: u16 = 1;
pub(crate) const DISCONNECT: u16 = 2;
pub(crate) const FLUSH: u16 = 3;
pub(crate) const TRIM: u16 = 4;
pub(crate) const WRITE_ZEROES: u16 = 6;
pub(crate) const FUA: u16 = 1;
pub(crate) const DF: u16 = 4;
const PAYLOAD_LEN: u16 = 32;

/// A chunk of a reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Chunk {
    Data(u64, Vec<u8>),
    Hole(u64, u32),
    Error(u32, Option<u64>),
    End,
}

pub(crate) struct Client {
    pub(crate) socket: UnixStream,
    pub(crate) form: Form,
    /// Size of the disk in bytes, from the handshake.
    pub(crate) size: u64,
    /// Transmission flags.
    pub(crate) flags: u16,
}

impl Client {
    /// Connects to the default export.
    pub(crate) fn connect(path: &Path, form: Form) -> Self {
        Self::connect_to(path, form, "")
    }

    pub(crate) fn connect_to(path: &Path, form: Form, export: &str) -> Self {
        Self::over(UnixStream::connect(path).unwrap(), form, export)
    }

    /// Creates a client on a connected socket of any kind.
    pub(crate) fn over(socket: UnixStream, form: Form, export: &str) -> Self {
        let mut this = Self::begin(socket, form);
        this.go(export);
        this
    }

    /// Connects to the default export with extended replies and chooses metadata contexts. Returns their ids
    /// too.
    pub(crate) fn with_contexts(path: &Path, names: &[&str]) -> (Self, Vec<u32>) {
        let mut this = Self::begin(UnixStream::connect(path).unwrap(), Form::Extended);
        let mut chosen = vec![0; 4];
        chosen.extend_from_slice(&(names.len() as u32).to_be_bytes());
        for name in names {
            chosen.extend_from_slice(&(name.len() as u32).to_be_bytes());
            chosen.extend_from_slice(name.as_bytes());
        }
        let contexts = this.option(10, &chosen);
        this.go("");
        (this, contexts.iter().map(|context| number(&context[..4]) as u32).collect())
    }

    /// Begins the handshake and agrees on the form of replies.
    fn begin(socket: UnixStream, form: Form) -> Self {
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut this = Self { socket, form, size: 0, flags: 0 };
        this.bytes(18).unwrap();
        this.send(&3u32.to_be_bytes());
        match form {
            Form::Simple => {}
            Form::Structured => drop(this.option(8, &[])),
            Form::Extended => drop(this.option(11, &[])),
        }
        this
    }

    /// Ends the handshake.
    fn go(&mut self, export: &str) {
        let mut go = (export.len() as u32).to_be_bytes().to_vec();
        go.extend_from_slice(export.as_bytes());
        go.extend_from_slice(&[0, 0]);
        let infos = self.option(7, &go);
        let info = infos.iter().find(|info| info[..2] == [0, 0]).unwrap();
        (self.size, self.flags) = (number(&info[2..10]), number(&info[10..12]) as u16);
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.socket.write_all(bytes).unwrap();
    }

    pub(crate) fn bytes(&mut self, count: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; count];
        self.socket.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    /// Sends an option and returns its replies up to the last one, which must not be an error.
    fn option(&mut self, option: u32, payload: &[u8]) -> Vec<Vec<u8>> {
        let mut bytes = b"IHAVEOPT".to_vec();
        bytes.extend_from_slice(&option.to_be_bytes());
        bytes.extend_from_slice(&(payload.len() as u32).to_be_bytes());
        bytes.extend_from_slice(payload);
        self.send(&bytes);
        let mut replies = Vec::new();
        loop {
            let header = self.bytes(20).unwrap();
            let kind = number(&header[12..16]);
            let reply = self.bytes(number(&header[16..20]) as usize).unwrap();
            assert!(kind < 1 << 31, "option {option} is refused: {kind:#x}");
            if kind == 1 {
                return replies;
            }
            replies.push(reply);
        }
    }

    /// Returns the header of a request and its payload.
    pub(crate) fn request_bytes(
        &self,
        kind: u16,
        flags: u16,
        cookie: u64,
        offset: u64,
        length: u64,
        payload: &[u8],
    ) -> Vec<u8> {
        Self::request_of(self.form, kind, flags, cookie, (offset, length), payload)
    }

    /// Does the same without a connection.
    pub(crate) fn request_of(
        form: Form,
        kind: u16,
        flags: u16,
        cookie: u64,
        (offset, length): (u64, u64),
        payload: &[u8],
    ) -> Vec<u8> {
        let extended = form == Form::Extended;
        let magic: u32 = if extended { 0x21e4_1c71 } else { 0x2560_9513 };
        let flags = if extended && !payload.is_empty() { flags | PAYLOAD_LEN } else { flags };
        let mut bytes = magic.to_be_bytes().to_vec();
        bytes.extend_from_slice(&flags.to_be_bytes());
        bytes.extend_from_slice(&kind.to_be_bytes());
        bytes.extend_from_slice(&cookie.to_be_bytes());
        bytes.extend_from_slice(&offset.to_be_bytes());
        let length = length.to_be_bytes();
        bytes.extend_from_slice(if extended { &length } else { &length[4..] });
        bytes.extend_from_slice(payload);
        bytes
    }

    pub(crate) fn request(&mut self, kind: u16, flags: u16, cookie: u64, offset: u64, length: u64) {
        let bytes = self.request_bytes(kind, flags, cookie, offset, length, &[]);
        self.send(&bytes);
    }

    /// Receives the next reply in the simple form: error and cookie.
    pub(crate) fn simple(&mut self) -> io::Result<(u32, u64)> {
        let header = self.bytes(16)?;
        assert_eq!(number(&header[..4]), 0x6744_6698);
        Ok((number(&header[4..8]) as u32, number(&header[8..])))
    }

    /// Receives the next chunk: its cookie, the chunk, and whether it is the last of its reply.
    pub(crate) fn chunk(&mut self) -> io::Result<(u64, Chunk, bool)> {
        let extended = self.form == Form::Extended;
        let header = self.bytes(if extended { 32 } else { 20 })?;
        let magic = if extended { 0x6e8a_278c } else { 0x668e_33ef };
        assert_eq!(number(&header[..4]), magic);
        let (done, kind, cookie) =
            (header[5] & 1 != 0, number(&header[6..8]), number(&header[8..16]));
        let length = number(if extended { &header[24..] } else { &header[16..] });
        let payload = self.bytes(length as usize)?;
        let chunk = match kind {
            0 => Chunk::End,
            1 => Chunk::Data(number(&payload[..8]), payload[8..].to_vec()),
            2 => Chunk::Hole(number(&payload[..8]), number(&payload[8..]) as u32),
            0x8001 => Chunk::Error(number(&payload[..4]) as u32, None),
            0x8002 => {
                let at = number(&payload[payload.len() - 8..]);
                Chunk::Error(number(&payload[..4]) as u32, Some(at))
            }
            other => panic!("chunk of type {other}"),
        };
        Ok((cookie, chunk, done))
    }

    /// Receives all chunks of the next reply.
    pub(crate) fn chunks(&mut self) -> io::Result<Vec<Chunk>> {
        let mut chunks = Vec::new();
        loop {
            let (_, chunk, done) = self.chunk()?;
            chunks.push(chunk);
            if done {
                return Ok(chunks);
            }
        }
    }

    /// Receives the next reply, which has no data, and returns its error; 0 for none.
    pub(crate) fn outcome(&mut self) -> io::Result<u32> {
        if self.form == Form::Simple {
            return Ok(self.simple()?.0);
        }
        let errors = self.chunks()?.into_iter().find_map(|chunk| match chunk {
            Chunk::Error(error, _) => Some(error),
            _ => None,
        });
        Ok(errors.unwrap_or(0))
    }

    pub(crate) fn write(&mut self, flags: u16, offset: u64, data: &[u8]) -> u32 {
        let bytes = self.request_bytes(WRITE, flags, 1, offset, data.len() as u64, data);
        self.send(&bytes);
        self.outcome().unwrap()
    }

    pub(crate) fn flush(&mut self) -> u32 {
        self.request(FLUSH, 0, 2, 0, 0);
        self.outcome().unwrap()
    }

    /// Reads in any form.
    pub(crate) fn read(&mut self, offset: u64, length: u64) -> Result<Vec<u8>, u32> {
        self.try_read(offset, length).unwrap()
    }

    /// Does the same; the outer error is that of the connection.
    pub(crate) fn try_read(
        &mut self,
        offset: u64,
        length: u64,
    ) -> io::Result<Result<Vec<u8>, u32>> {
        let bytes = self.request_bytes(READ, 0, 3, offset, length, &[]);
        self.socket.write_all(&bytes)?;
        if self.form == Form::Simple {
            let (error, _) = self.simple()?;
            return if error == 0 { Ok(Ok(self.bytes(length as usize)?)) } else { Ok(Err(error)) };
        }
        let mut data = vec![0xee; length as usize];
        let mut covered = 0;
        for chunk in self.chunks()? {
            match chunk {
                Chunk::Data(at, bytes) => {
                    let at = (at - offset) as usize;
                    covered += bytes.len() as u64;
                    data[at..at + bytes.len()].copy_from_slice(&bytes);
                }
                Chunk::Hole(at, count) => {
                    let at = (at - offset) as usize;
                    covered += u64::from(count);
                    data[at..at + count as usize].fill(0);
                }
                Chunk::Error(error, _) => return Ok(Err(error)),
                Chunk::End => {}
            }
        }
        assert_eq!(covered, length, "each byte came once");
        Ok(Ok(data))
    }
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}
