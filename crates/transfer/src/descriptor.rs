//! Encodes and decodes global aggregates: pack and unpack.
//!
//! | bytes | field |
//! |---|---|
//! | 4 | magic |
//! | 1 | number of homes |
//! | | each home: node 8, machine 8, number of addresses 1, each address: tag 1 and its fields |
//! | 2 | number of parts |
//! | | each part: home 1, kind 1, access 1, handle 4, generation 8, offset 8, length 8 |
//!
//! Each aggregate has exactly one encoding; any other is refused.

use crate::global::{Access, Global, Home, Part, PartKind, same_home};
use crate::limits::{ADDRESSES_MAX, DESCRIPTOR_BYTES_MAX, HOMES_MAX, PARTS_MAX};
use crate::{Error, ProtocolError};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::sync::Arc;
use towline_net::address::Address;
use towline_wire::codec::{Field, Reader};

const MAGIC: u32 = 0x3147_5754; // "TWG1" as little-endian bytes
/// `sun_path` of `unix(7)` without its terminating zero.
const SOCKET_NAME_BYTES_MAX: usize = 107;

impl Global {
    /// Encodes this descriptor; touches no data.
    ///
    /// # Errors
    /// `Invalid`: more than 1024 parts, 64 owners or 64 KiB.
    pub fn pack(&self) -> Result<Vec<u8>, Error> {
        self.check_limits()?;
        let homes = self.homes();
        let mut out = Vec::with_capacity(64 + 34 * self.parts().len());
        MAGIC.encode(&mut out);
        (homes.len() as u8).encode(&mut out);
        for home in &homes {
            encode_home(home, &mut out)?;
        }
        (self.parts().len() as u16).encode(&mut out);
        for part in self.parts() {
            let home = homes.iter().position(|home| same_home(home, &part.home));
            (home.unwrap_or_default() as u8).encode(&mut out);
            encode_kind(part.kind).encode(&mut out);
            u8::from(part.access == Access::ReadWrite).encode(&mut out);
            part.handle.encode(&mut out);
            part.generation.encode(&mut out);
            part.offset.encode(&mut out);
            part.length.encode(&mut out);
        }
        if out.len() > DESCRIPTOR_BYTES_MAX {
            return Err(Error::Invalid("packed aggregate longer than 64 KiB"));
        }
        Ok(out)
    }

    /// Decodes a descriptor. The bytes may come from anywhere: an accepted descriptor is well formed,
    /// but only their owners know whether its handles are valid.
    ///
    /// # Errors
    /// What is wrong with the bytes, and where.
    pub fn unpack(bytes: &[u8]) -> Result<Self, ProtocolError> {
        let mut reader = Reader::new(bytes);
        if bytes.len() > DESCRIPTOR_BYTES_MAX {
            return Err(reader.error("descriptor longer than the limit"));
        }
        if u32::decode(&mut reader)? != MAGIC {
            return Err(reader.error("no descriptor of buffers"));
        }
        let count = usize::from(u8::decode(&mut reader)?);
        if count > HOMES_MAX {
            return Err(reader.error("more owners than the limit"));
        }
        let mut homes: Vec<Arc<Home>> = Vec::with_capacity(count);
        for _ in 0..count {
            let home = decode_home(&mut reader)?;
            if homes.iter().any(|other| **other == home) {
                return Err(reader.error("owner named twice"));
            }
            homes.push(Arc::new(home));
        }
        let count = usize::from(u16::decode(&mut reader)?);
        if count > PARTS_MAX {
            return Err(reader.error("more parts than the limit"));
        }
        let mut global = Self::new();
        let mut homes_used = 0;
        for index in 0..count {
            let part = decode_part(&mut reader, &homes, &mut homes_used)?;
            global.append(part).map_err(|_| reader.error("part is empty or too long"))?;
            if global.parts().len() != index + 1 {
                return Err(reader.error("neighbouring parts are not joined"));
            }
        }
        if homes_used != homes.len() {
            return Err(reader.error("owner without a part"));
        }
        if !reader.is_empty() {
            return Err(reader.error("bytes after the descriptor"));
        }
        Ok(global)
    }
}

fn decode_part(
    reader: &mut Reader<'_>,
    homes: &[Arc<Home>],
    homes_used: &mut usize,
) -> Result<Part, ProtocolError> {
    let home = usize::from(u8::decode(reader)?);
    if home >= homes.len() || home > *homes_used {
        return Err(reader.error("part of an owner that is not named, or not in order"));
    }
    *homes_used = (*homes_used).max(home + 1);
    Ok(Part {
        home: homes[home].clone(),
        kind: decode_kind(reader)?,
        access: match u8::decode(reader)? {
            0 => Access::Read,
            1 => Access::ReadWrite,
            _ => return Err(reader.error("unknown access")),
        },
        handle: Field::decode(reader)?,
        generation: Field::decode(reader)?,
        offset: Field::decode(reader)?,
        length: Field::decode(reader)?,
    })
}

fn encode_home(home: &Home, out: &mut Vec<u8>) -> Result<(), Error> {
    if home.addresses.len() > ADDRESSES_MAX {
        return Err(Error::Invalid("node with more than 4 addresses"));
    }
    home.node.encode(out);
    home.host.encode(out);
    (home.addresses.len() as u8).encode(out);
    for address in &home.addresses {
        match address {
            Address::Tcp(SocketAddr::V4(v4)) => {
                out.push(4);
                out.extend_from_slice(&v4.ip().octets());
                v4.port().encode(out);
            }
            Address::Tcp(SocketAddr::V6(v6)) => {
                out.push(6);
                out.extend_from_slice(&v6.ip().octets());
                v6.port().encode(out);
            }
            Address::Unix(path) => encode_name(1, path.as_os_str().as_bytes(), out)?,
            Address::Abstract(name) => encode_name(2, name.as_bytes(), out)?,
            _ => return Err(Error::Invalid("address of a kind that cannot be packed")),
        }
    }
    Ok(())
}

fn encode_name(tag: u8, name: &[u8], out: &mut Vec<u8>) -> Result<(), Error> {
    if name.is_empty() || name.len() > SOCKET_NAME_BYTES_MAX {
        return Err(Error::Invalid("socket name is empty or longer than 107 bytes"));
    }
    out.push(tag);
    out.push(name.len() as u8);
    out.extend_from_slice(name);
    Ok(())
}

fn decode_home(reader: &mut Reader<'_>) -> Result<Home, ProtocolError> {
    let (node, host) = (Field::decode(reader)?, Field::decode(reader)?);
    let count = usize::from(u8::decode(reader)?);
    if count > ADDRESSES_MAX {
        return Err(reader.error("more addresses than the limit"));
    }
    let addresses = (0..count).map(|_| decode_address(reader)).collect::<Result<_, _>>()?;
    Ok(Home { node, host, addresses })
}

fn decode_address(reader: &mut Reader<'_>) -> Result<Address, ProtocolError> {
    let tag = u8::decode(reader)?;
    match tag {
        4 => {
            let ip: [u8; 4] = octets(reader)?;
            Ok(Address::Tcp(SocketAddr::new(IpAddr::from(ip), Field::decode(reader)?)))
        }
        6 => {
            let ip: [u8; 16] = octets(reader)?;
            Ok(Address::Tcp(SocketAddr::new(IpAddr::from(ip), Field::decode(reader)?)))
        }
        1 | 2 => {
            let length = usize::from(u8::decode(reader)?);
            if length == 0 || length > SOCKET_NAME_BYTES_MAX {
                return Err(reader.error("socket name is empty or too long"));
            }
            let name = reader.take(length)?.to_vec();
            if tag == 1 {
                if name[0] != b'/' || name.contains(&0) {
                    return Err(reader.error("socket path is not absolute or contains a zero"));
                }
                return Ok(Address::Unix(std::ffi::OsString::from_vec(name).into()));
            }
            let name = String::from_utf8(name).map_err(|_| reader.error("name is no UTF-8"))?;
            Ok(Address::Abstract(name))
        }
        _ => Err(reader.error("unknown kind of address")),
    }
}

fn octets<const N: usize>(reader: &mut Reader<'_>) -> Result<[u8; N], ProtocolError> {
    let mut bytes = [0; N];
    bytes.copy_from_slice(reader.take(N)?);
    Ok(bytes)
}

fn encode_kind(kind: PartKind) -> u8 {
    match kind {
        PartKind::Host => 0,
        PartKind::Registered => 1,
        PartKind::Shared => 2,
        PartKind::Mappable => 3,
        PartKind::File => 4,
    }
}

fn decode_kind(reader: &mut Reader<'_>) -> Result<PartKind, ProtocolError> {
    Ok(match u8::decode(reader)? {
        0 => PartKind::Host,
        1 => PartKind::Registered,
        2 => PartKind::Shared,
        3 => PartKind::Mappable,
        4 => PartKind::File,
        _ => return Err(reader.error("unknown kind of memory")),
    })
}
