//! A device of the kernel's own NBD client: we agree with the server and hand over the sockets;
//! when one dies we agree on another.

use super::netlink::{Attributes, Netlink, attribute, command};
use super::source::{Connection, Source};
use crate::error::{Logged, NOT_ALLOWED};
use crate::watch::PERIOD;
use crate::{Error, Geometry, sysfs};
use std::io;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// Longest block that the kernel takes.
const BLOCK_BYTES_MAX: u32 = 4096;
/// Between attempts to connect: grows from the first to the second.
const PAUSE: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(2));

/// How a device is to be made.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::exhaustive_structs)] // given by callers
pub struct KernelOptions {
    /// Its number N in `/dev/nbdN`; any that is free unless given.
    pub number: Option<u32>,
    /// Connections, at least 1; one where the server says that several see different disks.
    pub connections: u16,
    /// A request that is not answered in this time is asked again on another connection.
    pub timeout: Duration,
    /// How long requests wait for a server that went away before they fail.
    pub patience: Option<Duration>,
}

/// A device of the kernel's NBD client, and our duty to connect it again.
#[derive(Debug)]
pub struct Kernel {
    netlink: Netlink,
    source: Source,
    geometry: Geometry,
    /// Bytes of the device, as the kernel knows.
    size: u64,
    /// Another size of the disk, seen once.
    next_size: Option<u64>,
    asked: Instant,
    number: u32,
    connections: u16,
    /// What the kernel says who made it: another text means that it is another device by now.
    owner: String,
}

fn sockets(connections: &[Connection]) -> Attributes {
    connections.iter().fold(Attributes::default(), |list, connection| {
        let descriptor = connection.socket.as_raw_fd() as u32;
        let inside = Attributes::default().u32(attribute::SOCKET_DESCRIPTOR, descriptor);
        list.nested(attribute::SOCKET_ITEM, &inside)
    })
}

/// Who made the device of this number; `None` when it is not in use.
#[must_use]
pub fn owner(number: u32) -> Option<String> {
    std::fs::read_to_string(format!("/sys/block/nbd{number}/pid")).ok()
}

/// Why the kernel made no device, with what to do where that is known.
fn refused(number: Option<u32>, error: io::Error) -> Error {
    match (number, error.raw_os_error()) {
        (Some(number), Some(libc::EBUSY)) => {
            Error::Refused(format!("/dev/nbd{number} is in use already: choose another number"))
        }
        (_, Some(libc::EPERM)) => Error::Refused(NOT_ALLOWED.to_owned()),
        _ => Error::system("the kernel's NBD client")(error),
    }
}

/// Keeps the requests of a new device within what the server takes; yields its owner.
fn adjusted(number: u32, transfer_maximum: u32) -> Result<String, Error> {
    let (name, attribute) = (format!("nbd{number}"), "max_sectors_kb");
    if u64::from(transfer_maximum) < sysfs::length(&name, attribute)? {
        sysfs::set_length(&name, attribute, transfer_maximum.into())?;
    }
    owner(number).ok_or_else(|| {
        Error::Refused(format!("/sys/block/{name}/pid does not say who made the device"))
    })
}

/// Bytes of a device.
fn size_of(number: u32) -> Option<u64> {
    let sectors = std::fs::read_to_string(format!("/sys/block/nbd{number}/size")).ok()?;
    Some(sectors.trim().parse::<u64>().ok()? * 512)
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

    /// Connects, agrees, and makes a device; also tells how long the server takes to answer.
    ///
    /// # Errors
    /// When the server or the kernel refuses.
    pub fn attach(source: &Source, options: &KernelOptions) -> Result<(Self, Duration), Error> {
        let mut netlink = Netlink::open()?;
        let mut connections = vec![source.connect()?];
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
            connections.push(source.connect()?);
        }
        let mut attributes = Attributes::default();
        if let Some(number) = options.number {
            attributes = attributes.u32(attribute::INDEX, number);
        }
        // Without a limit, something near 30 years: the kernel knows no "for ever".
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
            .ok_or(Error::Protocol("the kernel does not say which device it made"))?;
        let owner = adjusted(number, transfer_maximum).inspect_err(|_| {
            let _ = Self::detach(number);
        })?;
        let round_trips = connections.iter().map(|connection| connection.round_trip);
        let round_trip = round_trips.min().unwrap_or_default();
        let connections = connections.len() as u16;
        let kernel = Self::new(netlink, source, geometry, size, number, connections, owner);
        Ok((kernel, round_trip))
    }

    /// Takes over the duty for a device whose process is gone.
    ///
    /// # Errors
    /// When there is no such device, or it belongs to somebody else than `expected`.
    pub fn resume(
        source: &Source,
        number: u32,
        connections: u16,
        expected: &str,
        geometry: Geometry,
    ) -> Result<Self, Error> {
        let netlink = Netlink::open()?;
        match owner(number) {
            Some(owner) if owner == expected => {
                let size = size_of(number).unwrap_or(geometry.whole_blocks());
                Ok(Self::new(netlink, source, geometry, size, number, connections, owner))
            }
            _ => Err(Error::Refused(format!("/dev/nbd{number} is not attached any more"))),
        }
    }

    /// Its number N in `/dev/nbdN`.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// How many connections the kernel has.
    #[must_use]
    pub fn connections(&self) -> u16 {
        self.connections
    }

    /// What the disk is like.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// What the kernel says who made it, for [`Kernel::resume`].
    #[must_use]
    pub fn owner(&self) -> &str {
        &self.owner
    }

    fn is_over(&self) -> bool {
        owner(self.number).is_none_or(|owner| owner != self.owner)
    }

    /// Replaces connections that die, until the device is detached. `missing`: some may have died
    /// already.
    ///
    /// # Errors
    /// When the kernel cannot be listened to.
    pub fn keep(&mut self, missing: bool) -> Result<(), Error> {
        let mut missing = if missing { self.connections } else { 0 };
        while !self.is_over() {
            while missing > 0 && !self.is_over() {
                // Some of those that are said to be missing may be there.
                missing = if self.replace() { missing - 1 } else { 0 };
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

    /// Asks the server now and then how long the disk is, and tells the kernel when that has changed.
    ///
    /// The kernel waits for all requests under way before it takes another size, and meanwhile no connection can be
    /// replaced: with one that is dead it would wait for ever. So a size has to be seen twice, and no
    /// connection may have died in between, as they do when a server that comes back has another size.
    fn follow_size(&mut self) {
        if self.next_size.is_none() && self.asked.elapsed() < PERIOD {
            return;
        }
        self.asked = Instant::now();
        // A server that is away is not asked again before its connections are replaced.
        let Ok(connection) = self.source.connect() else { return };
        let now = connection.geometry.size;
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

    /// Replaces one dead connection; false when there is none, or the device is gone.
    fn replace(&mut self) -> bool {
        let (mut pause, mut logged) = (PAUSE.0, Logged::default());
        loop {
            match self.source.connect().and_then(|connection| self.hand_over(connection)) {
                Ok(replaced) => return replaced,
                Err(error) => {
                    logged.warn(&error);
                }
            }
            if self.is_over() {
                return false;
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(PAUSE.1);
        }
    }

    fn hand_over(&mut self, connection: Connection) -> Result<bool, Error> {
        let (old, new) = (self.geometry, connection.geometry);
        if new.block_minimum > old.block_minimum || new.read_only != old.read_only {
            return Err(Error::Refused(format!("{}: another disk now", self.source)));
        }
        // Not the size, see `follow_size`. Ours until the kernel has its own hold on it.
        let connections = [connection];
        let attributes = Attributes::default()
            .u32(attribute::INDEX, self.number)
            .nested(attribute::SOCKETS, &sockets(&connections));
        match self.netlink.command(command::RECONFIGURE, &attributes) {
            Ok(_) => {
                log::warn!("/dev/nbd{}: connected again to {}", self.number, self.source);
                Ok(true)
            }
            Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => Ok(false),
            Err(error) => Err(Error::system("the kernel's NBD client")(error)),
        }
    }

    /// Ends a device. Requests under way fail.
    ///
    /// # Errors
    /// When there is no such device, or this user may not.
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
        assert!(said(Some(3), libc::EINVAL).starts_with("the kernel's NBD client: "));
        assert!(said(None, libc::EBUSY).starts_with("the kernel's NBD client: "));
    }

    #[test]
    fn a_device_that_says_nothing_is_not_kept() {
        // There is none of this number.
        assert!(adjusted(u32::MAX, 4096).is_err());
    }
}
