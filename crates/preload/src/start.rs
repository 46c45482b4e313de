//! Start-up: finds the run this process belongs to, and what it inherited. Nothing connects here.

use crate::{descriptors, guard, remote, report, trap, working};
use std::ffi::c_char;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use towline_client::Url;
use towline_instance::{Config, Mount, State, VARIABLE};

/// The run, set once at start.
struct Run {
    state: State,
    directory: Vec<u8>,
    config: Config,
    mounts: Vec<Target>,
}

/// A mount, understood.
pub(crate) struct Target {
    pub(crate) mount: Mount,
    pub(crate) url: Url,
}

static RUN: AtomicPtr<Run> = AtomicPtr::new(std::ptr::null_mut());
/// What `umask` is; the server is told modes that it leaves as they are.
static UMASK: AtomicU32 = AtomicU32::new(0o022);

fn run() -> Option<&'static Run> {
    // SAFETY: null or a leaked box that is never changed.
    unsafe { RUN.load(Ordering::Acquire).as_ref() }
}

/// The shared state; `None` outside of a run.
#[inline]
pub(crate) fn state() -> Option<&'static State> {
    run().map(|run| &run.state)
}

/// The private directory of the run.
pub(crate) fn directory() -> &'static [u8] {
    run().map_or(b"/nonexistent", |run| &run.directory)
}

/// The configuration of the run.
pub(crate) fn config() -> Option<&'static Config> {
    run().map(|run| &run.config)
}

/// The prefixes.
#[inline]
pub(crate) fn mounts() -> &'static [Target] {
    run().map_or(&[], |run| &run.mounts)
}

/// A mode without what `umask` takes away.
pub(crate) fn masked(mode: u32) -> u32 {
    mode & 0o7777 & !UMASK.load(Ordering::Relaxed)
}

/// Notes a new umask.
pub(crate) fn set_umask(mask: u32) {
    UMASK.store(mask & 0o777, Ordering::Relaxed);
}

fn find_run() -> Option<Run> {
    let name = format!("{VARIABLE}\0");
    // SAFETY: the name ends with a zero byte; nothing else runs yet that could change it.
    let value = unsafe { libc::getenv(name.as_ptr().cast()) };
    if value.is_null() {
        return None;
    }
    // SAFETY: a string of the environment.
    let directory = unsafe { std::ffi::CStr::from_ptr(value) }.to_bytes().to_vec();
    let state = State::open(&directory).ok()?;
    let config = state.config()?;
    let target =
        |mount: &Mount| Some(Target { mount: mount.clone(), url: Url::parse(&mount.url).ok()? });
    let mounts = config.mounts.iter().map(target).collect::<Option<_>>()?;
    Some(Run { state, directory, config, mounts })
}

extern "C" fn start(_: i32, arguments: *const *const c_char, environment: *const *const c_char) {
    let _ = guard::inside(|| {
        let Some(run) = find_run() else { return Ok(()) };
        let (parent, umask) = (run.config.parent, run.config.umask);
        crate::process::start();
        RUN.store(Box::into_raw(Box::new(run)), Ordering::Release);
        // SAFETY: no other thread runs yet that could create files meanwhile.
        unsafe {
            let first = guard::system_call(libc::SYS_getppid, [0; 6]) as u32 == parent;
            let given = if first { umask as usize } else { 0o077 };
            let mask = guard::system_call(libc::SYS_umask, [given, 0, 0, 0, 0, 0]);
            let mask = if first { umask as isize } else { mask };
            guard::system_call(libc::SYS_umask, [mask as usize, 0, 0, 0, 0, 0]);
            set_umask(mask as u32);
            libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(in_child));
        }
        if config().is_some_and(|config| config.report) {
            report::begin(crate::table::FUNCTIONS);
        }
        working::inherit();
        descriptors::adopt_all();
        remote::has_executed();
        // SAFETY: the lists that the program starts with.
        if working::is_remote() || unsafe { trap::is_mentioned([arguments, environment]) } {
            trap::arm();
        }
        Ok(())
    });
}

extern "C" fn finish() {
    if run().is_some() {
        let _ = guard::inside(|| {
            crate::hooks::maps::write_back_all();
            remote::goodbye();
            Ok(())
        });
    }
}

/// What has to be done before a fork, and after it in the parent and in the child.
pub(crate) extern "C" fn before_fork() {
    descriptors::share();
    guard::before_fork();
    crate::ALLOCATOR.lock();
}

pub(crate) extern "C" fn after_fork() {
    crate::ALLOCATOR.unlock();
    guard::after_fork(false);
}

pub(crate) extern "C" fn in_child() {
    crate::ALLOCATOR.unlock();
    guard::after_fork(true);
    crate::hooks::maps::disown();
    remote::disown();
    trap::arm_child();
}

#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn(i32, *const *const c_char, *const *const c_char) = start;

#[used]
#[unsafe(link_section = ".fini_array")]
static FINISH: extern "C" fn() = finish;
