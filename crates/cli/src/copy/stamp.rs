//! The note in a part: from which version of the source it comes, and up to where it is complete.

use towline_client::Attr;

/// A version of a source.
#[derive(PartialEq, Eq)]
pub(super) struct Stamp {
    source: String,
}

impl Stamp {
    /// Makes the stamp of a source with these attributes.
    pub(super) fn new(source: &Attr) -> Self {
        let time = source.modified;
        Self { source: format!("{} {}.{:09}", source.size, time.seconds, time.nanoseconds) }
    }

    /// Returns the note for a part that is complete up to `done`.
    pub(super) fn text(&self, done: u64) -> String {
        format!("{} {done}", self.source)
    }

    /// Reads a note: returns up to where the part is complete, if it belongs to the same version of the
    /// source.
    pub(super) fn read(&self, value: &[u8]) -> Option<u64> {
        let (source, done) = std::str::from_utf8(value).ok()?.rsplit_once(' ')?;
        if source == self.source { done.parse().ok() } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use towline_client::Timestamp;

    #[test]
    fn only_the_same_source_is_continued() {
        let mut attr = Attr { size: 10, modified: Timestamp::new(-3, 7), ..Attr::default() };
        let stamp = Stamp::new(&attr);
        let value = stamp.text(5);
        assert_eq!(stamp.read(value.as_bytes()), Some(5));
        attr.modified.nanoseconds += 1;
        assert_eq!(Stamp::new(&attr).read(value.as_bytes()), None);
        for broken in ["", "5", "10 -3.000000007 x", "10 -3.000000007 "] {
            assert_eq!(stamp.read(broken.as_bytes()), None, "{broken}");
        }
    }
}
