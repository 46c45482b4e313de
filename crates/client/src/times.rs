//! Where the time of requests goes, as a client sees it: T_client + T_network + T_server, in the
//! terms of the papers' cost model. Replies carry T_server; the rest of the round trip counts as
//! network time, with both kernels and all wake-ups.

use std::time::Instant;

/// One request in this many is measured: reading the clock for each would noticeably slow
/// shared-memory round trips.
const EVERY: u32 = 16;

/// Sums over the measured requests, one in 16, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Times {
    /// Number of requests measured.
    pub samples: u64,
    /// Encoding and sending, and from the arrival of the answer until the caller has it.
    pub client_ns: u64,
    /// From the end of sending to the arrival of the answer, less the server's time.
    pub network_ns: u64,
    /// The time that the server reports, from the arrival of a request to its reply.
    pub server_ns: u64,
}

/// Times of the steps of a measured request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stamps {
    started: Instant,
    sent: Option<Instant>,
    /// With the server's time in nanoseconds.
    answered: Option<(Instant, u32)>,
}

impl Stamps {
    /// Starts measuring the request of a slot with this sequence number, if it is one to be
    /// measured.
    pub(crate) fn of(sequence: u32) -> Option<Self> {
        let start = || Self { started: Instant::now(), sent: None, answered: None };
        sequence.is_multiple_of(EVERY).then(start)
    }

    pub(crate) fn sent(&mut self) {
        self.sent = Some(Instant::now());
    }

    pub(crate) fn answered(&mut self, server_ns: u32) {
        self.answered = Some((Instant::now(), server_ns));
    }
}

impl Times {
    /// Adds a request whose caller has its answer. Leaves out a request answered before its sender
    /// could note that it was sent.
    pub(crate) fn finish(&mut self, stamps: &Stamps) {
        let (Some(sent), Some((answered, server_ns))) = (stamps.sent, stamps.answered) else {
            return;
        };
        let ns = |from: Instant, to: Instant| {
            u64::try_from(to.saturating_duration_since(from).as_nanos()).unwrap_or(u64::MAX)
        };
        self.samples += 1;
        self.client_ns += ns(stamps.started, sent) + ns(answered, Instant::now());
        self.network_ns += ns(sent, answered).saturating_sub(server_ns.into());
        self.server_ns += u64::from(server_ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_round_trip_is_split_without_rest() {
        let start = Instant::now();
        let mut stamps = Stamps::of(32).unwrap();
        assert!(Stamps::of(33).is_none());
        stamps.started = start;
        stamps.sent = Some(start + Duration::from_nanos(100));
        let mut times = Times::default();
        times.finish(&stamps);
        assert_eq!(times, Times::default(), "not answered yet");
        stamps.answered = Some((start + Duration::from_nanos(1100), 300));
        times.finish(&stamps);
        assert_eq!((times.samples, times.network_ns, times.server_ns), (1, 700, 300));
        assert!(times.client_ns >= 100);
    }
}
