//! How much one client may ask of a disk or an export of files.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Requests and bytes a second of one client; zero: as many as it likes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)] // whoever configures a disk says both
pub struct RateLimit {
    /// Requests of any kind.
    pub operations: u64,
    /// Bytes read and written.
    pub bytes: u64,
}

impl RateLimit {
    /// True when nothing is limited.
    #[must_use]
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

/// Who is one client, however many connections it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(clippy::exhaustive_enums)] // fronts have to choose
pub enum ClientKey {
    /// All that comes from one machine.
    Machine(IpAddr),
    /// A process on this machine.
    Process(i32),
}

/// How far a client may run ahead of its rate: what it did not use before, and no more.
const AHEAD: Duration = Duration::from_millis(100);

/// Measures one client. A request is charged when it is taken; the next one waits until what was
/// charged has been used up at the rate allowed.
#[derive(Debug)]
pub struct Meter {
    limit: RateLimit,
    /// When all that was charged is used up: by requests, and by bytes.
    used_up: Mutex<[Instant; 2]>,
}

impl Meter {
    /// A client that has used nothing yet.
    #[must_use]
    pub fn new(limit: RateLimit, now: Instant) -> Self {
        Self { limit, used_up: Mutex::new([now, now]) }
    }

    /// When the next request may be taken; `None`: at once.
    #[must_use]
    pub fn waits(&self, now: Instant) -> Option<Instant> {
        let last = self.used_up.lock().into_iter().max()?;
        last.checked_sub(AHEAD).filter(|until| *until > now)
    }

    /// So many requests were taken, which move so many bytes.
    pub fn charge(&self, now: Instant, operations: u64, bytes: u64) {
        let mut used_up = self.used_up.lock();
        let costs = [(operations, self.limit.operations), (bytes, self.limit.bytes)];
        for (at, (count, rate)) in used_up.iter_mut().zip(costs) {
            if rate > 0 {
                *at = (*at).max(now) + Duration::from_secs_f64(count as f64 / rate as f64);
            }
        }
    }
}

/// The connected clients of a disk, or of an export of files.
#[derive(Debug, Default)]
pub struct Meters(Mutex<HashMap<ClientKey, Weak<Meter>>>);

impl Meters {
    /// The meter of a client, the same for all its connections.
    pub fn of(&self, client: ClientKey, limit: RateLimit) -> Arc<Meter> {
        let mut all = self.0.lock();
        if let Some(found) = all.get(&client).and_then(Weak::upgrade) {
            return found;
        }
        all.retain(|_, meter| meter.strong_count() > 0);
        let meter = Arc::new(Meter::new(limit, Instant::now()));
        all.insert(client, Arc::downgrade(&meter));
        meter
    }
}

#[cfg(test)]
mod tests {
    use super::{AHEAD, ClientKey, Meter, Meters, RateLimit};
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    /// Requests of `bytes` each that are taken within `time`, by a clock that jumps.
    fn taken(limit: RateLimit, bytes: u64, time: Duration) -> u64 {
        let start = Instant::now();
        let meter = Meter::new(limit, start);
        let (mut now, mut count) = (start, 0);
        while now < start + time {
            match meter.waits(now) {
                Some(until) => now = until,
                None => {
                    meter.charge(now, 1, bytes);
                    count += 1;
                }
            }
        }
        count
    }

    #[test]
    fn the_rate_is_kept_in_the_long_run() {
        let limit = |operations, bytes| RateLimit { operations, bytes };
        let hour = Duration::from_secs(3600);
        for (limit, bytes, rate) in [
            (limit(100, 0), 1 << 20, 100),
            (limit(0, 1 << 20), 4096, 256),
            (limit(100, 1 << 20), 4096, 100),
            (limit(1000, 1 << 20), 4096, 256),
            // Longer than what may be ahead: it is taken, and then paid for.
            (limit(0, 1 << 20), 1 << 19, 2),
        ] {
            let count = taken(limit, bytes, hour);
            let (least, most) = (rate * 3600, rate * 3600 + rate / 5 + 2);
            assert!((least..=most).contains(&count), "{limit:?}: {count}, not {least}");
        }
    }

    #[test]
    fn who_was_idle_is_not_far_ahead() {
        let start = Instant::now();
        let meter = Meter::new(RateLimit { operations: 100, bytes: 0 }, start);
        let later = start + Duration::from_secs(60);
        let mut count = 0;
        while meter.waits(later).is_none() {
            meter.charge(later, 1, 0);
            count += 1;
        }
        assert_eq!(count, (AHEAD.as_secs_f64() * 100.0) as u64 + 1);
    }

    #[test]
    fn a_client_has_one_meter_while_it_is_connected() {
        let (meters, limit) = (Meters::default(), RateLimit { operations: 1, bytes: 0 });
        let (one, other) = (ClientKey::Process(1), ClientKey::Process(2));
        let first = meters.of(one, limit);
        assert!(Arc::ptr_eq(&first, &meters.of(one, limit)));
        assert!(!Arc::ptr_eq(&first, &meters.of(other, limit)));
        drop(first);
        meters.of(other, limit);
        assert_eq!(meters.0.lock().len(), 1, "those that are gone are forgotten");
    }
}
