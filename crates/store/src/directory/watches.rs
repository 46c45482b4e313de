//! Watching files by `inotify(7)`.
//!
//! There is one queue for the whole process, made for the first watch, and one thread that reads it and tells the witnesses. The
//! queue of the [known](super::known) directories is another one: it is looked at by whoever serves requests.
//!
//! The kernel has one watch of an inode in a queue, with all that any witness of it wants; each is told its part.
//!
//! The kernel says that a file is gone when nobody has it open any more. But a watched one is open here. So it counts as gone when it
//! has lost its last name, even if somebody else has it open, too. Files are told of that (`ATTRIB`). Directories are not, so the one
//! above is watched as well. Not noticed is the end of a directory whose parent may not be searched, or that is on a file system
//! that asks others, and on an overlay the end of what only a lower layer has.

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
use towline_wire::Errno;
use towline_wire::attr::TYPE_DIRECTORY;
use towline_wire::event;

/// Room for the events that one system call takes from the queue: some thousand with short names.
const BATCH_BYTES: usize = 64 * 1024;
/// What a directory is watched for because of one in it: that this one is removed, or replaced.
const GUARDING: u32 = event::DELETE | event::MOVED_TO;

/// A watch descriptor.
type Descriptor = i32;

static TABLE: LazyLock<Mutex<Table>> = LazyLock::new(Mutex::default);

/// All that is watched. No witness is called or dropped under its lock: a witness may own watches.
#[derive(Default)]
struct Table {
    /// The queue, if the thread that reads it was started.
    inotify: Option<Arc<OwnedFd>>,
    watched: HashMap<Descriptor, Watched, RandomState>,
    /// Number of the next seat.
    next: u64,
}

/// An inode that the kernel watches.
#[derive(Default)]
struct Watched {
    seats: Vec<Seat>,
    /// What the kernel was asked for.
    mask: u32,
    /// What it is watched for besides, as long as there are seats.
    own: u32,
    /// It had a name when it was first watched.
    had_name: bool,
    /// The directory above this one, which is watched for it.
    parent: Option<Descriptor>,
    /// Watched directories in this one, or that were in it a moment ago.
    children: Vec<Descriptor>,
}

/// One of those who watch an inode.
struct Seat {
    number: u64,
    mask: u32,
    witness: Arc<dyn Witness>,
    file: Arc<OwnedFd>,
}

/// What is to be told to a witness.
struct Telling {
    witness: Arc<dyn Witness>,
    what: What,
}

#[derive(Clone, Copy)]
enum What {
    /// The event, with these bits of it.
    Event(u32),
    /// The end of the watch, with this bit.
    End(u32),
    /// That something is missing.
    Lost,
}

/// What comes of an event, to be dealt with when the table is not locked any more.
#[derive(Default)]
struct News {
    tellings: Vec<Telling>,
    /// Dropping them may close files and drop witnesses.
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

/// A seat, until it is dropped.
struct Place {
    descriptor: Descriptor,
    number: u64,
}

impl DirectoryFile {
    /// Watches this file, which stays open until the watch is dropped.
    ///
    /// # Errors
    /// What `inotify_add_watch(2)` says to whoever opened the file: it wants the right to read, now. `ENOSPC` also where the server may
    /// have no more queues.
    pub(super) fn watch_by_kernel(
        &self,
        mask: u32,
        witness: &Arc<dyn Witness>,
    ) -> Result<Box<dyn Watch>, Errno> {
        // Before another identity is taken on: it would be that of the thread and of the queue.
        let inotify = TABLE.lock().queue()?;
        let had_name = stat_file(&self.fd)?.stx_nlink != 0;
        let is_directory = self.kind == TYPE_DIRECTORY;
        let is_foreign = self.tree.foreign.get().is_some();
        let acting = match &self.caller {
            Some(caller) => self.tree.server.act_as(caller)?,
            None => None,
        };
        if is_foreign {
            // So that whoever has to be asked for it is not asked under the lock.
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
            // It may have gone just before it was watched.
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
        // Not under the lock.
        drop(seat);
    }
}

impl Watched {
    /// What the kernel has to be asked for.
    fn wanted(&self) -> u32 {
        let own = if self.seats.is_empty() { 0 } else { self.own };
        let of_children = if self.children.is_empty() { 0 } else { GUARDING };
        self.seats.iter().fold(own | of_children, |union, seat| union | seat.mask)
    }

    /// True when it is gone, but was not when it was first watched.
    fn is_gone(&self) -> bool {
        self.had_name && self.seats.first().is_some_and(|seat| has_no_name(&seat.file))
    }

    /// Has everybody told something.
    fn tell_all(&self, what: What, tellings: &mut Vec<Telling>) {
        let telling = |seat: &Seat| Telling { witness: seat.witness.clone(), what };
        tellings.extend(self.seats.iter().map(telling));
    }
}

impl Table {
    /// The queue; made, and a thread that reads it started, if there is none.
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
        let thread = std::thread::Builder::new().name("towline-watches".into());
        thread.spawn(move || attend(&queue)).map_err(|_| Errno::ENOMEM)?;
        self.inotify = Some(inotify.clone());
        Ok(inotify)
    }

    /// Takes a seat away, and returns it. The last one ends the watch.
    fn leave(&mut self, descriptor: Descriptor, number: u64) -> Option<Seat> {
        // Not there when the watch has ended.
        let watched = self.watched.get_mut(&descriptor)?;
        let at = watched.seats.iter().position(|seat| seat.number == number)?;
        let seat = watched.seats.swap_remove(at);
        if watched.seats.is_empty() {
            self.leave_parent(descriptor);
        }
        self.narrow(descriptor, Some(&seat.file));
        Some(seat)
    }

    /// Asks the kernel for no more than is still wanted of an inode, which `file` is if it may be asked for less.
    fn narrow(&mut self, descriptor: Descriptor, file: Option<&OwnedFd>) {
        let (Some(inotify), Some(watched)) = (&self.inotify, self.watched.get_mut(&descriptor))
        else {
            return;
        };
        let wanted = watched.wanted();
        if wanted == 0 {
            self.watched.remove(&descriptor);
            // The kernel has ended it already if the file is gone.
            let _ = inotify::remove_watch(inotify, descriptor);
        } else if let Some(file) = file.filter(|_| wanted != watched.mask)
            && add(inotify, file, wanted, false).is_ok()
        {
            watched.mask = wanted;
        }
    }

    /// Watches the directory above one as well, or another one than before. Tells if it is too late for that.
    fn guard(&mut self, descriptor: Descriptor, news: &mut News) {
        let Some(inotify) = self.inotify.clone() else { return };
        let Some(file) = self.file(descriptor) else { return };
        let parent = rustix::fs::openat(&file, c"..", PARENT, Mode::empty())
            .and_then(|parent| Ok((add(&inotify, &parent, GUARDING, true)?, parent)));
        let before = self.watched.get(&descriptor).and_then(|watched| watched.parent);
        match parent {
            // The root of everything is its own parent.
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
        // What it was removed from before that was watched told nobody.
        self.end_if_gone(descriptor, news);
    }

    /// The directory above this one is not watched for its sake any more.
    fn leave_parent(&mut self, descriptor: Descriptor) {
        let Some(watched) = self.watched.get_mut(&descriptor) else { return };
        let Some(above) = watched.parent.take() else { return };
        let Some(parent) = self.watched.get_mut(&above) else { return };
        parent.children.retain(|child| *child != descriptor);
        let file = self.file(above);
        self.narrow(above, file.as_deref());
    }

    /// What a descriptor watches, open, if it is watched for its own sake.
    fn file(&self, descriptor: Descriptor) -> Option<Arc<OwnedFd>> {
        self.watched.get(&descriptor)?.seats.first().map(|seat| seat.file.clone())
    }

    /// Finds out who is to be told of an event.
    fn take(&mut self, event: &Event<'_>, news: &mut News) {
        if event.mask & ReadFlags::QUEUE_OVERFLOW.bits() != 0 {
            self.lose(news);
            return;
        }
        // One that was ended here still has events in the queue.
        let Some(watched) = self.watched.get(&event.descriptor) else { return };
        if event.mask & event::IGNORED != 0 {
            watched.tell_all(What::End(event::IGNORED), &mut news.tellings);
            self.forget(event.descriptor, news);
            return;
        }
        if event.mask & GUARDING != 0 && event.mask & event::ISDIR != 0 {
            // One that was replaced is told so itself, if it wants to hear of it.
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

    /// Events were lost.
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

    /// Takes out what is not watched any more.
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
    /// Tells it, and is empty then.
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

/// Reads the queue for as long as the process lives.
fn attend(queue: &OwnedFd) {
    let mut batch = vec![MaybeUninit::uninit(); BATCH_BYTES];
    let mut reader = Reader::new(queue, &mut batch);
    let mut news = News::default();
    loop {
        let event = match reader.next() {
            Ok(event) => event,
            Err(Code::INTR) => continue,
            // There is no other error of a queue that is read so.
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

/// Watches a file as well for what `mask` says, or with `more` false only for that.
fn add(inotify: &OwnedFd, file: &OwnedFd, mask: u32, more: bool) -> Result<Descriptor, Code> {
    let mut flags = WatchFlags::from_bits_retain(mask);
    flags.set(WatchFlags::MASK_ADD, more);
    // Leads to a symbolic link itself where that is open.
    inotify::add_watch(inotify, proc_path(file), flags)
}

/// As the kernel remembers it: nobody else is asked.
fn has_no_name(file: &OwnedFd) -> bool {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    rustix::fs::statx(file, c"", flags, StatxFlags::NLINK).is_ok_and(|stat| stat.stx_nlink == 0)
}
