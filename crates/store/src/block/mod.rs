//! Disks: files and devices, memory, and disks made of other disks.

mod continuity;
mod delay;
mod fiemap;
mod file;
mod foreign;
mod members;
mod memory;
mod populate;
mod settle;
mod stripe;

pub use delay::DelayStore;
pub use file::{CacheMode, FileDisk};
pub use foreign::ForeignDisk;
pub use memory::MemoryDisk;
pub use stripe::StripeDisk;

#[cfg(test)]
mod tests;
