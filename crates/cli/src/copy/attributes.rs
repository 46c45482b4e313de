//! Attributes that a copy takes from its source, besides the bytes.

use super::Preserve;
use super::end::{End, Status};
use super::part::STAMP;
use crate::report::{Failure, Outcome, Report};
use crate::text;
use std::sync::OnceLock;
use towline_client::{Attr, Errno, SetAttr};
use towline_wire::attr::attr_flag::NO_XATTRS;

/// Which attributes to preserve, and the mask for new files where the mode is not preserved.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Wanted {
    /// Permission bits, including set-user-ID, set-group-ID and the sticky bit.
    pub(super) mode: bool,
    /// Times.
    pub(super) times: bool,
    /// User and group.
    pub(super) owner: bool,
    /// Hard links among the files copied.
    pub(super) links: bool,
    /// Extended attributes.
    pub(super) xattr: bool,
    /// The file mode creation mask of this process.
    pub(super) umask: u32,
}

impl Wanted {
    /// Builds the set from the arguments of `--preserve`.
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

    /// Returns the permission bits of a copy. Without `mode`, a replaced file's bits stay, and new
    /// directories keep the sticky bit.
    pub(super) fn mode(&self, source: &Attr, replaced: Option<&Attr>) -> u32 {
        match replaced {
            _ if self.mode => source.mode & 0o7777,
            Some(attr) => attr.mode & 0o7777,
            None if source.is_directory() => source.mode & 0o1777 & !self.umask,
            None => source.mode & 0o777 & !self.umask,
        }
    }

    /// Returns the permission bits with which a copy of a file is created. If [`Wanted::rest`] sets its mode, only
    /// its owner has rights until it has everything else, and it is no set-user-ID file of a user to whom it does
    /// not belong in the end.
    pub(super) fn mode_before(&self, source: &Attr, replaced: Option<&Attr>) -> u32 {
        match self.rest(source, replaced).mode {
            Some(_) => 0o600,
            None => self.mode(source, replaced),
        }
    }

    /// Returns the attributes still to set on a new copy.
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

    /// Returns the access control list to set on a copy, together with its mode: the list of the source, or
    /// of the replaced file. Where that file has none, `has_list` tells whether the copy has inherited one,
    /// which is then taken away.
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
        match list_of(file, attr, ACCESS_LIST).map_err(|failure| failure.about(file))? {
            None if has_list()? => Ok(Some(AccessList::only_mode())),
            list => Ok(list.map(AccessList)),
        }
    }

    /// Like [`Wanted::rest`], but for a symbolic link, which has no mode.
    pub(super) fn rest_of_link(&self, source: &Attr) -> SetAttr {
        SetAttr { mode: None, ..self.rest(source, None) }
    }
}

/// An access control list, see `acl(5)`. The group bits of the file's mode are then the mask: the most that
/// the group and everyone named in the list may do, and not the group's own rights.
pub(super) struct AccessList(Vec<u8>);

const ACCESS_LIST: &str = "system.posix_acl_access";
/// The list that files made in a directory inherit.
const DEFAULT_LIST: &str = "system.posix_acl_default";
const GROUP_BITS: u32 = 0o070;
/// Tags of entries.
const OWNER: u8 = 1;
const GROUP: u8 = 4;
const MASK: u8 = 16;
const OTHERS: u8 = 32;
/// The version with which lists begin. Setting a list without entries removes the one that is there.
const VERSION: [u8; 4] = 2u32.to_le_bytes();

impl AccessList {
    /// Returns a list that takes an inherited one away: a mode can say the same, so the kernel stores no
    /// list. It gives rights to the owner only; the mode is set afterwards.
    fn only_mode() -> Self {
        const ENTRIES: [(u16, u16); 3] = [(1, 7), (4, 0), (32, 0)];
        let entry = |(tag, rights): (u16, u16)| {
            tag.to_le_bytes().into_iter().chain(rights.to_le_bytes()).chain([0xff; 4])
        };
        Self(VERSION.into_iter().chain(ENTRIES.into_iter().flat_map(entry)).collect())
    }

    /// Sets the list on a copy and returns the attributes still to set. If the list cannot be set, the mode
    /// gives the group the rights that it has in the list.
    pub(super) fn hand_down(&self, written: &End, set: SetAttr) -> SetAttr {
        match written.set_xattr(ACCESS_LIST.as_bytes(), &self.0) {
            Ok(()) => set,
            Err(_) => SetAttr { mode: set.mode.map(|mode| self.without_list(mode)), ..set },
        }
    }

    /// Returns the mode with the group bits of the list's entry for the group. Each entry is a tag, rights
    /// and the number of a user or group (`linux/posix_acl_xattr.h`).
    fn without_list(&self, mode: u32) -> u32 {
        mode & (!GROUP_BITS | self.rights(GROUP).unwrap_or(0) << 3)
    }

    /// Returns the rights of the list's entry with this tag.
    fn rights(&self, tag: u8) -> Option<u32> {
        let mut entries = self.0.get(VERSION.len()..).unwrap_or(&[]).chunks_exact(8);
        entries.find(|entry| entry[..2] == [tag, 0]).map(|entry| u32::from(entry[2] & 7))
    }

    /// Returns the bits of the mode that the kernel leaves to a new file which inherits this list: those for the group are
    /// the mask's, where there is one (*Object creation and default ACLs* in `acl(5)`).
    fn most(&self) -> u32 {
        let group = self.rights(MASK).or_else(|| self.rights(GROUP));
        let [owner, group, others] =
            [self.rights(OWNER), group, self.rights(OTHERS)].map(|rights| rights.unwrap_or(0));
        owner << 6 | group << 3 | others
    }
}

/// Returns one of a file's lists. Most listed files are known to have none without asking.
fn list_of(file: &End, attr: &Attr, which: &str) -> Outcome<Option<Vec<u8>>> {
    if attr.flags & NO_XATTRS != 0 {
        return Ok(None);
    }
    // The file may have been removed since.
    let none = [Errno::ENODATA, Errno::EOPNOTSUPP, Errno::ENOENT];
    match file.xattr(which.as_bytes()) {
        Err(failure) if none.iter().any(|errno| failure.is(*errno)) => Ok(None),
        result => result.map(Some),
    }
}

/// Copies the default list of a directory, where the target supports lists. If the source has none and the
/// copy may have one (`has_list`), removes that.
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

/// Returns true if a file has an access control list or a default list.
pub(super) fn has_list(file: &End) -> Outcome<bool> {
    match file.xattrs() {
        Err(failure) if failure.is(Errno::EOPNOTSUPP) => Ok(false),
        names => {
            let is_list = |name: &Vec<u8>| {
                [ACCESS_LIST, DEFAULT_LIST].iter().any(|list| list.as_bytes() == name)
            };
            Ok(names.map_err(|failure| failure.about(file))?.iter().any(is_list))
        }
    }
}

/// The access control list that copies inherit from the directory in which they are made, if any.
#[derive(Default)]
pub(super) struct Parent(OnceLock<Option<AccessList>>);

impl Parent {
    /// Returns true if this copy inherits a list. It lies in the directory itself or in one that the copy has
    /// made there, which inherited the list. Only the first call asks.
    pub(super) fn hands_down(&self, copy: &End) -> Outcome<bool> {
        Ok(self.list(copy)?.is_some())
    }

    /// Returns the permission bits that the list takes away from a file that is made there.
    pub(super) fn denied(&self, copy: &End) -> Outcome<u32> {
        Ok(self.list(copy)?.as_ref().map_or(0, |list| 0o777 & !list.most()))
    }

    fn list(&self, copy: &End) -> Outcome<&Option<AccessList>> {
        if let Some(known) = self.0.get() {
            return Ok(known);
        }
        let directory = copy.sibling(b".")?;
        let list = list_of(&directory, &Attr::default(), DEFAULT_LIST);
        let found = list.map_err(|failure| failure.about(&directory))?;
        Ok(self.0.get_or_init(|| found.map(AccessList)))
    }
}

/// Sets attributes. If this user may not set the owner, sets the group without the user, or neither. Then it
/// also leaves out the set-user-ID bits, which would give the rights of another user than in the source.
pub(super) fn set(target: &End, set: &SetAttr) -> Outcome<()> {
    let mut set = *set;
    while set != SetAttr::default() {
        match target.set_attr(&set) {
            Err(failure) if is_about_owner(&failure) && has_owner(&set) => set = with_less(&set),
            result => return result,
        }
    }
    Ok(())
}

/// Sets only the owner, with the same exception as [`set`]. Returns the attributes still to set.
pub(super) fn set_owner(target: &End, set: &SetAttr) -> Outcome<SetAttr> {
    let mut set = *set;
    while has_owner(&set) {
        match target.set_attr(&SetAttr { uid: set.uid, gid: set.gid, ..SetAttr::default() }) {
            Err(failure) if is_about_owner(&failure) => set = with_less(&set),
            result => return result.map(|()| SetAttr { uid: None, gid: None, ..set }),
        }
    }
    Ok(set)
}

fn has_owner(set: &SetAttr) -> bool {
    set.uid.is_some() || set.gid.is_some()
}

/// Returns true if setting the owner may have failed so. `EINVAL`: a container does not know the user or group,
/// see `user_namespaces(7)`.
fn is_about_owner(failure: &Failure) -> bool {
    failure.is(Errno::EPERM) || failure.is(Errno::EINVAL)
}

/// Returns what is left to set if the user cannot be set, or the group without the user.
fn with_less(set: &SetAttr) -> SetAttr {
    let gid = set.gid.filter(|_| set.uid.is_some());
    SetAttr { uid: None, gid, mode: set.mode.map(|mode| mode & 0o1777), ..*set }
}

/// Copies the extended attributes, but not the lists, which belong to the mode. Those outside `user.` that the
/// target refuses are left out; those of `user.` that it cannot hold are reported, too.
pub(super) fn copy_xattrs(source: &End, attr: &Attr, target: &End, report: &Report) -> Outcome<()> {
    for name in xattrs(source, attr)? {
        let value = match source.xattr(&name) {
            Err(failure) if failure.is(Errno::ENODATA) => continue,
            result => result.map_err(|failure| failure.about(source))?,
        };
        let Err(failure) = target.set_xattr(&name, &value) else { continue };
        let is_of_user = name.starts_with(b"user.");
        let name = text::escaped(&name);
        match is_of_user {
            true if failure.is_refusal() || cannot_hold(&failure) => {
                let text = format_args!("extended attribute {name} was not copied");
                report.error(source, failure.with(text));
            }
            false if failure.is_refusal() => (),
            _ => return Err(failure.with(format_args!("setting extended attribute {name}"))),
        }
    }
    Ok(())
}

/// Returns true if the target has no room for an extended attribute, or for one of this size.
fn cannot_hold(failure: &Failure) -> bool {
    let errors = [Errno::ENOSPC, Errno::EDQUOT, Errno::E2BIG, Errno::ERANGE];
    errors.iter().any(|errno| failure.is(*errno))
}

/// Returns the names of the extended attributes to copy. Most listed files are known to have none without asking.
pub(super) fn xattrs(source: &End, attr: &Attr) -> Outcome<Vec<Vec<u8>>> {
    if attr.flags & NO_XATTRS != 0 {
        return Ok(Vec::new());
    }
    let mut names = match source.xattrs() {
        Err(failure) if failure.is(Errno::EOPNOTSUPP) => return Ok(Vec::new()),
        result => result.map_err(|failure| failure.about(source))?,
    };
    let others = [STAMP, ACCESS_LIST, DEFAULT_LIST];
    names.retain(|name| others.iter().all(|other| other.as_bytes() != name));
    Ok(names)
}

/// Returns true if size and modification time say that the target is a copy of this version of the source.
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
        assert_eq!(plain.mode_before(&source(), None), 0o755);
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
        assert_eq!(all.mode_before(&source(), None), 0o600, "until it has its owner");
        assert_eq!(set.times.map(|times| times.1), Some(Timestamp::new(7, 9)));
        let less = with_less(&set);
        assert_eq!((less.mode, less.uid, less.gid), (Some(0o775), None, Some(2)), "no set-user-ID");
        let less = with_less(&less);
        assert_eq!((less.mode, less.uid, less.gid), (Some(0o775), None, None));
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
