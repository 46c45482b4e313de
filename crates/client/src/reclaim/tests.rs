//! Tests of what is opened and locked again.

use super::*;

/// Returns the locks that are asked for again: handle, owner, kind, start, length.
fn asked(files: &mut OpenFiles) -> Vec<(u64, u64, u8, u64, u64)> {
    let mut locks = Vec::new();
    let each = |_, requests: &[Request<'_>]| {
        if let [Request::Lock { handle, owner, kind, start, length, .. }] = *requests {
            locks.push((handle, owner, kind, start, length));
        }
        Ok(true)
    };
    files.reclaim(|_| None, &[], each).unwrap();
    locks
}

/// The server may have executed a request and ended, and others may have what it gave up.
#[test]
fn what_is_being_given_up_is_not_locked_again() {
    let mut files = OpenFiles::default();
    for handle in [1, 2] {
        files.remember_path(handle, b"dir", b"f", 2, 7, (0, 0));
    }
    let lock = |family, kind, owner, start, length| Lock { family, kind, owner, start, length };
    let (process, shared, exclusive) = (lock::PROCESS, lock::SHARED, lock::EXCLUSIVE);
    files.remember_lock(1, &lock(process, exclusive, 5, 0, 10));
    files.give_up(2, &lock(process, shared, 5, 6, 10));
    assert_eq!(asked(&mut files), [(1, 5, exclusive, 0, 6), (1, 5, shared, 6, 4)]);
    files.give_up(2, &lock(process, exclusive, 5, 2, 10));
    assert_eq!(asked(&mut files), [(1, 5, exclusive, 0, 6), (1, 5, shared, 6, 4)]);
    files.give_up(2, &lock(process, lock::UNLOCK, 5, 2, 0));
    assert_eq!(asked(&mut files), [(1, 5, exclusive, 0, 2)]);
    files.give_up(1, &lock(process, lock::UNLOCK, 6, 0, 0));
    assert_eq!(asked(&mut files), [(1, 5, exclusive, 0, 2)], "another process");
    files.remember_lock(1, &lock(lock::FLOCK, shared, 0, 0, 0));
    files.give_up(1, &lock(lock::FLOCK, exclusive, 0, 0, 0));
    assert_eq!(asked(&mut files), [(1, 5, exclusive, 0, 2)], "it is converted");
}

#[test]
fn only_what_is_locked_is_locked_again() {
    let mut files = OpenFiles::default();
    // Two handles of one file, and a handle of another file.
    for (handle, inode) in [(1, 7), (2, 7), (3, 8)] {
        files.remember_path(handle, b"dir", b"f", 2, inode, (0, 0));
    }
    let lock = |family, kind, owner, start, length| Lock { family, kind, owner, start, length };
    let (process, exclusive) = (lock::PROCESS, lock::EXCLUSIVE);
    files.remember_lock(1, &lock(process, exclusive, 5, 0, 10));
    files.remember_lock(1, &lock(process, exclusive, 5, 20, 10));
    files.remember_lock(1, &lock(process, lock::UNLOCK, 5, 5, 20));
    files.remember_lock(3, &lock(process, exclusive, 5, 0, 10));
    let left = [(1, 5, exclusive, 0, 5), (1, 5, exclusive, 25, 5), (3, 5, exclusive, 0, 10)];
    assert_eq!(asked(&mut files), left);
    // Unlock the whole file through its other handle.
    files.remember_lock(2, &lock(process, lock::UNLOCK, 5, 0, 0));
    assert_eq!(asked(&mut files), left[2..]);
    assert!(!files.has_locked(1) && files.has_locked(3));
    // Open-file locks belong to the handle, whatever the owner number.
    files.remember_lock(1, &lock(lock::OPEN_FILE, exclusive, 5, 0, 0));
    files.remember_lock(2, &lock(lock::OPEN_FILE, lock::UNLOCK, 5, 0, 0));
    assert!(files.has_locked(1));
    assert!(!files.has_only_shared(1, &lock(lock::OPEN_FILE, lock::UNLOCK, 7, 3, 1)));
    files.remember_lock(1, &lock(lock::OPEN_FILE, lock::UNLOCK, 6, 0, 0));
    assert!(!files.has_locked(1));
    // Through the other handle of the file, and for other processes and files.
    files.remember_lock(1, &lock(process, lock::SHARED, 5, 0, 10));
    let is_shared = |handle, owner, start| {
        files.has_only_shared(handle, &lock(process, lock::UNLOCK, owner, start, 10))
    };
    assert!(is_shared(1, 5, 0) && is_shared(2, 5, 9));
    assert!(!is_shared(1, 5, 10) && !is_shared(1, 6, 0) && !is_shared(3, 5, 0));
}

/// Returns the handles with the paths by which they are reopened, where only those in `there` are found.
fn reopened(
    files: &mut OpenFiles,
    maybe: &[(RequestNumber, Renamed)],
    there: &[&str],
) -> Vec<(u64, String)> {
    let mut found = Vec::new();
    let each = |_, requests: &[Request<'_>]| {
        let [Request::Reclaim { handle, export, path, .. }] = *requests else {
            return Ok(true);
        };
        let whole = [export, path].map(String::from_utf8_lossy).join(":");
        let is_there = there.contains(&&whole[..]);
        found.extend(is_there.then_some((handle, whole)));
        Ok(is_there)
    };
    files.reclaim(|_| None, maybe, each).unwrap();
    found
}

#[test]
fn files_are_reopened_though_a_directory_on_the_way_is_gone() {
    let mut files = OpenFiles::default();
    for (handle, path) in [(1, "a/.."), (2, "a/./b/../../c/f"), (3, "../f"), (4, "d/../f")] {
        files.remember_path(handle, b"dir", path.as_bytes(), 2, handle, (0, 0));
    }
    let there = ["dir:", "dir:c/f", "dir:d/../f", "dir:f"];
    let wanted = [(1, there[0]), (2, there[1]), (4, there[2])];
    let found = reopened(&mut files, &[], &there);
    assert_eq!(found, wanted.map(|(handle, place)| (handle, place.to_owned())));
    assert!(files.is_lost(3));
    // From then on, by the way that leads there.
    let wanted = [(1, there[0]), (2, there[1])].map(|(handle, at)| (handle, at.to_owned()));
    assert_eq!(reopened(&mut files, &[], &there[..2]), wanted);
}

#[test]
fn files_are_reopened_by_their_new_names() {
    let mut files = OpenFiles::default();
    let open = |files: &mut OpenFiles, handle, export: &str, path: &str| {
        files.remember_path(handle, export.as_bytes(), path.as_bytes(), 2, handle, (0, 0));
    };
    open(&mut files, 1, "dir", "");
    open(&mut files, 2, "dir", "./a//f");
    open(&mut files, 3, "dir", "a");
    open(&mut files, 4, "dir", "af");
    open(&mut files, 5, "dir/a/b", "c/f");
    open(&mut files, 6, "other", "a/f");
    let rename = |base, path: &'static str, new_base, new_path: &'static str, flags| {
        let (path, new_path) = (path.as_bytes(), new_path.as_bytes());
        Request::Rename { base, flags, path, new_base, new_path }
    };
    // Below an open directory, which is then renamed itself.
    files.remember_renamed(0, &rename(3, "f", 1, "a/g", 0));
    files.remember_renamed(0, &rename(1, "a/", 1, "d/e", 0));
    // Out of the directory that is the file's root, and of one that is not open.
    files.remember_renamed(0, &rename(1, "d/e/b/c/f", 1, "f", 0));
    files.remember_renamed(0, &rename(9, "af", 1, "bf", 0));
    files.remember_renamed(0, &rename(1, "af", 3, "g", rename_flag::EXCHANGE));
    let there = ["dir:", "dir:af", "dir:d/e", "dir:d/e/g", "dir/d/e/b:c/f", "other:a/f"];
    let found = reopened(&mut files, &[], &there);
    let wanted =
        [(1, there[0]), (2, there[1]), (3, there[2]), (4, there[3]), (5, there[4]), (6, there[5])];
    assert_eq!(found, wanted.map(|(handle, place)| (handle, place.to_owned())));
    // It is not known whether this took place; later it turns out that it did not.
    let maybe = rename(1, "af", 1, "maybe", 0);
    let maybes = [(1, files.renamed_by(&maybe).unwrap())];
    let found = reopened(&mut files.clone(), &maybes, &["dir:af"]);
    assert_eq!(found, [(2, "dir:af".to_owned())]);
    // It did.
    let found = reopened(&mut files, &maybes, &["dir:maybe", "dir:d/e/g"]);
    assert_eq!(found, [(2, "dir:maybe".to_owned()), (4, "dir:d/e/g".to_owned())]);
    files.remember_renamed(1, &maybe);
    assert_eq!(reopened(&mut files, &[], &["dir:maybe"]), [(2, "dir:maybe".to_owned())]);
}

#[test]
fn names_that_were_found_to_be_exchanged_are_not_exchanged_back() {
    let mut files = OpenFiles::default();
    for (handle, path) in [(1, ""), (2, "a/f"), (3, "b"), (4, "c")] {
        files.remember_path(handle, b"dir", path.as_bytes(), 2, handle, (0, 0));
    }
    let exchange = |new_path| {
        let flags = rename_flag::EXCHANGE;
        Request::Rename { base: 1, flags, path: b"a", new_base: 1, new_path }
    };
    let found = |files: &mut OpenFiles, maybe: &[_], there: &[&str]| {
        let found = reopened(files, maybe, there);
        found.into_iter().map(|(handle, _)| handle).collect::<Vec<_>>()
    };
    // It is answered only after a restart, and the server has kept one of the files whatever its name.
    let maybes = [(7, files.renamed_by(&exchange(b"b")).unwrap())];
    let there = ["dir:", "dir:b/f", "dir:b", "dir:c"];
    assert_eq!(found(&mut files, &maybes, &there), [1, 2, 3, 4]);
    files.remember_renamed(7, &exchange(b"b"));
    let there = ["dir:", "dir:b/f", "dir:a", "dir:c"];
    assert_eq!(found(&mut files.clone(), &[], &there), [1, 2, 3, 4]);
    // Later ones count.
    files.remember_renamed(8, &exchange(b"c"));
    files.remember_renamed(
        9,
        &Request::Rename { base: 1, flags: 0, path: b"b", new_base: 1, new_path: b"d" },
    );
    assert_eq!(found(&mut files, &[], &["dir:", "dir:d/f", "dir:c", "dir:a"]), [1, 2, 3, 4]);
}
