//! The border between the program and our code: errno, signals, panics, re-entry, raw system calls.

use crate::handlers;
use crate::hooks::lost;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, compiler_fence};

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
    /// Whether signals with handlers wait. Signal handlers read it.
    static QUIET: AtomicBool = const { AtomicBool::new(false) };
    static THREAD: Thread = const { Thread { selector: Cell::new(PASS), armed: Cell::new(false) } };
}

/// State of a thread for the trap behind the symbols (`trap/`).
struct Thread {
    /// The kernel reads it at each system call from outside libc: trap the call or let it pass.
    selector: Cell<u8>,
    armed: Cell<bool>,
}

/// Values of the selector, as the kernel defines them.
const PASS: u8 = 0;
const TRAP: u8 = 1;

/// Lets all system calls of this thread pass until [`net_down`].
pub(crate) fn net_up() {
    let _ = THREAD.try_with(|thread| thread.selector.set(PASS));
}

/// Traps the program's system calls again, if this thread is armed and outside our code.
fn net_down() {
    let _ = THREAD.try_with(|thread| {
        thread.selector.set(if thread.armed.get() && !is_inside() { TRAP } else { PASS });
    });
}

/// Returns the address of this thread's selector.
pub(crate) fn selector() -> *mut u8 {
    THREAD.try_with(|thread| thread.selector.as_ptr()).unwrap_or(std::ptr::null_mut())
}

/// Returns true if the system calls of this thread are trapped.
pub(crate) fn is_armed() -> bool {
    THREAD.try_with(|thread| thread.armed.get()).unwrap_or(true)
}

/// Returns true if the kernel would trap a system call of this thread from outside libc now. Signals may arrive
/// at any time, also between changes of [`is_inside`] and of the selector.
fn is_trapped() -> bool {
    THREAD.try_with(|thread| thread.selector.get() == TRAP).unwrap_or(false)
}

/// Sets whether this thread is armed.
pub(crate) fn set_armed(armed: bool) {
    let _ = THREAD.try_with(|thread| thread.armed.set(armed));
    net_down();
}

/// Signals for which the program has a handler. They wait while we hold locks, since the handler may call
/// us. Other signals keep their effect, so that a waiting program can be ended.
static HANDLED: AtomicU64 = AtomicU64::new(0);

/// Those of them that interrupt a waiting call: set without `SA_RESTART`.
static INTERRUPTING: AtomicU64 = AtomicU64::new(0);

/// Those of them that a mask must hold up (see `handlers.rs`).
static MASKED: AtomicU64 = AtomicU64::new(0);

/// The known properties of a signal's disposition.
#[derive(Clone, Copy)]
pub(crate) struct Disposition {
    /// The disposition is a function of the program.
    pub(crate) has_handler: bool,
    /// The handler interrupts calls that wait.
    pub(crate) interrupts: bool,
    /// The kernel has our handler, which calls the program's.
    pub(crate) is_put_back: bool,
}

/// Returns true for a signal whose handler may wait until we are done: not one raised by a fault of the
/// program.
pub(crate) fn can_wait(signal: i32) -> bool {
    const FAULTS: [i32; 6] =
        [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS];
    (1..=64).contains(&signal) && !FAULTS.contains(&signal)
}

/// Notes that the handler of a signal was set or removed.
pub(crate) fn handled(signal: i32, now: Disposition) {
    if !can_wait(signal) {
        return;
    }
    let bit = 1 << (signal - 1);
    let set = |word: &AtomicU64, on: bool| match on {
        true => word.fetch_or(bit, Ordering::Relaxed),
        false => word.fetch_and(!bit, Ordering::Relaxed),
    };
    set(&INTERRUPTING, now.has_handler && now.interrupts);
    set(&MASKED, now.has_handler && !now.is_put_back);
    set(&HANDLED, now.has_handler);
}

/// Notes whether the program has a handler for `SIGSYS` while the kernel has ours (`trap/chained.rs`). That
/// signal is put back like others but never held up by a mask: the kernel kills a thread that has it
/// blocked when a filter traps a call.
#[cfg(target_arch = "x86_64")]
pub(crate) fn handled_trap(has_handler: bool, interrupts: bool) {
    for (set, on) in [(&INTERRUPTING, has_handler && interrupts), (&HANDLED, has_handler)] {
        match on {
            true => set.fetch_or(TRAP_BIT, Ordering::Relaxed),
            false => set.fetch_and(!TRAP_BIT, Ordering::Relaxed),
        };
    }
}

const TRAP_BIT: u64 = 1 << (libc::SIGSYS - 1);

/// Signals with handlers, as sets.
pub(crate) struct Handled {
    /// All that a mask may hold up.
    pub(crate) all: u64,
    /// Those that interrupt a waiting call.
    pub(crate) interrupting: u64,
    /// Those that cannot be put back: a mask must hold them up.
    pub(crate) masked: u64,
}

/// Returns the signals that wait while we hold locks.
pub(crate) fn handled_signals() -> Handled {
    let load = |set: &AtomicU64| set.load(Ordering::Relaxed);
    Handled {
        all: load(&HANDLED) & !TRAP_BIT,
        interrupting: load(&INTERRUPTING),
        masked: load(&MASKED),
    }
}

/// Runs `work` while a mask holds up signals with handlers: for work that must not be interrupted at all,
/// or during which no handler may run even for a moment.
pub(crate) fn masked<T>(work: impl FnOnce() -> T) -> T {
    let before = mask(libc::SIG_BLOCK, handled_signals().all);
    let result = work();
    mask(libc::SIG_SETMASK, crate::trap::masks::without(before));
    result
}

/// Calls a function of libc that forks; handlers of signals wait until it is over. libc takes its lock of
/// `pthread_atfork` before and after it calls us: a handler that used our code at such a moment would wait for
/// another thread's fork, which waits for that lock.
pub(crate) fn undisturbed<T>(fork: impl FnOnce() -> T) -> T {
    let all = handled_signals().all;
    let before = mask(libc::SIG_BLOCK, all);
    let result = fork();
    // The program's own `pthread_atfork` handlers may have changed the mask, too.
    mask(libc::SIG_UNBLOCK, all & !before);
    result
}

/// Returns true while this thread runs our own code, whose libc calls are not for us.
pub(crate) fn is_inside() -> bool {
    INSIDE.try_with(Cell::get).unwrap_or(true)
}

pub(crate) fn errno() -> i32 {
    // SAFETY: libc gives each thread a valid errno.
    unsafe { *libc::__errno_location() }
}

pub(crate) fn set_errno(errno: i32) {
    // SAFETY: libc gives each thread a valid errno.
    unsafe { *libc::__errno_location() = errno }
}

/// The value that a C function returns on failure.
pub(crate) trait Failed {
    /// The value.
    const FAILED: Self;
}

impl Failed for i32 {
    const FAILED: Self = -1;
}

impl Failed for isize {
    const FAILED: Self = -1;
}

impl Failed for i64 {
    const FAILED: Self = -1;
}

impl<T> Failed for *mut T {
    const FAILED: Self = std::ptr::null_mut();
}

/// Converts a result to C's convention: sets errno on failure.
pub(crate) fn finish<T: Failed>(result: Result<T, i32>) -> T {
    result.unwrap_or_else(|error| {
        set_errno(error);
        T::FAILED
    })
}

/// Number of threads inside our code, and whether one of them is about to fork.
static GATE: AtomicU32 = AtomicU32::new(0);
const FORKING: u32 = 1 << 31;
/// The forking thread's signal mask from before.
static FORKING_MASK: AtomicU64 = AtomicU64::new(0);
/// Number of pauses, 5 s in all, for which a fork waits until other threads leave our code: a thread
/// waiting for a dead server would delay the fork for long. Counted rather than timed, since another
/// library may have replaced the clock functions and would call us here.
const FORK_PAUSES: u32 = 100_000;
/// The same for a thread that waits for a fork, which may wait in libc for a lock that this thread holds: if a
/// handler interrupted `pthread_atfork` or `dlclose`.
const ENTER_PAUSES: u32 = 2 * FORK_PAUSES;

/// Sleeps for a moment.
pub(crate) fn pause() {
    let time = libc::timespec { tv_sec: 0, tv_nsec: 50_000 };
    // SAFETY: the structure outlives the call; nothing is written back.
    unsafe { system_call(libc::SYS_nanosleep, [&raw const time as usize, 0, 0, 0, 0, 0]) };
}

fn enter() {
    let mut pauses = 0;
    while GATE.fetch_add(1, Ordering::Acquire) & FORKING != 0 && pauses < ENTER_PAUSES {
        GATE.fetch_sub(1, Ordering::Release);
        while GATE.load(Ordering::Relaxed) & FORKING != 0 && pauses < ENTER_PAUSES {
            pause();
            pauses += 1;
        }
    }
}

/// Waits until no other thread is inside: in the child, its locks would stay taken for ever.
pub(crate) fn before_fork() {
    let own = hold_forks();
    for _ in 0..FORK_PAUSES {
        if GATE.load(Ordering::Acquire) & !FORKING <= own {
            break;
        }
        pause();
    }
}

/// Keeps other threads from forking and from entering our code, until [`after_fork`]. Returns whether this
/// thread is inside.
fn hold_forks() -> u32 {
    let before = mask(libc::SIG_BLOCK, handled_signals().all);
    let own = u32::from(is_inside());
    // One fork at a time; meanwhile, another fork does not wait for this thread.
    GATE.fetch_sub(own, Ordering::Release);
    while GATE.fetch_or(FORKING, Ordering::AcqRel) & FORKING != 0 {
        pause();
    }
    GATE.fetch_add(own, Ordering::Acquire);
    FORKING_MASK.store(before, Ordering::Relaxed);
    own
}

/// Ends [`before_fork`] in the parent or in the child, which has a single thread.
pub(crate) fn after_fork(is_child: bool) {
    // Before the next fork, which may begin now, stores its own.
    let before = FORKING_MASK.load(Ordering::Relaxed);
    if is_child {
        crate::waits::forget();
        GATE.store(u32::from(is_inside()), Ordering::Release);
    } else {
        GATE.fetch_and(!FORKING, Ordering::AcqRel);
    }
    mask(libc::SIG_SETMASK, crate::trap::masks::without(before));
}

/// Runs `work` while no other thread forks.
pub(crate) fn between_forks<T>(work: impl FnOnce() -> T) -> T {
    hold_forks();
    let result = work();
    after_fork(false);
    result
}

/// Runs `work`, from inside, while no other thread is inside.
pub(crate) fn alone<T>(work: impl FnOnce() -> T) -> T {
    before_fork();
    let result = work();
    after_fork(false);
    result
}

unsafe extern "C-unwind" {
    safe fn pthread_testcancel();
    fn pthread_setcancelstate(state: i32, before: *mut i32) -> i32;
}

/// Ends this thread if it was cancelled (`pthread_cancel`): called, outside our code, before what libc would end it
/// in.
pub(crate) fn may_be_cancelled() {
    pthread_testcancel();
}

/// Sets whether this thread can be cancelled, and returns what was set.
fn set_cancelled(state: i32) -> i32 {
    let mut before = state;
    // SAFETY: the variable outlives the call.
    unsafe { pthread_setcancelstate(state, &raw mut before) };
    before
}

/// `PTHREAD_CANCEL_DISABLE`.
const NOT_CANCELLED: i32 = 1;

/// Runs our own code: signals with handlers wait, a panic becomes `EIO`, errno is preserved. The thread is not
/// cancelled, as it could not be unwound from there (`catch_unwind`) and would leave our locks taken.
pub(crate) fn inside<T>(work: impl FnOnce() -> Result<T, i32>) -> Result<T, i32> {
    let errno = errno();
    let quiet = Quiet::begin();
    let outer = INSIDE.try_with(|inside| inside.replace(true)).unwrap_or(true);
    net_up();
    let cancelled = if outer { NOT_CANCELLED } else { set_cancelled(NOT_CANCELLED) };
    if !outer {
        enter();
    }
    let result = catch_unwind(AssertUnwindSafe(work)).unwrap_or(Err(libc::EIO));
    if !outer {
        let _ = catch_unwind(lost::look); // a panic leaves mappings as they are
        GATE.fetch_sub(1, Ordering::Release);
    }
    let _ = INSIDE.try_with(|inside| inside.set(outer));
    net_down();
    drop(quiet);
    set_errno(errno);
    if cancelled != NOT_CANCELLED {
        // Last, as it may end the thread at once (`PTHREAD_CANCEL_ASYNCHRONOUS`).
        set_cancelled(cancelled);
    }
    result
}

/// Returns true while signal handlers wait for this thread.
pub(crate) fn is_quiet() -> bool {
    QUIET.try_with(|quiet| quiet.load(Ordering::Relaxed)).unwrap_or(false)
}

/// Sets whether they wait and returns the previous value; true at the end of a thread, when its storage is
/// gone.
pub(crate) fn set_quiet(now: bool) -> bool {
    let change = |quiet: &AtomicBool| {
        let before = quiet.load(Ordering::Relaxed);
        quiet.store(now, Ordering::Relaxed);
        before
    };
    compiler_fence(Ordering::SeqCst);
    let before = QUIET.try_with(change).unwrap_or(true);
    compiler_fence(Ordering::SeqCst);
    before
}

/// While it lives, signals with handlers wait. Nested ones of the same thread have no effect. It costs
/// system calls only if the program has handlers that a mask must hold up, or if a signal arrives
/// meanwhile.
pub(crate) struct Quiet {
    is_outermost: bool,
    /// The previous mask, if it was changed.
    before: Option<u64>,
}

impl Quiet {
    /// Begins it.
    pub(crate) fn begin() -> Self {
        // Also if there are no handlers: another thread may set the first one meanwhile.
        if set_quiet(true) {
            return Self { is_outermost: false, before: None };
        }
        let masked = MASKED.load(Ordering::Relaxed);
        let before = (masked != 0).then(|| mask(libc::SIG_BLOCK, masked));
        Self { is_outermost: true, before }
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        if !self.is_outermost {
            return;
        }
        set_quiet(false);
        let put_back = handlers::take_put_back();
        if let Some(before) = self.before {
            mask(libc::SIG_SETMASK, crate::trap::masks::without(before & !put_back));
        } else if put_back != 0 {
            mask(libc::SIG_UNBLOCK, put_back);
        }
    }
}

/// Runs [`inside`] and converts the result to C's convention.
pub(crate) fn ours<T: Failed>(work: impl FnOnce() -> Result<T, i32>) -> T {
    finish(inside(work))
}

/// Changes this thread's signal mask and returns the previous one.
pub(crate) fn mask(how: i32, set: u64) -> u64 {
    let mut before = 0u64;
    let arguments = [how as usize, &raw const set as usize, &raw mut before as usize, 8, 0, 0];
    // SAFETY: both sets are 8 bytes, as the kernel's are on 64-bit machines.
    unsafe { system_call(libc::SYS_rt_sigprocmask, arguments) };
    before
}

/// Makes a system call that bypasses all hooks; a negative result is an error number.
///
/// # Safety
/// As for the system call.
pub(crate) unsafe fn system_call(number: i64, arguments: [usize; 6]) -> isize {
    if is_trapped() {
        // libc makes the call untrapped, and calls of signal handlers that run meanwhile are trapped as usual.
        let before = errno();
        let [a, b, c, d, e, f] = arguments;
        // SAFETY: the caller guarantees it.
        let result = match unsafe { crate::table::real::syscall(number, a, b, c, d, e, f) } {
            -1 => -(errno() as isize),
            result => result as isize,
        };
        set_errno(before);
        return result;
    }
    // SAFETY: the caller guarantees it.
    unsafe { kernel(number, arguments) }
}

/// Runs `call`, which makes a system call of ours that [`system_call`] cannot make, without the trap.
#[cfg(target_arch = "x86_64")]
pub(crate) fn unguarded<T>(call: impl FnOnce() -> T) -> T {
    net_up();
    let result = call();
    net_down();
    result
}

#[cfg(target_arch = "x86_64")]
unsafe fn kernel(number: i64, arguments: [usize; 6]) -> isize {
    let result;
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: the kernel's calling convention; the caller guarantees the effect of the call.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _, options(nostack),
        );
    }
    result
}

#[cfg(target_arch = "aarch64")]
unsafe fn kernel(number: i64, arguments: [usize; 6]) -> isize {
    let result;
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: the kernel's calling convention; the caller guarantees the effect of the call.
    unsafe {
        std::arch::asm!(
            "svc 0",
            in("x8") number,
            inlateout("x0") a as isize => result,
            in("x1") b, in("x2") c, in("x3") d, in("x4") e, in("x5") f, options(nostack),
        );
    }
    result
}

/// [`system_call`] with an error as `Err`.
///
/// # Safety
/// As for the system call.
pub(crate) unsafe fn checked(number: i64, arguments: [usize; 6]) -> Result<usize, i32> {
    // SAFETY: the caller guarantees it.
    let result = unsafe { system_call(number, arguments) };
    if (-4095..0).contains(&result) { Err(-result as i32) } else { Ok(result as usize) }
}
