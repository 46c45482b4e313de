//! Tracks which descriptors of this process are remote files or the library's own, and how remote ones are
//! created and released.

use crate::guard::{checked, system_call};
use crate::{guard, own, pool, process, remote, start};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use towline_instance::notes::Note;
use towline_instance::{ENTRIES, Entry, PLACEHOLDERS, State, Taken};

/// Descriptors from this number on are never remote: a call that would make one fails with `EMFILE`, or
/// `EBADF` if it names the number.
const DESCRIPTORS_MAX: usize = 65536;

/// For each descriptor: the entry's number plus one, a word of the library's own ones ([`Own`]), or zero.
static TABLE: [AtomicU32; DESCRIPTORS_MAX] = [const { AtomicU32::new(0) }; DESCRIPTORS_MAX];
/// Number of this process's descriptors of each entry.
static COUNTS: [AtomicU32; ENTRIES] = [const { AtomicU32::new(0) }; ENTRIES];
/// The handle of each entry in use here. A different handle in the entry means that the entry has been
/// reused.
static HANDLES: [AtomicU64; ENTRIES] = [const { AtomicU64::new(0) }; ENTRIES];
/// No descriptor from this number on has ever been entered: scans stop here.
static BEYOND: AtomicU32 = AtomicU32::new(0);

/// Stores what a descriptor is; returns false if the table has no place for it.
fn enter(fd: i32, word: u32) -> bool {
    let Some(place) = TABLE.get(fd as usize) else { return false };
    BEYOND.fetch_max(fd as u32 + 1, Ordering::Relaxed);
    place.store(word, Ordering::Release);
    true
}

/// Purpose of one of the library's own descriptors, see `own.rs`.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Own {
    /// A connection or an anchor: it can be made anew.
    Connection,
    /// Used for mappings: it must stay open.
    Memory,
}

impl Own {
    const fn word(self) -> u32 {
        match self {
            Self::Connection => u32::MAX,
            Self::Memory => u32::MAX - 1,
        }
    }

    fn of(word: u32) -> Option<Self> {
        [Self::Connection, Self::Memory].into_iter().find(|own| own.word() == word)
    }
}

/// Notes that a descriptor is the library's own; returns false if the table has no place for it.
pub(crate) fn note_own(fd: i32, what: Own) -> bool {
    enter(fd, what.word())
}

/// Returns the purpose of the library's own descriptor `fd`; `None` for all others.
#[inline]
pub(crate) fn own_at(fd: i32) -> Option<Own> {
    Own::of(TABLE.get(fd as usize)?.load(Ordering::Acquire))
}

/// Yields the library's own descriptors in a range.
pub(crate) fn own(from: u32, to: u32) -> impl Iterator<Item = (u32, Own)> {
    let end = to.saturating_add(1).min(BEYOND.load(Ordering::Relaxed));
    (from..end).filter_map(|fd| Some((fd, own_at(fd as i32)?)))
}

/// A remote open file.
#[derive(Clone, Copy)]
pub(crate) struct Open {
    pub(crate) number: usize,
    pub(crate) entry: &'static Entry,
    /// Handle in the protocol. The entry's own handle changes when it is reused, as another thread may
    /// close this file meanwhile.
    pub(crate) handle: u64,
}

impl Open {
    fn of(number: usize) -> Option<Self> {
        let entry = start::state()?.entry(number)?;
        Some(Self { number, entry, handle: HANDLES[number].load(Ordering::Acquire) })
    }

    /// Decodes a word of the table; `None` for zero and for our own descriptors.
    fn at(word: u32) -> Option<Self> {
        if word == 0 { None } else { Self::of(word as usize - 1) }
    }

    /// Returns false if the entry has been reused for another file.
    pub(crate) fn is_there(&self) -> bool {
        self.entry.handle.load(Ordering::Acquire) == self.handle
    }
}

/// Returns the remote file behind a descriptor; `None` for all others.
#[inline]
pub(crate) fn find(fd: i32) -> Option<Open> {
    let found = look(fd);
    if found.is_some() {
        crate::report::touch();
    }
    found
}

#[inline]
fn look(fd: i32) -> Option<Open> {
    Open::at(TABLE.get(fd as usize)?.load(Ordering::Acquire)).filter(Open::is_there)
}

/// Yields all remote descriptors in a range.
pub(crate) fn all(from: u32, to: u32) -> impl Iterator<Item = (i32, Open)> {
    let end = to.saturating_add(1).min(BEYOND.load(Ordering::Relaxed));
    (from as i32..end as i32).filter_map(|fd| Some((fd, look(fd)?)))
}

/// A copy of the descriptor table, for a process that continues after a child that used its memory.
pub(crate) struct Kept {
    beyond: usize,
    table: [u32; DESCRIPTORS_MAX],
}

/// Returns the address ranges of the large tables.
pub(crate) fn tables() -> [std::ops::Range<usize>; 3] {
    let part = |at: usize, bytes: usize| at..at + bytes;
    [
        part(&raw const TABLE as usize, size_of_val(&TABLE)),
        part(&raw const COUNTS as usize, size_of_val(&COUNTS)),
        part(&raw const HANDLES as usize, size_of_val(&HANDLES)),
    ]
}

/// Copies the table.
pub(crate) fn keep(kept: &mut Kept) {
    kept.beyond = BEYOND.load(Ordering::Relaxed) as usize;
    for (place, known) in kept.table.iter_mut().zip(&TABLE).take(kept.beyond) {
        *place = known.load(Ordering::Relaxed);
    }
}

/// Restores the table, whatever the child was doing when it ended.
pub(crate) fn put_back(kept: &Kept) {
    let count = |number: u32| COUNTS.get((number as usize).wrapping_sub(1));
    let now = BEYOND.load(Ordering::Relaxed) as usize;
    for (fd, place) in TABLE.iter().enumerate().take(now.max(kept.beyond)) {
        let before = if fd < kept.beyond { kept.table[fd] } else { 0 };
        for number in [place.swap(before, Ordering::Relaxed), before] {
            if let Some(count) = count(number) {
                count.store(0, Ordering::Relaxed);
            }
        }
    }
    for number in &kept.table[..kept.beyond] {
        if let Some(count) = count(*number) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// The properties of a descriptor to be made.
pub(crate) struct New<'a> {
    pub(crate) mount: usize,
    pub(crate) handle: u64,
    /// [`towline_wire::Attr::identity`].
    pub(crate) inode: u64,
    pub(crate) mode: u32,
    /// Its file system says only at a close what it could not store.
    pub(crate) settles: bool,
    pub(crate) flags: i32,
    pub(crate) path: &'a [u8],
}

/// A descriptor and its entry, reserved for a file that is about to be opened.
pub(crate) struct Reserved {
    number: usize,
    entry: &'static Entry,
    fd: i32,
    is_pooled: bool,
}

/// Reserves a descriptor and an entry.
///
/// # Errors
/// `EMFILE`, `ENFILE`.
pub(crate) fn reserve(flags: i32) -> Result<Reserved, i32> {
    let state = start::state().ok_or(libc::ENOENT)?;
    let cloexec = flags & libc::O_CLOEXEC;
    let pooled = pool::take(cloexec != 0)?;
    let (number, fd) = match pooled {
        Some(pooled) => pooled,
        None => {
            let number = take_entry(state)?;
            let fd = placeholder(number, cloexec).inspect_err(|_| state.give_back(number))?;
            (number, fd)
        }
    };
    let entry = state.entry(number).ok_or(libc::ENFILE)?;
    let reserved = Reserved { number, entry, fd, is_pooled: pooled.is_some() };
    if fd as usize >= DESCRIPTORS_MAX { Err(libc::EMFILE) } else { Ok(reserved) }
}

/// Takes a free entry whose lock is free: a thread that found the entry's last file before that was closed
/// may still be about to change it.
fn take_entry(state: &State) -> Result<usize, i32> {
    let mut changing = Vec::new();
    let taken = loop {
        let Some(number) = state.take() else { break Err(libc::ENFILE) };
        if state.entry(number).is_some_and(|entry| entry.try_lock(process::holder()).is_some()) {
            break Ok(number);
        }
        changing.push(number);
    };
    changing.into_iter().for_each(|number| state.give_back(number));
    taken
}

impl Drop for Reserved {
    fn drop(&mut self) {
        // SAFETY: just opened, and known to nobody else.
        unsafe { system_call(libc::SYS_close, [self.fd as usize, 0, 0, 0, 0, 0]) };
        if self.is_pooled {
            if let Some(open) = Open::of(self.number) {
                pool::closed(open);
            }
        } else if let Some(state) = start::state().filter(|state| !state.is_kept()) {
            // Otherwise the keeper frees it after it has seen the placeholder close. If we freed it, the
            // keeper would take that close for the end of the entry's next file.
            state.give_back(self.number);
        }
    }
}

/// Turns a reserved descriptor into that of an open file.
pub(crate) fn make(new: &New<'_>, reserved: Reserved) -> i32 {
    let Reserved { number, entry, fd, is_pooled } = reserved;
    std::mem::forget(reserved);
    let filling = entry.lock(process::holder());
    entry.flags.store((new.flags & !libc::O_CLOEXEC) as u32, Ordering::Relaxed);
    entry.mount.store(new.mount as u32, Ordering::Relaxed);
    entry.shared.store(0, Ordering::Relaxed);
    entry.anchored.store(u32::from(is_pooled), Ordering::Relaxed);
    entry.unanswered.store(0, Ordering::Relaxed);
    entry.forget_writes();
    entry.handle.store(new.handle, Ordering::Release);
    entry.inode.store(new.inode, Ordering::Relaxed);
    entry.mode.store(new.mode, Ordering::Relaxed);
    entry.settles.store(new.settles.into(), Ordering::Relaxed);
    entry.put_offset(0);
    entry.set_path(new.path);
    drop(filling);
    // Last, as only from here on may the keeper take a close of the placeholder for the end of the file.
    let _ = entry.change(Taken::Free, Taken::Open) || entry.change(Taken::Closed, Taken::Open);
    COUNTS[number].store(1, Ordering::Relaxed);
    HANDLES[number].store(new.handle, Ordering::Release);
    enter(fd, number as u32 + 1);
    crate::report::record_with(|| Note::Opened {
        flags: new.flags as u32,
        path: crate::place::absolute(new.mount, new.path),
    });
    fd
}

fn placeholder(number: usize, cloexec: i32) -> Result<i32, i32> {
    let mut path = Vec::with_capacity(128);
    path.extend_from_slice(start::directory());
    path.push(b'/');
    path.extend_from_slice(PLACEHOLDERS.as_bytes());
    path.extend_from_slice(format!("/{number}\0").as_bytes());
    let open = |flags: i32| {
        let flags = (libc::O_ACCMODE | libc::O_NOFOLLOW | cloexec | flags) as usize;
        let arguments = [libc::AT_FDCWD as usize, path.as_ptr() as usize, flags, 0o600, 0, 0];
        // SAFETY: the path ends with a zero byte.
        unsafe { checked(libc::SYS_openat, arguments) }.map(|fd| fd as i32)
    };
    // It mostly exists from an earlier use of the entry, and creating takes the directory's lock.
    match open(0) {
        Err(libc::ENOENT) => open(libc::O_CREAT),
        Err(libc::EACCES) => {
            // Left by another user, which this process was or shares the run with; it is not open anywhere.
            let unlink = [libc::AT_FDCWD as usize, path.as_ptr() as usize, 0, 0, 0, 0];
            // SAFETY: the path ends with a zero byte.
            unsafe { checked(libc::SYS_unlinkat, unlink) }?;
            open(libc::O_CREAT)
        }
        result => result,
    }
}

/// Returns the file of a descriptor if it is the process's last descriptor of the file.
pub(crate) fn last_of(fd: i32) -> Option<Open> {
    look(fd).filter(|open| COUNTS[open.number].load(Ordering::Acquire) == 1)
}

/// Counts an additional descriptor of a remote file, so that no other thread closes the file with its last
/// one.
fn pin(fd: i32) -> Option<Open> {
    let open = look(fd)?;
    COUNTS[open.number].fetch_add(1, Ordering::AcqRel);
    let is_same = look(fd).is_some_and(|now| now.handle == open.handle);
    if !is_same {
        unpin(open);
    }
    is_same.then_some(open)
}

/// Runs a call that duplicates the descriptor `from`, and notes the new descriptor. A number without a
/// place in the table is beyond the limit for remote files.
pub(crate) fn duplicate(from: i32, call: impl FnOnce() -> i32) -> i32 {
    let pinned = pin(from);
    let new = call();
    if new >= 0 {
        forget(new);
    }
    let Some(open) = pinned else { return new };
    if new >= 0 && enter(new, open.number as u32 + 1) {
        return new;
    }
    unpin(open);
    if new >= 0 {
        // SAFETY: just made, and known to nobody else.
        unsafe { system_call(libc::SYS_close, [new as usize, 0, 0, 0, 0, 0]) };
        guard::set_errno(libc::EMFILE);
    }
    -1
}

/// Runs a call that replaces the descriptor `to` by a duplicate of `from`. Other threads that use `to`
/// meanwhile find either the old or the new file. As in [`duplicate`], a remote file needs a place in the
/// table.
pub(crate) fn replace(from: i32, to: i32, call: impl FnOnce() -> i32) -> i32 {
    let _held = own::hold(to);
    let pinned = pin(from);
    if let Some(open) = pinned
        && usize::try_from(to).is_ok_and(|to| to >= DESCRIPTORS_MAX)
    {
        unpin(open);
        guard::set_errno(libc::EBADF);
        return -1;
    }
    let word = pinned.map_or(0, |open| open.number as u32 + 1);
    // Before the kernel does it: until then `to` is no placeholder.
    let before = pinned.and_then(|_| exchange(to, word));
    let new = call();
    match (before, pinned) {
        (Some(before), Some(open)) if new < 0 && put_back_at(to, word, before) => unpin(open),
        (Some(before), _) => {
            if let Some(open) = Open::at(before) {
                release(open);
            }
        }
        (None, pinned) => {
            if new >= 0 {
                forget(to);
            }
            if let Some(open) = pinned {
                unpin(open);
            }
        }
    }
    new
}

/// Stores what a descriptor is and returns what it was; `None` if the table has no place for it.
fn exchange(fd: i32, word: u32) -> Option<u32> {
    let place = TABLE.get(fd as usize)?;
    BEYOND.fetch_max(fd as u32 + 1, Ordering::Relaxed);
    Some(place.swap(word, Ordering::AcqRel))
}

fn put_back_at(fd: i32, word: u32, before: u32) -> bool {
    TABLE[fd as usize].compare_exchange(word, before, Ordering::AcqRel, Ordering::Relaxed).is_ok()
}

/// Forgets a number that the kernel closes or gives to something else: it is neither remote nor ours any
/// more.
pub(crate) fn forget(fd: i32) {
    let Some(place) = TABLE.get(fd as usize) else { return };
    if place.load(Ordering::Relaxed) == 0 {
        return;
    }
    if let Some(open) = Open::at(place.swap(0, Ordering::AcqRel)) {
        release(open);
    }
}

/// Releases one of this process's descriptors of a file, which is closed.
fn release(open: Open) {
    let _ = guard::inside(|| {
        remote::drop_process_locks(open);
        Ok(())
    });
    unpin(open);
}

/// Takes a descriptor of a file off the count. For one that was counted but then not made, that is all: only
/// a close releases the process's locks.
fn unpin(open: Open) {
    let was = COUNTS[open.number].fetch_sub(1, Ordering::AcqRel);
    if was != 1 {
        return;
    }
    let _ = guard::inside(|| {
        if open.is_there() && open.entry.shared.load(Ordering::Relaxed) == 0 {
            remote::close(open);
        }
        pool::closed(open);
        Ok(())
    });
}

/// Called when another process is about to get our descriptors.
pub(crate) fn share() {
    settle();
    mark_shared();
}

/// The first half of [`share`]: waits for unanswered changes.
pub(crate) fn settle() {
    let _ = guard::inside(|| {
        crate::fresh::settle_all();
        Ok(())
    });
}

/// The second half: marks all files as shared.
pub(crate) fn mark_shared() {
    for (_, open) in all(0, u32::MAX) {
        open.entry.shared.store(1, Ordering::Relaxed);
    }
}

/// Updates the paths of open files, for all processes of the run, after the rename of `from` to `to`; with
/// `exchange`, also in the other direction.
pub(crate) fn renamed(from: (usize, &[u8]), to: (usize, &[u8]), exchange: bool) {
    let Some(state) = start::state() else { return };
    for number in state.used() {
        let Some(entry) = state.entry(number) else { continue };
        let mount = entry.mount.load(Ordering::Relaxed) as usize;
        let is_below = |(of, path): (usize, &[u8])| mount == of && entry.is_below(path);
        let (old, new) = if is_below(from) {
            (from, to)
        } else if exchange && is_below(to) {
            (to, from)
        } else {
            continue;
        };
        let mut path = new.1.to_vec();
        path.extend_from_slice(entry.path().get(old.1.len()..).unwrap_or_default());
        entry.set_path(&path);
        entry.mount.store(new.0 as u32, Ordering::Relaxed);
    }
}

/// Suffix that `/proc` adds to the path of an open file whose name was removed.
pub(crate) const DELETED: &[u8] = b" (deleted)";

/// Marks open files whose name was removed, for all processes of the run.
pub(crate) fn removed((mount, path): (usize, &[u8])) {
    let Some(state) = start::state() else { return };
    for number in state.used() {
        let Some(entry) = state.entry(number) else { continue };
        if entry.mount.load(Ordering::Relaxed) as usize == mount && entry.is(path) {
            entry.set_path(&[path, DELETED].concat());
        }
    }
}

/// Checks whether a descriptor from elsewhere is a remote file, and if so adopts it.
pub(crate) fn adopt(fd: i32) {
    let Some(number) = number_of(fd) else { return };
    let Some(entry) = start::state().and_then(|state| state.entry(number)) else { return };
    if entry.taken() != Taken::Open || fd as usize >= DESCRIPTORS_MAX {
        return;
    }
    forget(fd);
    entry.shared.store(1, Ordering::Relaxed);
    HANDLES[number].store(entry.handle.load(Ordering::Acquire), Ordering::Release);
    let Some(open) = Open::of(number) else { return };
    COUNTS[number].fetch_add(1, Ordering::Relaxed);
    enter(fd, number as u32 + 1);
    remote::adopted(open);
    crate::stdio::take_over();
    crate::trap::arm();
}

/// Adopts the descriptors that this process inherited through `exec`.
pub(crate) fn adopt_all() {
    // No process of the run has a remote file open.
    let Some(state) = start::state().filter(|state| !state.is_unused()) else { return };
    state.leave_to_new_program(process::holder());
    let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
    let path = c"/proc/self/fd".as_ptr() as usize;
    let arguments = [libc::AT_FDCWD as usize, path, flags as usize, 0, 0, 0];
    // SAFETY: a plain open of a constant path.
    let Ok(list) = (unsafe { checked(libc::SYS_openat, arguments) }) else { return };
    let mut buffer = [0u8; 2048];
    loop {
        let arguments = [list, buffer.as_mut_ptr() as usize, buffer.len(), 0, 0, 0];
        // SAFETY: the buffer is as long as said.
        let Ok(length) = (unsafe { checked(libc::SYS_getdents64, arguments) }) else { break };
        if length == 0 {
            break;
        }
        let mut at = 0;
        while let Some(record) = buffer[at..length].get(16..18) {
            let bytes = usize::from(u16::from_ne_bytes([record[0], record[1]]));
            let name = &buffer[(at + 19).min(length)..(at + bytes).min(length)];
            let name = name.split(|b| *b == 0).next().unwrap_or_default();
            let fd = std::str::from_utf8(name).ok().and_then(|n| n.parse::<i32>().ok());
            if let Some(fd) = fd.filter(|fd| *fd as usize != list) {
                adopt(fd);
            }
            at += bytes.max(1);
        }
    }
    // SAFETY: opened above.
    unsafe { system_call(libc::SYS_close, [list, 0, 0, 0, 0, 0]) };
}

/// Returns the entry of a placeholder.
fn number_of(fd: i32) -> Option<usize> {
    number_at(&format!("/proc/self/fd/{fd}\0"))
}

/// Returns the remote file behind another process's descriptor, given by its name in `/proc`.
pub(crate) fn of_others(name: &[u8]) -> Option<Open> {
    let number = number_at(std::str::from_utf8(&[name, b"\0"].concat()).ok()?)?;
    let entry = start::state()?.entry(number)?;
    let handle = entry.handle.load(Ordering::Acquire);
    (entry.taken() == Taken::Open).then_some(Open { number, entry, handle })
}

fn number_at(path: &str) -> Option<usize> {
    let mut link = [0u8; 512];
    let target = read_link(path, &mut link)?;
    let rest = target.strip_prefix(start::directory())?.strip_prefix(b"/")?;
    let name = rest.strip_prefix(PLACEHOLDERS.as_bytes())?.strip_prefix(b"/")?;
    // If others have opened it, too, the keeper has unlinked its name to learn of the last close.
    let name = name.strip_suffix(DELETED).unwrap_or(name);
    std::str::from_utf8(name).ok()?.parse().ok()
}

/// Returns the target that `/proc` shows for a descriptor.
pub(crate) fn target_of(fd: i32) -> Option<Vec<u8>> {
    let mut link = [0u8; 4096];
    read_link(&format!("/proc/self/fd/{fd}\0"), &mut link).map(<[u8]>::to_vec)
}

/// Returns the path of an open local directory.
pub(crate) fn directory_of(fd: i32) -> Option<Vec<u8>> {
    // SAFETY: all zero is a valid `stat`.
    let mut status: libc::stat = unsafe { std::mem::zeroed() };
    let arguments = [fd as usize, &raw mut status as usize, 0, 0, 0, 0];
    // SAFETY: the structure outlives the call.
    unsafe { checked(libc::SYS_fstat, arguments) }.ok()?;
    if status.st_mode & libc::S_IFMT == libc::S_IFDIR { target_of(fd) } else { None }
}

/// Returns the target of a symbolic link. The path ends with a zero byte.
pub(crate) fn link_of(path: &[u8]) -> Option<Vec<u8>> {
    let mut link = [0u8; 4096];
    read_link(std::str::from_utf8(path).ok()?, &mut link).map(<[u8]>::to_vec)
}

fn read_link<'a>(path: &str, target: &'a mut [u8]) -> Option<&'a [u8]> {
    let arguments = [
        libc::AT_FDCWD as usize,
        path.as_ptr() as usize,
        target.as_mut_ptr() as usize,
        target.len(),
        0,
        0,
    ];
    // SAFETY: the path ends with a zero byte (all callers add it); the target is as long as said.
    let length = unsafe { checked(libc::SYS_readlinkat, arguments) }.ok()?;
    Some(&target[..length])
}
