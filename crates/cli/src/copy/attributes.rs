//! What of a file besides its bytes a copy takes along.

use super::Preserve;
use super::end::{End, Status};
use super::part::STAMP;
use crate::report::Outcome;
use std::sync::OnceLock;
use towline_client::{Attr, Errno, SetAttr};
use towline_wire::attr::attr_flag::NO_XATTRS;

/// What is to be preserved, and what new files get else.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Wanted {
    /// Permission bits, with those for set-user-ID.
    pub(super) mode: bool,
    /// Times.
    pub(super) times: bool,
    /// User and group.
    pub(super) owner: bool,
    /// Hard links within what is copied.
    pub(super) links: bool,
    /// Extended attributes.
    pub(super) xattr: bool,
    /// The file mode creation mask of this process.
    pub(super) umask: u32,
}

impl Wanted {
    /// From the command line.
    pub(super) fn new(preserve: &[Preserve], umask: u32) -> Self {
        let all = preserve.contains(&Preserve::All);
        let has = |what| all || preserve.contains(&what);
        Self {
            mode: has(Preserve::Mode),
            times: has(Preserve::Times),
            owner: has(Preserve::Owner),
            links: has(Preserve::Links),
            xattr: has(Preserve::Xattr),
            umask,
        }
    }

    /// Permission bits for a new file, or for a directory with its sticky bit; those of a file that is replaced stay.
    pub(super) fn mode(&self, source: &Attr, replaced: Option<&Attr>) -> u32 {
        match replaced {
            _ if self.mode => source.mode & 0o7777,
            Some(attr) => attr.mode & 0o7777,
            None if source.is_directory() => source.mode & 0o1777 & !self.umask,
            None => source.mode & 0o777 & !self.umask,
        }
    }

    /// What remains to be set after a file was created with [`Wanted::mode`].
    pub(super) fn rest(&self, source: &Attr, replaced: Option<&Attr>) -> SetAttr {
        let owner = if self.owner { Some(source) } else { replaced };
        SetAttr {
            mode: (self.mode || replaced.is_some()).then(|| self.mode(source, replaced)),
            uid: owner.map(|attr| attr.uid),
            gid: owner.map(|attr| attr.gid),
            size: None,
            times: self.times.then_some((source.accessed, source.modified)),
        }
    }

    /// Access control list for a copy, with the mode that goes with it: of the source, or of what is replaced. Where
    /// these have none, `has_list` tells whether the copy has one all the same, which must go.
    pub(super) fn access_list(
        &self,
        source: (&End, &Attr),
        replaced: Option<(&End, &Attr)>,
        has_list: impl FnOnce() -> Outcome<bool>,
    ) -> Outcome<Option<AccessList>> {
        let (file, attr) = match replaced {
            _ if self.mode => source,
            Some(replaced) => replaced,
            None => return Ok(None),
        };
        match AccessList::of(file, attr)? {
            None if has_list()? => Ok(Some(AccessList::only_mode())),
            list => Ok(list),
        }
    }

    /// As [`Wanted::rest`], for a link itself, which has no mode.
    pub(super) fn rest_of_link(&self, source: &Attr) -> SetAttr {
        SetAttr { mode: None, ..self.rest(source, None) }
    }
}

/// The access control list of a file that has one, see `acl(5)`: the group's bits of its mode are then the most that anybody named there may,
/// and not what the group may.
pub(super) struct AccessList(Vec<u8>);

const ACCESS_LIST: &str = "system.posix_acl_access";
/// What a directory hands down to what is made in it.
const DEFAULT_LIST: &str = "system.posix_acl_default";
const GROUP_BITS: u32 = 0o070;
/// What lists begin with; a list of nothing else takes away the one that is there.
const VERSION: [u8; 4] = 2u32.to_le_bytes();

impl AccessList {
    fn of(file: &End, attr: &Attr) -> Outcome<Option<Self>> {
        if attr.mode & GROUP_BITS == 0 {
            return Ok(None);
        }
        let list = list_of(file, attr, ACCESS_LIST).map_err(|failure| failure.about(file))?;
        Ok(list.map(Self))
    }

    /// Takes a list away: it says nothing but what a mode says, so the kernel keeps no list. It gives rights to the
    /// owner only, until the mode is set.
    fn only_mode() -> Self {
        const ENTRIES: [(u16, u16); 3] = [(1, 7), (4, 0), (32, 0)];
        let entry = |(tag, rights): (u16, u16)| {
            tag.to_le_bytes().into_iter().chain(rights.to_le_bytes()).chain([0xff; 4])
        };
        Self(VERSION.into_iter().chain(ENTRIES.into_iter().flat_map(entry)).collect())
    }

    /// Gives it to a copy, and what remains to be set; where it cannot be had, the group gets what the list has for it.
    pub(super) fn hand_down(&self, written: &End, set: SetAttr) -> SetAttr {
        match written.set_xattr(ACCESS_LIST.as_bytes(), &self.0) {
            Ok(()) => set,
            Err(_) => SetAttr { mode: set.mode.map(|mode| self.without_list(mode)), ..set },
        }
    }

    /// A mode that says of the group what the list says: its entries have a tag, rights and a number of somebody (`linux/posix_acl_xattr.h`).
    fn without_list(&self, mode: u32) -> u32 {
        const GROUP: [u8; 2] = [4, 0];
        let entries = self.0.get(VERSION.len()..).unwrap_or(&[]).chunks_exact(8);
        let group = entries.filter(|entry| entry[..2] == GROUP).map(|entry| entry[2]).next();
        mode & (!GROUP_BITS | u32::from(group.unwrap_or(0) & 7) << 3)
    }
}

/// An access control list; most files are known to have none without asking.
fn list_of(file: &End, attr: &Attr, which: &str) -> Outcome<Option<Vec<u8>>> {
    if attr.flags & NO_XATTRS != 0 {
        return Ok(None);
    }
    // It may be gone meanwhile.
    let none = [Errno::ENODATA, Errno::EOPNOTSUPP, Errno::ENOENT];
    match file.xattr(which.as_bytes()) {
        Err(failure) if none.iter().any(|errno| failure.is(*errno)) => Ok(None),
        result => result.map(Some),
    }
}

/// Copies what a directory hands down, to where that can be. `has_list` tells whether the copy may hand down something
/// else.
pub(super) fn copy_default_list(
    source: &End,
    attr: &Attr,
    target: &End,
    has_list: bool,
) -> Outcome<()> {
    let list = list_of(source, attr, DEFAULT_LIST).map_err(|failure| failure.about(source))?;
    let list = list.or_else(|| has_list.then(|| VERSION.to_vec()));
    match list.map(|list| target.set_xattr(DEFAULT_LIST.as_bytes(), &list)) {
        Some(Err(failure)) if !failure.is_refusal() => Err(failure),
        _ => Ok(()),
    }
}

/// True when a file has an access control list, or hands one down.
pub(super) fn has_list(file: &End) -> Outcome<bool> {
    match file.xattrs() {
        Err(failure) if failure.is(Errno::EOPNOTSUPP) => Ok(false),
        names => Ok(names?.iter().any(|name| {
            [ACCESS_LIST, DEFAULT_LIST].iter().any(|list| list.as_bytes() == name.as_slice())
        })),
    }
}

/// The directory in which copies are made: whether they inherit an access control list from it.
#[derive(Default)]
pub(super) struct Parent(OnceLock<bool>);

impl Parent {
    /// True when this copy, in the directory or in one made in it, inherits a list. The first call looks.
    pub(super) fn hands_down(&self, copy: &End) -> Outcome<bool> {
        if let Some(known) = self.0.get() {
            return Ok(*known);
        }
        let directory = copy.sibling(b".")?;
        let list = list_of(&directory, &Attr::default(), DEFAULT_LIST);
        let found = list.map_err(|failure| failure.about(&directory))?.is_some();
        Ok(*self.0.get_or_init(|| found))
    }
}

/// Sets what there is to set. An owner that this user may not give is left out, and with it the
/// set-user-ID bits, which would mean another user than in the source.
pub(super) fn set(target: &End, set: &SetAttr) -> Outcome<()> {
    if *set == SetAttr::default() {
        return Ok(());
    }
    match target.set_attr(set) {
        Err(failure) if failure.is(Errno::EPERM) && set.uid.is_some() => {
            let less = without_owner(set);
            if less == SetAttr::default() { Ok(()) } else { target.set_attr(&less) }
        }
        result => result,
    }
}

/// Sets the owner, if there is one to set, as [`set`] does; what remains to be set.
pub(super) fn set_owner(target: &End, set: &SetAttr) -> Outcome<SetAttr> {
    let owner = SetAttr { uid: set.uid, gid: set.gid, ..SetAttr::default() };
    if owner == SetAttr::default() {
        return Ok(*set);
    }
    match target.set_attr(&owner) {
        Err(failure) if failure.is(Errno::EPERM) && set.uid.is_some() => Ok(without_owner(set)),
        result => result.map(|()| SetAttr { uid: None, gid: None, ..*set }),
    }
}

fn without_owner(set: &SetAttr) -> SetAttr {
    SetAttr { uid: None, gid: None, mode: set.mode.map(|mode| mode & 0o1777), ..*set }
}

/// Copies the extended attributes; those of the system that the target refuses are left out.
pub(super) fn copy_xattrs(source: &End, attr: &Attr, target: &End) -> Outcome<()> {
    if attr.flags & NO_XATTRS != 0 {
        return Ok(());
    }
    let names = match source.xattrs() {
        Err(failure) if failure.is(Errno::EOPNOTSUPP) => return Ok(()),
        result => result.map_err(|failure| failure.about(source))?,
    };
    for name in names.iter().filter(|name| name.as_slice() != STAMP.as_bytes()) {
        let value = match source.xattr(name) {
            Err(failure) if failure.is(Errno::ENODATA) => continue,
            result => result.map_err(|failure| failure.about(source))?,
        };
        match target.set_xattr(name, &value) {
            Err(failure) if failure.is_refusal() && !name.starts_with(b"user.") => (),
            Err(failure) => {
                let name = crate::text::escaped(name);
                return Err(failure.with(format_args!("setting extended attribute {name}")));
            }
            Ok(()) => (),
        }
    }
    Ok(())
}

/// True when the target is a copy of this version of the source, going by size and time.
pub(super) fn unchanged(source: &Status, target: &Status) -> bool {
    let (source, target) = (&source.attr, &target.attr);
    target.is_file() && source.size == target.size && source.modified == target.modified
}

#[cfg(test)]
mod tests {
    use super::super::end::FileSystem;
    use super::*;
    use towline_client::Timestamp;

    fn source() -> Attr {
        let modified = Timestamp::new(7, 9);
        Attr { mode: 0o104_775, uid: 1, gid: 2, size: 5, modified, ..Attr::default() }
    }

    #[test]
    fn new_files_obey_the_mask_and_replaced_ones_keep_their_mode() {
        let plain = Wanted { umask: 0o022, ..Wanted::default() };
        assert_eq!(plain.mode(&source(), None), 0o755);
        assert_eq!(plain.rest(&source(), None), SetAttr::default());
        // Without the sticky bit, users could remove each other's files.
        let public = |kind: u32| Attr { mode: kind | 0o3777, ..Attr::default() };
        assert_eq!(plain.mode(&public(0o040_000), None), 0o1755);
        assert_eq!(plain.mode(&public(0o100_000), None), 0o755);
        let old = Attr { mode: 0o100_600, uid: 8, gid: 9, ..Attr::default() };
        assert_eq!(plain.mode(&source(), Some(&old)), 0o600);
        let rest = plain.rest(&source(), Some(&old));
        assert_eq!((rest.mode, rest.uid, rest.gid), (Some(0o600), Some(8), Some(9)));
    }

    #[test]
    fn preserving_sets_what_is_asked_for() {
        let all = Wanted::new(&[Preserve::All], 0o022);
        let set = all.rest(&source(), None);
        assert_eq!((set.mode, set.uid, set.gid), (Some(0o4775), Some(1), Some(2)));
        assert_eq!(set.times.map(|times| times.1), Some(Timestamp::new(7, 9)));
        assert_eq!(without_owner(&set).mode, Some(0o775), "no set-user-ID for another user");
        assert_eq!(all.rest_of_link(&source()).mode, None);
    }

    #[test]
    fn a_copy_is_known_by_size_and_time() {
        let status = |attr| Status { attr, file_system: FileSystem::Local(0), is_followed: false };
        let original = status(Attr { mode: 0o100_644, ..source() });
        let mut copy = original;
        assert!(unchanged(&original, &copy));
        copy.attr.modified.nanoseconds += 1;
        assert!(!unchanged(&original, &copy));
    }
}
