//! The result of a measurement.

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// Counts and latencies of one client.
pub(crate) struct Measured {
    /// When the ramp ends: nothing but errors is recorded before. `None`: it is over.
    ramp_end: Option<Instant>,
    /// The last operation was recorded.
    is_recorded: bool,
    pub(crate) latencies: Histogram<u64>,
    pub(crate) operations: u64,
    pub(crate) read_bytes: u64,
    pub(crate) written_bytes: u64,
    pub(crate) errors: u64,
    /// When the measurement began, in seconds of the machine's monotonic clock, and how long it took.
    pub(crate) began: f64,
    pub(crate) seconds: f64,
    /// The number of requests whose stages were measured, and the nanoseconds that they spent in the client,
    /// the network and the server.
    pub(crate) stages: [u64; 4],
}

/// [`Measured`] as sent from a client process to its parent.
#[derive(Serialize, Deserialize)]
pub(crate) struct Sent {
    operations: u64,
    read_bytes: u64,
    written_bytes: u64,
    errors: u64,
    began: f64,
    seconds: f64,
    stages: [u64; 4],
    /// Latencies in nanoseconds, each with its count.
    latencies: Vec<(u64, u64)>,
}

fn histogram() -> Histogram<u64> {
    // From one nanosecond to ten minutes.
    Histogram::new_with_bounds(1, 600_000_000_000, 3).expect("these bounds are legal")
}

impl Measured {
    pub(crate) fn new() -> Self {
        let mut latencies = histogram();
        // Writes to all of its memory, which the kernel would otherwise only provide during the measurement.
        latencies.saturating_record(1);
        latencies.reset();
        Self {
            ramp_end: None,
            is_recorded: false,
            latencies,
            operations: 0,
            read_bytes: 0,
            written_bytes: 0,
            errors: 0,
            began: 0.0,
            seconds: 0.0,
            stages: [0; 4],
        }
    }

    /// Starts the measurement, after a ramp of so many seconds.
    pub(crate) fn start(&mut self, ramp: f64) {
        self.began = monotonic();
        self.ramp_end = (ramp > 0.0).then(|| Instant::now() + Duration::from_secs_f64(ramp));
    }

    /// Returns true before the first operation has ended after the ramp.
    pub(crate) fn is_ramping(&self) -> bool {
        self.ramp_end.is_some()
    }

    /// Ends the measurement.
    pub(crate) fn end(&mut self) {
        self.seconds = monotonic() - self.began;
    }

    /// Records one operation, unless it began before the ramp ended.
    pub(crate) fn one(&mut self, took: Duration, failed: bool) {
        self.errors += u64::from(failed);
        self.is_recorded = self.ramp_end.is_none();
        if let Some(end) = self.ramp_end {
            if Instant::now() >= end {
                self.start(0.0);
            }
            return;
        }
        self.operations += 1;
        self.latencies.saturating_record(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
    }

    /// Records the bytes that the last operation read or wrote.
    pub(crate) fn moved(&mut self, writes: bool, bytes: usize) {
        if !self.is_recorded {
            return;
        }
        let sum = if writes { &mut self.written_bytes } else { &mut self.read_bytes };
        *sum += bytes as u64;
    }

    /// Returns the median latency in microseconds.
    pub(crate) fn median_us(&self) -> f64 {
        self.latencies.value_at_quantile(0.5) as f64 / 1000.0
    }

    pub(crate) fn to_sent(&self) -> Sent {
        let latencies = self
            .latencies
            .iter_recorded()
            .map(|v| (v.value_iterated_to(), v.count_at_value()))
            .collect();
        let &Self { operations, read_bytes, written_bytes, errors, began, seconds, stages, .. } =
            self;
        Sent { operations, read_bytes, written_bytes, errors, began, seconds, stages, latencies }
    }
}

impl Sent {
    pub(crate) fn into_measured(self) -> Measured {
        let mut latencies = histogram();
        for (value, count) in self.latencies {
            latencies.saturating_record_n(value, count);
        }
        let Self { operations, read_bytes, written_bytes, errors, began, seconds, stages, .. } =
            self;
        Measured {
            ramp_end: None,
            is_recorded: false,
            latencies,
            operations,
            read_bytes,
            written_bytes,
            errors,
            began,
            seconds,
            stages,
        }
    }
}

/// Returns the time in seconds, by a clock that all processes of a machine share.
pub(super) fn monotonic() -> f64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as f64 + now.tv_nsec as f64 / 1e9
}

/// Summarises a run of one or more clients as a JSON object. If processors are scarce, processes start one
/// after the other; the time counts from the start of the first to the end of the last.
pub(crate) fn summary(clients: &[Measured]) -> serde_json::Value {
    let mut latencies = histogram();
    let (mut fair_min, mut fair_max) = (f64::INFINITY, 0.0f64);
    let (mut began, mut ended) = (f64::INFINITY, 0.0f64);
    let sum = |count: fn(&Measured) -> u64| clients.iter().map(count).sum::<u64>();
    for client in clients {
        // All histograms have the same bounds, so adding cannot fail.
        let _ = latencies.add(&client.latencies);
        let bytes = client.read_bytes + client.written_bytes;
        let amount = if bytes > 0 { bytes } else { client.operations };
        let rate = amount as f64 / client.seconds.max(1e-9);
        fair_min = fair_min.min(rate);
        fair_max = fair_max.max(rate);
        began = began.min(client.began);
        ended = ended.max(client.began + client.seconds);
    }
    let samples: u64 = clients.iter().map(|c| c.stages[0]).sum();
    // The mean over all measured requests; an operation may take several requests.
    let stage = |number: usize| {
        let sum: u64 = clients.iter().map(|c| c.stages[number]).sum();
        sum as f64 / samples.max(1) as f64 / 1000.0
    };
    let us = |quantile| latencies.value_at_quantile(quantile) as f64 / 1000.0;
    serde_json::json!({
        "ops": sum(|c| c.operations),
        "bytes": sum(|c| c.read_bytes + c.written_bytes),
        "rbytes": sum(|c| c.read_bytes),
        "wbytes": sum(|c| c.written_bytes),
        "secs": (ended - began).max(0.0),
        "p50_us": us(0.5), "p99_us": us(0.99), "p999_us": us(0.999),
        "max_us": latencies.max() as f64 / 1000.0,
        "mean_us": latencies.mean() / 1000.0,
        "fair_min": fair_min, "fair_max": fair_max,
        "T_client_us": stage(1), "T_network_us": stage(2), "T_server_us": stage(3),
        "errors": sum(|c| c.errors),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_but_errors_is_recorded_before_the_first_operation_that_begins_after_the_ramp() {
        let mut measured = Measured::new();
        let one = |measured: &mut Measured, failed| {
            measured.one(Duration::from_micros(1), failed);
            measured.moved(true, 10);
            (measured.operations, measured.written_bytes, measured.latencies.len())
        };
        measured.start(3600.0);
        assert_eq!(one(&mut measured, true), (0, 0, 0));
        let began = measured.began;
        measured.ramp_end = Some(Instant::now());
        assert_eq!(one(&mut measured, false), (0, 0, 0), "it began before");
        assert!(!measured.is_ramping() && measured.began > began);
        assert_eq!(one(&mut measured, false), (1, 10, 1));
        assert_eq!(measured.errors, 1);
        measured.start(0.0);
        assert_eq!(one(&mut measured, false), (2, 20, 2), "there is no ramp");
    }

    #[test]
    fn results_survive_the_way_between_processes() {
        let mut measured = Measured::new();
        for us in 1..=100 {
            measured.one(Duration::from_micros(us), us == 7);
        }
        measured.seconds = 1.0;
        let text = serde_json::to_string(&measured.to_sent()).unwrap();
        let back = serde_json::from_str::<Sent>(&text).unwrap().into_measured();
        let summary = summary(&[back]);
        assert_eq!((summary["ops"].as_u64(), summary["errors"].as_u64()), (Some(100), Some(1)));
        assert!((summary["p50_us"].as_f64().unwrap() - 50.0).abs() < 0.1);
    }
}
