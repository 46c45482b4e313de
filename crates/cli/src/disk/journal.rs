//! The journal of a copy: a file with the finished pieces, by which an interrupted copy can be resumed.

use super::noted::{Left, Piece, Stamp, Title, line, target};
use crate::report::{Failure, Outcome};
use crate::text::escaped;
use rustix::fs::FlockOperation;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, BufReader, Seek, SeekFrom, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use towline_client::Errno;

/// The journal of one copy, locked against other processes.
#[derive(Debug)]
pub(super) struct Journal {
    path: PathBuf,
    file: File,
}

fn directory() -> Option<PathBuf> {
    let absolute =
        |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let state = absolute("XDG_STATE_HOME");
    let state = state.or_else(|| Some(absolute("HOME")?.join(".local/state")));
    Some(state?.join("towline/copies"))
}

/// Makes a local name absolute, so that it is the same from any working directory.
pub(super) fn full_name(name: &OsStr) -> String {
    if let Some(text) = name.to_str().filter(|text| text.contains("://")) {
        return text.to_owned();
    }
    let path = std::path::absolute(name);
    escaped(path.as_ref().map_or(name, |path| path.as_os_str()).as_bytes())
}

/// A target that is about to be overwritten.
#[derive(Clone, Debug)]
pub(super) struct Overwritten {
    pub(super) place: Stamp,
    /// What a server on this machine calls it.
    pub(super) of_server: Option<String>,
}

/// Removes the journals of other copies to this target, and marks those of copies to what may be the same disk: whoever
/// resumes one compares what was noted. `own` is the journal of the copy that overwrites it.
pub(super) fn forget_others(own: Option<&Journal>, overwritten: &Overwritten) -> Outcome<()> {
    match directory() {
        Some(directory) => forget_others_in(&directory, own, overwritten),
        None => Ok(()),
    }
}

fn forget_others_in(
    directory: &Path,
    own: Option<&Journal>,
    overwritten: &Overwritten,
) -> Outcome<()> {
    let Overwritten { place, of_server } = overwritten;
    let mut has_changed = false;
    let journals = std::fs::read_dir(directory).into_iter().flatten().flatten();
    for path in journals.map(|entry| entry.path()) {
        let is_own = own.is_some_and(|own| own.path == path);
        let to = || target(BufReader::new(File::open(&path).ok()?));
        let Some(to) = Some(to).filter(|_| !is_own).and_then(|to| to()) else { continue };
        // Whoever resumes a copy to a target of which nobody is sure compares anyway. Another machine's server may call
        // another disk the same.
        let may_be = place.may_be(&to) || of_server.as_ref() == Some(&to.is);
        let done = if place.sure && to.is == place.is {
            std::fs::remove_file(&path).and_then(|()| remove_mark(&path))
        } else if to.sure && may_be {
            File::create(mark(&path)).map(drop)
        } else {
            continue;
        };
        done.map_err(|error| Failure::from(error).about(path.display()))?;
        has_changed = true;
    }
    if has_changed {
        // Before anything is overwritten.
        let synced = File::open(directory).and_then(|directory| directory.sync_all());
        synced.map_err(|error| Failure::from(error).about(directory.display()))?;
    }
    Ok(())
}

/// Returns the name of the file whose presence says that the target of this journal may have been overwritten.
fn mark(journal: &Path) -> PathBuf {
    journal.with_extension("compare")
}

fn remove_mark(journal: &Path) -> io::Result<()> {
    match std::fs::remove_file(mark(journal)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Writes to a journal, or gives it up.
pub(super) fn write_journal(
    journal: &mut Option<Journal>,
    work: impl FnOnce(&mut Journal) -> Outcome<()>,
) -> Outcome<()> {
    match journal.as_mut().map(work) {
        Some(Err(why)) => journal.take().map_or(Ok(()), |journal| journal.give_up(&why)),
        _ => Ok(()),
    }
}

impl Journal {
    /// Opens the journal of copies from this source to this target.
    pub(super) fn open(source: &str, target: &str) -> Outcome<Self> {
        let directory = directory().ok_or_else(|| {
            Failure::new("set XDG_STATE_HOME or HOME: progress is recorded there")
        })?;
        Self::open_in(&directory, source, target)
    }

    fn open_in(directory: &Path, source: &str, target: &str) -> Outcome<Self> {
        let sum = |text: &str| crc32c::crc32c(text.as_bytes());
        let path = directory.join(format!("{:08x}{:08x}", sum(source), sum(target)));
        let open = || -> io::Result<File> {
            std::fs::create_dir_all(directory)?;
            File::options().read(true).write(true).create(true).truncate(false).open(&path)
        };
        Self::lock(path.clone(), open)
    }

    /// Locks the journal of this path, which `open` opens.
    fn lock(path: PathBuf, open: impl Fn() -> io::Result<File>) -> Outcome<Self> {
        let failed = |error: io::Error| Failure::from(error).about(path.display());
        loop {
            let file = open().map_err(failed)?;
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    return Err(Failure::from(Errno::EBUSY)
                        .about("another copy between these two disks is running"));
                }
                Err(error) => return Err(failed(error.into())),
            }
            // A copy that ended meanwhile has removed its journal: a lock on that one keeps nobody out.
            let locked = file.metadata().map_err(failed)?.ino();
            if std::fs::metadata(&path).is_ok_and(|there| there.ino() == locked) {
                return Ok(Self { path, file });
            }
        }
    }

    /// Reads what an earlier copy left.
    pub(super) fn read(&mut self, now: &Title) -> Outcome<Left> {
        self.file.seek(SeekFrom::Start(0))?;
        Ok(Left::read(BufReader::new(&self.file), now))
    }

    /// Returns true if another copy may have overwritten the target since this journal was begun.
    pub(super) fn is_doubtful(&self) -> bool {
        mark(&self.path).exists()
    }

    fn failed(&self, error: impl Into<Failure>) -> Failure {
        error.into().about(self.path.display())
    }

    /// Starts a new journal, with pieces that are already finished.
    pub(super) fn begin(&mut self, now: &Title, done: &[Piece]) -> Outcome<()> {
        let mut begin = || -> io::Result<()> {
            if done.is_empty() {
                remove_mark(&self.path)?;
            }
            self.file.set_len(0)?;
            self.file.seek(SeekFrom::Start(0))?;
            self.file.write_all(line(now)?.as_bytes())
        };
        begin().map_err(|error| self.failed(error))?;
        self.note(done)
    }

    /// Durably withdraws everything noted, before the target is emptied.
    pub(super) fn clear(&mut self) -> Outcome<()> {
        let clear = || -> io::Result<()> {
            if self.file.metadata()?.len() > 0 {
                self.file.set_len(0)?;
                self.file.sync_data()?;
            }
            Ok(())
        };
        clear().map_err(|error| self.failed(error))
    }

    /// Durably withdraws these pieces, before they are overwritten. Otherwise, if this run ended before it
    /// noted them again, a later one would take the new bytes for the noted ones.
    pub(super) fn take_back(&mut self, pieces: &[Piece]) -> Outcome<()> {
        self.append(pieces.iter().map(|piece| Piece { sum: None, ..*piece }))?;
        self.file.sync_data().map_err(|error| self.failed(error))
    }

    /// Notes pieces that are on stable storage.
    pub(super) fn note(&mut self, done: &[Piece]) -> Outcome<()> {
        // Zeroes are written again, which costs nothing.
        self.append(done.iter().filter(|piece| piece.sum.is_some()).copied())
    }

    fn append(&mut self, pieces: impl Iterator<Item = Piece>) -> Outcome<()> {
        let append = || -> io::Result<()> {
            let mut lines = String::new();
            for piece in pieces {
                lines += &line(&piece)?;
            }
            self.file.write_all(lines.as_bytes())
        };
        append().map_err(|error| self.failed(error))
    }

    /// Withdraws everything noted, since nothing can be noted any more. The copy goes on without.
    fn give_up(mut self, why: &Failure) -> Outcome<()> {
        log::warn!("this copy cannot be resumed: {why}");
        self.clear()
    }

    /// Removes the journal of a complete copy.
    pub(super) fn remove(self) {
        // `Drop` removes an empty journal.
        if let Err(error) = self.file.set_len(0) {
            log::warn!("{}: {error}", self.path.display());
        }
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        // A copy that never began leaves no file.
        if self.file.metadata().is_ok_and(|found| found.len() == 0) {
            let _ = remove_mark(&self.path);
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Journal, Overwritten, write_journal};
    use crate::disk::noted::{Left, Piece, Stamp, Title};
    use std::ffi::OsStr;
    use std::fs::File;
    use std::io::Write;
    use std::os::unix::ffi::OsStrExt;

    #[test]
    fn a_copy_goes_on_without_a_journal_that_cannot_be_written() {
        let full = || File::options().read(true).write(true).open("/dev/full").unwrap();
        let piece = Piece { offset: 0, length: 1, sum: Some(1) };
        let mut journal = Some(Journal { path: "journal".into(), file: full() });
        write_journal(&mut journal, |_| Ok(())).unwrap();
        assert!(journal.is_some());
        let failed = journal.as_mut().unwrap().note(&[piece]).unwrap_err().to_string();
        assert!(failed.contains("journal: no space left"), "{failed}");
        write_journal(&mut journal, |journal| journal.note(&[piece])).unwrap();
        assert!(journal.is_none());
        write_journal(&mut journal, |journal| journal.note(&[piece])).unwrap();
    }

    #[test]
    fn only_the_same_copy_is_continued_and_torn_lines_do_not_count() {
        let directory = tempfile::tempdir().unwrap();
        let stamp = |is: &str| Stamp { is: is.to_owned(), size: 20, sure: true };
        let title = Title {
            source: "a".to_owned(),
            source_is: stamp("1"),
            target: "b".to_owned(),
            target_is: stamp("file 2"),
        };
        let piece = |offset, sum| Piece { offset, length: 5, sum };
        let open = || Journal::open_in(directory.path(), "a", "b");
        let mut journal = open().unwrap();
        assert!(matches!(journal.read(&title).unwrap(), Left::Nothing));
        journal.begin(&title, &[piece(0, Some(7))]).unwrap();
        journal.note(&[piece(15, Some(9)), piece(5, Some(8)), piece(10, None)]).unwrap();
        // One piece is overwritten, with other bytes and then with its own.
        journal.take_back(&[piece(0, Some(7)), piece(15, Some(9))]).unwrap();
        journal.note(&[piece(0, Some(7))]).unwrap();
        journal.file.write_all(b"{\"offset\":15,\"len").unwrap();
        assert!(open().unwrap_err().to_string().contains("another copy"));
        drop(journal);
        let mut journal = open().unwrap();
        let Left::Pieces(pieces) = journal.read(&title).unwrap() else { panic!() };
        assert_eq!(pieces, [piece(0, Some(7)), piece(5, Some(8))]);
        let mut other = title.clone();
        other.source_is.is.push('x');
        assert!(matches!(journal.read(&other).unwrap(), Left::Other("source")));
        let mut other = title.clone();
        other.target_is.is.push('x');
        assert!(matches!(journal.read(&other).unwrap(), Left::Other("target")));

        let mut other = title.clone();
        other.target_is.size += 1;
        assert!(matches!(journal.read(&other).unwrap(), Left::Other("target")));

        // Another copy to the same target makes this one impossible to resume, even if it changed the length.
        let mut own = Journal::open_in(directory.path(), "c", "b").unwrap();
        own.begin(&Title { source: "c".to_owned(), ..title.clone() }, &[]).unwrap();
        let forget = |place: Stamp, of_server: Option<&str>| {
            let overwritten = Overwritten { place, of_server: of_server.map(str::to_owned) };
            super::forget_others_in(directory.path(), Some(&own), &overwritten).unwrap();
        };
        forget(stamp("file 3"), None);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 2);
        forget(other.target_is, None);
        assert!(!journal.path.exists() && own.path.exists());
        own.remove();
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[test]
    fn copies_to_what_may_be_the_same_disk_are_compared() {
        let directory = tempfile::tempdir().unwrap();
        let stamp = |is: &str, sure| Stamp { is: is.to_owned(), size: 20, sure };
        let begin = |name: &str, target_is: Stamp| {
            let mut journal = Journal::open_in(directory.path(), "a", name).unwrap();
            let (source_is, target) = (stamp("file 1", true), name.to_owned());
            let title = Title { source: "a".to_owned(), source_is, target, target_is };
            journal.begin(&title, &[]).unwrap();
            journal
        };
        let targets = [stamp("disk 7", true), stamp("file 8", true), stamp("nbd", false)];
        let cases = [
            // What is overwritten, what a server calls it, and which copies are no longer sure; none: resumed at all.
            (stamp("nbd", false), None, [Some(true), Some(true), Some(false)]),
            (stamp("device 9", false), None, [Some(true), Some(true), Some(false)]),
            (stamp("disk 9", true), None, [Some(false), Some(true), Some(false)]),
            (stamp("disk 7", true), None, [None, Some(true), Some(false)]),
            (stamp("file 9", true), Some("disk 7"), [Some(true), Some(false), Some(false)]),
            (stamp("file 8", true), Some("disk 9"), [Some(false), None, Some(false)]),
        ];
        for (place, of_server, expected) in cases {
            let journals: Vec<_> = ["d", "f", "n"].into_iter().zip(targets.clone()).collect();
            let journals: Vec<_> = journals.into_iter().map(|(n, is)| begin(n, is)).collect();
            assert!(journals.iter().all(|journal| !journal.is_doubtful()), "a new copy");
            let of_server = of_server.map(str::to_owned);
            let overwritten = Overwritten { place, of_server };
            super::forget_others_in(directory.path(), None, &overwritten).unwrap();
            let found = |journal: &Journal| journal.path.exists().then(|| journal.is_doubtful());
            assert_eq!(journals.iter().map(found).collect::<Vec<_>>(), expected, "{overwritten:?}");
            journals.into_iter().for_each(Journal::remove);
            assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "nothing is left");
        }
    }

    #[test]
    fn a_journal_that_another_copy_removed_meanwhile_is_not_used() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("journal");
        let other = std::cell::RefCell::new(None);
        let opens = || {
            let file =
                File::options().read(true).write(true).create(true).truncate(false).open(&path)?;
            // The other copy ends between the opening and the lock.
            drop(other.take());
            Ok(file)
        };
        let first = Journal::lock(path.clone(), opens).unwrap();
        other.replace(Some(first));
        let journal = Journal::lock(path.clone(), opens).unwrap();
        assert!(path.exists());
        let complaint = Journal::lock(path.clone(), opens).unwrap_err().to_string();
        assert!(complaint.contains("another copy"), "{complaint}");
        drop(journal);
        assert!(!path.exists());
    }

    #[test]
    fn paths_that_are_not_text_have_names_of_their_own() {
        let name = |bytes: &[u8]| super::full_name(OsStr::from_bytes(bytes));
        assert_eq!(name(b"/a/b"), "/a/b");
        assert_ne!(name(b"/\xff"), name(b"/\xfe"));
        assert_ne!(name(b"/\xff"), name(b"/\\xff"));
    }
}
