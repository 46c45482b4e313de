//! Serves NBD: a core's connections and their requests.
//!
//! The path of a request: lane ([`lane`]) -> `nbd::Receiver` -> [`serving`] -> engine of disks -> answers
//! ([`answers`]) -> send queue of the lane. Small reads of data in memory skip the engine.

mod answers;
pub(crate) mod driver;
mod in_place;
mod lane;
mod lanes;
mod moving;
mod serving;

use crate::core::{Place, Ticket};
pub(crate) use lane::NbdLane;
pub(crate) use serving::Tag;
use std::sync::Arc;
use std::time::Instant;
use towline_block::{Engine, OwnerKey};
use towline_net::Link;

/// The NBD connections of a core.
pub(crate) struct Nbd {
    lanes: Vec<Option<NbdLane>>,
    free: Vec<usize>,
    /// Lanes with something to send.
    dirty: Vec<usize>,
    /// Empty; swapped with `dirty` to reuse the allocation.
    spare: Vec<usize>,
    /// Lanes with requests that were peeked at but not removed.
    behind: Vec<usize>,
    /// Turns since the first of them was peeked at.
    turns_behind: u32,
    /// Lanes with unread input that can be read again.
    resumable: Vec<usize>,
    /// Lanes that wait for memory for the payload of a write.
    starving: Vec<usize>,
    /// Lanes that have used up their limit, until this time.
    throttled: Vec<(Instant, usize)>,
    /// Some lane may have to be ended because it waits too long.
    ticking: bool,
    in_place: in_place::InPlace,
    ticked: Instant,
}

impl Nbd {
    pub(crate) fn new() -> Self {
        Self {
            lanes: Vec::new(),
            free: Vec::new(),
            dirty: Vec::new(),
            spare: Vec::new(),
            behind: Vec::new(),
            turns_behind: 0,
            resumable: Vec::new(),
            starving: Vec::new(),
            throttled: Vec::new(),
            ticking: false,
            in_place: in_place::InPlace::default(),
            ticked: Instant::now(),
        }
    }

    /// Returns the turn of a connection, and whether it is in the middle of a request.
    pub(crate) fn place_of(&mut self, index: usize) -> Option<(&mut Place, bool)> {
        let lane = self.lanes.get_mut(index)?.as_mut()?;
        let is_within = lane.awaits_payload() || !lane.held.is_empty();
        Some((&mut lane.place, is_within))
    }

    /// Returns the turn of a connection, and whose requests to disks are its own.
    pub(crate) fn place_and_owner(&self, index: usize) -> Option<(&Place, OwnerKey)> {
        let lane = self.lanes.get(index)?.as_ref()?;
        Some((&lane.place, lane.owner))
    }

    /// Returns the link of a connection and its turn.
    pub(crate) fn link_and_place(&mut self, index: usize) -> Option<(&Arc<Link>, &mut Place)> {
        let lane = self.lanes.get_mut(index)?.as_mut()?;
        Some((&lane.link, &mut lane.place))
    }

    /// Returns true if there is something to do without waiting for an event.
    pub(crate) fn is_busy(&self) -> bool {
        !self.resumable.is_empty()
    }

    /// Returns true if some lane needs attention.
    fn has_work(&self) -> bool {
        !self.dirty.is_empty()
            || !self.resumable.is_empty()
            || !self.throttled.is_empty()
            || !self.starving.is_empty()
    }

    /// Returns true if a lane waits for memory; then lanes that hold memory without using it are ended.
    pub(crate) fn is_starving(&self) -> bool {
        !self.starving.is_empty()
    }

    /// Returns true if lanes have to be checked for stalls.
    pub(crate) fn wants_ticks(&self) -> bool {
        self.ticking || self.is_starving()
    }

    /// Notes that limits have changed: all waiting lanes are checked again.
    pub(crate) fn limits_changed(&mut self) {
        let now = Instant::now();
        self.throttled.iter_mut().for_each(|(until, _)| *until = now);
    }

    /// Returns when the first waiting lane may continue.
    pub(crate) fn next_wake(&self) -> Option<Instant> {
        self.throttled.iter().map(|(until, _)| *until).min()
    }

    /// Returns true if requests are under way or answers are unsent.
    pub(crate) fn has_unanswered(&self, engine: &Engine<Ticket>) -> bool {
        self.lanes.iter().flatten().any(|l| !l.is_drained() || engine.requests_of(l.owner) > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::Nbd;
    use super::lane::{NbdLane, Phase};
    use crate::config::{DiskExport, DiskKind};
    use crate::disks::Disks;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;
    use towline_block::{Engine, Limits};
    use towline_mem::Pool;
    use towline_nbd::{
        Agreement, Catalogue, Command, Context, Form, Handler, Receiver, Refusal, Request,
    };
    use towline_net::{Link, LinkKind};

    /// Takes every payload.
    struct Takes;

    impl Handler for Takes {
        fn is_full(&self) -> bool {
            false
        }

        fn command(&mut self, _: Command, _: &Request, _: &[Context]) {}

        fn refuse(&mut self, _: &Request, refusal: Refusal) {
            panic!("{refusal:?}");
        }

        fn write_now(&mut self, _: &Request, _: &[u8]) -> bool {
            false
        }

        fn write_begin(&mut self, _: &Request) -> Result<(), Refusal> {
            Ok(())
        }

        fn put(&mut self, bytes: &[u8]) -> usize {
            bytes.len()
        }
    }

    /// Otherwise a client that has once sent a long write would go before all others from then on.
    #[test]
    fn a_connection_is_within_a_write_only_until_all_of_it_is_there() {
        let disks =
            Disks::new(&[DiskExport::new("disk", DiskKind::Memory(1 << 20))], 4096, None).unwrap();
        let (export, disk) = (disks.find(b"").unwrap(), disks.disk(b"").unwrap());
        let receiver =
            Receiver::new(Agreement { export, form: Form::Simple, contexts: Vec::new() });
        let fragments = Pool::new(4096, 1);
        let small = fragments.beside(512, 1);
        let mut engine = Engine::<()>::new(Limits { fragments, small, owner_bytes_max: 4096 });
        let socket = UnixStream::pair().unwrap().0;
        let link = Arc::new(Link::Socket(socket.into(), LinkKind::Unix));
        let mut lane = NbdLane::new(link, engine.add_owner(), None);
        lane.phase = Phase::Serving(Box::new(receiver), disk);
        let mut nbd = Nbd::new();
        nbd.lanes.push(Some(lane));
        let mut receive = |bytes: &[u8]| {
            let Some(Some(lane)) = nbd.lanes.first_mut() else { panic!("it is there") };
            let Phase::Serving(receiver, _) = &mut lane.phase else { panic!("it serves") };
            assert_eq!(receiver.receive(bytes, &mut Takes).unwrap().used, bytes.len());
            nbd.place_of(0).unwrap().1
        };
        let mut write = 0x2560_9513u32.to_be_bytes().to_vec();
        write.extend_from_slice(&[0, 0, 0, 1]);
        write.extend_from_slice(&[0; 16]);
        write.extend_from_slice(&100u32.to_be_bytes());
        assert!(receive(&write));
        assert!(receive(&[7; 99]));
        assert!(!receive(&[7]), "the write has arrived");
    }
}
