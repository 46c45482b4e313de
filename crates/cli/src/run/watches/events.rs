//! Receives events on watched files from a server, and repeats them on their shadows.

use super::asks::watch_and_list;
use super::shadows::{Entry, More, Repeated, Shadow, Shadows};
use super::{Common, Met, failed, start};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;
use towline_client::{Errno, Error, File, Happening, Happenings};
use towline_wire::event;

/// How long to wait for the second half of a move, which a server sends right after the first. If it does not
/// come, the name went to a directory that is not watched.
const HALF: Duration = Duration::from_millis(30);
/// The same for events that are certain to come.
const ALL: Duration = Duration::from_secs(2);

/// How long to wait before a server is asked again that could not be reached.
const AWAY: Duration = Duration::from_secs(1);

/// Answers that are received before they are repeated; others wait on the server.
const AHEAD: usize = 2;

/// Starts the threads for a server, which end with its session.
pub(super) fn listen(met: &Met, common: &Arc<Common>) -> io::Result<()> {
    let (sender, told) = sync_channel(AHEAD);
    let repeater = Repeater { met: met.clone(), common: Arc::clone(common) };
    start("repeat", move || repeater.repeat_all(&told))?;
    let (client, common) = (met.client.clone(), Arc::clone(common));
    start("events", move || {
        let mut is_told = false;
        loop {
            match client.events() {
                Ok(happenings) => {
                    is_told = false;
                    if sender.send(happenings).is_err() {
                        return;
                    }
                }
                Err(_) if common.is_over() => return,
                Err(error) => {
                    if !std::mem::replace(&mut is_told, true) {
                        log::warn!("changes of watched files are not reported for now: {error}");
                    }
                    towline_net::pause(AWAY);
                }
            }
        }
    })
}

/// Repeats the events of a server.
struct Repeater {
    met: Met,
    common: Arc<Common>,
}

impl Repeater {
    fn repeat_all(&self, told: &Receiver<Happenings>) {
        while let Ok(Happenings { mut events, mut lost }) = told.recv() {
            loop {
                let limit = match self.met.shared.shadows().may_go_on(&events) {
                    More::No => break,
                    More::Perhaps => HALF,
                    More::Certainly => ALL,
                };
                let Ok(more) = told.recv_timeout(limit) else { break };
                events.extend(more.events);
                lost |= more.lost;
            }
            self.forget_known();
            self.repeat(&events);
            if lost {
                self.catch_up();
            }
        }
    }

    /// Invalidates what processes of the run have cached, so that a program that learns of an event also sees
    /// its effect.
    /// Returns the number of changes.
    fn forget_known(&self) -> u64 {
        self.common.state.changes().fetch_add(1, Ordering::SeqCst) + 1
    }

    fn repeat(&self, events: &[Happening]) {
        let Met { client, shared } = &self.met;
        let Repeated { ended, missing } = shared.shadows().repeat(events);
        for handle in ended {
            client.close_handle(handle);
        }
        for happening in &missing {
            // Events on an open file that no longer has a name are not reported.
            let is_there = |directory: &File| directory.stat_path(&happening.name, false);
            if client.with_handle(happening.handle, 0, is_there).is_ok() {
                shared.shadows().restore(happening);
            }
        }
        for moved in events.iter().filter(|one| one.mask & event::MOVE_SELF != 0) {
            let shadow = shared.shadows().at(moved.handle);
            if let Some(shadow) = shadow
                && let Ok(path) = client.with_handle(moved.handle, 0, File::path)
            {
                self.common.remember(client, moved.handle, &shadow, &path);
            }
        }
    }

    /// Recovers after events were lost, and perhaps the watches with them: watches everything again, and
    /// repeats the differences.
    fn catch_up(&self) {
        let shared = &self.met.shared;
        shared.losses.fetch_add(1, Ordering::SeqCst);
        // Do not hold the lock during the loop: threads that answer questions need it, too.
        let handles = shared.shadows().handles();
        for handle in handles {
            while !self.catch_up_with(handle) {}
        }
    }

    /// Does the same for one file. Returns false if the file must be watched for more events since, or if its server
    /// is away.
    fn catch_up_with(&self, handle: u64) -> bool {
        let Met { client, shared } = &self.met;
        let found = shared.shadows().at(handle);
        let Some(shadow) = found else { return true };
        let listing = watch_and_list(client, handle, &shadow).and_then(|listing| {
            // A server that has kept the file open has not told that it lost its last name meanwhile.
            let is_gone = client.with_handle(handle, 0, is_gone)?;
            if is_gone { Err(Errno::ENOENT.into()) } else { Ok(listing) }
        });
        if matches!(listing, Err(Error::Connection { .. })) && !self.common.is_over() {
            // The next session may have lost nothing more, as far as the server can tell.
            towline_net::pause(AWAY);
            return false;
        }
        let changes = self.forget_known();
        let mut shadows = shared.shadows();
        if shadows.at(handle).is_some_and(|now| now.mask != shadow.mask) {
            return false;
        }
        let told = listing.and_then(|listing| {
            let same = shadows.fill(&shadow, listing.clone(), changes).map_err(failed)?;
            tell_written(&shadows, &shadow, &listing, &same);
            Ok(())
        });
        if told.is_err() {
            // The file is gone, or cannot be opened again.
            shadows.remove(handle);
            client.close_handle(handle);
        }
        true
    }
}

/// Returns true if an open file has no name. Some file systems count no links of any file.
fn is_gone(file: &File) -> Result<bool, Error> {
    let is_removed = || file.path().map_or(true, |path| path.ends_with(b" (deleted)"));
    Ok(file.stat()?.links == 0 && is_removed())
}

/// Reports all remaining files as modified, and all that there are as closed after writing, since those written
/// meanwhile are not known.
fn tell_written(shadows: &Shadows, shadow: &Shadow, listing: &[Entry], same: &[Entry]) {
    for (mask, entries) in [(event::MODIFY, same), (event::CLOSE_WRITE, listing)] {
        if shadow.mask & mask == 0 {
            continue;
        }
        if !shadow.is_directory {
            let _ = shadows.touch(shadow, mask, b"");
        }
        for (name, _) in entries.iter().filter(|(_, is_directory)| !is_directory) {
            let _ = shadows.touch(shadow, mask, name);
        }
    }
}
