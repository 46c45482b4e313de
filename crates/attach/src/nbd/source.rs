//! URLs of NBD disks, `nbd://HOST[:PORT]/NAME` or `nbd+unix:///NAME?socket=PATH`, and connections to them.

use super::extents;
use super::handshake::{Agreed, agree};
use crate::{Error, Geometry};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use rustix::net::SendFlags;
use std::fmt;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;
use towline_nbd::constants::{REQUEST_MAGIC, command};
use towline_net::address::{Side, connect_stream, connect_unix_stream, notice_silence};

/// The default port of NBD.
const PORT: u16 = 10809;
/// Time limit for connecting, and for each answer in the handshake.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time limit for each answer on an additional connection.
const PATIENCE_BESIDE: Duration = Duration::from_secs(1);
/// Time limit for each answer about extents.
const EXTENTS_PATIENCE: Duration = Duration::from_secs(60);

const ENCODED: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b'/');

#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    Tcp(String, u16),
    Unix(PathBuf),
}

/// A disk of an NBD server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    place: Place,
    name: String,
}

/// A connection after the handshake, ready for requests.
#[derive(Debug)]
#[non_exhaustive]
pub struct Connection {
    /// The socket, in blocking mode.
    pub socket: OwnedFd,
    /// Size, block sizes and abilities of the disk.
    pub geometry: Geometry,
    /// Transmission flags, for the client that sends the requests.
    pub flags: u16,
    /// The name of the disk that was asked for by the empty name, if the server tells.
    pub(super) name: Option<String>,
    /// The shortest time the server took to answer an option.
    pub round_trip: Duration,
    /// Number of the metadata context that tells what is allocated.
    pub(super) allocation: Option<u32>,
}

/// A run of bytes of one kind, as reported by an NBD server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Extent {
    /// Length in bytes, not zero.
    pub length: u64,
    /// No space is allocated.
    pub hole: bool,
    /// Reads as zeroes.
    pub zero: bool,
}

impl Source {
    /// Parses a URL.
    ///
    /// # Errors
    /// A text that says what is wrong with the URL and what is expected.
    pub fn parse(text: &str) -> Result<Self, String> {
        let wrong = |what: &str| {
            format!(
                "URL \"{text}\": {what}; expected nbd://HOST[:PORT]/NAME or nbd+unix:///NAME?socket=PATH"
            )
        };
        let decode = |text: &str| {
            percent_decode_str(text).decode_utf8().map(String::from).map_err(|_| wrong("not UTF-8"))
        };
        let (scheme, rest) = text.split_once("://").ok_or_else(|| wrong("no \"://\""))?;
        let (rest, query) = rest.split_once('?').map_or((rest, None), |(a, b)| (a, Some(b)));
        let (host, name) = rest.split_once('/').unwrap_or((rest, ""));
        let name = decode(name)?;
        let place = match scheme {
            "nbd" => {
                if query.is_some() {
                    return Err(wrong("a query has no meaning over TCP"));
                }
                let (host, port) = match host.rsplit_once(':') {
                    Some((host, port)) if !port.contains(']') => {
                        (host, port.parse().map_err(|_| wrong("bad port"))?)
                    }
                    _ => (host, PORT),
                };
                let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
                if host.is_empty() || (bare.is_none() && host.contains([':', '[', ']'])) {
                    return Err(wrong("invalid host"));
                }
                Place::Tcp(bare.unwrap_or(host).to_owned(), port)
            }
            "nbd+unix" => {
                let socket = query.and_then(|query| query.strip_prefix("socket="));
                let socket = socket.filter(|socket| !socket.is_empty() && host.is_empty());
                let socket = socket.ok_or_else(|| wrong("no \"?socket=\" with its path"))?;
                // The path must stay valid for a process with another working directory.
                let path = std::path::absolute(decode(socket)?);
                Place::Unix(path.map_err(|error| wrong(&error.to_string()))?)
            }
            "nbds" | "nbds+unix" => return Err(wrong("TLS is not there yet")),
            _ => return Err(wrong("unknown scheme")),
        };
        Ok(Self { place, name })
    }

    /// Returns the address of the server: HOST:PORT or unix:///PATH.
    #[must_use]
    pub fn address(&self) -> String {
        match &self.place {
            Place::Tcp(host, port) if host.contains(':') => format!("[{host}]:{port}"),
            Place::Tcp(host, port) => format!("{host}:{port}"),
            Place::Unix(path) => format!("unix://{}", path.display()),
        }
    }

    /// Returns the name of the disk.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the disk of this connection by its own name. The empty name may stand for another disk once the server
    /// is restarted.
    #[must_use]
    pub fn named(&self, connection: &Connection) -> Self {
        let name = connection.name.as_ref().unwrap_or(&self.name).clone();
        Self { place: self.place.clone(), name }
    }

    /// Returns true if `text` begins like the URL of an NBD server.
    #[must_use]
    pub fn looks_like(text: &str) -> bool {
        text.starts_with("nbd:") || text.starts_with("nbd+") || text.starts_with("nbds")
    }

    /// Connects, and carries out the handshake.
    ///
    /// # Errors
    /// If the server cannot be reached, does not answer within 10 seconds, has no such disk, or breaks
    /// the protocol.
    pub fn connect(&self) -> Result<Connection, Error> {
        self.open(false, PATIENCE)
    }

    /// Like [`Source::connect`], with structured replies and extents if the server has them. In simple replies a
    /// server cannot report that the end of a read failed once it has sent the beginning: it can only hang up.
    pub(super) fn connect_for_chunks(&self) -> Result<Connection, Error> {
        self.open(true, PATIENCE)
    }

    /// Makes an additional connection, which is not worth a long wait.
    pub(super) fn connect_beside(&self) -> Result<Connection, Error> {
        self.open(true, PATIENCE_BESIDE)
    }

    fn open(&self, chunks: bool, patience: Duration) -> Result<Connection, Error> {
        let failed = |error| Error::system(self)(error);
        let none = |error: io::Error| {
            let hint = match error.kind() {
                io::ErrorKind::ConnectionRefused => " (no server listens there)",
                io::ErrorKind::NotFound => " (there is no such socket)",
                _ => "",
            };
            Error::system(format_args!("{self}: cannot connect{hint}"))(error)
        };
        let socket: OwnedFd = match &self.place {
            Place::Unix(path) => connect_unix_stream(path, PATIENCE).map_err(none)?.into(),
            Place::Tcp(host, port) => {
                let stream = connect_stream((host.as_str(), *port), PATIENCE).map_err(none)?;
                // Local connections, too: they may lead into a tunnel to another machine.
                notice_silence(&stream, Side::Client).map_err(failed)?;
                stream.into()
            }
        };
        let (agreed, socket) =
            patiently(socket, patience, |stream| agree(stream, &self.name, chunks, self))
                .map_err(failed)?;
        let Agreed { geometry, flags, name, round_trip, allocation } = agreed?;
        Ok(Connection { socket, geometry, flags, name, round_trip, allocation })
    }
}

impl Connection {
    /// Ends a connection on which there are no requests.
    pub fn leave(self) {
        take_leave(&self.socket);
    }

    /// Asks what is allocated, before any other request; `None` if the server does not tell.
    pub(super) fn extents(self, source: &Source) -> Result<(Self, Option<Vec<Extent>>), Error> {
        let Some(context) = self.allocation else { return Ok((self, None)) };
        let size = self.geometry.size;
        let (found, socket) = patiently(self.socket, EXTENTS_PATIENCE, |stream| {
            extents::ask(stream, context, size, source)
        })
        .map_err(Error::system(source))?;
        Ok((Self { socket, ..self }, found?))
    }
}

/// Tells a server that nothing more will come. Otherwise it takes the end of a connection for a failure.
pub(super) fn take_leave(socket: &OwnedFd) {
    let mut request = [0; 28];
    request[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
    request[6..8].copy_from_slice(&command::DISC.to_be_bytes());
    // The server may be gone already.
    let _ = rustix::net::send(socket, &request, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
}

/// Calls `work` with a socket whose reads and writes time out after `patience`.
fn patiently<T>(
    socket: OwnedFd,
    patience: Duration,
    work: impl FnOnce(&mut Patient) -> T,
) -> io::Result<(T, OwnedFd)> {
    // Reads, writes and time-outs are the same for all stream sockets.
    let stream = UnixStream::from(socket);
    stream.set_read_timeout(Some(patience))?;
    stream.set_write_timeout(Some(patience))?;
    let mut patient = Patient { stream, patience };
    let done = work(&mut patient);
    let Patient { stream, .. } = patient;
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)?;
    Ok((done, stream.into()))
}

/// A stream with time-outs, which the kernel reports as `EAGAIN`.
struct Patient {
    stream: UnixStream,
    patience: Duration,
}

impl Patient {
    fn told(&self, error: io::Error) -> io::Error {
        match error.kind() {
            io::ErrorKind::WouldBlock => {
                let silent = self.patience;
                let what =
                    format!("no answer within {silent:?}; it may be stopped, or no NBD server");
                io::Error::new(io::ErrorKind::TimedOut, what)
            }
            _ => error,
        }
    }
}

impl Read for Patient {
    fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        self.stream.read(target).map_err(|error| self.told(error))
    }
}

impl Write for Patient {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.write(bytes).map_err(|error| self.told(error))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = utf8_percent_encode(&self.name, ENCODED);
        match &self.place {
            Place::Tcp(host, port) if host.contains(':') => {
                write!(f, "nbd://[{host}]:{port}/{name}")
            }
            Place::Tcp(host, port) => write!(f, "nbd://{host}:{port}/{name}"),
            Place::Unix(path) => {
                let path = path.to_string_lossy();
                write!(f, "nbd+unix:///{name}?socket={}", utf8_percent_encode(&path, ENCODED))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Source;
    use std::net::TcpListener;
    use std::time::Duration;

    #[test]
    fn a_server_that_is_silent_is_told_as_such() {
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let source = Source::parse(&format!("nbd://{}/x", silent.local_addr().unwrap())).unwrap();
        let error = source.open(false, Duration::from_millis(20)).err().unwrap().to_string();
        assert_eq!(
            error,
            format!("{source}: no answer within 20ms; it may be stopped, or no NBD server")
        );
    }

    #[test]
    fn urls_survive_a_round_trip() {
        for text in [
            "nbd://host:10809/",
            "nbd://[::1]:7/vm1",
            "nbd+unix:///a%20b/c?socket=/run/n%3F.sock",
            "nbd://127.0.0.1:1/%2525",
        ] {
            let source = Source::parse(text).unwrap();
            assert_eq!(source.to_string(), text);
        }
        assert_eq!(Source::parse("nbd://h").unwrap().to_string(), "nbd://h:10809/");
        assert_eq!(Source::parse("nbd://[::1]/x").unwrap().to_string(), "nbd://[::1]:10809/x");
    }

    #[test]
    fn bad_urls_are_refused_with_a_reason() {
        for text in [
            "x",
            "nbd:///x",
            "nbd://h:x/",
            "nbd://::1/",
            "nbds://h/",
            "nbd+unix:///x",
            "nbd+unix://h/x?socket=/s",
            "nbd://h/?socket=/s",
            "http://h/",
        ] {
            let error = Source::parse(text).unwrap_err();
            assert!(error.contains(text) && error.contains("expected"), "{error}");
        }
    }
}
