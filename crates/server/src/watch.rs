//! The thread that watches over the cores. It notices file systems that are mounted below an export, and
//! cores that wait for a device that does not answer.
//!
//! A core that uses a local file system waits in the kernel and cannot be taken out of there. The thread can
//! only log it, give new connections to other cores, and keep the shutdown from waiting for it.

use crate::complaints;
use crate::core::{Protocol, Shared};
use crate::mailbox::Mail;
use crate::server::StartError;
use crate::stats::CoreStatistics;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use towline_net::Link;

/// How often cores are checked. A core that is in the same turn at two checks is waiting.
const LOOK: Duration = Duration::from_secs(5);

/// How often connections are accepted while the first core waits.
const ACCEPT: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// Shows whether a core makes progress, as reported by the core and as seen by the watching thread.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    /// Odd while the core works. Only the core writes it.
    count: AtomicU64,
    /// Id of the core's thread; zero: not started.
    thread: AtomicU32,
    /// Seconds that the core has spent in one turn, if that is long.
    waiting: AtomicU64,
}

impl Turns {
    /// Must be called once by the core's thread.
    pub(crate) fn begin(&self) {
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        self.thread.store(thread.unsigned_abs(), Ordering::Relaxed);
    }

    /// Notes that the core starts to work.
    pub(crate) fn wakes(&self) {
        self.count.store(self.count.load(Ordering::Relaxed) | 1, Ordering::Relaxed);
    }

    /// Notes that the core has finished its turn.
    pub(crate) fn sleeps(&self) {
        self.count.store((self.count.load(Ordering::Relaxed) | 1) + 1, Ordering::Relaxed);
    }

    /// Returns the seconds that the core has spent in one turn; zero: it makes progress.
    pub(crate) fn waiting(&self) -> u64 {
        self.waiting.load(Ordering::Relaxed)
    }
}

/// The watching thread. Dropping this ends it.
pub(crate) struct Watch {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Starts watching.
    ///
    /// # Errors
    /// The error of the kernel.
    pub(crate) fn start(shared: Arc<Shared>) -> Result<Self, StartError> {
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let stop = Arc::new(stop.map_err(|error| StartError::System(error.into()))?);
        let (told, mounts) = (stop.clone(), File::open("/proc/self/mountinfo"));
        let mounts = mounts.map_err(|error| log::warn!("mounts cannot be watched: {error}")).ok();
        let body = move || watch(&shared, &told, mounts.as_ref());
        let thread = std::thread::Builder::new().name("towline-watch".into()).spawn(body);
        let thread = thread.map_err(StartError::Threads)?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // Fails only if the counter of the eventfd is full, and then it is readable anyway.
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        if let Some(Err(_)) = self.thread.take().map(JoinHandle::join) {
            log::error!("the thread that watches over the cores had failed");
        }
    }
}

/// What the last checks of a core saw.
#[derive(Clone, Copy)]
struct Seen {
    count: u64,
    since: Instant,
    /// Seconds of waiting at which it is logged next.
    tell_at: u64,
}

fn watch(shared: &Shared, stop: &OwnedFd, mounts: Option<&File>) {
    let fresh = Seen { count: 0, since: Instant::now(), tell_at: LOOK.as_secs() };
    let mut seen = vec![fresh; shared.cores.len()];
    let mut looked = Instant::now();
    let look = Timespec { tv_sec: LOOK.as_secs() as i64, tv_nsec: 0 };
    loop {
        let mut fds = vec![PollFd::new(stop, PollFlags::IN)];
        // The kernel reports changes of mounts in this way, see `proc_pid_mountinfo(5)`.
        fds.extend(mounts.map(|mounts| PollFd::new(mounts, PollFlags::PRI)));
        // The first core accepts connections; while it waits, this thread does.
        let accepting = shared.cores[0].turns.waiting() > 0;
        match poll(&mut fds, Some(if accepting { &ACCEPT } else { &look })) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return log::error!("cores and mounts are no longer watched: {error}"),
        }
        if fds[0].revents().contains(PollFlags::IN) {
            return;
        }
        if mounts.is_some() && fds[1].revents().intersects(PollFlags::PRI | PollFlags::ERR) {
            shared.exports.look_at_mounts();
        }
        drop(fds);
        if looked.elapsed() >= LOOK {
            looked = Instant::now();
            complaints::tell_left_out();
            for (index, (core, seen)) in shared.cores.iter().zip(&mut seen).enumerate() {
                look_at(index, core, seen);
            }
        }
        if accepting {
            accept(shared);
        }
    }
}

fn look_at(index: usize, core: &CoreStatistics, seen: &mut Seen) {
    let count = core.turns.count.load(Ordering::Relaxed);
    let gets_on = count.is_multiple_of(2) || count != seen.count;
    if gets_on {
        if core.turns.waiting.swap(0, Ordering::Relaxed) > 0 {
            log::warn!("core {index} continues after {} s", seen.since.elapsed().as_secs());
        }
        *seen = Seen { count, since: Instant::now(), tell_at: LOOK.as_secs() };
        return;
    }
    let seconds = seen.since.elapsed().as_secs().max(1);
    core.turns.waiting.store(seconds, Ordering::Relaxed);
    if seconds >= seen.tell_at {
        seen.tell_at = 2 * seconds;
        let place = whereabouts(core.turns.thread.load(Ordering::Relaxed));
        log::warn!(
            "core {index} has been waiting for {seconds} s in {place}, and its clients with it; \
             the other cores go on"
        );
    }
}

/// Accepts connections and hands them to cores that make progress. If there is none, clients stay in the
/// listen queue.
fn accept(shared: &Shared) {
    for (listener, protocol) in shared.listeners.read().iter() {
        while let Some(core) = shared.core_for_newcomer()
            && let Ok(link) = listener.accept()
        {
            let link: Arc<Link> = Arc::new(link);
            shared.mailboxes[core].send(match protocol {
                Protocol::Towline => Mail::Lane(link),
                Protocol::Nbd => Mail::NbdLane(link, None),
            });
        }
    }
}

/// Returns the system call that a thread is in, and the file that it concerns, as far as the kernel says.
fn whereabouts(thread: u32) -> String {
    let read = |what: &str| {
        std::fs::read_to_string(format!("/proc/self/task/{thread}/{what}")).unwrap_or_default()
    };
    let text = read("syscall");
    let mut words = text.split_whitespace();
    let Some(number) = words.next().and_then(|word| word.parse().ok()) else {
        return "its own code or the kernel".to_owned();
    };
    let name = call_name(number);
    // The file is the second argument of `sendfile`, after the socket; in the others it is the first.
    let argument = if number == libc::SYS_sendfile { words.nth(1) } else { words.next() };
    let descriptor =
        argument.and_then(|word| u32::from_str_radix(word.trim_start_matches("0x"), 16).ok());
    let file = descriptor.and_then(|fd| std::fs::read_link(format!("/proc/self/fd/{fd}")).ok());
    let waits = read("wchan");
    let waits = Some(waits.trim()).filter(|word| !word.is_empty() && *word != "0");
    let waits = waits.map_or_else(String::new, |word| format!(" ({word})"));
    match file {
        Some(file) => format!("{name} of {}{waits}", file.display()),
        None => format!("{name}{waits}"),
    }
}

fn call_name(number: i64) -> String {
    let known = [
        (libc::SYS_openat2, "openat2"),
        (libc::SYS_openat, "openat"),
        (libc::SYS_statx, "statx"),
        (libc::SYS_pread64, "pread64"),
        (libc::SYS_preadv2, "preadv2"),
        (libc::SYS_pwrite64, "pwrite64"),
        (libc::SYS_pwritev2, "pwritev2"),
        (libc::SYS_write, "write"),
        (libc::SYS_sendfile, "sendfile"),
        (libc::SYS_splice, "splice"),
        (libc::SYS_getdents64, "getdents64"),
        (libc::SYS_ftruncate, "ftruncate"),
        (libc::SYS_fallocate, "fallocate"),
        (libc::SYS_lseek, "lseek"),
        (libc::SYS_copy_file_range, "copy_file_range"),
        (libc::SYS_mkdirat, "mkdirat"),
        (libc::SYS_unlinkat, "unlinkat"),
        (libc::SYS_renameat2, "renameat2"),
        (libc::SYS_linkat, "linkat"),
        (libc::SYS_symlinkat, "symlinkat"),
        (libc::SYS_mknodat, "mknodat"),
        (libc::SYS_fchmod, "fchmod"),
        (libc::SYS_fchmodat, "fchmodat"),
        (libc::SYS_fchownat, "fchownat"),
        (libc::SYS_utimensat, "utimensat"),
        (libc::SYS_fstatfs, "fstatfs"),
        (libc::SYS_close, "close"),
    ];
    let found = known.iter().find(|(known, _)| *known == number);
    found.map_or_else(|| format!("system call {number}"), |(_, name)| (*name).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_core_that_stays_in_one_turn_is_seen_and_so_is_its_end() {
        let core = CoreStatistics::new();
        let long_ago = Instant::now().checked_sub(Duration::from_secs(7)).unwrap();
        let mut seen = Seen { count: 0, since: long_ago, tell_at: 5 };
        // It sleeps, works, and works again: that is progress.
        look_at(0, &core, &mut seen);
        for _ in 0..3 {
            core.turns.wakes();
            look_at(0, &core, &mut seen);
            assert_eq!(core.turns.waiting(), 0);
            core.turns.sleeps();
        }
        core.turns.wakes();
        look_at(0, &core, &mut seen);
        seen.since = long_ago;
        look_at(0, &core, &mut seen);
        assert!(core.turns.waiting() >= 7);
        assert!(seen.tell_at >= 14, "told once, and again only after twice the time");
        core.turns.sleeps();
        look_at(0, &core, &mut seen);
        assert_eq!(core.turns.waiting(), 0);
        // A core may sleep for any length of time.
        seen.since = long_ago;
        look_at(0, &core, &mut seen);
        assert_eq!(core.turns.waiting(), 0);
    }

    #[test]
    fn a_thread_that_waits_for_a_file_is_found_there() {
        let (reader, writer) = std::io::pipe().unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        let waiting = std::thread::spawn(move || {
            tell.send(rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs()).unwrap();
            let mut byte = [0];
            // A call in the table of names would need a device that does not answer.
            std::io::Read::read(&mut &reader, &mut byte).unwrap()
        });
        let thread = told.recv().unwrap();
        let expected = format!("system call {} of pipe:", libc::SYS_read);
        let mut found = String::new();
        for _ in 0..6000 {
            found = whereabouts(thread);
            if found.starts_with(&expected) {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        drop(writer);
        waiting.join().unwrap();
        if !std::path::Path::new("/proc/self/syscall").exists() {
            eprintln!("SKIPPED: this kernel does not tell where threads wait");
            return;
        }
        assert!(found.starts_with(&expected), "{found}");
    }
}
