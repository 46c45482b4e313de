//! Memory that a transport may touch: typed segments, aggregates of segments, bounded pools.
//!
//! An [`Aggregate`] is an ordered list of slices of [`Segment`]s. It splits, appends, prepends and
//! concatenates without copying; only the code that finally moves the bytes looks at the kind of each
//! segment. [`Pool`] bounds the memory that requests may hold at once. [`SharedMemory`] is a sealed
//! memfd mapped by more than one process; a [`Loan`] keeps parts of one unchanged for a process that
//! reads them in place.

mod aggregate;
mod aligned;
mod copy;
mod huge;
mod lending;
mod page;
mod pool;
mod process;
mod segment;
mod shared;
mod spare;

pub use aggregate::{Aggregate, Slice, Slices};
pub use aligned::{ALIGNMENT, aligned_zeroes};
pub use huge::HUGE_BYTES;
pub use lending::{Lending, Loan};
pub use page::page_bytes;
pub use pool::{Pool, PoolBuffer, Reserved};
pub use process::{Region, read_process};
pub use segment::{Guard, Segment, zeros};
pub use shared::{SharedMemory, expect};
pub use spare::Fresh;
