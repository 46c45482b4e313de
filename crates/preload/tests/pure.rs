//! Unit tests of modules that neither call libc nor are called by programs. Within the library itself they
//! would run in a program whose libc it replaces.

#[path = "../src/languages.rs"]
mod languages;
#[path = "../src/runs.rs"]
mod runs;
#[allow(dead_code)] // only the library uses all of it
#[path = "../src/walk/tree.rs"]
mod tree;
