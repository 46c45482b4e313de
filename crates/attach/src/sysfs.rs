//! What the kernel says in `/sys/block` about the queue of a device, and is told there.

use crate::Error;

/// A length that the kernel counts in KiB, in bytes; `name` is that of the device without its directory.
///
/// # Errors
/// When there is no such device.
pub(crate) fn length(name: &str, attribute: &str) -> Result<u64, Error> {
    let path = path(name, attribute);
    let text = std::fs::read_to_string(&path).map_err(Error::system(&path))?;
    let kib = text.trim().parse::<u64>().map_err(|_| Error::Protocol("no number in sysfs"))?;
    Ok(kib * 1024)
}

/// Sets it, down to whole KiB.
///
/// # Errors
/// When there is no such device, or this user may not.
pub(crate) fn set_length(name: &str, attribute: &str, bytes: u64) -> Result<(), Error> {
    let path = path(name, attribute);
    std::fs::write(&path, (bytes / 1024).to_string()).map_err(Error::system(&path))
}

fn path(name: &str, attribute: &str) -> String {
    format!("/sys/block/{name}/queue/{attribute}")
}
