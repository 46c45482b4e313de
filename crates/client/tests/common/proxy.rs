//! A proxy that cuts connections at random points.

use super::Random;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Forwards connections and cuts them.
pub(crate) struct Proxy {
    /// Where it listens, if that is TCP.
    pub(crate) port: u16,
    pub(crate) cuts: Arc<AtomicU64>,
    /// While set, nothing is cut.
    pub(crate) calm: Arc<AtomicBool>,
}

/// How a connection through the proxy ends.
struct Fate {
    /// Bytes until it is cut.
    left: AtomicU64,
    /// Which bytes count: those from the client (1), those from the server (2), or both (3).
    counted: u64,
    /// It ends by a reset, which discards unread data, instead of an orderly end.
    reset: bool,
    cut: AtomicBool,
}

/// A connection of any kind.
type Stream = UnixStream;

fn stream(connection: impl Into<OwnedFd>) -> Stream {
    connection.into().into()
}

impl Proxy {
    /// Forwards connections from another TCP port.
    pub(crate) fn start(target: u16, seed: u64, most: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let next = move || {
            let near = listener.accept().unwrap().0;
            let far = TcpStream::connect(("127.0.0.1", target)).ok()?;
            let _ = (near.set_nodelay(true), far.set_nodelay(true));
            Some([near, far].map(stream))
        };
        Self { port, ..Self::between(next, seed, most) }
    }

    /// Forwards connections from a new Unix socket.
    pub(crate) fn start_unix(socket: &Path, target: PathBuf, seed: u64, most: u64) -> Self {
        let listener = UnixListener::bind(socket).unwrap();
        let next = move || {
            let near = listener.accept().unwrap().0;
            Some([near, UnixStream::connect(&target).ok()?])
        };
        Self::between(next, seed, most)
    }

    /// Forwards between each next pair of connections, until there is none.
    fn between(
        mut next: impl FnMut() -> Option<[Stream; 2]> + Send + 'static,
        seed: u64,
        most: u64,
    ) -> Self {
        let (cuts, calm) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let proxy = Self { port: 0, cuts: cuts.clone(), calm: calm.clone() };
        let mut random = Random::new(seed);
        std::thread::spawn(move || {
            while let Some(pair) = next() {
                let fate = Arc::new(Fate {
                    left: AtomicU64::new(random.any_size(most)),
                    counted: 1 + random.below(3),
                    reset: random.below(2) == 0,
                    cut: AtomicBool::new(false),
                });
                let [near, far] = pair.map(Arc::new);
                for (from, to, bit) in [(near.clone(), far.clone(), 1), (far, near, 2)] {
                    let (fate, cuts, calm) = (fate.clone(), cuts.clone(), calm.clone());
                    std::thread::spawn(move || forward(&from, &to, bit, &fate, &cuts, &calm));
                }
            }
        });
        proxy
    }
}

fn forward(
    mut from: &Stream,
    mut to: &Stream,
    bit: u64,
    fate: &Fate,
    cuts: &AtomicU64,
    calm: &AtomicBool,
) {
    let mut buffer = [0; 16384];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        let mut pass = count;
        if fate.counted & bit != 0 && !calm.load(Ordering::Relaxed) {
            let left = fate.left.load(Ordering::Relaxed);
            pass = count.min(left as usize);
            fate.left.store(left - pass as u64, Ordering::Relaxed);
        }
        if to.write_all(&buffer[..pass]).is_err() {
            break;
        }
        if pass < count {
            fate.cut.store(true, Ordering::Relaxed);
            cuts.fetch_add(1, Ordering::Relaxed);
            break;
        }
    }
    // Both directions end together, in the middle of whatever was under way.
    if fate.cut.load(Ordering::Relaxed) && fate.reset {
        for socket in [from, to] {
            let _ = rustix::net::sockopt::set_socket_linger(socket, Some(Duration::ZERO));
            let _ = socket.shutdown(Shutdown::Read);
        }
    } else {
        let _ = from.shutdown(Shutdown::Both);
        let _ = to.shutdown(Shutdown::Both);
    }
}
