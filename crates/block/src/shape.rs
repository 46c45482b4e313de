//! Blocks and queue depth that an export announces in place of the back end's.

use std::io;
use towline_store::Geometry;

/// Largest minimum block that the NBD protocol allows, in bytes.
const BLOCK_BYTES_MAX: u32 = 64 * 1024;
/// The protocol's bounds for the preferred block, in bytes.
const PREFERRED_BYTES: std::ops::RangeInclusive<u32> = 512..=32 << 20;

/// Requests of one connection that may be under way at once, unless the export allows fewer.
pub const DEPTH_MAX: u32 = 1024;

/// Blocks and queue depth of an export; zero means the default of the back end or the server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)] // made from options
pub struct Shape {
    /// Smallest unit of requests, in bytes.
    pub block: u32,
    /// Unit that is announced as performing best, in bytes.
    pub preferred: u32,
    /// Limit for the requests of one connection under way at once, at most [`DEPTH_MAX`].
    pub depth: u32,
}

impl Shape {
    /// Returns the geometry that clients see.
    #[must_use]
    pub fn of(self, back_end: Geometry) -> Geometry {
        let block_minimum = back_end.block_minimum.max(self.block);
        let preferred = if self.preferred > 0 { self.preferred } else { back_end.block_preferred };
        Geometry {
            // A partial block at the end, which a grown file may have, cannot be requested.
            size: back_end.size - back_end.size % u64::from(block_minimum),
            block_minimum,
            block_preferred: preferred.max(block_minimum),
            ..back_end
        }
    }

    /// Checks what no back end allows.
    ///
    /// # Errors
    /// As [`Shape::check`].
    pub fn check_for_any(self) -> io::Result<()> {
        self.check(Geometry {
            size: 0,
            block_minimum: 1,
            block_preferred: 1,
            rotational: false,
            read_only: false,
        })
    }

    /// Checks the shape against the back end.
    ///
    /// # Errors
    /// `InvalidInput`, with an explanation, for blocks and depths that are not allowed, or if the disk's size
    /// is not a multiple of the block.
    pub fn check(self, back_end: Geometry) -> io::Result<()> {
        let wrong = |what: String| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        let Self { block, preferred, depth } = self;
        if depth > DEPTH_MAX {
            return wrong(format!("depth={depth}: expected 1 to {DEPTH_MAX}"));
        }
        let least = back_end.block_minimum;
        if block > 0 && (!block.is_power_of_two() || block < least || block > BLOCK_BYTES_MAX) {
            return wrong(format!(
                "block={block}: expected a power of two from {least} to {BLOCK_BYTES_MAX}"
            ));
        }
        if !back_end.size.is_multiple_of(block.max(1).into()) {
            return wrong(format!(
                "block={block}: its size, {} bytes, is not a multiple of that",
                back_end.size
            ));
        }
        let least = least.max(block).max(*PREFERRED_BYTES.start());
        let most = *PREFERRED_BYTES.end();
        if preferred > 0 && (!preferred.is_power_of_two() || preferred < least || preferred > most)
        {
            return wrong(format!(
                "preferred={preferred}: expected a power of two from {least} to {most}"
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BACK_END: Geometry = Geometry {
        size: 1 << 20,
        block_minimum: 512,
        block_preferred: 4096,
        rotational: false,
        read_only: false,
    };

    #[test]
    fn blocks_are_checked() {
        let check = |block, preferred| Shape { block, preferred, depth: 0 }.check(BACK_END).is_ok();
        for good in [(0, 0), (512, 0), (65536, 65536), (4096, 1 << 20), (0, 512)] {
            assert!(check(good.0, good.1), "{good:?}");
        }
        for bad in [(256, 0), (1000, 0), (131_072, 0), (4096, 512), (0, 1000), (0, 64 << 20)] {
            assert!(!check(bad.0, bad.1), "{bad:?}");
        }
        let deep = |depth| Shape { depth, ..Shape::default() }.check(BACK_END).is_ok();
        assert!(deep(0) && deep(DEPTH_MAX) && !deep(DEPTH_MAX + 1));
        let odd = Geometry { size: (1 << 20) + 512, ..BACK_END };
        assert!(Shape { block: 4096, ..Shape::default() }.check(odd).is_err());
    }

    #[test]
    fn clients_see_whole_blocks() {
        let grown = Geometry { size: (1 << 20) + 512, ..BACK_END };
        let told = Shape { block: 8192, ..Shape::default() }.of(grown);
        assert_eq!((told.size, told.block_minimum, told.block_preferred), (1 << 20, 8192, 8192));
        assert_eq!(Shape::default().of(grown), grown);
    }
}
