//! The ways in which a disk's bytes are moved.

/// How the bytes of reads get from the page cache or a buffer to the network. `Staged` copies at every step;
/// the others avoid some or all copies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[allow(clippy::exhaustive_enums)] // callers have to handle each
pub enum DataPath {
    /// Pages in the page cache leave by `sendfile`, or through a pipe. All others, and those of disks that
    /// bypass the cache, are read into a buffer and sent from it: by `SEND_ZC` if the peer is on another
    /// machine, unless the kernel copies anyway.
    #[default]
    Auto,
    /// Bytes are read into a buffer and sent with an ordinary send. Through the page cache this is the
    /// classical way: the CPU copies each byte twice.
    Staged,
    /// Pages of the page cache leave by `sendfile`; missing ones are brought in first.
    Sendfile,
    /// Bytes are sent from the buffer by `SEND_ZC`, even within one machine, where the kernel copies.
    ZeroCopy,
}

/// How a disk's reads are delivered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[allow(clippy::exhaustive_structs)] // settings, given by the code that exports disks
pub struct Delivery {
    /// Which way the bytes go.
    pub path: DataPath,
    /// Nothing of a read is reported before the disk has finished all of it, so disk and network work one
    /// after the other. For comparison with other servers. Takes the memory of whole reads.
    pub serial: bool,
}

/// Bytes that an engine moved in each way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Moved {
    /// Read: pages of the page cache or of memory, handed over by reference.
    pub lent: u64,
    /// Read: copied out of the page cache or memory into a buffer.
    pub staged: u64,
    /// Read: moved by the device into a buffer, bypassing the page cache.
    pub direct: u64,
    /// Read: holes, for which no bytes are moved.
    pub holes: u64,
    /// Written through the page cache or into memory.
    pub written_staged: u64,
    /// Written by receiving into the disk's memory.
    pub written_in_place: u64,
    /// Written by the device from a buffer, bypassing the page cache.
    pub written_direct: u64,
}
