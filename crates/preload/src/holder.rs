//! Messages and questions from this process to the keeper.
//!
//! A process tells the keeper before it takes a record lock, so that the lock ends with the process,
//! however it ends (`cli/run/holders.rs`). It asks the keeper for the shadow of a remote file that it wants
//! to watch, and tells it what it lists in watched directories (`cli/run/watches`). It asks for a connection
//! (`cli/run/ready.rs`).

use crate::descriptors::Own;
use crate::{own, process, start};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;
use towline_instance::KEEPER;
use towline_instance::ready::{Stock, Want};
use towline_instance::watches::{ANSWER_BYTES, Ask, Listed, parse_answer};
use towline_net::{Wait, network_namespace};

/// Time for which the keeper may be too busy to take a message.
const LIMIT: Duration = Duration::from_secs(10);
/// Time for which to wait for a connection that is ready.
const MOMENT: Duration = Duration::from_millis(100);
/// Room for what comes with it.
const CONNECTION_BYTES_MAX: usize = 256;

/// Tells the keeper of this process.
///
/// # Errors
/// If that fails, locks of a killed process may stay until the end of the run.
pub(crate) fn tell() -> Result<(), i32> {
    let this = Pid::from_raw(process::id() as i32).ok_or(libc::ESRCH)?;
    let this = pidfd_open(this, PidfdFlags::empty()).map_err(Errno::raw_os_error)?;
    send(&process::identity().to_ne_bytes(), &own::hide(this, Own::Memory)?, Wait::Any)
}

/// Tells the keeper what a program finds in a watched directory.
///
/// # Errors
/// If that fails, the keeper has ended, and nobody is told of events any more.
pub(crate) fn tell_listed(listed: &Listed) -> Result<(), i32> {
    let socket = connected()?;
    let packets = listed.to_packets();
    packets.iter().try_for_each(|packet| send_over(&socket, packet, &[], Wait::Any))
}

/// Asks for the number of a shadow and waits for the answer.
///
/// # Errors
/// `ENOSPC` if there is no answer; those of the answer.
pub(crate) fn ask(ask: &Ask) -> Result<u64, i32> {
    let socket = question(&ask.to_bytes(), Wait::Any).map_err(|_| libc::ENOSPC)?;
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

/// Asks for a connection to the server with this first mount, for this process; returns its parts
/// ([`towline_client::Connection`]). Waits only if there is one, and not for long. `None`: the process connects by
/// itself.
pub(crate) fn connection(mount: usize) -> Option<(Vec<u8>, OwnedFd)> {
    let state = start::state()?;
    let stock = state.stock(mount);
    if stock == Stock::Never {
        return None;
    }
    let want = Want { mount: mount as u32, process: process::identity() };
    let socket = question(&want.to_bytes(), Wait::No).ok()?;
    if stock == Stock::Some(0) {
        return None;
    }
    set_socket_timeout(&socket, Timeout::Recv, Some(MOMENT)).ok()?;
    let mut bytes = [0; CONNECTION_BYTES_MAX];
    match towline_net::receive_descriptors(&socket, &mut bytes, Wait::Any) {
        Ok((count, fds)) => {
            let fd = fds.into_iter().next()?;
            // In another network namespace, the server may be another one, or out of reach.
            let is_here = network_namespace(fd.as_fd()) == network_namespace(socket.as_fd());
            is_here.then(|| (bytes[..count].to_vec(), fd))
        }
        Err(_) => {
            // The keeper is stopped, or very busy. It says so when it goes on.
            state.set_stock(mount, Stock::Some(0));
            None
        }
    }
}

/// Sends a question; returns the socket for the answer.
fn question(bytes: &[u8], wait: Wait) -> Result<OwnedFd, i32> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let (ours, theirs) = rustix::net::socketpair(family, kind, SocketFlags::CLOEXEC, None)
        .map_err(Errno::raw_os_error)?;
    let (ours, theirs) = (own::hide(ours, Own::Memory)?, own::hide(theirs, Own::Memory)?);
    send(bytes, &theirs, wait)?;
    Ok(ours)
}

fn send(bytes: &[u8], with: &OwnedFd, wait: Wait) -> Result<(), i32> {
    send_over(&connected()?, bytes, &[with.as_fd()], wait)
}

fn send_over(
    socket: &OwnedFd,
    bytes: &[u8],
    with: &[BorrowedFd<'_>],
    wait: Wait,
) -> Result<(), i32> {
    let sent = towline_net::send_descriptors(socket, bytes, with, wait);
    sent.map(drop).map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))
}

/// Returns a socket to the keeper.
fn connected() -> Result<OwnedFd, i32> {
    let errno = Errno::raw_os_error;
    let (family, kind) = (AddressFamily::UNIX, SocketType::DGRAM);
    let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None);
    let socket = own::hide(socket.map_err(errno)?, Own::Memory)?;
    set_socket_timeout(&socket, Timeout::Send, Some(LIMIT)).map_err(errno)?;
    let path = [start::directory(), b"/", KEEPER.as_bytes()].concat();
    let address = SocketAddrUnix::new(OsStr::from_bytes(&path)).map_err(errno)?;
    rustix::net::connect(&socket, &address).map_err(errno)?;
    Ok(socket)
}
