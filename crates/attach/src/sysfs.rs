//! Reads the size of a device in `/sys/block`, and reads and sets limits of its queue.

use crate::Error;

/// Returns the size of a device in bytes; `name` is the device without its directory. `None` if there is no
/// such device.
pub(crate) fn size(name: &str) -> Option<u64> {
    let sectors = std::fs::read_to_string(format!("/sys/block/{name}/size")).ok()?;
    Some(sectors.trim().parse::<u64>().ok()? * 512)
}

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

#[cfg(test)]
mod tests {
    use super::size;

    #[test]
    fn the_size_is_the_one_that_the_kernel_has_now() {
        assert_eq!(size("no-such-device"), None);
        let devices = std::fs::read_dir("/sys/block").into_iter().flatten().flatten();
        for device in devices.filter_map(|device| device.file_name().into_string().ok()) {
            let bytes = size(&device).unwrap();
            assert!(bytes.is_multiple_of(512), "{device}: {bytes}");
        }
    }
}
