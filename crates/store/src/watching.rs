//! Being told what happens to files, by whomever, as by `inotify(7)`.

/// Who is told of what happens to a file that is watched. It is called where the change is made or noticed, under locks of the store: it must not
/// wait, must not call the store, and must not drop an open file or a watch. So whoever holds a lock that it takes must not do so either.
pub trait Witness: Send + Sync {
    /// Something happened: one of the `IN_*` bits of [`towline_wire::event`], with `ISDIR` where it happened to a directory.
    /// `name` is that of an entry of the watched directory, empty where it happened to the watched file itself. The two halves
    /// of a move have the same `cookie`, which all else has zero. `IGNORED` is the last that is told.
    ///
    /// A file is gone, and `DELETE_SELF` and `IGNORED` are told, when it has lost its last name, even if somebody still has it open: whoever
    /// watches it has.
    fn saw(&self, mask: u32, cookie: u32, name: &[u8]);

    /// Something happened that is not known any more.
    fn lost(&self);
}

/// A watch, as long as it is held. What is under way when it is dropped may still be told.
pub trait Watch: Send + Sync {}

#[cfg(test)]
mod tests;
