//! Watches files by `inotify(7)`.
//!
//! One queue serves the whole process. It is created for the first watch, and one thread reads it
//! and calls the witnesses. The queue of the [known](super::known) directories is a different one,
//! which the threads that execute requests check.
//!
//! The kernel has one watch per inode in a queue, with the union of the events that its witnesses
//! want; each witness gets its part.
//!
//! The kernel reports a file as deleted only when no process has it open any more. But a watched
//! file is open here. So it counts as gone when it has lost its last name, even if another process
//! still has it open. Files get an event for that (`ATTRIB`). Directories do not, so the parent
//! directory is watched as well. The removal of a directory goes unnoticed if its parent may not be
//! searched or if it is on a foreign file system. On an overlay, so does the removal of anything
//! that exists only in a lower layer.

use super::attributes::{errno, stat_file};
use super::open_file::DirectoryFile;
use super::resolve::{PARENT, proc_path};
use crate::{Watch, Witness};
use foldhash::fast::RandomState;
use parking_lot::Mutex;
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::fs::{Access, AtFlags, CWD, Mode, StatxFlags};
use rustix::io::Errno as Code;
use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::{Arc, LazyLock};
use towline_reactor::processor;
use towline_wire::Errno;
use towline_wire::attr::TYPE_DIRECTORY;
use towline_wire::event;

/// Buffer for the events that one system call takes from the queue: some thousand with short names.
const BATCH_BYTES: usize = 64 * 1024;
/// Events watched in a directory on behalf of a directory in it: that this one is removed or
/// replaced.
const GUARDING: u32 = event::DELETE | event::MOVED_TO;

/// A watch descriptor.
type Descriptor = i32;

static TABLE: LazyLock<Mutex<Table>> = LazyLock::new(Mutex::default);

/// All watches. No witness is called or dropped under the lock of this table: a witness may own
/// watches.
#[derive(Default)]
struct Table {
    /// The queue, if the thread that reads it has been started.
    inotify: Option<Arc<OwnedFd>>,
    watched: HashMap<Descriptor, Watched, RandomState>,
    /// The next seat's number.
    next: u64,
}

/// An inode that the kernel watches.
#[derive(Default)]
struct Watched {
    seats: Vec<Seat>,
    /// The events requested from the kernel.
    mask: u32,
    /// Further events needed as long as there are seats.
    own: u32,
    /// Whether it had a name when it was first watched.
    had_name: bool,
    /// The parent directory, which is watched on behalf of this one.
    parent: Option<Descriptor>,
    /// Watched directories in this one, including those that were in it a moment ago.
    children: Vec<Descriptor>,
}

/// One watcher of an inode.
struct Seat {
    number: u64,
    mask: u32,
    witness: Arc<dyn Witness>,
    file: Arc<OwnedFd>,
}

/// A call to make to a witness.
struct Telling {
    witness: Arc<dyn Witness>,
    what: What,
}

#[derive(Clone, Copy)]
enum What {
    /// The event, with these bits.
    Event(u32),
    /// The end of the watch, with this bit.
    End(u32),
    /// Events were lost.
    Lost,
}

/// The consequences of an event, handled once the table is no longer locked.
#[derive(Default)]
struct News {
    tellings: Vec<Telling>,
    /// Dropping these may close files and drop witnesses.
    ended: Vec<Watched>,
}

/// An event of the kernel.
#[derive(Default)]
struct Event<'a> {
    descriptor: Descriptor,
    mask: u32,
    cookie: u32,
    name: &'a [u8],
}

/// Keeps a seat until dropped.
struct Place {
    descriptor: Descriptor,
    number: u64,
}

impl DirectoryFile {
    /// Watches this file, which stays open until the watch is dropped.
    ///
    /// # Errors
    /// Errors that `inotify_add_watch(2)` returns to the user who opened the file: it requires read
    /// permission at this time. `ENOSPC` also if the server may have no more queues.
    pub(super) fn watch_by_kernel(
        &self,
        mask: u32,
        witness: &Arc<dyn Witness>,
    ) -> Result<Box<dyn Watch>, Errno> {
        // Before taking on another identity, which would become that of the new thread and queue.
        let inotify = TABLE.lock().queue()?;
        let had_name = stat_file(&self.fd)?.stx_nlink != 0;
        let is_directory = self.kind == TYPE_DIRECTORY;
        let is_foreign = self.tree.foreign.get().is_some();
        let acting = match &self.caller {
            Some(caller) => self.tree.server.act_as(caller)?,
            None => None,
        };
        if is_foreign {
            // Asks the other machine or process first, so that it is not asked under the lock.
            rustix::fs::accessat(CWD, proc_path(&self.fd), Access::READ_OK, AtFlags::EACCESS)
                .map_err(errno)?;
        }
        let mask = mask & event::ALL;
        let own = if is_directory { event::MOVE_SELF } else { event::ATTRIB };
        let mut table = TABLE.lock();
        let descriptor = add(&inotify, &self.fd, mask | own, true).map_err(errno)?;
        let number = table.next;
        table.next += 1;
        let watched = table.watched.entry(descriptor).or_default();
        watched.mask |= mask | own;
        if watched.seats.is_empty() {
            (watched.own, watched.had_name) = (own, had_name);
        }
        let (witness, file) = (witness.clone(), self.fd.clone());
        watched.seats.push(Seat { number, mask, witness, file });
        drop(table);
        drop(acting);
        let place = Place { descriptor, number };
        let mut news = News::default();
        if is_directory && !is_foreign {
            TABLE.lock().guard(descriptor, &mut news);
        } else {
            // The file may have been removed just before it was watched.
            TABLE.lock().end_if_gone(descriptor, &mut news);
        }
        news.tell(&Event::default());
        Ok(Box::new(place))
    }
}

impl Watch for Place {}

impl Drop for Place {
    fn drop(&mut self) {
        let seat = TABLE.lock().leave(self.descriptor, self.number);
        // Dropped without the lock.
        drop(seat);
    }
}

impl Watched {
    /// Returns the events needed from the kernel.
    fn wanted(&self) -> u32 {
        let own = if self.seats.is_empty() { 0 } else { self.own };
        let of_children = if self.children.is_empty() { 0 } else { GUARDING };
        self.seats.iter().fold(own | of_children, |union, seat| union | seat.mask)
    }

    /// Returns true if the file is gone, but was not when it was first watched.
    fn is_gone(&self) -> bool {
        self.had_name && self.seats.first().is_some_and(|seat| has_no_name(&seat.file))
    }

    /// Adds a call to every witness.
    fn tell_all(&self, what: What, tellings: &mut Vec<Telling>) {
        let telling = |seat: &Seat| Telling { witness: seat.witness.clone(), what };
        tellings.extend(self.seats.iter().map(telling));
    }
}

impl Table {
    /// Returns the queue. The first call creates it and starts the thread that reads it.
    fn queue(&mut self) -> Result<Arc<OwnedFd>, Errno> {
        if let Some(inotify) = &self.inotify {
            return Ok(inotify.clone());
        }
        let inotify = inotify::init(CreateFlags::CLOEXEC).map_err(|error| match error {
            Code::MFILE | Code::NFILE => Errno::ENOSPC,
            error => errno(error),
        })?;
        let inotify = Arc::new(inotify);
        let queue = inotify.clone();
        processor::spawn("towline-watches", move || attend(&queue)).map_err(|_| Errno::ENOMEM)?;
        self.inotify = Some(inotify.clone());
        Ok(inotify)
    }

    /// Removes a seat and returns it. Removing the last one ends the watch.
    fn leave(&mut self, descriptor: Descriptor, number: u64) -> Option<Seat> {
        // Absent if the watch has ended.
        let watched = self.watched.get_mut(&descriptor)?;
        let at = watched.seats.iter().position(|seat| seat.number == number)?;
        let seat = watched.seats.swap_remove(at);
        if watched.seats.is_empty() {
            self.leave_parent(descriptor);
        }
        self.narrow(descriptor, Some(&seat.file));
        Some(seat)
    }

    /// Asks the kernel for no more events than an inode still needs, and ends its watch if that is
    /// none. `file` is the open inode; without it, the events cannot be reduced.
    fn narrow(&mut self, descriptor: Descriptor, file: Option<&OwnedFd>) {
        let (Some(inotify), Some(watched)) = (&self.inotify, self.watched.get_mut(&descriptor))
        else {
            return;
        };
        let wanted = watched.wanted();
        if wanted == 0 {
            self.watched.remove(&descriptor);
            // The kernel has already ended it if the file is gone.
            let _ = inotify::remove_watch(inotify, descriptor);
        } else if let Some(file) = file.filter(|_| wanted != watched.mask)
            && add(inotify, file, wanted, false).is_ok()
        {
            watched.mask = wanted;
        }
    }

    /// Watches the parent of a directory as well, in place of an earlier one. Reports if the
    /// directory is already gone.
    fn guard(&mut self, descriptor: Descriptor, news: &mut News) {
        let Some(inotify) = self.inotify.clone() else { return };
        let Some(file) = self.file(descriptor) else { return };
        let parent = rustix::fs::openat(&file, c"..", PARENT, Mode::empty())
            .and_then(|parent| Ok((add(&inotify, &parent, GUARDING, true)?, parent)));
        let before = self.watched.get(&descriptor).and_then(|watched| watched.parent);
        match parent {
            // The root of the file system is its own parent.
            Ok((above, _)) if Some(above) == before || above == descriptor => {}
            Ok((above, _)) => {
                self.leave_parent(descriptor);
                let parent = self.watched.entry(above).or_default();
                parent.mask |= GUARDING;
                parent.children.push(descriptor);
                if let Some(watched) = self.watched.get_mut(&descriptor) {
                    watched.parent = Some(above);
                }
            }
            Err(_) => self.leave_parent(descriptor),
        }
        // A removal before the parent was watched was not reported.
        self.end_if_gone(descriptor, news);
    }

    /// Stops watching the parent on behalf of this directory.
    fn leave_parent(&mut self, descriptor: Descriptor) {
        let Some(watched) = self.watched.get_mut(&descriptor) else { return };
        let Some(above) = watched.parent.take() else { return };
        let Some(parent) = self.watched.get_mut(&above) else { return };
        parent.children.retain(|child| *child != descriptor);
        let file = self.file(above);
        self.narrow(above, file.as_deref());
    }

    /// Returns the open file of a watch descriptor, if anyone watches it for its own sake.
    fn file(&self, descriptor: Descriptor) -> Option<Arc<OwnedFd>> {
        self.watched.get(&descriptor)?.seats.first().map(|seat| seat.file.clone())
    }

    /// Determines the consequences of an event.
    fn take(&mut self, event: &Event<'_>, news: &mut News) {
        if event.mask & ReadFlags::QUEUE_OVERFLOW.bits() != 0 {
            self.lose(news);
            return;
        }
        // A watch that was ended here may still have events in the queue.
        let Some(watched) = self.watched.get(&event.descriptor) else { return };
        if event.mask & event::IGNORED != 0 {
            watched.tell_all(What::End(event::IGNORED), &mut news.tellings);
            self.forget(event.descriptor, news);
            return;
        }
        if event.mask & GUARDING != 0 && event.mask & event::ISDIR != 0 {
            // A replaced directory gets an event itself, if a witness wants it.
            let replaced = event.mask & event::MOVED_TO != 0;
            for child in watched.children.clone() {
                let mask = self.watched.get(&child).map_or(0, |child| child.mask);
                if !replaced || mask & event::ATTRIB == 0 {
                    self.end_if_gone(child, news);
                }
            }
        }
        let Some(watched) = self.watched.get(&event.descriptor) else { return };
        for seat in &watched.seats {
            let bits = event.mask & (seat.mask | event::DELETE_SELF) & event::ALL;
            if bits != 0 {
                let (witness, what) =
                    (seat.witness.clone(), What::Event(bits | event.mask & event::ISDIR));
                news.tellings.push(Telling { witness, what });
            }
        }
        if !event.name.is_empty() {
            return;
        }
        if event.mask & event::MOVE_SELF != 0 && watched.parent.is_some() {
            self.guard(event.descriptor, news);
        } else if event.mask & event::ATTRIB != 0 {
            self.end_if_gone(event.descriptor, news);
        }
    }

    /// Tells all witnesses that events were lost.
    fn lose(&mut self, news: &mut News) {
        let all: Vec<Descriptor> = self.watched.keys().copied().collect();
        for descriptor in all {
            let Some(watched) = self.watched.get(&descriptor) else { continue };
            watched.tell_all(What::Lost, &mut news.tellings);
            // It may have been moved or removed.
            match watched.parent {
                Some(_) => self.guard(descriptor, news),
                None => self.end_if_gone(descriptor, news),
            }
        }
    }

    fn end_if_gone(&mut self, descriptor: Descriptor, news: &mut News) {
        let Some(watched) = self.watched.get(&descriptor).filter(|watched| watched.is_gone())
        else {
            return;
        };
        watched.tell_all(What::End(event::DELETE_SELF), &mut news.tellings);
        watched.tell_all(What::End(event::IGNORED), &mut news.tellings);
        self.forget(descriptor, news);
        if let Some(inotify) = &self.inotify {
            let _ = inotify::remove_watch(inotify, descriptor);
        }
    }

    /// Removes an ended watch from the table.
    fn forget(&mut self, descriptor: Descriptor, news: &mut News) {
        self.leave_parent(descriptor);
        let Some(watched) = self.watched.remove(&descriptor) else { return };
        for child in &watched.children {
            if let Some(child) = self.watched.get_mut(child) {
                child.parent = None;
            }
        }
        news.ended.push(watched);
    }
}

impl News {
    /// Makes all calls, and is empty afterwards.
    fn tell(&mut self, event: &Event<'_>) {
        for Telling { witness, what } in self.tellings.drain(..) {
            match what {
                What::Event(mask) => witness.saw(mask, event.cookie, event.name),
                What::End(mask) => witness.saw(mask, 0, b""),
                What::Lost => witness.lost(),
            }
        }
        self.ended.clear();
    }
}

/// Reads the queue until the process ends.
fn attend(queue: &OwnedFd) {
    let mut batch = vec![MaybeUninit::uninit(); BATCH_BYTES];
    let mut reader = Reader::new(queue, &mut batch);
    let mut news = News::default();
    loop {
        let event = match reader.next() {
            Ok(event) => event,
            Err(Code::INTR) => continue,
            // No other error occurs when a queue is read this way.
            Err(_) => return,
        };
        let event = Event {
            descriptor: event.wd(),
            mask: event.events().bits(),
            cookie: event.cookie(),
            name: event.file_name().map_or(b"", std::ffi::CStr::to_bytes),
        };
        TABLE.lock().take(&event, &mut news);
        news.tell(&event);
    }
}

/// Watches a file for `mask`: with `more` in addition to earlier events, else instead of them.
fn add(inotify: &OwnedFd, file: &OwnedFd, mask: u32, more: bool) -> Result<Descriptor, Code> {
    let mut flags = WatchFlags::from_bits_retain(mask);
    flags.set(WatchFlags::MASK_ADD, more);
    // This path leads to a symbolic link itself if that is what is open.
    inotify::add_watch(inotify, proc_path(file), flags)
}

/// Checks the kernel's cache only: no other machine or process is asked.
fn has_no_name(file: &OwnedFd) -> bool {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    rustix::fs::statx(file, c"", flags, StatxFlags::NLINK).is_ok_and(|stat| stat.stx_nlink == 0)
}
