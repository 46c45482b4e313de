//! Messages from a process of the run to the run's pager, which fills mappings when their pages are
//! touched.
//!
//! Each process with such mappings has its own connection: `SOCK_SEQPACKET`, one message per packet, with
//! descriptors attached. The pager answers [`Message::Begin`], and [`Message::Hello`] with token zero, by
//! an error number of four bytes, zero for success.

/// Size of a message in bytes.
pub const MESSAGE_BYTES: usize = 48;

/// A message. Addresses and lengths are in bytes and multiples of the page size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// The first message. It carries the userfaultfd, and an end of a pipe that the pager closes only when
    /// nobody fills pages any more. If the token is zero, the pager answers zero.
    Hello {
        /// Token of the [`Message::Fork`] that announced this process, which inherits the mappings; zero if
        /// none did.
        token: u64,
    },
    /// Adds a mapping of a file. Carries a descriptor of the file's placeholder.
    Begin {
        /// Its address.
        at: u64,
        /// Its length.
        length: u64,
        /// Its offset in the file.
        offset: u64,
        /// Table entry of the open file.
        entry: u32,
        /// True if all processes of the run share the memory.
        is_shared: bool,
    },
    /// This range no longer maps a file.
    End {
        /// Its address.
        at: u64,
        /// Its length.
        length: u64,
    },
    /// A mapping was resized or moved.
    Resized {
        /// Old address.
        from: u64,
        /// Old length.
        old: u64,
        /// New address.
        to: u64,
        /// New length.
        new: u64,
    },
    /// This process is about to fork a child that inherits its mappings.
    Fork {
        /// The token that the child's [`Message::Hello`] will carry.
        token: u64,
    },
}

impl Message {
    /// Encodes the message.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; MESSAGE_BYTES] {
        let words = match *self {
            Self::Hello { token } => [1, token, 0, 0, 0, 0],
            Self::Begin { at, length, offset, entry, is_shared } => {
                [2, at, length, offset, u64::from(entry), u64::from(is_shared)]
            }
            Self::End { at, length } => [3, at, length, 0, 0, 0],
            Self::Resized { from, old, to, new } => [4, from, old, to, new, 0],
            Self::Fork { token } => [5, token, 0, 0, 0, 0],
        };
        let mut bytes = [0; MESSAGE_BYTES];
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    /// Decodes a message; returns `None` if it is not valid.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        if bytes.len() != MESSAGE_BYTES {
            return None;
        }
        let mut words = [0; MESSAGE_BYTES / 8];
        for (word, place) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_ne_bytes(place.try_into().ok()?);
        }
        let [kind, a, b, c, d, e] = words;
        let message = match kind {
            1 => Self::Hello { token: a },
            2 => {
                let (entry, is_shared) = (u32::try_from(d).ok()?, e != 0);
                // The end of the range in the file must fit an `i64`, too.
                i64::try_from(c.checked_add(b)?).ok()?;
                Self::Begin { at: a, length: b, offset: c, entry, is_shared }
            }
            3 => Self::End { at: a, length: b },
            4 => Self::Resized { from: a, old: b, to: c, new: d },
            5 => Self::Fork { token: a },
            _ => return None,
        };
        let spans = match message {
            Self::Begin { at, length, offset, .. } => [(at, length), (offset, 0)],
            Self::End { at, length } => [(at, length), (0, 0)],
            Self::Resized { from, old, to, new } => [(from, old), (to, new)],
            Self::Hello { .. } | Self::Fork { .. } => [(0, 0), (0, 0)],
        };
        let page = towline_mem::page_bytes() as u64;
        let is_good = |(at, length): (u64, u64)| {
            at.is_multiple_of(page)
                && length.is_multiple_of(page)
                && at.checked_add(length).is_some()
        };
        spans.into_iter().all(is_good).then_some(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_understood_and_nonsense_is_not() {
        let page = towline_mem::page_bytes() as u64;
        let begin = Message::Begin {
            at: 7 * page,
            length: 3 * page,
            offset: page,
            entry: 5,
            is_shared: true,
        };
        let all = [
            Message::Hello { token: 9 },
            begin,
            Message::End { at: page, length: page },
            Message::Resized { from: page, old: page, to: 5 * page, new: 2 * page },
            Message::Fork { token: u64::MAX },
        ];
        for message in all {
            assert_eq!(Message::parse(&message.to_bytes()), Some(message));
            assert_eq!(Message::parse(&message.to_bytes()[1..]), None);
        }
        let bad = [
            Message::End { at: 1, length: page },
            Message::End { at: 0u64.wrapping_sub(page), length: 2 * page },
            Message::Begin {
                at: page,
                length: page,
                offset: i64::MAX as u64 / page * page,
                entry: 0,
                is_shared: false,
            },
        ];
        for message in bad {
            assert_eq!(Message::parse(&message.to_bytes()), None, "{message:?}");
        }
        assert_eq!(Message::parse(&[0; MESSAGE_BYTES]), None);
    }
}
