//! What a server measures of live traffic, in terms of the papers' cost model:
//! T_server = T_storage + T_data + T_control - T_overlapped, with T_disk inside T_storage.
//!
//! Where the time before the store is not told apart, since reading the clock costs, T_storage and T_control
//! are not recorded. The data of answers leaves after T_server; T_data tells of that, too.
//!
//! Each core records into its own histograms, under a lock that only readers of statistics contend for.

use crate::disks::Disks;
use crate::prometheus;
use crate::watch::Turns;
use hdrhistogram::Histogram;
use parking_lot::Mutex;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;
use towline_block::Moved;
use towline_mem::Pool;
use towline_net::Counters;
use towline_wire::Request;

/// First tag of the NBD commands, which follow in the order of their numbers; Towline's own requests have
/// smaller tags.
pub(crate) const NBD_TAGS: u8 = 56;
const NBD_NAMES: [&str; 8] = [
    "nbd_read",
    "nbd_write",
    "nbd_disconnect",
    "nbd_flush",
    "nbd_trim",
    "nbd_cache",
    "nbd_write_zeroes",
    "nbd_block_status",
];

fn operation_name(tag: usize) -> &'static str {
    let nbd = tag.checked_sub(usize::from(NBD_TAGS)).and_then(|number| NBD_NAMES.get(number));
    nbd.copied().unwrap_or_else(|| Request::tag_name(tag as u8))
}

/// Stages of a request, in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Stages {
    /// From the arrival of the request until its reply is queued for sending.
    pub(crate) server: u64,
    /// Inside the store, including waiting for a device.
    pub(crate) storage: u64,
    /// The part of this on a thread that may block: waiting for a device.
    pub(crate) disk: u64,
    /// From the first grant to the last byte of the request's data.
    pub(crate) data: u64,
    /// The part of this in which data that had arrived was being stored.
    pub(crate) overlapped: u64,
    /// `storage` has nothing of what came before and after, and all that was measured.
    pub(crate) is_split: bool,
}

/// One request for a file in so many is split.
pub(crate) const SPLIT_EVERY: u32 = 16;
/// Answers of fewer bytes leave with the system call that tells of them.
pub(crate) const SENT_BYTES_MIN: u64 = 32 * 1024;

struct Histograms {
    server: Histogram<u64>,
    storage: Histogram<u64>,
    disk: Histogram<u64>,
    data: Histogram<u64>,
    overlapped: Histogram<u64>,
    control: Histogram<u64>,
}

impl Histograms {
    fn new() -> Self {
        // With two significant digits each takes 31 KiB, and recording touches few cache lines.
        let new = || {
            Histogram::new_with_bounds(1, 100_000_000_000, 2)
                .unwrap_or_else(|_| Histogram::new(1).expect("one digit is always legal"))
        };
        Self {
            server: new(),
            storage: new(),
            disk: new(),
            data: new(),
            overlapped: new(),
            control: new(),
        }
    }

    fn record(&mut self, stages: &Stages) {
        self.server.saturating_record(stages.server);
        for (stage, time) in [
            (&mut self.disk, stages.disk),
            (&mut self.data, stages.data),
            (&mut self.overlapped, stages.overlapped),
        ] {
            if time > 0 {
                stage.saturating_record(time);
            }
        }
        if stages.is_split {
            self.storage.saturating_record(stages.storage);
            let known = stages.storage + stages.data;
            self.control
                .saturating_record((stages.server + stages.overlapped).saturating_sub(known));
        }
    }

    fn all(&self) -> [(&'static str, &Histogram<u64>); 6] {
        [
            ("T_server", &self.server),
            ("T_storage", &self.storage),
            ("T_disk", &self.disk),
            ("T_data", &self.data),
            ("T_overlapped", &self.overlapped),
            ("T_control", &self.control),
        ]
    }
}

/// The counters of one core.
pub(crate) struct CoreStatistics {
    pub(crate) turns: Turns,
    pub(crate) counters: Counters,
    pub(crate) reactor_calls: AtomicU64,
    pub(crate) requests: AtomicU64,
    pub(crate) replays: AtomicU64,
    /// Requests of low priority that began in a turn in which others sent requests, too.
    pub(crate) low_among_others: AtomicU64,
    /// Listings that other threads made.
    pub(crate) listings_handed_over: AtomicU64,
    pub(crate) lanes: AtomicU64,
    /// Those over shared memory.
    pub(crate) shm_lanes: AtomicU64,
    /// Connections handed over to cores on the processors of their clients.
    pub(crate) lanes_moved: AtomicU64,
    /// The processor on which the core ran when it last had more to do than it served at once.
    pub(crate) processor: AtomicU32,
    /// Connections that ask all the time, see `Round::active`; zero while the core sleeps.
    pub(crate) active: AtomicU64,
    /// Nanoseconds that a turn of one of them takes; zero if that is not known.
    pub(crate) turn_ns: AtomicU64,
    /// Connections handed over to the core that it has not taken yet.
    pub(crate) coming: AtomicU64,
    pub(crate) sessions: AtomicU64,
    pub(crate) protocol_errors: AtomicU64,
    /// Bytes of the blocks that clients have on loan.
    pub(crate) bytes_on_loan: AtomicU64,
    /// Bytes of disks moved to or from buffers registered with the ring.
    pub(crate) disk_bytes_registered: AtomicU64,
    /// Bytes moved by the engine of disks.
    disk_moved: Mutex<Moved>,
    by_operation: Vec<AtomicU64>,
    histograms: Mutex<Histograms>,
}

impl CoreStatistics {
    pub(crate) fn new() -> Self {
        Self {
            turns: Turns::default(),
            counters: Counters::default(),
            reactor_calls: AtomicU64::new(0),
            requests: AtomicU64::new(0),
            replays: AtomicU64::new(0),
            low_among_others: AtomicU64::new(0),
            listings_handed_over: AtomicU64::new(0),
            lanes: AtomicU64::new(0),
            shm_lanes: AtomicU64::new(0),
            lanes_moved: AtomicU64::new(0),
            processor: AtomicU32::new(u32::MAX),
            active: AtomicU64::new(0),
            turn_ns: AtomicU64::new(0),
            coming: AtomicU64::new(0),
            sessions: AtomicU64::new(0),
            protocol_errors: AtomicU64::new(0),
            bytes_on_loan: AtomicU64::new(0),
            disk_bytes_registered: AtomicU64::new(0),
            disk_moved: Mutex::default(),
            by_operation: (0..64).map(|_| AtomicU64::new(0)).collect(),
            histograms: Mutex::new(Histograms::new()),
        }
    }

    /// Publishes what the engine of disks has moved so far.
    pub(crate) fn publish_moved(&self, moved: Moved) {
        *self.disk_moved.lock() = moved;
    }

    /// Records a finished request whose first operation has this tag.
    pub(crate) fn record(&self, tag: u8, stages: Stages) {
        self.count(tag);
        self.histograms.lock().record(&stages);
    }

    /// Counts a finished request, before its answer leaves.
    pub(crate) fn count(&self, tag: u8) {
        Counters::add(&self.requests, 1);
        if let Some(count) = self.by_operation.get(usize::from(tag)) {
            Counters::add(count, 1);
        }
    }

    /// Records how long the core took to send data of answers.
    pub(crate) fn sent(&self, time: u64) {
        self.histograms.lock().data.saturating_record(time);
    }

    /// Records, and removes, the times of requests that are already counted.
    pub(crate) fn record_times(&self, timed: &mut Vec<Stages>) {
        if timed.is_empty() {
            return;
        }
        let mut histograms = self.histograms.lock();
        for stages in timed.drain(..) {
            histograms.record(&stages);
        }
    }
}

/// The counters of a server.
pub(crate) struct Statistics {
    pub(crate) cores: Vec<Arc<CoreStatistics>>,
    pub(crate) pools: Mutex<Vec<Arc<Pool>>>,
    pub(crate) disks: OnceLock<Arc<Disks>>,
    started: Instant,
    pub(crate) engine: Mutex<&'static str>,
}

/// The times of one stage of all requests.
#[derive(Serialize)]
pub(crate) struct Stage {
    pub(crate) count: u64,
    pub(crate) mean_us: f64,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) p999_us: f64,
    pub(crate) max_us: f64,
}

/// The counters and times at one moment.
#[derive(Serialize)]
pub(crate) struct Snapshot {
    pub(crate) uptime_seconds: f64,
    engine: &'static str,
    cores: usize,
    pub(crate) counters: BTreeMap<&'static str, u64>,
    pub(crate) operations: BTreeMap<&'static str, u64>,
    pub(crate) stages: BTreeMap<&'static str, Stage>,
}

impl Statistics {
    pub(crate) fn new(cores: usize) -> Arc<Self> {
        Arc::new(Self {
            cores: (0..cores).map(|_| Arc::new(CoreStatistics::new())).collect(),
            pools: Mutex::new(Vec::new()),
            disks: OnceLock::new(),
            started: Instant::now(),
            engine: Mutex::new("none"),
        })
    }

    fn snapshot(&self) -> Snapshot {
        let mut counters = BTreeMap::new();
        let mut operations = BTreeMap::new();
        let mut longest_wait = 0;
        let mut merged = Histograms::new();
        let mut add = |name, count: u64| *counters.entry(name).or_insert(0) += count;
        for core in &self.cores {
            let waiting = core.turns.waiting();
            add("cores_waiting", u64::from(waiting > 0));
            longest_wait = longest_wait.max(waiting);
            for (name, count) in core.counters.values() {
                add(name, count);
                if name == "system_calls" {
                    add(name, core.reactor_calls.load(Ordering::Relaxed));
                }
            }
            add("requests", core.requests.load(Ordering::Relaxed));
            add("replays", core.replays.load(Ordering::Relaxed));
            add("requests_low_among_others", core.low_among_others.load(Ordering::Relaxed));
            add("listings_handed_over", core.listings_handed_over.load(Ordering::Relaxed));
            add("lanes", core.lanes.load(Ordering::Relaxed));
            add("lanes_moved", core.lanes_moved.load(Ordering::Relaxed));
            add("sessions", core.sessions.load(Ordering::Relaxed));
            add("protocol_errors", core.protocol_errors.load(Ordering::Relaxed));
            add("bytes_on_loan", core.bytes_on_loan.load(Ordering::Relaxed));
            add("disk_bytes_registered", core.disk_bytes_registered.load(Ordering::Relaxed));
            let moved = *core.disk_moved.lock();
            add("disk_bytes_lent", moved.lent);
            add("disk_bytes_staged", moved.staged);
            add("disk_bytes_direct", moved.direct);
            add("disk_bytes_holes", moved.holes);
            add("disk_bytes_written_staged", moved.written_staged);
            add("disk_bytes_written_in_place", moved.written_in_place);
            add("disk_bytes_written_direct", moved.written_direct);
            for (tag, count) in core.by_operation.iter().enumerate() {
                let count = count.load(Ordering::Relaxed);
                if count > 0 {
                    *operations.entry(operation_name(tag)).or_insert(0) += count;
                }
            }
            let histograms = core.histograms.lock();
            // Adding cannot fail, since all have the same bounds.
            let _ = merged.server.add(&histograms.server);
            let _ = merged.storage.add(&histograms.storage);
            let _ = merged.disk.add(&histograms.disk);
            let _ = merged.data.add(&histograms.data);
            let _ = merged.overlapped.add(&histograms.overlapped);
            let _ = merged.control.add(&histograms.control);
        }
        add("cores_waiting_seconds_max", longest_wait);
        for pool in self.pools.lock().iter() {
            let (now, most) = pool.bytes_in_use();
            add("buffer_bytes_in_use", now);
            add("buffer_bytes_peak", most);
        }
        add("disks_failed", self.disks.get().map_or(0, |disks| disks.failed() as u64));
        let us = |ns: u64| ns as f64 / 1000.0;
        let stages = merged.all().into_iter().map(|(name, h)| {
            let stage = Stage {
                count: h.len(),
                mean_us: h.mean() / 1000.0,
                p50_us: us(h.value_at_quantile(0.5)),
                p99_us: us(h.value_at_quantile(0.99)),
                p999_us: us(h.value_at_quantile(0.999)),
                max_us: us(h.max()),
            };
            (name, stage)
        });
        Snapshot {
            uptime_seconds: self.started.elapsed().as_secs_f64(),
            engine: *self.engine.lock(),
            cores: self.cores.len(),
            stages: stages.collect(),
            counters,
            operations,
        }
    }

    /// Returns everything as JSON.
    pub(crate) fn to_json(&self) -> String {
        serde_json::to_string(&self.snapshot()).unwrap_or_default()
    }

    /// Returns everything in the text format of Prometheus.
    pub(crate) fn to_prometheus(&self) -> String {
        prometheus::page(&self.snapshot())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::{TIMED_MAX, nanoseconds};

    #[test]
    fn no_request_is_counted_as_an_nbd_command() {
        for tag in NBD_TAGS..=u8::MAX {
            assert_eq!(Request::tag_name(tag), "unknown");
        }
        let of_nbd = usize::from(NBD_TAGS)..usize::from(NBD_TAGS) + NBD_NAMES.len();
        assert_eq!(of_nbd.clone().map(operation_name).collect::<Vec<_>>(), NBD_NAMES);
        assert!(of_nbd.end <= CoreStatistics::new().by_operation.len());
    }

    /// What the stages of a request for files add to it: two looks at the clock, three if it is split, and its
    /// times in the histograms.
    #[test]
    #[ignore = "not a test: the measurement of docs/design/server.md, for a release build"]
    fn what_stages_cost() {
        const REQUESTS: u32 = 100_000;
        const TURNS: usize = 50;
        let (statistics, mut timed) = (CoreStatistics::new(), Vec::new());
        let mut request = |number: u32| {
            let arrived = Instant::now();
            let is_split = number % SPLIT_EVERY == 1;
            let begun = if is_split { Instant::now() } else { arrived };
            let end = Instant::now();
            // The times of a live server lie in many buckets.
            let more = u64::from(number.wrapping_mul(2_654_435_761) >> 20);
            let server = nanoseconds(end - arrived) + more;
            let storage = nanoseconds(end - begun) + more / 2;
            timed.push(Stages { server, storage, is_split, ..Stages::default() });
            if timed.len() >= TIMED_MAX {
                statistics.record_times(&mut timed);
            }
        };
        let mut look = |_| {
            std::hint::black_box(Instant::now());
        };
        // The fastest turn is the one that was disturbed least.
        let fastest = |each: &mut dyn FnMut(u32)| {
            let turn = |_| {
                let start = Instant::now();
                (0..REQUESTS).for_each(&mut *each);
                start.elapsed()
            };
            let took = (0..TURNS).map(turn).min().unwrap_or_default();
            took.as_nanos() as f64 / f64::from(REQUESTS)
        };
        let (all, clock) = (fastest(&mut request), fastest(&mut look));
        println!("MEASURED stages of a request: {all:.0} ns; a look at the clock: {clock:.0} ns");
    }
}
