//! Directory entries, as encoded in the payload of a listing.
//!
//! Each entry: cookie `u64`, inode `u64`, file type `u8` (`DT_*`), flag `u8` (one: attributes
//! follow), name as a byte string, attributes if flagged.

use crate::attr::Attr;
use crate::codec::{Field, ProtocolError, Reader};
use crate::items::{Item, Items, is_name};

/// One name in a directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry<'a> {
    /// Position at which the listing continues after this entry.
    pub cookie: u64,
    /// Inode number.
    pub inode: u64,
    /// `DT_*` of `readdir(3)`; zero if unknown.
    pub file_type: u8,
    /// The name: any bytes but zero and slash. `.` and `..` are listed as in a local directory.
    pub name: &'a [u8],
    /// Attributes, if requested and available.
    pub attr: Option<Attr>,
}

impl Entry<'_> {
    /// Returns the size of the encoding in bytes.
    #[must_use]
    pub fn encoded_bytes(&self) -> usize {
        8 + 8
            + 1
            + 1
            + 4
            + self.name.len()
            + if self.attr.is_some() { crate::attr::ATTR_BYTES } else { 0 }
    }

    /// Appends the encoding to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        self.cookie.encode(out);
        self.inode.encode(out);
        self.file_type.encode(out);
        u8::from(self.attr.is_some()).encode(out);
        self.name.encode(out);
        if let Some(attr) = &self.attr {
            attr.encode(out);
        }
    }
}

/// Iterates over the entries of a listing's payload.
pub type Entries<'a> = Items<'a, Entry<'a>>;

impl<'a> Item<'a> for Entry<'a> {
    fn read(reader: &mut Reader<'a>) -> Result<Self, ProtocolError> {
        let cookie = Field::decode(reader)?;
        let inode = Field::decode(reader)?;
        let file_type = Field::decode(reader)?;
        let flagged = u8::decode(reader)?;
        let name = <&[u8]>::decode(reader)?;
        if name.is_empty() || !is_name(name) {
            return Err(reader.error("illegal name in a listing"));
        }
        let attr = match flagged {
            0 => None,
            1 => Some(Attr::decode(reader)?),
            _ => return Err(reader.error("illegal flag in a listing")),
        };
        Ok(Self { cookie, inode, file_type, name, attr })
    }
}
