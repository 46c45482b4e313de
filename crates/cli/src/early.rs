//! A shorter way to `towline run`: before the runtime of the language begins.
//!
//! A run is done when its program has been started, and the start of this program is half of what that
//! costs. What is left out: the general parser of command lines, a stack for the message that the stack
//! is full (which reads `/proc/self/maps`), ignoring SIGPIPE (so the program gets it as we did).
#![allow(unsafe_code)]

use crate::run;

/// Does all of `towline run`, unless the general parser has to look at its command line.
extern "C" fn early() {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next().is_none_or(|command| command != "run") {
        return;
    }
    let Some(args) = run::Args::plain(arguments) else { return };
    open_standard_streams();
    let status = std::panic::catch_unwind(|| run::run(&args));
    std::process::exit(i32::from(status.unwrap_or(run::STATUS_OURS)));
}

/// As the runtime does: a file that is opened must not become a standard stream that is closed.
fn open_standard_streams() {
    let mut streams = [0, 1, 2].map(|fd| libc::pollfd { fd, events: 0, revents: 0 });
    // SAFETY: the list outlives the call.
    unsafe { libc::poll(streams.as_mut_ptr(), 3, 0) };
    for stream in streams {
        if stream.revents & libc::POLLNVAL != 0 {
            // SAFETY: a string that ends with a zero byte. It gets the lowest number, which is this one.
            unsafe { libc::open(c"/dev/null".as_ptr(), libc::O_RDWR) };
        }
    }
}

#[used]
#[unsafe(link_section = ".init_array")]
static EARLY: extern "C" fn() = early;
