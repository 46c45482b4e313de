//! Configuration of a run: which paths are remote. `towline run` writes it into the shared state.

/// A prefix and the remote directory it stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Absolute path without a trailing slash: paths below it are remote.
    pub prefix: Vec<u8>,
    /// URL of the directory.
    pub url: String,
    /// `st_dev` of files below it.
    pub device: u64,
}

/// The directory of a mount, as its server knows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Root {
    /// Handle, open for the whole family of sessions.
    pub handle: u64,
    /// `Attr::identity` of that directory.
    pub inode: u64,
    /// Boot epoch of the server that gave the handle.
    pub epoch: u32,
}

/// Configuration of a run, known before its servers are contacted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Config {
    /// Names the family of sessions; see `towline_client::Options::family`.
    pub family: u64,
    /// Whether a report is wanted.
    pub report: bool,
    /// The library to preload.
    pub library: Vec<u8>,
    /// The directory of the [cache](crate::cache); empty: none.
    pub cache: Vec<u8>,
    /// Prefixes.
    pub mounts: Vec<Mount>,
}

impl Config {
    /// Encodes the configuration: numbers in native byte order, strings after their length.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let bytes = |out: &mut Vec<u8>, value: &[u8]| {
            out.extend_from_slice(&(value.len() as u64).to_ne_bytes());
            out.extend_from_slice(value);
        };
        out.extend_from_slice(&self.family.to_ne_bytes());
        out.extend_from_slice(&u64::from(self.report).to_ne_bytes());
        bytes(&mut out, &self.library);
        bytes(&mut out, &self.cache);
        out.extend_from_slice(&(self.mounts.len() as u64).to_ne_bytes());
        for mount in &self.mounts {
            bytes(&mut out, &mount.prefix);
            bytes(&mut out, mount.url.as_bytes());
            out.extend_from_slice(&mount.device.to_ne_bytes());
        }
        out
    }

    /// Decodes a configuration; returns `None` if the bytes are not a valid encoding.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader(bytes);
        let family = reader.number()?;
        let report = reader.number()? != 0;
        let library = reader.bytes()?.to_vec();
        let cache = reader.bytes()?.to_vec();
        let count = usize::try_from(reader.number()?).ok()?;
        if count > crate::MOUNTS_MAX {
            return None;
        }
        let mut mounts = Vec::with_capacity(count);
        for _ in 0..count {
            mounts.push(Mount {
                prefix: reader.bytes()?.to_vec(),
                url: String::from_utf8(reader.bytes()?.to_vec()).ok()?,
                device: reader.number()?,
            });
        }
        Some(Self { family, report, library, cache, mounts })
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn number(&mut self) -> Option<u64> {
        let (number, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_ne_bytes(*number))
    }

    fn bytes(&mut self) -> Option<&'a [u8]> {
        let length = usize::try_from(self.number()?).ok()?;
        let (bytes, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_survives_a_round_trip() {
        let mount = Mount { prefix: b"/data".to_vec(), url: "towline://h/x".to_owned(), device: 3 };
        let config = Config {
            family: 9,
            report: true,
            library: b"/l".to_vec(),
            cache: b"/c".to_vec(),
            mounts: vec![mount; 2],
        };
        let bytes = config.to_bytes();
        assert_eq!(Config::parse(&bytes), Some(config));
        for cut in 0..bytes.len() {
            assert_eq!(Config::parse(&bytes[..cut]), None, "{cut}");
        }
    }
}
