//! A connection to the server, with a limit on each wait.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, Read};
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

use crate::uri::Address;

/// Number of leading bytes that a slow send pauses after: longer than every header.
const SLOW_BYTES: usize = 48;
/// Pause after each of these bytes.
const SLOW_PAUSE: Duration = Duration::from_millis(2);
/// Pause between attempts to connect to a server whose queue of connections is full.
const CONNECT_PAUSE: Duration = Duration::from_millis(10);

/// Why a connection can no longer be used.
#[derive(Debug)]
pub enum Broken {
    /// The server closed the connection before all awaited bytes had arrived.
    Closed {
        /// How many of them arrived.
        received: usize,
        /// Number of bytes awaited.
        awaited: usize,
    },
    /// Not all awaited bytes arrived in time.
    TimedOut {
        /// How many of them arrived.
        received: usize,
        /// Number of bytes awaited.
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
    /// Bytes received while sending.
    early: VecDeque<u8>,
    /// The server was seen to close its side.
    ended: bool,
}

impl Link {
    /// Connects; `timeout` limits this and every later wait.
    ///
    /// # Errors
    /// Those of `connect(2)` and name resolution.
    pub fn connect(address: &Address, timeout: Duration) -> io::Result<Self> {
        let stream = match address {
            Address::Tcp { host, port } => {
                let stream = connect_tcp(host, *port, timeout)?;
                stream.set_nodelay(true)?;
                Stream::Tcp(stream)
            }
            Address::Unix(path) => Stream::Unix(connect_unix(path, timeout)?),
        };
        Ok(Self { stream, timeout, early: VecDeque::new(), ended: false })
    }

    /// Sends all bytes. Receives meanwhile, because a server may take no more before its answers are
    /// received, and both sides would wait for each other.
    ///
    /// # Errors
    /// [`Broken`], if the server has closed the connection or no longer takes bytes.
    pub fn send(&mut self, mut bytes: &[u8]) -> Result<(), Broken> {
        let mut deadline = Instant::now() + self.timeout;
        while !bytes.is_empty() {
            match rustix::net::send(self.fd(), bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(count) => {
                    bytes = &bytes[count..];
                    deadline = Instant::now() + self.timeout;
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.wait_for_room(deadline)?,
                Err(error) => return Err(self.broken(error.into(), 0, 0)),
            }
        }
        Ok(())
    }

    /// Returns true if the server was seen to close its side.
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// Explains an error, and notes if it means that the server has closed its side.
    fn broken(&mut self, error: io::Error, received: usize, awaited: usize) -> Broken {
        let broken = broken(error, received, awaited);
        self.ended |= matches!(broken, Broken::Closed { .. });
        broken
    }

    /// Waits until more can be sent, and receives meanwhile.
    fn wait_for_room(&mut self, deadline: Instant) -> Result<(), Broken> {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut wanted = PollFlags::OUT;
        if !self.ended {
            wanted |= PollFlags::IN;
        }
        let time = Timespec::try_from(left).ok();
        let readable = {
            let mut fds = [PollFd::from_borrowed_fd(self.fd(), wanted)];
            match poll(&mut fds, time.as_ref()) {
                Ok(0) => return Err(Broken::TimedOut { received: 0, awaited: 0 }),
                Ok(_) => fds[0].revents().contains(PollFlags::IN),
                Err(Errno::INTR) => false,
                Err(error) => return Err(broken(error.into(), 0, 0)),
            }
        };
        if readable {
            let mut piece = vec![0; 256 << 10];
            match rustix::net::recv(self.fd(), &mut piece, RecvFlags::DONTWAIT) {
                Ok((0, _)) => self.ended = true,
                Ok((count, _)) => self.early.extend(&piece[..count]),
                // The error shows again at the next receive.
                Err(_) => self.ended = true,
            }
        }
        Ok(())
    }

    fn fd(&self) -> BorrowedFd<'_> {
        match &self.stream {
            Stream::Tcp(stream) => stream.as_fd(),
            Stream::Unix(stream) => stream.as_fd(),
        }
    }

    /// Sends byte by byte, with pauses after the first ones so that the server receives them one by one.
    ///
    /// # Errors
    /// As [`Self::send`].
    pub fn send_slowly(&mut self, bytes: &[u8]) -> Result<(), Broken> {
        for (place, byte) in bytes.iter().enumerate() {
            self.send(&[*byte])?;
            if place < SLOW_BYTES {
                std::thread::sleep(SLOW_PAUSE);
            }
        }
        Ok(())
    }

    /// Receives exactly `length` bytes.
    ///
    /// # Errors
    /// [`Broken`], with the number of bytes that arrived.
    pub fn recv(&mut self, length: usize) -> Result<Vec<u8>, Broken> {
        let mut bytes = vec![0; length];
        let mut received = 0;
        let deadline = Instant::now() + self.timeout;
        while received < length {
            match self.recv_next(&mut bytes[received..], deadline) {
                Ok(0) => {
                    self.ended = true;
                    return Err(Broken::Closed { received, awaited: length });
                }
                Ok(count) => received += count,
                Err(error) => return Err(self.broken(error, received, length)),
            }
        }
        Ok(bytes)
    }

    /// Receives an array, for integers.
    ///
    /// # Errors
    /// As [`Self::recv`].
    pub fn recv_array<const N: usize>(&mut self) -> Result<[u8; N], Broken> {
        let mut array = [0; N];
        array.copy_from_slice(&self.recv(N)?);
        Ok(array)
    }

    /// Waits until the server closes the connection, and returns the bytes that came before.
    ///
    /// # Errors
    /// [`Broken::TimedOut`] if the server keeps the connection open.
    pub fn recv_until_closed(&mut self) -> Result<Vec<u8>, Broken> {
        let deadline = Instant::now() + self.timeout;
        let mut all = Vec::new();
        let mut piece = vec![0; 64 << 10];
        loop {
            match self.recv_next(&mut piece, deadline) {
                Ok(0) => return Ok(all),
                Ok(count) => all.extend_from_slice(&piece[..count]),
                Err(error) => match broken(error, all.len(), all.len()) {
                    Broken::Closed { .. } => return Ok(all),
                    other => return Err(other),
                },
            }
        }
    }

    /// Shuts down the sending side; the server's bytes can still be received.
    pub fn half_close(&self) {
        // An error means that the server has closed already, which the next receive reports.
        let _ = match &self.stream {
            Stream::Tcp(stream) => stream.shutdown(Shutdown::Write),
            Stream::Unix(stream) => stream.shutdown(Shutdown::Write),
        };
    }

    /// Receives bytes, first those that arrived while sending.
    fn recv_next(&mut self, bytes: &mut [u8], deadline: Instant) -> io::Result<usize> {
        if self.early.is_empty() {
            return self.recv_some(bytes, deadline);
        }
        self.early.read(bytes)
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
}

fn connect_tcp(host: &str, port: u16, timeout: Duration) -> io::Result<TcpStream> {
    let mut last = io::ErrorKind::NotFound.into();
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, timeout) {
            Err(error) => last = error,
            connected => return connected,
        }
    }
    Err(last)
}

/// Connects without waiting in the kernel, where nothing limits the wait for a server that accepts nobody.
fn connect_unix(path: &Path, timeout: Duration) -> io::Result<UnixStream> {
    let deadline = Instant::now() + timeout;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let address = SocketAddrUnix::new(path)?;
    loop {
        match rustix::net::connect(&socket, &address) {
            Ok(()) => break,
            // Its queue of connections is full, which cannot be waited for.
            Err(Errno::AGAIN) if Instant::now() < deadline => std::thread::sleep(CONNECT_PAUSE),
            Err(Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
            Err(error) => return Err(error.into()),
        }
    }
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

fn broken(error: io::Error, received: usize, awaited: usize) -> Broken {
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

#[cfg(test)]
mod tests {
    use super::Link;
    use crate::uri::Address;
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
    use std::io::ErrorKind;
    use std::time::Duration;

    #[test]
    fn a_server_that_accepts_nobody_is_not_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&socket, 0).unwrap();
        let connect = || Link::connect(&Address::Unix(path.clone()), Duration::from_millis(50));
        let _first = connect().unwrap();
        assert_eq!(connect().err().unwrap().kind(), ErrorKind::TimedOut);
    }
}
