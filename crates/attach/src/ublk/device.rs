//! A device as a whole: made or taken over, served by a thread for each queue, ended.

use super::abi::{Parameters, attribute, feature, part};
use super::control::{Control, Information, State};
use super::queue::{Queue, Shape};
use crate::{Backend, Error, Geometry};
use rustix::fs::{Mode, OFlags};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;
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
    /// A queue has its connection.
    Connected,
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
        control.set_parameters(information.number, &parameters).inspect_err(|_| {
            let _ = control.delete(information.number);
        })?;
        Ok(Self::new(information, parameters.sectors * 512, false))
    }

    /// Prepares to take over a device whose process is gone, which [`Device::serve`] does. Its
    /// users' requests wait; those that were not answered come again.
    ///
    /// # Errors
    /// When there is no such device, when it was stopped, or when the disk became another one.
    pub fn recover(control: &mut Control, number: u32, geometry: &Geometry) -> Result<Self, Error> {
        let information = control.information(number)?;
        // A stopped device stays stopped; its users' requests have failed.
        let information = information.filter(|found| found.state != State::Dead).ok_or_else(|| {
            Error::Refused(format!(
                "/dev/ublkb{number} is gone or was stopped; detach it with --force and attach it again"
            ))
        })?;
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
        Ok(Self::new(information, old.sectors * 512, true))
    }

    fn new(information: Information, size: u64, taken_over: bool) -> Self {
        Self { information, size: Arc::new(AtomicU64::new(size)), taken_over }
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
    /// another process as soon as this one ends. When a queue fails; then the other queues go on
    /// until the process ends, which has to be soon: the requests of that queue wait for another one.
    pub fn serve<F>(
        self,
        control: &mut Control,
        backend: F,
        started: impl FnOnce(),
    ) -> Result<(), Error>
    where
        F: Fn(u16, Sender<Event>) -> Result<Box<dyn Backend>, Error> + Send + Sync + 'static,
    {
        let (tell, events) = mpsc::channel();
        let (mut gates, mut threads) = (Vec::new(), Vec::new());
        let ready = self
            .spawn(&Arc::new(backend), &tell, &mut gates, &mut threads)
            .and_then(|()| self.start(control, &events, gates));
        if let Err(error) = ready {
            if !self.taken_over {
                let number = self.information.number;
                end(threads, || drop(control.stop(number)));
                let _ = control.delete(number);
            }
            return Err(error);
        }
        started();
        attend(&events, threads, |bytes| self.resize(control, bytes))
    }

    /// Begins the threads of the queues; each waits behind its gate for the device.
    fn spawn<F>(
        &self,
        backend: &Arc<F>,
        tell: &Sender<Event>,
        gates: &mut Vec<Sender<Arc<OwnedFd>>>,
        threads: &mut Vec<JoinHandle<()>>,
    ) -> Result<(), Error>
    where
        F: Fn(u16, Sender<Event>) -> Result<Box<dyn Backend>, Error> + Send + Sync + 'static,
    {
        for queue in 0..self.information.queues {
            let shape = Shape {
                number: queue,
                depth: self.information.depth,
                buffer_bytes: self.information.transfer_maximum as usize,
            };
            let (gate, device) = mpsc::channel();
            let (size, tell, backend) = (self.size.clone(), tell.clone(), backend.clone());
            let thread = std::thread::Builder::new()
                .name(format!("ublk{}q{queue}", self.information.number))
                .spawn(move || run(&device, shape, &size, &*backend, &tell))
                .map_err(Error::system("a thread for a queue"))?;
            gates.push(gate);
            threads.push(thread);
        }
        Ok(())
    }

    fn start(
        &self,
        control: &mut Control,
        events: &Receiver<Event>,
        gates: Vec<Sender<Arc<OwnedFd>>>,
    ) -> Result<(), Error> {
        // The kernel lets nobody else take over a device once that was begun and no queue came of
        // it, so what may fail for other reasons comes first.
        await_each(events, gates.len(), |event| matches!(event, Event::Connected))?;
        if self.taken_over {
            self.begin_recovery(control)?;
        }
        let device = Arc::new(self.open()?);
        for gate in &gates {
            // A queue that has ended says so itself.
            let _ = gate.send(device.clone());
        }
        await_each(events, gates.len(), |event| matches!(event, Event::Ready))?;
        if self.taken_over {
            control.end_recovery(self.information.number)
        } else {
            control.start(self.information.number)
        }
    }

    fn begin_recovery(&self, control: &mut Control) -> Result<(), Error> {
        let number = self.information.number;
        let end = Instant::now() + RECOVERY_WAIT;
        loop {
            match control.start_recovery(number) {
                // The kernel is still taking leave of the old process.
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) && Instant::now() < end => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                begun => {
                    let what = format_args!("taking over ublk device {number}");
                    return begun.map_err(Error::system(what));
                }
            }
        }
    }

    fn open(&self) -> Result<OwnedFd, Error> {
        let path = node(self.information.number);
        let end = Instant::now() + NODE_WAIT;
        loop {
            match rustix::fs::open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
                Err(rustix::io::Errno::NOENT) if Instant::now() < end => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                opened => return opened.map_err(|error| Error::system(path)(error.into())),
            }
        }
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

/// Waits until each queue came so far, or one ended.
fn await_each(
    events: &Receiver<Event>,
    queues: usize,
    so_far: impl Fn(&Event) -> bool,
) -> Result<(), Error> {
    let mut left = queues;
    while left > 0 {
        match events.recv() {
            Ok(event) if so_far(&event) => left -= 1,
            Ok(Event::Resized(_)) => (),
            _ => return Err(Error::Refused("a queue could not be served".to_owned())),
        }
    }
    Ok(())
}

/// Waits until the device is stopped, which ends all queues, and has another size of the disk told.
fn attend(
    events: &Receiver<Event>,
    threads: Vec<JoinHandle<()>>,
    mut resize: impl FnMut(u64) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut left = threads.len();
    while left > 0 {
        match events.recv() {
            Ok(Event::Ended(true)) => left -= 1,
            // Its requests would hang for ever; better to leave all to another process. The other
            // queues are not waited for: they end when the device is stopped, which nobody does.
            Ok(Event::Ended(false)) | Err(_) => {
                return Err(Error::Refused("a queue failed".to_owned()));
            }
            Ok(Event::Resized(bytes)) => {
                if let Err(error) = resize(bytes) {
                    log::error!("{error}");
                }
            }
            Ok(Event::Connected | Event::Ready) => (),
        }
    }
    threads.into_iter().for_each(|thread| drop(thread.join()));
    Ok(())
}

/// Waits until the threads of a device that did not start have ended.
fn end(threads: Vec<JoinHandle<()>>, mut stop: impl FnMut()) {
    while threads.iter().any(|thread| !thread.is_finished()) {
        // It ends the commands that the kernel has by now; a queue may be giving it more.
        stop();
        std::thread::sleep(Duration::from_millis(10));
    }
    threads.into_iter().for_each(|thread| drop(thread.join()));
}

/// Tells that a queue has ended, also when its thread panics.
struct Ending<'a> {
    tell: &'a Sender<Event>,
    served: bool,
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        let _ = self.tell.send(Event::Ended(self.served));
    }
}

/// The life of a queue's thread.
fn run(
    device: &Receiver<Arc<OwnedFd>>,
    shape: Shape,
    size: &AtomicU64,
    backend: &dyn Fn(u16, Sender<Event>) -> Result<Box<dyn Backend>, Error>,
    tell: &Sender<Event>,
) {
    let mut ending = Ending { tell, served: false };
    let served = || -> Result<(), Error> {
        let mut backend = backend(shape.number, tell.clone())?;
        let _ = tell.send(Event::Connected);
        // Without one it is another queue that failed.
        let Ok(device) = device.recv() else { return Ok(()) };
        let mut queue = Queue::new(device.as_fd(), shape)?;
        let failed = || Error::system(format!("queue {}", shape.number));
        queue.fetch().map_err(failed())?;
        let _ = tell.send(Event::Ready);
        queue.serve(&mut *backend, size).map_err(failed())
    };
    match served() {
        Ok(()) => ending.served = true,
        Err(error) => log::error!("{error}"),
    }
}

#[cfg(test)]
mod tests;
