//! Copies one regular file through a part, unless it is short enough for `short.rs`.

use super::attributes::{self, AccessList, Parent, Wanted};
use super::end::{End, Status};
use super::handle::Handle;
use super::part::{self, NotParts};
use super::pieces::{Transfer, first_difference};
use super::stamp::Stamp;
use crate::interrupt::Interrupt;
use crate::progress::Progress;
use crate::report::{Failure, Outcome, Report, end_for_pipe};
use crate::text::human;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use towline_client::{Attr, Errno};

/// Files up to this size are copied in one piece.
const WHOLE_BYTES_MAX: u64 = 1024 * 1024;
/// Bytes moved at once to and from fifos and devices.
const STREAM_BYTES: usize = 256 * 1024;
/// Large files under way at once; each has several pieces in memory.
const LARGE_MAX: usize = 4;
/// Attempts to create a part while other copies create it, too.
const PART_TRIES: usize = 10;

/// Errors of removing what has the name of a part: in a sticky directory it may be another user's, and it may be a
/// directory.
const IN_THE_WAY: [Errno; 3] = [Errno::EPERM, Errno::EACCES, Errno::EISDIR];

/// The open part of a large file.
struct Part {
    place: End,
    output: Handle,
    /// Up to where it is complete.
    from: u64,
}

/// What is known about a target before it is written.
#[derive(Clone, Copy)]
pub(super) enum Existing {
    /// It was not looked at.
    Unknown,
    /// It does not exist.
    Nothing,
    /// It exists, with this status.
    There(Status),
}

impl From<Option<Status>> for Existing {
    fn from(status: Option<Status>) -> Self {
        status.map_or(Self::Nothing, Self::There)
    }
}

/// What a copy takes over besides the bytes and plain attributes of its source.
#[derive(Default)]
pub(super) struct Legacy {
    /// Attributes of the file that it replaces.
    pub(super) replaced: Option<Attr>,
    /// Access control list, set together with the mode.
    list: Option<AccessList>,
    /// Bits of the mode that a list which it inherits takes away.
    denied: u32,
}

/// How regular files are copied.
pub(super) struct Files {
    /// Attributes to copy.
    pub(super) wanted: Wanted,
    /// Skip complete copies and continue parts.
    pub(super) resume: bool,
    /// Compare each copy with its source.
    pub(super) verify: bool,
    /// Number of this run, in the unique names of parts.
    pub(super) run: u32,
    /// Takes what is missing in copies.
    pub(super) report: Arc<Report>,
    /// Counts the bytes copied.
    pub(super) progress: Progress,
    /// Asks to stop.
    pub(super) interrupt: Interrupt,
    /// Limits the number of large files under way.
    pub(super) large: Permits,
    /// Copies that have names of parts.
    pub(super) not_parts: NotParts,
    /// The target of a short file was there. Then others most likely are, and looking costs less than a part that does
    /// not get its name.
    pub(super) met: AtomicBool,
    /// A server refused something of a file that was sent with all its attributes in one request.
    pub(super) refused: AtomicBool,
}

impl Files {
    /// Copies a regular file.
    pub(super) fn copy(
        &self,
        source: &End,
        target: &End,
        status: &Status,
        mut existing: Existing,
        parent: &Parent,
    ) -> Outcome<()> {
        if self.resume || target.is_local() {
            existing = looked_at(target, existing)?;
        }
        if let Existing::There(there) = existing {
            check_replaceable(status, &there).map_err(|f| f.about(target))?;
            if self.resume && attributes::unchanged(status, &there) {
                self.progress.already(status.attr.data_bytes());
                return Ok(());
            }
        }
        let sparse = status.attr.is_sparse();
        if status.attr.size > WHOLE_BYTES_MAX || sparse {
            return self.large(source, target, status, existing, parent);
        }
        let expected = status.attr.size as usize;
        let data =
            source.read_start(status.is_followed, expected + 1).map_err(|f| f.about(source))?;
        if data.len() < expected {
            // It has become shorter, or its file system returns less than it is asked for.
            return self.large(source, target, status, existing, parent);
        }
        if data.len() > expected {
            // The file has grown since it was looked at, or its size means nothing, as in `/proc`.
            let size = source.status(status.is_followed).map_err(|f| f.about(source))?.attr.size;
            return match size {
                0 => {
                    let existing = looked_at(target, existing)?;
                    let input =
                        source.open_regular(status.is_followed).map_err(|f| f.about(source))?;
                    self.without_length(source, target, status, &existing, input, parent)
                }
                _ => self.large(source, target, status, existing, parent),
            };
        }
        self.whole(source, target, status, existing, &data, parent)?;
        self.progress.bytes(status.attr.size);
        Ok(())
    }

    /// Returns what the copy of a file takes over.
    pub(super) fn legacy(
        &self,
        source: &End,
        target: &End,
        status: &Status,
        existing: &Existing,
        parent: &Parent,
    ) -> Outcome<Legacy> {
        let replaced = replaced(status, existing).map_err(|f| f.about(target))?;
        let there = replaced.as_ref().map(|attr| (target, attr));
        let inherits = || parent.hands_down(target);
        let list = self.wanted.access_list((source, &status.attr), there, inherits)?;
        Ok(Legacy { replaced, list, denied: 0 })
    }

    /// Returns what a list takes away that a new copy inherits. It is made with rights for its owner only, so the kernel
    /// could not tell.
    fn denied(&self, legacy: &Legacy, target: &End, parent: &Parent) -> Outcome<u32> {
        match legacy.replaced {
            None if !self.wanted.mode => parent.denied(target).map_err(|f| f.about(target)),
            _ => Ok(0),
        }
    }

    /// Compares the copy with `data` if asked to, and sets its attributes.
    pub(super) fn finish(
        &self,
        source: &End,
        written: &End,
        attr: &Attr,
        legacy: &Legacy,
        data: Option<&[u8]>,
    ) -> Outcome<()> {
        if let (true, Some(data)) = (self.verify, data) {
            let read = written.read_start(false, data.len() + 1)?;
            if read.len() != data.len() || crc32c::crc32c(&read) != crc32c::crc32c(data) {
                return Err(Failure::new("differs from the source after the copy; removed"));
            }
        }
        let replaced = legacy.replaced.as_ref();
        let mut set = self.wanted.rest(attr, replaced);
        if data.is_none() {
            // A large part gives rights only to its owner until it is complete.
            set.mode = Some(self.wanted.mode(attr, replaced) & !legacy.denied);
        }
        if self.wanted.xattr {
            // Before the attributes: setting the owner, even to the same one, removes file capabilities
            // (`chown(2)`).
            set = attributes::set_owner(written, &set)?;
            attributes::copy_xattrs(source, attr, written, &self.report)?;
        }
        if let Some(list) = &legacy.list {
            set = list.hand_down(written, set);
        }
        attributes::set(written, &set)
    }

    fn large(
        &self,
        source: &End,
        target: &End,
        status: &Status,
        existing: Existing,
        parent: &Parent,
    ) -> Outcome<()> {
        let sparse = status.attr.is_sparse();
        let _permit = self.large.take();
        let existing = looked_at(target, existing)?;
        let mut legacy = self.legacy(source, target, status, &existing, parent)?;
        legacy.denied = self.denied(&legacy, target, parent)?;
        let input = source.open_regular(status.is_followed).map_err(|f| f.about(source))?;
        let attr = input.opened().map_err(|f| f.about(source))?;
        // True in `/sys`, where the size is that of a page. A hole can be read to its end.
        let ends_before = sparse && attr.blocks == 0 && attr.size > 0 && {
            let last = input.read_at(&mut [0], attr.size - 1);
            last.map_err(|f| f.about(source))? == 0
        };
        if ends_before {
            return self.without_length(source, target, status, &existing, input, parent);
        }
        let stamp = Stamp::new(&attr);
        let opened = self.open_part(target, &stamp).map_err(|f| f.about(target))?;
        let Part { place: part, output, from } = opened;
        let inside = match (source, target) {
            (End::Remote(source), End::Remote(target)) => {
                source.same_server(target) && source.same_export(target)
            }
            _ => false,
        };
        let transfer = Transfer {
            source: &input,
            target: &output,
            size: attr.size,
            from: from.min(attr.size),
            sparse,
            inside,
            stamp: &stamp,
            progress: &self.progress,
            interrupt: &self.interrupt,
        };
        let found = status.attr.data_bytes();
        let already = transfer.from.min(found);
        self.progress.already(already);
        let written = transfer.run().and_then(|copied| {
            self.progress.counted(found, already + copied);
            match sparse || self.resume {
                // The source may end in a hole, and a continued part may be longer: pieces are not written in order.
                true => output.set_size(attr.size),
                false => Ok(()),
            }
        });
        if let Err(failure) = written.and_then(|()| output.settle()) {
            let failure = keep_or_remove(failure, (&part, target), &output, &input, &stamp);
            return Err(failure.about(target));
        }
        let finished = self.check(&input, &output, &attr, sparse).and_then(|()| {
            // Only a copy that took long has the stamp.
            let _ = output.remove_xattr(part::STAMP);
            let finish = |part: &End| self.finish(source, part, &attr, &legacy, None);
            self.put_in_place(&part, &output, target, finish)
        });
        finished.map_err(|failure| {
            remove_own(&part, &output);
            failure.about(target)
        })?;
        output.close().map_err(|failure| failure.about(target))
    }

    /// Opens the part of a large file. One that is not continued is replaced, not truncated: another copy that still
    /// writes to it must not mix its data with ours. One that stays in the way is left alone.
    fn open_part(&self, target: &End, stamp: &Stamp) -> Outcome<Part> {
        let mut place = target.sibling(&part::name(target.name()))?;
        if self.not_parts.has(&place) {
            place = self.own_part(target)?;
        }
        for _ in 0..PART_TRIES {
            match place.create(0o600) {
                Err(failure) if failure.is(Errno::EEXIST) => (),
                created => return Ok(Part { output: created?, place, from: 0 }),
            }
            if self.resume
                && let Ok(output) = place.open_part(&self.own_part(target)?)
                && let Some(from) = part::done(stamp, &output)
            {
                return Ok(Part { place, output, from });
            }
            match place.unlink() {
                Err(failure) if IN_THE_WAY.iter().any(|errno| failure.is(*errno)) => {
                    place = self.own_part(target)?;
                }
                Err(failure) if !failure.is(Errno::ENOENT) => return Err(failure),
                _ => (),
            }
        }
        Err(Failure::new("other copies of this file keep starting; let one finish"))
    }

    /// Gives a complete part what `finish` sets and its final name. Another copy of the same file may have done so
    /// already, if it continued the same part; if it started anew, it has taken the part's name away, and what has
    /// that name now is incomplete.
    fn put_in_place(
        &self,
        part: &End,
        output: &Handle,
        target: &End,
        finish: impl Fn(&End) -> Outcome<()>,
    ) -> Outcome<()> {
        // Another copy may replace the part at any time. Nobody else changes what has this name.
        let own = self.own_part(target)?;
        if is_named(output, part)? && is_renamed(part.rename(&own))? {
            if is_named(output, &own)? {
                return finish(&own).and_then(|()| own.rename(target)).inspect_err(|_| {
                    // The error of the copy matters, not that of the clean-up.
                    let _ = own.unlink();
                });
            }
            // It was replaced between the look at it and its renaming: the other copy still needs it.
            own.rename(part)?;
        }
        if is_named(output, target)? {
            // What this copy wrote after the other one had set the times has changed them.
            return finish(target);
        }
        let text = "another copy of this file started meanwhile and replaced the partial copy";
        Err(Failure::new(text))
    }

    fn check(&self, input: &Handle, output: &Handle, attr: &Attr, sparse: bool) -> Outcome<()> {
        if !self.verify {
            return Ok(());
        }
        match first_difference(input, output, attr.size, sparse)? {
            None => Ok(()),
            Some(at) => Err(Failure::new(format!(
                "differs from the source at byte {at} after the copy; removed \
                 (did the source change?)"
            ))),
        }
    }

    /// Copies a file whose size means nothing, because the kernel generates its content while it is read.
    fn without_length(
        &self,
        source: &End,
        target: &End,
        status: &Status,
        existing: &Existing,
        mut input: Handle,
        parent: &Parent,
    ) -> Outcome<()> {
        if self.verify {
            let text = "its size is unknown, so --verify cannot compare it";
            return Err(Failure::new(text).about(source));
        }
        self.stream_to_part(source, target, status, existing, &mut input, parent)
    }

    /// Copies from or to a fifo or device, whose length is unknown, up to its end.
    pub(super) fn stream(
        &self,
        source: &End,
        target: &End,
        status: &Status,
        parent: &Parent,
    ) -> Outcome<()> {
        if self.verify {
            let text = "--verify cannot compare what is read from or written to a fifo or device";
            return Err(Failure::new(text).about(source));
        }
        let existing = target.status_if_any(true).map_err(|f| f.about(target))?;
        let mut input = source.open().map_err(|f| f.about(source))?;
        if existing.is_some_and(|there| target.is_written_in_place(&there)) {
            let mut output = target.open_write().map_err(|f| f.about(target))?;
            return self.pump(source, target, &mut input, &mut output);
        }
        let mode = status.attr.mode & 0o666;
        let as_file = Status { attr: Attr { mode, ..status.attr }, ..*status };
        let existing = Existing::from(existing);
        self.stream_to_part(source, target, &as_file, &existing, &mut input, parent)
    }

    /// Copies input of unknown length to a part, and renames that to the target.
    fn stream_to_part(
        &self,
        source: &End,
        target: &End,
        status: &Status,
        existing: &Existing,
        input: &mut Handle,
        parent: &Parent,
    ) -> Outcome<()> {
        let mut legacy = self.legacy(source, target, status, existing, parent)?;
        legacy.denied = self.denied(&legacy, target, parent)?;
        let part = self.own_part(target)?;
        let mut output = part.create(0o600).map_err(|f| f.about(target))?;
        let copied = self
            .pump(source, target, input, &mut output)
            .and_then(|()| output.close())
            .and_then(|()| self.finish(source, &part, &status.attr, &legacy, None))
            .and_then(|()| part.rename(target));
        copied.map_err(|failure| {
            let _ = part.unlink();
            failure.about(target)
        })
    }

    fn pump(&self, from: &End, to: &End, input: &mut Handle, output: &mut Handle) -> Outcome<()> {
        let mut buffer = vec![0; STREAM_BYTES];
        let mut at = 0;
        loop {
            let read = input.read_next(&mut buffer, at).map_err(|f| f.about(from))?;
            if read == 0 {
                return Ok(());
            }
            if self.interrupt.came() {
                return Err(Failure::new("interrupted"));
            }
            match output.write_next(&buffer[..read], at) {
                // No other copy is under way: a pipe is the only target of its command.
                Err(failure) if failure.is(Errno::EPIPE) && to.is_local() => {
                    self.progress.finish();
                    end_for_pipe()
                }
                written => written.map_err(|f| f.about(to))?,
            }
            at += read as u64;
            self.progress.bytes(read as u64);
        }
    }
}

/// Looks at the target, unless that was done before.
pub(super) fn looked_at(target: &End, existing: Existing) -> Outcome<Existing> {
    match existing {
        Existing::Unknown => Ok(target.status_if_any(false).map_err(|f| f.about(target))?.into()),
        known => Ok(known),
    }
}

/// Fails unless a copy of a regular file may replace what is there.
pub(super) fn check_replaceable(source: &Status, there: &Status) -> Outcome<()> {
    if source.is_same(there) {
        return Err(Failure::new("is the same file as the source"));
    }
    if there.attr.is_directory() {
        return Err(Failure::new("is a directory and cannot be replaced by a file"));
    }
    if !there.attr.is_file() && !there.attr.is_symlink() {
        return Err(Failure::new("exists and is not a regular file; remove it first"));
    }
    Ok(())
}

/// Returns the attributes of the file that a copy replaces. A link has none that matter.
fn replaced(source: &Status, existing: &Existing) -> Outcome<Option<Attr>> {
    let Existing::There(there) = existing else { return Ok(None) };
    check_replaceable(source, there)?;
    Ok(there.attr.is_file().then_some(there.attr))
}

/// Returns true if this is a name of the open file.
fn is_named(file: &Handle, name: &End) -> Outcome<bool> {
    let inode = file.opened()?.inode;
    Ok(name.status_if_any(false)?.is_some_and(|status| status.attr.inode == inode))
}

/// Returns false if there was nothing to rename.
fn is_renamed(result: Outcome<()>) -> Outcome<bool> {
    match result {
        Err(failure) if failure.is(Errno::ENOENT) => Ok(false),
        result => result.map(|()| true),
    }
}

/// Removes a part, unless another copy's part now has its name.
fn remove_own(part: &End, output: &Handle) -> bool {
    is_named(output, part).unwrap_or(false) && part.unlink().is_ok()
}

/// After a failure, keeps the part if it can be continued and otherwise removes it. The message says which. The
/// copy of a source that has changed cannot, nor one with a name that the next run does not look for.
fn keep_or_remove(
    failure: Failure,
    (part, target): (&End, &End),
    output: &Handle,
    input: &Handle,
    stamp: &Stamp,
) -> Failure {
    let has_changed = input.attr().is_ok_and(|attr| Stamp::new(&attr) != *stamp);
    let is_found = part.name() == part::name(target.name());
    match part::done(stamp, output).filter(|_| is_found && !has_changed) {
        // A file that is too large for the file system would fail again.
        Some(done) if done > 0 && !failure.is(Errno::EFBIG) => {
            let full = failure.is(Errno::ENOSPC) || failure.is(Errno::EDQUOT);
            let first = if full { "free space and " } else { "" };
            failure.with(format_args!(
                "{} are kept in {part}: {first}repeat with --resume to continue, or remove it",
                human(done)
            ))
        }
        _ if remove_own(part, output) => failure.with("the incomplete copy was removed"),
        _ => failure.with(format_args!("the incomplete copy may be left in {part}")),
    }
}

/// Limits how many large files are under way.
pub(super) struct Permits {
    free: Mutex<usize>,
    returned: Condvar,
}

impl Default for Permits {
    fn default() -> Self {
        Self { free: Mutex::new(LARGE_MAX), returned: Condvar::new() }
    }
}

/// The permission to have one large file under way.
pub(super) struct Permit<'a>(&'a Permits);

impl Permits {
    fn take(&self) -> Permit<'_> {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.returned.wait_while(free, |free| *free == 0);
        *waited.unwrap_or_else(PoisonError::into_inner) -= 1;
        Permit(self)
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        *self.0.free.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.0.returned.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::super::end::FileSystem;
    use super::*;
    use towline_client::Timestamp;

    #[test]
    fn only_other_regular_files_and_links_are_replaced() {
        let status = |inode, mode| Status {
            attr: Attr { inode, mode, ..Attr::default() },
            file_system: FileSystem::Remote { export: 1, number: 0 },
            is_followed: false,
        };
        let source = status(1, 0o100_644);
        assert!(check_replaceable(&source, &source).is_err(), "itself");
        assert!(check_replaceable(&source, &status(2, 0o040_755)).is_err(), "a directory");
        assert!(check_replaceable(&source, &status(2, 0o020_666)).is_err(), "a device");
        assert!(check_replaceable(&source, &status(2, 0o100_600)).is_ok());
        let elsewhere = Status { file_system: FileSystem::Local(1), ..source };
        assert!(check_replaceable(&source, &elsewhere).is_ok(), "same number, other side");
        let at = |seconds, status: Status| Status {
            attr: Attr { changed: Timestamp::new(seconds, 5), ..status.attr },
            ..status
        };
        assert!(check_replaceable(&at(1, source), &at(2, elsewhere)).is_ok());
        assert!(check_replaceable(&at(1, source), &at(1, elsewhere)).is_err(), "from two sides");
        let link = Existing::There(status(2, 0o120_777));
        assert!(replaced(&source, &link).unwrap().is_none(), "a link has no mode to keep");
    }
}
