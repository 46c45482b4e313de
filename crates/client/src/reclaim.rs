//! What a client has open and locked, so that it can be had again after a restart of the server.

use crate::Lock;
use std::collections::{BTreeMap, HashSet};
use std::io;
use std::time::Duration;
use towline_net::{Counters, Incoming, Input, Link, Sink, Spin, Target};
use towline_wire::reply::parse_results;
use towline_wire::request::{encode_compound, lock};
use towline_wire::{Header, Kind, ProtocolError, Reply, Request};

struct Open {
    export: Vec<u8>,
    path: Vec<u8>,
    flags: u32,
    inode: u64,
    locks: Vec<Lock>,
}

/// Open files by handle.
#[derive(Default)]
pub(crate) struct OpenFiles {
    open: BTreeMap<u64, Open>,
    /// Files that were open and could not be had again: using them fails with `ESTALE`.
    pub(crate) stale: HashSet<u64>,
}

impl OpenFiles {
    pub(crate) fn remember(
        &mut self,
        handle: u64,
        base: Option<(u64, &[u8])>,
        export: &[u8],
        flags: u32,
        inode: u64,
    ) {
        let open = match base {
            None => {
                Open { export: export.to_vec(), path: Vec::new(), flags, inode, locks: Vec::new() }
            }
            Some((base, below)) => {
                let Some(base) = self.open.get(&base) else { return };
                let mut path = base.path.clone();
                if !path.is_empty() && !below.is_empty() {
                    path.push(b'/');
                }
                path.extend_from_slice(below);
                Open { export: base.export.clone(), path, flags, inode, locks: Vec::new() }
            }
        };
        self.open.insert(handle, open);
    }

    /// A file that another client opened.
    pub(crate) fn remember_path(
        &mut self,
        handle: u64,
        export: &[u8],
        path: &[u8],
        flags: u32,
        inode: u64,
    ) {
        let (export, path) = (export.to_vec(), path.to_vec());
        self.open.entry(handle).or_insert(Open { export, path, flags, inode, locks: Vec::new() });
    }

    pub(crate) fn remember_lock(&mut self, handle: u64, new: &Lock) {
        let Some(open) = self.open.get_mut(&handle) else { return };
        // Only whole matches are forgotten; what is left over of a split range is asked for again
        // as it was, which at worst locks more than before and never less.
        open.locks.retain(|l| {
            (l.family, l.owner, l.start, l.length) != (new.family, new.owner, new.start, new.length)
        });
        if new.kind != lock::UNLOCK {
            open.locks.push(*new);
        }
    }

    pub(crate) fn has_locked(&self, handle: u64) -> bool {
        self.open.get(&handle).is_some_and(|open| !open.locks.is_empty())
    }

    pub(crate) fn forget(&mut self, handle: u64) {
        self.open.remove(&handle);
        self.stale.remove(&handle);
    }

    /// True when a request names a file that was lost.
    pub(crate) fn is_stale(&self, requests: &[Request<'_>]) -> bool {
        !self.stale.is_empty()
            && requests.iter().any(|r| r.handles().iter().any(|h| self.stale.contains(h)))
    }

    /// Calls `each` with the request that opens a file again and those that lock it again; it tells
    /// whether the request succeeded. Files that cannot be had again are stale from then on.
    ///
    /// # Errors
    /// The connection was lost: all is to be asked for again on the next one.
    pub(crate) fn reclaim(
        &mut self,
        mut each: impl FnMut(&[Request<'_>]) -> io::Result<bool>,
    ) -> io::Result<()> {
        let mut stale = Vec::new();
        for (&handle, open) in &self.open {
            let request = Request::Reclaim {
                handle,
                flags: open.flags,
                inode: open.inode,
                export: &open.export,
                path: &open.path,
            };
            let mut again = each(&[request])?;
            for l in &open.locks {
                again = again
                    && each(&[Request::Lock {
                        handle,
                        owner: l.owner,
                        family: l.family,
                        kind: l.kind,
                        wait: 0,
                        start: l.start,
                        length: l.length,
                    }])?;
            }
            if !again {
                stale.push(handle);
            }
        }
        for handle in stale {
            self.open.remove(&handle);
            self.stale.insert(handle);
        }
        Ok(())
    }
}

/// A lane that nobody else uses yet: one request at a time.
pub(crate) struct FirstUse<'a> {
    pub(crate) link: &'a Link,
    pub(crate) identity: (u32, u32),
    pub(crate) slot: u16,
    pub(crate) sequence: u32,
}

struct Answer(Option<Vec<u8>>);

impl Sink for Answer {
    fn message(
        &mut self,
        header: &Header,
        body: &[u8],
        _payload: &[u8],
    ) -> Result<(), ProtocolError> {
        if header.kind == Kind::Reply {
            parse_results(body)?;
            self.0 = Some(body.to_vec());
        }
        Ok(())
    }

    fn place(&mut self, _: &Header, _: &[u8], _: usize, _: usize) -> Option<Target<'_>> {
        None
    }

    fn expects_bulk(&self) -> bool {
        false
    }
}

impl FirstUse<'_> {
    /// Sends a request and waits for its reply. True: it succeeded.
    pub(crate) fn exchange(&mut self, requests: &[Request<'_>]) -> io::Result<bool> {
        let results = self.ask(requests)?;
        let replies = parse_results(&results).unwrap_or_default();
        Ok(!matches!(replies.last(), None | Some(Reply::Failed { .. })))
    }

    /// Sends a request and waits for its results.
    pub(crate) fn ask(&mut self, requests: &[Request<'_>]) -> io::Result<Vec<u8>> {
        self.sequence += 1;
        let body = encode_compound(requests);
        let mut header = Header::new(Kind::Request, self.slot, self.sequence);
        header.body_bytes = body.len() as u32;
        (header.word_a, header.word_b) = self.identity;
        let mut message = header.to_bytes().to_vec();
        message.extend_from_slice(&body);
        let counters = Counters::default();
        let mut done = 0;
        while done < message.len() {
            match self.link.send(&[&message[done..]], &counters) {
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.link.wait_writable(None)?;
                }
                Err(error) => return Err(error),
            }
        }
        let (mut input, mut answer, mut scratch) =
            (Input::default(), Answer(None), vec![0; 96 * 1024]);
        let mut never = Spin::new(Duration::ZERO);
        loop {
            if let Some(results) = answer.0.take() {
                return Ok(results);
            }
            let wait = Some(&mut never);
            if input.receive(self.link, &mut scratch, wait, &mut answer, &counters)?
                == Incoming::Closed
            {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }
}
