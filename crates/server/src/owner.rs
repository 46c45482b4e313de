//! Who owns the socket at the other end of a TCP connection within this machine.
//!
//! The kernel is asked about this one socket (`sock_diag(7)`). Where it cannot tell, the socket is looked for in the
//! tables of `proc_net_tcp(5)`, which takes the longer the more sockets the machine has.

use rustix::net::netlink::SOCK_DIAG;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;

/// Kinds of messages (`SOCK_DIAG_BY_FAMILY`), and the flag of a question (`NLM_F_REQUEST`).
const BY_FAMILY: u16 = 20;
const REQUEST: u16 = 1;
const HEADER_BYTES: usize = 16;
/// Header and `inet_diag_req_v2`.
const QUESTION_BYTES: usize = HEADER_BYTES + 56;
/// Bytes from the beginning of an `inet_diag_msg` to its ports, its user, and its inode.
const PORTS: usize = 4;
const USER: usize = 64;
const INODE: usize = 68;
/// The loopback device, over which everything within a machine goes.
const LOOPBACK: u32 = 1;
/// "No cookie is known."
const NO_COOKIE: [u8; 8] = [0xff; 8];

/// Finds owners of sockets.
pub(crate) struct Owners {
    /// To the kernel, from the beginning: later there may be no descriptor left. `None`: it tells nothing.
    kernel: Option<OwnedFd>,
}

impl Owners {
    pub(crate) fn new() -> Self {
        let (family, kind) = (AddressFamily::NETLINK, SocketType::DGRAM);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        Self { kernel: rustix::net::socket_with(family, kind, flags, Some(SOCK_DIAG)).ok() }
    }

    /// Returns the owner of the socket with these ends, of which `local` is its own. Both addresses count, since another
    /// socket may have the same ports. A closed socket has no owner.
    pub(crate) fn owner(&self, local: SocketAddr, remote: SocketAddr) -> Option<u32> {
        let told = self.kernel.as_ref().and_then(|kernel| ask(kernel, local, remote).ok());
        match told.flatten() {
            Some(found) => found.owner(),
            // An IPv4 connection is in the other table if the client uses one socket for both address families.
            None => ["/proc/net/tcp", "/proc/net/tcp6"].iter().find_map(|table| {
                owner_in(&std::fs::read_to_string(table).unwrap_or_default(), local, remote)
            }),
        }
    }
}

/// What is known of a socket.
struct Found {
    user: u32,
    inode: u64,
}

impl Found {
    /// The kernel reports root for a closed socket, and inode 0.
    fn owner(self) -> Option<u32> {
        (self.inode != 0).then_some(self.user)
    }
}

/// Asks the kernel about the socket with these ends. `None`: it knows of none.
fn ask(kernel: &OwnedFd, local: SocketAddr, remote: SocketAddr) -> io::Result<Option<Found>> {
    send(kernel, &question(local, remote), SendFlags::empty())?;
    // The kernel has answered when `send` returns.
    let mut answer = [0; 512];
    let (_, length) = recv(kernel, &mut answer[..], RecvFlags::empty())?;
    Ok(found(answer.get(..length).unwrap_or_default(), local, remote))
}

fn question(local: SocketAddr, remote: SocketAddr) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(QUESTION_BYTES);
    bytes.extend((QUESTION_BYTES as u32).to_ne_bytes());
    bytes.extend(BY_FAMILY.to_ne_bytes());
    bytes.extend(REQUEST.to_ne_bytes());
    bytes.extend([0; 8]); // sequence number, sender
    let family = if local.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    bytes.extend([family.as_raw() as u8, libc::IPPROTO_TCP as u8, 0, 0]);
    bytes.extend(u32::MAX.to_ne_bytes()); // in any state
    bytes.extend(ports(local, remote));
    for end in [local, remote] {
        let at = bytes.len();
        match end.ip() {
            IpAddr::V4(ip) => bytes.extend(ip.octets()),
            IpAddr::V6(ip) => bytes.extend(ip.octets()),
        }
        bytes.resize(at + 16, 0);
    }
    bytes.extend(LOOPBACK.to_ne_bytes());
    bytes.extend(NO_COOKIE);
    bytes
}

fn ports(local: SocketAddr, remote: SocketAddr) -> [u8; 4] {
    let [[a, b], [c, d]] = [local, remote].map(|end| end.port().to_be_bytes());
    [a, b, c, d]
}

/// Reads an answer. Where nobody has a connection, the kernel may name the one who listens at its port.
fn found(answer: &[u8], local: SocketAddr, remote: SocketAddr) -> Option<Found> {
    let is_socket = answer.get(4..6)? == BY_FAMILY.to_ne_bytes();
    let socket = answer.get(HEADER_BYTES..).filter(|_| is_socket)?;
    let word = |at: usize| Some(u32::from_ne_bytes(*socket.get(at..)?.first_chunk()?));
    let is_it = socket.get(PORTS..PORTS + 4)? == ports(local, remote);
    is_it.then_some(Found { user: word(USER)?, inode: word(INODE)?.into() })
}

/// Returns the owner of the socket with these ends from a table of `proc_net_tcp(5)`.
fn owner_in(sockets: &str, local: SocketAddr, remote: SocketAddr) -> Option<u32> {
    sockets.lines().skip(1).find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let is_it = address(fields.get(1)?)? == local && address(fields.get(2)?)? == remote;
        let found =
            Found { user: fields.get(7)?.parse().ok()?, inode: fields.get(9)?.parse().ok()? };
        found.owner().filter(|_| is_it)
    })
}

/// Parses one end of a socket in these tables: words in memory order, then the port.
fn address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.rsplit_once(':')?;
    let word = |at: usize| Some(u32::from_str_radix(ip.get(at..at + 8)?, 16).ok()?.to_ne_bytes());
    let ip = if ip.len() == 8 {
        IpAddr::from(word(0)?)
    } else {
        let words = [word(0)?, word(8)?, word(16)?, word(24)?];
        IpAddr::from(<[u8; 16]>::try_from(words.concat()).ok()?)
    };
    Some(SocketAddr::new(ip.to_canonical(), u16::from_str_radix(port, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    #[cfg(target_endian = "little")] // as the table below
    fn the_owner_of_a_socket_is_found_by_both_its_ends() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n\
             0: 0100007F:1D10 0100007F:C350 01 00000000:00000000 00:00000000 00000000     0        0 1\n\
             1: 0500007F:C350 0100007F:1D10 01 00000000:00000000 00:00000000 00000000  1001        0 3\n\
             2: 0100007F:C350 0100007F:1D10 01 00000000:00000000 00:00000000 00000000  1000        0 2\n\
             3: 0100007F:C351 0100007F:1D10 05 00000000:00000000 00:00000000 00000000     0        0 0\n";
        let server = "127.0.0.1:7440".parse().unwrap();
        let owner = |client: &str| owner_in(table, client.parse().unwrap(), server);
        assert_eq!(owner("127.0.0.1:50000"), Some(1000));
        assert_eq!(owner("127.0.0.5:50000"), Some(1001), "the same ports, another address");
        assert_eq!(owner("127.0.0.1:50001"), None, "closed: root is not its owner");
        assert_eq!(owner("127.0.0.1:50002"), None);
        let six = "00000000000000000000000001000000:1D10";
        assert_eq!(address(six), Some("[::1]:7440".parse().unwrap()));
        let mapped = "0000000000000000FFFF00000100007F:1D10";
        assert_eq!(address(mapped), Some(server));
        assert_eq!(address("0100007F"), None);
    }

    #[test]
    fn the_kernel_tells_the_owner_of_a_connection_and_of_nothing_else() {
        let Some(kernel) = Owners::new().kernel else {
            eprintln!("SKIPPED: this kernel tells nothing about sockets");
            return;
        };
        let own = rustix::process::geteuid().as_raw();
        for host in ["127.0.0.1:0", "[::1]:0", "[::ffff:127.0.0.1]:0"] {
            let Ok(listener) = TcpListener::bind(host) else {
                eprintln!("SKIPPED: {host} cannot be had");
                continue;
            };
            let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let accepted = listener.accept().unwrap().0;
            let plain = |end: SocketAddr| SocketAddr::new(end.ip().to_canonical(), end.port());
            let near = plain(accepted.local_addr().unwrap());
            let far = plain(accepted.peer_addr().unwrap());
            let owner = |local, remote| ask(&kernel, local, remote).unwrap().map(Found::owner);
            assert_eq!(owner(far, near), Some(Some(own)), "{host}");
            let other = SocketAddr::new(near.ip(), 1);
            assert_eq!(owner(far, other), None, "{host}");
            assert_eq!(owner(near, other), None, "{host}: somebody listens there");
            drop(client);
        }
    }
}
