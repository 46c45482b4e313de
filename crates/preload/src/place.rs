//! Decides which paths are remote, and follows paths across export borders.

use crate::descriptors::{self, Open};
use crate::start::{self, Target};
use crate::{guard, known, remote, working};
use std::ffi::{CStr, c_char};
use std::sync::atomic::Ordering;
use towline_client::{Error, File};

/// Maximum number of symbolic links followed in one path.
const LINKS_MAX: u32 = 40;

/// A remote path.
#[derive(Clone)]
pub(crate) struct At {
    pub(crate) mount: usize,
    /// The open directory that the path is relative to; `None`: the prefix.
    pub(crate) directory: Option<Open>,
    pub(crate) path: Vec<u8>,
}

impl At {
    /// Calls `work` with the directory and the path from there.
    pub(crate) fn with<T>(
        &self,
        work: impl FnOnce(&File, &[u8]) -> Result<T, Error>,
    ) -> Result<T, i32> {
        remote::with_handle(self.mount, self.base()?, |base| work(base, &self.path))
    }

    /// Returns the handle of the directory that the path is relative to.
    pub(crate) fn base(&self) -> Result<u64, i32> {
        if self.mount == working::NO_MOUNT {
            return Err(libc::ENOENT);
        }
        Ok(match self.directory {
            Some(open) => open.handle,
            None => start::mounts().get(self.mount).ok_or(libc::EIO)?.root()?.handle,
        })
    }

    /// Returns true if the path is relative to an open file that is not a directory.
    pub(crate) fn is_in_no_directory(&self) -> bool {
        self.directory.is_some_and(|open| {
            open.entry.mode.load(Ordering::Relaxed) & libc::S_IFMT != libc::S_IFDIR
        })
    }

    /// Returns the path from the prefix.
    pub(crate) fn below(&self) -> Vec<u8> {
        match self.directory {
            Some(open) => join(&open.entry.path(), &self.path),
            None => self.path.clone(),
        }
    }

    /// Returns an absolute path that leads there. Asks the server for the path of an open directory, as it
    /// may have been renamed by others or through a name with links in it. In a removed directory, only
    /// `..` leads anywhere.
    pub(crate) fn absolute(&self) -> Result<Vec<u8>, i32> {
        let Some(open) = self.directory else { return Ok(absolute(self.mount, &self.path)) };
        let (base, rest) = match (remote::with(open, File::path), self.path.strip_prefix(b"..")) {
            (Err(libc::ENOENT), Some(rest @ ([] | [b'/', ..]))) => {
                let above = remote::with(open, |file| file.path_to_enter(b".."))?;
                (above.map_err(remote::number)?, rest)
            }
            (base, _) => (base?, &self.path[..]),
        };
        Ok(absolute(self.mount, &join(&base, rest)))
    }
}

/// Returns the absolute path of something below a prefix.
pub(crate) fn absolute(mount: usize, below: &[u8]) -> Vec<u8> {
    let prefix = start::mounts().get(mount).map_or(&b""[..], |target| &target.mount.prefix);
    if below.is_empty() || below == b"." { prefix.to_vec() } else { join(prefix, below) }
}

fn join(first: &[u8], second: &[u8]) -> Vec<u8> {
    if first.is_empty() || first == b"." {
        return second.to_vec();
    }
    if second.is_empty() {
        return first.to_vec();
    }
    let mut path = first.to_vec();
    path.push(b'/');
    path.extend_from_slice(second);
    path
}

/// Decides about a path relative to a descriptor (or `AT_FDCWD`); `None` means local.
///
/// # Safety
/// `path` is null or ends with a zero byte.
#[inline]
pub(crate) unsafe fn find(directory: i32, path: *const c_char) -> Option<At> {
    // SAFETY: as the caller says.
    if !unsafe { may_be(directory, path) } {
        return None;
    }
    // From here on memory is allocated, which a signal handler must not interrupt.
    // SAFETY: as the caller says.
    guard::inside(|| unsafe { search(directory, path) }.ok_or(libc::ENOENT)).ok()
}

/// Returns false for nearly all paths that [`find`] finds to be local, without allocating.
///
/// # Safety
/// As for `find`.
#[inline]
pub(crate) unsafe fn may_be(directory: i32, path: *const c_char) -> bool {
    if start::mounts().is_empty() || !is_address(path) || guard::is_inside() {
        return false;
    }
    // SAFETY: as the caller says.
    let text = unsafe { CStr::from_ptr(path) }.to_bytes();
    // Leave longer paths to the kernel, which fails with its own error.
    may_be_remote(directory, text) && text.len() < libc::PATH_MAX as usize
}

/// Returns false for an address where no program has memory: the kernel fails with `EFAULT`.
pub(crate) fn is_address(path: *const c_char) -> bool {
    (4096..isize::MAX as usize).contains(&(path as usize))
}

/// Returns false for nearly all local paths, without allocating.
fn may_be_remote(directory: i32, path: &[u8]) -> bool {
    match path.first() {
        None => false,
        Some(b'/') => {
            start::mounts().iter().any(|target| path.starts_with(&target.mount.prefix))
                || is_odd(path)
        }
        Some(_) if directory != libc::AT_FDCWD => {
            descriptors::find(directory).is_some() || is_part(path)
        }
        Some(_) => working::is_remote() || working::is_above() || path.starts_with(b".."),
    }
}

/// Returns where a path leads that goes through the name of a descriptor, such as `/proc/self/fd/N` and
/// `/dev/fd/N/NAME`.
///
/// # Safety
/// `path` is null or ends with a zero byte.
pub(crate) unsafe fn through_descriptor(path: *const c_char, follow: bool) -> Option<At> {
    if start::mounts().is_empty() || !is_address(path) || guard::is_inside() {
        return None;
    }
    // SAFETY: as the caller says.
    let path = unsafe { CStr::from_ptr(path) }.to_bytes();
    if !path.starts_with(b"/dev/") && !path.starts_with(b"/proc/") {
        return None;
    }
    if let Some(rest) = of_own_process(path).and_then(|rest| rest.strip_prefix(b"cwd")) {
        return working_directory(rest, follow);
    }
    let (open, rest) = match numbered(path) {
        Some((fd, rest)) => (descriptors::find(fd)?, rest),
        None => of_other_process(path)?,
    };
    // Without following, the name itself is meant.
    if rest.is_none() && !follow {
        return None;
    }
    guard::inside(|| {
        let mount = open.entry.mount.load(Ordering::Relaxed) as usize;
        let rest = rest.unwrap_or_default();
        let start = rest.iter().position(|b| *b != b'/').unwrap_or(rest.len());
        Ok(At { mount, directory: Some(open), path: rest[start..].to_vec() })
    })
    .ok()
}

/// Returns where a path through `cwd` in `/proc` leads, if the working directory is remote.
fn working_directory(rest: &[u8], follow: bool) -> Option<At> {
    let (is_meant, rest) = match rest {
        [] => (follow, &b"."[..]),
        [b'/', rest @ ..] => (true, rest),
        _ => (false, rest),
    };
    if !is_meant || !working::is_remote() {
        return None;
    }
    let find = || {
        Ok(working::remote().map(|(mount, below)| At {
            mount,
            directory: None,
            path: join(&below, rest),
        }))
    };
    guard::inside(find).ok().flatten()
}

/// Returns the rest of a path below this process's directory in `/proc`. Like `numbered`, it does not
/// allocate.
fn of_own_process(path: &[u8]) -> Option<&[u8]> {
    let rest = path.strip_prefix(b"/proc/")?;
    let cut = rest.iter().position(|b| *b == b'/')?;
    let who = &rest[..cut];
    let is_own = || digits(who)?.parse().ok().filter(|id: &u32| *id == crate::process::id());
    if who != b"self" && who != b"thread-self" && is_own().is_none() {
        return None;
    }
    Some(&rest[cut + 1..])
}

/// Returns the remote file behind another process's descriptor, given by its name in `/proc`, and the rest
/// of the path.
fn of_other_process(path: &[u8]) -> Option<(Open, Option<&[u8]>)> {
    let rest = path.strip_prefix(b"/proc/")?;
    let cut = rest.iter().position(|b| *b == b'/')?;
    let below = rest[cut..].strip_prefix(b"/fd/")?;
    let end = below.iter().position(|b| *b == b'/').unwrap_or(below.len());
    let is_number = |text| digits(text).is_some_and(|text| text.parse::<u32>().is_ok());
    if !is_number(&rest[..cut]) || !is_number(&below[..end]) {
        return None;
    }
    let open = descriptors::of_others(&path[..path.len() - below.len() + end])?;
    Some((open, (end < below.len()).then(|| &below[end + 1..])))
}

/// Returns a number as `/proc` writes it: without a sign, and without zeros before it.
fn digits(text: &[u8]) -> Option<&str> {
    let is_written_so = text == b"0" || text.first() != Some(&b'0');
    let text = std::str::from_utf8(text).ok().filter(|_| is_written_so)?;
    text.bytes().all(|digit| digit.is_ascii_digit()).then_some(text)
}

/// Returns the number in the name of a descriptor and the rest of the path. Many local paths come here, so
/// it neither allocates nor makes system calls.
fn numbered(path: &[u8]) -> Option<(i32, Option<&[u8]>)> {
    match path {
        b"/dev/stdin" => return Some((0, None)),
        b"/dev/stdout" => return Some((1, None)),
        b"/dev/stderr" => return Some((2, None)),
        _ => {}
    }
    let rest = match path.strip_prefix(b"/dev/fd/") {
        Some(rest) => rest,
        None => of_own_process(path)?.strip_prefix(b"fd/")?,
    };
    let cut = rest.iter().position(|b| *b == b'/');
    let number = digits(&rest[..cut.unwrap_or(rest.len())])?.parse().ok()?;
    Some((number, cut.map(|cut| &rest[cut + 1..])))
}

/// [`find`] for a path relative to the working directory, for callers inside our own code.
///
/// # Safety
/// `path` ends with a zero byte.
pub(crate) unsafe fn find_inside(path: *const c_char) -> Option<At> {
    // SAFETY: as the caller says.
    unsafe { search(libc::AT_FDCWD, path) }
}

/// # Safety
/// `path` ends with a zero byte.
unsafe fn search(directory: i32, path: *const c_char) -> Option<At> {
    let mounts = start::mounts();
    // SAFETY: as the caller says.
    let path = unsafe { CStr::from_ptr(path) }.to_bytes();
    match path.first() {
        Some(b'/') => find_absolute(mounts, path),
        Some(_) => find_relative(mounts, directory, path),
        // An empty path is not a path; with AT_EMPTY_PATH the caller means the descriptor.
        None => None,
    }
}

/// Returns true if a path from a local directory begins with a name that occurs in a prefix, so that it
/// could lead there.
fn is_part(path: &[u8]) -> bool {
    let first = path.split(|b| *b == b'/').next().unwrap_or_default();
    let has = |target: &Target| target.mount.prefix.split(|b| *b == b'/').any(|part| part == first);
    first == b".." || start::mounts().iter().any(has)
}

fn find_absolute(mounts: &[Target], path: &[u8]) -> Option<At> {
    if let Some(found) = matching(mounts, path) {
        return Some(found);
    }
    if is_odd(path) { matching_oddly(mounts, path) } else { None }
}

/// [`matching`] for a path that may have `.`, `..` and double slashes in it before a prefix ends. What follows stays as
/// it is: how a path ends makes a difference.
fn matching_oddly(mounts: &[Target], path: &[u8]) -> Option<At> {
    let is_prefix = |path: &[u8]| mounts.iter().any(|target| target.mount.prefix == path);
    let (mut done, mut found): (Vec<u8>, _) = (Vec::new(), None);
    let mut start = 0;
    for name in path.split(|b| *b == b'/') {
        start += name.len() + 1;
        match name {
            b"" | b"." => continue,
            // From a prefix on, the server knows where it leads.
            b".." if found.is_some() => break,
            b".." => done.truncate(done.iter().rposition(|b| *b == b'/').unwrap_or(0)),
            name => {
                done.push(b'/');
                done.extend_from_slice(name);
            }
        }
        // The longest one counts.
        if is_prefix(&done) {
            found = Some([&done, path.get(start - 1..).unwrap_or_default()].concat());
        }
    }
    matching(mounts, &found?)
}

/// Returns true for a path with `//` or `/.` in it, which may be equivalent to a different text. Every
/// local call pays for this: the loop has no early exit, so that the compiler vectorizes it.
fn is_odd(path: &[u8]) -> bool {
    let pairs = path.iter().zip(path.get(1..).unwrap_or_default());
    pairs.fold(false, |odd, (a, b)| odd | ((*a == b'/') & ((*b == b'/') | (*b == b'.'))))
}

fn matching(mounts: &[Target], path: &[u8]) -> Option<At> {
    mounts.iter().enumerate().find_map(|(mount, target)| {
        let rest = path.strip_prefix(target.mount.prefix.as_slice())?;
        let path = match rest {
            [] => b".",
            [b'/', rest @ ..] => {
                let start = rest.iter().position(|b| *b != b'/').unwrap_or(rest.len());
                if start == rest.len() { b"." } else { &rest[start..] }
            }
            _ => return None,
        };
        Some(At { mount, directory: None, path: path.to_vec() })
    })
}

fn find_relative(mounts: &[Target], directory: i32, path: &[u8]) -> Option<At> {
    if directory != libc::AT_FDCWD {
        let Some(open) = descriptors::find(directory) else {
            let full = join(&descriptors::directory_of(directory)?, path);
            return matching_oddly(mounts, &full);
        };
        let mount = open.entry.mount.load(Ordering::Relaxed) as usize;
        return Some(At { mount, directory: Some(open), path: path.to_vec() });
    }
    if let Some((mount, below)) = working::remote() {
        if mount == working::NO_MOUNT
            && let Some(rest) = path.strip_prefix(b"..")
            && matches!(rest, [] | [b'/', ..])
            && let Some((mount, above)) = working::above_removed(&below)
        {
            let path = [if above.is_empty() { b"." } else { &above[..] }, rest].concat();
            return Some(At { mount, directory: None, path });
        }
        return Some(At { mount, directory: None, path: join(&below, path) });
    }
    if !path.starts_with(b"..") && !working::is_above() {
        return None;
    }
    let full = join(&working::local()?, path);
    matching_oddly(mounts, &full)
}

/// Removes `.` and double slashes.
pub(crate) fn tidy(path: &[u8]) -> Vec<u8> {
    let names = path.split(|b| *b == b'/').filter(|name| !matches!(*name, b"" | b"."));
    let joined = names.collect::<Vec<_>>().join(&b'/');
    if joined.is_empty() { b".".to_vec() } else { joined }
}

/// Resolves `.`, `..` and double slashes lexically.
pub(crate) fn normal(path: &[u8]) -> Vec<u8> {
    let mut parts: Vec<&[u8]> = Vec::new();
    for part in path.split(|b| *b == b'/') {
        match part {
            b"" | b"." => {}
            b".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    let mut out = Vec::with_capacity(path.len());
    for part in parts {
        out.push(b'/');
        out.extend_from_slice(part);
    }
    if out.is_empty() {
        out.push(b'/');
    }
    out
}

/// Where a path leads that leaves its export by a symbolic link or `..`.
pub(crate) enum Led {
    /// Into the same or another export.
    Remote(At),
    /// To a local path, which ends with a zero byte.
    Local(Vec<u8>),
}

/// How to treat a symbolic link at the end of a path.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Last {
    /// The link itself is meant.
    Stays,
    Followed,
    /// Followed to create a file there: a name with a slash behind it fails, whatever is there.
    ToCreate,
}

impl From<bool> for Last {
    fn from(follow: bool) -> Self {
        if follow { Self::Followed } else { Self::Stays }
    }
}

/// Returns the absolute path without links of what a path leads to, as far as the server knows it: in its own export,
/// with no other prefix below.
pub(crate) fn resolved(at: &At) -> Option<Result<Vec<u8>, i32>> {
    let mounts = start::mounts();
    let prefix = &mounts.get(at.mount)?.mount.prefix;
    if mounts.iter().any(|other| is_above(prefix, &other.mount.prefix)) {
        return None;
    }
    match at.with(File::path_behind) {
        Ok(path) if path.ends_with(descriptors::DELETED) => None,
        Ok(path) => Some(Ok(absolute(at.mount, &path))),
        Err(libc::ENOENT) => Some(Err(libc::ENOENT)),
        Err(_) => None,
    }
}

/// Follows a path name by name across export borders. Slashes, `.` and `..` at its end are kept: a call that makes,
/// removes or renames what is there fails because of them.
pub(crate) fn follow(start: &[u8], last: impl Into<Last>) -> Result<Led, i32> {
    let last = last.into();
    let mounts = start::mounts();
    let mut end = if start.ends_with(b"/") { &b"/"[..] } else { b"" };
    let mut links = 0;
    let mut done: Vec<u8> = Vec::new();
    let mut rest: Vec<Vec<u8>> = start.split(|b| *b == b'/').rev().map(<[u8]>::to_vec).collect();
    while let Some(name) = rest.pop() {
        let is_last = rest.iter().all(|part| part.is_empty());
        match name.as_slice() {
            b"" => continue,
            b"." => {
                end = if is_last { b"/." } else { end };
                continue;
            }
            b".." => {
                check_directory(mounts, &done)?;
                if is_last && matching(mounts, &done).is_some_and(|at| at.path != b".") {
                    end = b"/..";
                    continue;
                }
                done.truncate(done.iter().rposition(|b| *b == b'/').unwrap_or(0));
                end = if is_last { b"/." } else { end };
                continue;
            }
            _ => {}
        }
        if is_last && !rest.is_empty() && last == Last::ToCreate {
            check_directory(mounts, &done)?;
            return Err(libc::EISDIR);
        }
        let before = done.len();
        done.push(b'/');
        done.extend_from_slice(&name);
        if is_last && last == Last::Stays {
            break;
        }
        let Some(target) = link_target(mounts, &done)? else { continue };
        if is_last && target.ends_with(b"/") {
            end = b"/";
        }
        links += 1;
        if links > LINKS_MAX {
            return Err(libc::ELOOP);
        }
        done.truncate(if target.first() == Some(&b'/') { 0 } else { before });
        rest.extend(target.split(|b| *b == b'/').rev().map(<[u8]>::to_vec));
    }
    if done.is_empty() && end.is_empty() {
        end = b"/";
    }
    done.extend_from_slice(end);
    if let Some(at) = matching(mounts, &done) {
        return Ok(Led::Remote(at));
    }
    done.push(0);
    Ok(Led::Local(done))
}

/// Returns true if the prefix lies below this path.
fn is_above(path: &[u8], prefix: &[u8]) -> bool {
    prefix.strip_prefix(path).is_some_and(|rest| rest.starts_with(b"/"))
}

/// Fails as the kernel does if `..` follows a name that is not a directory. Links in `path` are already
/// followed.
fn check_directory(mounts: &[Target], path: &[u8]) -> Result<(), i32> {
    if path.is_empty() {
        return Ok(());
    }
    let is_directory = match matching(mounts, path) {
        Some(at) => known::stat(&at, false)?.is_directory(),
        None => {
            let text = [path, b"/.\0"].concat();
            let ask = [libc::AT_FDCWD as usize, text.as_ptr() as usize, 0, 0, 0, 0];
            // SAFETY: the path ends with a zero byte.
            match unsafe { guard::checked(libc::SYS_faccessat, ask) } {
                Ok(_) => true,
                // Nothing local may exist on the way to a prefix.
                Err(libc::ENOENT) if mounts.iter().any(|t| is_above(path, &t.mount.prefix)) => true,
                Err(error) => return Err(error),
            }
        }
    };
    if is_directory { Ok(()) } else { Err(libc::ENOTDIR) }
}

/// Returns the target of a symbolic link; `None` for anything else.
fn link_target(mounts: &[Target], path: &[u8]) -> Result<Option<Vec<u8>>, i32> {
    if let Some(at) = matching(mounts, path) {
        return match known::read_link(&at) {
            Ok(target) => Ok(Some(target)),
            Err(libc::EINVAL | libc::ENOENT) => Ok(None),
            Err(error) => Err(error),
        };
    }
    let (mut text, mut target) = (path.to_vec(), vec![0u8; 4096]);
    text.push(0);
    let arguments =
        [libc::AT_FDCWD as usize, text.as_ptr() as usize, target.as_mut_ptr() as usize, 4096, 0, 0];
    // SAFETY: the path ends with a zero byte; the target is as long as said.
    match unsafe { guard::checked(libc::SYS_readlinkat, arguments) } {
        Ok(length) => {
            target.truncate(length);
            // An open file leads there directly, whatever its name says.
            let is_name = !(path.starts_with(b"/proc/") && target.ends_with(descriptors::DELETED));
            Ok(is_name.then_some(target))
        }
        Err(_) => Ok(None),
    }
}
