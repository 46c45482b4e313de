//! Reads what a device has in `/sys/block`, and reads and sets limits of its queue.

use crate::Error;
use crate::backend::DeviceGeometry;

/// Returns the size of a device in bytes; `name` is the device without its directory. `None` if there is no
/// such device.
pub(crate) fn size(name: &str) -> Option<u64> {
    let sectors = std::fs::read_to_string(format!("/sys/block/{name}/size")).ok()?;
    Some(sectors.trim().parse::<u64>().ok()? * 512)
}

/// Returns what a device has now; `name` is the device without its directory.
///
/// # Errors
/// If there is no such device.
pub(crate) fn geometry(name: &str) -> Result<DeviceGeometry, Error> {
    Ok(DeviceGeometry {
        bytes: number(&format!("/sys/block/{name}/size"))? * 512,
        block: number(&path(name, "logical_block_size"))? as u32,
        read_only: number(&format!("/sys/block/{name}/ro"))? != 0,
    })
}

/// Returns a length in bytes, which the kernel counts in KiB; `name` is the device without its directory.
///
/// # Errors
/// If there is no such device.
pub(crate) fn length(name: &str, attribute: &str) -> Result<u64, Error> {
    Ok(number(&path(name, attribute))? * 1024)
}

fn number(path: &str) -> Result<u64, Error> {
    let text = std::fs::read_to_string(path).map_err(Error::system(path))?;
    text.trim().parse().map_err(|_| Error::Protocol("no number in sysfs"))
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
    use super::{geometry, size};

    #[test]
    fn the_size_is_the_one_that_the_kernel_has_now() {
        assert_eq!(size("no-such-device"), None);
        assert!(geometry("no-such-device").is_err());
        let devices = std::fs::read_dir("/sys/block").into_iter().flatten().flatten();
        for device in devices.filter_map(|device| device.file_name().into_string().ok()) {
            let bytes = size(&device).unwrap();
            assert!(bytes.is_multiple_of(512), "{device}: {bytes}");
            let found = geometry(&device).unwrap();
            assert!(found.block.is_power_of_two() && found.block >= 512, "{device}: {found}");
            assert_eq!(found.bytes, bytes, "{device}");
        }
    }
}
