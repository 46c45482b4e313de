//! Messages and questions from this process to the keeper.
//!
//! A process tells the keeper before it takes a record lock, so that the lock ends with the process,
//! however it ends (`cli/run/holders.rs`). It asks the keeper for the shadow of a remote file that it wants
//! to watch (`cli/run/watches`).

use crate::descriptors::Own;
use crate::{own, process, start};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;
use towline_instance::KEEPER;
use towline_instance::watches::{ANSWER_BYTES, Ask, parse_answer};

/// Time for which the keeper may be too busy to take a message.
const LIMIT: Duration = Duration::from_secs(10);

/// Tells the keeper of this process.
///
/// # Errors
/// If that fails, locks of a killed process may stay until the end of the run.
pub(crate) fn tell() -> Result<(), i32> {
    let number = process::id();
    let this = Pid::from_raw(number as i32).ok_or(libc::ESRCH)?;
    let this = pidfd_open(this, PidfdFlags::empty()).map_err(Errno::raw_os_error)?;
    send(&number.to_ne_bytes(), &own::hide(this, Own::Memory)?)
}

/// Asks for the number of a shadow and waits for the answer.
///
/// # Errors
/// `ENOSPC` if there is no answer; those of the answer.
pub(crate) fn ask(ask: &Ask) -> Result<u64, i32> {
    let pair = || -> Result<_, i32> {
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let (ours, theirs) = rustix::net::socketpair(family, kind, SocketFlags::CLOEXEC, None)
            .map_err(Errno::raw_os_error)?;
        let (ours, theirs) = (own::hide(ours, Own::Memory)?, own::hide(theirs, Own::Memory)?);
        send(&ask.to_bytes(), &theirs)?;
        Ok(ours)
    };
    let socket = pair().map_err(|_| libc::ENOSPC)?;
    let mut answer = [0; ANSWER_BYTES];
    loop {
        match rustix::io::read(&socket, &mut answer) {
            Ok(ANSWER_BYTES) => return parse_answer(&answer),
            // Try again: the signal's handler runs after this.
            Err(Errno::INTR) => {}
            // The keeper has ended or cannot answer.
            _ => return Err(libc::ENOSPC),
        }
    }
}

fn send(bytes: &[u8], with: &OwnedFd) -> Result<(), i32> {
    let errno = Errno::raw_os_error;
    let (family, kind) = (AddressFamily::UNIX, SocketType::DGRAM);
    let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None);
    let socket = own::hide(socket.map_err(errno)?, Own::Memory)?;
    set_socket_timeout(&socket, Timeout::Send, Some(LIMIT)).map_err(errno)?;
    let path = [start::directory(), b"/", KEEPER.as_bytes()].concat();
    let address = SocketAddrUnix::new(OsStr::from_bytes(&path)).map_err(errno)?;
    rustix::net::connect(&socket, &address).map_err(errno)?;
    let sent =
        towline_net::send_descriptors(&socket, bytes, &[with.as_fd()], towline_net::Wait::Any);
    sent.map(drop).map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))
}
