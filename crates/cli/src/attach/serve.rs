//! The process that serves a device until it is detached.

use super::{Args, failure};
use crate::report::{Failure, Outcome};
use rustix::fs::{Mode, OFlags};
use std::io::Write;
use std::path::Path;
use std::time::Duration;
use towline_attach::nbd::{Kernel, KernelOptions, Source};
use towline_attach::ublk::{Control, Device, Event, Options};
use towline_attach::{Claim, Error, Found, Geometry, Kind, Origin, Record, read_ahead, watch_size};

/// Longest read or write of a ublk device: each request under way may need as much memory.
const TRANSFER_BYTES_MAX: u32 = 512 * 1024;
const PAGE_BYTES: u32 = 4096;
/// Requests under way in each queue of ublk, unless told.
const DEPTH: u16 = 64;
/// Seconds until the kernel asks again on another connection, unless told.
const TIMEOUT_SECONDS: u64 = 30;
/// Connections, unless told.
const QUEUES_MAX: usize = 4;

/// Attaches a disk and serves it.
pub(super) fn attach(args: &Args, origin: &Origin, kind: Kind) -> Outcome<()> {
    settle(args);
    let patience = args.dead_after.map(Duration::from_secs);
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let queues = args.queues.unwrap_or(processors.min(QUEUES_MAX) as u16);
    let mut record = Record {
        kind,
        number: 0,
        url: origin.to_string(),
        process: std::process::id(),
        size: 0,
        connections: 1,
        patience: args.dead_after,
        identity: None,
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
            record.owner = kernel.owner().to_owned();
            record.size = kernel.geometry().size;
            keep(args, kernel, &record, Some(round_trip))
        }
        Kind::Ublk => {
            let mut attached = || {
                let Found { geometry, identity, round_trip, .. } = origin.look()?;
                let mut control = Control::open()?;
                let options = Options {
                    number: args.number,
                    queues: if geometry.connections { queues } else { 1 },
                    depth: args.depth.unwrap_or(DEPTH),
                    transfer_maximum: transfer_maximum(&geometry)?,
                };
                let device = Device::create(&mut control, &geometry, &options)?;
                record.number = device.information().number;
                record.connections = options.queues;
                record.size = geometry.size;
                record.identity = identity;
                serve(args, control, device, origin, &record, Some(round_trip))
            };
            attached().map_err(|error| failure(&error))
        }
    }
}

/// Goes on with a device whose process is gone.
pub(super) fn resume(args: &Args, record: &Record) -> Outcome<()> {
    settle(args);
    let origin = origin(&record.url)?;
    let record = Record { process: std::process::id(), ..record.clone() };
    let Found { geometry, identity, .. } = wait_for(&origin)?;
    if identity != record.identity {
        return Err(Failure::new("the disk has other bytes than it had; detach it with --force"));
    }
    match record.kind {
        Kind::Nbd => {
            let (number, connections) = (record.number, record.connections);
            let kernel =
                Kernel::resume(nbd(&origin)?, number, connections, &record.owner, geometry)
                    .map_err(|error| failure(&error))?;
            keep(args, kernel, &record, None)
        }
        Kind::Ublk => {
            let resumed = || {
                let mut control = Control::open()?;
                let device = Device::recover(&mut control, record.number, &geometry)?;
                serve(args, control, device, &origin, &record, None)
            };
            resumed().map_err(|error| failure(&error))
        }
    }
}

/// What the disk is like; tries for a while, as a server may be starting as well.
fn wait_for(origin: &Origin) -> Outcome<Found> {
    let mut tries = 50;
    loop {
        match origin.look() {
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
            Err(Failure::new("the kernel speaks only NBD: give the nbd:// URL of the server"))
        }
    }
}

fn transfer_maximum(geometry: &Geometry) -> Result<u32, Error> {
    let maximum = geometry.transfer_maximum.min(TRANSFER_BYTES_MAX) / PAGE_BYTES * PAGE_BYTES;
    if maximum == 0 {
        let text = format!("the server takes at most {} bytes", geometry.transfer_maximum);
        return Err(Error::Refused(text));
    }
    Ok(maximum)
}

/// Serves a device that was `made` for a server that takes so long to answer, or taken over.
fn serve(
    args: &Args,
    mut control: Control,
    device: Device,
    origin: &Origin,
    record: &Record,
    made: Option<Duration>,
) -> Result<(), Error> {
    let claim = record.claim()?;
    let patience = record.patience.map(Duration::from_secs);
    let (origin, size) = (origin.clone(), record.size);
    let depth = device.information().depth;
    let served = device.serve(
        &mut control,
        move |queue, tell| {
            if queue == 0 {
                let tell = tell.clone();
                watch_size(&origin, size, move |size| tell.send(Event::Resized(size)).is_ok())?;
            }
            origin.backend(patience, depth, tell)
        },
        || announce(args, record, made),
    );
    // A device that is still there waits for a successor.
    if served.is_ok() || control.information(record.number)?.is_none() {
        remove(claim, record);
    }
    served
}

/// The same for a device of the kernel's client.
fn keep(args: &Args, mut kernel: Kernel, record: &Record, made: Option<Duration>) -> Outcome<()> {
    let claimed = record.claim().and_then(|claim| {
        announce(args, record, made);
        // Some of those of a process that is gone may have died meanwhile.
        kernel.keep(made.is_none())?;
        remove(claim, record);
        Ok(())
    });
    claimed.map_err(|error| failure(&error))
}

fn remove(claim: Claim, record: &Record) {
    let _ = std::fs::remove_file(record.log());
    claim.remove();
}

/// In the background: no terminal, no directory that cannot be unmounted because of us.
fn settle(args: &Args) {
    if args.background {
        let _ = rustix::process::setsid();
        let _ = std::env::set_current_dir("/");
    }
}

/// How far the kernel reads ahead of a new device: as told, or as fits the server.
fn read_ahead(args: &Args, record: &Record, round_trip: Duration) {
    let bytes = args.read_ahead.unwrap_or_else(|| read_ahead::fitting(round_trip));
    if let Err(error) = read_ahead::set(&record.name(), bytes) {
        log::warn!("what is read ahead stays the kernel's choice: {error}");
    }
}

/// Tells that the device can be used; in the background all that is said later goes to a log.
fn announce(args: &Args, record: &Record, made: Option<Duration>) {
    if let Some(round_trip) = made {
        read_ahead(args, record, round_trip);
    }
    // Whoever wanted to hear it may be gone; the device is there all the same.
    let mut out = std::io::stdout();
    let _ = writeln!(out, "/dev/{}", record.name()).and_then(|()| out.flush());
    if args.background {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND | OFlags::CLOEXEC;
        let log = rustix::fs::open(record.log(), flags, Mode::RUSR | Mode::WUSR)
            .or_else(|_| rustix::fs::open(Path::new("/dev/null"), OFlags::WRONLY, Mode::empty()));
        if let Ok(log) = log {
            let _ = rustix::stdio::dup2_stdout(&log);
            let _ = rustix::stdio::dup2_stderr(&log);
        }
    }
}
