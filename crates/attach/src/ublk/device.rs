//! A device as a whole: made or taken over, served by a thread for each queue, ended.

use super::abi::{Parameters, attribute, feature, part};
use super::control::{Control, Information};
use super::queue::{Queue, Shape};
use crate::{Backend, Error, Geometry};
use rustix::fs::{Mode, OFlags};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

/// Longest logical block the kernel's block layer has on every machine.
const BLOCK_BYTES_MAX: u32 = 4096;
/// Longest request for a range without data: what fits into 32 bits, in whole MiB.
const RANGE_SECTORS_MAX: u32 = (((4_u64 << 30) - (1 << 20)) >> 9) as u32;
/// How long it may take the kernel to notice that the process before us is gone.
const RECOVERY_WAIT: Duration = Duration::from_secs(60);
/// How long udev may take to make the node of a new device.
const NODE_WAIT: Duration = Duration::from_secs(10);

/// How a device is to be made.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::exhaustive_structs)] // given by callers
pub struct Options {
    /// Its number N in `/dev/ublkbN`; any that is free unless given.
    pub number: Option<u32>,
    /// Queues, each with a thread and a connection.
    pub queues: u16,
    /// Requests under way in each queue at most, 1 to 4096.
    pub depth: u16,
    /// Longest read or write, bytes, whole pages. Each of the requests under way may need as much.
    pub transfer_maximum: u32,
}

/// What happens to a device that is served.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Event {
    /// A queue fetches requests.
    Ready,
    /// The disk behind it has another size, bytes.
    Resized(u64),
    /// A queue has ended: the device was stopped, or (false) the queue failed.
    Ended(bool),
}

/// A device that is made and not yet, or now, served by us.
#[derive(Debug)]
pub struct Device {
    information: Information,
    file: Arc<OwnedFd>,
    /// Bytes, for the queues to check requests.
    size: Arc<AtomicU64>,
    taken_over: bool,
}

/// True when the driver has a device of this number, started or not; any user may ask.
#[must_use]
pub fn exists(number: u32) -> bool {
    Path::new(&node(number)).exists()
}

/// Through which a device is served.
fn node(number: u32) -> String {
    format!("/dev/ublkc{number}")
}

/// The parameters that say what a disk is like.
fn parameters(geometry: &Geometry, transfer_maximum: u32) -> Result<Parameters, Error> {
    let block = geometry.block_minimum.max(512);
    if block > BLOCK_BYTES_MAX || !block.is_power_of_two() {
        return Err(Error::Refused(format!(
            "the disk is made of blocks of {block} bytes; the kernel takes 512 to {BLOCK_BYTES_MAX}"
        )));
    }
    let preferred = geometry.block_preferred.max(block);
    let mut attributes = 0;
    for (set, bit) in [
        (geometry.read_only, attribute::READ_ONLY),
        (geometry.rotational, attribute::ROTATIONAL),
        (geometry.flush, attribute::VOLATILE_CACHE),
        (geometry.flush && geometry.fua, attribute::FUA),
    ] {
        if set {
            attributes |= bit;
        }
    }
    let physical = preferred.min(BLOCK_BYTES_MAX);
    let mut parameters = Parameters {
        parts: part::BASIC,
        attributes,
        logical_block_shift: block.ilog2() as u8,
        physical_block_shift: physical.ilog2() as u8,
        minimal_io_shift: physical.ilog2() as u8,
        optimal_io_shift: preferred.ilog2() as u8,
        transfer_sectors_max: transfer_maximum >> 9,
        sectors: geometry.whole_blocks() / 512,
        ..Parameters::default()
    };
    if geometry.trim || geometry.zero {
        parameters.parts |= part::DISCARD;
        parameters.discard_granularity = physical;
        parameters.discard_segments_max = 1;
        parameters.discard_sectors_max = if geometry.trim { RANGE_SECTORS_MAX } else { 0 };
        parameters.zero_sectors_max = if geometry.zero { RANGE_SECTORS_MAX } else { 0 };
    }
    Ok(parameters)
}

/// Sectors of a disk; bytes behind the last whole block cannot be reached.
fn sectors(size: u64, block: u32) -> u64 {
    size / u64::from(block) * u64::from(block) / 512
}

impl Device {
    /// Makes a device. It is not there for users before [`Device::serve`] began.
    ///
    /// # Errors
    /// When the kernel refuses, or the disk cannot be a device.
    pub fn create(
        control: &mut Control,
        geometry: &Geometry,
        options: &Options,
    ) -> Result<Self, Error> {
        geometry.device_bytes()?;
        let parameters = parameters(geometry, options.transfer_maximum)?;
        let mut features = feature::USER_RECOVERY | feature::USER_RECOVERY_REISSUE;
        if control.has(feature::UPDATE_SIZE) {
            features |= feature::UPDATE_SIZE;
        }
        let information = control.add(
            options.number,
            options.queues,
            options.depth,
            options.transfer_maximum,
            features,
        )?;
        let made = control
            .set_parameters(information.number, &parameters)
            .and_then(|()| Self::open(information, parameters.sectors * 512, false));
        if made.is_err() {
            let _ = control.delete(information.number);
        }
        made
    }

    /// Takes over a device whose process is gone. Its users' requests wait; those that were not
    /// answered come again.
    ///
    /// # Errors
    /// When there is no such device, when it is still served, or when the disk became another one.
    pub fn recover(control: &mut Control, number: u32, geometry: &Geometry) -> Result<Self, Error> {
        let Some(information) = control.information(number)? else {
            return Err(Error::Refused(format!("there is no ublk device {number}")));
        };
        let old = control.parameters(number)?;
        let new = parameters(geometry, information.transfer_maximum)?;
        if new.sectors < old.sectors
            || new.logical_block_shift > old.logical_block_shift
            || new.attributes & !old.attributes & attribute::READ_ONLY != 0
        {
            return Err(Error::Refused(format!(
                "the disk is not the one it was: {} bytes in blocks of {}, was {} in blocks of {}",
                new.sectors * 512,
                1 << new.logical_block_shift,
                old.sectors * 512,
                1 << old.logical_block_shift,
            )));
        }
        let end = Instant::now() + RECOVERY_WAIT;
        loop {
            match control.start_recovery(number) {
                Ok(()) => break,
                // The kernel is still taking leave of the old process.
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) && Instant::now() < end => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                Err(error) => {
                    return Err(Error::system(format_args!("taking over ublk device {number}"))(
                        error,
                    ));
                }
            }
        }
        Self::open(information, old.sectors * 512, true)
    }

    fn open(information: Information, size: u64, taken_over: bool) -> Result<Self, Error> {
        let path = node(information.number);
        let end = Instant::now() + NODE_WAIT;
        let file = loop {
            match rustix::fs::open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
                Ok(file) => break file,
                Err(rustix::io::Errno::NOENT) if Instant::now() < end => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(error) => return Err(Error::system(path)(error.into())),
            }
        };
        let size = Arc::new(AtomicU64::new(size));
        Ok(Self { information, file: Arc::new(file), size, taken_over })
    }

    /// What the driver said of it when it was made.
    #[must_use]
    pub fn information(&self) -> &Information {
        &self.information
    }

    /// Serves until the device is stopped, as `detach` does from another process. `backend` makes
    /// what is behind a queue, and is given where to tell of another size; `started` is called when
    /// the device can be used.
    ///
    /// # Errors
    /// When it cannot start; then a new device is removed, and one that was taken over waits for
    /// another process as soon as this one ends. When a queue fails.
    pub fn serve<F>(
        self,
        control: &mut Control,
        backend: F,
        started: impl FnOnce(),
    ) -> Result<(), Error>
    where
        F: Fn(u16, Sender<Event>) -> Result<Box<dyn Backend>, Error> + Send + Sync + 'static,
    {
        let number = self.information.number;
        let (tell, events) = mpsc::channel();
        let backend = Arc::new(backend);
        let threads: Vec<_> = (0..self.information.queues)
            .map(|queue| {
                let shape = Shape {
                    number: queue,
                    depth: self.information.depth,
                    buffer_bytes: self.information.transfer_maximum as usize,
                };
                let (file, size) = (self.file.clone(), self.size.clone());
                let (tell, backend) = (tell.clone(), backend.clone());
                std::thread::Builder::new()
                    .name(format!("ublk{number}q{queue}"))
                    .spawn(move || run(&file, shape, &size, &*backend, &tell))
                    .map_err(Error::system("a thread for a queue"))
            })
            .collect::<Result<_, _>>()?;
        let ready = self.start(control, &events, threads.len());
        if let Err(error) = ready {
            if !self.taken_over {
                let _ = control.stop(number);
                // The queues end when the device is stopped, and their threads let go of it.
                threads.into_iter().for_each(|thread| drop(thread.join()));
                drop(self);
                let _ = control.delete(number);
            }
            return Err(error);
        }
        started();
        let outcome = self.attend(control, &events, threads.len());
        threads.into_iter().for_each(|thread| drop(thread.join()));
        outcome
    }

    fn start(
        &self,
        control: &mut Control,
        events: &Receiver<Event>,
        queues: usize,
    ) -> Result<(), Error> {
        let mut ready = 0;
        while ready < queues {
            match events.recv() {
                Ok(Event::Ready) => ready += 1,
                Ok(Event::Resized(_)) => (),
                _ => return Err(Error::Refused("a queue could not be served".to_owned())),
            }
        }
        if self.taken_over {
            control.end_recovery(self.information.number)
        } else {
            control.start(self.information.number)
        }
    }

    fn attend(
        &self,
        control: &mut Control,
        events: &Receiver<Event>,
        queues: usize,
    ) -> Result<(), Error> {
        let mut left = queues;
        while left > 0 {
            match events.recv() {
                Ok(Event::Ended(true)) => left -= 1,
                // Its requests would hang for ever; better to leave all to another process.
                Ok(Event::Ended(false)) | Err(_) => {
                    return Err(Error::Refused("a queue failed".to_owned()));
                }
                Ok(Event::Resized(bytes)) => {
                    if let Err(error) = self.resize(control, bytes) {
                        log::error!("{error}");
                    }
                }
                Ok(Event::Ready) => (),
            }
        }
        Ok(())
    }

    fn resize(&self, control: &mut Control, bytes: u64) -> Result<(), Error> {
        let number = self.information.number;
        let old = control.parameters(number)?;
        let sectors = sectors(bytes, 1 << old.logical_block_shift);
        if sectors == old.sectors {
            return Ok(());
        }
        if self.information.features & feature::UPDATE_SIZE == 0 {
            return Err(Error::Refused(format!(
                "/dev/ublkb{number}: the disk has {bytes} bytes now; this kernel cannot tell its users (6.16 can): detach and attach it"
            )));
        }
        // First what is smaller, so that no request passes that is beyond the end.
        if sectors < old.sectors {
            control.update_size(number, sectors)?;
        }
        self.size.store(sectors * 512, Ordering::Relaxed);
        if sectors > old.sectors {
            control.update_size(number, sectors)?;
        }
        log::info!("/dev/ublkb{number}: {} bytes now", sectors * 512);
        Ok(())
    }
}

/// The life of a queue's thread.
fn run(
    file: &OwnedFd,
    shape: Shape,
    size: &AtomicU64,
    backend: &dyn Fn(u16, Sender<Event>) -> Result<Box<dyn Backend>, Error>,
    tell: &Sender<Event>,
) {
    let served = || -> Result<(), Error> {
        let mut backend = backend(shape.number, tell.clone())?;
        let mut queue = Queue::new(file.as_fd(), shape)?;
        let failed = || Error::system(format!("queue {}", shape.number));
        queue.fetch().map_err(failed())?;
        let _ = tell.send(Event::Ready);
        queue.serve(&mut *backend, size).map_err(failed())
    };
    let result = served();
    if let Err(error) = &result {
        log::error!("{error}");
    }
    let _ = tell.send(Event::Ended(result.is_ok()));
}
