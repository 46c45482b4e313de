//! Nodes linked over every kind of link, and an owner that serves.
#![allow(dead_code)] // each test program uses a part

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use towline_transfer::{Address, Node, Options, PeerHandle};

pub(crate) const LIMIT: Option<Duration> = Some(Duration::from_secs(60));

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Via {
    Local,
    Tcp,
    Unix,
    Rings,
}

pub(crate) const ALL: [Via; 4] = [Via::Local, Via::Tcp, Via::Unix, Via::Rings];

pub(crate) fn options(via: Via) -> Options {
    Options { rings: via == Via::Rings, ..Options::default() }
}

/// Creates a node that listens where this kind of link needs it.
pub(crate) fn node(via: Via, options: Options) -> Node {
    let node = Node::new(options).unwrap();
    match via {
        Via::Local => {}
        Via::Tcp => {
            node.listen(&Address::parse("tcp://127.0.0.1:0").unwrap()).unwrap();
        }
        Via::Unix | Via::Rings => {
            node.listen(&Address::Unix(socket_path())).unwrap();
        }
    }
    node
}

pub(crate) fn socket_path() -> PathBuf {
    use std::sync::atomic::AtomicU32;
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("towline-transfer-{}-{number}", std::process::id()))
}

/// Links `from` to `to`, which another thread has to be serving.
pub(crate) fn link(via: Via, from: &Node, to: &Node) -> PeerHandle {
    match via {
        Via::Local => Node::join(from, to).unwrap().0,
        _ => from.connect(&to.addresses()[0]).unwrap(),
    }
}

/// A thread that makes progress for a node until it is dropped.
pub(crate) struct Served(Arc<AtomicBool>, Option<JoinHandle<()>>);

pub(crate) fn serve(node: &Node) -> Served {
    let (stop, node) = (Arc::new(AtomicBool::new(false)), node.clone());
    let stopped = stop.clone();
    let thread = std::thread::spawn(move || {
        while !stopped.load(Ordering::Relaxed) {
            node.serve(Duration::from_millis(20)).unwrap();
        }
    });
    Served(stop, Some(thread))
}

impl Drop for Served {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
        if let Some(thread) = self.1.take() {
            let _ = thread.join();
        }
    }
}

pub(crate) fn bytes(length: usize, seed: u8) -> Vec<u8> {
    (0..length).map(|i| (i * 31 + i / 253 + usize::from(seed) * 97) as u8).collect()
}
