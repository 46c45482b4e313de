//! A device of the kernel's own NBD client: this process negotiates with the server, hands the sockets to
//! the kernel, and replaces connections that die.

use super::netlink::{Attributes, Netlink, attribute, command};
use super::source::{Connection, Source};
use crate::backend::DeviceGeometry;
use crate::error::{Logged, NOT_ALLOWED};
use crate::watch::PERIOD;
use crate::{Error, Geometry, sysfs};
use std::io;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// The limit of a device's requests in sysfs.
const LONGEST: &str = "max_sectors_kb";
/// Largest block that the kernel supports.
const BLOCK_BYTES_MAX: u32 = 4096;
/// Pause between attempts to connect, which grows from the first to the second.
const PAUSE: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(2));

/// Options for a new device.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::exhaustive_structs)] // given by callers
pub struct KernelOptions {
    /// The number N in `/dev/nbdN`; any free one if absent.
    pub number: Option<u32>,
    /// Number of connections, at least 1. Only one is made unless the server says that several see the
    /// same disk.
    pub connections: u16,
    /// Time after which the kernel repeats an unanswered request on another connection.
    pub timeout: Duration,
    /// Time after which requests fail while the server is away; they wait for ever if absent.
    pub patience: Option<Duration>,
}

/// A device of the kernel's NBD client, whose connections this process replaces.
#[derive(Debug)]
pub struct Kernel {
    netlink: Netlink,
    source: Source,
    geometry: Geometry,
    /// Size in bytes, as the kernel knows it.
    size: u64,
    /// A different size of the disk, seen once so far.
    next_size: Option<u64>,
    asked: Instant,
    number: u32,
    connections: u16,
    /// See [`owner`]: if it changes, the number belongs to another device.
    owner: String,
}

fn sockets(connections: &[Connection]) -> Attributes {
    connections.iter().fold(Attributes::default(), |list, connection| {
        let descriptor = connection.socket.as_raw_fd() as u32;
        let inside = Attributes::default().u32(attribute::SOCKET_DESCRIPTOR, descriptor);
        list.nested(attribute::SOCKET_ITEM, &inside)
    })
}

/// Returns what the kernel records about the process that attached this device; `None` if it is not in use.
#[must_use]
pub fn owner(number: u32) -> Option<String> {
    std::fs::read_to_string(format!("/sys/block/nbd{number}/pid")).ok()
}

/// Explains why the kernel made no device, and what to do if that is known.
fn refused(number: Option<u32>, error: io::Error) -> Error {
    match (number, error.raw_os_error()) {
        (Some(number), Some(libc::EBUSY)) => {
            Error::Refused(format!("/dev/nbd{number} is in use already: choose another number"))
        }
        (_, Some(libc::EPERM)) => Error::Refused(NOT_ALLOWED.to_owned()),
        // Its highest number depends on its parameter `max_part`.
        (Some(number), Some(libc::EINVAL)) => Error::Refused(format!(
            "the kernel's NBD client: {error}; it may have no number as high as {number}: choose a lower one"
        )),
        _ => Error::system("the kernel's NBD client")(error),
    }
}

/// Limits the requests of a new device to what the server accepts. Returns the owner of the device.
fn adjusted(number: u32, transfer_maximum: u32) -> Result<String, Error> {
    let name = format!("nbd{number}");
    if u64::from(transfer_maximum) < sysfs::length(&name, LONGEST)? {
        sysfs::set_length(&name, LONGEST, transfer_maximum.into())?;
    }
    owner(number).ok_or_else(|| {
        Error::Refused(format!("/sys/block/{name}/pid does not say who made the device"))
    })
}

/// Checks that a server that is back, and takes `transfer_maximum` bytes at once, takes all requests of a device,
/// of up to `longest` bytes. Some may wait for it already, and those are not cut again.
fn takes(source: &Source, transfer_maximum: u32, longest: u64) -> Result<(), Error> {
    if u64::from(transfer_maximum) >= longest {
        return Ok(());
    }
    Err(Error::Refused(format!(
        "{source}: it takes at most {transfer_maximum} bytes at once now, and requests of the device have up to \
         {longest}: let the server take as many, or detach with --force and attach again"
    )))
}

impl Kernel {
    fn new(
        netlink: Netlink,
        source: &Source,
        geometry: Geometry,
        size: u64,
        number: u32,
        connections: u16,
        owner: String,
    ) -> Self {
        let (source, asked) = (source.clone(), Instant::now());
        Self { netlink, source, geometry, size, next_size: None, asked, number, connections, owner }
    }

    /// Connects, negotiates, and attaches a device. Also returns how long the server takes to answer.
    ///
    /// # Errors
    /// If the server or the kernel refuses.
    pub fn attach(source: &Source, options: &KernelOptions) -> Result<(Self, Duration), Error> {
        let mut netlink = Netlink::open()?;
        let mut connections = vec![source.connect()?];
        let source = &source.named(&connections[0]);
        let (geometry, flags) = (connections[0].geometry, connections[0].flags);
        let block = geometry.block_minimum.max(512);
        if block > BLOCK_BYTES_MAX {
            return Err(Error::Refused(format!(
                "{source}: the disk is made of blocks of {block} bytes; the kernel takes 512 to {BLOCK_BYTES_MAX}"
            )));
        }
        let size = geometry.device_bytes()?;
        let transfer_maximum = geometry.transfer_bytes(u32::MAX)?;
        let wanted = if geometry.connections { usize::from(options.connections) } else { 1 };
        while connections.len() < wanted {
            let another = source.connect()?;
            another.geometry.shareable(source)?;
            connections.push(another);
        }
        let mut attributes = Attributes::default();
        if let Some(number) = options.number {
            attributes = attributes.u32(attribute::INDEX, number);
        }
        // Without a limit some 30 years, because the kernel has no "for ever".
        let patience = options.patience.map_or(1_000_000_000, |patience| patience.as_secs().max(1));
        let attributes = attributes
            .u64(attribute::SIZE_BYTES, size)
            .u64(attribute::BLOCK_SIZE_BYTES, u64::from(block))
            .u64(attribute::TIMEOUT, options.timeout.as_secs().max(1))
            .u64(attribute::SERVER_FLAGS, u64::from(flags))
            .u64(attribute::DEAD_CONNECTION_TIMEOUT, patience)
            .nested(attribute::SOCKETS, &sockets(&connections));
        let number = netlink
            .command(command::CONNECT, &attributes)
            .map_err(|error| refused(options.number, error))?
            .or(options.number)
            .ok_or(Error::Protocol("the kernel did not say which device it created"))?;
        let owner = adjusted(number, transfer_maximum).inspect_err(|_| {
            let _ = Self::detach(number);
        })?;
        let round_trips = connections.iter().map(|connection| connection.round_trip);
        let round_trip = round_trips.min().unwrap_or_default();
        let connections = connections.len() as u16;
        let kernel = Self::new(netlink, source, geometry, size, number, connections, owner);
        Ok((kernel, round_trip))
    }

    /// Takes over a device whose process is gone.
    ///
    /// # Errors
    /// If there is no such device, its owner is not `expected`, or the disk is a different one now.
    pub fn resume(
        source: &Source,
        number: u32,
        connections: u16,
        expected: &str,
        geometry: Geometry,
    ) -> Result<Self, Error> {
        let netlink = Netlink::open()?;
        let owner = owner(number)
            .filter(|owner| owner == expected)
            .ok_or_else(|| Error::Refused(format!("/dev/nbd{number} is no longer attached")))?;
        let device = sysfs::geometry(&format!("nbd{number}"))?;
        geometry.continues(device)?;
        // What a server that is back later has to match.
        let DeviceGeometry { bytes, block, read_only } = device;
        let geometry = Geometry { block_minimum: block, read_only, ..geometry };
        Ok(Self::new(netlink, source, geometry, bytes, number, connections, owner))
    }

    /// Returns the disk, by its own name.
    #[must_use]
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// Returns the number N in `/dev/nbdN`.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Returns the number of connections that the kernel has.
    #[must_use]
    pub fn connections(&self) -> u16 {
        self.connections
    }

    /// Returns size, block sizes and abilities of the disk.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Returns the owner of the device, for [`Kernel::resume`].
    #[must_use]
    pub fn owner(&self) -> &str {
        &self.owner
    }

    fn is_over(&self) -> bool {
        owner(self.number).is_none_or(|owner| owner != self.owner)
    }

    /// Replaces connections that die until the device is detached. With `missing`, some may be dead
    /// already.
    ///
    /// # Errors
    /// If announcements of the kernel cannot be received.
    pub fn keep(&mut self, missing: bool) -> Result<(), Error> {
        let mut missing = if missing { self.connections } else { 0 };
        let (mut pause, mut replaced) = (Duration::ZERO, Instant::now());
        while !self.is_over() {
            if missing > 0 {
                // A server that hangs up again and again is not asked again at once.
                let lasted = replaced.elapsed() >= PAUSE.1;
                pause = if lasted { Duration::ZERO } else { (pause * 2).clamp(PAUSE.0, PAUSE.1) };
                std::thread::sleep(pause);
                while missing > 0 && !self.is_over() {
                    // Some of the connections counted as missing may be alive.
                    missing = if self.replace() { missing - 1 } else { 0 };
                }
                replaced = Instant::now();
            }
            let dead = self.netlink.dead_links().map_err(Error::system("netlink"))?;
            missing = match dead {
                Some(dead) => dead.iter().filter(|number| **number == self.number).count() as u16,
                None => self.connections,
            };
            match missing {
                0 => self.follow_size(),
                _ => self.next_size = None,
            }
        }
        Ok(())
    }

    /// Asks the server regularly for the size of the disk, and tells the kernel about changes.
    ///
    /// The kernel waits for all requests under way before it changes the size, and no connection can be
    /// replaced meanwhile: with a dead connection it would wait for ever. So a new size has to be seen
    /// twice, and no connection may have died in between, as happens when a server restarts with another size.
    fn follow_size(&mut self) {
        if self.next_size.is_none() && self.asked.elapsed() < PERIOD {
            return;
        }
        self.asked = Instant::now();
        // A server that is away is asked again once its connections have been replaced.
        let Ok(connection) = self.source.connect() else { return };
        let now = connection.geometry.size;
        connection.leave();
        let size = Geometry { size: now, ..self.geometry }.whole_blocks();
        if size == self.size || self.next_size != Some(size) {
            self.next_size = (size != self.size).then_some(size);
            return;
        }
        self.next_size = None;
        let attributes = Attributes::default()
            .u32(attribute::INDEX, self.number)
            .u64(attribute::SIZE_BYTES, size);
        match self.netlink.command(command::RECONFIGURE, &attributes) {
            Ok(_) => {
                log::warn!("/dev/nbd{}: {size} bytes now, were {}", self.number, self.size);
                self.size = size;
            }
            Err(error) => log::error!("/dev/nbd{}: {size} bytes: {error}", self.number),
        }
    }

    /// Replaces one dead connection. Returns false if there is none, or if the device is gone.
    fn replace(&mut self) -> bool {
        let (mut pause, mut logged) = (PAUSE.0, Logged::default());
        loop {
            match self.source.connect().and_then(|connection| self.hand_over(connection)) {
                Ok(replaced) => return replaced,
                Err(error) => logged.warn(&error),
            }
            if self.is_over() {
                return false;
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(PAUSE.1);
        }
    }

    fn hand_over(&mut self, connection: Connection) -> Result<bool, Error> {
        let new = connection.geometry;
        // The size is left to `follow_size`.
        new.continues(DeviceGeometry {
            bytes: 0,
            block: self.geometry.block_minimum.max(512),
            read_only: self.geometry.read_only,
        })?;
        if self.connections > 1 {
            new.shareable(&self.source)?;
        }
        let longest = sysfs::length(&format!("nbd{}", self.number), LONGEST)?;
        takes(&self.source, new.transfer_maximum, longest)?;
        // The socket stays open until the kernel has a reference to it.
        let connections = [connection];
        let attributes = Attributes::default()
            .u32(attribute::INDEX, self.number)
            .nested(attribute::SOCKETS, &sockets(&connections));
        match self.netlink.command(command::RECONFIGURE, &attributes) {
            Ok(_) => {
                log::warn!("/dev/nbd{}: reconnected to {}", self.number, self.source);
                Ok(true)
            }
            Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => Ok(false),
            Err(error) => Err(Error::system("the kernel's NBD client")(error)),
        }
    }

    /// Detaches a device. Requests under way fail.
    ///
    /// # Errors
    /// If there is no such device, or this user lacks permission.
    pub fn detach(number: u32) -> Result<(), Error> {
        let attributes = Attributes::default().u32(attribute::INDEX, number);
        Netlink::open()?
            .command(command::DISCONNECT, &attributes)
            .map(drop)
            .map_err(Error::system(format_args!("detaching /dev/nbd{number}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_says_what_to_do() {
        let said = |number, errno| refused(number, io::Error::from_raw_os_error(errno)).to_string();
        assert_eq!(
            said(Some(3), libc::EBUSY),
            "/dev/nbd3 is in use already: choose another number"
        );
        assert_eq!(said(None, libc::EPERM), NOT_ALLOWED);
        let said_high = said(Some(100_000), libc::EINVAL);
        assert!(said_high.contains("no number as high as 100000"), "{said_high}");
        assert!(said(Some(3), libc::EINVAL).starts_with("the kernel's NBD client: "));
        assert!(said(None, libc::EBUSY).starts_with("the kernel's NBD client: "));
    }

    #[test]
    fn a_server_that_takes_less_than_before_does_not_get_what_it_would_refuse() {
        let source = Source::parse("nbd://host/vm1").unwrap();
        takes(&source, 32 << 20, 1280 << 10).unwrap();
        takes(&source, 65536, 65536).unwrap();
        let said = takes(&source, 65535, 65536).unwrap_err().to_string();
        assert!(said.starts_with("nbd://host:10809/vm1: ") && said.contains("65535"), "{said}");
    }

    #[test]
    fn a_device_that_says_nothing_is_not_kept() {
        // No device has this number.
        assert!(adjusted(u32::MAX, 4096).is_err());
    }
}
