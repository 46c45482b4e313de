//! The NBD client of the kit: [`haggle`] for the handshake, [`session`] for transmission. Both can send
//! invalid messages, and both check everything that they receive.

pub mod chunk;
pub mod haggle;
pub mod reply;
pub mod session;

pub use haggle::{Answer, BlockSizes, Haggle, Info, context_data, info_data};
pub use reply::{Extent, Reply, Violation};
pub use session::{Mode, Request, Session};
