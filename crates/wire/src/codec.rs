//! Encoding and decoding of fields, and the macro that defines a set of messages.
//!
//! Numbers are little-endian. Byte strings are a `u32` length and the bytes. A tag byte says
//! which message follows.

use std::fmt;

/// Error: a peer sent bytes that are not a valid message. Its connection has to be closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProtocolError {
    /// What is wrong.
    pub what: &'static str,
    /// Offset in the decoded bytes at which the error was noticed.
    pub at: usize,
}

impl fmt::Display for ProtocolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "protocol error: {} (at byte {})", self.what, self.at)
    }
}

impl std::error::Error for ProtocolError {}

/// A cursor over received bytes that never reads beyond their end.
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    /// Starts at the first byte.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Moves the cursor to offset `at`, or to the end.
    #[must_use]
    pub fn from(self, at: usize) -> Self {
        Self { at: at.min(self.bytes.len()), ..self }
    }

    /// Returns the offset of the cursor.
    #[must_use]
    pub fn at(&self) -> usize {
        self.at
    }

    /// Returns true if every byte has been read.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.at == self.bytes.len()
    }

    /// Makes an error at the current offset.
    #[must_use]
    pub fn error(&self, what: &'static str) -> ProtocolError {
        ProtocolError { what, at: self.at }
    }

    /// Returns the next `count` bytes.
    #[inline(always)]
    pub fn take(&mut self, count: usize) -> Result<&'a [u8], ProtocolError> {
        let rest = &self.bytes[self.at..];
        if rest.len() < count {
            return Err(self.error("message ends inside a field"));
        }
        self.at += count;
        Ok(&rest[..count])
    }
}

/// A value with a fixed encoding.
pub trait Field<'a>: Sized {
    /// Appends the encoding to `out`.
    fn encode(&self, out: &mut Vec<u8>);
    /// Decodes one value.
    fn decode(reader: &mut Reader<'a>) -> Result<Self, ProtocolError>;
}

macro_rules! number_fields {
    ($($number:ty),*) => {$(
        impl<'a> Field<'a> for $number {
            #[inline]
            fn encode(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }

            // Otherwise each number is returned through memory, as a `Result`.
            #[inline(always)]
            fn decode(reader: &mut Reader<'a>) -> Result<Self, ProtocolError> {
                let mut bytes = [0; size_of::<$number>()];
                bytes.copy_from_slice(reader.take(size_of::<$number>())?);
                Ok(Self::from_le_bytes(bytes))
            }
        }
    )*};
}

number_fields!(u8, u16, u32, u64, i64);

impl<'a> Field<'a> for &'a [u8] {
    fn encode(&self, out: &mut Vec<u8>) {
        // Lengths are bounded by BODY_BYTES_MAX, far below u32::MAX.
        (self.len() as u32).encode(out);
        out.extend_from_slice(self);
    }

    #[inline(always)]
    fn decode(reader: &mut Reader<'a>) -> Result<Self, ProtocolError> {
        let length = u32::decode(reader)? as usize;
        reader.take(length)
    }
}

/// Defines an enum of messages with named fields, each with a tag byte, and its codec.
macro_rules! messages {
    ($(#[$meta:meta])* pub enum $name:ident<$life:lifetime> {
        $($(#[$doc:meta])* $tag:literal $variant:ident {
            $($(#[$fdoc:meta])* $field:ident: $kind:ty,)*
        })*
    }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[non_exhaustive]
        pub enum $name<$life> {
            $($(#[$doc])* $variant { $($(#[$fdoc])* $field: $kind,)* },)*
        }

        impl<$life> $crate::codec::Field<$life> for $name<$life> {
            fn encode(&self, out: &mut Vec<u8>) {
                match self {
                    $(Self::$variant { $($field,)* } => {
                        out.push($tag);
                        $($crate::codec::Field::encode($field, out);)*
                    })*
                }
            }

            fn decode(
                reader: &mut $crate::codec::Reader<$life>,
            ) -> Result<Self, $crate::codec::ProtocolError> {
                match <u8 as $crate::codec::Field>::decode(reader)? {
                    $($tag => Ok(Self::$variant {
                        $($field: $crate::codec::Field::decode(reader)?,)*
                    }),)*
                    _ => Err(reader.error("unknown message tag")),
                }
            }
        }

        impl $name<'_> {
            /// Returns the tag byte of this message.
            #[must_use]
            pub fn tag(&self) -> u8 {
                match self { $(Self::$variant { .. } => $tag,)* }
            }

            /// Returns the name of the message with tag `tag`, for statistics.
            #[must_use]
            pub fn tag_name(tag: u8) -> &'static str {
                match tag { $($tag => stringify!($variant),)* _ => "unknown" }
            }
        }

        #[cfg(test)]
        impl<$life> $name<$life> {
            /// Returns a message of every kind.
            pub(crate) fn of_every_kind(draw: &mut $crate::round_trips::Draw<$life>) -> Vec<Self> {
                vec![$(Self::$variant {
                    $($field: $crate::round_trips::Drawn::drawn(draw),)*
                },)*]
            }
        }
    };
}
pub(crate) use messages;
