//! A disk that adds delays: each request takes as long as on a device with a given latency and
//! bandwidth. For tests, and for benchmarks that need a disk of known speed.
//!
//! With [`BlockStore::later`], a core can time the delay of reads and writes by its own clock, just
//! as it waits for the interrupt of a device. A sleeping thread would add two wake-ups that a
//! device does not need.

use crate::block_store::{BlockStore, Continuity, Extent, Geometry, Layout, ZeroHow};
use parking_lot::Mutex;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Delays the requests to another disk that would wait for a device.
#[derive(Debug)]
pub struct DelayStore {
    inner: Arc<dyn BlockStore>,
    latency: Duration,
    /// Bytes per second of all requests together; zero: no limit.
    bandwidth: u64,
    /// When all data requested so far will have been transferred.
    busy_until: Mutex<Instant>,
}

impl DelayStore {
    /// Wraps `inner` with a latency and a bandwidth in bytes per second (0: unlimited), which
    /// concurrent requests share in order of arrival. If either is set, `inner` itself must not
    /// wait.
    #[must_use]
    pub fn new(inner: Arc<dyn BlockStore>, latency: Duration, bandwidth: u64) -> Arc<Self> {
        Arc::new(Self { inner, latency, bandwidth, busy_until: Mutex::new(Instant::now()) })
    }

    /// Returns when a request for `bytes` more bytes will be complete.
    fn until(&self, bytes: u64) -> Instant {
        let now = Instant::now();
        let mut until = now + self.latency;
        if let Some(nanoseconds) = (bytes * 1_000_000_000).checked_div(self.bandwidth) {
            let mut busy_until = self.busy_until.lock();
            *busy_until = (*busy_until).max(now) + Duration::from_nanos(nanoseconds);
            until = *busy_until + self.latency;
        }
        until
    }

    fn wait(&self, bytes: u64) {
        let until = self.until(bytes);
        accurate_sleep();
        // Sleep rather than spin: a device needs no CPU while it works.
        if let Some(sleep) = until.checked_duration_since(Instant::now()) {
            std::thread::sleep(sleep);
        }
    }
}

/// Makes this thread wake up on time, not up to 50 us late, which is the usual timer slack of
/// threads.
fn accurate_sleep() {
    thread_local!(static DONE: std::cell::Cell<bool> = const { std::cell::Cell::new(false) });
    if !DONE.replace(true) {
        // If that is forbidden, the device is a little slower than it should be.
        let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
    }
}

impl BlockStore for DelayStore {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn refresh(&self) -> io::Result<u64> {
        self.inner.refresh()
    }

    fn resizes(&self) -> bool {
        self.inner.resizes()
    }

    fn writes_extend(&self) -> bool {
        self.inner.writes_extend()
    }

    fn size_max(&self) -> u64 {
        self.inner.size_max()
    }

    fn resize(&self, size: u64) -> io::Result<()> {
        self.inner.resize(size)
    }

    fn layout(&self) -> Option<Layout> {
        self.inner.layout()
    }

    fn continuity(&self) -> Option<Continuity> {
        self.inner.continuity()
    }

    fn later(&self, bytes: u64) -> Option<(Instant, Arc<dyn BlockStore>)> {
        let takes_time = self.bandwidth > 0 || !self.latency.is_zero();
        takes_time.then(|| (self.until(bytes), self.inner.clone()))
    }

    fn read(&self, offset: u64, target: &mut [u8]) -> io::Result<()> {
        self.wait(target.len() as u64);
        self.inner.read(offset, target)
    }

    fn write(&self, offset: u64, data: &[u8], durable: bool) -> io::Result<()> {
        self.wait(data.len() as u64);
        self.inner.write(offset, data, durable)
    }

    fn flush(&self) -> io::Result<()> {
        self.wait(0);
        self.inner.flush()
    }

    fn zero(&self, offset: u64, length: u64, how: ZeroHow) -> io::Result<()> {
        self.wait(0);
        self.inner.zero(offset, length, how)
    }

    fn trim(&self, offset: u64, length: u64) -> io::Result<()> {
        self.wait(0);
        self.inner.trim(offset, length)
    }

    fn cache(&self, offset: u64, length: u64) -> io::Result<()> {
        self.inner.cache(offset, length)
    }

    fn extents(
        &self,
        offset: u64,
        length: u64,
        tell: &mut dyn FnMut(Extent) -> bool,
    ) -> io::Result<()> {
        self.inner.extents(offset, length, tell)
    }
}
