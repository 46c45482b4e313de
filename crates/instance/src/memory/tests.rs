//! Tests of the memory behind mappings.

use super::*;
use std::os::unix::fs::FileExt;

#[test]
fn runs_of_changed_pages_are_found() {
    let was = vec![0; 5 * page_bytes() + 10];
    let mut now = was.clone();
    assert_eq!(changed(&now, &was).next(), None);
    for at in [page_bytes(), 3 * page_bytes() - 1, 5 * page_bytes() + 9] {
        now[at] = 1;
    }
    let runs: Vec<_> = changed(&now, &was).collect();
    assert_eq!(runs, [page_bytes()..3 * page_bytes(), 5 * page_bytes()..5 * page_bytes() + 10]);
    assert_eq!(
        changed(&now[page_bytes()..2 * page_bytes()], &was[..page_bytes()]).next(),
        Some(0..page_bytes())
    );
    assert_eq!(changed(&[], &[]).next(), None);
}

impl Access for std::fs::File {
    type Error = io::Error;

    fn get(&self, at: u64, to: &mut [u8]) -> io::Result<()> {
        self.read_exact_at(to, at)
    }

    fn put(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.write_all_at(bytes, at)
    }

    fn set_length(&self, length: u64) -> io::Result<()> {
        self.set_len(length)
    }
}

/// A file of the given length that records writes.
struct Written(u64, std::cell::RefCell<Vec<(u64, usize)>>);

impl Remote for Written {
    type Error = io::Error;

    fn size(&self) -> io::Result<u64> {
        Ok(self.0)
    }

    fn write(&self, parts: &[(u64, &[u8])]) -> io::Result<()> {
        self.1.borrow_mut().extend(parts.iter().map(|(at, data)| (*at, data.len())));
        Ok(())
    }

    fn write_together(&self, parts: &[(u64, &[u8])]) -> io::Result<()> {
        let inside = |at: u64, length: usize| self.0.saturating_sub(at).min(length as u64);
        let within = parts.iter().map(|(at, data)| (*at, inside(*at, data.len()) as usize));
        self.1.borrow_mut().extend(within.filter(|(_, length)| *length > 0));
        Ok(())
    }
}

/// Reads four pages of a file of `size` bytes, whose bytes from `broken` on cannot be read.
fn read(size: usize, broken: usize) -> Result<usize, u8> {
    read_up_to_end(&mut [0; 4 * PAGE_BYTES_MIN], |to, at| {
        let left = size.min(broken).saturating_sub(at as usize);
        match to.len().min(left) {
            0 if broken < size => Err(5),
            count => Ok(count),
        }
    })
}

#[test]
fn what_cannot_be_read_is_not_the_end() {
    for size in
        [0, 1, PAGE_BYTES_MIN, 2 * PAGE_BYTES_MIN - 1, 3 * PAGE_BYTES_MIN, 4 * PAGE_BYTES_MIN]
    {
        assert_eq!(read(size, usize::MAX), Ok(size));
    }
    assert_eq!(read(9 * PAGE_BYTES_MIN, usize::MAX), Ok(4 * PAGE_BYTES_MIN));
    for broken in 0..4 {
        assert_eq!(
            read(4 * PAGE_BYTES_MIN, broken * PAGE_BYTES_MIN),
            Err(5),
            "from page {broken} on"
        );
    }
}

#[test]
fn what_was_stored_is_written_once_and_only_within_the_file() {
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let memory = std::fs::File::from(rustix::fs::memfd_create("memory", flags).unwrap());
    let pages = 600;
    memory.set_len(PAGES_AT + pages * page_bytes() as u64).unwrap();
    // All pages are read but page 400; stored to are two neighbours, page 400 and the last page.
    memory.put(0, &vec![1; pages as usize]).unwrap();
    memory.put(400, &[0]).unwrap();
    for page in [7u64, 8, 400, 599] {
        memory.put(PAGES_AT + page * page_bytes() as u64 + 100, b"stored").unwrap();
    }
    let size = pages * page_bytes() as u64 - 1000;
    let file = Written(size, Default::default());
    write_back(&memory, &file, 0..pages as usize).unwrap();
    let page = page_bytes() as u64;
    let wanted = [7, 8, 599].map(|number| (number * page + 100, 6));
    assert_eq!(file.1.take(), wanted);
    write_back(&memory, &file, 0..pages as usize).unwrap();
    assert_eq!(file.1.take(), [], "nothing has changed since");
    memory.put(PAGES_AT + 8 * page, b"again").unwrap();
    // Data beyond the end is not written.
    memory.put(PAGES_AT + size + 10, b"behind").unwrap();
    write_back(&memory, &file, 0..8).unwrap();
    assert_eq!(file.1.take(), []);
    write_back(&memory, &file, 8..pages as usize).unwrap();
    assert_eq!(file.1.take(), [(8 * page, 5)]);
    // What is stored across a border of pages is one part; bytes between the first and the last one of a
    // page belong to it.
    memory.put(PAGES_AT + 20 * page - 70, &[1]).unwrap();
    memory.put(PAGES_AT + 20 * page - 50, &[1; 40]).unwrap();
    memory.put(PAGES_AT + 20 * page + 53, &[1; 10]).unwrap();
    memory.put(PAGES_AT + 22 * page - 1, &[1]).unwrap();
    memory.put(PAGES_AT + 22 * page + 64, &[1]).unwrap();
    write_back(&memory, &file, 0..pages as usize).unwrap();
    let wanted = [(20 * page - 70, 133), (22 * page - 1, 1), (22 * page + 64, 1)];
    assert_eq!(file.1.take(), wanted);
}

/// What does not fit into one request: the header comes last, too, and nothing behind the end is written.
#[test]
fn of_much_that_was_stored_only_what_lies_within_the_file_is_written() {
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let page = page_bytes() as u64;
    for locked in [0, 1] {
        let memory = std::fs::File::from(rustix::fs::memfd_create("memory", flags).unwrap());
        memory.set_len(PAGES_AT + 20 * page).unwrap();
        memory.put(0, &[1; 20]).unwrap();
        memory.put(IS_LOCKED_AT, &[locked]).unwrap();
        memory.put(PAGES_AT + 5, b"head").unwrap();
        memory.put(PAGES_AT + page, &vec![7; 19 * page as usize]).unwrap();
        let file = Written(10 * page + 3, Default::default());
        write_back(&memory, &file, 0..20).unwrap();
        let (head, rest) = ((5, 4), (page, 9 * page as usize + 3));
        let wanted = if locked == 0 { [head, rest] } else { [rest, head] };
        assert_eq!(file.1.take(), wanted);
        write_back(&memory, &file, 0..10).unwrap();
        assert_eq!(file.1.take(), [], "nothing has changed since");
    }
}

/// Others may change the bytes between, and readers look at the first ones without a lock.
#[test]
fn of_a_locked_file_single_bytes_are_written_the_first_ones_last() {
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let memory = std::fs::File::from(rustix::fs::memfd_create("memory", flags).unwrap());
    let (pages, page) = (600, page_bytes() as u64);
    memory.set_len(PAGES_AT + pages * page).unwrap();
    memory.put(0, &vec![1; pages as usize]).unwrap();
    memory.put(IS_LOCKED_AT, &[1]).unwrap();
    for (at, data) in [(10, "a"), (12, "b"), (1000, "cd"), (300 * page + 5, "e")] {
        memory.put(PAGES_AT + at, data.as_bytes()).unwrap();
    }
    let file = Written(pages * page, Default::default());
    write_back(&memory, &file, 0..pages as usize).unwrap();
    assert_eq!(file.1.take(), [(300 * page + 5, 1), (1000, 2), (10, 1), (12, 1)]);
    write_back(&memory, &file, 0..pages as usize).unwrap();
    assert_eq!(file.1.take(), [], "nothing has changed since");
}

#[test]
fn memory_that_is_taken_away_is_gone_and_tells_what_was_not_written() {
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let (pages, page) = (600, page_bytes() as u64);
    for (stored, wanted) in [(None, false), (Some(0), true), (Some(599 * page), true)] {
        let memory = std::fs::File::from(rustix::fs::memfd_create("memory", flags).unwrap());
        memory.set_len(PAGES_AT + pages * page).unwrap();
        memory.put(0, &vec![1; pages as usize]).unwrap();
        memory.put(KEEPS_AT, &[1]).unwrap();
        if let Some(at) = stored {
            memory.put(PAGES_AT + at, b"stored").unwrap();
        }
        assert_eq!(lose(&memory, pages as usize).unwrap(), Some(wanted), "{stored:?}");
        assert!(is_set(&memory, IS_LOST_AT).unwrap());
        assert!(memory.metadata().unwrap().len() <= ORIGINALS_AT);
        assert_eq!(lose(&memory, 0).unwrap(), None, "told once");
    }
}

#[test]
fn names_are_understood() {
    assert_eq!(parse_name(&name(3, u64::MAX)), Some((3, u64::MAX)));
    for wrong in ["", "3", "3-", "-3", "a-3", "3-4-5"] {
        assert_eq!(parse_name(wrong), None, "{wrong}");
    }
}

#[test]
fn what_was_stored_outlasts_that_the_file_is_read_again() {
    let was = vec![0; 2 * page_bytes()];
    let (mut new, mut now) = (was.clone(), was.clone());
    // Changed in the file, stored to, both in different ways, both in the same way.
    (new[1], now[2], new[3], now[3]) = (1, 1, 1, 2);
    (new[page_bytes() + 4], now[page_bytes() + 4]) = (1, 1);
    let one = |at| at..at + 1;
    let same = vec![one(page_bytes() + 4)];
    let locked = Renewal::of(&new, &now, &was, true);
    assert_eq!(locked, Renewal { new: vec![one(1), one(3)], same: same.clone() });
    let unlocked = Renewal::of(&new, &now, &was, false);
    assert_eq!(unlocked, Renewal { new: vec![one(1)], same });
    for single in [true, false] {
        assert_eq!(Renewal::of(&was, &was, &was, single), Renewal::default());
    }
}

#[test]
fn what_a_killed_process_was_changing_is_read_again() {
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let memory = std::fs::File::from(rustix::fs::memfd_create("memory", flags).unwrap());
    let pages = 8;
    memory.set_len(PAGES_AT + (pages * page_bytes()) as u64).unwrap();
    memory.put(0, &vec![1; pages]).unwrap();
    let first = |page: usize| {
        let mut byte = [0];
        memory.get(PAGES_AT + (page * page_bytes()) as u64, &mut byte).unwrap();
        byte[0]
    };
    let all = |value: u8| {
        let filled = |to: &mut [u8], _| {
            to.fill(value);
            Ok(to.len())
        };
        renew_interrupted(&memory, || Ok(pages), filled).unwrap();
        [0, 1, 2, 3].map(first)
    };
    // A change of pages 1 and 2 that is complete, and one that fails.
    let within = (page_bytes() + 5) as u64..(2 * page_bytes() + 1) as u64;
    changing(&memory, within.clone(), || Ok(()), |()| Ok(())).unwrap();
    let failed =
        changing(&memory, within.clone(), || Err(io::ErrorKind::Other.into()), |()| Ok(()));
    assert_eq!(failed.unwrap_err().kind(), io::ErrorKind::Other);
    assert_eq!(all(1), [0; 4]);
    // One that the memory does not get.
    let killed = || Err(io::ErrorKind::Other.into());
    changing(&memory, within, || Ok(()), |()| killed()).unwrap();
    assert_eq!(all(2), [0, 2, 2, 0]);
    // Its last request may still be on its way.
    assert_eq!(all(3), [0, 3, 3, 0]);
    // Other changes keep it in mind, and add what they leave behind.
    changing(&memory, 0..1, || Ok(()), |()| Ok(())).unwrap();
    assert_eq!(all(4), [0, 4, 4, 0]);
    changing(&memory, 0..1, || Ok(()), |()| killed()).unwrap();
    assert_eq!(all(5), [5, 5, 5, 0]);
}
