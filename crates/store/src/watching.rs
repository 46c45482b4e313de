//! Reports of changes to files, whoever makes them, as by `inotify(7)`.

/// Receives the events of a watched file. The store calls it where the change is made or noticed,
/// while holding locks of the store. So it must not wait, call the store, or drop an open file or a
/// watch; nor may any thread do so while it holds a lock that the witness takes.
pub trait Witness: Send + Sync {
    /// Reports an event: one of the `IN_*` bits of [`towline_wire::event`], with `ISDIR` if it
    /// happened to a directory. `name` is the name of an entry of the watched directory, or empty
    /// if the event is about the watched file itself. The two halves of a move have the same
    /// `cookie`, which is zero for other events. `IGNORED` is the last event.
    ///
    /// A file counts as gone, with `DELETE_SELF` and `IGNORED`, when it loses its last name, even
    /// if it is still open: the watch itself keeps it open.
    fn saw(&self, mask: u32, cookie: u32, name: &[u8]);

    /// Reports that events were lost.
    fn lost(&self);
}

/// A watch, active until dropped. Events already under way at the drop may still be reported.
pub trait Watch: Send + Sync {}

#[cfg(test)]
mod tests;
