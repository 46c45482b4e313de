//! Notices when the size of an attached disk changes, or its epoch, and when changes were lost although the device is
//! not used.
//!
//! Neither protocol has a message for it, so the server is polled: in one session that is kept, or over a
//! new connection each time with NBD, which tells the size only in the handshake. (Devices of the kernel's
//! NBD client need more care, see `nbd/kernel.rs`.)

use crate::ublk::Event;
use crate::{BackendOptions, Error, Native, Origin};
use std::sync::mpsc::{self, Sender};
use std::time::Duration;
use towline_client::{DiskInfo, Durability};

/// Time between two questions.
pub(crate) const PERIOD: Duration = Duration::from_secs(5);

/// Starts a thread that watches the disk of a device with this `durability`. The thread reports each answer through
/// `tell`, and ends when nobody listens. What did not change is told as well: the device may have missed it while it
/// was being started, or the kernel may have refused it.
///
/// # Errors
/// If the thread cannot be created.
pub fn watch_disk(
    origin: &Origin,
    durability: Durability,
    tell: Sender<Event>,
) -> Result<(), Error> {
    let origin = origin.clone();
    let mut session = None;
    let options = BackendOptions::for_questions(durability);
    let ask = move || ask(&origin, &options, &mut session).inspect_err(|_| session = None);
    let thread = std::thread::Builder::new().name("watch".to_owned());
    let thread = thread.spawn(move || watch(PERIOD, ask, |event| tell.send(event).is_ok()));
    thread.map(drop).map_err(Error::system("a thread that watches the disk"))
}

fn watch(
    period: Duration,
    mut ask: impl FnMut() -> Result<Seen, Error>,
    mut tell: impl FnMut(Event) -> bool,
) {
    loop {
        std::thread::sleep(period);
        // The queues notice and log a lost server themselves.
        let Ok(Seen { size, epoch }) = ask() else { continue };
        let listens = tell(Event::Resized(size));
        if !listens || !epoch.is_none_or(|epoch| tell(Event::Epoch(epoch))) {
            return;
        }
    }
}

/// An answer of the server.
struct Seen {
    size: u64,
    epoch: Option<u64>,
}

fn ask(
    origin: &Origin,
    options: &BackendOptions,
    session: &mut Option<Native>,
) -> Result<Seen, Error> {
    let Origin::Towline(url) = origin else {
        return Ok(Seen { size: origin.look()?.geometry.size, epoch: None });
    };
    let native = match session {
        Some(native) => native,
        None => session.insert(Native::connect(url, options, mpsc::channel().0)?),
    };
    // Fails if changes were lost, in which case nobody hears of the new epoch.
    let DiskInfo { size, epoch, .. } = native.ask()?;
    Ok(Seen { size, epoch: Some(epoch) })
}

#[cfg(test)]
mod tests {
    use super::{Seen, watch};
    use crate::Error;
    use crate::ublk::Event;
    use std::time::Duration;

    #[test]
    fn what_is_seen_is_told_again_although_it_is_the_same() {
        let seen = |size, epoch| Ok(Seen { size, epoch });
        let away = Err(Error::Protocol("away"));
        let mut answers =
            [seen(512, None), away, seen(1024, Some(1)), seen(1024, Some(1))].into_iter();
        let mut told = Vec::new();
        let tell = |event| {
            told.push(event);
            told.len() < 5
        };
        watch(Duration::ZERO, || answers.next().expect("all were told"), tell);
        let (resized, epoch) = (Event::Resized(1024), Event::Epoch(1));
        assert_eq!(told, [Event::Resized(512), resized, epoch, resized, epoch]);
    }
}
