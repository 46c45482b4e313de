//! No waiting task or thread is forgotten: futures whose wakers run arbitrary code at once, and
//! threads whose leader panics.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod common;

use common::{CREATE, eventually, port, setup};
use std::future::Future;
use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;
use towline_client::{Client, Error, File, Lock, Operation, Options, Transport};
use towline_server::EngineWish;
use towline_wire::request::lock;

/// Long enough for any machine: a longer wait would never end.
const PATIENCE: Duration = Duration::from_secs(60);

fn whole(kind: u8) -> Lock {
    Lock { family: lock::OPEN_FILE, kind, owner: 0, start: 0, length: 0 }
}

/// An executor of one task, which polls it in the thread that wakes it, at once.
struct AtOnce {
    operation: Mutex<Option<Operation<()>>>,
    finished: mpsc::Sender<Result<(), Error>>,
}

impl AtOnce {
    fn run(self: &Arc<Self>) {
        let waker = Waker::from(self.clone());
        // A wake-up during the poll need not poll again.
        let Ok(mut operation) = self.operation.try_lock() else { return };
        let Some(polled) = operation.as_mut() else { return };
        if let Poll::Ready(result) = Pin::new(polled).poll(&mut Context::from_waker(&waker)) {
            operation.take();
            self.finished.send(result).unwrap();
        }
    }
}

impl Wake for AtOnce {
    fn wake(self: Arc<Self>) {
        self.run();
    }
}

#[test]
fn a_waker_may_run_what_it_wakes() {
    let setup = setup(EngineWish::Automatic);
    let (client, other) = (setup.client(), setup.client());
    let open = |client: &Client| {
        let root = client.attach(b"mem").unwrap();
        root.open(b"file", CREATE, 0o600).unwrap()
    };
    let (file, held) = (open(&client), open(&other));
    held.lock(&whole(lock::EXCLUSIVE), false).unwrap();
    let (finished, outcome) = mpsc::channel();
    let waits = file.start_lock(&whole(lock::EXCLUSIVE)).unwrap();
    let task = Arc::new(AtOnce { operation: Mutex::new(Some(waits)), finished });
    task.run();
    // A thread that waits for something else receives the answer and wakes the task.
    let leads = std::thread::spawn(move || {
        while outcome.try_recv().is_err() {
            file.stat().unwrap();
        }
    });
    held.lock(&whole(lock::UNLOCK), false).unwrap();
    let start = std::time::Instant::now();
    while !leads.is_finished() {
        assert!(start.elapsed() < PATIENCE, "the one who woke it waits for itself");
        std::thread::sleep(Duration::from_millis(5));
    }
    leads.join().unwrap();
}

/// A waker that panics, and counts how often.
#[derive(Default)]
struct Panics(AtomicU64);

impl Wake for Panics {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
        panic!("a mistake of who waits");
    }
}

#[test]
fn a_waker_that_panics_ends_no_call_of_others() {
    let setup = setup(EngineWish::Automatic);
    let (client, other) = (setup.client(), setup.client());
    let open = |client: &Client| {
        let root = client.attach(b"mem").unwrap();
        root.open(b"file", CREATE, 0o600).unwrap()
    };
    let (file, held) = (open(&client), open(&other));
    held.lock(&whole(lock::EXCLUSIVE), false).unwrap();
    let mut waits = file.start_lock(&whole(lock::EXCLUSIVE)).unwrap();
    let panics = Arc::new(Panics::default());
    let waker = Waker::from(panics.clone());
    assert!(Pin::new(&mut waits).poll(&mut Context::from_waker(&waker)).is_pending());
    held.lock(&whole(lock::UNLOCK), false).unwrap();
    eventually("it was never woken", || {
        file.stat().unwrap();
        panics.0.load(Ordering::Relaxed) > 0
    });
    waits.wait().unwrap();
    file.stat().unwrap();
}

/// Forwards connections to a server; returns its port, and the ends of the connections.
fn forwarder(target: u16) -> (u16, Arc<Mutex<Vec<TcpStream>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let ends = Arc::new(Mutex::new(Vec::new()));
    let kept = ends.clone();
    std::thread::spawn(move || {
        for near in listener.incoming().flatten() {
            let far = TcpStream::connect(("127.0.0.1", target)).unwrap();
            for (from, to) in [(&near, &far), (&far, &near)] {
                let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                std::thread::spawn(move || io::copy(&mut from, &mut to));
            }
            kept.lock().unwrap().extend([near, far]);
        }
    });
    (port, ends)
}

/// While set, keeping a new descriptor panics.
static PANICS: AtomicBool = AtomicBool::new(false);

fn hide(fd: OwnedFd) -> io::Result<OwnedFd> {
    assert!(!PANICS.load(Ordering::Relaxed), "a mistake of who receives");
    Ok(fd)
}

#[test]
fn nobody_waits_for_a_leader_that_panicked() {
    let setup = setup(EngineWish::Automatic);
    let (port, ends) = forwarder(port(&setup.transports));
    let mut options = Options::default();
    options.hide = hide;
    let client = Client::connect(&Transport::Tcp("127.0.0.1".into(), port), options).unwrap();
    let other = setup.client();
    let held = other.attach(b"mem").unwrap().open(b"file", CREATE, 0o600).unwrap();
    held.lock(&whole(lock::EXCLUSIVE), false).unwrap();
    let root = client.attach(b"mem").unwrap();
    let files: Vec<File> = (0..2).map(|_| root.open(b"file", CREATE, 0o600).unwrap()).collect();
    let asked = |file: &File| file.start_lock(&whole(lock::EXCLUSIVE)).unwrap();
    let waits: Vec<Operation<()>> = files.iter().map(asked).collect();
    PANICS.store(true, Ordering::Relaxed);
    let threads: Vec<_> =
        waits.into_iter().map(|waits| std::thread::spawn(move || waits.wait())).collect();
    let cut = || {
        for end in ends.lock().unwrap().drain(..) {
            let _ = end.shutdown(Shutdown::Both);
        }
    };
    cut();
    eventually("a thread waits for ever", || threads.iter().all(|thread| thread.is_finished()));
    let (panicked, told): (Vec<_>, Vec<_>) =
        threads.into_iter().map(|thread| thread.join()).partition(Result::is_err);
    assert_eq!((panicked.len(), told.len()), (1, 1));
    let error = told.into_iter().next().unwrap().unwrap().unwrap_err();
    assert!(error.to_string().contains("panicked"), "{error}");
    let error = root.stat().unwrap_err();
    assert!(error.to_string().contains("panicked"), "{error}");
    // Otherwise the server would wait for this when it stops.
    cut();
    held.lock(&whole(lock::UNLOCK), false).unwrap();
}
