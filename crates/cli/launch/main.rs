//! Where the program `towline` begins: before the dynamic linker.
//!
//! To load libc and to relocate the program takes as long as all else that `towline run` does, and is done
//! again for the program that it becomes. So this program names no dynamic linker to the kernel. It begins
//! here, in code that needs none: plain command lines of `run` are dealt with at once (`run.rs`); for all
//! others, and in the keeper, the dynamic linker is loaded as the kernel would have done it (`loader.rs`).
//!
//! It is compiled by itself (`build.rs`) into a piece of code without relocations, and without anything that
//! can be written: no statics but constants, no pointers in constants.
#![no_std]
#![no_main]

#[path = "../../instance/src/layout.rs"]
#[allow(dead_code)] // it is the library's, too
mod layout;
mod loader;
mod run;
mod system;
mod text;

use core::ptr::null_mut;

/// What the kernel leaves on the stack of a new program.
pub(crate) struct Beginning {
    count: usize,
    arguments: *mut *const u8,
    environment: *mut *const u8,
    auxiliary: *mut [usize; 2],
}

impl Beginning {
    /// # Safety
    /// `stack` is what the kernel left.
    unsafe fn of(stack: *mut usize) -> Self {
        // SAFETY: as the caller says: a count, so many arguments, null, the environment, null, pairs.
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

    /// An argument; empty where there is none.
    pub(crate) fn argument(&self, number: usize) -> &'static [u8] {
        if number >= self.count {
            return b"";
        }
        // SAFETY: in range; a string that lives as long as the process.
        unsafe { text::string(*self.arguments.add(number)) }
    }

    /// Arguments from one on, as `execve` wants them.
    pub(crate) fn arguments_from(&self, number: usize) -> *const *const u8 {
        // SAFETY: at most the null at the end.
        unsafe { self.arguments.add(number.min(self.count)) }
    }

    /// Puts another argument in the place of one.
    pub(crate) fn replace(&self, number: usize, with: *const u8) {
        if number < self.count {
            // SAFETY: in range; the list is ours, on the stack.
            unsafe { *self.arguments.add(number) = with };
        }
    }

    /// The environment, each `NAME=VALUE`.
    pub(crate) fn environment(&self) -> impl Iterator<Item = *const u8> {
        let mut at = self.environment;
        core::iter::from_fn(move || {
            // SAFETY: not beyond the null at the end.
            unsafe {
                let found = *at;
                (!found.is_null()).then(|| {
                    at = at.add(1);
                    found
                })
            }
        })
    }

    /// The value of a variable.
    pub(crate) fn variable(&self, name: &[u8]) -> Option<&'static [u8]> {
        self.environment().find_map(|found| {
            // SAFETY: a string of the environment.
            let found = unsafe { text::string(found) };
            found.strip_prefix(name)?.strip_prefix(b"=")
        })
    }

    /// What the kernel says of something; null where it says nothing.
    pub(crate) fn auxiliary(&self, kind: usize) -> *mut usize {
        let mut at = self.auxiliary;
        // SAFETY: the list ends with a pair of zeroes.
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

/// Gives the address where to go on with the stack as it was; `entry` is where the program would begin
/// with a dynamic linker.
///
/// # Safety
/// Called once, with the stack as the kernel left it.
#[unsafe(no_mangle)]
unsafe extern "C" fn _start(stack: *mut usize, entry: usize) -> usize {
    // SAFETY: as the caller says.
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
