//! Which way bytes went: every counter of the network layer in one list.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counts of a core's lanes; any thread may read them.
        #[derive(Debug, Default)]
        pub struct Counters { $($(#[$doc])* pub $name: AtomicU64,)* }

        impl Counters {
            /// Names and values, in the order of declaration.
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
    /// Bytes that the kernel or the shared ring copied from memory when sending.
    bytes_sent_copied,
    /// Bytes sent from file pages without copying (`sendfile`).
    bytes_sent_file,
    /// Bytes sent from where they lie in memory (`SEND_ZC`).
    bytes_sent_in_place,
    /// Sends in place of which the kernel said that it had copied the bytes nevertheless.
    sends_in_place_copied,
    /// Connections whose sends in place were given up for that.
    sends_in_place_given_up,
    /// Bytes not sent but lent: the receiver reads them in place in memory that both map.
    bytes_lent,
    /// Replies whose data was lent.
    replies_lent,
    /// Replies whose data was copied because as much as may be was on loan already.
    loans_exhausted,
    /// Bytes received.
    bytes_received,
    /// Bulk bytes that landed in their final place without being staged.
    bytes_received_placed,
    /// Payload bytes that were received and thrown away. Stays zero unless a peer misbehaves or a
    /// request fails after its data was granted.
    payload_discarded,
}

impl Counters {
    /// Adds to a counter that only one thread adds to at a time: its core, or whoever holds the lock of the link. So no
    /// locked instruction is needed, of which a small request would take a dozen.
    pub fn add(counter: &AtomicU64, count: u64) {
        counter.store(counter.load(Ordering::Relaxed).wrapping_add(count), Ordering::Relaxed);
    }
}
