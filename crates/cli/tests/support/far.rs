//! A proxy that makes a server look far away: its answers to the first messages take long, and others are held back until
//! enough requests are under way together. Who waits for one answer before making the next request never gets there.

use super::{TOWLINE, World};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;
use towline_wire::limits::HEADER_BYTES;
use towline_wire::request::parse_compound;
use towline_wire::{Header, Kind, Request};

/// How much longer it takes to connect, and to attach an export.
const BEGINNING: Duration = Duration::from_millis(20);

/// Tells which requests are meant.
pub(crate) type Meant = fn(&[Request<'_>]) -> bool;

/// Runs a command with the export `dir` behind the proxy at `$AT`.
pub(crate) fn far_away(world: &World, far: &Far, program: &[&str]) -> Output {
    let at = world.local("at");
    let prefix = format!("{}={}", at.display(), far.url("dir"));
    let mut command = Command::new(TOWLINE);
    command.args(["run", "--at", &prefix, "--"]).args(program).stdin(Stdio::null());
    command.env("AT", at).env("HERE", &world.path).output().unwrap()
}

/// The proxy.
pub(crate) struct Far {
    port: u16,
    state: Arc<State>,
}

struct State {
    meant: Meant,
    together: usize,
    counts: Mutex<Counts>,
    changed: Condvar,
}

#[derive(Default)]
struct Counts {
    /// Requests seen, other than closes and the like, which nobody waits for.
    requests: usize,
    /// Those that were meant.
    meant: usize,
    /// Not enough of them came while answers were held back.
    in_vain: bool,
}

impl Far {
    /// From the first request that is meant on, answers are held back until there are `together` of them.
    pub(crate) fn new(world: &World, together: usize, meant: Meant) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (counts, changed) = (Mutex::default(), Condvar::new());
        let state = Arc::new(State { meant, together, counts, changed });
        let (server, shared) = (world.address().to_owned(), state.clone());
        std::thread::spawn(move || {
            for near in listener.incoming().map(Result::unwrap) {
                // Fails while the server is away.
                let Ok(far) = TcpStream::connect(&server) else { continue };
                near.set_nodelay(true).unwrap();
                far.set_nodelay(true).unwrap();
                let (near, far) = (Arc::new(near), Arc::new(far));
                let (state, from, to) = (shared.clone(), near.clone(), far.clone());
                std::thread::spawn(move || state.requests(&from, &to));
                let state = shared.clone();
                std::thread::spawn(move || state.answers(&far, &near));
            }
        });
        Self { port, state }
    }

    /// Returns a URL that leads through the proxy, and stays there although the server is on this machine.
    pub(crate) fn url(&self, path: &str) -> String {
        format!("towline+tcp://127.0.0.1:{}/{path}", self.port)
    }

    /// Returns whether those that were meant came together.
    pub(crate) fn came_together(&self) -> bool {
        let counts = self.state.counts.lock().unwrap();
        !counts.in_vain && counts.meant >= self.state.together
    }

    /// Returns how many requests were made that somebody waits for; fails if those that were meant did not come
    /// together.
    pub(crate) fn requests(&self) -> usize {
        let counts = self.state.counts.lock().unwrap();
        let (came, wanted) = (counts.meant, self.state.together);
        assert!(!counts.in_vain && came >= wanted, "{came} requests came together, not {wanted}");
        counts.requests
    }
}

impl State {
    /// Passes on what a client sends, message by message.
    fn requests(&self, mut from: &TcpStream, mut to: &TcpStream) {
        let mut header = [0; HEADER_BYTES];
        while from.read_exact(&mut header).is_ok() {
            let parsed = Header::parse(&header).unwrap();
            let body = parsed.body_bytes as usize;
            let mut rest = vec![0; body + parsed.payload_bytes as usize];
            if from.read_exact(&mut rest).is_err() {
                break;
            }
            if parsed.kind == Kind::Hello {
                std::thread::sleep(BEGINNING);
            }
            if parsed.kind == Kind::Request {
                let requests = parse_compound(&rest[..body]).unwrap();
                if matches!(requests[..], [Request::Attach { .. }, ..]) {
                    std::thread::sleep(BEGINNING);
                }
                self.count(&requests);
            }
            if to.write_all(&[&header[..], &rest].concat()).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
    }

    fn count(&self, requests: &[Request<'_>]) {
        let mut counts = self.counts.lock().unwrap();
        let is_waited_for = !matches!(
            requests,
            [Request::Close { .. }] | [Request::Bind { bound: 0, .. }] | [Request::HandOver { .. }]
        );
        counts.requests += usize::from(is_waited_for);
        counts.meant += usize::from((self.meant)(requests));
        self.changed.notify_all();
    }

    /// Passes on what a server sends, or holds it back.
    fn answers(&self, mut from: &TcpStream, mut to: &TcpStream) {
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            let counts = self.counts.lock().unwrap();
            let is_held =
                |counts: &mut Counts| !counts.in_vain && (1..self.together).contains(&counts.meant);
            // Only a test that fails waits that long.
            let limit = Duration::from_secs(60);
            let (mut counts, waited) =
                self.changed.wait_timeout_while(counts, limit, is_held).unwrap();
            counts.in_vain |= waited.timed_out();
            drop(counts);
            if to.write_all(&buffer[..count]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
    }
}
