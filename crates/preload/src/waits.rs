//! Waits that signals interrupt.
//!
//! A handler may leave by a jump (`siglongjmp`) and never return to us. So none runs while we wait: a
//! signal ends the wait, the caller releases everything it holds, and only then the handler runs. If it
//! returns, the call fails with `EINTR` or is restarted, as the handler was set.

use crate::descriptors::Own;
use crate::guard::{self, checked, handled_signals, mask, set_quiet};
use crate::table::real;
use crate::trap::masks::{self, SET_BYTES};
use crate::{handlers, own, vfork};
use libc::{c_int, pthread_t, timespec};
use std::cell::Cell;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use towline_net::{MOMENT, pause};

/// A signal came whose handler restarts calls: restart the call once nothing is held. The kernel's own
/// number (`ERESTARTSYS`), which no program sees.
pub(crate) const RESTART: i32 = 512;

/// The call must open something that waits for another process, at a point where handlers may run
/// ([`open_now`]). Another number that no program sees.
pub(crate) const OPEN: i32 = 513;

/// A path with a zero byte at its end. It is not allocated: a handler may jump out of a call that waits.
pub(crate) type Path = [u8; 512];

thread_local! {
    /// What a trapped call must open, and the flags.
    static TO_OPEN: Cell<Option<(Path, c_int)>> = const { Cell::new(None) };
    /// The program's mask while a trapped call is answered.
    static TRAPPED: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Number of times that all waits of this process had to end.
static RECALLS: AtomicU32 = AtomicU32::new(0);
/// Interval at which a thread that waits looks whether there are more of them.
const LOOK: timespec = timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// Number of threads that wait.
static WAITING: AtomicU32 = AtomicU32::new(0);
/// How often [`alone`] calls them back, after which it does not care: one of them may wait for a dead server.
const ALONE_TRIES: u32 = 1000;

/// Cancels a thread. If it waits, it finds out and ends by itself, once it holds nothing.
pub(crate) unsafe fn pthread_cancel(thread: pthread_t) -> c_int {
    // SAFETY: the program passes a thread.
    let result = unsafe { real::pthread_cancel(thread) };
    recall();
    result
}

/// Returns what [`interruptible`] needs. A thread that may be cancelled looks whether it was after this call.
pub(crate) fn recalls() -> u32 {
    RECALLS.load(Ordering::Acquire)
}

/// Ends all waits, which begin anew.
pub(crate) fn recall() {
    RECALLS.fetch_add(1, Ordering::Release);
}

/// Runs `work`, from inside, while no other thread is inside, nor waits if `work` takes what waits use.
pub(crate) fn alone<T>(takes_all: impl Fn() -> bool, work: impl FnOnce() -> T) -> T {
    let (mut work, mut tries) = (Some(work), 0);
    loop {
        let is_free =
            || WAITING.load(Ordering::Acquire) == 0 || tries == ALONE_TRIES || !takes_all();
        let done = guard::alone(|| if is_free() { work.take().map(|work| work()) } else { None });
        if let Some(done) = done {
            return done;
        }
        recall();
        pause(MOMENT);
        tries += 1;
    }
}

/// Forgets the threads that wait: in the child of a fork, there are none.
pub(crate) fn forget() {
    WAITING.store(0, Ordering::Relaxed);
    #[cfg(target_arch = "x86_64")]
    crate::guest::calls::forget();
}

/// A wait in progress.
pub(crate) struct Wait {
    /// [`recalls`] from before the wait.
    recalls: u32,
    /// Signals that the program itself blocks.
    blocked: u64,
    /// Readable when a signal arrives that cannot be put back, so that a mask holds it up.
    held_up: Option<HeldUp>,
    /// Signals with handlers that arrived.
    came: u64,
}

/// Runs `work`, which waits by the [`Wait`]. The handlers of signals that arrive run at the end, when
/// everything is released.
///
/// # Errors
/// `EINTR` if the handler of an arrived signal interrupts calls; [`RESTART`] if the arrived signals'
/// handlers restart calls (in a trapped call they have yet to run), or if all waits had to end since `recalls`, because
/// a thread was cancelled, maybe this one; those of `work`.
pub(crate) fn interruptible<T>(
    recalls: u32,
    work: impl FnOnce(&mut Wait) -> Result<T, i32>,
) -> Result<T, i32> {
    let before = mask(libc::SIG_BLOCK, handled_signals().all);
    let trapped = TRAPPED.try_with(Cell::get).unwrap_or(None);
    let quiet = set_quiet(true);
    let mut wait = Wait { recalls, blocked: trapped.unwrap_or(before), held_up: None, came: 0 };
    WAITING.fetch_add(1, Ordering::AcqRel);
    let result = match work(&mut wait) {
        Err(libc::EINTR) if wait.came & handled_signals().interrupting == 0 => Err(RESTART),
        result => result,
    };
    let came = wait.came;
    let _ = guard::inside(|| {
        drop(wait);
        Ok(())
    });
    WAITING.fetch_sub(1, Ordering::Release);
    if recalls != self::recalls() {
        // So that `alone` finds a moment without waits.
        pause(3 * MOMENT);
    }
    set_quiet(quiet);
    // In a trapped call, handlers run once its stack is left (`trapped`).
    let now_let_in = if trapped.is_none() { came } else { 0 };
    mask(libc::SIG_SETMASK, masks::without(before & !now_let_in));
    result
}

/// Answers a trapped call. Signals with handlers wait until `work` has left its stack, which a handler
/// could be given again. Runs `work` again as long as it returns [`RESTART`].
#[cfg(target_arch = "x86_64")]
pub(crate) fn trapped(work: impl Fn() -> isize) -> isize {
    loop {
        let before = mask(libc::SIG_BLOCK, handled_signals().all);
        let _ = TRAPPED.try_with(|trapped| trapped.set(Some(before)));
        let result = work();
        let _ = TRAPPED.try_with(|trapped| trapped.set(None));
        mask(libc::SIG_SETMASK, masks::without(before));
        if result != -(RESTART as isize) {
            return result;
        }
    }
}

/// Answers a call of a guest, which has the signals `blocked` blocked. If it returns [`RESTART`], the
/// caller makes the call again after the handlers have run.
#[cfg(target_arch = "x86_64")]
pub(crate) fn answering(blocked: u64, work: impl FnOnce() -> isize) -> isize {
    let _ = TRAPPED.try_with(|trapped| trapped.set(Some(blocked)));
    let result = work();
    let _ = TRAPPED.try_with(|trapped| trapped.set(None));
    result
}

/// Stores what to open once the current trapped call has left its stack; returns [`OPEN`].
pub(crate) fn open_later(path: Path, flags: c_int) -> i32 {
    let _ = TO_OPEN.try_with(|to_open| to_open.set(Some((path, flags))));
    OPEN
}

/// Opens what [`open_later`] stored, with `make`, which makes a system call during which handlers may run.
#[cfg(target_arch = "x86_64")]
pub(crate) fn open_now(make: impl FnOnce(libc::c_long, [usize; 6]) -> isize) -> isize {
    let Some((path, flags)) = TO_OPEN.try_with(Cell::take).ok().flatten() else {
        return -(libc::EIO as isize);
    };
    let at = libc::AT_FDCWD as usize;
    let fd = make(libc::SYS_openat, [at, path.as_ptr() as usize, flags as usize, 0, 0, 0]);
    if fd >= 0 {
        crate::descriptors::forget(fd as c_int);
    }
    fd
}

/// Returns the program's mask if a trapped call is being answered with more signals blocked.
pub(crate) fn blocked_outside() -> Option<u64> {
    let blocked = TRAPPED.try_with(Cell::get).ok().flatten()?;
    (handled_signals().all & !blocked != 0).then_some(blocked)
}

/// Returns true in a trapped call, where [`trapped`] restarts calls.
pub(crate) fn is_trapped() -> bool {
    TRAPPED.try_with(Cell::get).is_ok_and(|trapped| trapped.is_some())
}

impl Wait {
    /// Waits until `ready` returns a value. Until then it returns a descriptor, which becomes readable when
    /// `ready` must be called again.
    ///
    /// # Errors
    /// `EINTR` if a signal with a handler came, or all waits have to end; those of `ready`.
    pub(crate) fn until<T>(
        &mut self,
        mut ready: impl FnMut() -> Result<Result<T, c_int>, i32>,
    ) -> Result<T, i32> {
        let handled = handled_signals();
        // In a trapped call, even our own handler would be given the stack that the call has left.
        let masked = if is_trapped() { handled.all | masks::held_up() } else { handled.masked };
        if masked != 0 {
            self.held_up = Some(HeldUp::new(masked & !self.blocked)?);
        }
        // Our handler puts the others back when they arrive, which ends the wait.
        let let_in = masks::without(self.blocked | masked);
        let held_up = self.held_up.as_ref().map_or(-1, |held_up| held_up.0.as_raw_fd());
        loop {
            let fd = match ready()? {
                Ok(value) => return Ok(value),
                Err(fd) => fd,
            };
            let poll = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
            let mut list = [poll(fd), poll(held_up)];
            let (at, set) = (list.as_mut_ptr() as usize, &raw const let_in as usize);
            let mut time = LOOK;
            let time = if vfork::has_one_thread() { 0 } else { &raw mut time as usize };
            // SAFETY: all outlive the call; the set is 8 bytes, as the kernel's are.
            let waited =
                unsafe { checked(libc::SYS_ppoll, [at, list.len(), time, set, SET_BYTES, 0]) };
            // A filter of the program may forbid the call.
            let is_forbidden = waited.is_err_and(|error| error != libc::EINTR);
            if is_forbidden {
                pause(MOMENT);
            }
            self.came |= handlers::take_put_back();
            // Without `ppoll`, all of them stay blocked.
            let looked_for = if is_forbidden { masked | handled.all } else { masked };
            if list[1].revents != 0 || is_forbidden {
                self.came |= pending() & looked_for & !self.blocked;
            }
            if self.came != 0 || self.recalls != recalls() {
                return Err(libc::EINTR);
            }
        }
    }
}

/// Returns the signals pending for this thread.
fn pending() -> u64 {
    let mut set = 0u64;
    // SAFETY: the set is 8 bytes as the kernel's are.
    let _ =
        unsafe { checked(libc::SYS_rt_sigpending, [&raw mut set as usize, SET_BYTES, 0, 0, 0, 0]) };
    set
}

/// A descriptor that is readable while one of the given signals is pending.
struct HeldUp(OwnedFd);

impl HeldUp {
    fn new(signals: u64) -> Result<Self, i32> {
        let (none, set) = (usize::MAX, &raw const signals as usize);
        let arguments = [none, set, SET_BYTES, libc::SFD_CLOEXEC as usize, 0, 0];
        guard::inside(|| {
            // SAFETY: the set is 8 bytes as the kernel's are; the descriptor is new.
            let fd =
                unsafe { OwnedFd::from_raw_fd(checked(libc::SYS_signalfd4, arguments)? as c_int) };
            // Other threads go on meanwhile, and may want its number.
            own::hide(fd, Own::Connection).map(Self)
        })
    }
}
