//! One connection to the server: bytes out, bytes in, each wait bounded.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use crate::uri::Address;

/// Why a connection could not be used any further.
#[derive(Debug)]
pub enum Broken {
    /// The server closed the connection when this much of what was awaited had come.
    Closed {
        /// Bytes received of what was awaited.
        received: usize,
        /// Bytes awaited.
        awaited: usize,
    },
    /// Nothing (more) came in the time allowed.
    TimedOut {
        /// Bytes received of what was awaited.
        received: usize,
        /// Bytes awaited.
        awaited: usize,
    },
    /// Another error of the socket.
    Io(io::Error),
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed { received, awaited } => {
                write!(
                    f,
                    "server closed the connection after {received} of {awaited} bytes awaited"
                )
            }
            Self::TimedOut { received, awaited } => {
                write!(f, "no answer in time: {received} of {awaited} bytes awaited came")
            }
            Self::Io(error) => write!(f, "connection: {error}"),
        }
    }
}

impl std::error::Error for Broken {}

enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// One connection.
pub struct Link {
    stream: Stream,
    timeout: Duration,
}

impl Link {
    /// Connects; every later wait is bounded by `timeout`.
    ///
    /// # Errors
    /// Those of `connect(2)` and name resolution.
    pub fn connect(address: &Address, timeout: Duration) -> io::Result<Self> {
        let stream = match address {
            Address::Tcp { host, port } => {
                let stream = TcpStream::connect((host.as_str(), *port))?;
                stream.set_nodelay(true)?;
                stream.set_write_timeout(Some(timeout))?;
                Stream::Tcp(stream)
            }
            Address::Unix(path) => {
                let stream = UnixStream::connect(path)?;
                stream.set_write_timeout(Some(timeout))?;
                Stream::Unix(stream)
            }
        };
        Ok(Self { stream, timeout })
    }

    /// Sends all bytes.
    ///
    /// # Errors
    /// [`Broken`], when the server has closed or takes nothing any more.
    pub fn send(&mut self, bytes: &[u8]) -> Result<(), Broken> {
        let sent = match &mut self.stream {
            Stream::Tcp(stream) => stream.write_all(bytes),
            Stream::Unix(stream) => stream.write_all(bytes),
        };
        sent.map_err(|error| self.broken(error, 0, 0))
    }

    /// Receives exactly `length` bytes.
    ///
    /// # Errors
    /// [`Broken`], with how much had come.
    pub fn recv(&mut self, length: usize) -> Result<Vec<u8>, Broken> {
        let mut bytes = vec![0; length];
        let mut received = 0;
        let deadline = Instant::now() + self.timeout;
        while received < length {
            match self.recv_some(&mut bytes[received..], deadline) {
                Ok(0) => return Err(Broken::Closed { received, awaited: length }),
                Ok(count) => received += count,
                Err(error) => return Err(self.broken(error, received, length)),
            }
        }
        Ok(bytes)
    }

    /// Receives an array: for integers of the wire.
    ///
    /// # Errors
    /// As [`Self::recv`].
    pub fn recv_array<const N: usize>(&mut self) -> Result<[u8; N], Broken> {
        let mut array = [0; N];
        array.copy_from_slice(&self.recv(N)?);
        Ok(array)
    }

    /// Waits for the end of the connection and returns what came before it.
    ///
    /// # Errors
    /// [`Broken::TimedOut`] when the server keeps the connection open.
    pub fn recv_until_closed(&mut self) -> Result<Vec<u8>, Broken> {
        let deadline = Instant::now() + self.timeout;
        let mut all = Vec::new();
        let mut piece = vec![0; 64 << 10];
        loop {
            match self.recv_some(&mut piece, deadline) {
                Ok(0) => return Ok(all),
                Ok(count) => all.extend_from_slice(&piece[..count]),
                Err(error) => match self.broken(error, all.len(), all.len()) {
                    Broken::Closed { .. } => return Ok(all),
                    other => return Err(other),
                },
            }
        }
    }

    /// Says that nothing more will be sent; what the server sends can still be received.
    pub fn half_close(&self) {
        // Errors mean that the server was faster; the next receive tells.
        let _ = match &self.stream {
            Stream::Tcp(stream) => stream.shutdown(Shutdown::Write),
            Stream::Unix(stream) => stream.shutdown(Shutdown::Write),
        };
    }

    fn recv_some(&mut self, bytes: &mut [u8], deadline: Instant) -> io::Result<usize> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let result = match &mut self.stream {
                Stream::Tcp(stream) => {
                    stream.set_read_timeout(Some(left))?;
                    stream.read(bytes)
                }
                Stream::Unix(stream) => {
                    stream.set_read_timeout(Some(left))?;
                    stream.read(bytes)
                }
            };
            match result {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => return other,
            }
        }
    }

    fn broken(&self, error: io::Error, received: usize, awaited: usize) -> Broken {
        match error.kind() {
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => {
                Broken::TimedOut { received, awaited }
            }
            io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::UnexpectedEof => Broken::Closed { received, awaited },
            _ => Broken::Io(error),
        }
    }
}
