//! Start-up: finds the run that this process belongs to and what it inherited. Nothing connects here.

use crate::{between, descriptors, guard, remote, report, trap, working};
use std::ffi::{CStr, c_char};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use towline_client::Url;
use towline_instance::{Config, MOUNTS_MAX, Mount, Root, State, VARIABLE};
use towline_wire::request::UMASK_SHIFT;

/// The run, set once at start.
struct Run {
    state: State,
    directory: Vec<u8>,
    config: Config,
    mounts: Vec<Target>,
}

/// A mount with its parsed URL.
pub(crate) struct Target {
    pub(crate) mount: Mount,
    number: usize,
    /// Null until needed. No lock, since a signal handler may get here, too.
    url: AtomicPtr<Url>,
    /// One more than what [`server`] returns; zero until needed.
    server: AtomicUsize,
}

impl Target {
    /// Returns the mount's directory on the server. Waits until the servers are connected.
    pub(crate) fn root(&self) -> Result<Root, i32> {
        wait_for_servers();
        state().and_then(|state| state.root(self.number)).ok_or(libc::EIO)
    }

    /// Returns the URL behind the prefix; `None` if it does not parse, which `towline run` prevents.
    pub(crate) fn url(&self) -> Option<&Url> {
        // SAFETY: null, or a box that is never freed once it is there.
        let known = |url: *mut Url| unsafe { url.as_ref() };
        if let Some(url) = known(self.url.load(Ordering::Acquire)) {
            return Some(url);
        }
        let new = Box::into_raw(Box::new(Url::parse(&self.mount.url).ok()?));
        match self.url.compare_exchange(null_mut(), new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => known(new),
            Err(other) => {
                // SAFETY: made above, and not shared yet.
                drop(unsafe { Box::from_raw(new) });
                known(other)
            }
        }
    }
}

/// Returns the mounts whose URLs are not parsed yet, one bit each.
pub(crate) fn urls_unknown() -> u64 {
    const _: () = assert!(MOUNTS_MAX <= 64);
    let unknown =
        |(at, target): (usize, &Target)| match target.url.load(Ordering::Relaxed).is_null() {
            true => 1 << at,
            false => 0,
        };
    mounts().iter().enumerate().map(unknown).fold(0, |all, one: u64| all | one)
}

/// Marks the URLs of these mounts as not parsed, as their memory is gone.
pub(crate) fn forget_urls(which: u64) {
    for (at, target) in mounts().iter().enumerate() {
        if which & 1 << at != 0 {
            target.url.store(null_mut(), Ordering::Relaxed);
        }
    }
}

/// Environment variable that names the run.
const NAME: &CStr = c"TOWLINE_RUN";
const _: () = assert!(NAME.count_bytes() == VARIABLE.len());

/// Environment variable with the signals that an executed program is to have blocked; removed before the
/// program starts.
pub(crate) const BLOCKED: &CStr = c"TOWLINE_BLOCKED";
/// Environment variable with the name that the kernel would give the program; removed as well.
pub(crate) const CALLED: &CStr = c"TOWLINE_CALLED";

/// Returns the value of such a variable for the program that this process executes.
pub(crate) fn told(what: &[u8]) -> Vec<u8> {
    [format!("{}:", crate::process::id()).as_bytes(), what].concat()
}

/// Removes such a variable and returns its value if it is meant for this process.
fn taken(variable: &CStr) -> Option<&'static [u8]> {
    // SAFETY: nothing else runs yet that could change the environment, whose strings stay.
    let text = unsafe {
        let value = libc::getenv(variable.as_ptr());
        if value.is_null() {
            return None;
        }
        libc::unsetenv(variable.as_ptr());
        CStr::from_ptr(value)
    };
    // The prefix differs if an ancestor set it and a program in between did not have this library.
    text.to_bytes().strip_prefix(&told(b"")[..])
}

/// Unblocks the signals that were held up while this program was executed.
fn let_in() {
    let blocked = taken(BLOCKED).and_then(|text| std::str::from_utf8(text).ok());
    if let Some(blocked) = blocked.and_then(|text| u64::from_str_radix(text, 16).ok()) {
        guard::mask(libc::SIG_SETMASK, trap::masks::without(blocked));
    }
}

/// Whether the process was given its name explicitly.
static IS_CALLED: AtomicBool = AtomicBool::new(false);

/// Sets the name of the process, unless it was given one explicitly before and `is_told` is false.
pub(crate) fn call(name: &[u8], is_told: bool) {
    if is_told || !IS_CALLED.load(Ordering::Relaxed) {
        IS_CALLED.store(is_told, Ordering::Relaxed);
        let name = [name, b"\0"].concat();
        let call = [libc::PR_SET_NAME as usize, name.as_ptr() as usize, 0, 0, 0, 0];
        // SAFETY: the text outlives the call, which takes its first 15 bytes.
        unsafe { guard::system_call(libc::SYS_prctl, call) };
    }
}

static RUN: AtomicPtr<Run> = AtomicPtr::new(null_mut());
/// The umask; requests carry it with each mode.
static UMASK: AtomicU32 = AtomicU32::new(0o022);

fn run() -> Option<&'static Run> {
    // SAFETY: null or a leaked box that is never changed.
    unsafe { RUN.load(Ordering::Acquire).as_ref() }
}

/// Returns the shared state; `None` outside a run.
#[inline]
pub(crate) fn state() -> Option<&'static State> {
    run().map(|run| &run.state)
}

/// Returns the private directory of the run.
pub(crate) fn directory() -> &'static [u8] {
    run().map_or(b"/nonexistent", |run| &run.directory)
}

/// Returns the configuration of the run.
pub(crate) fn config() -> Option<&'static Config> {
    run().map(|run| &run.config)
}

/// Returns the mounts.
#[inline]
pub(crate) fn mounts() -> &'static [Target] {
    run().map_or(&[], |run| &run.mounts)
}

/// Returns the number of the first mount of a mount's server.
#[inline]
pub(crate) fn server(mount: usize) -> usize {
    if mount == 0 { 0 } else { first_of_server(mount) }
}

fn first_of_server(mount: usize) -> usize {
    let mounts = mounts();
    let Some(target) = mounts.get(mount) else { return 0 };
    let known = target.server.load(Ordering::Relaxed);
    if known > 0 {
        return known - 1;
    }
    let transport = |target: &'static Target| target.url().map(|url| &url.transport);
    let own = transport(target);
    let first = mounts.iter().position(|other| transport(other) == own).unwrap_or(mount);
    target.server.store(first + 1, Ordering::Relaxed);
    first
}

/// Returns the mode for a new file together with the umask, as requests encode them.
pub(crate) fn with_umask(mode: u32) -> u32 {
    mode & 0o7777 | UMASK.load(Ordering::Relaxed) << UMASK_SHIFT
}

/// Stores a new umask.
pub(crate) fn set_umask(mask: u32) {
    UMASK.store(mask & 0o777, Ordering::Relaxed);
}

/// Exit status of a program whose run cannot begin.
const STATUS_FAILED: usize = 125;

/// Waits until the run is connected to its servers, which continues while programs start. Called before the
/// first request to a server, and before a program starts whose arguments or environment name a prefix.
/// Ends the process if the servers cannot be reached; the reason was reported before.
pub(crate) fn wait_for_servers() {
    between::end();
    if state().is_some_and(|state| !state.has_begun()) {
        fail("");
    }
}

/// Message for a process whose limits leave no room for the shared state: without that, remote names would
/// be taken for local ones.
const NO_ROOM: &str = "towline: run: a limit of this process (ulimit -v, -n) leaves no room for the state of the run\n";

fn lacks_room(error: &std::io::Error) -> bool {
    error.raw_os_error().is_some_and(|n| [libc::ENOMEM, libc::EMFILE, libc::ENFILE].contains(&n))
}

/// Prints `text` and ends the process.
fn fail(text: &str) -> ! {
    loop {
        // SAFETY: the text outlives the call; then the process ends, and nothing remote has been touched.
        unsafe {
            guard::system_call(libc::SYS_write, [2, text.as_ptr() as usize, text.len(), 0, 0, 0]);
            guard::system_call(libc::SYS_exit_group, [STATUS_FAILED, 0, 0, 0, 0, 0]);
        }
    }
}

fn find_run() -> Option<Run> {
    // SAFETY: nothing else runs yet that could change the environment.
    let value = unsafe { libc::getenv(NAME.as_ptr().cast()) };
    if value.is_null() {
        return None;
    }
    // SAFETY: a string of the environment.
    let directory = unsafe { CStr::from_ptr(value) }.to_bytes().to_vec();
    let state = match State::open(&directory) {
        Err(error) if lacks_room(&error) => fail(NO_ROOM),
        opened => opened.ok()?,
    };
    let config = state.config()?;
    let target = |(number, mount): (usize, &Mount)| Target {
        mount: mount.clone(),
        number,
        url: AtomicPtr::new(null_mut()),
        server: AtomicUsize::new(0),
    };
    let mounts = config.mounts.iter().enumerate().map(target).collect();
    Some(Run { state, directory, config, mounts })
}

pub(crate) extern "C" fn start(
    count: i32,
    arguments: *const *const c_char,
    environment: *const *const c_char,
) {
    let _ = guard::inside(|| {
        let Some(run) = find_run() else { return Ok(()) };
        // SAFETY: the argument list that the program starts with.
        #[cfg(target_arch = "x86_64")]
        unsafe {
            crate::guest::note(count, arguments);
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = count;
        between::find(&run.state);
        RUN.store(Box::into_raw(Box::new(run)), Ordering::Release);
        // SAFETY: no other thread runs yet that could create files meanwhile.
        unsafe {
            let mask = guard::system_call(libc::SYS_umask, [0o077, 0, 0, 0, 0, 0]);
            guard::system_call(libc::SYS_umask, [mask as usize, 0, 0, 0, 0, 0]);
            set_umask(mask as u32);
            libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(in_child));
            at_quick_exit(finish);
        }
        if config().is_some_and(|config| config.report) {
            report::begin(crate::table::FUNCTIONS);
        }
        working::inherit();
        descriptors::adopt_all();
        remote::take_over_locks();
        // SAFETY: the lists that the program starts with.
        if working::is_remote() || unsafe { trap::is_mentioned([arguments, environment]) } {
            wait_for_servers();
            trap::arm();
        }
        // Last, when that process has most likely ended.
        between::begin();
        Ok(())
    });
    let_in();
    if let Some(name) = taken(CALLED) {
        call(name, true);
    }
}

unsafe extern "C" {
    fn at_quick_exit(function: extern "C" fn()) -> i32;
}

/// Does what is due at the end of the process.
pub(crate) extern "C" fn finish() {
    // A process that never asked a server has nothing to tell it.
    if run().is_some() && (remote::is_connected() || crate::hooks::maps::is_any_here()) {
        let _ = guard::inside(|| {
            crate::hooks::maps::end_all();
            remote::goodbye();
            Ok(())
        });
    }
}

/// Called before a fork, and after it in the parent and in the child.
pub(crate) extern "C" fn before_fork() {
    crate::table::look_up_for_children();
    descriptors::settle();
    guard::before_fork();
    // After the other threads have left our code: what they opened until then is shared, too. Otherwise one
    // process would close files of the other.
    descriptors::mark_shared();
    crate::hooks::touched::before_fork();
    crate::ALLOCATOR.lock();
}

pub(crate) extern "C" fn after_fork() {
    crate::ALLOCATOR.unlock();
    crate::hooks::touched::after_fork();
    guard::after_fork(false);
}

pub(crate) extern "C" fn in_child() {
    crate::ALLOCATOR.unlock();
    crate::vfork::forked();
    crate::awaited::in_child();
    guard::after_fork(true);
    crate::hooks::maps::disown();
    remote::disown();
    crate::hooks::touched::in_child();
    trap::arm_child();
}

#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn(i32, *const *const c_char, *const *const c_char) = start;

#[used]
#[unsafe(link_section = ".fini_array")]
static FINISH: extern "C" fn() = finish;
