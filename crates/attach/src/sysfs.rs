//! Reads and sets limits of the queue of a device in `/sys/block`.

use crate::Error;

/// Returns a length in bytes, which the kernel counts in KiB; `name` is the device without its directory.
///
/// # Errors
/// If there is no such device.
pub(crate) fn length(name: &str, attribute: &str) -> Result<u64, Error> {
    let path = path(name, attribute);
    let text = std::fs::read_to_string(&path).map_err(Error::system(&path))?;
    let kib = text.trim().parse::<u64>().map_err(|_| Error::Protocol("no number in sysfs"))?;
    Ok(kib * 1024)
}

/// Sets such a length, rounded down to whole KiB.
///
/// # Errors
/// If there is no such device, or this user lacks permission.
pub(crate) fn set_length(name: &str, attribute: &str, bytes: u64) -> Result<(), Error> {
    let path = path(name, attribute);
    std::fs::write(&path, (bytes / 1024).to_string()).map_err(Error::system(&path))
}

fn path(name: &str, attribute: &str) -> String {
    format!("/sys/block/{name}/queue/{attribute}")
}
