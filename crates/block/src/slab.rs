//! A table whose keys become invalid when their entry is removed.

/// Key of an entry: its index, and a number that changes each time the index is reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub(crate) place: u32,
    pub(crate) generation: u32,
}

impl Key {
    pub(crate) fn to_bits(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.place)
    }

    pub(crate) fn from_bits(bits: u64) -> Self {
        Self { place: bits as u32, generation: (bits >> 32) as u32 }
    }
}

#[derive(Debug)]
struct Entry<T> {
    generation: u32,
    value: Option<T>,
}

#[derive(Debug)]
pub(crate) struct Slab<T> {
    entries: Vec<Entry<T>>,
    free: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { entries: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slab<T> {
    pub(crate) fn insert(&mut self, value: T) -> Key {
        let place = self.free.pop().unwrap_or_else(|| {
            self.entries.push(Entry { generation: 0, value: None });
            self.entries.len() as u32 - 1
        });
        let entry = &mut self.entries[place as usize];
        entry.value = Some(value);
        Key { place, generation: entry.generation }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.free.len() == self.entries.len()
    }

    pub(crate) fn get(&self, key: Key) -> Option<&T> {
        let entry = self.entries.get(key.place as usize)?;
        if entry.generation == key.generation { entry.value.as_ref() } else { None }
    }

    pub(crate) fn get_mut(&mut self, key: Key) -> Option<&mut T> {
        let entry = self.entries.get_mut(key.place as usize)?;
        if entry.generation == key.generation { entry.value.as_mut() } else { None }
    }

    pub(crate) fn remove(&mut self, key: Key) -> Option<T> {
        let entry = self.entries.get_mut(key.place as usize)?;
        if entry.generation != key.generation {
            return None;
        }
        let value = entry.value.take()?;
        entry.generation = entry.generation.wrapping_add(1);
        self.free.push(key.place);
        Some(value)
    }
}
