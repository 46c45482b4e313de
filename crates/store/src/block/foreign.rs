//! A disk whose file is on a file system that asks another machine or another process and may hang.
//!
//! On such a file system even a call that should not wait may wait forever: `preadv2(RWF_NOWAIT)`
//! on FUSE, getting the size, closing the file. So this disk uses only calls that may wait, and
//! threads of the disk's own make them ([`BlockStore::may_hang`]).

use crate::block_store::{BlockStore, Continuity, Extent, Geometry, Layout, ZeroHow};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use towline_reactor::processor;

/// Shortest interval between two checks of the size.
const LOOK: Duration = Duration::from_secs(1);

/// Wraps a disk so that other users of the server never wait for it.
#[derive(Debug)]
pub struct ForeignDisk {
    /// `None` only while it is dropped.
    inner: Option<Arc<dyn BlockStore>>,
    started: Instant,
    /// Milliseconds since `started` at which the size is checked again.
    look_at: AtomicU64,
    /// Whether a thread is checking the size.
    looking: Arc<AtomicBool>,
}

impl ForeignDisk {
    /// Wraps `inner`, whose file is on such a file system.
    #[must_use]
    pub fn new(inner: Arc<dyn BlockStore>) -> Arc<Self> {
        let (look_at, looking) = (AtomicU64::new(0), Arc::default());
        Arc::new(Self { inner: Some(inner), started: Instant::now(), look_at, looking })
    }

    fn inner(&self) -> &Arc<dyn BlockStore> {
        self.inner.as_ref().expect("there until it is dropped")
    }

    /// Fails with `EIO` if the range is not inside the disk: a change beyond the end of a truncated
    /// file would extend it again.
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

    /// Returns the last known size, and has a thread determine the current one for a later call.
    fn refresh(&self) -> io::Result<u64> {
        let now = self.started.elapsed().as_millis() as u64;
        if now >= self.look_at.load(Ordering::Relaxed)
            && !self.looking.swap(true, Ordering::Relaxed)
        {
            self.look_at.store(now + LOOK.as_millis() as u64, Ordering::Relaxed);
            let (inner, looking) = (self.inner().clone(), self.looking.clone());
            let look = move || {
                // An error here also occurs, and is reported, when the disk is used.
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

    fn writes_extend(&self) -> bool {
        self.inner().writes_extend()
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
        // Closing a file may wait as well.
        if let Some(inner) = self.inner.take() {
            let _ = apart(move || drop(inner));
        }
    }
}

/// Runs `work` on a thread of its own, without waiting for it.
fn apart(work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    processor::spawn("towline-foreign", work).map(drop)
}
