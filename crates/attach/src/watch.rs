//! Notices that a disk got another size while it is attached.
//!
//! Neither protocol has a message for it, so the server is asked now and then: in a session that is kept, or, as NBD
//! tells the size only in the beginning, by a new connection each time. (Devices of the kernel's NBD client have to be
//! told with care: `nbd/kernel.rs`.)

use crate::{Error, Native, Origin};
use std::sync::mpsc;
use std::time::Duration;

/// Between two questions.
pub(crate) const PERIOD: Duration = Duration::from_secs(5);

/// Begins to watch a disk of `size` bytes, on a thread of its own. `tell` is called with each other size, and ends the
/// thread by returning false.
///
/// # Errors
/// When there can be no thread.
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
            // A server that is away is somebody else's concern.
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
