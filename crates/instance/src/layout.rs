//! Names and offsets shared with the start of `towline run`, which has no Rust standard library:
//! `cli/launch` includes this file.

/// Environment variable that names the private directory of the run.
pub const VARIABLE: &str = "TOWLINE_RUN";
/// Folder of the placeholders in that directory.
pub const PLACEHOLDERS: &str = "d";
/// Name of the mapped file.
pub const STATE: &str = "state";
/// Longest path of a user's folder for runs: that of a socket in the directory of a run has at most 107 bytes, also if it stands
/// for a remote one, with the number of its inode.
pub const FOLDER_BYTES_MAX: usize = 107 - b"/run-4194304-0/s/15-18446744073709551615".len();
/// Bytes that its path cannot have: for `ld.so(8)` the first two end a name in `LD_PRELOAD`, and what follows the last
/// one stands for something else.
pub const NOT_IN_FOLDER: &[u8] = b" :$";
/// The dynamic linker of glibc at the path that the machine's ABI fixes, with a zero byte.
#[cfg(target_arch = "x86_64")]
pub(crate) const LINKER: &[u8] = b"/lib64/ld-linux-x86-64.so.2\0";
/// As above.
#[cfg(target_arch = "aarch64")]
pub(crate) const LINKER: &[u8] = b"/lib/ld-linux-aarch64.so.1\0";
/// Major number of the device numbers that files of a run report: one reserved for local use.
pub const DEVICE_MAJOR: u32 = 240;
/// The mapped file begins with this word, followed by the length of the configuration in bytes.
pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"towlrun2");
/// Offset of the number of a process that the library must wait for (`State::take_between`).
pub(crate) const BETWEEN_AT: usize = 44;
/// Offset of the configuration.
pub(crate) const CONFIG_AT: usize = 3192;
/// Length of the mapped file.
pub const STATE_BYTES: usize = 69_271_552;
