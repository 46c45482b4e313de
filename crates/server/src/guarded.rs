//! Confines a panic to the request that caused it.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs a part of a request. `None`: it panicked, which is logged. Whatever it held is released, and its
/// changes stay as they are.
pub(crate) fn guarded<T>(part: impl FnOnce() -> T) -> Option<T> {
    let done = unless_panics(part);
    if done.is_none() {
        log::error!("a request failed because of a bug in the server; others continue");
    }
    done
}

/// Runs `work`. `None`: it panicked; the panic message went to standard error.
pub(crate) fn unless_panics<T>(work: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(work)).ok()
}
