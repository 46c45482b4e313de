//! Names and places that also the start of `towline run` knows, which has no library of the language:
//! `cli/launch` includes this file.

/// Environment variable with the private directory of the run.
pub const VARIABLE: &str = "TOWLINE_RUN";
/// Folder of the placeholders in it.
pub const PLACEHOLDERS: &str = "d";
/// The mapped file.
pub const STATE: &str = "state";
/// The dynamic linker of glibc, at the place that the ABI of the machine gives it, with a zero byte.
#[cfg(target_arch = "x86_64")]
pub(crate) const LINKER: &[u8] = b"/lib64/ld-linux-x86-64.so.2\0";
/// As above.
#[cfg(target_arch = "aarch64")]
pub(crate) const LINKER: &[u8] = b"/lib/ld-linux-aarch64.so.1\0";
/// Major number of the device numbers that files of a run show: one for local use.
pub const DEVICE_MAJOR: u32 = 240;
/// The mapped file begins with this word, then the number of bytes of the configuration.
pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"towlrun2");
/// Where it has the number of a process that the library is to wait for (`State::take_between`).
pub(crate) const BETWEEN_AT: usize = 44;
/// Where the configuration begins in it.
pub(crate) const CONFIG_AT: usize = 3000;
/// Its length.
pub(crate) const STATE_BYTES: usize = 68_222_976;
