//! Arguments of `towline bench net`.

use super::check_length;
use super::raw_clients;
use crate::serve::parse_bytes;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Bytes of a reply unless said otherwise: about those of one with attributes.
const REPLY_BYTES: usize = 180;
/// Bytes that a stream sends and receives per call unless said otherwise: the fastest size from 64 KiB to 1 MiB, as a limit
/// should be. With 1 MiB, sendfile is a quarter slower.
const PIECE_BYTES: usize = 256 << 10;
/// Largest message in bytes.
const MESSAGE_BYTES_MAX: usize = 64 << 20;
/// Most memory that a stream is received into.
const INTO_MAX: u64 = 1 << 30;
/// Most requests under way on a connection.
const DEPTH_MAX: usize = 128;
/// Most bytes that the requests under way may have, or else their replies: what a socket takes while nobody reads. If both
/// had more, both ends could wait for the other to read.
const UNREAD_MAX: u64 = 32 << 10;

const EXAMPLES: &str = "\
Examples:
  towline bench net --kind tcp --bs 4140 --pin 0,1
  towline bench net --bs 64K --qd 16
  towline bench net --op stream --sendfile /srv/data/big
  towline bench net --procs 184 --bs 64K --sendfile /srv/data/big

Exit status: 0 measured, 1 an operation failed or a value is beyond its limits, 2 wrong usage.";

/// Arguments of `bench net`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// What to send over.
    #[arg(long, value_enum, default_value = "tcp")]
    pub(super) kind: Kind,
    /// Requests and replies, or bytes sent one way, over and over.
    #[arg(long, value_enum, default_value = "round_trip")]
    pub(super) op: Op,
    /// Bytes of each reply (default: 180), or of each piece of a stream (default: 256K).
    #[arg(long, value_name = "N", value_parser = parse_bytes)]
    pub(super) bs: Option<u64>,
    /// Bytes of each request.
    #[arg(long, value_name = "N", value_parser = parse_bytes, default_value = "60")]
    pub(super) request: u64,
    /// Requests under way on each connection, up to 128; they or their replies may have 32 KiB together.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(super) qd: usize,
    /// Seconds to measure.
    #[arg(long, default_value_t = 1.0)]
    pub(super) secs: f64,
    /// Seconds to run before that, which are not measured.
    #[arg(long, value_name = "SECS", default_value_t = 0.0)]
    pub(super) ramp: f64,
    /// Poll sockets instead of sleeping (shm always does).
    #[arg(long)]
    pub(super) spin: bool,
    /// Processors of the two ends; default: left to the scheduler.
    #[arg(long, value_name = "NEAR,FAR", value_delimiter = ',')]
    pub(super) pin: Vec<usize>,
    /// Of a stream: bytes of memory to receive into, one piece after the other; default: one piece. A reader with four
    /// requests of 1 MiB under way fills 4M, which is evicted from the processor's caches sooner than 256K.
    #[arg(long, value_name = "N", value_parser = parse_bytes)]
    pub(super) into: Option<u64>,
    /// Send pages of this file with sendfile, as a stream or as replies.
    #[arg(long, value_name = "FILE")]
    pub(super) sendfile: Option<PathBuf>,
    /// Client processes with a connection each. The far end has a thread for each processor.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(super) procs: usize,
    /// Run as the far end; a measurement starts it by itself.
    #[arg(long, hide = true)]
    pub(super) far: bool,
    /// Run as one of several client processes, over the socket that is at this address.
    #[arg(long, hide = true)]
    pub(super) near: Option<SocketAddr>,
}

/// What to measure.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
#[value(rename_all = "snake_case")]
pub(crate) enum Op {
    /// Requests, each of which is answered.
    RoundTrip,
    /// Bytes from the far end to the near one.
    Stream,
}

/// The channels to send bytes over.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// TCP over loopback.
    Tcp,
    /// A pair of Unix stream sockets.
    Unix,
    /// Shared memory, both ends spinning.
    Shm,
    /// Shared memory, both ends sleeping on futexes.
    Futex,
}

impl Kind {
    pub(super) fn shares_memory(self) -> bool {
        matches!(self, Self::Shm | Self::Futex)
    }

    /// The name on the command line.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Unix => "unix",
            Self::Shm => "shm",
            Self::Futex => "futex",
        }
    }
}

impl Args {
    /// The arguments of a command line without other flags.
    pub(super) fn new(kind: Kind, secs: f64) -> Self {
        Self {
            kind,
            op: Op::RoundTrip,
            bs: None,
            request: 60,
            qd: 1,
            secs,
            ramp: 0.0,
            spin: false,
            pin: Vec::new(),
            into: None,
            sendfile: None,
            procs: 1,
            far: false,
            near: None,
        }
    }

    pub(super) fn is_stream(&self) -> bool {
        self.op == Op::Stream
    }

    /// Returns the bytes of each request.
    pub(super) fn request_bytes(&self) -> usize {
        self.request as usize
    }

    /// Returns the bytes of each reply, or of each piece of a stream.
    pub(super) fn bytes(&self) -> usize {
        let default = if self.is_stream() { PIECE_BYTES } else { REPLY_BYTES };
        self.bs.map_or(default, |bytes| bytes as usize)
    }

    /// Returns the bytes of memory that a stream is received into.
    pub(super) fn target_bytes(&self) -> usize {
        self.into.map_or(self.bytes(), |bytes| bytes as usize)
    }

    pub(super) fn check(&self) -> Result<(), String> {
        let sizes = 1..=MESSAGE_BYTES_MAX as u64;
        if !sizes.contains(&self.request) || self.bs.is_some_and(|bytes| !sizes.contains(&bytes)) {
            return Err(format!("--request, --bs: expected 1 to {MESSAGE_BYTES_MAX}"));
        }
        let piece = self.bytes() as u64;
        if self.into.is_some_and(|into| into == 0 || into > INTO_MAX || !into.is_multiple_of(piece))
        {
            return Err(format!(
                "--into: expected a multiple of {piece}, the bytes of a piece, up to 1G"
            ));
        }
        if self.into.is_some() && !self.is_stream() {
            return Err("--into is for --op stream".into());
        }
        if !(1..=DEPTH_MAX).contains(&self.qd) {
            return Err(format!("--qd: expected 1 to {DEPTH_MAX}"));
        }
        if self.qd > 1 && (self.is_stream() || self.kind.shares_memory()) {
            return Err("--qd is for requests over sockets".into());
        }
        if self.qd > 1 && self.qd as u64 * self.request.min(piece) > UNREAD_MAX {
            return Err(
                "--qd: the requests or the replies under way may have 32 KiB at most".into()
            );
        }
        check_length(self.ramp, self.secs)?;
        if !matches!(self.pin.len(), 0 | 2) {
            return Err("--pin: expected two processors, NEAR,FAR".into());
        }
        let spins = self.spin || self.kind == Kind::Shm;
        if spins && self.pin.len() == 2 && self.pin[0] == self.pin[1] {
            return Err("spinning on both ends needs two processors: try --pin 0,1".into());
        }
        if self.kind.shares_memory() && self.is_stream() {
            return Err(
                "--op stream is for sockets; the limit of shared memory is memcpy, see `bench limits`"
                    .into(),
            );
        }
        if self.kind.shares_memory() && self.sendfile.is_some() {
            return Err("--sendfile is for sockets".into());
        }
        if !(1..=raw_clients::PROCS_MAX).contains(&self.procs) {
            return Err(format!("--procs: expected 1 to {}", raw_clients::PROCS_MAX));
        }
        let plain =
            self.kind == Kind::Tcp && !self.is_stream() && !self.spin && self.pin.is_empty();
        if self.procs > 1 && !plain {
            return Err("--procs is for requests over TCP, without --spin and --pin".into());
        }
        if self.kind == Kind::Futex && self.spin {
            return Err("--kind futex always sleeps; use --kind shm to spin".into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn measurements_without_sense_are_refused() {
        for (text, sense) in [
            ("x", true),
            ("x --pin 0", false),
            ("x --pin 0,1 --spin", true),
            ("x --pin 1,1 --spin", false),
            ("x --pin 1,1 --kind shm", false),
            ("x --pin 1,1 --kind futex", true),
            ("x --kind futex --spin", false),
            ("x --kind shm --op stream", false),
            ("x --op stream --into 4M", true),
            ("x --op stream --into 300K", false),
            ("x --op stream --bs 100K --into 300K", true),
            ("x --op stream --bs 0", false),
            ("x --into 256K", false),
            ("x --qd 16", true),
            ("x --qd 0", false),
            ("x --qd 129", false),
            ("x --qd 2 --bs 64M", true),
            ("x --qd 2 --bs 68 --request 64M", true),
            ("x --qd 2 --bs 20K --request 20K", false),
            ("x --qd 2 --procs 2", true),
            ("x --qd 2 --kind unix", true),
            ("x --qd 2 --kind shm", false),
            ("x --qd 2 --op stream", false),
            ("x --sendfile file", true),
            ("x --sendfile file --kind futex", false),
            ("x --procs 184", true),
            ("x --procs 0", false),
            ("x --procs 2 --kind unix", false),
            ("x --procs 2 --op stream", false),
            ("x --procs 2 --pin 0,1", false),
            ("x --bs 0", false),
            ("x --request 65M", false),
            ("x --secs nan", false),
            ("x --secs 0", false),
            ("x --ramp 1", true),
            ("x --ramp inf", false),
        ] {
            let line = Line::try_parse_from(text.split(' '));
            let has_sense = line.is_ok_and(|line| line.args.check().is_ok());
            assert_eq!(has_sense, sense, "{text}");
        }
    }
}
