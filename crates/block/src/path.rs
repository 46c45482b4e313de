//! Which way the bytes of a disk go.

/// How the bytes of reads get from the page cache, or from a buffer, to the network: the rungs of
/// a ladder that begins with a copy at each step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[allow(clippy::exhaustive_enums)] // each is a rung
pub enum DataPath {
    /// Pages of the cache leave by `sendfile` if they are there. Else, and around the cache, bytes
    /// are read into a buffer and sent from it: by `SEND_ZC` if the peer is on another machine, as
    /// long as the kernel does not copy them nevertheless.
    #[default]
    Auto,
    /// Read into a buffer, sent from it by an ordinary send. Through the page cache that is the
    /// way of servers of old: the CPU copies each byte twice.
    Staged,
    /// Pages of the cache leave by `sendfile`; what is not there is brought in before.
    Sendfile,
    /// Sent from the buffer by `SEND_ZC`, also within a machine, where the kernel copies.
    ZeroCopy,
}

/// How a disk's reads are delivered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[allow(clippy::exhaustive_structs)] // settings, made by whoever exports disks
pub struct Delivery {
    /// Which way the bytes go.
    pub path: DataPath,
    /// Nothing of a read is told before the disk is done with all of it, so that disk and network
    /// work one after the other: what others do, to compare with. Takes the memory of whole reads.
    pub serial: bool,
}

/// Bytes that an engine moved, by the way they went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Moved {
    /// Read: pages of the cache or of memory handed over by reference.
    pub lent: u64,
    /// Read: copied out of the page cache or memory into a buffer.
    pub staged: u64,
    /// Read: by the device into a buffer, around the page cache.
    pub direct: u64,
    /// Read: holes, for which nothing is moved.
    pub holes: u64,
    /// Written through the page cache or into memory.
    pub written_staged: u64,
    /// Written by being received into the disk's memory.
    pub written_in_place: u64,
    /// Written by the device from a buffer, around the page cache.
    pub written_direct: u64,
}
