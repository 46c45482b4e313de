//! A whole device: created or taken over, served by one thread for each queue, and removed.

use super::abi::{Parameters, attribute, feature, part};
use super::control::{Control, Information, State};
use super::queue::{Queue, Shape};
use crate::backend::DeviceGeometry;
use crate::error::Logged;
use crate::{Backend, Error, Geometry};
use rustix::fs::{Mode, OFlags};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Largest logical block that the kernel's block layer supports on every machine.
const BLOCK_BYTES_MAX: u32 = 4096;
/// Longest request without data: whole MiB, with a length in bytes that fits into 32 bits.
const RANGE_SECTORS_MAX: u32 = (((4_u64 << 30) - (1 << 20)) >> 9) as u32;
/// Time the kernel may take to notice that the previous process is gone.
const RECOVERY_WAIT: Duration = Duration::from_secs(60);
/// Time until the node of a new device has to be there.
const NODE_WAIT: Duration = Duration::from_secs(10);

/// Options for a new device.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::exhaustive_structs)] // given by callers
pub struct Options {
    /// The number N in `/dev/ublkbN`; any free one if absent.
    pub number: Option<u32>,
    /// Number of queues, each with a thread and a connection.
    pub queues: u16,
    /// Maximum number of requests under way in each queue, 1 to 4096.
    pub depth: u16,
    /// Longest read or write in bytes, whole pages. Each request under way may need this much memory.
    pub transfer_maximum: u32,
}

/// What happens to a device while it is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A queue has connected to the server.
    Connected,
    /// A queue has given its commands to the kernel.
    Ready,
    /// The size of the disk behind the device, in bytes; it may be a new one.
    Resized(u64),
    /// The epoch of the disk, under which nothing is lost; it may be a new one.
    Epoch(u64),
    /// A queue has ended: the device was stopped (true), or the queue failed (false).
    Ended(bool),
}

/// A device that this process serves, or is about to serve.
#[derive(Debug)]
pub struct Device {
    information: Information,
    /// Size in bytes, against which the queues check requests.
    size: Arc<AtomicU64>,
    taken_over: bool,
}

/// Returns what tells a device, started or not, from earlier and later ones of its number; `None` if the driver
/// has none of this number. Needs no permission.
#[must_use]
pub fn owner(number: u32) -> Option<String> {
    identity(&node(number)).ok()
}

/// Returns what tells a node from others that had its path: the kernel makes it with another inode number each
/// time.
fn identity(path: &str) -> rustix::io::Result<String> {
    Ok(rustix::fs::stat(path)?.st_ino.to_string())
}

/// Returns the path of the node through which a device is served.
fn node(number: u32) -> String {
    format!("/dev/ublkc{number}")
}

/// Returns the parameters of a device for this disk.
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

/// Returns the sectors of a disk, without the bytes after the last whole block.
fn sectors(size: u64, block: u32) -> u64 {
    size / u64::from(block) * u64::from(block) / 512
}

impl Device {
    /// Creates a device. Users see it only once [`Device::serve`] has started it.
    ///
    /// # Errors
    /// If the kernel refuses, or the disk cannot be a block device.
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

    /// Prepares to take over a device whose process is gone; [`Device::serve`] then does so. Requests of
    /// its users wait meanwhile, and unanswered ones come again.
    ///
    /// # Errors
    /// If there is no such device, if it was stopped, or if the disk is a different one now.
    pub fn recover(control: &mut Control, number: u32, geometry: &Geometry) -> Result<Self, Error> {
        let information = control.information(number)?;
        // A stopped device cannot be started again; its users' requests have failed.
        let information = information.filter(|found| found.state != State::Dead).ok_or_else(|| {
            Error::Refused(format!(
                "/dev/ublkb{number} is gone or was stopped; detach it with --force and attach it again"
            ))
        })?;
        let old = control.parameters(number)?;
        geometry.continues(DeviceGeometry {
            bytes: old.sectors * 512,
            block: 1 << old.logical_block_shift,
            read_only: old.attributes & attribute::READ_ONLY != 0,
        })?;
        Ok(Self::new(information, old.sectors * 512, true))
    }

    fn new(information: Information, size: u64, taken_over: bool) -> Self {
        Self { information, size: Arc::new(AtomicU64::new(size)), taken_over }
    }

    /// Returns what the driver knew about the device when it was created or found.
    #[must_use]
    pub fn information(&self) -> &Information {
        &self.information
    }

    /// Serves the device until another process stops it, as `detach` does. `backend` connects for a
    /// queue, and gets a sender to report size changes; `started` is called once the device can be used, and `epoch`
    /// with each epoch that is reported.
    ///
    /// # Errors
    /// If the device cannot start, or `started` fails: a new device is then removed, and one that was taken over waits for
    /// the next process once this one ends. If a queue fails: the caller should end the process soon,
    /// because the requests of that queue wait for the next one, while the other queues go on.
    pub fn serve<F>(
        self,
        control: &mut Control,
        backend: F,
        started: impl FnOnce() -> Result<(), Error>,
        epoch: impl FnMut(u64),
    ) -> Result<(), Error>
    where
        F: Fn(u16, Sender<Event>) -> Result<Box<dyn Backend>, Error> + Send + Sync + 'static,
    {
        let (tell, events) = mpsc::channel();
        let (mut gates, mut threads) = (Vec::new(), Vec::new());
        let ready = self
            .spawn(&Arc::new(backend), &tell, &mut gates, &mut threads)
            .and_then(|()| self.start(control, &events, gates))
            .and_then(|()| started());
        if let Err(error) = ready {
            if !self.taken_over {
                let number = self.information.number;
                end(threads, || drop(control.stop(number)));
                let _ = control.delete(number);
            }
            return Err(error);
        }
        attend(&events, threads, |bytes| self.resize(control, bytes), epoch)
    }

    /// Starts the threads of the queues. Each connects, and then waits at its gate for the device.
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
        // Once a recovery has begun, the kernel refuses another one until a queue has fetched. So what
        // may fail for other reasons, the connections, comes first.
        await_each(events, gates.len(), |event| matches!(event, Event::Connected))?;
        if self.taken_over {
            self.begin_recovery(control)?;
        }
        let device = Arc::new(self.open()?);
        for gate in &gates {
            // A queue that has ended reports that itself.
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
                // The kernel has not finished with the old process yet.
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
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        self.at_node(|path| rustix::fs::open(path, flags, Mode::empty()))
    }

    /// Returns what tells the device from others of its number, as [`owner`] does.
    ///
    /// # Errors
    /// If its node does not appear.
    pub fn owner(&self) -> Result<String, Error> {
        self.at_node(identity)
    }

    /// Does something with the node, once it is there.
    fn at_node<T>(&self, work: impl Fn(&str) -> rustix::io::Result<T>) -> Result<T, Error> {
        let path = node(self.information.number);
        let end = Instant::now() + NODE_WAIT;
        loop {
            match work(&path) {
                Err(rustix::io::Errno::NOENT) if Instant::now() < end => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                done => return done.map_err(|error| Error::system(path)(error.into())),
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
                "/dev/ublkb{number}: the disk has {bytes} bytes now; this kernel cannot announce a new size (Linux 6.16 can): detach and attach again"
            )));
        }
        // Set the smaller size first, so that no request beyond the end gets through.
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

/// Waits for this event from each queue. Fails as soon as a queue has ended.
fn await_each(
    events: &Receiver<Event>,
    queues: usize,
    so_far: impl Fn(&Event) -> bool,
) -> Result<(), Error> {
    let mut left = queues;
    while left > 0 {
        match events.recv() {
            Ok(event) if so_far(&event) => left -= 1,
            // It is told again.
            Ok(Event::Resized(_) | Event::Epoch(_)) => (),
            _ => return Err(Error::Refused("cannot serve a queue".to_owned())),
        }
    }
    Ok(())
}

/// Waits until the device is stopped, which ends all queues, and passes on sizes and epochs meanwhile.
fn attend(
    events: &Receiver<Event>,
    threads: Vec<JoinHandle<()>>,
    mut resize: impl FnMut(u64) -> Result<(), Error>,
    mut epoch: impl FnMut(u64),
) -> Result<(), Error> {
    // A size that the kernel refuses is told again and again.
    let (mut left, mut logged) = (threads.len(), Logged::default());
    while left > 0 {
        match events.recv() {
            Ok(Event::Ended(true)) => left -= 1,
            // The requests of this queue would hang for ever, so leave the device to another process.
            // Do not wait for the other queues: they end only when the device is stopped.
            Ok(Event::Ended(false)) | Err(_) => {
                return Err(Error::Refused("a queue failed".to_owned()));
            }
            Ok(Event::Resized(bytes)) => match resize(bytes) {
                Ok(()) => logged = Logged::default(),
                Err(error) if logged.is_new(&error) => log::error!("{error}"),
                Err(_) => (),
            },
            Ok(Event::Epoch(now)) => epoch(now),
            Ok(Event::Connected | Event::Ready) => (),
        }
    }
    threads.into_iter().for_each(|thread| drop(thread.join()));
    Ok(())
}

/// Stops a device that did not start, until the threads of its queues have ended.
fn end(threads: Vec<JoinHandle<()>>, mut stop: impl FnMut()) {
    while threads.iter().any(|thread| !thread.is_finished()) {
        // A stop cancels the commands that the kernel has now; a queue may be giving it more.
        stop();
        std::thread::sleep(Duration::from_millis(10));
    }
    threads.into_iter().for_each(|thread| drop(thread.join()));
}

/// Reports the end of a queue, even if its thread panics.
struct Ending<'a> {
    tell: &'a Sender<Event>,
    served: bool,
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        let _ = self.tell.send(Event::Ended(self.served));
    }
}

/// Runs a queue on its own thread, from connecting to the end.
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
        // There is no device if another queue failed.
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
