//! Pipes over which a parent waits until its child has executed a program or ended: both close the child's end.
//!
//! No other child has that end. One that another thread forks meanwhile would otherwise keep the parent waiting
//! until it ends itself, and a worker that executes nothing may never end.

use crate::descriptors::Own;
use crate::guard::{between_forks, pause, system_call};
use crate::own;
use std::cell::Cell;
use std::sync::atomic::{AtomicI32, Ordering};

/// Parents that may wait at the same time; others wait for their turn.
const PIPES_MAX: usize = 64;
const NONE: i32 = -1;

/// The ends that the parent holds, the reading one first. They change only between forks.
struct Ends([AtomicI32; 2]);

static PIPES: [Ends; PIPES_MAX] =
    [const { Ends([AtomicI32::new(NONE), AtomicI32::new(NONE)]) }; PIPES_MAX];

thread_local! {
    /// The pipe, counted from 1, whose child this thread forks.
    static FORKS_FOR: Cell<usize> = const { Cell::new(0) };
}

fn close(fd: i32) {
    // SAFETY: the descriptor is the library's own.
    unsafe { system_call(libc::SYS_close, [fd as usize, 0, 0, 0, 0, 0]) };
}

impl Ends {
    fn is_free(&self) -> bool {
        self.0.iter().all(|end| end.load(Ordering::Relaxed) == NONE)
    }

    fn close(&self, end: usize) {
        match self.0[end].swap(NONE, Ordering::Relaxed) {
            NONE => {}
            fd => close(fd),
        }
    }
}

/// A pipe for one child.
pub(crate) struct Pipe {
    place: usize,
    ends: [i32; 2],
}

impl Pipe {
    /// Makes a pipe.
    ///
    /// # Errors
    /// The errno of `pipe2(2)`.
    pub(crate) fn open() -> Result<Self, i32> {
        loop {
            if let Some(opened) = between_forks(Self::open_at_once) {
                return opened;
            }
            pause();
        }
    }

    /// Does so unless too many are open.
    fn open_at_once() -> Option<Result<Self, i32>> {
        let place = PIPES.iter().position(Ends::is_free)?;
        let mut ends = [NONE; 2];
        let arguments = [ends.as_mut_ptr() as usize, libc::O_CLOEXEC as usize, 0, 0, 0, 0];
        // SAFETY: the array outlives the call.
        let made = unsafe { system_call(libc::SYS_pipe2, arguments) };
        if made < 0 {
            return Some(Err(-made as i32));
        }
        for (noted, fd) in PIPES[place].0.iter().zip(ends) {
            noted.store(fd, Ordering::Relaxed);
        }
        Some(Ok(Self { place, ends }))
    }

    /// Forks the child that keeps its end.
    pub(crate) fn fork<T>(&self, fork: impl FnOnce() -> T) -> T {
        FORKS_FOR.set(self.place + 1);
        let result = fork();
        FORKS_FOR.set(0);
        result
    }

    /// In the child: returns its end, out of the way of what the child opens.
    pub(crate) fn of_child(&self) -> i32 {
        let [listen, tell] = self.ends;
        close(listen);
        own::duplicate(tell, Own::Memory).map_or(tell, |moved| {
            close(tell);
            moved
        })
    }

    /// In the parent: waits if there is a child, and returns the number that it wrote before it ended.
    pub(crate) fn wait(self, has_child: bool) -> Option<i32> {
        let ends = &PIPES[self.place];
        between_forks(|| ends.close(1));
        let told = if has_child { read_number(self.ends[0]) } else { None };
        between_forks(|| ends.close(0));
        told
    }
}

/// Waits for a number; returns `None` if all writers are gone.
fn read_number(fd: i32) -> Option<i32> {
    let mut number = 0i32;
    let arguments = [fd as usize, &raw mut number as usize, size_of::<i32>(), 0, 0, 0];
    loop {
        // SAFETY: the number outlives the call.
        let got = unsafe { system_call(libc::SYS_read, arguments) };
        if got != -(libc::EINTR as isize) {
            return (got == size_of::<i32>() as isize).then_some(number);
        }
    }
}

/// In a child, which has a single thread: closes the ends that are for others.
pub(crate) fn in_child() {
    let own = FORKS_FOR.get();
    for (place, ends) in PIPES.iter().enumerate() {
        for end in 0..2 {
            match place + 1 == own {
                true => ends.0[end].store(NONE, Ordering::Relaxed),
                false => ends.close(end),
            }
        }
    }
}
