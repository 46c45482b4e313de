//! Towline's message formats: fixed little-endian structures, their limits and error numbers.
//!
//! A message is a 32-byte [`Header`], a body (operations or their results) and a payload (file
//! bytes). This crate decodes bytes into checked values and encodes values. It does no I/O and
//! has no `unsafe`. Every decoder accepts arbitrary bytes and returns a [`ProtocolError`] for
//! invalid ones.
//!
//! Read in this order: [`header`], [`list`], [`request`], [`reply`], [`extents`], [`disk`],
//! [`hello`].
#![forbid(unsafe_code)]

pub mod attr;
pub mod codec;
pub mod disk;
pub mod entry;
pub mod errno;
pub mod event;
pub mod extents;
pub mod header;
pub mod hello;
pub mod items;
pub mod limits;
pub mod list;
pub mod parts;
pub mod ranges;
pub mod reply;
pub mod request;
#[cfg(test)]
mod round_trips;

pub use attr::{Attr, StatFs, Timestamp};
pub use codec::{ProtocolError, Reader};
pub use errno::Errno;
pub use header::{Header, Kind};
pub use hello::{Hello, Welcome};
pub use reply::Reply;
pub use request::Request;
