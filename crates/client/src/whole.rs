//! Files written as a whole, with one request.

use crate::Error;
use crate::convert::{check, unexpected, write_flags};
use crate::core::Outcome;
use crate::file::File;
use crate::names::{SetAttr, set_attr_request};
use towline_wire::request::{CURRENT, open_flag, rename_flag, write_flag};
use towline_wire::{Errno, Reply, Request};

/// `O_WRONLY`.
const WRITE_ONLY: u32 = 1;

impl File {
    /// Opens a file, writes `data` to it and closes it, in one round trip. `data` may be up to
    /// [`towline_wire::limits::TRANSFER_BYTES_MAX`] long.
    ///
    /// # Errors
    /// As `open` and `write`; `ENOSPC` if only part of it could be written.
    pub fn write_path(&self, path: &[u8], flags: u32, mode: u32, data: &[u8]) -> Result<(), Error> {
        let requests = [
            Request::Open { base: self.handle, flags, mode, path: check(path)? },
            write_request(data, write_flags(flags)),
            Request::Close { handle: CURRENT },
        ];
        check_written(&self.core.call(&requests, data, &mut [])?, data)
    }

    /// Creates a file at `path`, writes `data` to it, sets these attributes, closes it, and only then renames it to
    /// `new_path`, in one round trip. `data` may be as long as for [`File::write_path`].
    ///
    /// # Errors
    /// As `open`, `write`, `set_attr` and `rename`; `EEXIST` if there is something at `path` or at `new_path`. What was
    /// written may then be left at `path`.
    pub fn write_renamed(
        &self,
        (path, new_path): (&[u8], &[u8]),
        mode: u32,
        data: &[u8],
        set: &SetAttr,
    ) -> Result<(), Error> {
        let (base, new_base) = (self.handle, self.handle);
        let (path, new_path) = (check(path)?, check(new_path)?);
        let flags = WRITE_ONLY | open_flag::CREATE | open_flag::EXCLUSIVE;
        let mut requests =
            vec![Request::Open { base, flags, mode, path }, write_request(data, write_flag::WHOLE)];
        if *set != SetAttr::default() {
            requests.push(set_attr_request(CURRENT, b"", true, set)?);
        }
        requests.push(Request::Close { handle: CURRENT });
        let flags = rename_flag::NO_REPLACE;
        requests.push(Request::Rename { base, flags, path, new_base, new_path });
        check_written(&self.core.call(&requests, data, &mut [])?, data)
    }
}

/// The write of all the data to the file that the same compound has opened.
fn write_request(data: &[u8], flags: u32) -> Request<'static> {
    Request::Write { handle: CURRENT, offset: 0, length: data.len() as u32, flags }
}

/// Fails unless a compound whose second operation writes `data` was carried out.
fn check_written(outcome: &Outcome, data: &[u8]) -> Result<(), Error> {
    outcome.last()?;
    match outcome.replies()?.get(1) {
        Some(Reply::Wrote { length, .. }) if *length as usize == data.len() => Ok(()),
        Some(Reply::Wrote { .. }) => Err(Errno::ENOSPC.into()),
        _ => Err(unexpected()),
    }
}
