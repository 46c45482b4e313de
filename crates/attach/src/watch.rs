//! Notices when the size of an attached disk changes, and when the server of one that is not used has lost changes.
//!
//! Neither protocol has a message for it, so the server is polled: in one session that is kept, or over a
//! new connection each time with NBD, which tells the size only in the handshake. (Devices of the kernel's
//! NBD client need more care, see `nbd/kernel.rs`.)

use crate::{BackendOptions, Error, Native, Origin};
use std::sync::mpsc;
use std::time::Duration;
use towline_client::Durability;

/// Time between two questions.
pub(crate) const PERIOD: Duration = Duration::from_secs(5);

/// Starts a thread that watches the size of a disk. The thread calls `tell` with each answer, in bytes, and ends
/// when `tell` returns false. A size that did not change is told as well: the device may have missed it while it
/// was being started, or the kernel may have refused it. `durability` is that of the device.
///
/// # Errors
/// If the thread cannot be created.
pub fn watch_size(
    origin: &Origin,
    durability: Durability,
    tell: impl FnMut(u64) -> bool + Send + 'static,
) -> Result<(), Error> {
    let origin = origin.clone();
    let mut session = None;
    let options = BackendOptions::for_questions(durability);
    let ask = move || ask(&origin, &options, &mut session).inspect_err(|_| session = None);
    let thread = std::thread::Builder::new().name("size".to_owned());
    let thread = thread.spawn(move || watch(PERIOD, ask, tell));
    thread.map(drop).map_err(Error::system("a thread that watches the size"))
}

fn watch(
    period: Duration,
    mut ask: impl FnMut() -> Result<u64, Error>,
    mut tell: impl FnMut(u64) -> bool,
) {
    loop {
        std::thread::sleep(period);
        // The queues notice and log a lost server themselves.
        if ask().is_ok_and(|size| !tell(size)) {
            return;
        }
    }
}

fn ask(
    origin: &Origin,
    options: &BackendOptions,
    session: &mut Option<Native>,
) -> Result<u64, Error> {
    let Origin::Towline(url) = origin else { return Ok(origin.look()?.geometry.size) };
    let native = match session {
        Some(native) => native,
        None => session.insert(Native::connect(url, options, mpsc::channel().0)?),
    };
    native.ask_size()
}

#[cfg(test)]
mod tests {
    use super::watch;
    use crate::Error;
    use std::time::Duration;

    #[test]
    fn a_size_is_told_again_although_it_is_the_same() {
        let mut answers = [Ok(512), Err(Error::Protocol("away")), Ok(1024), Ok(1024)].into_iter();
        let mut told = Vec::new();
        let tell = |size| {
            told.push(size);
            told.len() < 3
        };
        watch(Duration::ZERO, || answers.next().expect("all were told"), tell);
        assert_eq!(told, [512, 1024, 1024]);
    }
}
