//! Peeks at short requests on a Unix socket, and takes several of them together.
//!
//! Receiving from a Unix socket returns the message's memory to the sender, and the kernel wakes a
//! sender that waits on that socket, even if it waits in `read` for the answer. The sender finds nothing
//! and sleeps again, which takes a fifth of the time of a small request if both run on one processor. So
//! requests that arrive one by one are only peeked at. They are taken several at a time, when the answer
//! to the last one has left and the client waits for nothing.

use crate::{Counters, Link, LinkKind};
use std::io;

/// A lone message of at most this length is a request without data.
const SHORT_BYTES: usize = 32;
/// Short receives in a row before the next one only peeks.
const SHORT_BEFORE: u8 = 4;
/// Upper limit of that number. It grows when data is taken after a single peek, which costs an
/// additional system call and saves no wake-up.
const SHORT_BEFORE_MAX: u8 = 252;
/// Most bytes peeked at before they are taken. The kernel goes through all of them at each peek.
const LOOKED_BYTES_MAX: usize = 512;
/// Most peeks before the data is taken, however little they found.
const LOOKS_MAX: u8 = 32;

/// What was peeked at on a link and not taken yet.
#[derive(Debug)]
pub struct Glance {
    /// Bytes peeked at, and the number of peeks that found them.
    looked: usize,
    looks: u8,
    /// Short receives in a row, and the number needed before peeking.
    short: u8,
    before: u8,
    /// The socket keeps track of the peek position.
    begun: bool,
}

impl Default for Glance {
    fn default() -> Self {
        Self { looked: 0, looks: 0, short: 0, before: SHORT_BEFORE, begun: false }
    }
}

impl Glance {
    /// Like [`Link::receive`], but the data may stay in the socket until [`Glance::take`].
    ///
    /// # Errors
    /// See [`Link::receive`].
    pub fn receive(
        &mut self,
        link: &Link,
        target: &mut [u8],
        counters: &Counters,
    ) -> io::Result<usize> {
        let count = if self.short >= self.before && !self.is_full() && self.begin(link) {
            let most = target.len().min(LOOKED_BYTES_MAX);
            let count = link.look(&mut target[..most], counters)?;
            self.looked += count;
            self.looks += 1;
            if count < most {
                count
            } else {
                count + self.rest(link, &mut target[most..], counters)?
            }
        } else {
            self.take(link, counters)?;
            link.receive(target, counters)?
        };
        let is_short = count <= SHORT_BYTES && link.kind() == LinkKind::Unix;
        self.short = if is_short { self.short.saturating_add(1) } else { 0 };
        Ok(count)
    }

    /// Receives what follows the data that could be peeked at.
    fn rest(&mut self, link: &Link, target: &mut [u8], counters: &Counters) -> io::Result<usize> {
        self.take(link, counters)?;
        loop {
            match link.receive(target, counters) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(0),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => return other,
            }
        }
    }

    /// Makes the socket keep track of the peek position; false if it cannot.
    fn begin(&mut self, link: &Link) -> bool {
        self.begun = self.begun || link.begin_to_look().is_ok();
        self.begun
    }

    /// True when data was peeked at and not taken.
    #[must_use]
    pub fn is_behind(&self) -> bool {
        self.looked > 0
    }

    /// True when the data peeked at should be taken as soon as it is answered.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.looked + SHORT_BYTES > LOOKED_BYTES_MAX || self.looks >= LOOKS_MAX
    }

    /// Returns all that can be received, and leaves it in the socket.
    ///
    /// # Errors
    /// What the socket says.
    pub fn unread(&mut self, link: &Link, counters: &Counters) -> io::Result<Vec<u8>> {
        self.take(link, counters)?;
        let unread = link.unread(counters)?;
        if self.begun {
            link.begin_to_look()?;
        }
        Ok(unread)
    }

    /// Takes the data peeked at. Must be called before receiving in any other way, before closing the
    /// link (otherwise the peer's connection is reset), and before sleeping: a client with a small
    /// socket buffer may wait for that memory.
    ///
    /// # Errors
    /// What the socket says.
    pub fn take(&mut self, link: &Link, counters: &Counters) -> io::Result<()> {
        match std::mem::take(&mut self.looks) {
            0 => return Ok(()),
            1 => {
                let twice = self.before.saturating_mul(2).saturating_add(SHORT_BEFORE);
                self.before = twice.min(SHORT_BEFORE_MAX);
                self.short = 0;
            }
            _ => self.before = SHORT_BEFORE,
        }
        while self.looked > 0 {
            let mut taken = [0; LOOKED_BYTES_MAX];
            let most = self.looked.min(taken.len());
            match link.take(&mut taken[..most], counters) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.looked -= count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    fn pair() -> (Link, UnixStream) {
        let (near, far) = UnixStream::pair().unwrap();
        far.set_nonblocking(true).unwrap();
        (Link::Socket(near.into(), LinkKind::Unix), far)
    }

    fn calls(counters: &Counters) -> u64 {
        counters.system_calls.load(std::sync::atomic::Ordering::Relaxed)
    }

    #[test]
    fn nothing_is_lost_or_seen_twice() {
        let (link, mut far) = pair();
        let (mut glance, counters) = (Glance::default(), Counters::default());
        let (mut sent, mut received) = (Vec::new(), Vec::new());
        let (mut behind, mut state) = (0, 1u64);
        for round in 0..4000u64 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(round);
            // Mostly single short messages, some in groups, some long.
            let (messages, length) = match state >> 40 & 0xff {
                0..4 => (1, 3000),
                4..16 => (20, 28),
                16..20 => (0, 0),
                _ => (1, 28),
            };
            for _ in 0..messages {
                let message: Vec<u8> = (0..length).map(|at| (state >> (at % 57)) as u8).collect();
                far.write_all(&message).unwrap();
                sent.extend(message);
            }
            let mut target = [0; 4096];
            // A short receive means that nothing is left.
            if let Ok(count) = glance.receive(&link, &mut target, &counters) {
                received.extend_from_slice(&target[..count]);
            }
            assert!(received == sent, "round {round}");
            behind += u32::from(glance.is_behind());
            if state >> 50 & 0x3f == 0 {
                glance.take(&link, &counters).unwrap();
                assert!(!glance.is_behind());
            }
        }
        assert!(behind > 1000, "only {behind} of 4000 rounds looked");
        drop(far);
        assert_eq!(glance.receive(&link, &mut [0; 64], &counters).unwrap(), 0, "the end is seen");
    }

    #[test]
    fn requests_are_taken_together_and_the_peer_is_not_reset() {
        let (link, mut far) = pair();
        let (mut glance, counters) = (Glance::default(), Counters::default());
        let (mut takes, mut target) = (0, [0; 4096]);
        for _ in 0..1000 {
            far.write_all(&[7; 28]).unwrap();
            assert_eq!(glance.receive(&link, &mut target, &counters).unwrap(), 28);
            if glance.is_full() {
                glance.take(&link, &counters).unwrap();
                takes += 1;
            }
        }
        assert!((50..70).contains(&takes), "{takes}");
        assert_eq!(calls(&counters), 1000 + takes);
        glance.take(&link, &counters).unwrap();
        drop(link);
        assert_eq!(far.read(&mut target).unwrap(), 0);
    }

    #[test]
    fn what_is_unread_is_received_afterwards() {
        let (link, mut far) = pair();
        let (mut glance, counters) = (Glance::default(), Counters::default());
        let mut target = [0; 4096];
        for number in 0..100 {
            far.write_all(&[number; 28]).unwrap();
            assert_eq!(glance.receive(&link, &mut target, &counters).unwrap(), 28);
            assert_eq!(glance.unread(&link, &counters).unwrap(), []);
            let following = [[number; 28], [number + 1; 28]].concat();
            far.write_all(&following).unwrap();
            far.write_all(&following).unwrap();
            for _ in 0..2 {
                assert_eq!(glance.unread(&link, &counters).unwrap(), following.repeat(2));
            }
            assert_eq!(glance.receive(&link, &mut target, &counters).unwrap(), 112);
            assert_eq!(target[..112], following.repeat(2));
        }
        drop(far);
        assert_eq!(glance.unread(&link, &counters).unwrap(), []);
    }

    #[test]
    fn requests_in_pieces_are_taken_though_they_are_few_bytes() {
        let (link, mut far) = pair();
        let (mut glance, counters) = (Glance::default(), Counters::default());
        let mut most = 0;
        for _ in 0..1000 {
            far.write_all(&[7]).unwrap();
            assert_eq!(glance.receive(&link, &mut [0; 4096], &counters).unwrap(), 1);
            most = most.max(glance.looked);
        }
        assert_eq!(most, usize::from(LOOKS_MAX));
    }

    #[test]
    fn who_takes_after_each_look_looks_rarely() {
        let (link, mut far) = pair();
        let (mut glance, counters) = (Glance::default(), Counters::default());
        for _ in 0..10_000 {
            far.write_all(&[7; 28]).unwrap();
            assert_eq!(glance.receive(&link, &mut [0; 4096], &counters).unwrap(), 28);
            glance.take(&link, &counters).unwrap();
        }
        assert!((10_020..10_080).contains(&calls(&counters)), "{}", calls(&counters));
    }

    #[test]
    fn other_links_are_only_received_from() {
        let (near, mut far) = UnixStream::pair().unwrap();
        let link = Link::Socket(near.into(), LinkKind::Tcp);
        let (mut glance, counters) = (Glance::default(), Counters::default());
        for _ in 0..100 {
            far.write_all(&[7; 28]).unwrap();
            assert_eq!(glance.receive(&link, &mut [0; 4096], &counters).unwrap(), 28);
            assert!(!glance.is_behind());
        }
    }
}
