//! How the kit speaks NBD: [`haggle`] for the handshake, [`session`] for transmission. Both can send
//! what the text forbids, and both check all that comes back.

pub mod chunk;
pub mod haggle;
pub mod reply;
pub mod session;

pub use haggle::{Answer, BlockSizes, Haggle, Info, context_data, info_data};
pub use reply::{Extent, Reply, Violation};
pub use session::{Mode, Request, Session};
