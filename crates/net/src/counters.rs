//! All counters of the network layer: the ways in which bytes were sent and received.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters of a core's lanes; any thread may read them.
        #[derive(Debug, Default)]
        pub struct Counters { $($(#[$doc])* pub $name: AtomicU64,)* }

        impl Counters {
            /// Returns the names and values, in the order of declaration.
            #[must_use]
            pub fn values(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name.load(Ordering::Relaxed)),)*]
            }
        }
    };
}

counters! {
    /// System calls made to move bytes.
    system_calls,
    /// Messages sent.
    messages_sent,
    /// Messages received.
    messages_received,
    /// Bytes that the kernel copied from memory when sending, or that were copied to a shared ring.
    bytes_sent_copied,
    /// Bytes sent from file pages without copying (`sendfile`, `splice`).
    bytes_sent_file,
    /// Bytes sent from where they lie in memory (`SEND_ZC`).
    bytes_sent_in_place,
    /// Sends in place for which the kernel reported that it copied the bytes after all.
    sends_in_place_copied,
    /// Connections that stopped sending in place for that reason.
    sends_in_place_given_up,
    /// Bytes that were lent instead of sent: the receiver reads them in memory that both map.
    bytes_lent,
    /// Replies whose data was lent.
    replies_lent,
    /// Replies whose data was copied because the limit on loans was reached.
    loans_exhausted,
    /// Bytes received.
    bytes_received,
    /// Bulk bytes that were received directly into their final place.
    bytes_received_placed,
    /// Payload bytes that were received and discarded. Stays zero unless a peer misbehaves or a request
    /// fails after its data was granted.
    payload_discarded,
}

impl Counters {
    /// Adds to a counter to which only one thread adds at a time: its core, or the holder of the link's
    /// lock. That avoids locked instructions, of which a small request would need a dozen.
    pub fn add(counter: &AtomicU64, count: u64) {
        counter.store(counter.load(Ordering::Relaxed).wrapping_add(count), Ordering::Relaxed);
    }
}
