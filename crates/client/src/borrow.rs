//! Data that the server lends: read in place, in memory of the server that is mapped here.

use smallvec::SmallVec;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use towline_mem::SharedMemory;
use towline_net::Link;
use towline_wire::extents::{Extent, Extents};
use towline_wire::{Header, ProtocolError};

/// How much is fetched ahead of a copy: the processor goes on by itself once it has seen some lines.
const EXPECTED_BYTES: usize = 512;

/// The memories that were handed over on a lane, by their numbers.
pub(crate) struct Memories {
    known: Vec<Arc<Known>>,
    hide: fn(OwnedFd) -> io::Result<OwnedFd>,
}

/// A memory that was handed over, on a link.
struct Known {
    link: Arc<Link>,
    memory: SharedMemory,
}

/// Why lent data cannot be had.
pub(crate) enum Refusal {
    /// The server broke the protocol.
    Illegal(ProtocolError),
    /// This process cannot map the memory: it has to be sent.
    Unmapped,
}

impl From<ProtocolError> for Refusal {
    fn from(error: ProtocolError) -> Self {
        Self::Illegal(error)
    }
}

/// Data of one reply.
pub(crate) struct Borrowed {
    /// Where it stands; `None` when all of it is zeroes.
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

impl Memories {
    /// None yet, on a lane over which there can be some. `hide`: see [`crate::Options::hide`].
    pub(crate) fn of(link: &Link, hide: fn(OwnedFd) -> io::Result<OwnedFd>) -> Option<Self> {
        matches!(link, Link::Shm(_)).then(|| Self { known: Vec::new(), hide })
    }

    /// The memory of this number: the next one is taken from the link.
    fn find(&mut self, number: u32, link: &Arc<Link>) -> Result<&Arc<Known>, Refusal> {
        let Link::Shm(shared) = &**link else { return Err(wrong("lent over a socket")) };
        let number = number as usize;
        if number == self.known.len() {
            let (fd, length) = shared.take_over().map_err(|error| match error.kind() {
                io::ErrorKind::InvalidData => wrong("memory was lent that was not handed over"),
                _ => Refusal::Unmapped,
            })?;
            let memory = (self.hide)(fd)
                .and_then(|fd| SharedMemory::open(fd, length, false))
                .map_err(|_| Refusal::Unmapped)?;
            self.known.push(Arc::new(Known { link: link.clone(), memory }));
        }
        self.known.get(number).ok_or_else(|| wrong("memory was lent that was not handed over"))
    }

    /// What a reply says is lent: `room` bytes at most, all of them inside the memory.
    pub(crate) fn borrow(
        &mut self,
        header: &Header,
        body: &[u8],
        link: &Arc<Link>,
        room: usize,
    ) -> Result<Borrowed, Refusal> {
        let list = usize::try_from(header.offset).ok().and_then(|start| body.get(start..));
        let Extents { memory, extents } =
            Extents::parse(list.ok_or_else(|| wrong("list of extents outside of the reply"))?)?;
        let bytes: u64 = extents.iter().map(|extent| u64::from(extent.length)).sum();
        if bytes > room as u64 {
            return Err(wrong("more was lent than asked for"));
        }
        let end = extents.iter().filter_map(|e| Some(e.offset? + u64::from(e.length))).max();
        let from = match end {
            None => None,
            Some(end) => {
                let known = self.find(memory, link)?;
                if end > known.memory.len() as u64 {
                    return Err(wrong("lent extent is outside of the memory"));
                }
                Some(known.clone())
            }
        };
        Ok(Borrowed { from, extents, bytes: bytes as usize })
    }
}

impl Borrowed {
    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    /// Has the processor fetch its first bytes while it does something else. They are in no cache, most likely, and neither is what
    /// tells where their page is.
    pub(crate) fn expect(&self) {
        if let (Some(from), Some(Extent { offset: Some(offset), length })) =
            (&self.from, self.extents.first())
        {
            from.memory.expect_reads(*offset as usize, (*length as usize).min(EXPECTED_BYTES));
        }
    }

    /// True when it was lent over this link.
    pub(crate) fn is_of(&self, link: &Arc<Link>) -> bool {
        self.from.as_ref().is_some_and(|from| Arc::ptr_eq(&from.link, link))
    }

    /// Copies all of it to the start of `target`. False: the loan ended meanwhile, with the lane,
    /// and the bytes are worthless.
    ///
    /// # Panics
    /// When `target` is shorter.
    pub(crate) fn copy_to(&self, target: &mut [u8]) -> bool {
        let mut rest = target;
        for extent in &self.extents {
            let (part, behind) = rest.split_at_mut(extent.length as usize);
            match (extent.offset, &self.from) {
                (Some(offset), Some(from)) => from.memory.copy_out(offset as usize, part),
                _ => part.fill(0),
            }
            rest = behind;
        }
        // That there is a hole was true when it was said.
        self.from.as_ref().is_none_or(|from| match &*from.link {
            Link::Shm(link) => link.loans_hold(),
            _ => false,
        })
    }
}
