//! Closes remote files that nobody has open any more.
//!
//! The kernel tells, through inotify, when the last descriptor of a placeholder is closed, however
//! that came: by a process that shared it with others, or that was killed.

use super::directory::RunDirectory;
use super::reach::Notices;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify;
use std::ffi::CStr;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use towline_client::Client;
use towline_instance::{Entry, State};

/// How long to let events gather: a program that opens and closes much would wake us for each.
const GATHER: Duration = Duration::from_millis(2);

/// How often, and how many times after the last event, the answers of servers are looked for.
const SETTLE: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
const SETTLING: u32 = 50;

/// How long a file stays open whose holder was killed before changes of it were answered. They are on
/// their way in the holder's connection, and would find the file closed.
const LINGER: Duration = Duration::from_secs(5);

/// The thread that does it.
pub(super) struct Keeper {
    thread: JoinHandle<()>,
    stop: Arc<OwnedFd>,
}

impl Keeper {
    /// Starts it. Where that fails, what is shared among processes stays open until the end of the
    /// run.
    pub(super) fn start(
        directory: &RunDirectory,
        state: State,
        clients: Vec<Client>,
    ) -> io::Result<Self> {
        let watch = || {
            let events =
                inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)?;
            let closed = inotify::WatchFlags::CLOSE_NOWRITE | inotify::WatchFlags::CLOSE_WRITE;
            inotify::add_watch(&events, directory.placeholders(), closed)?;
            let stop = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)?;
            Ok::<_, io::Error>((events, Arc::new(stop)))
        };
        let (events, stop) = watch().inspect_err(|error| {
            state.unkept();
            log::warn!("cannot watch for closed files: {error}");
        })?;
        let stopped = stop.clone();
        let notices = Notices::new(&directory.placeholders());
        let thread = std::thread::spawn(move || keep(&events, &stopped, &state, &clients, notices));
        Ok(Self { thread, stop })
    }

    /// Ends it.
    pub(super) fn stop(self) {
        // An eventfd takes any number but the largest.
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        let _ = self.thread.join();
    }
}

fn keep(events: &OwnedFd, stop: &OwnedFd, state: &State, clients: &[Client], mut notices: Notices) {
    let mut buffer = [MaybeUninit::uninit(); 16 * 1024];
    let mut settling = 0;
    let mut lingering: Vec<(Instant, usize)> = Vec::new();
    loop {
        let mut wait = [
            PollFd::from_borrowed_fd(events.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(stop.as_fd(), PollFlags::IN),
        ];
        let limit = (settling > 0 || !lingering.is_empty()).then_some(&SETTLE);
        match poll(&mut wait, limit) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return log::warn!("cannot wait for closed files: {error}"),
        }
        let over = wait[1].revents().contains(PollFlags::IN);
        let mut reader = inotify::Reader::new(events, &mut buffer);
        while let Ok(event) = reader.next() {
            let number = event.file_name().and_then(number);
            if let Some(number) = number {
                if state.entry(number).is_some_and(is_changing) {
                    lingering.push((Instant::now() + LINGER, number));
                } else {
                    close(state, clients, number);
                }
                settling = SETTLING;
            } else if event.file_name().is_some() {
                notices.print();
            } else if event.events().contains(inotify::ReadFlags::QUEUE_OVERFLOW) {
                log::warn!(
                    "too much is opened and closed at once: some files stay open until the end"
                );
            }
        }
        if over {
            return state.unkept();
        }
        lingering.retain(|(until, number)| {
            let lingers = Instant::now() < *until;
            if !lingers {
                close(state, clients, *number);
            }
            lingers
        });
        // Takes the answers, so that what waits for a slot is closed, too.
        clients.iter().for_each(Client::progress);
        if wait.iter().all(|one| one.revents().is_empty()) {
            settling = u32::saturating_sub(settling, 1);
            continue;
        }
        std::thread::sleep(GATHER);
    }
}

fn number(name: &CStr) -> Option<usize> {
    name.to_str().ok()?.parse().ok()
}

fn is_changing(entry: &Entry) -> bool {
    entry.unanswered.load(Ordering::Acquire) != 0
}

/// The last descriptor of this entry is closed.
fn close(state: &State, clients: &[Client], number: usize) {
    let Some(entry) = state.entry(number) else { return };
    if entry.close_abandoned() {
        let mount = entry.mount.load(Ordering::Relaxed) as usize;
        if let Some(client) = clients.get(mount) {
            client.close_handle(entry.handle.load(Ordering::Relaxed));
        }
    }
    state.give_back(number);
}
