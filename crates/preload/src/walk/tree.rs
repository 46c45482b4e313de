//! Where in a tree a walk is, and which directories it is to open next.

use towline_client::DirEntry;
use towline_wire::Attr;

/// Maximum number of sub-directories remembered for a directory.
const CHILDREN_MAX: usize = 4096;
/// Maximum number of directories above the current one that are remembered.
const ABOVE_MAX: usize = 64;
/// Bounds of the score that tells in which order the program goes.
const SCORE_MAX: i32 = 4;

/// What a program names a directory by: an open directory and the path from there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Name {
    pub(super) mount: usize,
    pub(super) base: u64,
    pub(super) path: Vec<u8>,
}

/// A directory with its sub-directories.
#[derive(Debug)]
pub(super) struct Listed {
    name: Name,
    handle: u64,
    identity: u64,
    /// As listed, and the places of all in the order of their names.
    children: Vec<Vec<u8>>,
    by_name: Vec<usize>,
    /// How many the program has gone past, in either order.
    past: usize,
    past_by_name: usize,
    /// The one that it has opened last.
    last: Option<usize>,
    /// Number of directories opened before what is below this one.
    before: usize,
}

impl Listed {
    pub(super) fn new(name: Name, handle: u64, attr: &Attr, entries: &[DirEntry]) -> Self {
        let (children, by_name) = (Vec::new(), Vec::new());
        let (past, past_by_name, last, before) = (0, 0, None, 0);
        let identity = attr.identity();
        let mut this =
            Self { name, handle, identity, children, by_name, past, past_by_name, last, before };
        this.extend(entries);
        this
    }

    fn extend(&mut self, entries: &[DirEntry]) {
        let is_child = |entry: &&DirEntry| {
            entry.file_type == libc::DT_DIR && entry.name != b"." && entry.name != b".."
        };
        let room = CHILDREN_MAX.saturating_sub(self.children.len());
        let new = entries.iter().filter(is_child).take(room);
        self.children.extend(new.map(|entry| entry.name.clone()));
        if self.by_name.len() != self.children.len() {
            self.by_name = (0..self.children.len()).collect();
            self.by_name.sort_unstable_by_key(|place| &self.children[*place]);
            let is_last = |place: &usize| Some(*place) == self.last;
            self.past_by_name = self.by_name.iter().position(is_last).map_or(0, |at| at + 1);
        }
    }

    /// Returns the place of the sub-directory with this name, and whether it is named by the open directory.
    fn child(&self, name: &Name) -> Option<(usize, bool)> {
        if name.mount != self.name.mount {
            return None;
        }
        let by_handle = name.base == self.handle;
        let rest = if by_handle {
            &name.path[..]
        } else if name.base != self.name.base {
            return None;
        } else if self.name.path.is_empty() {
            &name.path[..]
        } else {
            name.path.strip_prefix(&self.name.path[..])?.strip_prefix(b"/")?
        };
        let place = self.children.iter().position(|child| child == rest)?;
        Some((place, by_handle))
    }

    fn name_of(&self, place: usize, by_handle: bool) -> Name {
        let (mount, child) = (self.name.mount, &self.children[place]);
        if by_handle {
            return Name { mount, base: self.handle, path: child.clone() };
        }
        let mut path = self.name.path.clone();
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(child);
        Name { mount, base: self.name.base, path }
    }

    /// Goes past a sub-directory; returns whether it was the next one as listed, and by name.
    fn go_past(&mut self, place: usize) -> (bool, bool) {
        let rank = self.by_name.iter().position(|of| *of == place).unwrap_or(0);
        let is_next = (place == self.past, rank == self.past_by_name);
        (self.past, self.past_by_name, self.last) = (place + 1, rank + 1, Some(place));
        is_next
    }

    /// Returns the places of the sub-directories that are still to come.
    fn rest(&self, by_name: bool) -> impl Iterator<Item = usize> + '_ {
        let listed = (self.past..self.children.len()).filter(move |_| !by_name);
        let named = self.by_name.get(self.past_by_name..).unwrap_or_default();
        listed.chain(named.iter().copied().filter(move |_| by_name))
    }
}

/// How a directory follows the one before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Step {
    /// It is the next sub-directory of one that was listed.
    Next,
    /// It was the last one, too.
    Again,
    Elsewhere,
}

/// The directories from the root of a walk to the current one.
pub(super) struct Tree {
    above: Vec<Listed>,
    /// For each level, how many directories there were below the last directory that the program has left.
    sizes: Vec<usize>,
    /// Number of directories opened.
    count: usize,
    /// Positive if the program goes in the order of listings, negative if by name.
    score: i32,
    /// It names directories by the open directory above.
    by_handle: bool,
}

impl Tree {
    pub(super) const fn new() -> Self {
        Self { above: Vec::new(), sizes: Vec::new(), count: 0, score: 0, by_handle: false }
    }

    /// Notes that the program opens a directory.
    pub(super) fn goes_to(&mut self, name: &Name) -> Step {
        let found = self.above.iter().enumerate().rev();
        let found = found.filter_map(|(place, one)| Some((place, one.child(name)?))).next();
        let Some((place, (child, by_handle))) = found else {
            self.above.clear();
            self.sizes.clear();
            return Step::Elsewhere;
        };
        // A walk goes down first: it is done with the others, and with what lies below them.
        for (level, left) in self.above.iter().enumerate().skip(place + 1) {
            self.sizes.resize(self.sizes.len().max(level + 1), 0);
            self.sizes[level] = self.count - left.before;
        }
        self.above.truncate(place + 1);
        self.by_handle = by_handle;
        let listed = &mut self.above[place];
        if listed.last == Some(child) {
            return Step::Again;
        }
        let (as_listed, by_name) = listed.go_past(child);
        self.score += i32::from(as_listed) - i32::from(by_name);
        self.score = self.score.clamp(-SCORE_MAX, SCORE_MAX);
        if as_listed || by_name { Step::Next } else { Step::Elsewhere }
    }

    /// Adds the directory that was opened.
    pub(super) fn add(&mut self, mut listed: Listed) {
        if self.above.len() == ABOVE_MAX {
            self.above.remove(0);
            self.sizes.clear();
        }
        self.count += 1;
        listed.before = self.count;
        self.above.push(listed);
    }

    /// Returns the identity of a directory.
    pub(super) fn identity(&self, name: &Name) -> Option<u64> {
        Some(self.above.iter().rev().find(|listed| listed.name == *name)?.identity)
    }

    /// Adds further entries of an open directory.
    pub(super) fn extend(&mut self, mount: usize, handle: u64, entries: &[DirEntry]) {
        let is_it = |one: &&mut Listed| one.handle == handle && one.name.mount == mount;
        if let Some(listed) = self.above.iter_mut().rev().find(is_it) {
            listed.extend(entries);
        }
    }

    /// Returns how many directories to expect below one of this level.
    fn size(&self, level: usize) -> usize {
        let current = || self.above.get(level).map_or(0, |listed| listed.children.len());
        self.sizes.get(level).copied().unwrap_or_else(current)
    }

    /// Returns those of the next `most` directories that are to be requested. `known` tells which were requested
    /// already, and what is in them if that is known. Those that are still under way count as large as others of
    /// their level: what is behind them would be too old when it is wanted.
    pub(super) fn upcoming<'a>(
        &'a self,
        most: usize,
        known: impl Fn(&Name) -> Option<Option<&'a Listed>>,
    ) -> Vec<Name> {
        let (mut names, mut room) = (Vec::new(), most);
        for (level, listed) in self.above.iter().enumerate().rev() {
            self.below(listed, level + 1, &known, &mut room, &mut names);
        }
        names
    }

    /// Adds those below a directory; `level` is theirs.
    fn below<'a>(
        &self,
        listed: &Listed,
        level: usize,
        known: &impl Fn(&Name) -> Option<Option<&'a Listed>>,
        room: &mut usize,
        names: &mut Vec<Name>,
    ) {
        for child in listed.rest(self.score < 0) {
            if *room == 0 {
                return;
            }
            let name = listed.name_of(child, self.by_handle);
            let known_as = known(&name);
            if let Some(Some(listed)) = known_as {
                *room -= 1;
                self.below(listed, level + 1, known, room, names);
                continue;
            }
            *room = room.saturating_sub(1 + self.size(level));
            if known_as.is_none() {
                names.push(name);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory with this handle and path, and sub-directories of these names.
    fn listed(handle: u64, path: &str, names: &[&str]) -> Listed {
        let name = Name { mount: 0, base: 1, path: path.into() };
        let mut listed = Listed::new(name, handle, &Attr::default(), &[]);
        listed.children = names.iter().map(|name| name.as_bytes().to_vec()).collect();
        listed.by_name = (0..names.len()).collect();
        listed.by_name.sort_by_key(|place| names[*place]);
        listed
    }

    fn name(base: u64, path: &str) -> Name {
        Name { mount: 0, base, path: path.into() }
    }

    /// Goes to a directory by its path and adds it with these sub-directories.
    fn go(tree: &mut Tree, path: &str, names: &[&str]) -> Step {
        let step = tree.goes_to(&name(1, path));
        tree.add(listed(2 + tree.count as u64, path, names));
        step
    }

    fn upcoming(tree: &Tree, most: usize) -> Vec<String> {
        let names = tree.upcoming(most, |_| None);
        names.into_iter().map(|name| String::from_utf8_lossy(&name.path).into_owned()).collect()
    }

    #[test]
    fn the_order_is_that_of_the_listing_or_of_the_names() {
        let names = ["c", "a", "d", "b", "e"];
        let mut tree = Tree::new();
        assert_eq!(go(&mut tree, "", &names), Step::Elsewhere);
        assert_eq!(go(&mut tree, "a", &[]), Step::Next);
        assert_eq!(go(&mut tree, "b", &[]), Step::Next);
        assert_eq!(go(&mut tree, "b", &[]), Step::Again);
        assert_eq!(upcoming(&tree, 9), ["c", "d", "e"]);
        let mut tree = Tree::new();
        go(&mut tree, "", &names);
        assert_eq!(go(&mut tree, "c", &[]), Step::Next);
        assert_eq!(go(&mut tree, "a", &[]), Step::Next);
        assert_eq!(upcoming(&tree, 9), ["d", "b", "e"]);
        assert_eq!(upcoming(&tree, 2), ["d", "b"]);
        assert_eq!(go(&mut tree, "e", &[]), Step::Elsewhere);
        assert_eq!(upcoming(&tree, 9), [""; 0]);
    }

    #[test]
    fn a_walk_goes_down_first() {
        let mut tree = Tree::new();
        go(&mut tree, "", &["a", "b", "c", "d"]);
        go(&mut tree, "a", &["x", "y"]);
        // What is below `b` counts, although it is not known: as much as is below `a`.
        assert_eq!(upcoming(&tree, 4), ["a/x", "a/y", "b"]);
        assert_eq!(upcoming(&tree, 6), ["a/x", "a/y", "b", "c"]);
        let b = listed(9, "b", &["p", "q"]);
        let known = |one: &Name| (*one == name(1, "b")).then_some(Some(&b));
        let names = tree.upcoming(6, known);
        let paths: Vec<&[u8]> = names.iter().map(|name| &name.path[..]).collect();
        assert_eq!(paths, [&b"a/x"[..], b"a/y", b"b/p", b"b/q", b"c"]);
        go(&mut tree, "a/x", &[]);
        assert_eq!(go(&mut tree, "b", &[]), Step::Next);
        // There was only one below `a`, and there are none below that.
        assert_eq!(upcoming(&tree, 3), ["c", "d"]);
    }

    #[test]
    fn directories_are_named_as_the_program_names_them() {
        let mut tree = Tree::new();
        tree.add(listed(7, "t", &["a", "b"]));
        assert_eq!(tree.goes_to(&name(7, "a")), Step::Next);
        assert_eq!(tree.upcoming(1, |_| None), [name(7, "b")]);
        assert_eq!(tree.goes_to(&name(8, "b")), Step::Elsewhere, "another directory");
        let mut tree = Tree::new();
        tree.add(listed(7, "t", &["a", "b"]));
        assert_eq!(tree.goes_to(&name(1, "t/a")), Step::Next);
        assert_eq!(tree.upcoming(1, |_| None), [name(1, "t/b")]);
    }
}
