//! Bells between two processes.

use rustix::net::{RecvFlags, SendFlags};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Wakes a sleeper that waits for a descriptor to become readable.
#[derive(Clone, Debug)]
pub struct Doorbell(Arc<Bell>);

#[derive(Debug)]
enum Bell {
    Eventfd(OwnedFd),
    Socket(OwnedFd),
}

impl Doorbell {
    /// Wraps an eventfd. If another process has it too, that process can make [`Doorbell::ring`] and
    /// [`Doorbell::clear`] wait for ever.
    #[must_use]
    pub fn new(eventfd: OwnedFd) -> Self {
        Self(Arc::new(Bell::Eventfd(eventfd)))
    }

    /// Wraps this end of a connection on which nothing else is sent. [`Doorbell::ring`] wakes the other
    /// end, and [`Doorbell::clear`] resets this one. Neither ever waits, whatever the other end does.
    #[must_use]
    pub fn between(socket: OwnedFd) -> Self {
        Self(Arc::new(Bell::Socket(socket)))
    }

    /// Returns the descriptor.
    #[must_use]
    pub fn fd(&self) -> &OwnedFd {
        match &*self.0 {
            Bell::Eventfd(fd) | Bell::Socket(fd) => fd,
        }
    }

    /// Rings the bell.
    pub fn ring(&self) {
        // These fail only when the bell is already ringing, or nobody is there to hear it.
        match &*self.0 {
            Bell::Eventfd(fd) => {
                let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
            }
            Bell::Socket(fd) => {
                let _ = rustix::net::send(fd, &[0], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
            }
        }
    }

    /// Resets the bell, so that the next ring is noticed.
    pub fn clear(&self) {
        match &*self.0 {
            Bell::Eventfd(fd) => {
                let _ = rustix::io::read(fd, &mut [0; 8][..]);
            }
            Bell::Socket(fd) => {
                let _ = rustix::net::recv(fd, &mut [0; 64][..], RecvFlags::DONTWAIT);
            }
        }
    }
}
