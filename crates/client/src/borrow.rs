//! Borrowed data: the client reads what the server lends in place, in the server's memory, which it
//! maps.

use crate::lent::Buffer;
use smallvec::SmallVec;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use towline_mem::SharedMemory;
use towline_net::{Link, ShmLink};
use towline_wire::extents::{Extent, Extents};
use towline_wire::{Header, ProtocolError};

/// Bytes prefetched before a copy: after a few lines the processor prefetches by itself.
const EXPECTED_BYTES: usize = 512;

/// The memories that the server handed over on a lane, by number.
pub(crate) struct Memories {
    /// `None` for those that the server has forgotten.
    known: Vec<Option<Arc<Known>>>,
    hide: fn(OwnedFd) -> io::Result<OwnedFd>,
}

/// A memory that the server handed over on a link.
struct Known {
    link: Arc<Link>,
    memory: SharedMemory,
}

/// Why lent data cannot be used.
pub(crate) enum Refusal {
    /// The server broke the protocol.
    Illegal(ProtocolError),
    /// This process cannot map the memory: the data has to be sent.
    Unmapped,
}

impl From<ProtocolError> for Refusal {
    fn from(error: ProtocolError) -> Self {
        Self::Illegal(error)
    }
}

/// The data that one reply lends.
pub(crate) struct Borrowed {
    /// The memory it is in; `None` if all of it is zeroes.
    from: Option<Arc<Known>>,
    extents: SmallVec<[Extent; 2]>,
    bytes: usize,
}

impl std::fmt::Debug for Borrowed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes in {} extents", self.bytes, self.extents.len())
    }
}

fn wrong(what: &'static str) -> Refusal {
    ProtocolError { what, at: 0 }.into()
}

/// Receives the next memory that the server has handed over, and its length.
fn take_over(shared: &ShmLink) -> Result<(OwnedFd, usize), Refusal> {
    shared.take_over().map_err(|error| match error.kind() {
        io::ErrorKind::InvalidData => wrong("memory lent without having been shared"),
        _ => Refusal::Unmapped,
    })
}

impl Memories {
    /// No memories yet; `None` for a lane over which the server cannot lend. `hide`: see
    /// [`crate::Options::hide`].
    pub(crate) fn of(link: &Link, hide: fn(OwnedFd) -> io::Result<OwnedFd>) -> Option<Self> {
        matches!(link, Link::Shm(_)).then(|| Self { known: Vec::new(), hide })
    }

    /// Returns the memory with this number. Receives it from the link if it is the next one.
    fn find(&mut self, number: u32, link: &Arc<Link>) -> Result<&Arc<Known>, Refusal> {
        let Link::Shm(shared) = &**link else {
            return Err(wrong("memory lent over a socket"));
        };
        let number = number as usize;
        if number == self.known.len() {
            let (fd, length) = take_over(shared)?;
            let memory = (self.hide)(fd)
                .and_then(|fd| SharedMemory::open(fd, length, false))
                .map_err(|_| Refusal::Unmapped)?;
            self.known.push(Some(Arc::new(Known { link: link.clone(), memory })));
        }
        let known = self.known.get(number).and_then(Option::as_ref);
        known.ok_or_else(|| wrong("memory lent without having been shared"))
    }

    /// Forgets the memory with this number, which the server will not lend from again. What it has lent can
    /// still be read.
    pub(crate) fn forget(&mut self, number: u64, link: &Link) -> Result<(), Refusal> {
        let Link::Shm(shared) = link else { return Err(wrong("memory lent over a socket")) };
        // It was handed over, but what was lent from it then came for nobody.
        while self.known.len() as u64 <= number {
            take_over(shared)?;
            self.known.push(None);
        }
        self.known[number as usize] = None;
        Ok(())
    }

    /// Returns what a reply lends: at most `room` bytes, all of them inside the memory.
    pub(crate) fn borrow(
        &mut self,
        header: &Header,
        body: &[u8],
        link: &Arc<Link>,
        room: usize,
    ) -> Result<Borrowed, Refusal> {
        let list = usize::try_from(header.offset).ok().and_then(|start| body.get(start..));
        let Extents { memory, extents } =
            Extents::parse(list.ok_or_else(|| wrong("extent list outside of the reply"))?)?;
        let bytes: u64 = extents.iter().map(|extent| u64::from(extent.length)).sum();
        if bytes > room as u64 {
            return Err(wrong("more lent than requested"));
        }
        let end = extents.iter().filter_map(|e| Some(e.offset? + u64::from(e.length))).max();
        let from = match end {
            None => None,
            Some(end) => {
                let known = self.find(memory, link)?;
                if end > known.memory.len() as u64 {
                    return Err(wrong("lent extent outside of the memory"));
                }
                Some(known.clone())
            }
        };
        Ok(Borrowed { from, extents, bytes: bytes as usize })
    }
}

impl Borrowed {
    /// Length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    /// Prefetches its first bytes. They are most likely in no cache, and neither is the translation
    /// of their address.
    pub(crate) fn expect(&self) {
        if let (Some(from), Some(Extent { offset: Some(offset), length })) =
            (&self.from, self.extents.first())
        {
            from.memory.expect_reads(*offset as usize, (*length as usize).min(EXPECTED_BYTES));
        }
    }

    /// True if it was lent over this link.
    pub(crate) fn is_of(&self, link: &Arc<Link>) -> bool {
        self.from.as_ref().is_some_and(|from| Arc::ptr_eq(&from.link, link))
    }

    /// Copies all of it to the start of `target`. Returns false if that is shorter, or if the loan ended meanwhile, with the
    /// lane; the bytes are then worthless.
    pub(crate) fn copy_to(&self, target: &mut Buffer) -> bool {
        let mut at = 0;
        for extent in &self.extents {
            let length = extent.length as usize;
            let lent = extent.offset.map(|offset| offset as usize).zip(self.from.as_ref());
            let fits = target.each_part(at, length, |done, part| match lent {
                Some((offset, from)) => from.memory.copy_out(offset + done, part),
                None => part.fill(0),
            });
            if !fits {
                return false;
            }
            at += length;
        }
        // Holes need no check: they were holes when the server said so.
        self.from.as_ref().is_none_or(|from| match &*from.link {
            Link::Shm(link) => link.loans_hold(),
            _ => false,
        })
    }
}
