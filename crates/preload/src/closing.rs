//! Closes that are sent with the next request, in one system call and one packet.
//!
//! Nothing waits for a close, but on its own it would cost the client a system call and the server a
//! wake-up. If no request follows, the keeper closes the file some milliseconds later, when the kernel
//! reports the placeholder closed; it does so, too, if this process is killed. The shared entry decides
//! which of the two is first (`Taken::Leaving`). Until then it can be taken back. A locked file is closed at once, as
//! others may wait for its lock.

use crate::descriptors::Open;
use crate::known::lock;
use crate::{process, start};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use towline_client::Client;

/// Maximum number of files left at a time; further ones are closed at once.
const LEFT_MAX: usize = 8;

static LEFT: Mutex<[Option<Left>; LEFT_MAX]> = Mutex::new([const { None }; LEFT_MAX]);
/// Number of files left, so that most requests, which find none, take no lock.
static COUNT: AtomicU32 = AtomicU32::new(0);
static TAGS: AtomicU32 = AtomicU32::new(0);

struct Left {
    number: usize,
    tag: u32,
    mount: usize,
    handle: u64,
}

/// Leaves a file to the next request or the keeper. Returns false if it must be closed at once.
pub(crate) fn leave(open: Open, client: &Client) -> bool {
    let handle = open.handle;
    if !start::state().is_some_and(towline_instance::State::is_kept) || client.has_locked(handle) {
        return false;
    }
    let Some(mut left) = lock(&LEFT) else { return false };
    let Some(place) = left.iter_mut().find(|place| place.is_none()) else { return false };
    let tag = tag();
    let mount = open.entry.mount.load(Ordering::Relaxed) as usize;
    *place = Some(Left { number: open.number, tag, mount, handle });
    COUNT.fetch_add(1, Ordering::Relaxed);
    client.forget_handle(handle);
    let _ = open.entry.leave(tag);
    true
}

/// Closes a file at once. Returns false if it is closed already. If this process is killed before the server knows of it,
/// the keeper closes the file.
pub(crate) fn now(open: Open, client: &Client) -> bool {
    let tag = tag();
    let is_open = open.entry.leave(tag);
    if is_open {
        client.close_handle(open.handle);
        // Otherwise the keeper has closed it, too, which does no harm: handles are not used again.
        let _ = open.entry.close_left(tag);
    }
    is_open
}

/// No two processes share a tag (but for rare ones in different PID namespaces), nor do two closes of one process that are
/// close together.
fn tag() -> u32 {
    (process::id() ^ process::namespace()) << 8 | TAGS.fetch_add(1, Ordering::Relaxed) & 0xff
}

/// Closes the left files of a mount with the next message that is sent. Returns true if there are any.
pub(crate) fn close_left(mount: usize, client: &Client) -> bool {
    if COUNT.load(Ordering::Relaxed) == 0 {
        return false;
    }
    let (Some(mut left), Some(state)) = (lock(&LEFT), start::state()) else { return false };
    let mut any = false;
    for place in &mut *left {
        let Some(one) = place.take_if(|one| one.mount == mount) else { continue };
        COUNT.fetch_sub(1, Ordering::Relaxed);
        if state.entry(one.number).is_some_and(|entry| entry.close_left(one.tag)) {
            client.close_with_next(one.handle);
            any = true;
        }
    }
    any
}

/// Takes back a file that was left and is not closed yet. Returns false if it is none.
pub(crate) fn take_back(mount: usize, handle: u64) -> bool {
    let (Some(mut left), Some(state)) = (lock(&LEFT), start::state()) else { return false };
    let is_it = |one: &mut Left| one.mount == mount && one.handle == handle;
    let Some(one) = left.iter_mut().find_map(|place| place.take_if(is_it)) else { return false };
    COUNT.fetch_sub(1, Ordering::Relaxed);
    state.entry(one.number).is_some_and(|entry| entry.close_left(one.tag))
}

/// Forgets the parent's left files in the child of a fork: the parent or the keeper closes them.
pub(crate) fn disown() {
    if let Some(mut left) = lock(&LEFT) {
        *left = [const { None }; LEFT_MAX];
        COUNT.store(0, Ordering::Relaxed);
    }
}
