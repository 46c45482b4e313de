//! What a mistake of ours in one request costs: that request.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Does a part of one request. `None`: it panicked, which is told; whatever it held is free again, and what
/// it changed is as it was left.
pub(crate) fn guarded<T>(part: impl FnOnce() -> T) -> Option<T> {
    // What the panic says went to standard error.
    let told = |_: &_| log::error!("a request failed by a mistake in the server; others go on");
    catch_unwind(AssertUnwindSafe(part)).inspect_err(told).ok()
}
