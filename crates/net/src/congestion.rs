//! Avoids paced congestion control for TCP connections within a machine.
//!
//! BBR, a default on many servers, paces: it sends by timers. Within a machine these cost more than the
//! data itself (one connection reading large pieces: 2 instead of 6 GB/s, with the processors busy in
//! timer interrupts). A socket that has used BBR keeps its timers even when another algorithm is chosen:
//! as of Linux 6.18 nothing resets `sk_pacing_status`. So if the default is BBR, sockets start without
//! it, before they are connected, and change to it if the peer turns out to be on another machine. Other
//! defaults do not pace and are left alone.

use rustix::net::sockopt::{set_tcp_congestion, tcp_congestion};
use rustix::net::{AddressFamily, SocketType, socket};
use std::io;
use std::os::fd::AsFd;

/// Prefix of the names of algorithms that pace: `bbr`, `bbr2`, `bbr3`.
const PACING: &str = "bbr";

/// Never paces, is in every kernel, and may be chosen without privileges.
const UNPACED: &str = "reno";

/// The machine's default algorithm, which sockets start without because it paces.
#[derive(Clone, Debug)]
pub struct Withheld(String);

impl Withheld {
    /// Switches a listening or unconnected socket away from a default that paces. Returns `None` if the
    /// default does not pace or the socket cannot be switched.
    pub(crate) fn from(socket: impl AsFd) -> Option<Self> {
        // Ask a new socket: a previous server may have switched one from a service manager.
        let default = default_congestion().ok().filter(|name| name.starts_with(PACING))?;
        set_tcp_congestion(socket, UNPACED).ok()?;
        Some(Self(default))
    }

    /// Sets the default algorithm on a connected socket whose peer is on another machine.
    pub(crate) fn give(&self, socket: impl AsFd) {
        // The default may be chosen without privileges. If this fails, the socket works all the same.
        let _ = set_tcp_congestion(socket, &self.0);
    }
}

fn default_congestion() -> io::Result<String> {
    Ok(tcp_congestion(socket(AddressFamily::INET, SocketType::STREAM, None)?)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address::{Address, Listener, connect_stream};
    use std::net::{Ipv4Addr, TcpListener};
    use std::time::Duration;

    /// The tests can check something only if the default paces.
    fn default_paces() -> bool {
        let default = default_congestion().unwrap();
        let paces = default.starts_with(PACING);
        if !paces {
            eprintln!("SKIPPED: the default of congestion control here is {default}, not BBR");
        }
        paces
    }

    #[test]
    fn within_a_machine_no_connection_was_ever_paced() {
        if !default_paces() {
            return;
        }
        let bound = Listener::bind(&Address::Tcp((Ipv4Addr::LOCALHOST, 0).into())).unwrap();
        let Listener::Tcp(listener, withheld) = &bound else { unreachable!("bound to TCP") };
        assert!(withheld.is_some());
        // Set before connecting, because afterwards is too late.
        assert_eq!(tcp_congestion(listener).unwrap(), UNPACED);
        let address = listener.local_addr().unwrap();
        let near = connect_stream(address, Duration::from_secs(5)).unwrap();
        let far = bound.accept().unwrap();
        assert_eq!(tcp_congestion(near).unwrap(), UNPACED);
        assert_eq!(tcp_congestion(far.fd().unwrap()).unwrap(), UNPACED);
    }

    #[test]
    fn peers_elsewhere_get_the_default() {
        if !default_paces() {
            return;
        }
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let withheld = Withheld::from(&socket).unwrap();
        assert_eq!(tcp_congestion(&socket).unwrap(), UNPACED);
        withheld.give(&socket);
        assert_eq!(tcp_congestion(&socket).unwrap(), default_congestion().unwrap());
        // A service manager passes the same socket to the next server.
        assert!(Withheld::from(&socket).is_some());
        assert!(Withheld::from(&socket).is_some());
    }
}
