//! Closes remote files that no process has open any more.
//!
//! Inotify reports when the last descriptor of a placeholder is closed, even if it was closed by a process
//! that shared it with others, or one that was killed. A pidfd reports when a process with record locks has
//! ended.

use super::behind::Writes;
use super::connections::Connections;
use super::directory::RunDirectory;
use super::holders::Holders;
use super::leftovers::Leftovers;
use super::lost::Losses;
use super::pager::Pager;
use super::reach::Notices;
use super::ready::Ready;
use super::servers::by_server;
use super::source::Opened;
use super::watches::Watches;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::inotify;
use std::collections::HashMap;
use std::ffi::CStr;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{IntoRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use towline_client::{Client, Url};
use towline_instance::{CLOSING_WAIT, Entry, State, Taken};

/// How often, and how many times after the last event, to look for answers of servers.
const SETTLE: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
const SETTLING: u32 = 50;

/// How often to look for them while a program waits for them.
const AWAITED: Timespec = Timespec { tv_sec: 0, tv_nsec: 300_000 };

/// How often to retry watching for closed files after that has failed, and to look for unused connections.
const AGAIN: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };

/// How often, at most, to check for entries that processes have left.
const LOOK: Duration = Duration::from_millis(15);

/// How long a file stays open after its holder was killed before changes of it were answered. The changes are
/// on their way in the holder's connection, and would otherwise find the file closed.
const LINGER: Duration = Duration::from_secs(5);

/// What has ended, to be followed by a request.
enum Gone {
    /// No process has a descriptor any more of this entry, with this handle.
    File(usize, u64),
    /// A process that may have had locks on the files of this server.
    Process(u64, usize),
}

/// How much was in the queue of a server at some time.
struct Mark {
    queue: usize,
    before: u32,
}

impl Mark {
    fn of(state: &State, queue: usize) -> Self {
        Self { queue, before: state.behind(queue).added() }
    }

    /// Returns true if that is written.
    fn is_reached(&self, state: &State) -> bool {
        state.behind(self.queue).is_done(self.before)
    }
}

/// Notes a file that no process has open any more, to be closed once what was written to it is there. Its end may be
/// noticed twice before that.
fn note(ends: &mut Vec<(Mark, Gone)>, state: &State, leftovers: &Leftovers, number: usize) {
    let is_it = |gone: &Gone| matches!(gone, Gone::File(other, _) if *other == number);
    let is_noted = ends.iter().any(|(_, gone)| is_it(gone));
    let Some(entry) = state.entry(number).filter(|_| !is_noted) else { return };
    let opened = Opened::of(entry);
    let mark = Mark::of(state, leftovers.queue_of(opened.mount));
    ends.push((mark, Gone::File(number, opened.handle)));
}

/// The keeper's state.
pub(super) struct Keeper {
    /// Inotify queue for the placeholders. `None`: the user has too many queues at the moment. Until one can
    /// be had, files shared among processes stay open; those that are closed in the meantime stay open until
    /// the end of the run.
    events: Option<OwnedFd>,
    placeholders: PathBuf,
    state: Arc<State>,
    /// `None`: files are read as a whole when they are mapped.
    pager: Option<Pager>,
    /// `None`: locks of killed processes stay until their sessions end, and programs cannot watch files.
    holders: Option<Holders>,
    watches: Watches,
    /// For the servers that are far.
    ready: Vec<Arc<Ready>>,
    /// By mount number.
    clients: Vec<Client>,
    connections: Connections,
    losses: Losses,
    leftovers: Leftovers,
    writes: Writes,
    /// What follows once that is written behind that was in the queues then.
    written: Vec<(Mark, Gone)>,
    notices: Notices,
    /// How many more times to look for answers.
    settling: u32,
    /// A program waits until everything is closed that was closed before it asked: the number of its request,
    /// and until when it waits.
    awaited: Option<(u64, Instant)>,
    /// The number of the latest such request.
    asked: u64,
    /// Entries with unanswered changes, and when to close them.
    lingering: Vec<(Instant, usize)>,
    doubts: Doubts,
    /// Entries found left at the last check, and the tags they were left under.
    left: Vec<(usize, u32)>,
    looked: Instant,
}

impl Keeper {
    /// Starts the keeper.
    pub(super) fn start(
        directory: &RunDirectory,
        state: Arc<State>,
        servers: Vec<(Client, Url)>,
        ready: Vec<Arc<Ready>>,
    ) -> Self {
        let placeholders = directory.placeholders();
        let events = watch(&placeholders).inspect_err(|error| {
            log::warn!(
                "files and locks that programs leave stay for now: cannot watch for closed files: {error} \
                 (fs.inotify.max_user_instances)"
            );
        });
        state.keep(events.is_ok());
        let mut notices = Notices::new(&directory.placeholders());
        // Print notices that were written before the watch was in place.
        notices.print();
        let clients: Vec<Client> = servers.iter().map(|(client, _)| client.clone()).collect();
        let connections = Connections::of(&servers);
        let losses = Losses::new(directory.path(), Arc::clone(&state), &servers);
        let watches = Watches::new(directory, Arc::clone(&state), servers.clone());
        let leftovers = Leftovers::new(directory, Arc::clone(&state), &servers);
        let writes = Writes::new(directory, Arc::clone(&state), by_server(&servers));
        let pager = Pager::start(directory, Arc::clone(&state), servers);
        let pager = pager.inspect_err(|error| log::warn!("cannot listen for mappings: {error}"));
        let holders = Holders::start(directory);
        let holders =
            holders.inspect_err(|error| log::warn!("cannot listen for locks and watches: {error}"));
        Self {
            events: events.ok(),
            placeholders,
            state,
            pager: pager.ok(),
            holders: holders.ok(),
            watches,
            ready,
            clients,
            connections,
            losses,
            leftovers,
            writes,
            written: Vec::new(),
            notices,
            settling: 0,
            awaited: None,
            asked: 0,
            lingering: Vec::new(),
            doubts: Doubts::default(),
            left: Vec::new(),
            looked: Instant::now(),
        }
    }

    /// Returns the descriptors that become readable when there is something to do.
    pub(super) fn events(&self) -> impl Iterator<Item = PollFd<'_>> {
        let pager = self.pager.as_ref().map(|pager| PollFd::new(pager, PollFlags::IN));
        let holders = self.holders.iter().flat_map(Holders::events);
        let events = self.events.iter().map(|events| PollFd::new(events, PollFlags::IN));
        events.chain(holders).chain(pager).chain(self.connections.events())
    }

    /// Returns the one of them that becomes readable when a process may be waiting for an answer.
    pub(super) fn questions(&self) -> impl Iterator<Item = PollFd<'_>> {
        self.holders.iter().map(Holders::event)
    }

    /// Returns the maximum time to wait before the next [`Keeper::work`].
    pub(super) fn limit(&self) -> Option<&'static Timespec> {
        if self.awaited.is_some() {
            return Some(&AWAITED);
        }
        if self.settling > 0 || !self.lingering.is_empty() || !self.written.is_empty() {
            return Some(&SETTLE);
        }
        let is_waiting =
            self.events.is_none() || self.ready.iter().any(|ready| ready.has_surplus());
        is_waiting.then_some(&AGAIN)
    }

    /// Closes files that were left, and lets the pager meet processes that have mapped files. Returns true if
    /// files were closed: more may follow at once.
    pub(super) fn work(&mut self) -> bool {
        // Each time, as somebody may close files without a pause.
        if let Some(pager) = &self.pager {
            pager.meet();
        }
        if self.events.is_none()
            && let Ok(events) = watch(&self.placeholders)
        {
            self.events = Some(events);
            self.state.keep(true);
        }
        if self.connections.work() {
            self.losses.work();
        }
        self.writes.work();
        let mut buffer = [const { MaybeUninit::uninit() }; 16 * 1024];
        let queue = self.events.as_ref();
        let mut reader = queue.map(|queue| inotify::Reader::new(queue, &mut buffer));
        let mut has_worked = false;
        // Read before the events: the files closed before such a request, and the processes that ended before
        // it, are all covered by the events that are pending now.
        let asked = self.state.asked_to_close();
        for process in self.holders.as_mut().map(Holders::ended).unwrap_or_default() {
            has_worked = true;
            // The process may have been about to execute a program.
            let _ = self.state.executed(|| process);
            for server in 0..self.leftovers.servers() {
                let mark = Mark::of(&self.state, self.leftovers.first_mount(server));
                self.written.push((mark, Gone::Process(process, server)));
            }
            self.settling = SETTLING;
            self.state.watch(true);
        }
        for (ask, asker) in self.holders.as_mut().map(Holders::asks).unwrap_or_default() {
            self.watches.ask(ask, asker);
        }
        for listed in self.holders.as_mut().map(Holders::listed).unwrap_or_default() {
            self.watches.listed(listed);
        }
        for (want, socket) in self.holders.as_mut().map(Holders::wants).unwrap_or_default() {
            if let Some(ready) = self.ready.iter().find(|ready| ready.is_of(want.mount))
                && let Some(client) = self.clients.get(want.mount as usize)
            {
                ready.answer(client, want, &socket);
            }
        }
        self.ready.iter().for_each(|ready| ready.tidy());
        while let Some(Ok(event)) = reader.as_mut().map(inotify::Reader::next) {
            has_worked = true;
            let gone = match event.file_name() {
                None if event.events().contains(inotify::ReadFlags::DELETE_SELF) => {
                    self.doubts.ended(event.wd())
                }
                Some(name) => match number(name) {
                    Some(number)
                        if self.doubts.holds(queue, &self.placeholders, &self.state, number) =>
                    {
                        None
                    }
                    number => number,
                },
                None => None,
            };
            if let Some(number) = gone {
                self.settling = SETTLING;
                self.state.watch(true);
                if self.state.entry(number).is_some_and(is_changing) {
                    self.lingering.push((Instant::now() + LINGER, number));
                } else {
                    note(&mut self.written, &self.state, &self.leftovers, number);
                }
            } else if event.file_name().is_some_and(|name| number(name).is_none()) {
                self.notices.print();
            } else if event.events().contains(inotify::ReadFlags::QUEUE_OVERFLOW) {
                // The kernel has dropped events: any file may have been closed. An entry without a file may
                // be that of an open under way, whose placeholder is not open yet; if the open has failed, it
                // stays taken.
                let is_file = |entry: &Entry| entry.taken() != Taken::Free;
                for number in self.state.used() {
                    if self.state.entry(number).is_some_and(is_file) {
                        self.doubts.hold(queue, &self.placeholders, number);
                    }
                }
            }
        }
        let now = Instant::now();
        let lingered: Vec<_> = self.lingering.extract_if(.., |(until, _)| now >= *until).collect();
        for (_, number) in lingered {
            note(&mut self.written, &self.state, &self.leftovers, number);
        }
        self.end_written();
        if asked != std::mem::replace(&mut self.asked, asked) {
            self.awaited = Some((asked, Instant::now() + CLOSING_WAIT));
        }
        if self.limit().is_none() {
            return has_worked;
        }
        // Process answers, so that closes waiting for a slot are sent, too.
        for client in &self.clients {
            let _ = client.glance(); // whoever uses the server's files is told
        }
        if self.written.is_empty()
            && self.leftovers.is_idle()
            && self.clients.iter().all(Client::is_idle)
            && let Some((asked, _)) = self.awaited.take()
        {
            self.state.tell_closed(asked);
        }
        // A server may not answer for long.
        self.awaited = self.awaited.filter(|(_, until)| Instant::now() < *until);
        if !self.leftovers.is_idle() {
            self.settling = SETTLING;
        } else if !has_worked {
            self.settling = self.settling.saturating_sub(1);
        }
        if self.looked.elapsed() >= LOOK {
            self.close_left();
        }
        if self.settling == 0 {
            // From here on, a process that leaves a file closes its placeholder, too.
            self.state.watch(false);
            if self.left().next().is_some() {
                self.state.watch(true);
                self.settling = 1;
            }
        }
        has_worked
    }

    /// Closes files and releases locks for which everything is written behind that was, in their order.
    fn end_written(&mut self) {
        let written = |(mark, _): &mut (Mark, Gone)| mark.is_reached(&self.state);
        for (_, gone) in self.written.extract_if(.., written) {
            match gone {
                Gone::File(number, handle) => {
                    // Somebody outside may have opened and closed the placeholder, which was noticed twice.
                    let entry = self.state.entry(number);
                    if entry.is_some_and(|entry| entry.handle.load(Ordering::Acquire) == handle) {
                        close(&self.state, &mut self.leftovers, number);
                    }
                }
                Gone::Process(process, server) => self.leftovers.end_process(process, server),
            }
        }
    }

    /// Returns the entries that processes have left while keeping their placeholders open, with their tags.
    fn left(&self) -> impl Iterator<Item = (usize, u32)> {
        let tag = |number| {
            let entry = self.state.entry(number).filter(|entry| !is_changing(entry))?;
            Some((number, entry.leaving()?))
        };
        self.state.used().filter_map(tag)
    }

    /// Closes entries that were already left, under the same tag, at the previous check.
    fn close_left(&mut self) {
        let left: Vec<_> = self.left().collect();
        for &(number, tag) in left.iter().filter(|one| self.left.contains(one)) {
            let Some(entry) = self.state.entry(number) else { continue };
            let Opened { mount, handle, .. } = Opened::of(entry);
            // The process has written back what it had stored.
            if entry.close_left(tag)
                && let Some(client) = self.clients.get(mount as usize)
            {
                client.close_handle(handle);
            }
        }
        (self.left, self.looked) = (left, Instant::now());
    }

    /// Stops the keeper.
    pub(super) fn stop(mut self) {
        if let Some(pager) = &self.pager {
            pager.finish();
        }
        self.writes.finish();
        self.work();
        self.leftovers.finish();
        self.watches.stop();
        self.ready.iter().for_each(|ready| ready.stop());
        self.state.keep(false);
        // Closing the queue takes the kernel about 10 ms. Nobody has to wait for that: it happens when this
        // process ends.
        let _ = self.events.map(IntoRawFd::into_raw_fd);
    }
}

/// Returns an inotify queue that reports when placeholders are closed.
fn watch(placeholders: &Path) -> io::Result<OwnedFd> {
    let events = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)?;
    let closed = inotify::WatchFlags::CLOSE_NOWRITE | inotify::WatchFlags::CLOSE_WRITE;
    inotify::add_watch(&events, placeholders, closed)?;
    Ok(events)
}

fn number(name: &CStr) -> Option<usize> {
    name.to_str().ok()?.parse().ok()
}

fn is_changing(entry: &Entry) -> bool {
    entry.unanswered.load(Ordering::Acquire) != 0
}

/// Returns true if the closing of a placeholder does not prove that no process has it open any more.
/// Processes outside the run may have opened and closed it by its name or by that of a descriptor
/// (`/proc/PID/fd`). A process that leaves or has closed a file, and keeps no descriptor of it, has said so
/// in the entry.
fn is_doubtful(entry: &Entry) -> bool {
    let is_left = matches!(entry.taken(), Taken::Closed | Taken::Leaving);
    !is_left || entry.anchored.load(Ordering::Acquire) != 0
}

/// Entries that a process may still have open although their placeholder was closed, by the watches that
/// report when none has.
#[derive(Default)]
struct Doubts(HashMap<i32, usize>);

impl Doubts {
    /// Returns true if that holds for this entry, whose placeholder was closed.
    fn holds(
        &mut self,
        events: Option<&OwnedFd>,
        placeholders: &Path,
        state: &State,
        number: usize,
    ) -> bool {
        let is_doubtful = || state.entry(number).is_some_and(is_doubtful);
        self.0.values().any(|doubted| *doubted == number)
            || is_doubtful() && self.hold(events, placeholders, number)
    }

    /// Has the kernel report when no process has this entry open any more. Returns false if it cannot.
    fn hold(&mut self, events: Option<&OwnedFd>, placeholders: &Path, number: usize) -> bool {
        let watch = events.and_then(|events| unname(events, placeholders, number));
        self.0.extend(watch.map(|watch| (watch, number)));
        watch.is_some()
    }

    /// Returns the entry that no process has open any more, as reported by this watch.
    fn ended(&mut self, watch: i32) -> Option<usize> {
        self.0.remove(&watch)
    }
}

/// Unlinks a placeholder, so that the kernel reports through the returned watch when no process has it open
/// any more, possibly at once. The next file with this entry creates a new placeholder.
fn unname(events: &OwnedFd, placeholders: &Path, number: usize) -> Option<i32> {
    let path = placeholders.join(number.to_string());
    let watch = inotify::add_watch(events, &path, inotify::WatchFlags::DELETE_SELF).ok()?;
    if rustix::fs::unlink(&path).is_err() {
        let _ = inotify::remove_watch(events, watch);
        return None;
    }
    Some(watch)
}

/// Closes an entry whose last descriptor is closed.
fn close(state: &State, leftovers: &mut Leftovers, number: usize) {
    if let Some(entry) = state.entry(number) {
        let opened = Opened::of(entry);
        if entry.close_abandoned() {
            leftovers.close(opened);
        }
    }
    state.give_back(number);
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::poll;
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
    use std::os::fd::AsFd;
    use std::os::unix::ffi::OsStrExt;
    use towline_instance::pager::Message;
    use towline_instance::{Config, PAGER};

    /// Starts the keeper of a run without servers.
    fn started(folder: &Path) -> (RunDirectory, Arc<State>, Keeper) {
        let directory = RunDirectory::left(folder.join("run"));
        std::fs::create_dir_all(directory.placeholders()).unwrap();
        directory.fill().unwrap();
        let path = directory.path().as_os_str().as_bytes();
        let state = Arc::new(State::prepare(path, &Config::default()).unwrap().map().unwrap());
        let keeper = Keeper::start(&directory, Arc::clone(&state), Vec::new(), Vec::new());
        (directory, state, keeper)
    }

    /// As long as there is something to do each time, nobody waits for the keeper's descriptors.
    #[test]
    fn a_process_that_maps_files_is_met_while_others_close_files() {
        let folder = tempfile::tempdir().unwrap();
        let (directory, _, mut keeper) = started(folder.path());
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let process = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None).unwrap();
        let address = SocketAddrUnix::new(directory.path().join(PAGER)).unwrap();
        rustix::net::connect(&process, &address).unwrap();
        // They stand for a userfaultfd and a lifeline.
        let (one, other) = rustix::pipe::pipe().unwrap();
        let hello = Message::Hello { token: 0 }.to_bytes();
        let descriptors = [one.as_fd(), other.as_fd()];
        let wait = towline_net::Wait::Any;
        towline_net::send_descriptors(&process, &hello, &descriptors, wait).unwrap();
        let limit = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
        let is_met = (0..1000).any(|_| {
            std::fs::write(directory.placeholders().join("closed"), "").unwrap();
            assert!(keeper.work(), "a file was closed");
            poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&limit)).unwrap() > 0
        });
        assert!(is_met, "the process waits for the pager");
    }

    /// The kernel keeps a limited number of events, and then drops those of other files.
    #[test]
    fn files_that_are_closed_while_too_much_happens_are_closed() {
        let folder = tempfile::tempdir().unwrap();
        let (directory, state, mut keeper) = started(folder.path());
        let [closed, open] = [(); 2].map(|()| {
            let number = state.take().unwrap();
            assert!(state.entry(number).unwrap().change(Taken::Free, Taken::Open));
            let placeholder = directory.placeholders().join(number.to_string());
            (number, std::fs::File::create(placeholder).unwrap())
        });
        let reserved = state.take().unwrap();
        let limit = std::fs::read_to_string("/proc/sys/fs/inotify/max_queued_events").unwrap();
        for number in 0..=limit.trim().parse::<usize>().unwrap() {
            // Equal neighbours would be one event.
            let name = ["one", "other"][number % 2];
            std::fs::write(directory.placeholders().join(name), "").unwrap();
        }
        drop(closed.1);
        let mut expect_used = |numbers: &[usize]| {
            // A child that another test has just started still has the descriptors until it executes its
            // program.
            let end = Instant::now() + Duration::from_secs(60);
            loop {
                while keeper.work() {}
                let used: Vec<_> = state.used().collect();
                if used == numbers {
                    break;
                }
                assert!(Instant::now() < end, "{used:?} are in use, not {numbers:?}");
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        expect_used(&[open.0, reserved]);
        drop(open.1);
        expect_used(&[reserved]);
    }
}
