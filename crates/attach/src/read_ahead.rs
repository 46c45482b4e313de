//! How far the kernel reads ahead of sequential readers of a device.
//!
//! The kernel does the reading ahead itself, file by file as it sees what is read in order, into its page cache. All
//! that there is to say is how far: its 128 KiB are for disks of the machine, and leave a remote one waiting for half
//! of the time.

use crate::{Error, sysfs};
use std::time::Duration;

/// What is on its way while as much is being used, however near the server is: for what the disk needs, and the requests.
const HALF_MIN: u64 = 256 * 1024;
/// More would cost too much where the guess is wrong: who touches a page of a mapping waits for all of it.
const HALF_MAX: u64 = 4 * 1024 * 1024;
const ATTRIBUTE: &str = "read_ahead_kb";
/// A network of 10 Gbit/s, bytes a second.
const NETWORK: u128 = 1_250_000_000;

/// Bytes to read ahead, for a server that takes so long to answer: what a network of 10 Gbit/s delivers in the time of
/// two round trips, so that as much is on its way as is being used; 512 KiB to 8 MiB.
#[must_use]
pub fn fitting(round_trip: Duration) -> u64 {
    let under_way = round_trip.as_nanos() * NETWORK / 1_000_000_000;
    2 * (u64::try_from(under_way).unwrap_or(u64::MAX)).clamp(HALF_MIN, HALF_MAX)
}

/// What is read ahead of a device, bytes; `name` is that of the device without its directory.
///
/// # Errors
/// When there is no such device.
pub fn of(name: &str) -> Result<u64, Error> {
    sysfs::length(name, ATTRIBUTE)
}

/// Sets it, down to whole KiB; the kernel, to whole pages. 0: nothing is read ahead.
///
/// # Errors
/// When there is no such device, or this user may not.
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
