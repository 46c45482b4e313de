//! Directory entries as they stand in a listing's payload.
//!
//! Each entry: cookie `u64`, inode `u64`, file type `u8` (`DT_*`), flag `u8` (one: attributes
//! follow), name as a byte string, attributes if flagged.

use crate::attr::Attr;
use crate::codec::{Field, ProtocolError, Reader};
use crate::limits::NAME_BYTES_MAX;

/// One name in a directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry<'a> {
    /// Where the listing goes on after this entry.
    pub cookie: u64,
    /// Inode number.
    pub inode: u64,
    /// `DT_*` of `readdir(3)`, zero where unknown.
    pub file_type: u8,
    /// The name: any bytes but zero and slash; `.` and `..` are listed as on a local directory.
    pub name: &'a [u8],
    /// Attributes, if they were asked for and could be had.
    pub attr: Option<Attr>,
}

impl Entry<'_> {
    /// Bytes of the encoding.
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
#[derive(Clone, Debug)]
pub struct Entries<'a>(Reader<'a>);

impl<'a> Entries<'a> {
    /// Reads `payload` from its first byte.
    #[must_use]
    pub fn new(payload: &'a [u8]) -> Self {
        Self(Reader::new(payload))
    }

    fn entry(&mut self) -> Result<Entry<'a>, ProtocolError> {
        let reader = &mut self.0;
        let cookie = Field::decode(reader)?;
        let inode = Field::decode(reader)?;
        let file_type = Field::decode(reader)?;
        let flagged = u8::decode(reader)?;
        let name = <&[u8]>::decode(reader)?;
        if name.is_empty()
            || name.len() > NAME_BYTES_MAX
            || name.contains(&0)
            || name.contains(&b'/')
        {
            return Err(reader.error("illegal name in a listing"));
        }
        let attr = match flagged {
            0 => None,
            1 => Some(Attr::decode(reader)?),
            _ => return Err(reader.error("illegal flag in a listing")),
        };
        Ok(Entry { cookie, inode, file_type, name, attr })
    }
}

impl<'a> Iterator for Entries<'a> {
    type Item = Result<Entry<'a>, ProtocolError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let entry = self.entry();
        if entry.is_err() {
            self.0 = Reader::new(&[]);
        }
        Some(entry)
    }
}
