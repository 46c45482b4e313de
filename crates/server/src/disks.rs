//! The disks of a running server; replaced as a whole when the configuration is read again.

use crate::complaints;
use crate::config::{DiskExport, DiskKind};
use crate::exports::{awaited, in_time};
use parking_lot::RwLock;
use std::cell::Cell;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use towline_block::{Disk, Failures};
use towline_nbd::constants::WHOLE_BYTES;
use towline_nbd::{Catalogue, Offer};
use towline_store::BlockStore;
use towline_store::block::{CacheMode, DelayStore, FileDisk, ForeignDisk, MemoryDisk, StripeDisk};
use towline_wire::disk::DISK_NAME_BYTES_MAX;

/// The metadata contexts of every disk: allocation, and what was written since the server started to serve
/// it, under a name that qemu takes for a dirty bitmap.
pub(crate) const CONTEXTS: [&str; 2] = ["base:allocation", "qemu:dirty-bitmap:written"];

/// A disk that is served.
#[derive(Clone)]
struct Active {
    export: DiskExport,
    disk: Arc<Disk>,
    /// The files at its paths when they were opened.
    files: Vec<Option<Inode>>,
}

/// Disks that can replace the current ones.
#[derive(Default)]
pub(crate) struct NextDisks(Vec<Active>);

/// Disks by name. Connections keep the disk they use, whatever happens here.
#[derive(Default)]
pub(crate) struct Disks {
    active: RwLock<Vec<Active>>,
    shutting_down: AtomicBool,
    /// Most bytes that are read in one piece.
    fragment_bytes: u64,
    /// Keeps failures that outlive the server.
    failures: Option<Arc<dyn Failures>>,
}

impl Disks {
    pub(crate) fn new(
        disks: &[DiskExport],
        fragment_bytes: u64,
        failures: Option<Arc<dyn Failures>>,
    ) -> io::Result<Self> {
        let this = Self { fragment_bytes, failures, ..Self::default() };
        this.replace(this.prepare(disks)?);
        Ok(this)
    }

    /// Opens those disks that are not open yet or have become another file. Disks with the same bytes keep
    /// what is known of them, even with other options. Memory disks also keep their contents if they become
    /// longer, which happens here.
    pub(crate) fn prepare(&self, disks: &[DiskExport]) -> io::Result<NextDisks> {
        let mut next: Vec<Active> = Vec::new();
        let mut longer: Vec<(Arc<Disk>, u64)> = Vec::new();
        for export in disks {
            let name = &export.name;
            let wrong = |what: String| {
                io::Error::new(io::ErrorKind::InvalidInput, format!("disk \"{name}\": {what}"))
            };
            if name.is_empty() || name.contains('\0') || name.len() > DISK_NAME_BYTES_MAX {
                return Err(wrong(format!(
                    "the name is empty, longer than {DISK_NAME_BYTES_MAX} bytes, or has a zero byte"
                )));
            }
            if next.iter().any(|other| other.export.name == *name) {
                return Err(wrong("name is used twice".into()));
            }
            if export.is_default && next.iter().any(|other| other.export.is_default) {
                return Err(wrong("another disk is already the default".into()));
            }
            let old = self.active.read().iter().find(|a| a.export.name == *name).cloned();
            let kept = old.as_ref().filter(|old| is_same(old, export));
            let mut files = kept.map_or(Vec::new(), |old| old.files.clone());
            let disk = match kept {
                Some(old) if old.export == *export => old.disk.clone(),
                _ => {
                    let (store, description) = match kept {
                        Some(Active { disk, .. }) => (disk.store.clone(), disk.description.clone()),
                        None => {
                            let export = export.clone();
                            let opened = awaited(&format!("disk \"{name}\""), move || {
                                // First: a file replaced in between is noticed the next time.
                                Ok((files_of(&export.kind), open(&export)?))
                            });
                            let opened = opened.map_err(|e| wrong(e.to_string()))?;
                            files = opened.0;
                            opened.1
                        }
                    };
                    let mut disk = Disk::new(name, &description, store, export.read_only);
                    if let Some(failures) = &self.failures {
                        disk = disk.remembered(failures.clone());
                    }
                    let disk = disk.delivered(export.delivery);
                    let mut disk = disk.shaped(export.shape).map_err(|e| wrong(e.to_string()))?;
                    for other in self.active.read().iter().chain(&next) {
                        disk = disk.beside(&other.disk);
                    }
                    Arc::new(match &old {
                        Some(old) => disk.in_place_of(&old.disk),
                        None => disk,
                    })
                }
            };
            match (&export.kind, old.map(|old| old.export.kind)) {
                (DiskKind::Memory(size), Some(DiskKind::Memory(before))) if *size != before => {
                    let now = disk.store.geometry().size;
                    if *size < now {
                        return Err(wrong(format!(
                            "it has {now} bytes; \"towline disk resize --shrink\" makes it shorter"
                        )));
                    }
                    // All are checked before the first one is made longer, so that all become longer or none.
                    let most = disk.store.size_max();
                    if *size > most {
                        return Err(wrong(format!(
                            "it can grow to {most} bytes at most, not {size}, until the server is restarted"
                        )));
                    }
                    longer.push((disk.clone(), *size));
                }
                _ => {}
            }
            if let Some(other) = also_written(&next, &disk, &files) {
                log::warn!(
                    "disk \"{name}\": clients can also write its file through disk \"{other}\", and two file \
                     systems on it at once destroy each other; add :ro to one of them"
                );
            }
            next.push(Active { export: export.clone(), disk, files });
        }
        for (disk, size) in longer {
            // Clients may have made it even longer since it was checked.
            if size <= disk.store.geometry().size {
                continue;
            }
            disk.store.resize(size).map_err(|error| {
                let what = format!("disk \"{}\": cannot grow to {size} bytes: {error}", disk.name);
                io::Error::new(io::ErrorKind::InvalidInput, what)
            })?;
        }
        Ok(NextDisks(next))
    }

    /// Makes these the current disks; those with a failed flush may be changed again. A disk that clients
    /// would write in two modes stays as it is, but for its limits.
    pub(crate) fn replace(&self, NextDisks(mut next): NextDisks) {
        let mut active = self.active.write();
        for new in &mut next {
            let name = &new.export.name;
            let old = active.iter().find(|old| old.export.name == *name);
            if let Some(old) = old {
                tell_replaced(old, new);
            }
            let danger = "clients that use its file could then write parts of one page in two modes, which \
                          loses data";
            if let Some(old) = old.filter(|old| is_in_two_modes(old, new)) {
                log::warn!(
                    "disk \"{name}\": {danger}; it keeps its mode and its other options until the next SIGHUP \
                     that finds no clients connected to it"
                );
                let DiskExport { limit, is_default, .. } = new.export;
                let export = DiskExport { limit, is_default, ..old.export.clone() };
                *new = Active { export, ..old.clone() };
            } else if let Some(used) = active.iter().find(|used| is_in_two_modes(used, new)) {
                let used = &used.export.name;
                log::warn!("disk \"{name}\": {danger}; end the clients of disk \"{used}\"");
            }
            new.disk.forgive();
            new.disk.set_limit(new.export.limit);
        }
        *active = next;
    }

    /// Returns the disk of this name; for the empty name, the default disk or else the first one.
    pub(crate) fn disk(&self, name: &[u8]) -> Option<Arc<Disk>> {
        let active = self.active.read();
        let found = if name.is_empty() {
            active.iter().find(|a| a.export.is_default).or(active.first())
        } else {
            active.iter().find(|a| a.export.name.as_bytes() == name)
        };
        found.map(|a| a.disk.clone())
    }

    /// Returns the disk of an offer, unless it is offered otherwise by now: clients keep to what they were told,
    /// and the configuration may have been read again since. Another size does no harm, nor need it come from there.
    pub(crate) fn offered(&self, offer: &Offer) -> Option<Arc<Disk>> {
        let disk = self.disk(offer.name.as_bytes())?;
        let now = Offer { size: offer.size, ..self.offer(&disk) };
        (now == *offer).then_some(disk)
    }

    fn offer(&self, disk: &Disk) -> Offer {
        if let Err(error) = disk.store.refresh() {
            complaints::warn(format_args!(
                "disk \"{}\": cannot determine its size: {error}",
                disk.name
            ));
        }
        let geometry = disk.geometry();
        Offer {
            name: disk.name.clone(),
            description: description(disk),
            size: geometry.size,
            block_minimum: geometry.block_minimum,
            block_preferred: geometry.block_preferred,
            read_only: disk.read_only || disk.has_failed(),
            rotational: geometry.rotational,
            zeroes_fast: true,
            whole_reads: self.fragment_bytes >= WHOLE_BYTES,
            contexts: CONTEXTS.map(str::to_owned).to_vec(),
        }
    }

    /// Returns the number of disks that refuse changes because a flush failed.
    pub(crate) fn failed(&self) -> usize {
        self.active.read().iter().filter(|a| a.disk.has_failed()).count()
    }

    /// Returns names and descriptions, each ended by a zero byte, of the disks after the first `skip`: as
    /// many as fit into a reply.
    pub(crate) fn names(&self, skip: usize) -> Vec<u8> {
        let mut names = Vec::new();
        for Active { disk, .. } in self.active.read().iter().skip(skip) {
            let before = names.len();
            for text in [&disk.name, &description(disk)] {
                names.extend(text.bytes().filter(|byte| *byte != 0));
                names.push(0);
            }
            if names.len() > towline_wire::limits::BODY_BYTES_MAX / 2 {
                names.truncate(before);
                break;
            }
        }
        names
    }

    /// Makes the disks refuse options and requests from now on.
    pub(crate) fn shut_down(&self) {
        self.shutting_down.store(true, Ordering::Release);
    }
}

/// Returns what clients are told about a disk.
fn description(disk: &Disk) -> String {
    let note = if disk.has_failed() { " (read-only since a flush failed)" } else { "" };
    format!("{}{note}", disk.description)
}

/// Returns true if the store that is open for an export also serves this one.
fn is_same(old: &Active, export: &DiskExport) -> bool {
    let kinds = match (&old.export.kind, &export.kind) {
        (DiskKind::Memory(_), DiskKind::Memory(_)) => true,
        (before, now) => before == now,
    };
    kinds
        && (export.read_only || !old.disk.store.geometry().read_only)
        && !is_replaced(&export.name, &old.files, &export.kind)
}

/// Returns true if something else is at one of the paths, because of a rename or a changed link. A file system
/// that does not answer in time is taken to be unchanged. If nothing is there, the open file stays, and a warning
/// says so: the next start would fail, and a deleted file ends with the server.
fn is_replaced(name: &str, then: &[Option<Inode>], kind: &DiskKind) -> bool {
    let paths = paths_of(kind).to_vec();
    let look = || paths.into_iter().map(|path| (file_at(&path), path)).collect::<Vec<_>>();
    let mut is_replaced = false;
    for ((now, path), then) in in_time(look).unwrap_or_default().into_iter().zip(then) {
        match now {
            Ok(now) => is_replaced |= now != *then,
            Err(error) => log::warn!(
                "disk \"{name}\": {}: {error}; serving what was opened before. If it was deleted, it is lost \
                 when the server ends: copy the disk; otherwise put it back before the next start",
                path.display()
            ),
        }
    }
    is_replaced
}

/// Tells which files of a disk are not the ones that its clients have.
fn tell_replaced(old: &Active, new: &Active) {
    if old.export.kind != new.export.kind {
        return;
    }
    let files = old.files.iter().zip(&new.files);
    for (path, (before, now)) in paths_of(&new.export.kind).iter().zip(files) {
        if before != now {
            log::warn!(
                "disk \"{}\": another file is at {} now. New clients get it; those that are connected keep the \
                 former one until they connect again",
                new.export.name,
                path.display()
            );
        }
    }
}

/// Returns true if clients may write a file in the former mode while others write it in the new one.
fn is_in_two_modes(old: &Active, new: &Active) -> bool {
    let mode = |kind: &DiskKind| match kind {
        DiskKind::File(_, mode) | DiskKind::Stripe(_, _, mode) => Some(*mode),
        _ => None,
    };
    mode(&old.export.kind) != mode(&new.export.kind)
        && old.disk.identity == new.disk.identity
        && !(old.disk.read_only || new.disk.read_only)
        // Besides the list of disks, only clients and their requests have it.
        && Arc::strong_count(&old.disk) > 1
}

/// Returns the name of another disk through which one of these files can be written, if this one can be
/// written as well.
fn also_written<'a>(others: &'a [Active], disk: &Disk, files: &[Option<Inode>]) -> Option<&'a str> {
    let shares = |other: &&Active| {
        let same = |file: &Option<Inode>| file.is_some() && other.files.contains(file);
        !disk.read_only && !other.disk.read_only && files.iter().any(same)
    };
    others.iter().find(shares).map(|other| other.export.name.as_str())
}

fn open(export: &DiskExport) -> io::Result<(Arc<dyn BlockStore>, String)> {
    let may_hang = Cell::new(false);
    let file = |path: &Path, mode: CacheMode| -> io::Result<Arc<dyn BlockStore>> {
        match FileDisk::open(path, mode, export.read_only) {
            Ok(disk) => {
                if let Some(kind) = disk.foreign()? {
                    may_hang.set(true);
                    log::info!(
                        "disk \"{}\": {} is on {kind}, which may hang: separate threads carry out \
                         its requests",
                        export.name,
                        path.display()
                    );
                }
                Ok(disk)
            }
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                let what = match std::fs::metadata(path) {
                    Ok(found) if found.is_file() || found.file_type().is_block_device() => {
                        "cannot be opened with O_DIRECT"
                    }
                    _ => "neither a file nor a block device",
                };
                Err(io::Error::other(format!("{}: {what}", path.display())))
            }
            Err(error) => Err(io::Error::new(error.kind(), format!("{}: {error}", path.display()))),
        }
    };
    let (store, description): (Arc<dyn BlockStore>, _) = match &export.kind {
        DiskKind::File(path, mode) => {
            let (store, mode) = (file(path, *mode)?, mode_name(*mode));
            let members = store.layout().map_or(String::new(), |layout| {
                format!(", {} members, {} bytes each in turn", layout.members, layout.chunk)
            });
            (store, format!("{} ({mode}{members})", path.display()))
        }
        DiskKind::Memory(size) => (memory(&export.name, *size)?, "memory".into()),
        DiskKind::Stripe(chunk, paths, mode) => {
            for (number, path) in paths.iter().enumerate() {
                let same = |other: &PathBuf| inode(other).is_some_and(|i| Some(i) == inode(path));
                if paths[..number].iter().any(same) {
                    let what = format!("{}: a member twice", path.display());
                    return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
                }
            }
            let members: io::Result<Vec<_>> = paths.iter().map(|path| file(path, *mode)).collect();
            let description = format!("stripe of {} ({})", paths.len(), mode_name(*mode));
            (StripeDisk::new(members?, *chunk)?, description)
        }
        DiskKind::Own(store) => (store.0.clone(), String::new()),
        DiskKind::Delay(size, latency, bandwidth) => {
            let memory = memory(&export.name, *size)?;
            (DelayStore::new(memory, *latency, *bandwidth), "delayed memory".into())
        }
    };
    Ok((if may_hang.get() { ForeignDisk::new(store) } else { store }, description))
}

/// Identifies a file, whatever its name.
type Inode = (u64, u64);

fn inode(path: &Path) -> Option<Inode> {
    std::fs::metadata(path).ok().map(|found| (found.dev(), found.ino()))
}

/// Returns the paths of files and devices that a disk is made of.
fn paths_of(kind: &DiskKind) -> &[PathBuf] {
    match kind {
        DiskKind::File(path, _) => std::slice::from_ref(path),
        DiskKind::Stripe(_, paths, _) => paths,
        _ => &[],
    }
}

/// Returns the file at a path; `None` for a device, whose node may be created again.
fn file_at(path: &Path) -> io::Result<Option<Inode>> {
    let found = std::fs::metadata(path)?;
    Ok(found.is_file().then(|| (found.dev(), found.ino())))
}

/// Returns the files of a disk, one for each path.
fn files_of(kind: &DiskKind) -> Vec<Option<Inode>> {
    paths_of(kind).iter().map(|path| file_at(path).ok().flatten()).collect()
}

fn memory(name: &str, size: u64) -> io::Result<Arc<MemoryDisk>> {
    let told = |error: io::Error| io::Error::other(format!("{size} bytes of memory: {error}"));
    MemoryDisk::new(name, size).map_err(told)
}

fn mode_name(mode: CacheMode) -> &'static str {
    match mode {
        CacheMode::Cached => "cached",
        CacheMode::Direct => "direct",
        CacheMode::ReadDirect => "read-direct",
    }
}

impl Catalogue for Disks {
    fn find(&self, name: &[u8]) -> Option<Offer> {
        self.disk(name).map(|disk| self.offer(&disk))
    }

    fn list(&self) -> Vec<(String, String)> {
        let active = self.active.read();
        active
            .iter()
            .map(|a| &a.disk)
            .map(|disk| (disk.name.clone(), disk.description.clone()))
            .collect()
    }

    fn shutting_down(&self) -> bool {
        self.shutting_down.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As if the configuration was read again between the reply to GO and the first request.
    #[test]
    fn a_disk_is_served_only_as_it_was_offered() {
        let export = DiskExport::new("disk", DiskKind::Memory(1 << 20));
        let disks = Disks::new(std::slice::from_ref(&export), 4096, None).unwrap();
        let now = |export: &DiskExport| {
            disks.replace(disks.prepare(std::slice::from_ref(export)).unwrap());
        };
        let offer = disks.find(b"disk").unwrap();
        assert!(disks.offered(&offer).is_some());
        now(&DiskExport { read_only: true, ..export.clone() });
        assert!(disks.offered(&offer).is_none(), "the client was told that it can write");
        now(&export);
        assert!(disks.offered(&offer).is_some());
        now(&DiskExport { shape: towline_block::Shape { block: 4096, ..export.shape }, ..export });
        assert!(disks.offered(&offer).is_none(), "the client was told of smaller blocks");
    }

    #[test]
    fn the_mode_of_a_file_changes_only_while_nobody_uses_it() {
        let place = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let image = place.path().join("image");
        std::fs::write(&image, [0; 4096]).unwrap();
        let export = |mode| DiskExport::new("disk", DiskKind::File(image.clone(), mode));
        let (cached, direct) = (export(CacheMode::Cached), export(CacheMode::Direct));
        let disks = Disks::new(std::slice::from_ref(&cached), 4096, None).unwrap();
        let becomes = |export: &DiskExport| {
            disks.replace(disks.prepare(std::slice::from_ref(export)).unwrap());
            let active = disks.active.read();
            assert_eq!(active[0].disk.store.geometry().size, 4096);
            active[0].export.kind == export.kind
        };
        assert!(becomes(&direct) && becomes(&cached), "nobody uses it");
        let used = disks.disk(b"disk").unwrap();
        assert!(!becomes(&direct) && !becomes(&direct));
        assert!(Arc::ptr_eq(&used, &disks.disk(b"disk").unwrap()), "new clients get the same");
        assert!(
            becomes(&DiskExport { read_only: true, ..direct.clone() }),
            "who only reads harms nobody"
        );
        drop(used);
        assert!(becomes(&direct));
    }

    #[test]
    fn the_mode_of_a_disk_stays_though_its_file_is_used_by_another_name_too() {
        let place = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let image = place.path().join("image");
        std::fs::write(&image, [0; 4096]).unwrap();
        let export = |name, mode| DiskExport::new(name, DiskKind::File(image.clone(), mode));
        let [one, two] = ["one", "two"].map(|name| export(name, CacheMode::Cached));
        let disks = Disks::new(&[one.clone(), two], 4096, None).unwrap();
        let used = ["one", "two"].map(|name| disks.disk(name.as_bytes()).unwrap());
        disks.replace(disks.prepare(&[one, export("two", CacheMode::Direct)]).unwrap());
        assert!(Arc::ptr_eq(&used[1], &disks.disk(b"two").unwrap()));
    }

    /// For example a second disk of the file, read-only, from which backups are made.
    #[test]
    fn all_disks_of_a_file_tell_what_was_written_through_one_of_them() {
        let place = tempfile::tempdir().unwrap();
        let [image, other] = ["image", "other"].map(|name| place.path().join(name));
        std::fs::write(&image, [0; 4096]).unwrap();
        std::fs::write(&other, [0; 4096]).unwrap();
        let export = |name: &str, path: &Path, read_only| {
            let kind = DiskKind::File(path.to_owned(), CacheMode::Cached);
            DiskExport { read_only, ..DiskExport::new(name, kind) }
        };
        let (copied, used) = (export("copied", &image, true), export("used", &image, false));
        let exports = [copied.clone(), used.clone(), export("other", &other, false)];
        let disks = Disks::new(&exports, 4096, None).unwrap();
        let tells = |name: &str| disks.disk(name.as_bytes()).unwrap().changes.run(0, 4096).1;
        disks.disk(b"used").unwrap().changes.note(0, 1);
        assert!(tells("copied") && tells("used") && !tells("other"));
        // One that is added later, even in front of them.
        let later = export("later", &image, true);
        disks.replace(disks.prepare(&[later, copied, used]).unwrap());
        assert!(tells("later") && tells("copied"));
    }

    #[test]
    fn two_disks_that_write_one_file_are_noticed() {
        let place = tempfile::tempdir().unwrap();
        let [image, link, other] = ["image", "link", "other"].map(|name| place.path().join(name));
        std::fs::write(&image, [0; 4096]).unwrap();
        std::fs::write(&other, [0; 4096]).unwrap();
        std::fs::hard_link(&image, &link).unwrap();
        let export = |name: &str, path: &Path, read_only| {
            let kind = DiskKind::File(path.to_owned(), CacheMode::Cached);
            DiskExport { read_only, ..DiskExport::new(name, kind) }
        };
        let noticed = |exports: &[DiskExport]| {
            let all = Disks::default().prepare(exports).unwrap().0;
            let (last, before) = all.split_last().unwrap();
            also_written(before, &last.disk, &last.files).map(str::to_owned)
        };
        let first = export("first", &image, false);
        let second = |path, read_only| export("second", path, read_only);
        assert_eq!(noticed(&[first.clone(), second(&link, false)]).as_deref(), Some("first"));
        assert_eq!(noticed(&[first.clone(), second(&link, true)]), None);
        assert_eq!(noticed(&[first, second(&other, false)]), None);
    }
}
