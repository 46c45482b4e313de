//! The sources of NBD clients.

use super::resolve;
use rustix::fs::FileType;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::str::FromStr;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use towline_net::address::Address;
use towline_net::{Link, LinkKind};

/// The value of one `--nbd` flag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Front {
    /// A listening socket.
    Address(Address),
    /// Inherited sockets, or standard input and output.
    Standard,
}

impl Front {
    pub(crate) fn address(&self) -> Option<Address> {
        match self {
            Self::Address(address) => Some(address.clone()),
            Self::Standard => None,
        }
    }
}

impl FromStr for Front {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "-" {
            return Ok(Self::Standard);
        }
        if text.contains("://") {
            return Address::parse(text).map(Self::Address);
        }
        resolve(text, "HOST:PORT, unix:///PATH or -").map(|tcp| Self::Address(Address::Tcp(tcp)))
    }
}

/// How long the last bytes to standard output may take once the server was told to end. Their reader may be
/// stuck.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often to look whether they are written.
const LOOK: Duration = Duration::from_millis(10);

/// The thread that copies to standard output.
pub(crate) struct Output(JoinHandle<std::io::Result<()>>);

impl Output {
    /// Waits, after the link is closed, until the last bytes are written; not for long if `is_told` to end.
    pub(crate) fn finish(self, is_told: bool) -> Result<(), String> {
        let begun = Instant::now();
        while is_told && !self.0.is_finished() {
            if begun.elapsed() >= PATIENCE {
                return Ok(());
            }
            std::thread::sleep(LOOK);
        }
        match self.0.join() {
            Ok(Ok(())) => Ok(()),
            // The client has left.
            Ok(Err(error)) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
            Ok(Err(error)) => Err(format!("--nbd -: standard output: {error}")),
            Err(_) => Err("--nbd -: copying to standard output failed".to_owned()),
        }
    }
}

/// Returns a link to the client on standard input and output: directly if that is a socket, otherwise through
/// two threads that copy. After the link is closed, finish the output, so that the last bytes are not lost.
pub(crate) fn standard_link() -> Result<(Link, Option<Output>), String> {
    let wrong = |error: std::io::Error| format!("--nbd -: standard input: {error}");
    let stdin = std::io::stdin();
    let stat = rustix::fs::fstat(&stdin).map_err(|e| wrong(e.into()))?;
    if FileType::from_raw_mode(stat.st_mode) == FileType::Socket {
        let socket: OwnedFd = stdin.as_fd().try_clone_to_owned().map_err(wrong)?;
        let local = rustix::net::sockopt::socket_domain(&socket).map_err(|e| wrong(e.into()))?;
        let kind = match local {
            rustix::net::AddressFamily::UNIX => LinkKind::Unix,
            _ => LinkKind::Tcp,
        };
        rustix::io::ioctl_fionbio(&socket, true).map_err(|e| wrong(e.into()))?;
        return Ok((Link::Socket(socket, kind), None));
    }
    let (near, far) = UnixStream::pair().map_err(wrong)?;
    near.set_nonblocking(true).map_err(wrong)?;
    let (inward, outward) = (far.try_clone().map_err(wrong)?, far);
    let copy_in = move || {
        // If either side ends, so does the connection.
        let _ = copy(std::io::stdin().lock(), &inward);
        let _ = inward.shutdown(Shutdown::Write);
    };
    let copy_out = move || {
        let done = copy(&outward, std::io::stdout().lock());
        // A client that cannot be answered is gone, although its requests may still come.
        let _ = outward.shutdown(Shutdown::Both);
        done
    };
    let thread = |name: &str| std::thread::Builder::new().name(name.to_owned());
    thread("towline-stdin").spawn(copy_in).map_err(wrong)?;
    let last = thread("towline-stdout").spawn(copy_out).map_err(wrong)?;
    Ok((Link::Socket(near.into(), LinkKind::Unix), Some(Output(last))))
}

/// Copies until the source ends or fails. Each piece is passed on at once. Reports errors of the target only.
fn copy(mut source: impl Read, mut target: impl Write) -> std::io::Result<()> {
    let mut bytes = vec![0; 128 * 1024];
    loop {
        let count = source.read(&mut bytes).unwrap_or(0);
        if count == 0 {
            return Ok(());
        }
        target.write_all(&bytes[..count])?;
        target.flush()?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read() {
        assert_eq!("-".parse(), Ok(Front::Standard));
        for good in ["127.0.0.1:10809", "tcp://127.0.0.1:1", "unix:///run/nbd.sock"] {
            assert!(matches!(good.parse(), Ok(Front::Address(_))), "{good}");
        }
        for bad in ["", "127.0.0.1", "unix://x", "x://y"] {
            assert!(bad.parse::<Front>().is_err(), "{bad}");
        }
    }
}
