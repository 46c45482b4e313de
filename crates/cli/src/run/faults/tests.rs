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
    let mut pattern = Pattern::default();
    let mut next = |page: u64, time: Duration| {
        let (before, length) = pattern.window(page, page);
        pattern.reads(page - before, before + length);
        pattern.took(time);
        (before, length)
    };
    let page = page_bytes() as u64;
    assert_eq!(next(page, LONG), (page, AROUND - page), "around the first page");
    let (mut at, mut lengths) = (AROUND, Vec::new());
    // A long time for less than the maximum says nothing.
    for time in [2 * LONG, LONG, LONG, LONG, LONG, 2 * LONG, 2 * LONG, 2 * LONG, LONG, LONG] {
        let (before, length) = next(at, time);
        assert_eq!(before, 0);
        at += length;
        lengths.push(length >> 16);
    }
    assert_eq!(lengths, [2, 4, 8, 16, 16, 16, 32, 64, 128, 128]);
    assert_eq!(next(at + AROUND, LONG).1, AROUND, "elsewhere");
}
