//! Panics in a single request: that request fails, and nothing else.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Does a part of one request. `None`: it panicked, which is logged; whatever it held is free again, and what
/// it changed is as it was left.
pub(crate) fn guarded<T>(part: impl FnOnce() -> T) -> Option<T> {
    let done = unless_panics(part);
    if done.is_none() {
        log::error!("a request failed by a mistake in the server; others go on");
    }
    done
}

/// Does something. `None`: it panicked; what the panic says went to standard error.
pub(crate) fn unless_panics<T>(work: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(work)).ok()
}
