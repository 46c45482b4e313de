//! Server addresses: parsing, listening, connecting.

use crate::congestion::Withheld;
use crate::socket::wait;
use crate::socket_file::SocketFile;
use crate::{Link, LinkKind};
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{SocketAddrUnix, SocketType, sockopt};
use socket2::{Domain, Socket, Type};
use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use towline_wire::limits::PEER_SILENCE_SECONDS;

/// Send buffer of a server's Unix socket. The kernel's default of 208 KiB counts its own overhead (for
/// which it doubles this number), so it holds less than a longest message, and server and client have to
/// take turns for each. Larger buffers no longer fit the processor's caches.
const UNIX_SEND_BYTES: usize = 256 * 1024;

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Address {
    /// TCP.
    Tcp(SocketAddr),
    /// Unix socket; clients may move to shared memory over it.
    Unix(PathBuf),
    /// Unix socket in the abstract name space of `unix(7)`, which leaves no file.
    Abstract(String),
}

impl Address {
    /// Parses `tcp://HOST:PORT` or `unix:///PATH`.
    ///
    /// # Errors
    /// Returns a sentence that says what is wrong.
    pub fn parse(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix://") {
            if !path.starts_with('/') {
                return Err(format!(
                    "address \"{text}\": path is not absolute, expected unix:///PATH"
                ));
            }
            return Ok(Self::Unix(path.into()));
        }
        let expected = || format!("address \"{text}\": expected tcp://HOST:PORT or unix:///PATH");
        let host = text.strip_prefix("tcp://").ok_or_else(expected)?;
        let port = host.rsplit_once(':').map(|(_, port)| port.parse::<u16>());
        if !matches!(port, Some(Ok(_))) {
            return Err(expected());
        }
        let mut found =
            host.to_socket_addrs().map_err(|error| format!("address \"{text}\": {error}"))?;
        found
            .next()
            .map(Self::Tcp)
            .ok_or_else(|| format!("address \"{text}\": host has no address"))
    }

    /// True when only this machine can reach the address.
    #[must_use]
    pub fn is_local(&self) -> bool {
        match self {
            Self::Tcp(address) => address.ip().is_loopback(),
            Self::Unix(_) | Self::Abstract(_) => true,
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "tcp://{address}"),
            Self::Unix(path) => write!(f, "unix://{}", path.display()),
            Self::Abstract(name) => write!(f, "unix://@{name}"),
        }
    }
}

/// A listening socket. Dropping it removes the file of a Unix socket that it created.
#[derive(Debug)]
#[non_exhaustive]
pub enum Listener {
    /// TCP, and the congestion control for connections from other machines.
    Tcp(TcpListener, Option<Withheld>),
    /// Unix, and the file that it created.
    Unix(UnixListener, Option<SocketFile>),
}

impl Listener {
    /// Listens. Replaces a Unix socket left behind by a dead server, but no other file.
    ///
    /// # Errors
    /// `AddrInUse` when a running server has the address, or the path is a file of another kind; what
    /// `bind(2)` says.
    pub fn bind(address: &Address) -> io::Result<Self> {
        let listener = match address {
            Address::Tcp(address) => Self::tcp(bind_tcp(*address)?),
            Address::Unix(path) => {
                let (listener, file) = SocketFile::bind(path)?;
                Self::Unix(listener, file)
            }
            Address::Abstract(name) => {
                let name = std::os::unix::net::SocketAddr::from_abstract_name(name)?;
                Self::Unix(UnixListener::bind_addr(&name)?, None)
            }
        };
        listener.set_nonblocking()?;
        // The backlog of 128 that std uses is too short when hundreds of clients start at once.
        rustix::net::listen(listener.fd(), 4096)?;
        Ok(listener)
    }

    /// Takes a listening socket that a service manager passed.
    ///
    /// # Errors
    /// The descriptor is not a listening TCP or Unix stream socket.
    pub fn from_fd(fd: OwnedFd) -> io::Result<Self> {
        if !rustix::net::sockopt::socket_acceptconn(&fd)? {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it does not listen"));
        }
        if sockopt::socket_type(&fd)? != SocketType::STREAM {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a stream socket"));
        }
        let listener = match rustix::net::sockopt::socket_domain(&fd)? {
            rustix::net::AddressFamily::UNIX => Self::Unix(UnixListener::from(fd), None),
            rustix::net::AddressFamily::INET | rustix::net::AddressFamily::INET6 => {
                Self::tcp(TcpListener::from(fd))
            }
            _ => return Err(io::ErrorKind::Unsupported.into()),
        };
        listener.set_nonblocking()?;
        Ok(listener)
    }

    fn tcp(listener: TcpListener) -> Self {
        let withheld = Withheld::from(&listener);
        Self::Tcp(listener, withheld)
    }

    fn set_nonblocking(&self) -> io::Result<()> {
        match self {
            Self::Tcp(listener, _) => listener.set_nonblocking(true),
            Self::Unix(listener, _) => listener.set_nonblocking(true),
        }
    }

    /// Returns the address it listens on, with the port that the kernel chose. For an abstract Unix
    /// socket this is an [`Address::Unix`] with an empty path.
    ///
    /// # Errors
    /// What `getsockname(2)` says.
    pub fn address(&self) -> io::Result<Address> {
        match self {
            Self::Tcp(listener, _) => listener.local_addr().map(Address::Tcp),
            Self::Unix(listener, _) => {
                let address = listener.local_addr()?;
                Ok(match address.as_abstract_name() {
                    Some(name) => Address::Abstract(String::from_utf8_lossy(name).into_owned()),
                    None => Address::Unix(address.as_pathname().unwrap_or("".as_ref()).into()),
                })
            }
        }
    }

    /// Returns the descriptor to watch.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(listener, _) => listener.as_fd(),
            Self::Unix(listener, _) => listener.as_fd(),
        }
    }

    /// Accepts one connection without waiting.
    ///
    /// # Errors
    /// `WouldBlock` when no connection is waiting; what `accept(2)` says.
    pub fn accept(&self) -> io::Result<Link> {
        match self {
            Self::Tcp(listener, withheld) => {
                let (stream, _) = listener.accept()?;
                stream.set_nonblocking(true)?;
                tune(&stream, withheld.as_ref(), Side::Server)?;
                Ok(Link::Socket(stream.into(), LinkKind::Tcp))
            }
            Self::Unix(listener, _) => {
                let (stream, _) = listener.accept()?;
                stream.set_nonblocking(true)?;
                // With a smaller buffer the connection is slower, but it works.
                let _ = sockopt::set_socket_send_buffer_size(&stream, UNIX_SEND_BYTES);
                Ok(Link::Socket(stream.into(), LinkKind::Unix))
            }
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Self::Unix(_, Some(file)) = self {
            file.remove();
        }
    }
}

/// Binds, retrying for two seconds while the address is in use: after a server was killed, the kernel
/// closes its event loop's sockets only a little after the process is gone.
fn bind_tcp(address: SocketAddr) -> io::Result<TcpListener> {
    const TRIES: u32 = 40;
    const PAUSE: Duration = Duration::from_millis(50);
    for _ in 0..TRIES {
        match TcpListener::bind(address) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => std::thread::sleep(PAUSE),
            bound => return bound,
        }
    }
    TcpListener::bind(address)
}

/// Makes small messages leave at once. For peers on other machines, restores the default congestion
/// control and enables keepalive.
fn tune(stream: &TcpStream, withheld: Option<&Withheld>, side: Side) -> io::Result<()> {
    stream.set_nodelay(true)?;
    if ends_within_machine(stream).is_some() {
        return Ok(());
    }
    if let Some(withheld) = withheld {
        withheld.give(stream);
    }
    notice_silence(stream, side)
}

/// One end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // there are two
pub enum Side {
    /// The end that accepted the connection.
    Server,
    /// The end that connected.
    Client,
}

/// Enables TCP keepalive, so that the kernel notices when a silent peer's machine has lost power or its
/// network. A client whose server is gone then reconnects; a session whose client is gone ends some time
/// later, and its locks with it.
///
/// For a client, the same limit applies to data that it has sent and the server has not acknowledged.
/// Not for a server: a client that is stopped while a reply is on its way takes no data, but is alive.
/// There the kernel's own limit of about fifteen minutes applies.
///
/// # Errors
/// What `setsockopt(2)` says.
pub fn notice_silence(stream: &TcpStream, side: Side) -> io::Result<()> {
    let limit = Duration::from_secs(PEER_SILENCE_SECONDS);
    sockopt::set_tcp_keepidle(stream, limit / 2)?;
    sockopt::set_tcp_keepintvl(stream, limit / 6)?;
    sockopt::set_tcp_keepcnt(stream, 3)?;
    sockopt::set_socket_keepalive(stream, true)?;
    if side == Side::Client {
        sockopt::set_tcp_user_timeout(stream, limit.as_millis() as u32)?;
    }
    Ok(())
}

/// Connects over TCP, trying each address of the host. The socket is in blocking mode.
///
/// # Errors
/// The host has no address, or the error of the last address tried.
pub fn connect_stream(place: impl ToSocketAddrs, limit: Duration) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "host has no address");
    for address in place.to_socket_addrs()? {
        match connect_to(address, limit) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn connect_to(address: SocketAddr, limit: Duration) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    let withheld = Withheld::from(&socket);
    connect_within(&socket, address, limit)?;
    let stream = TcpStream::from(socket);
    // If nothing listens on a port of the range for outgoing connections, the kernel may connect a
    // socket to itself. That is not a server.
    if stream.local_addr()? == stream.peer_addr()? {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    tune(&stream, withheld.as_ref(), Side::Client)?;
    Ok(stream)
}

fn connect_within(socket: &Socket, address: SocketAddr, limit: Duration) -> io::Result<()> {
    let until = Instant::now() + limit;
    socket.set_nonblocking(true)?;
    match socket.connect(&address.into()) {
        Err(error) if error.raw_os_error() == Some(Errno::INPROGRESS.raw_os_error()) => loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            wait(socket.as_fd(), PollFlags::OUT, Some(left))?;
            if let Some(error) = socket.take_error()? {
                return Err(error);
            }
            if socket.peer_addr().is_ok() {
                break;
            }
        },
        connected => connected?,
    }
    socket.set_nonblocking(false)
}

/// Connects over TCP like [`connect_stream`], and returns the link.
///
/// # Errors
/// See [`connect_stream`].
pub fn connect_tcp(host: &str, port: u16, limit: Duration) -> io::Result<Link> {
    Ok(Link::Socket(connect_stream((host, port), limit)?.into(), LinkKind::Tcp))
}

/// Connects to a Unix socket. The socket is in blocking mode. A server that accepts nobody, so that its queue
/// is full, is waited for up to `limit`.
///
/// # Errors
/// What `connect(2)` says; `TimedOut` at the limit.
pub fn connect_unix_stream(path: &Path, limit: Duration) -> io::Result<UnixStream> {
    connect_local(&SocketAddrUnix::new(path)?, limit)
}

/// Connects to a Unix socket like [`connect_unix_stream`], and returns the link.
///
/// # Errors
/// See [`connect_unix_stream`].
pub fn connect_unix(path: &Path, limit: Duration) -> io::Result<Link> {
    Ok(Link::Socket(connect_unix_stream(path, limit)?.into(), LinkKind::Unix))
}

/// Connects over a Unix socket in the abstract name space; otherwise like [`connect_unix`].
///
/// # Errors
/// See [`connect_unix`]; `ConnectionRefused` when no socket has this name in this network namespace.
pub fn connect_abstract(name: &str, limit: Duration) -> io::Result<Link> {
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
    Ok(Link::Socket(connect_local(&address, limit)?.into(), LinkKind::Unix))
}

fn connect_local(address: &SocketAddrUnix, limit: Duration) -> io::Result<UnixStream> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    let until = Instant::now() + limit;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        // The kernel applies it to the wait for a place in the queue, too. Zero would be no limit.
        socket.set_write_timeout(Some(left.max(Duration::from_micros(1))))?;
        match rustix::net::connect(&socket, address) {
            Ok(()) => break,
            // With a time limit, signals end the wait even if their handlers let calls go on.
            Err(Errno::INTR) if !left.is_zero() => {}
            Err(Errno::AGAIN | Errno::INTR) => {
                let what = format!("the server accepts no connection for {limit:?}");
                return Err(io::Error::new(io::ErrorKind::TimedOut, what));
            }
            Err(other) => return Err(other.into()),
        }
    }
    socket.set_write_timeout(None)?;
    Ok(UnixStream::from(OwnedFd::from(socket)))
}

/// True when both ends of a TCP connection are on this machine.
#[must_use]
pub fn is_same_host(link: &Link) -> bool {
    matches!(ends_on_this_host(link), Ok(Some(_)))
}

/// True when the addresses of both ends of a TCP connection tell that they are on this machine. A client that has bound
/// its end to another address of the machine is not recognized, other than by [`is_same_host`].
#[must_use]
pub fn is_within_machine(link: &Link) -> bool {
    let fd = link.fd().filter(|_| link.kind() == LinkKind::Tcp);
    fd.and_then(ends_within_machine).is_some()
}

/// Returns the near and the far end of a TCP connection if both are on this machine, whatever addresses of the
/// machine the client has chosen. IPv4 addresses are returned as IPv4, also for IPv6 sockets.
///
/// # Errors
/// `NotConnected` if nobody knows any more where the far end was: a connection that was reset has none, though what was sent
/// before can still be read.
pub fn ends_on_this_host(link: &Link) -> io::Result<Option<(SocketAddr, SocketAddr)>> {
    let Some(fd) = link.fd().filter(|_| link.kind() == LinkKind::Tcp) else { return Ok(None) };
    let (near, far) = ends(fd)?;
    let is_here = are_within_machine(plain(near), plain(far)) || is_own(far);
    Ok(is_here.then_some((plain(near), plain(far))))
}

/// Returns both ends if their addresses alone tell that they are on this machine.
fn ends_within_machine(socket: impl AsFd) -> Option<(SocketAddr, SocketAddr)> {
    let (near, far) = ends(socket).ok()?;
    Some((plain(near), plain(far))).filter(|(near, far)| are_within_machine(*near, *far))
}

fn ends(socket: impl AsFd) -> io::Result<(SocketAddr, SocketAddr)> {
    let near = SocketAddr::try_from(rustix::net::getsockname(&socket)?)?;
    let far = rustix::net::getpeername(&socket)?.ok_or(io::ErrorKind::NotConnected)?;
    Ok((near, SocketAddr::try_from(far)?))
}

fn plain(end: SocketAddr) -> SocketAddr {
    SocketAddr::new(end.ip().to_canonical(), end.port())
}

fn are_within_machine(near: SocketAddr, far: SocketAddr) -> bool {
    far.ip().is_loopback() || far.ip() == near.ip()
}

/// Returns true if an address belongs to this machine: only then can a socket have it. Where every socket can have
/// every address (`net.ipv4.ip_nonlocal_bind`), or none can be made, it returns true, so that nobody is trusted who
/// may be on this machine.
fn is_own(mut address: SocketAddr) -> bool {
    if address.ip().to_canonical().is_ipv4() {
        address = plain(address);
    }
    address.set_port(0);
    !UdpSocket::bind(address).is_err_and(|error| error.kind() == io::ErrorKind::AddrNotAvailable)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn only_sockets_that_listen_are_taken() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connected = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (one, _other) = UnixStream::pair().unwrap();
        for fd in [OwnedFd::from(connected), OwnedFd::from(one)] {
            let Err(error) = Listener::from_fd(fd) else { panic!("nobody can connect to it") };
            assert!(error.to_string().contains("does not listen"), "{error}");
        }
        assert!(Listener::from_fd(listener.into()).is_ok());
        // It keeps the bounds of messages, and drops what does not fit into the buffer of one receive.
        let (family, kind) = (rustix::net::AddressFamily::UNIX, SocketType::SEQPACKET);
        let packets = rustix::net::socket(family, kind, None).unwrap();
        let name = format!("towline-packets-{}", std::process::id());
        let name = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
        rustix::net::bind(&packets, &name).unwrap();
        rustix::net::listen(&packets, 1).unwrap();
        let Err(error) = Listener::from_fd(packets) else { panic!("not a stream") };
        assert!(error.to_string().contains("not a stream"), "{error}");
    }

    /// A client may bind its socket to any address of its machine.
    #[test]
    fn a_client_is_on_this_machine_whatever_address_it_has() {
        let found = UdpSocket::bind("0.0.0.0:0").and_then(|socket| {
            // Sends nothing: the kernel chooses the address from which it would.
            socket.connect("198.51.100.1:9")?;
            socket.local_addr()
        });
        let Ok(own) = found else {
            return eprintln!("SKIPPED: this machine has no address but loopback");
        };
        assert!(is_own(own));
        assert!(is_own(format!("[::ffff:{}]:9", own.ip()).parse().unwrap()), "for an IPv6 socket");
        assert!(!is_own("198.51.100.1:9".parse().unwrap()), "that of documentation");
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        client.bind(&SocketAddr::new(own.ip(), 0).into()).unwrap();
        client.connect(&listener.local_addr().unwrap().into()).unwrap();
        let link = Link::Socket(listener.accept().unwrap().0.into(), LinkKind::Tcp);
        let (near, far) = ends_on_this_host(&link).unwrap().unwrap();
        assert!(near.ip().is_loopback() && far.ip() == own.ip(), "{near} {far}");
    }

    #[test]
    fn a_listener_says_where_it_listens() {
        let name = format!("towline-listener-{}", std::process::id());
        let abstract_one = Address::Abstract(name);
        assert_eq!(Listener::bind(&abstract_one).unwrap().address().unwrap(), abstract_one);
        let path = std::env::temp_dir().join(format!("towline-listener-{}", std::process::id()));
        let named = Address::Unix(path);
        assert_eq!(Listener::bind(&named).unwrap().address().unwrap(), named);
        let any = Address::Tcp("127.0.0.1:0".parse().unwrap());
        let Address::Tcp(got) = Listener::bind(&any).unwrap().address().unwrap() else { panic!() };
        assert_ne!(got.port(), 0);
    }

    /// Otherwise a name from elsewhere could make a node wait for ever.
    #[test]
    fn who_is_never_accepted_gives_up() {
        let path = std::env::temp_dir().join(format!("towline-full-{}", std::process::id()));
        let listener = UnixListener::bind(&path).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let limit = Duration::from_millis(50);
        let first = connect_unix(&path, limit).unwrap();
        let second = connect_unix(&path, limit).unwrap_err();
        assert_eq!(second.kind(), io::ErrorKind::TimedOut, "{second}");
        // Nor does a server that starts wait for it.
        let refused = Listener::bind(&Address::Unix(path.clone())).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::AddrInUse, "{refused}");
        drop(listener.accept().unwrap());
        connect_unix(&path, limit).unwrap();
        drop(first);
        std::fs::remove_file(path).unwrap();
    }

    /// With a time limit, `connect(2)` fails with `EINTR` then.
    #[test]
    fn a_process_that_is_stopped_while_it_connects_goes_on_with_it() {
        let path = std::env::temp_dir().join(format!("towline-stopped-{}", std::process::id()));
        let listener = UnixListener::bind(&path).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let _first = connect_unix(&path, Duration::from_secs(60)).unwrap();
        let stops = "sleep 0.1; kill -STOP $PPID; sleep 0.1; kill -CONT $PPID; sleep 0.1";
        let mut stopping = Command::new("sh").args(["-c", stops]).spawn().unwrap();
        let second = std::thread::spawn({
            let path = path.clone();
            move || connect_unix(&path, Duration::from_secs(60))
        });
        stopping.wait().unwrap();
        listener.accept().unwrap();
        second.join().unwrap().unwrap();
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_silent_peer_is_asked_in_time() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        notice_silence(&stream, Side::Server).unwrap();
        assert!(sockopt::socket_keepalive(&stream).unwrap());
        let asks =
            sockopt::tcp_keepintvl(&stream).unwrap() * sockopt::tcp_keepcnt(&stream).unwrap();
        let noticed = sockopt::tcp_keepidle(&stream).unwrap() + asks;
        assert_eq!(noticed, Duration::from_secs(PEER_SILENCE_SECONDS));
        assert_eq!(sockopt::tcp_user_timeout(&stream).unwrap(), 0, "a stopped client lives");
        notice_silence(&stream, Side::Client).unwrap();
        let limit = sockopt::tcp_user_timeout(&stream).unwrap();
        assert_eq!(u64::from(limit), PEER_SILENCE_SECONDS * 1000);
    }
}
