//! The entry of the program `towline`, which runs before the dynamic linker.
//!
//! Loading libc and relocating the program takes as long as everything else that `towline run` does, and
//! happens again for the program that it becomes. So `towline` names no dynamic linker to the kernel. It
//! starts here, in code that needs none: it handles plain command lines of `run` at once (`run.rs`). For all
//! others, and in the keeper, it loads the dynamic linker as the kernel would have done (`loader.rs`).
//!
//! This crate is compiled separately (`build.rs`) into a block of code without relocations and without
//! writable data: it has no statics but constants, and no pointers in constants.
#![no_std]
#![no_main]

#[path = "../../instance/src/layout.rs"]
#[allow(dead_code)] // shared with the library
mod layout;
mod loader;
mod run;
mod system;
mod text;

use core::ptr::null_mut;

/// What the kernel puts on the stack of a new program.
pub(crate) struct Beginning {
    count: usize,
    arguments: *mut *const u8,
    environment: *mut *const u8,
    auxiliary: *mut [usize; 2],
}

impl Beginning {
    /// # Safety
    /// `stack` is the initial stack pointer set by the kernel.
    unsafe fn of(stack: *mut usize) -> Self {
        // SAFETY: the caller promises the kernel's layout: a count, that many arguments, null, the
        // environment, null, and pairs.
        unsafe {
            let count = *stack;
            let arguments = stack.add(1).cast::<*const u8>();
            let environment = arguments.add(count + 1);
            let mut end = environment;
            while !(*end).is_null() {
                end = end.add(1);
            }
            Self { count, arguments, environment, auxiliary: end.add(1).cast() }
        }
    }

    /// Returns an argument, or an empty string if there is none.
    pub(crate) fn argument(&self, number: usize) -> &'static [u8] {
        if number >= self.count {
            return b"";
        }
        // SAFETY: the number is in range, and the string lives as long as the process.
        unsafe { text::string(*self.arguments.add(number)) }
    }

    /// Returns the arguments starting with this number, as `execve` expects them.
    pub(crate) fn arguments_from(&self, number: usize) -> *const *const u8 {
        // SAFETY: the result points at most to the null at the end of the list.
        unsafe { self.arguments.add(number.min(self.count)) }
    }

    /// Replaces an argument.
    pub(crate) fn replace(&self, number: usize, with: *const u8) {
        if number < self.count {
            // SAFETY: the number is in range, and the list is on this process's stack and not used otherwise.
            unsafe { *self.arguments.add(number) = with };
        }
    }

    /// Returns the environment variables, each `NAME=VALUE`.
    pub(crate) fn environment(&self) -> impl Iterator<Item = *const u8> {
        let mut at = self.environment;
        core::iter::from_fn(move || {
            // SAFETY: the iteration stops at the null at the end.
            unsafe {
                let found = *at;
                (!found.is_null()).then(|| {
                    at = at.add(1);
                    found
                })
            }
        })
    }

    /// Returns the value of an environment variable.
    pub(crate) fn variable(&self, name: &[u8]) -> Option<&'static [u8]> {
        self.environment().find_map(|found| {
            // SAFETY: the environment consists of strings that end with a zero byte and live as long as the
            // process.
            let found = unsafe { text::string(found) };
            found.strip_prefix(name)?.strip_prefix(b"=")
        })
    }

    /// Returns a pointer to an entry of the auxiliary vector, or null if it has none of this kind.
    pub(crate) fn auxiliary(&self, kind: usize) -> *mut usize {
        let mut at = self.auxiliary;
        // SAFETY: the vector ends with a pair whose kind is zero.
        unsafe {
            loop {
                match (*at)[0] {
                    0 => return null_mut(),
                    found if found == kind => return &raw mut (*at)[1],
                    _ => at = at.add(1),
                }
            }
        }
    }
}

/// Returns the address to jump to with the initial stack. `entry` is where the program begins when it has a
/// dynamic linker.
///
/// # Safety
/// Called once, with the stack as the kernel left it.
#[unsafe(no_mangle)]
unsafe extern "C" fn _start(stack: *mut usize, entry: usize) -> usize {
    // SAFETY: the caller passes the stack as the kernel left it.
    let beginning = unsafe { Beginning::of(stack) };
    run::run(&beginning);
    system::fill_missing_streams();
    loader::load(&beginning, entry).unwrap_or_else(|| {
        system::complain(b"towline: the dynamic linker cannot be loaded\n");
        system::exit(127)
    })
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    system::exit(127)
}
