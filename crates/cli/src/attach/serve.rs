//! The process that serves a device until it is detached.

use super::{Args, failure};
use crate::report::{Failure, Outcome};
use rustix::fs::{Mode, OFlags};
use std::io::Write;
use std::path::Path;
use std::time::Duration;
use towline_attach::nbd::{Kernel, KernelOptions, Source};
use towline_attach::ublk::{Control, Device, Options};
use towline_attach::{
    BackendOptions, Claim, Error, Found, Kind, Origin, Record, read_ahead, watch_disk,
};
use towline_client::Durability;

/// Longest read or write of a ublk device in bytes. Each request under way may need this much memory.
const TRANSFER_BYTES_MAX: u32 = 512 * 1024;
/// Default number of requests under way in each queue of ublk.
const DEPTH: u16 = 64;
/// Default time in seconds after which the kernel repeats a request on another connection.
const TIMEOUT_SECONDS: u64 = 30;
/// Maximum default number of connections.
const QUEUES_MAX: usize = 4;

/// Why a device is not resumed whose server may have lost what its process had answered.
const LOST: &str = "\
the server's machine, or a flush there, has failed: what was written and not synced may be lost; use \
`towline detach --force`, attach the disk again and check its contents, or, if everything was synced, \
`towline attach --resume --force`";

/// Attaches a disk and serves it.
pub(super) fn attach(args: &Args, origin: &Origin, kind: Kind) -> Outcome<()> {
    settle(args);
    let patience = args.dead_after.map(Duration::from_secs);
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let queues = args.queues.unwrap_or(processors.min(QUEUES_MAX) as u16);
    let mut record = Record {
        kind,
        number: 0,
        url: String::new(),
        process: std::process::id(),
        size: 0,
        connections: 1,
        patience: args.dead_after,
        identity: None,
        epoch: None,
        owner: String::new(),
    };
    match kind {
        Kind::Nbd => {
            let source = nbd(origin)?;
            let timeout = Duration::from_secs(args.timeout.unwrap_or(TIMEOUT_SECONDS));
            let options =
                KernelOptions { number: args.number, connections: queues, timeout, patience };
            let (kernel, round_trip) =
                Kernel::attach(source, &options).map_err(|error| failure(&error))?;
            record.number = kernel.number();
            record.connections = kernel.connections();
            record.url = kernel.source().to_string();
            record.owner = kernel.owner().to_owned();
            record.size = kernel.geometry().size;
            // Without a record it could not be detached.
            let claim = record.claim().inspect_err(|_| drop(Kernel::detach(record.number)));
            let claim = claim.map_err(|error| failure(&error))?;
            keep(args, kernel, &record, claim, Some(round_trip))
        }
        Kind::Ublk => {
            let mut attached = || {
                let Found { origin, geometry, identity, epoch, round_trip, .. } = origin.look()?;
                let mut control = Control::open()?;
                let options = Options {
                    number: args.number,
                    queues: if geometry.connections { queues } else { 1 },
                    depth: args.depth.unwrap_or(DEPTH),
                    transfer_maximum: geometry.transfer_bytes(TRANSFER_BYTES_MAX)?,
                };
                let device = Device::create(&mut control, &geometry, &options)?;
                record.url = origin.to_string();
                record.number = device.information().number;
                record.connections = device.information().queues;
                record.size = geometry.size;
                record.identity = identity;
                record.epoch = epoch;
                let claim = device.owner().and_then(|owner| {
                    record.owner = owner;
                    record.claim()
                });
                // Without a record it could not be detached.
                let claim = claim.inspect_err(|_| drop(control.delete(record.number)))?;
                serve(args, control, device, &origin, &record, claim, Some(round_trip))
            };
            attached().map_err(|error| failure(&error))
        }
    }
}

/// Takes over a device whose process is gone.
pub(super) fn resume(args: &Args, record: &Record) -> Outcome<()> {
    settle(args);
    let origin = origin(&record.url)?;
    let mut record = Record { process: std::process::id(), ..record.clone() };
    let mut claim = record.claim().map_err(|error| failure(&error))?;
    let Found { geometry, identity, epoch, .. } = wait_for(&origin, record.connections > 1)?;
    unchanged(&record, identity, epoch, args.force)?;
    if epoch != record.epoch {
        record.epoch = epoch;
        claim.renew(&record).map_err(|error| failure(&error))?;
    }
    match record.kind {
        Kind::Nbd => {
            let (number, connections) = (record.number, record.connections);
            let kernel =
                Kernel::resume(nbd(&origin)?, number, connections, &record.owner, geometry)
                    .map_err(|error| failure(&error))?;
            keep(args, kernel, &record, claim, None)
        }
        Kind::Ublk => {
            let resumed = || {
                let mut control = Control::open()?;
                let device = Device::recover(&mut control, record.number, &geometry)?;
                serve(args, control, device, &origin, &record, claim, None)
            };
            resumed().map_err(|error| failure(&error))
        }
    }
}

/// Checks that the disk that was found has what was written to the device. With `force`, the user answers for it that
/// nothing was lost.
fn unchanged(
    record: &Record,
    identity: Option<u64>,
    epoch: Option<u64>,
    force: bool,
) -> Outcome<()> {
    if identity != record.identity {
        return Err(Failure::new("the disk's contents have changed; detach it with --force"));
    }
    // The process that knew what was not flushed is gone.
    if epoch != record.epoch && !force {
        return Err(Failure::new(LOST));
    }
    Ok(())
}

/// Finds out what the disk is like. Tries for a while, because the server may be starting, too. A `shared` disk,
/// one with several connections, is waited for until the server announces that they see the same data.
fn wait_for(origin: &Origin, shared: bool) -> Outcome<Found> {
    let mut tries = 50;
    loop {
        let looked = origin.look().and_then(|found| match shared {
            true => found.geometry.shareable(origin).map(|()| found),
            false => Ok(found),
        });
        match looked {
            Ok(found) => return Ok(found),
            Err(error) if tries == 0 => return Err(failure(&error)),
            Err(_) => {
                tries -= 1;
                std::thread::sleep(Duration::from_millis(200));
            }
        }
    }
}

pub(super) fn origin(url: &str) -> Outcome<Origin> {
    Origin::parse(url).map_err(Failure::new)
}

fn nbd(origin: &Origin) -> Outcome<&Source> {
    match origin {
        Origin::Nbd(source) => Ok(source),
        Origin::Towline(_) => {
            Err(Failure::new("the kernel only speaks NBD: use the server's nbd:// URL"))
        }
    }
}

/// Serves a device. `made` is the round trip to the server for a new device, `None` for one that is taken
/// over.
fn serve(
    args: &Args,
    mut control: Control,
    device: Device,
    origin: &Origin,
    record: &Record,
    mut claim: Claim,
    made: Option<Duration>,
) -> Result<(), Error> {
    let durability = match (made, record.epoch) {
        // The process before may have left changes that are not flushed.
        (None, Some(epoch)) => Durability::inherited(epoch),
        _ => Durability::default(),
    };
    let origin = origin.clone();
    let options = BackendOptions {
        several: device.information().queues > 1,
        patience: record.patience.map(Duration::from_secs),
        depth: device.information().depth,
        durability,
    };
    let mut known = record.clone();
    let served = device.serve(
        &mut control,
        move |queue, tell| {
            if queue == 0 {
                watch_disk(&origin, options.durability.clone(), tell.clone())?;
            }
            origin.backend(&options, tell)
        },
        || announce(args, record, made),
        |epoch| renew(&mut claim, &mut known, epoch),
    );
    // A device that still exists waits for another process.
    if served.is_ok() || control.information(record.number).is_ok_and(|found| found.is_none()) {
        remove(claim, record);
    }
    served
}

/// Records a new epoch of the disk, under which nothing was lost.
fn renew(claim: &mut Claim, record: &mut Record, epoch: u64) {
    if record.epoch == Some(epoch) {
        return;
    }
    record.epoch = Some(epoch);
    if let Err(error) = claim.renew(record) {
        log::error!("{error}: the device can only be resumed with --force");
    }
}

/// Serves a device of the kernel's NBD client, otherwise like [`serve`].
fn keep(
    args: &Args,
    mut kernel: Kernel,
    record: &Record,
    claim: Claim,
    made: Option<Duration>,
) -> Outcome<()> {
    if let Err(error) = announce(args, record, made) {
        if made.is_some() {
            let _ = Kernel::detach(record.number);
            remove(claim, record);
        }
        return Err(failure(&error));
    }
    // Connections of a device that is taken over may have died meanwhile.
    kernel.keep(made.is_none()).map_err(|error| failure(&error))?;
    remove(claim, record);
    Ok(())
}

fn remove(claim: Claim, record: &Record) {
    let _ = std::fs::remove_file(record.log());
    claim.remove();
}

/// Detaches a background process from the terminal, from the working directory, whose file system could not be
/// unmounted, and from locks and pipes of whoever started it.
fn settle(args: &Args) {
    if args.background {
        crate::run::close_all_inherited();
        let _ = rustix::process::setsid();
        let _ = std::env::set_current_dir("/");
    }
}

/// Sets the read-ahead of a new device, as given or as fits the server.
fn read_ahead(args: &Args, record: &Record, round_trip: Duration) {
    let bytes = args.read_ahead.unwrap_or_else(|| read_ahead::fitting(round_trip));
    if let Err(error) = read_ahead::set(&record.name(), bytes) {
        log::warn!("cannot set read-ahead, leaving it to the kernel: {error}");
    }
}

/// Prints the name of the usable device. In the background, later messages go to a log.
///
/// # Errors
/// If the command that started the process in the background was interrupted: its user knows of no device.
fn announce(args: &Args, record: &Record, made: Option<Duration>) -> Result<(), Error> {
    if let Some(round_trip) = made {
        read_ahead(args, record, round_trip);
    }
    let mut out = std::io::stdout();
    let told = writeln!(out, "/dev/{}", record.name()).and_then(|()| out.flush());
    if args.background {
        if told.is_err() {
            return Err(Error::Refused("interrupted".to_owned()));
        }
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND | OFlags::CLOEXEC;
        let log = rustix::fs::open(record.log(), flags, Mode::RUSR | Mode::WUSR)
            .or_else(|_| rustix::fs::open(Path::new("/dev/null"), OFlags::WRONLY, Mode::empty()));
        if let Ok(log) = log {
            let _ = rustix::stdio::dup2_stdout(&log);
            let _ = rustix::stdio::dup2_stderr(&log);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::unchanged;
    use towline_attach::{Kind, Record};

    #[test]
    fn a_disk_that_may_have_lost_writes_is_resumed_only_by_force() {
        let record = Record {
            kind: Kind::Ublk,
            number: 0,
            url: String::new(),
            process: 1,
            size: 512,
            connections: 1,
            patience: None,
            identity: Some(1),
            epoch: Some(2),
            owner: String::new(),
        };
        let refused = |identity, epoch, force| {
            unchanged(&record, identity, epoch, force).err().map(|failure| failure.to_string())
        };
        assert_eq!(refused(Some(1), Some(2), false), None);
        let said = refused(Some(1), Some(3), false).unwrap();
        assert!(said.contains("may be lost") && said.contains("--resume --force"), "{said}");
        assert_eq!(refused(Some(1), Some(3), true), None);
        assert!(refused(Some(2), Some(2), true).unwrap().contains("contents have changed"));
        // NBD does not tell.
        let record = Record { identity: None, epoch: None, ..record.clone() };
        assert!(unchanged(&record, None, None, false).is_ok());
    }
}
