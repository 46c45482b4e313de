//! Connections to far servers that the keeper holds ready for processes.
//!
//! A process asks with one packet to [the keeper's socket](crate::KEEPER), which carries one end of a socket pair.
//! Over that, the keeper hands over a connection at once, or closes its end if it has none.

/// Length of a question in bytes.
const WANT_BYTES: usize = 12;

/// Asks for a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Want {
    /// Number of the first mount of the server.
    pub mount: u32,
    /// The process, by its number as an owner of locks.
    pub process: u64,
}

impl Want {
    /// Encodes the question.
    #[must_use]
    pub fn to_bytes(self) -> [u8; WANT_BYTES] {
        let mut bytes = [0; WANT_BYTES];
        bytes[..8].copy_from_slice(&self.process.to_ne_bytes());
        bytes[8..].copy_from_slice(&self.mount.to_ne_bytes());
        bytes
    }

    /// Decodes a question; returns `None` if it is not one.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let [a, b, c, d, e, f, g, h, i, j, k, l] = *<&[u8; WANT_BYTES]>::try_from(bytes).ok()?;
        let process = u64::from_ne_bytes([a, b, c, d, e, f, g, h]);
        Some(Self { mount: u32::from_ne_bytes([i, j, k, l]), process })
    }
}

/// What processes know of the connections to a server, as it is stored in the shared state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stock {
    /// Each process connects by itself, and nobody asks for anything.
    Never,
    /// As many are ready. If there are none, a process that asks, and does not wait, causes there to be more.
    Some(u32),
}

impl Stock {
    pub(crate) fn to_word(self) -> u32 {
        match self {
            Self::Never => 0,
            Self::Some(count) => count.saturating_add(1),
        }
    }

    pub(crate) fn of_word(word: u32) -> Self {
        word.checked_sub(1).map_or(Self::Never, Self::Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_are_understood_and_nonsense_is_not() {
        let want = Want { mount: 3, process: 7 << 40 };
        assert_eq!(Want::parse(&want.to_bytes()), Some(want));
        assert_eq!(Want::parse(&[0; WANT_BYTES - 1]), None);
        assert_eq!(Want::parse(&[0; WANT_BYTES + 1]), None);
        for stock in [Stock::Never, Stock::Some(0), Stock::Some(16)] {
            assert_eq!(Stock::of_word(stock.to_word()), stock);
        }
    }
}
