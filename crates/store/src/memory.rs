//! A file system of our own in memory.
