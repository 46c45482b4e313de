//! Waits for something that others do, which signals end.
//!
//! A handler may leave by a jump (`siglongjmp`) and never come back to us. So none runs while we wait: a
//! signal ends the waiting, the caller gives back all that it holds, and only then its handler runs.
//! When that comes back, the call fails with `EINTR` or is begun again, as the handler was set.

use crate::guard::{checked, handled_signals, mask, set_quiet};
use crate::handlers;
use crate::trap::masks::{self, SET_BYTES};
use libc::c_int;
use std::cell::Cell;
use towline_net::{MOMENT, pause};

/// A signal came whose handler restarts calls: the call is to be begun again, where nothing is held.
/// The kernel's own number for it, which no program sees.
pub(crate) const RESTART: i32 = 512;

/// Something is to be opened that waits for another process, where handlers may run ([`open_now`]).
/// Another number that no program sees.
pub(crate) const OPEN: i32 = 513;

/// A path with a zero byte at its end. No memory is taken for it: a handler may jump out of a call that waits.
pub(crate) type Path = [u8; 512];

thread_local! {
    /// What a trapped call is to open, and how.
    static TO_OPEN: Cell<Option<(Path, c_int)>> = const { Cell::new(None) };
    /// While a trapped call is answered: the mask that the program had.
    static TRAPPED: Cell<Option<u64>> = const { Cell::new(None) };
}

/// A wait under way.
pub(crate) struct Wait {
    /// What the program itself blocks.
    blocked: u64,
    /// Becomes readable when a signal comes that cannot be put back, which a mask holds up.
    held_up: Option<HeldUp>,
    /// Signals with handlers that came.
    came: u64,
}

/// Runs `work`, which waits for others by the [`Wait`]. The handlers of signals that come run at the
/// end, when all is given back.
///
/// # Errors
/// `EINTR` when a signal came whose handler ends calls; [`RESTART`] when another one did, or, in a
/// trapped call, is about to; those of `work`.
pub(crate) fn interruptible<T>(work: impl FnOnce(&mut Wait) -> Result<T, i32>) -> Result<T, i32> {
    let before = mask(libc::SIG_BLOCK, handled_signals().all);
    let trapped = TRAPPED.try_with(Cell::get).unwrap_or(None);
    let quiet = set_quiet(true);
    let mut wait = Wait { blocked: trapped.unwrap_or(before), held_up: None, came: 0 };
    let result = match work(&mut wait) {
        Err(libc::EINTR) if wait.came & handled_signals().interrupting == 0 => Err(RESTART),
        result => result,
    };
    let came = wait.came;
    drop(wait);
    set_quiet(quiet);
    // A trapped call's run when the stack that it is answered on is left (`trapped`).
    let now_let_in = if trapped.is_none() { came } else { 0 };
    mask(libc::SIG_SETMASK, masks::without(before & !now_let_in));
    result
}

/// Answers a trapped call: signals with handlers wait until `work` has left the stack that it runs on,
/// which a handler could be given again. It is run anew as long as waits in it are to be begun again.
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

/// Answers a call of a guest, which has these signals blocked. Who is told [`RESTART`] makes it anew
/// when the handlers have run.
#[cfg(target_arch = "x86_64")]
pub(crate) fn answering(blocked: u64, work: impl FnOnce() -> isize) -> isize {
    let _ = TRAPPED.try_with(|trapped| trapped.set(Some(blocked)));
    let result = work();
    let _ = TRAPPED.try_with(|trapped| trapped.set(None));
    result
}

/// Has something opened when the trapped call that is answered has left the stack that it runs on; gives [`OPEN`].
pub(crate) fn open_later(path: Path, flags: c_int) -> i32 {
    let _ = TO_OPEN.try_with(|to_open| to_open.set(Some((path, flags))));
    OPEN
}

/// Opens it, by `make`, which makes a system call in which handlers may run.
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

/// What the program has blocked, where a call is answered for which more is blocked.
pub(crate) fn blocked_outside() -> Option<u64> {
    let blocked = TRAPPED.try_with(Cell::get).ok().flatten()?;
    (handled_signals().all & !blocked != 0).then_some(blocked)
}

/// True where a call that is to be begun again is begun again by [`trapped`].
pub(crate) fn is_trapped() -> bool {
    TRAPPED.try_with(Cell::get).is_ok_and(|trapped| trapped.is_some())
}

impl Wait {
    /// Waits until `ready` gives a value; as long as it has none it gives a descriptor instead, which
    /// becomes readable when it is to be asked again.
    ///
    /// # Errors
    /// `EINTR` when a signal with a handler came; those of `ready`.
    pub(crate) fn until<T>(
        &mut self,
        mut ready: impl FnMut() -> Result<Result<T, c_int>, i32>,
    ) -> Result<T, i32> {
        let handled = handled_signals();
        // Ours, too, would be given the stack that a trapped call has left.
        let masked = if is_trapped() { handled.all | masks::held_up() } else { handled.masked };
        if masked != 0 {
            self.held_up = Some(HeldUp::new(masked & !self.blocked)?);
        }
        // The others are put back by our handler when they come, and end the waiting.
        let let_in = masks::without(self.blocked | masked);
        let held_up = self.held_up.as_ref().map_or(-1, |held_up| held_up.0);
        loop {
            let fd = match ready()? {
                Ok(value) => return Ok(value),
                Err(fd) => fd,
            };
            let poll = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
            let mut list = [poll(fd), poll(held_up)];
            let (at, set) = (list.as_mut_ptr() as usize, &raw const let_in as usize);
            // SAFETY: both outlive the call; the set is 8 bytes as the kernel's are.
            let waited =
                unsafe { checked(libc::SYS_ppoll, [at, list.len(), 0, set, SET_BYTES, 0]) };
            // A filter of the program may forbid it.
            let is_forbidden = waited.is_err_and(|error| error != libc::EINTR);
            if is_forbidden {
                pause(MOMENT);
            }
            self.came |= handlers::take_put_back();
            // Without it all of them stay held up.
            let looked_for = if is_forbidden { masked | handled.all } else { masked };
            if list[1].revents != 0 || is_forbidden {
                self.came |= pending() & looked_for & !self.blocked;
            }
            if self.came != 0 {
                return Err(libc::EINTR);
            }
        }
    }
}

/// Signals that wait for this thread.
fn pending() -> u64 {
    let mut set = 0u64;
    // SAFETY: the set is 8 bytes as the kernel's are.
    let _ =
        unsafe { checked(libc::SYS_rt_sigpending, [&raw mut set as usize, SET_BYTES, 0, 0, 0, 0]) };
    set
}

/// A descriptor that is readable while one of these signals is pending.
struct HeldUp(c_int);

impl HeldUp {
    fn new(signals: u64) -> Result<Self, i32> {
        let (none, set) = (usize::MAX, &raw const signals as usize);
        let arguments = [none, set, SET_BYTES, libc::SFD_CLOEXEC as usize, 0, 0];
        // SAFETY: the set is 8 bytes as the kernel's are; the descriptor is new.
        let fd = unsafe { checked(libc::SYS_signalfd4, arguments) }?;
        Ok(Self(fd as c_int))
    }
}

impl Drop for HeldUp {
    fn drop(&mut self) {
        // SAFETY: ours.
        let _ = unsafe { checked(libc::SYS_close, [self.0 as usize, 0, 0, 0, 0, 0]) };
    }
}
