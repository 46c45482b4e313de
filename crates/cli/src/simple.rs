//! `towline mkdir`, `mv` and `ln`: create, rename and link.

use crate::remote::{Place, Remotes};
use crate::report::{Failure, Outcome, Report};
use std::collections::HashSet;
use std::process::ExitCode;
use towline_client::{Attr, Errno, SetAttr, Url};
use towline_wire::request::{UMASK_SHIFT, rename_flag};

const EXIT: &str = "Exit status: 0 success, 1 some operation failed, 2 wrong usage.";

/// Arguments of `mkdir`.
#[derive(clap::Args)]
#[command(after_help = format!("\
Examples:
  towline mkdir -p towline://host/data/a/b/c\n\n{EXIT}"))]
pub(crate) struct MkdirArgs {
    /// Create missing parents, too; ignore directories that exist.
    #[arg(short, long)]
    parents: bool,
    /// Permission bits in octal; created parents get 777 less the umask.
    #[arg(short, long, value_parser = octal)]
    mode: Option<u32>,
    /// Directories.
    #[arg(required = true, value_name = "URL")]
    urls: Vec<String>,
}

/// Arguments of `mv`.
#[derive(clap::Args)]
#[command(after_help = format!("\
Source and target have to be in one export; use `towline cp -r` and `towline rm -r` else.

Examples:
  towline mv towline://host/data/old towline://host/data/new
  towline mv towline://host/data/a towline://host/data/b towline://host/data/dir\n\n{EXIT}"),
    override_usage = "towline mv [OPTIONS] SOURCE... TARGET")]
pub(crate) struct MvArgs {
    /// Fail if the target exists instead of replacing it.
    #[arg(short, long)]
    no_clobber: bool,
    /// Sources, then the target; if that is a directory, they are moved into it.
    #[arg(required = true, num_args = 2.., value_name = "URL")]
    urls: Vec<String>,
}

/// Arguments of `ln`.
#[derive(clap::Args)]
#[command(after_help = format!("\
Examples:
  towline ln towline://host/data/file towline://host/data/another-name
  towline ln -s ../file towline://host/data/dir/link\n\n{EXIT}"))]
pub(crate) struct LnArgs {
    /// Make a symbolic link: TARGET is its text, not a URL.
    #[arg(short, long)]
    symbolic: bool,
    /// Replace an existing file of that name.
    #[arg(short, long)]
    force: bool,
    /// The file, or with -s the text of the link.
    target: String,
    /// The link; in a directory, it gets the name of the target.
    link: String,
}

fn octal(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o7777 => Ok(mode),
        _ => Err("expected an octal number up to 7777".to_owned()),
    }
}

fn umask() -> u32 {
    // The umask can only be read by setting it; there is no other thread.
    let mask = rustix::process::umask(rustix::fs::Mode::empty());
    rustix::process::umask(mask);
    mask.as_raw_mode()
}

/// Runs `mkdir`.
pub(crate) fn make_directories(args: &MkdirArgs) -> ExitCode {
    let report = Report::new("mkdir");
    let remotes = Remotes::default();
    let usual = 0o777 | umask() << UMASK_SHIFT;
    let mode = args.mode.unwrap_or(usual);
    for url in &args.urls {
        let made = remotes.place(url).and_then(|place| {
            if args.parents {
                make_with_parents(&remotes, url, &place, mode, usual)
            } else {
                make(&place, mode).map_err(|failure| match failure.is(Errno::ENOENT) {
                    true => failure.with("use -p to make the directories above it"),
                    false => failure,
                })
            }
        });
        report.check(url, made);
    }
    report.status()
}

/// Bits that `mkdir(2)` does not set; a second request sets them.
const SET_IDS: u32 = 0o6000;

fn make(place: &Place, mode: u32) -> Outcome<()> {
    place.base.make_directory(place.path(), mode)?;
    if mode & SET_IDS != 0 {
        let set = SetAttr { mode: Some(mode), ..SetAttr::default() };
        place.base.set_attr(place.path(), false, &set)?;
    }
    Ok(())
}

fn make_with_parents(
    remotes: &Remotes,
    url: &str,
    place: &Place,
    mode: u32,
    usual: u32,
) -> Outcome<()> {
    // Whatever the umask is, the next directory has to be created in it.
    let between = usual & !(0o300 << UMASK_SHIFT);
    // Usually at most the last one is missing.
    match make(place, mode) {
        Err(failure) if failure.is(Errno::ENOENT) => (),
        result => return existing(place, result),
    }
    let root = Url { path: Vec::new(), ..Url::parse(url).map_err(Failure::new)? };
    let mut at = remotes.place_of(&root)?;
    let names = names(place.full());
    for (index, name) in names.iter().enumerate() {
        at = at.child(name);
        let mode = if index + 1 == names.len() { mode } else { between };
        let made = make(&at, mode);
        existing(&at, made).map_err(|failure| failure.about(&at))?;
    }
    Ok(())
}

fn names(path: &[u8]) -> Vec<&[u8]> {
    path.split(|b| *b == b'/').filter(|name| !name.is_empty() && *name != b".").collect()
}

/// Accepts a directory that exists already.
fn existing(place: &Place, made: Outcome<()>) -> Outcome<()> {
    match made {
        Err(failure) if failure.is(Errno::EEXIST) => {
            match place.base.stat_path(place.path(), true) {
                Ok(attr) if attr.is_directory() => Ok(()),
                _ => Err(failure),
            }
        }
        result => result,
    }
}

fn attr_if_any(place: &Place, follow: bool) -> Outcome<Option<Attr>> {
    match place.base.stat_path(place.path(), follow) {
        Ok(attr) => Ok(Some(attr)),
        Err(error) if error.errno() == Errno::ENOENT => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Returns true for a directory, or a link to one. A link that dangles, leads in a circle or out of
/// the export counts as an ordinary name.
fn is_directory(place: &Place) -> Outcome<bool> {
    match attr_if_any(place, true) {
        Err(failure) if failure.is(Errno::ELOOP) || failure.is(Errno::EXDEV) => Ok(false),
        found => Ok(found?.is_some_and(|attr| attr.is_directory())),
    }
}

/// Runs `mv`.
pub(crate) fn rename(args: &MvArgs) -> ExitCode {
    let report = Report::new("mv");
    let remotes = Remotes::default();
    let Some((target, sources)) = args.urls.split_last() else { return ExitCode::from(2) };
    let looked = remotes.place(target).and_then(|place| {
        let directory = is_directory(&place)?;
        if sources.len() > 1 && !directory {
            let failure = Failure::from(Errno::ENOTDIR);
            return Err(failure.with("several sources need a directory as target"));
        }
        Ok((place, directory))
    });
    let Some((place, directory)) = report.check(target, looked) else { return report.status() };
    let mut taken = HashSet::new();
    for source in sources {
        let moved = rename_one(&remotes, source, &place, directory, args.no_clobber, &mut taken);
        report.check(source, moved);
    }
    report.status()
}

fn rename_one(
    remotes: &Remotes,
    source: &str,
    target: &Place,
    into: bool,
    keep: bool,
    taken: &mut HashSet<Vec<u8>>,
) -> Outcome<()> {
    let source = remotes.place(source)?;
    let target = if into { target.child(source.name()) } else { target.clone() };
    if !source.same_server(&target) || !source.same_export(&target) {
        let failure = Failure::from(Errno::EXDEV);
        return Err(failure.with("use `towline cp -r`, then `towline rm -r`"));
    }
    if taken.contains(target.full()) {
        return Err(Failure::new(format!("not moved: another source was moved to {target}")));
    }
    if leads_to(&source, &target) {
        return Err(Failure::new(format!("is a link to {target}, which would be lost")));
    }
    let flags = if keep { rename_flag::NO_REPLACE } else { 0 };
    let renamed = source.base.rename(source.path(), &target.base, target.path(), flags);
    match renamed.map_err(Failure::from) {
        // A missing source is an error of the source; all others concern both.
        Err(failure) if failure.is(Errno::ENOENT) && attr_if_any(&source, false)?.is_none() => {
            Err(failure)
        }
        Err(failure) if failure.is(Errno::EINVAL) && is_below(&target, &source) => {
            let text = format!("a directory cannot be moved into itself, to {target}");
            Err(failure.with(text))
        }
        Err(failure) => Err(failure.with(format_args!("moving it to {target}"))),
        Ok(()) if is_same(&source, &target) => {
            Err(Failure::new(format!("is the same file as {target}: both names stay")))
        }
        Ok(()) => {
            taken.insert(target.full().to_vec());
            Ok(())
        }
    }
}

/// Returns true if one path, as written, leads through the other.
fn is_below(inner: &Place, outer: &Place) -> bool {
    names(inner.full()).starts_with(&names(outer.full()))
}

/// Returns true for a symbolic link to the file of the other name.
fn leads_to(link: &Place, target: &Place) -> bool {
    let attr = |place: &Place, follow| place.base.stat_path(place.path(), follow).ok();
    attr(link, false).is_some_and(|attr| attr.is_symlink())
        && attr(link, true)
            .zip(attr(target, false))
            .is_some_and(|(one, other)| one.identity() == other.identity())
}

/// Returns true if both are names of one file: a rename then succeeds and changes nothing.
fn is_same(source: &Place, target: &Place) -> bool {
    let inode =
        |place: &Place| place.base.stat_path(place.path(), false).map(|attr| attr.identity());
    inode(source).is_ok_and(|left| inode(target).is_ok_and(|moved| moved == left))
}

/// Runs `ln`.
pub(crate) fn link(args: &LnArgs) -> ExitCode {
    let report = Report::new("ln");
    let remotes = Remotes::default();
    report.check(&args.link, link_one(&remotes, args));
    report.status()
}

fn link_one(remotes: &Remotes, args: &LnArgs) -> Outcome<()> {
    if args.symbolic && Url::looks_like(&args.target) {
        let failure = Failure::new("the text of a symbolic link is a path, not a URL");
        return Err(failure.about(&args.target));
    }
    let mut link = remotes.place(&args.link)?;
    let source = match args.symbolic {
        true => None,
        false => Some(remotes.place(&args.target).map_err(|f| f.about(&args.target))?),
    };
    if is_directory(&link)? {
        link = match &source {
            Some(source) => link.child(source.name()),
            None => link.child(crate::remote::last_name(args.target.as_bytes())),
        };
    }
    let make = |link: &Place| -> Outcome<()> {
        match &source {
            None => Ok(link.base.symlink(link.path(), args.target.as_bytes()).map(drop)?),
            Some(source) if !source.same_server(link) || !source.same_export(link) => {
                Err(Failure::from(Errno::EXDEV).with("a hard link must stay in its export"))
            }
            Some(source) => {
                let linked = source.base.link(source.path(), false, &link.base, link.path());
                linked.map(drop).map_err(|error| explained(source, link, error.into()))
            }
        }
    };
    match make(&link) {
        Err(failure) if args.force && failure.is(Errno::EEXIST) => {
            replace(source.as_ref(), &link, make)
        }
        result => result,
    }
    .map_err(|failure| failure.about(&link))
}

/// Explains why there is no hard link, as far as the file or its file system is the reason.
fn explained(source: &Place, link: &Place, failure: Failure) -> Failure {
    if ![Errno::ENOENT, Errno::EPERM, Errno::EXDEV].iter().any(|errno| failure.is(*errno)) {
        return failure;
    }
    match attr_if_any(source, false) {
        Ok(None) => failure.about(source),
        Ok(Some(attr)) if attr.is_directory() => {
            failure.about(source).with("a directory has no hard links; use -s")
        }
        // Nor does the link's path lead out of the export.
        Ok(Some(_)) if failure.is(Errno::EXDEV) && attr_if_any(link, false).is_ok() => failure
            .with("a hard link must stay on its file system; another is mounted in the export"),
        _ => failure,
    }
}

/// Replaces the file of that name by a link, unless it is the source itself. The file stays until the link
/// exists.
fn replace(
    source: Option<&Place>,
    link: &Place,
    make: impl Fn(&Place) -> Outcome<()>,
) -> Outcome<()> {
    if let Some(source) = source {
        let (one, other) = (attr_if_any(source, false)?, attr_if_any(link, false)?);
        if let (Some(one), Some(other)) = (one, other)
            && one.identity() == other.identity()
        {
            // With two names, it is a link to the source already.
            let is_one_name = one.links == 1 || source.path() == link.path();
            return if is_one_name { Err(Failure::new("is the same file")) } else { Ok(()) };
        }
    }
    let name = format!(".{:08x}.towline-link", std::process::id());
    let made = link.sibling(name.as_bytes()).ok_or(Errno::EISDIR)?;
    make(&made)?;
    link.base.rename(made.path(), &link.base, link.path(), 0).map_err(|error| {
        // What matters is why it did not get its name.
        let _ = made.base.unlink(made.path(), false);
        error.into()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_octal() {
        assert_eq!(octal("1777"), Ok(0o1777));
        assert!(octal("8").is_err() && octal("17777").is_err() && octal("").is_err());
    }

    #[test]
    fn paths_fall_into_names() {
        assert_eq!(names(b"a//b/./c/"), [&b"a"[..], b"b", b"c"]);
        assert!(names(b"").is_empty());
    }
}
