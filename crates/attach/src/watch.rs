//! Notices when the size of an attached disk changes.
//!
//! Neither protocol has a message for it, so the server is polled: in one session that is kept, or over a
//! new connection each time with NBD, which tells the size only in the handshake. (Devices of the kernel's
//! NBD client need more care, see `nbd/kernel.rs`.)

use crate::{Error, Native, Origin};
use std::sync::mpsc;
use std::time::Duration;

/// Time between two questions.
pub(crate) const PERIOD: Duration = Duration::from_secs(5);

/// Starts a thread that watches a disk of `size` bytes. The thread calls `tell` with each new size, and ends
/// when `tell` returns false.
///
/// # Errors
/// If the thread cannot be created.
pub fn watch_size(
    origin: &Origin,
    mut size: u64,
    mut tell: impl FnMut(u64) -> bool + Send + 'static,
) -> Result<(), Error> {
    let origin = origin.clone();
    let mut session = None;
    let run = move || {
        loop {
            std::thread::sleep(PERIOD);
            // The queues notice and log a lost server themselves.
            let Ok(now) = ask(&origin, &mut session) else {
                session = None;
                continue;
            };
            if now != size {
                size = now;
                if !tell(size) {
                    return;
                }
            }
        }
    };
    let thread = std::thread::Builder::new().name("size".to_owned()).spawn(run);
    thread.map(drop).map_err(Error::system("a thread that watches the size"))
}

fn ask(origin: &Origin, session: &mut Option<Native>) -> Result<u64, Error> {
    let Origin::Towline(url) = origin else { return Ok(origin.look()?.geometry.size) };
    let native = match session {
        Some(native) => native,
        None => session.insert(Native::connect(url, Some(Duration::ZERO), 1, mpsc::channel().0)?),
    };
    native.ask_size()
}
