#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

use super::*;

/// Touching a page must not end a program because another page cannot be read.
#[test]
fn a_page_is_read_although_its_neighbours_cannot_be() {
    let page = page_bytes();
    let read = |unreadable: usize, pages: usize, touched: usize| {
        let mut to = vec![0; 4 * page];
        let file = |to: &mut [u8], at: u64| {
            let at = at as usize;
            // The server reads up to what cannot be read, and fails there.
            let end = if at <= unreadable * page { unreadable.min(pages) } else { pages } * page;
            match to.len().min(end.saturating_sub(at)) {
                0 if at == unreadable * page && unreadable < pages => {
                    Err(io::Error::from_raw_os_error(libc::EIO))
                }
                count => {
                    to[..count].fill((at / page) as u8 + 1);
                    Ok(count)
                }
            }
        };
        let read = read_around(&mut to, touched * page, file).map_err(|e| e.raw_os_error())?;
        Ok((read.start / page..read.end / page, to[touched * page]))
    };
    assert_eq!(read(9, 4, 2), Ok((0..4, 1)), "in one piece");
    assert_eq!(read(9, 3, 2), Ok((0..3, 1)), "up to the end of the file");
    for unreadable in [0, 1, 3] {
        assert_eq!(read(unreadable, 4, 2), Ok((2..3, 3)), "without page {unreadable}");
    }
    assert_eq!(read(2, 4, 2), Err(Some(libc::EIO)));
}

#[test]
fn more_is_read_ahead_of_who_goes_on_page_by_page() {
    // How long it takes to read so many bytes, in milliseconds.
    let lengths = |time: fn(u64) -> u64| {
        let mut pattern = Pattern::default();
        let mut next = |page: u64| {
            let (before, length) = pattern.window(page, page);
            let time = Duration::from_millis(time(before + length));
            pattern.read(page - before, before + length, time);
            (before, length)
        };
        let page = page_bytes() as u64;
        assert_eq!(next(page), (page, AROUND - page), "around the first page");
        let mut at = AROUND;
        let mut go_on = || {
            let (before, length) = next(at);
            assert_eq!(before, 0);
            at += length;
            length / AROUND
        };
        let lengths: Vec<u64> = (0..10).map(|_| go_on()).collect();
        assert_eq!(next(at + AROUND).1, AROUND, "elsewhere");
        lengths
    };
    let near = [2, 4, 8, 16, 16, 16, 16, 16, 16, 16];
    assert_eq!(lengths(|bytes| 1 + (bytes >> 20)), near);
    assert_eq!(lengths(|bytes| 1 + (bytes >> 13)), near, "the network is slow");
    assert_eq!(lengths(|bytes| 50 + (bytes >> 17)), [2, 4, 8, 16, 32, 64, 128, 128, 128, 128]);
}
