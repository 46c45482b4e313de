//! The mapped file: the configuration and the table of open file descriptions.
#![allow(unsafe_code)]

mod prepared;

use crate::behind::{Behind, Counts};
use crate::layout::{BETWEEN_AT, CONFIG_AT, MAGIC, STATE_BYTES as BYTES};
use crate::position::Position;
use crate::ready::Stock;
use crate::set::Set;
use crate::{COUNTED_MAX, Config, ENTRIES, Entry, Holder, MOUNTS_MAX, Root};
pub use prepared::Prepared;
use prepared::{lock, open};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

/// Length of the head in bytes, including the configuration.
const HEAD_BYTES: usize = 64 * 1024;
/// Maximum length of the configuration in bytes.
const CONFIG_BYTES: usize = 48 * 1024;
const WORDS: usize = ENTRIES / 64;

/// The fields that every starting process reads come first, within one page with the beginning of the
/// configuration.
#[repr(C)]
struct Head {
    magic: AtomicU64,
    /// Length of the configuration in bytes.
    length: AtomicU64,
    /// Whether the rest is valid: a value of [`Ready`]. Programs wait for it with a futex.
    ready: AtomicU32,
    /// 1 while `towline run` frees entries.
    kept: AtomicU32,
    hint: AtomicU32,
    /// See [`State::is_watched`].
    watched: AtomicU32,
    /// See [`State::changes`].
    changes: AtomicU64,
    /// See [`State::mapped`].
    mapped: AtomicU32,
    /// See [`State::take_between`].
    between: AtomicU32,
    /// See [`State::moves`].
    moves: AtomicU64,
    /// See [`State::behind`].
    behind: [Counts; MOUNTS_MAX],
    /// Handle, `Attr::identity` and boot epoch of each mount's directory, once the run has begun.
    roots: [[AtomicU64; 3]; MOUNTS_MAX],
    /// See [`State::stock`].
    stock: [AtomicU32; MOUNTS_MAX],
    /// One bit per entry, set if it is taken.
    used: [AtomicU64; WORDS],
    config: [AtomicU8; CONFIG_BYTES],
    /// Processes with record locks that are about to execute a program; zero: free.
    executing: [AtomicU64; EXECUTING],
    /// Number of answered calls per libc function, in the order of the library's table.
    functions: [AtomicU64; COUNTED_MAX],
    /// Number of trapped and answered system calls, by system call number.
    trapped: [AtomicU64; COUNTED_MAX],
    /// Number of trapped system calls that were passed to the kernel.
    passed: AtomicU64,
    /// See [`State::ask_to_close`].
    asked: AtomicU64,
    closed: AtomicU64,
    /// See [`State::note_name`].
    names: Set<16>,
    /// See [`State::from_cache`] and [`State::to_cache`].
    from_cache: AtomicU64,
    to_cache: AtomicU64,
    /// See [`State::moving`].
    moving: AtomicU32,
    /// See [`State::namespace`].
    namespace: AtomicU64,
    /// See [`State::note_watched`].
    directories: Set<64>,
}

/// Values of `Head::ready`.
#[derive(Clone, Copy)]
#[repr(u32)]
enum Ready {
    NotYet = 0,
    Begun = 1,
    Failed = 2,
}

/// Returns true if the keeper has ended, if it is a child of this process (one without a termination
/// signal). Returns false in processes without such a child.
fn keeper_has_ended() -> bool {
    // SAFETY: all zero is a valid value.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let how = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT | libc::__WCLONE;
    // SAFETY: the structure outlives the call.
    let waited = unsafe { libc::waitid(libc::P_ALL, 0, &raw mut info, how) };
    // SAFETY: the call filled it, or left it zero.
    waited == 0 && unsafe { info.si_pid() } != 0
}

/// Returns the number of this process's PID namespace; `None` if `/proc` is not there.
#[must_use]
pub fn pid_namespace() -> Option<u64> {
    Some(rustix::fs::stat("/proc/self/ns/pid").ok()?.st_ino)
}

/// Maximum number of processes with locks that execute a program at the same time.
const EXECUTING: usize = 128;

const _: () = {
    assert!(std::mem::offset_of!(Head, between) == BETWEEN_AT);
    assert!(std::mem::offset_of!(Head, config) == CONFIG_AT && size_of::<Head>() <= HEAD_BYTES);
    assert!(BYTES == HEAD_BYTES + ENTRIES * size_of::<Entry>());
};

/// The mapped file.
pub struct State {
    address: *const u8,
}

// SAFETY: everything that is changed through it after creation is atomic.
unsafe impl Send for State {}
// SAFETY: as above.
unsafe impl Sync for State {}

impl State {
    /// Creates the file in `directory` and writes the configuration into it.
    ///
    /// # Errors
    /// Those of the system calls; `InvalidInput` if the configuration is too long.
    pub fn prepare(directory: &[u8], config: &Config) -> io::Result<Prepared> {
        if !Position::works_here() {
            let lacks = "the processor lacks the 16-byte compare and exchange (cmpxchg16b)";
            return Err(io::Error::new(io::ErrorKind::Unsupported, lacks));
        }
        let encoded = config.to_bytes();
        if encoded.len() > CONFIG_BYTES {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let fd = open(directory, libc::O_RDWR | libc::O_CREAT | libc::O_EXCL)?;
        // SAFETY: a plain system call on our descriptor.
        if unsafe { libc::ftruncate(fd.as_raw_fd(), BYTES as i64) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let file = File::from(fd);
        let mut first = vec![0; CONFIG_AT];
        first[..8].copy_from_slice(&MAGIC.to_ne_bytes());
        first[8..16].copy_from_slice(&(encoded.len() as u64).to_ne_bytes());
        first.extend_from_slice(&encoded);
        file.write_all_at(&first, 0)?;
        Prepared::locked(file.into(), libc::LOCK_SH)
    }

    /// Publishes the roots that the servers reported, by mount, and lets waiting programs go on.
    pub fn begin(&self, roots: &[Root]) {
        let head = self.head();
        head.namespace.store(pid_namespace().unwrap_or(0), Ordering::Relaxed);
        for (to, from) in head.roots.iter().zip(roots) {
            to[0].store(from.handle, Ordering::Relaxed);
            to[1].store(from.inode, Ordering::Relaxed);
            to[2].store(from.epoch.into(), Ordering::Relaxed);
        }
        self.tell(Ready::Begun);
    }

    /// Returns the directory of a mount, once the run has [begun](Self::has_begun); `None` if the number is
    /// too large.
    #[must_use]
    pub fn root(&self, mount: usize) -> Option<Root> {
        let [handle, inode, epoch] =
            self.head().roots.get(mount)?.each_ref().map(|number| number.load(Ordering::Relaxed));
        Some(Root { handle, inode, epoch: epoch as u32 })
    }

    /// Returns, to the first caller only, the process between the program and the keeper: a child of the
    /// run's first process without a termination signal. Its exit status is zero if there is a keeper.
    #[must_use]
    pub fn take_between(&self) -> Option<u32> {
        let between = &self.head().between;
        // All processes of the run ask, nearly always without result: do not write to the page then.
        let is_there = between.load(Ordering::Relaxed) != 0;
        is_there.then(|| between.swap(0, Ordering::Relaxed)).filter(|number| *number != 0)
    }

    /// Declares that the run cannot begin, unless it has: waiting programs end.
    pub fn fail(&self) {
        if self.head().ready.load(Ordering::Relaxed) == Ready::NotYet as u32 {
            self.tell(Ready::Failed);
        }
    }

    fn tell(&self, ready: Ready) {
        let word = &self.head().ready;
        word.store(ready as u32, Ordering::Release);
        // SAFETY: the word lives as long as the process; waking does not access it.
        unsafe {
            libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE as usize, i32::MAX);
        }
    }

    /// Waits until the run has begun. Returns false if it cannot begin, or if the keeper has ended before.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        let word = &self.head().ready;
        loop {
            match word.load(Ordering::Acquire) {
                ready if ready == Ready::Begun as u32 => return true,
                ready if ready == Ready::NotYet as u32 => {}
                _ => return false,
            }
            let limit = libc::timespec { tv_sec: 0, tv_nsec: 100_000_000 };
            let (wait, not_yet) = (libc::FUTEX_WAIT as usize, Ready::NotYet as usize);
            // SAFETY: both live longer than the call.
            let waited = unsafe {
                libc::syscall(libc::SYS_futex, word.as_ptr(), wait, not_yet, &raw const limit)
            };
            if waited != 0
                && io::Error::last_os_error().raw_os_error() == Some(libc::ETIMEDOUT)
                && keeper_has_ended()
            {
                return word.load(Ordering::Acquire) == Ready::Begun as u32;
            }
        }
    }

    /// Maps the file in `directory` and becomes one of its [users](Prepared::is_used). The run may not have
    /// [begun](Self::has_begun) yet.
    ///
    /// # Errors
    /// Those of the system calls; `WouldBlock` if the run is over; `InvalidData` if the file has the wrong
    /// size.
    pub fn open(directory: &[u8]) -> io::Result<Self> {
        let fd = open(directory, libc::O_RDWR)?;
        let number = fd.as_raw_fd() as usize;
        // The mapping keeps the lock when the descriptor is closed.
        lock(&fd, libc::LOCK_SH)?;
        // SAFETY: all zero is a valid `stat`.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: the structure outlives the call. The raw call: a library that hooks `fstat`
        // calls this.
        if unsafe { libc::syscall(libc::SYS_fstat, number, &raw mut stat) } != 0 {
            return Err(io::Error::last_os_error());
        }
        if stat.st_size != BYTES as i64 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Self::map(&fd)
    }

    fn map(fd: &OwnedFd) -> io::Result<Self> {
        let number = fd.as_raw_fd();
        // SAFETY: a new shared mapping of a file of BYTES bytes; it is never unmapped. The raw
        // call: a library that hooks `mmap` calls this.
        let address = unsafe {
            libc::syscall(
                libc::SYS_mmap,
                0usize,
                BYTES,
                (libc::PROT_READ | libc::PROT_WRITE) as usize,
                libc::MAP_SHARED as usize,
                number as usize,
                0usize,
            )
        };
        if address == -1 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { address: address as *const u8 })
    }

    fn head(&self) -> &Head {
        // SAFETY: the mapping is page-aligned, lives as long as the process and holds a head, whose
        // fields are all atomics.
        unsafe { &*self.address.cast::<Head>() }
    }

    /// Returns the configuration, or `None` if the file holds no valid one.
    #[must_use]
    pub fn config(&self) -> Option<Config> {
        if self.head().magic.load(Ordering::Acquire) != MAGIC {
            return None;
        }
        let length = usize::try_from(self.head().length.load(Ordering::Acquire)).ok()?;
        let bytes = self.head().config.get(..length)?;
        let bytes: Vec<u8> = bytes.iter().map(|byte| byte.load(Ordering::Relaxed)).collect();
        Config::parse(&bytes)
    }

    /// Counter incremented before and after every change that a process of the run makes on a server.
    #[must_use]
    pub fn changes(&self) -> &AtomicU64 {
        &self.head().changes
    }

    /// Counter incremented when the stand-in of a working directory is renamed.
    #[must_use]
    pub fn moves(&self) -> &AtomicU64 {
        &self.head().moves
    }

    /// Number of renames under way that may be followed by one of a stand-in; too many once a process was killed in the
    /// midst of one. Lowered after [`Self::moves`] was raised.
    #[must_use]
    pub fn moving(&self) -> &AtomicU32 {
        &self.head().moving
    }

    /// Returns what is known of writes behind, by the number of a mount or of the first one of a server, which must be
    /// below [`MOUNTS_MAX`].
    #[must_use]
    pub fn behind(&self, mount: usize) -> Behind<'_> {
        Behind::new(&self.head().behind[mount % MOUNTS_MAX])
    }

    /// Returns which connections the keeper has ready for processes, by the number of the first mount of a server.
    #[must_use]
    pub fn stock(&self, mount: usize) -> Stock {
        let word = self.head().stock.get(mount);
        Stock::of_word(word.map_or(0, |word| word.load(Ordering::Relaxed)))
    }

    /// Changes that; does nothing if the number is too large.
    pub fn set_stock(&self, mount: usize, stock: Stock) {
        if let Some(word) = self.head().stock.get(mount) {
            word.store(stock.to_word(), Ordering::Relaxed);
        }
    }

    /// How often processes of the run have mapped remote files shared; never zero again after the first time.
    #[must_use]
    pub fn mapped(&self) -> &AtomicU32 {
        &self.head().mapped
    }

    /// Notes that a remote working directory, or a directory above one, has this name.
    pub fn note_name(&self, name: &[u8]) {
        self.head().names.add(name);
    }

    /// Returns false if no directory of this name was noted.
    #[must_use]
    pub fn may_have_name(&self, name: &[u8]) -> bool {
        self.head().names.may_have(name)
    }

    /// Notes that programs watch the directory with this `Attr::identity`.
    pub fn note_watched(&self, identity: u64) {
        self.head().directories.add(&identity.to_ne_bytes());
    }

    /// Returns false if nobody has ever watched this directory.
    #[must_use]
    pub fn may_be_watched(&self, identity: u64) -> bool {
        self.head().directories.may_have(&identity.to_ne_bytes())
    }

    /// Yields the numbers of the entries in use.
    pub fn used(&self) -> impl Iterator<Item = usize> {
        self.head().used.iter().enumerate().flat_map(|(word, bits)| {
            let mut rest = bits.load(Ordering::Acquire);
            std::iter::from_fn(move || {
                let bit = rest.trailing_zeros();
                rest &= rest.wrapping_sub(1);
                (bit < 64).then_some(word * 64 + bit as usize)
            })
        })
    }

    /// Returns the entry of this number, or `None` beyond the table.
    #[must_use]
    pub fn entry(&self, number: usize) -> Option<&Entry> {
        if number >= ENTRIES {
            return None;
        }
        // SAFETY: in range, aligned (the head is a multiple of pages), and all fields are atomics.
        Some(unsafe { &*self.address.add(HEAD_BYTES).cast::<Entry>().add(number) })
    }

    /// Takes a free entry, or returns `None` if all are in use. Its use is still
    /// [`Taken::Free`](crate::Taken::Free).
    #[must_use]
    pub fn take(&self) -> Option<usize> {
        let head = self.head();
        let start = head.hint.load(Ordering::Relaxed) as usize % WORDS;
        for step in 0..WORDS {
            let word = (start + step) % WORDS;
            let mut bits = head.used[word].load(Ordering::Relaxed);
            while bits != u64::MAX {
                let bit = bits.trailing_ones();
                let found = head.used[word].compare_exchange(
                    bits,
                    bits | 1 << bit,
                    Ordering::AcqRel,
                    Ordering::Relaxed,
                );
                match found {
                    Ok(_) => return Some(word * 64 + bit as usize),
                    Err(now) => bits = now,
                }
            }
            head.hint.store((word as u32 + 1) % WORDS as u32, Ordering::Relaxed);
        }
        None
    }

    /// Returns true if no entry is taken.
    #[must_use]
    pub fn is_unused(&self) -> bool {
        self.head().used.iter().all(|word| word.load(Ordering::Acquire) == 0)
    }

    /// Frees the locks of offsets that threads of this process had when it executed the program that has just begun.
    pub fn leave_to_new_program(&self, me: Holder) {
        self.used()
            .filter_map(|number| self.entry(number))
            .for_each(|e| e.leave_to_new_program(me));
    }

    /// Frees an entry.
    pub fn give_back(&self, number: usize) {
        let Some(entry) = self.entry(number) else { return };
        entry.free();
        let head = self.head();
        head.used[number / 64].fetch_and(!(1 << (number % 64)), Ordering::AcqRel);
        head.hint.store((number / 64) as u32, Ordering::Relaxed);
    }

    /// Number of answered calls per libc function, in the order of the library's table.
    #[must_use]
    pub fn functions(&self) -> &[AtomicU64] {
        &self.head().functions
    }

    /// Number of trapped and answered system calls, by system call number.
    #[must_use]
    pub fn trapped(&self) -> &[AtomicU64] {
        &self.head().trapped
    }

    /// Number of trapped system calls that were passed to the kernel.
    #[must_use]
    pub fn passed(&self) -> &AtomicU64 {
        &self.head().passed
    }

    /// Returns the number of the keeper's PID namespace once the run has begun; zero if that is not known. Numbers of
    /// processes, as in locks, mean the same there only.
    #[must_use]
    pub fn namespace(&self) -> u64 {
        self.head().namespace.load(Ordering::Relaxed)
    }

    /// Notes that a process has record locks and is about to execute a program. Returns false if there is
    /// no room.
    #[must_use]
    pub fn executes(&self, process: u64) -> bool {
        let notes = &self.head().executing;
        let free = |place: &AtomicU64| {
            place.compare_exchange(0, process, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        // There may be a note behind a free place: of an attempt that failed.
        notes.iter().any(|place| place.load(Ordering::Relaxed) == process) || notes.iter().any(free)
    }

    /// Removes the note of [`Self::executes`] for `process`; returns true if there was one. Calls `process`
    /// only if there are notes.
    #[must_use]
    pub fn executed(&self, process: impl FnOnce() -> u64) -> bool {
        let notes = &self.head().executing;
        if notes.iter().all(|place| place.load(Ordering::Acquire) == 0) {
            return false;
        }
        let process = process();
        let found = |place: &AtomicU64| {
            place.compare_exchange(process, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        notes.iter().any(found)
    }

    /// Returns true while `towline run` regularly closes files that were left (`Taken::Leaving`), even if a
    /// descriptor of their placeholders remains open.
    #[must_use]
    pub fn is_watched(&self) -> bool {
        self.head().watched.load(Ordering::SeqCst) != 0
    }

    /// Sets whether it does. After `watch(false)`, the caller must check for left files once more.
    pub fn watch(&self, watched: bool) {
        self.head().watched.store(u32::from(watched), Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Requests that all files whose last descriptor is already closed be closed on their servers, and
    /// returns the number of the request. The caller must wake `towline run`, which has done it once
    /// [`Self::has_closed`] returns true for this number.
    #[must_use]
    pub fn ask_to_close(&self) -> u64 {
        self.head().asked.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Returns the number of the latest such request.
    #[must_use]
    pub fn asked_to_close(&self) -> u64 {
        self.head().asked.load(Ordering::SeqCst)
    }

    /// Announces that all files closed before this request are closed on their servers.
    pub fn tell_closed(&self, asked: u64) {
        self.head().closed.store(asked, Ordering::Release);
    }

    /// Returns true once this request or a later one was announced as done.
    #[must_use]
    pub fn has_closed(&self, asked: u64) -> bool {
        self.head().closed.load(Ordering::Acquire) >= asked
    }

    /// Number of bytes that programs have read from the [cache](crate::cache).
    #[must_use]
    pub fn from_cache(&self) -> &AtomicU64 {
        &self.head().from_cache
    }

    /// Number of bytes that programs have put into the cache.
    #[must_use]
    pub fn to_cache(&self) -> &AtomicU64 {
        &self.head().to_cache
    }

    /// Returns true while `towline run` learns of closed placeholders and frees their entries.
    #[must_use]
    pub fn is_kept(&self) -> bool {
        self.head().kept.load(Ordering::Relaxed) == 1
    }

    /// Sets whether it does. If not, only the process that closes an entry frees it.
    pub fn keep(&self, keeps: bool) {
        self.head().kept.store(u32::from(keeps), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;
