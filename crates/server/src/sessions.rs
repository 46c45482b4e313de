//! The sessions of a core, by number. Each request looks up its session in several places; the one that was
//! looked up last is found at once.

use crate::grants::Served;
use foldhash::fast::RandomState;
use std::collections::HashMap;

/// The sessions of a core.
#[derive(Default)]
pub(crate) struct Sessions {
    places: HashMap<u64, usize, RandomState>,
    served: Vec<Option<Served>>,
    free: Vec<usize>,
    /// Index of the session that was looked up last.
    last: usize,
}

impl Sessions {
    /// Returns true if this session was looked up last.
    fn is_last(&self, id: u64) -> bool {
        matches!(self.served.get(self.last), Some(Some(served)) if served.session.id == id)
    }

    pub(crate) fn get(&self, id: u64) -> Option<&Served> {
        let place = if self.is_last(id) { self.last } else { *self.places.get(&id)? };
        self.served.get(place)?.as_ref()
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, id: u64) -> Option<&mut Served> {
        if !self.is_last(id) {
            self.last = *self.places.get(&id)?;
        }
        self.served.get_mut(self.last)?.as_mut()
    }

    /// Adds a session under its own number, which no other session may have.
    pub(crate) fn insert(&mut self, served: Served) {
        let place = self.free.pop().unwrap_or_else(|| {
            self.served.push(None);
            self.served.len() - 1
        });
        self.places.insert(served.session.id, place);
        self.served[place] = Some(served);
    }

    pub(crate) fn remove(&mut self, id: u64) -> Option<Served> {
        let place = self.places.remove(&id)?;
        self.free.push(place);
        self.served[place].take()
    }

    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Served> {
        self.served.iter().flatten()
    }

    pub(crate) fn all_mut(&mut self) -> impl Iterator<Item = &mut Served> {
        self.served.iter_mut().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use towline_session::Session;

    #[test]
    fn each_is_found_by_its_number_until_it_is_removed() {
        let mut sessions = Sessions::default();
        let new = |id| Served::new(Session::new(id, 0, 1), id);
        let lane = |served: Option<&mut Served>| served.map(|served| served.lane);
        (1..5).for_each(|id| sessions.insert(new(id)));
        for id in [3, 3, 1, 4, 3] {
            assert_eq!(lane(sessions.get_mut(id)), Some(Some(id)));
        }
        assert!(sessions.remove(3).is_some() && sessions.remove(3).is_none());
        assert!(sessions.get_mut(3).is_none() && sessions.get(3).is_none());
        // Reuses the place that was looked up last.
        sessions.insert(new(9));
        assert_eq!(lane(sessions.get_mut(3)), None);
        assert_eq!(lane(sessions.get_mut(9)), Some(Some(9)));
        assert_eq!(sessions.get(2).map(|served| served.lane), Some(Some(2)));
        assert_eq!(sessions.all().count(), 4);
    }
}
