//! Whoever takes a record lock tells the keeper first, so that the lock ends with this process, however it
//! ends (`cli/run/holders.rs`).

use crate::descriptors::Own;
use crate::{own, process, start};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;
use towline_instance::HOLDERS;

/// How long the keeper may be too busy to be told.
const LIMIT: Duration = Duration::from_secs(1);

/// Tells it.
///
/// # Errors
/// When that cannot be: locks then end some seconds after a process that was killed.
pub(crate) fn tell() -> Result<(), i32> {
    let errno = Errno::raw_os_error;
    let number = process::id();
    let this = Pid::from_raw(number as i32).ok_or(libc::ESRCH)?;
    let this = own::hide(pidfd_open(this, PidfdFlags::empty()).map_err(errno)?, Own::Memory)?;
    let (family, kind) = (AddressFamily::UNIX, SocketType::DGRAM);
    let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None);
    let socket = own::hide(socket.map_err(errno)?, Own::Memory)?;
    set_socket_timeout(&socket, Timeout::Send, Some(LIMIT)).map_err(errno)?;
    let path = [start::directory(), b"/", HOLDERS.as_bytes()].concat();
    let address = SocketAddrUnix::new(OsStr::from_bytes(&path)).map_err(errno)?;
    rustix::net::connect(&socket, &address).map_err(errno)?;
    let sent = towline_net::send_descriptors(&socket, &number.to_ne_bytes(), &[this.as_fd()]);
    sent.map(drop).map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))
}
