//! How far the kernel reads ahead of sequential readers of a device.
//!
//! The kernel reads ahead by itself, into its page cache, for each file that is read sequentially. Only the
//! distance can be set. The default of 128 KiB suits local disks; with a remote one, readers would wait
//! half of the time.

use crate::{Error, sysfs};
use std::time::Duration;

/// Minimum on its way while as much is being used. However near the server is, the disk and the requests
/// take time.
const HALF_MIN: u64 = 256 * 1024;
/// Maximum. More would cost too much if the guess is wrong: a touched page of a mapping waits for all of it.
const HALF_MAX: u64 = 4 * 1024 * 1024;
const ATTRIBUTE: &str = "read_ahead_kb";
/// A network of 10 Gbit/s, bytes a second.
const NETWORK: u128 = 1_250_000_000;

/// Returns the bytes to read ahead for a server with this round trip: what a network of 10 Gbit/s delivers
/// in two round trips, so that one half is on its way while the other is being used; 512 KiB to 8 MiB.
#[must_use]
pub fn fitting(round_trip: Duration) -> u64 {
    let under_way = round_trip.as_nanos() * NETWORK / 1_000_000_000;
    2 * (u64::try_from(under_way).unwrap_or(u64::MAX)).clamp(HALF_MIN, HALF_MAX)
}

/// Returns the read-ahead of a device in bytes; `name` is the device without its directory.
///
/// # Errors
/// If there is no such device.
pub fn of(name: &str) -> Result<u64, Error> {
    sysfs::length(name, ATTRIBUTE)
}

/// Sets the read-ahead of a device, rounded down to whole KiB, by the kernel to whole pages; 0 turns it off.
///
/// # Errors
/// If there is no such device, or this user lacks permission.
pub fn set(name: &str, bytes: u64) -> Result<(), Error> {
    sysfs::set_length(name, ATTRIBUTE, bytes)
}

#[cfg(test)]
mod tests {
    use super::fitting;
    use std::time::Duration;

    #[test]
    fn farther_servers_are_read_farther_ahead() {
        let mib = |micros| fitting(Duration::from_micros(micros)) as f64 / (1 << 20) as f64;
        assert_eq!((mib(0), mib(100)), (0.5, 0.5));
        assert!((2.3..2.5).contains(&mib(1000)), "{}", mib(1000));
        assert_eq!((mib(10_000), mib(u64::MAX)), (8.0, 8.0));
    }
}
