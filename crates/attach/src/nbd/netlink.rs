//! Messages to and from the kernel's NBD client over generic netlink. What they mean for a device is in
//! `kernel.rs`.
//!
//! A message is a header, a command and attributes. Numbers are in native byte order, and everything is
//! aligned to 4 bytes.

use crate::Error;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink::SocketAddrNetlink,
};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

/// Commands of the family `nbd`.
pub(super) mod command {
    pub(in super::super) const CONNECT: u8 = 1;
    pub(in super::super) const DISCONNECT: u8 = 2;
    pub(in super::super) const RECONFIGURE: u8 = 3;
    pub(in super::super) const LINK_DEAD: u8 = 4;
}

/// Attributes of the family `nbd`.
pub(super) mod attribute {
    pub(in super::super) const INDEX: u16 = 1;
    pub(in super::super) const SIZE_BYTES: u16 = 2;
    pub(in super::super) const BLOCK_SIZE_BYTES: u16 = 3;
    pub(in super::super) const TIMEOUT: u16 = 4;
    pub(in super::super) const SERVER_FLAGS: u16 = 5;
    pub(in super::super) const SOCKETS: u16 = 7;
    pub(in super::super) const DEAD_CONNECTION_TIMEOUT: u16 = 8;
    /// Inside SOCKETS, and inside each of its items.
    pub(in super::super) const SOCKET_ITEM: u16 = 1;
    pub(in super::super) const SOCKET_DESCRIPTOR: u16 = 1;
}

const HEADER_BYTES: usize = 16;
const COMMAND_BYTES: usize = 4;
const KIND_ERROR: u16 = 2;
const KIND_CONTROLLER: u16 = 16;
const FLAG_REQUEST: u16 = 1;
const FLAG_ACK: u16 = 4;
const GET_FAMILY: u8 = 3;
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;
const FAMILY_GROUPS: u16 = 7;
const GROUP_NAME: u16 = 1;
const GROUP_ID: u16 = 2;
const NESTED: u16 = 1 << 15;
const TYPE_MASK: u16 = !(3 << 14);
const FAMILY: &str = "nbd";
const GROUP: &[u8] = b"nbd_mc_group\0";

/// Attributes of a message that is being built.
#[derive(Debug, Default)]
pub(super) struct Attributes(Vec<u8>);

impl Attributes {
    pub(super) fn bytes(mut self, kind: u16, value: &[u8]) -> Self {
        self.0.extend((value.len() as u16 + 4).to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    pub(super) fn u32(self, kind: u16, value: u32) -> Self {
        self.bytes(kind, &value.to_ne_bytes())
    }

    pub(super) fn u64(self, kind: u16, value: u64) -> Self {
        self.bytes(kind, &value.to_ne_bytes())
    }

    pub(super) fn nested(self, kind: u16, inside: &Self) -> Self {
        self.bytes(kind | NESTED, &inside.0)
    }
}

/// Iterates over attributes, up to the first incomplete one.
fn attributes(bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let length = usize::from(u16::from_ne_bytes(rest.get(..2)?.try_into().ok()?));
        let kind = u16::from_ne_bytes(rest.get(2..4)?.try_into().ok()?) & TYPE_MASK;
        let value = rest.get(4..length)?;
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

fn u32_of(bytes: &[u8]) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?))
}

fn message(kind: u16, sequence: u32, command: u8, attributes: &Attributes) -> Vec<u8> {
    let length = HEADER_BYTES + COMMAND_BYTES + attributes.0.len();
    let mut bytes = (length as u32).to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend((FLAG_REQUEST | FLAG_ACK).to_ne_bytes());
    bytes.extend(sequence.to_ne_bytes());
    bytes.extend(0_u32.to_ne_bytes());
    bytes.extend([command, 1, 0, 0]);
    bytes.extend(&attributes.0);
    bytes
}

/// One message from the kernel.
struct Message<'a> {
    kind: u16,
    sequence: u32,
    body: &'a [u8],
}

/// Iterates over received messages, up to the first incomplete one.
fn messages(bytes: &[u8]) -> impl Iterator<Item = Message<'_>> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let length = u32_of(rest)? as usize;
        let kind = u16::from_ne_bytes(rest.get(4..6)?.try_into().ok()?);
        let sequence = u32_of(rest.get(8..)?)?;
        let body = rest.get(HEADER_BYTES..length)?;
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(Message { kind, sequence, body })
    })
}

/// Returns the INDEX attribute in the body of a message, the number of a device.
fn index(body: &[u8]) -> Option<u32> {
    let (_, value) =
        attributes(body.get(COMMAND_BYTES..)?).find(|(k, _)| *k == attribute::INDEX)?;
    u32_of(value)
}

/// A connection to the kernel's NBD client.
#[derive(Debug)]
pub(super) struct Netlink {
    commands: OwnedFd,
    /// Receives only what the kernel announces by itself.
    news: OwnedFd,
    family: u16,
    sequence: u32,
}

fn socket(groups: u32) -> Result<OwnedFd, Error> {
    let failed = |error: Errno| Error::system("netlink")(error.into());
    let protocol = Some(rustix::net::netlink::GENERIC);
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, protocol)
        .map_err(failed)?;
    rustix::net::bind(&socket, &SocketAddrNetlink::new(0, groups)).map_err(failed)?;
    Ok(socket)
}

/// Explains why the kernel's NBD client does not answer; `loaded` says whether the kernel has it.
fn unreachable_client(loaded: bool) -> Error {
    let why = match loaded {
        true => {
            "the kernel's NBD client only answers in the machine's first network namespace \
             (try nsenter --net=/proc/1/ns/net)"
        }
        false => "the kernel has no NBD client, or its module is not loaded (try modprobe nbd)",
    };
    Error::Refused(why.to_owned())
}

impl Netlink {
    /// Finds the kernel's NBD client.
    ///
    /// # Errors
    /// If the kernel has none, its module is not loaded, or this is another network namespace than the first.
    pub(super) fn open() -> Result<Self, Error> {
        let commands = socket(0)?;
        let missing = || unreachable_client(Path::new("/sys/module/nbd").exists());
        let name = format!("{FAMILY}\0");
        let asked = Attributes::default().bytes(FAMILY_NAME, name.as_bytes());
        let (mut family, mut group) = (None, None);
        exchange(&commands, message(KIND_CONTROLLER, 1, GET_FAMILY, &asked), 1, |body| {
            for (kind, value) in attributes(body.get(COMMAND_BYTES..).unwrap_or_default()) {
                match kind {
                    FAMILY_ID => family = value.try_into().ok().map(u16::from_ne_bytes),
                    FAMILY_GROUPS => {
                        for (_, inside) in attributes(value) {
                            let found = |wanted| {
                                attributes(inside).find(|(k, _)| *k == wanted).map(|(_, v)| v)
                            };
                            if found(GROUP_NAME) == Some(GROUP) {
                                group = found(GROUP_ID).and_then(u32_of);
                            }
                        }
                    }
                    _ => (),
                }
            }
        })
        .map_err(|error| match error.raw_os_error() {
            Some(libc::ENOENT) => missing(),
            _ => Error::system("looking for the kernel's NBD client")(error),
        })?;
        let family = family.ok_or_else(missing)?;
        // `bind` has room for 32 groups. The kernel assigns small numbers first.
        let group = group
            .filter(|group| (1..=32).contains(group))
            .ok_or_else(|| Error::Refused("cannot listen to the kernel's NBD client".to_owned()))?;
        let news = socket(1 << (group - 1))?;
        rustix::net::sockopt::set_socket_timeout(
            &news,
            rustix::net::sockopt::Timeout::Recv,
            Some(Duration::from_secs(2)),
        )
        .map_err(|error| Error::system("netlink")(error.into()))?;
        Ok(Self { commands, news, family, sequence: 1 })
    }

    /// Carries out a command. Returns the number of the device, if the kernel answers with one.
    pub(super) fn command(
        &mut self,
        command: u8,
        attributes: &Attributes,
    ) -> io::Result<Option<u32>> {
        self.sequence = self.sequence.wrapping_add(1);
        let bytes = message(self.family, self.sequence, command, attributes);
        let mut answered = None;
        exchange(&self.commands, bytes, self.sequence, |body| {
            answered = index(body).or(answered);
        })?;
        Ok(answered)
    }

    /// Waits up to two seconds for devices that lose a connection. Returns one entry for each lost
    /// connection, or `None` if announcements were lost.
    pub(super) fn dead_links(&self) -> io::Result<Option<Vec<u32>>> {
        let mut buffer = [0; 8192];
        let length = match rustix::net::recv(&self.news, &mut buffer[..], RecvFlags::empty()) {
            Ok((length, _)) => length.min(buffer.len()),
            Err(Errno::AGAIN | Errno::INTR) => 0,
            Err(Errno::NOBUFS) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let dead = messages(&buffer[..length])
            .filter(|m| m.kind == self.family && m.body.first() == Some(&command::LINK_DEAD))
            .filter_map(|m| index(m.body));
        Ok(Some(dead.collect()))
    }
}

/// Sends a message and passes the answers on until the kernel acknowledges it or reports an error.
fn exchange(
    socket: &OwnedFd,
    bytes: Vec<u8>,
    sequence: u32,
    mut answer: impl FnMut(&[u8]),
) -> io::Result<()> {
    rustix::io::retry_on_intr(|| rustix::net::send(socket, &bytes, SendFlags::empty()))?;
    loop {
        let mut buffer = [0; 8192];
        let (length, _) = rustix::io::retry_on_intr(|| {
            rustix::net::recv(socket, &mut buffer[..], RecvFlags::empty())
        })?;
        for message in messages(&buffer[..length.min(8192)]) {
            if message.sequence != sequence {
                continue;
            }
            if message.kind == KIND_ERROR {
                // Errors are negative numbers, and 0 is the acknowledgement.
                return match u32_of(message.body).map(|error| error as i32) {
                    Some(0) => Ok(()),
                    Some(error) => Err(io::Error::from_raw_os_error(-error)),
                    None => Err(io::Error::other("netlink: a short message")),
                };
            }
            answer(message.body);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_as_they_were_written() {
        let inside = Attributes::default().u32(attribute::SOCKET_DESCRIPTOR, 7);
        let list = Attributes::default().nested(attribute::SOCKET_ITEM, &inside);
        let written = Attributes::default()
            .bytes(9, b"odd")
            .u64(attribute::SIZE_BYTES, 1 << 40)
            .nested(attribute::SOCKETS, &list)
            .u32(attribute::INDEX, 3);
        let mut bytes = message(77, 5, command::LINK_DEAD, &written);
        bytes.extend(message(78, 6, 1, &Attributes::default()));
        let read: Vec<_> = messages(&bytes).collect();
        assert_eq!(read.len(), 2);
        assert_eq!((read[0].kind, read[0].sequence, read[1].kind), (77, 5, 78));
        assert_eq!(index(read[0].body), Some(3));
        let found: Vec<_> = attributes(&read[0].body[COMMAND_BYTES..]).collect();
        assert_eq!(found[0], (9, &b"odd"[..]));
        assert_eq!(found[1], (attribute::SIZE_BYTES, &(1_u64 << 40).to_ne_bytes()[..]));
        let (_, item) = attributes(found[2].1).next().unwrap();
        assert_eq!(attributes(item).next(), Some((1, &7_u32.to_ne_bytes()[..])));
        // However it is cut, nothing is read beyond the end.
        for length in 0..bytes.len() {
            let read: Vec<_> = messages(&bytes[..length]).collect();
            assert!(read.len() < 2);
            for message in read {
                assert!(attributes(message.body).count() < 5);
            }
        }
    }

    #[test]
    fn a_client_in_another_network_namespace_is_not_blamed_on_its_module() {
        assert!(unreachable_client(false).to_string().contains("modprobe nbd"));
        let said = unreachable_client(true).to_string();
        assert!(said.contains("network namespace") && !said.contains("modprobe"), "{said}");
    }
}
