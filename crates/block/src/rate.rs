//! Limits the rate at which one client may use a disk or an export of files.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Requests and bytes per second of one client; zero means no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)] // both limits are always given
pub struct RateLimit {
    /// Requests of any kind.
    pub operations: u64,
    /// Bytes read and written.
    pub bytes: u64,
}

impl RateLimit {
    /// Returns true if nothing is limited.
    #[must_use]
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }

    fn rates(self) -> [u64; 2] {
        [self.operations, self.bytes]
    }
}

/// What counts as one client, however many connections it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(clippy::exhaustive_enums)] // fronts have to choose
pub enum ClientKey {
    /// All connections from one machine.
    Machine(IpAddr),
    /// A process on this machine.
    Process(i32),
}

/// How far a client may run ahead of its rate; it can save up no more than this while it is idle.
const AHEAD: Duration = Duration::from_millis(100);

/// A limit that can be changed while clients are connected, and then applies at once.
#[derive(Debug, Default)]
struct Current {
    operations: AtomicU64,
    bytes: AtomicU64,
}

impl Current {
    fn get(&self) -> RateLimit {
        // The two values may be of different moments, but only briefly.
        let read = |value: &AtomicU64| value.load(Ordering::Relaxed);
        RateLimit { operations: read(&self.operations), bytes: read(&self.bytes) }
    }
}

/// What a client was charged and has not yet paid off at its rate.
#[derive(Debug)]
struct Owed {
    at: Instant,
    /// Requests and bytes.
    counts: [f64; 2],
}

impl Owed {
    /// Deducts what was paid off until now.
    fn settle(&mut self, now: Instant, rates: [u64; 2]) {
        let seconds = now.saturating_duration_since(self.at).as_secs_f64();
        self.at = self.at.max(now);
        for (count, rate) in self.counts.iter_mut().zip(rates) {
            *count = if rate > 0 { (*count - seconds * rate as f64).max(0.0) } else { 0.0 };
        }
    }
}

/// Measures one client. A request is charged when it is taken; the next one waits until the charge is paid
/// off at the client's rate.
#[derive(Debug)]
pub struct Meter {
    limit: Arc<Current>,
    owed: Mutex<Owed>,
}

impl Meter {
    /// Returns true if the client is limited at present.
    #[must_use]
    pub fn is_limited(&self) -> bool {
        !self.limit.get().is_none()
    }

    /// Returns when the next request may be taken under the current limit; `None`: at once.
    #[must_use]
    pub fn waits(&self, now: Instant) -> Option<Instant> {
        let rates = self.limit.get().rates();
        let mut owed = self.owed.lock();
        owed.settle(now, rates);
        let waits = owed.counts.iter().zip(rates).filter(|(_, rate)| *rate > 0);
        let longest = waits.map(|(count, rate)| count / rate as f64).fold(0.0, f64::max);
        let until = (owed.at + Duration::from_secs_f64(longest)).checked_sub(AHEAD)?;
        (until > now).then_some(until)
    }

    /// Charges for requests taken and the bytes that they move.
    pub fn charge(&self, now: Instant, operations: u64, bytes: u64) {
        let mut owed = self.owed.lock();
        owed.settle(now, self.limit.get().rates());
        owed.counts[0] += operations as f64;
        owed.counts[1] += bytes as f64;
    }
}

/// The meters of the connected clients of a disk or an export of files, and their limit.
#[derive(Debug, Default)]
pub struct Meters {
    limit: Arc<Current>,
    clients: Mutex<HashMap<ClientKey, Weak<Meter>>>,
}

impl Meters {
    /// Limits each client from now on. Waiting requests have to be looked at again by the caller.
    pub fn set(&self, limit: RateLimit) {
        if self.limit.get() == limit {
            return;
        }
        let (clients, now) = (self.clients.lock(), Instant::now());
        let settle = || {
            let rates = self.limit.get().rates();
            for meter in clients.values().filter_map(Weak::upgrade) {
                meter.owed.lock().settle(now, rates);
            }
        };
        settle();
        self.limit.operations.store(limit.operations, Ordering::Relaxed);
        self.limit.bytes.store(limit.bytes, Ordering::Relaxed);
        // A client without a limit owes nothing.
        settle();
    }

    /// Returns true if clients are limited at present.
    #[must_use]
    pub fn are_limited(&self) -> bool {
        !self.limit.get().is_none()
    }

    /// Returns the meter of a client, the same for all its connections.
    pub fn of(&self, client: ClientKey) -> Arc<Meter> {
        let mut clients = self.clients.lock();
        if let Some(found) = clients.get(&client).and_then(Weak::upgrade) {
            return found;
        }
        clients.retain(|_, meter| meter.strong_count() > 0);
        let owed = Mutex::new(Owed { at: Instant::now(), counts: [0.0; 2] });
        let meter = Arc::new(Meter { limit: self.limit.clone(), owed });
        clients.insert(client, Arc::downgrade(&meter));
        meter
    }
}

#[cfg(test)]
mod tests {
    use super::{AHEAD, ClientKey, Meter, Meters, RateLimit};
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    fn meter(limit: RateLimit) -> (Meters, Arc<Meter>) {
        let meters = Meters::default();
        meters.set(limit);
        let meter = meters.of(ClientKey::Process(1));
        (meters, meter)
    }

    /// Returns how many requests of `bytes` each are taken within `time`, by a simulated clock.
    fn taken(limit: RateLimit, bytes: u64, time: Duration) -> u64 {
        let meter = meter(limit).1;
        let start = Instant::now();
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
            // Longer than the allowed advance: it is taken and paid for afterwards.
            (limit(0, 1 << 20), 1 << 19, 2),
        ] {
            let count = taken(limit, bytes, hour);
            let (least, most) = (rate * 3600, rate * 3600 + rate / 5 + 2);
            assert!((least..=most).contains(&count), "{limit:?}: {count}, not {least}");
        }
    }

    #[test]
    fn who_was_idle_is_not_far_ahead() {
        let meter = meter(RateLimit { operations: 100, bytes: 0 }).1;
        let later = Instant::now() + Duration::from_secs(60);
        let mut count = 0;
        while meter.waits(later).is_none() {
            meter.charge(later, 1, 0);
            count += 1;
        }
        assert_eq!(count, (AHEAD.as_secs_f64() * 100.0) as u64 + 1);
    }

    #[test]
    fn another_limit_holds_at_once_also_for_what_waits() {
        let limit = |bytes| RateLimit { operations: 0, bytes };
        let (meters, meter) = meter(limit(1000));
        let now = Instant::now() + Duration::from_secs(1);
        meter.charge(now, 1, 100_000);
        let left =
            |meter: &Meter| meter.waits(now).map(|until| (until - now).as_secs_f64().round());
        assert_eq!(left(&meter), Some(100.0));
        meters.set(limit(10_000));
        assert_eq!(left(&meter), Some(10.0));
        meters.set(limit(100));
        assert_eq!(left(&meter), Some(1000.0));
        assert!(meter.is_limited());
        meters.set(limit(0));
        assert_eq!((left(&meter), meter.is_limited()), (None, false));
        meter.charge(now, 1, 100_000);
        meters.set(limit(100));
        assert_eq!(left(&meter), None, "what it got without a limit is its own");
    }

    #[test]
    fn a_client_has_one_meter_while_it_is_connected() {
        let meters = Meters::default();
        let (one, other) = (ClientKey::Process(1), ClientKey::Process(2));
        let first = meters.of(one);
        assert!(Arc::ptr_eq(&first, &meters.of(one)));
        assert!(!Arc::ptr_eq(&first, &meters.of(other)));
        drop(first);
        meters.of(other);
        assert_eq!(meters.clients.lock().len(), 1, "those that are gone are forgotten");
    }
}
