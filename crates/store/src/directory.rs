//! A tree of the local file system, resolved by the kernel beneath its root.
