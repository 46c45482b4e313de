//! What a program reads in short pieces is put into the cache in longer ones, which consist of whole blocks.

use towline_instance::cache::BLOCK_BYTES;

/// What is shorter is not put into the cache yet.
pub(crate) const LONG_BYTES: usize = 64 * 1024;

/// Bytes of a file.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) from: u64,
    pub(crate) bytes: Vec<u8>,
}

/// Bytes that follow each other in the file.
#[derive(Default)]
pub(crate) struct Gathered {
    from: u64,
    bytes: Vec<u8>,
}

impl Gathered {
    fn end(&self) -> u64 {
        self.from + self.bytes.len() as u64
    }

    /// Returns what has been gathered.
    pub(crate) fn take(&mut self) -> Option<Piece> {
        let bytes = std::mem::take(&mut self.bytes);
        (!bytes.is_empty()).then_some(Piece { from: self.from, bytes })
    }

    /// Adds what was read; `ends` tells that the file ends there. Returns what is to be put into the cache now: what
    /// was gathered before if this does not follow it, and what is long enough.
    pub(crate) fn add(&mut self, at: u64, data: &[u8], ends: bool) -> [Option<Piece>; 2] {
        let before = if self.end() == at { None } else { self.take() };
        if self.bytes.is_empty() {
            self.from = at;
        }
        if self.bytes.try_reserve(data.len()).is_err() {
            self.bytes.clear();
            return [before, None];
        }
        self.bytes.extend_from_slice(data);
        if ends {
            return [before, self.take()];
        }
        if self.bytes.len() < LONG_BYTES {
            return [before, None];
        }
        // The last block is not whole yet.
        let end = self.end();
        let rest = ((end % BLOCK_BYTES as u64) as usize).min(self.bytes.len());
        let rest = self.bytes.split_off(self.bytes.len() - rest);
        let whole = self.take();
        (self.from, self.bytes) = (end - rest.len() as u64, rest);
        [before, whole]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(from: u64, length: usize) -> Option<Piece> {
        Some(Piece { from, bytes: bytes(from, length) })
    }

    fn bytes(from: u64, length: usize) -> Vec<u8> {
        (from..from + length as u64).map(|at| (at * 7 / 3) as u8).collect()
    }

    #[test]
    fn whole_blocks_come_out_however_short_the_pieces_are() {
        for step in [1000, 4096, 65_000, 100_000] {
            let mut gathered = Gathered::default();
            let (mut at, mut out) = (0, Vec::new());
            while at < 500_000 {
                let [before, whole] = gathered.add(at, &bytes(at, step), false);
                assert_eq!(before, None);
                at += step as u64;
                if let Some(piece) = whole {
                    assert_eq!(piece.from, out.len() as u64, "{step}");
                    assert!(piece.bytes.len().is_multiple_of(BLOCK_BYTES), "{step}");
                    out.extend(piece.bytes);
                }
            }
            assert!(at - out.len() as u64 <= LONG_BYTES as u64, "{step}");
            assert_eq!(out, bytes(0, out.len()), "{step}");
        }
    }

    #[test]
    fn what_does_not_follow_begins_anew() {
        let mut gathered = Gathered::default();
        assert_eq!(gathered.add(4096, &bytes(4096, 5000), false), [None, None]);
        assert_eq!(gathered.add(20_000, &bytes(20_000, 10), false), [piece(4096, 5000), None]);
        assert_eq!(gathered.add(20_010, &bytes(20_010, 10), true), [None, piece(20_000, 20)]);
        assert_eq!(gathered.take(), None);
    }
}
