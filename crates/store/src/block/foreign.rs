//! A disk whose file is on a file system that asks another machine, or another process, and may hang.
//!
//! There even a call that is not to wait may do so without end (`preadv2(RWF_NOWAIT)` on FUSE, a look at the
//! size, the closing of a file). So nothing is asked but by calls that may wait, which threads of the disk's own
//! make ([`BlockStore::may_hang`]).

use crate::block_store::{BlockStore, Continuity, Extent, Geometry, Layout, ZeroHow};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The size is looked at no more often.
const LOOK: Duration = Duration::from_secs(1);

/// Keeps others from waiting for a disk.
#[derive(Debug)]
pub struct ForeignDisk {
    /// `None` only while it is dropped.
    inner: Option<Arc<dyn BlockStore>>,
    started: Instant,
    /// Milliseconds since `started` at which the size is looked at again.
    look_at: AtomicU64,
    /// A thread looks at the size.
    looking: Arc<AtomicBool>,
}

impl ForeignDisk {
    /// The same disk, of which nobody waits for more than the calls that may wait.
    #[must_use]
    pub fn new(inner: Arc<dyn BlockStore>) -> Arc<Self> {
        let (look_at, looking) = (AtomicU64::new(0), Arc::default());
        Arc::new(Self { inner: Some(inner), started: Instant::now(), look_at, looking })
    }

    fn inner(&self) -> &Arc<dyn BlockStore> {
        self.inner.as_ref().expect("there until it is dropped")
    }

    /// A change beyond the end of a file that became shorter would make it long again.
    fn check(&self, offset: u64, length: u64) -> io::Result<()> {
        let inside =
            offset.checked_add(length).is_some_and(|end| self.look().is_ok_and(|s| end <= s));
        if inside { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EIO)) }
    }
}

impl BlockStore for ForeignDisk {
    fn geometry(&self) -> Geometry {
        self.inner().geometry()
    }

    /// What was seen last: a thread looks, and who asks next gets what it saw.
    fn refresh(&self) -> io::Result<u64> {
        let now = self.started.elapsed().as_millis() as u64;
        if now >= self.look_at.load(Ordering::Relaxed)
            && !self.looking.swap(true, Ordering::Relaxed)
        {
            self.look_at.store(now + LOOK.as_millis() as u64, Ordering::Relaxed);
            let (inner, looking) = (self.inner().clone(), self.looking.clone());
            let look = move || {
                // What fails here fails for whoever uses the disk, and is told there.
                let _ = inner.refresh();
                drop(inner);
                looking.store(false, Ordering::Relaxed);
            };
            if apart(look).is_err() {
                self.looking.store(false, Ordering::Relaxed);
            }
        }
        Ok(self.geometry().size)
    }

    fn look(&self) -> io::Result<u64> {
        self.inner().refresh()
    }

    fn may_hang(&self) -> bool {
        true
    }

    fn layout(&self) -> Option<Layout> {
        self.inner().layout()
    }

    fn continuity(&self) -> Option<Continuity> {
        self.inner().continuity()
    }

    fn read(&self, offset: u64, target: &mut [u8]) -> io::Result<()> {
        self.inner().read(offset, target)
    }

    fn write(&self, offset: u64, data: &[u8], durable: bool) -> io::Result<()> {
        self.check(offset, data.len() as u64)?;
        self.inner().write(offset, data, durable)
    }

    fn flush(&self) -> io::Result<()> {
        self.inner().flush()
    }

    fn zero(&self, offset: u64, length: u64, how: ZeroHow) -> io::Result<()> {
        self.check(offset, length)?;
        self.inner().zero(offset, length, how)
    }

    fn trim(&self, offset: u64, length: u64) -> io::Result<()> {
        self.check(offset, length)?;
        self.inner().trim(offset, length)
    }

    fn cache(&self, offset: u64, length: u64) -> io::Result<()> {
        self.inner().cache(offset, length)
    }

    fn populate(&self, offset: u64, length: u64) -> io::Result<()> {
        self.inner().populate(offset, length)
    }

    fn extents(
        &self,
        offset: u64,
        length: u64,
        tell: &mut dyn FnMut(Extent) -> bool,
    ) -> io::Result<()> {
        self.inner().extents(offset, length, tell)
    }

    fn resizes(&self) -> bool {
        self.inner().resizes()
    }

    fn size_max(&self) -> u64 {
        self.inner().size_max()
    }

    fn resize(&self, size: u64) -> io::Result<()> {
        self.inner().resize(size)
    }
}

impl Drop for ForeignDisk {
    fn drop(&mut self) {
        // To close a file may wait as well.
        if let Some(inner) = self.inner.take() {
            let _ = apart(move || drop(inner));
        }
    }
}

/// Does something on a thread that nobody waits for.
fn apart(work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    std::thread::Builder::new().name("towline-foreign".into()).spawn(work).map(drop)
}
