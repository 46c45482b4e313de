//! Unit tests of modules that neither call libc nor are called by programs. Within the library itself they
//! would run in a program whose libc it replaces.

#[path = "../src/cache/gathered.rs"]
mod gathered;
#[path = "../src/hash.rs"]
mod hash;
#[path = "../src/languages.rs"]
mod languages;
#[allow(dead_code)] // only the library uses all of it
#[path = "../src/known/order.rs"]
mod order;
#[allow(dead_code)] // as above
#[path = "../src/ahead/reader.rs"]
mod reader;
#[path = "../src/runs.rs"]
mod runs;
#[allow(dead_code)] // as above
#[path = "../src/walk/tree.rs"]
mod tree;

#[allow(dead_code)] // as above
#[path = "../src/written/content.rs"]
mod content;

mod known {
    /// Nobody changes anything here.
    pub(crate) fn changes() -> u64 {
        0
    }
}
