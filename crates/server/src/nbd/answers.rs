//! Turns the engine's outputs into replies.

use super::lane::NbdLane;
use super::serving::{Tag, protocol_error};
use crate::stats::{CoreStatistics, NBD_TAGS, Stages};
use std::io;
use std::sync::{Arc, OnceLock};
use towline_block::{Output, Piece, Times};
use towline_mem::{Aggregate, Segment};
use towline_nbd::reply::Extent;
use towline_nbd::{Command, Context, Error, Form};
use towline_net::Telling;

/// Data of up to this many bytes is copied behind its header, which costs less than a reference.
const COPY_BYTES_MAX: u64 = 16 * 1024;
/// Size of the buffer of zeroes for replies that cannot express holes.
const ZEROES_BYTES: u64 = 256 * 1024;

impl NbdLane {
    /// Appends the answer. While a simple reply is sent in part, everything but pieces of reads is held back.
    ///
    /// # Errors
    /// The protocol leaves only hanging up.
    pub(super) fn answer(
        &mut self,
        output: Output<Tag>,
        statistics: &CoreStatistics,
    ) -> io::Result<()> {
        let record = |tag: Tag, times: Times| {
            let server = times.arrived.elapsed().as_nanos() as u64;
            let (storage, disk) = (times.disk, times.disk);
            let stages = Stages { server, storage, disk, is_split: true, ..Stages::default() };
            statistics.record(NBD_TAGS + tag.command as u8, stages);
        };
        match output {
            Output::Piece { tag, offset, piece, first, last } => {
                if tag.replying.form == Form::Simple {
                    self.simple(tag, piece, first, last.is_some());
                } else {
                    self.chunk(tag, offset, piece, last.is_some());
                }
                if let Some(times) = last {
                    record(tag, times);
                }
            }
            Output::Failed { tag, offset, error, first, last } => {
                self.failed(tag, offset, &error, first, last.is_some())?;
            }
            Output::Done { tag, result, times } => {
                match result {
                    Ok(()) => tag.replying.done(self.replies()),
                    Err(error) => {
                        let error = protocol_error(&error);
                        tag.replying.error(self.replies(), error, error.text());
                    }
                }
                record(tag, times);
            }
            Output::Extents { tag, result, times } => {
                if tag.command == Command::BlockStatus {
                    self.statuses -= 1;
                }
                match result {
                    Ok(lists) => self.extents(tag, &lists),
                    Err(error) => {
                        let error = protocol_error(&error);
                        tag.replying.error(self.replies(), error, error.text());
                    }
                }
                record(tag, times);
            }
        }
        Ok(())
    }

    /// Appends a piece of a read as a chunk of its own.
    fn chunk(&mut self, tag: Tag, offset: u64, piece: Piece, last: bool) {
        let replying = tag.replying;
        // Reads are at most 32 MiB long.
        let length = piece.len() as u32;
        match piece {
            Piece::Hole(_) => replying.hole(&mut self.batch, offset, length, last),
            Piece::Data(bytes) => {
                replying.data(&mut self.batch, offset, length, last);
                self.append(bytes, None);
            }
            Piece::Lent(bytes) => {
                // Sending can still fail, so the reply must end with another chunk.
                replying.data(&mut self.batch, offset, length, false);
                let telling: Telling = Box::new(move |errno| {
                    let mut told = Vec::new();
                    replying.error_at(&mut told, Error::of(errno.0.into()), offset);
                    told
                });
                self.append(bytes, Some(telling));
                if last {
                    replying.done(&mut self.batch);
                }
            }
        }
    }

    /// Appends a piece of a simple reply, which has all its data behind one header, in order.
    fn simple(&mut self, tag: Tag, piece: Piece, first: bool, last: bool) {
        if first {
            tag.replying.data(&mut self.batch, tag.replying.offset, tag.length as u32, false);
            self.set_speaking(true);
        }
        match piece {
            Piece::Hole(length) => self.append_zeroes(length),
            // Missing bytes cannot be reported once the header has promised them.
            Piece::Data(bytes) | Piece::Lent(bytes) => self.append(bytes, None),
        }
        if last {
            self.set_speaking(false);
        }
    }

    fn failed(
        &mut self,
        tag: Tag,
        offset: u64,
        error: &io::Error,
        first: bool,
        last: bool,
    ) -> io::Result<()> {
        let (replying, error) = (tag.replying, protocol_error(error));
        if replying.form == Form::Simple {
            if first {
                // Nothing has been promised yet.
                replying.error(self.replies(), error, error.text());
                return Ok(());
            }
            return Err(io::Error::other("a read failed after its reply header was sent"));
        }
        replying.error_at(&mut self.batch, error, offset);
        if last {
            replying.done(&mut self.batch);
        }
        Ok(())
    }

    fn append(&mut self, bytes: Aggregate, telling: Option<Telling>) {
        let length = bytes.len();
        let in_memory = bytes.slices().all(|slice| !matches!(slice.segment, Segment::File(_)));
        if length <= COPY_BYTES_MAX && in_memory {
            let at = self.batch.len();
            self.batch.resize(at + length as usize, 0);
            // Fails for files only.
            if bytes.copy_to(&mut self.batch[at..]).is_ok() {
                return;
            }
            self.batch.truncate(at);
        }
        self.push(bytes, telling);
    }

    fn append_zeroes(&mut self, length: u64) {
        static ZEROES: OnceLock<Arc<Vec<u8>>> = OnceLock::new();
        let zeroes = ZEROES.get_or_init(|| Arc::new(vec![0; ZEROES_BYTES as usize]));
        let mut done = 0;
        while done < length {
            let count = (length - done).min(ZEROES_BYTES);
            let mut bytes = Aggregate::new();
            bytes.append(Segment::Host(zeroes.clone()), 0, count);
            self.append(bytes, None);
            done += count;
        }
    }

    fn extents(&mut self, tag: Tag, lists: &[Vec<towline_block::Status>]) {
        let contexts = (0..32).filter(|number| tag.contexts & (1 << number) != 0);
        for (at, (number, list)) in contexts.zip(lists).enumerate() {
            let extents: Vec<Extent> =
                list.iter().map(|s| Extent { length: s.length, flags: s.flags }).collect();
            let done = at + 1 == lists.len();
            tag.replying.extents(&mut self.batch, Context { number }.id(), &extents, done);
        }
    }
}
