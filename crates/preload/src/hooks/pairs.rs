//! `rename` and `link`, whose two names may each be local, remote, or lead across a border.

use super::{led_in, settled};
use crate::guard::{self, finish, inside};
use crate::place::{self, At, Led};
use crate::start;
use libc::{c_char, c_int};
use std::ffi::CStr;

/// A path, and the directory it is relative to.
pub(crate) type Name = (c_int, *const c_char);

/// The kind of call.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    Rename,
    /// `follow`: a symbolic link at the end of the first name is followed.
    Link {
        follow: bool,
    },
}

impl Kind {
    fn follows(self) -> bool {
        matches!(self, Self::Link { follow: true })
    }
}

/// The outcome of a call.
enum Done {
    Here(Result<c_int, i32>),
    /// Both names are local. Each is a resolved path that ends with a zero byte, or the program's own if
    /// `None`.
    Outside(Option<Vec<u8>>, Option<Vec<u8>>),
}

/// Runs the remote form of a call if both names lead into one export, and the local form if neither leads
/// into any.
///
/// # Safety
/// The paths are null or end with a zero byte.
pub(crate) unsafe fn run(
    from: Name,
    to: Name,
    kind: Kind,
    local: impl Fn(Name, Name) -> c_int,
    remote: impl Fn(&At, &At) -> Result<c_int, i32>,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    unsafe { settled([from, to], || once(from, to, kind, &local, &remote)) }
}

/// # Safety
/// As for [`run`].
unsafe fn once(
    from: Name,
    to: Name,
    kind: Kind,
    local: &impl Fn(Name, Name) -> c_int,
    remote: &impl Fn(&At, &At) -> Result<c_int, i32>,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    unsafe {
        // The kernel itself reports invalid addresses and paths that are too long.
        let is_odd = |path: *const c_char| {
            !place::is_address(path)
                || CStr::from_ptr(path).count_bytes() >= libc::PATH_MAX as usize
        };
        if start::mounts().is_empty() || is_odd(from.1) {
            return local(from, to);
        }
        if is_odd(to.1) {
            if place::find(from.0, from.1).is_none() {
                return local(from, to);
            }
            let wrong = if place::is_address(to.1) { libc::ENAMETOOLONG } else { libc::EFAULT };
            return finish(Err(first_of(from, kind).err().unwrap_or(wrong)));
        }
        // A slash after the first name of `link` makes a symbolic link there be followed, too.
        let slash = CStr::from_ptr(from.1).to_bytes().ends_with(b"/");
        let kind = match kind {
            Kind::Link { follow } => Kind::Link { follow: follow || slash },
            Kind::Rename => Kind::Rename,
        };
        let mut sides = [place::find(from.0, from.1), place::find(to.0, to.1)]
            .map(|found| found.map(Led::Remote));
        let errno = guard::errno();
        if sides.iter().all(Option::is_none) {
            let result = local(from, to);
            if result == 0 || guard::errno() != libc::ENOENT {
                return result;
            }
            // A local name may lead into an export through a symbolic link.
            match look_again(&mut sides, [from, to], kind) {
                Ok(true) => guard::set_errno(errno),
                Ok(false) => return result,
                Err(error) => return finish(Err(first_of(from, kind).err().unwrap_or(error))),
            }
        } else if let Err(error) = look_again(&mut sides, [from, to], kind) {
            return finish(Err(first_of(from, kind).err().unwrap_or(error)));
        }
        match inside(|| decide(sides, kind, remote)) {
            Ok(Done::Here(result)) => finish(result),
            Ok(Done::Outside(old, new)) => {
                let name = |path: &Option<Vec<u8>>, name| match path {
                    Some(path) => (libc::AT_FDCWD, path.as_ptr().cast()),
                    None => name,
                };
                local(name(&old, from), name(&new, to))
            }
            Err(error) => {
                let first = apart(from, to, kind);
                finish(Err(if first == libc::EXDEV { error } else { first }))
            }
        }
    }
}

/// Checks whether names that seem local lead into an export; returns true if one does. Errors come from the
/// remote part of the way.
unsafe fn look_again(
    sides: &mut [Option<Led>; 2],
    names: [Name; 2],
    kind: Kind,
) -> Result<bool, i32> {
    let mut found = false;
    for ((side, (at, path)), follow) in sides.iter_mut().zip(names).zip([kind.follows(), false]) {
        if side.is_some() {
            continue;
        }
        // SAFETY: the program passes strings.
        if let Some(led) = unsafe { led_in(at, path, follow) } {
            *side = Some(led?);
            found = true;
        }
    }
    Ok(found)
}

fn is_one_root(one: &At, other: &At) -> bool {
    let root = |at: &At| start::mounts().get(at.mount)?.url();
    root(one) == root(other)
}

/// Returns true for a single name, which leads nowhere else. Slashes after it do not follow a link in these
/// calls.
fn is_name(path: &[u8]) -> bool {
    let name = path.strip_prefix(b"./").unwrap_or(path);
    let end = name.iter().rposition(|byte| *byte != b'/').map_or(0, |last| last + 1);
    !name[..end].contains(&b'/') && &name[..end] != b".."
}

/// Runs the remote form if both names lead below one root. Fails with `EXDEV` if they lead to different
/// places.
fn decide(
    sides: [Option<Led>; 2],
    kind: Kind,
    remote: impl Fn(&At, &At) -> Result<c_int, i32>,
) -> Result<Done, i32> {
    if let [Some(Led::Remote(old)), Some(Led::Remote(new))] = &sides
        && is_one_root(old, new)
    {
        match remote(old, new) {
            Err(libc::EXDEV) => {}
            result => return Ok(Done::Here(result)),
        }
    }
    // One of the names leads out of that root.
    let resolved = |side, follow: bool| match side {
        // The path of an open file that is no directory may be that of a link, and must not be followed.
        Some(Led::Remote(at)) if at.is_in_no_directory() => Err(libc::ENOTDIR),
        Some(Led::Remote(at)) if !follow && is_name(&at.path) => Ok(Some(Led::Remote(at))),
        Some(Led::Remote(at)) => place::follow(&at.absolute()?, follow).map(Some),
        local => Ok(local),
    };
    let [old, new] = sides;
    let text = |side| match side {
        Some(Led::Local(path)) => Ok(Some(path)),
        None => Ok(None),
        Some(Led::Remote(_)) => Err(libc::EXDEV),
    };
    match (resolved(old, kind.follows())?, resolved(new, false)?) {
        (Some(Led::Remote(old)), Some(Led::Remote(new))) if is_one_root(&old, &new) => {
            match remote(&old, &new) {
                Err(libc::EXDEV) => Err(libc::EXDEV),
                result => Ok(Done::Here(result)),
            }
        }
        (old, new) => Ok(Done::Outside(text(old)?, text(new)?)),
    }
}

fn look((at, path): Name, flags: c_int) -> Result<(), i32> {
    // SAFETY: the program passes a string; the structure is a local one, and may be all zero.
    unsafe {
        let mut status: libc::stat64 = std::mem::zeroed();
        match super::status::fstatat(at, path, &raw mut status, flags) {
            0 => Ok(()),
            _ => Err(guard::errno()),
        }
    }
}

/// Checks the directory that holds a name.
unsafe fn parent((at, path): Name) -> Result<(), i32> {
    // SAFETY: the caller passes a string.
    let path = unsafe { CStr::from_ptr(path) }.to_bytes();
    let end = path.len() - path.iter().rev().take_while(|b| **b == b'/').count();
    let folder = match path[..end].iter().rposition(|b| *b == b'/') {
        None if path.starts_with(b"/") => b"/.\0".to_vec(),
        None if path.is_empty() => return Err(libc::ENOENT),
        None => b".\0".to_vec(),
        Some(cut) => [&path[..=cut], b".\0"].concat(),
    };
    look((at, folder.as_ptr().cast()), 0)
}

/// Checks the first name as far as the kernel does before it looks at the second.
unsafe fn first_of(from: Name, kind: Kind) -> Result<(), i32> {
    match kind {
        // SAFETY: the caller passes a string.
        Kind::Rename => unsafe { parent(from) },
        Kind::Link { follow: true } => look(from, 0),
        Kind::Link { follow: false } => look(from, libc::AT_SYMLINK_NOFOLLOW),
    }
}

/// Returns the error for a call whose names are in different trees: `EXDEV`, unless something is wrong with
/// the names themselves.
unsafe fn apart(from: Name, to: Name, kind: Kind) -> c_int {
    let wrong = || {
        // SAFETY: the caller passes strings.
        unsafe {
            first_of(from, kind)?;
            parent(to)?;
        }
        if matches!(kind, Kind::Rename) {
            return Ok(());
        }
        // SAFETY: the caller passes a string.
        let text = unsafe { CStr::from_ptr(to.1) }.to_bytes();
        // A slash after a name that exists makes no difference, whatever it names.
        let end = text.iter().rposition(|byte| *byte != b'/').map_or(text.len(), |last| last + 1);
        let bare = [&text[..end], b"\0"].concat();
        match look((to.0, bare.as_ptr().cast()), libc::AT_SYMLINK_NOFOLLOW) {
            Ok(()) => Err(libc::EEXIST),
            // `link` does not make directories.
            Err(libc::ENOENT) if end < text.len() => Err(libc::ENOENT),
            Err(_) => Ok(()),
        }
    };
    wrong().err().unwrap_or(libc::EXDEV)
}
