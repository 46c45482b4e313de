//! The file workloads on a local directory with plain system calls: the figures that a server is compared
//! with.

use super::result::Measured;
use super::tree::{self, Blocks, CREATE, FILE_BYTES, Names, ROUND, Random};
use super::workload::{Args, NEEDED};
use rustix::fs::{AtFlags, CWD, Dir, Mode, OFlags, openat, statat, unlinkat};
use rustix::io::{Errno, pread, pwrite};
use std::os::fd::OwnedFd;
use std::time::Instant;

type Result<T> = std::result::Result<T, Errno>;

/// A client of the local file system. It runs one operation at a time, whatever `--qd` says.
pub(super) struct Local {
    args: Args,
    number: u64,
    root: OwnedFd,
    random: Random,
    measured: Measured,
}

impl Local {
    /// Opens the root of the tree.
    pub(super) fn new(args: &Args, number: u64) -> std::result::Result<Self, String> {
        let root = openat(CWD, args.server.as_str(), OFlags::DIRECTORY, Mode::empty())
            .map_err(|error| format!("{}: {error}", args.server))?;
        let random = Random::new(number);
        Ok(Self { args: args.clone(), number, root, random, measured: Measured::new() })
    }

    pub(super) fn measured(&mut self) -> &mut Measured {
        &mut self.measured
    }

    /// Runs the workload until then, or until it is over.
    pub(super) fn run(&mut self, end: Instant) -> std::result::Result<(), String> {
        match self.args.op.as_str() {
            "stat_same" | "stat_diff" => self.stat(end),
            "orc" => self.open_read_close(end),
            "scan_stat" | "scan_read" => self.scan(end),
            "create_unlink" => self.create_unlink(end),
            _ => self.big(end),
        }
        .map_err(|error| {
            let hint = if error == Errno::NOENT { NEEDED } else { "" };
            format!("{}: {error}{hint}", self.args.server)
        })
    }

    fn stat(&mut self, end: Instant) -> Result<()> {
        let mut names = Names::new(&self.args, &mut self.random);
        loop {
            let name = names.advance();
            let start = Instant::now();
            if start >= end {
                return Ok(());
            }
            let outcome = statat(&self.root, name, AtFlags::empty());
            self.measured.one(start.elapsed(), outcome.is_err());
        }
    }

    fn open_read_close(&mut self, end: Instant) -> Result<()> {
        let mut names = Names::new(&self.args, &mut self.random);
        let mut buffer = [0; FILE_BYTES];
        loop {
            let name = names.advance();
            let start = Instant::now();
            if start >= end {
                return Ok(());
            }
            let length = read_file(&self.root, name, &mut buffer).unwrap_or(0);
            self.measured.one(start.elapsed(), length != FILE_BYTES);
            self.measured.moved(false, length);
        }
    }

    fn scan(&mut self, end: Instant) -> Result<()> {
        let reads = self.args.op == "scan_read";
        let mut buffer = [0; FILE_BYTES];
        for path in tree::directories(&self.args, self.number) {
            let directory = openat(&self.root, &path, OFlags::DIRECTORY, Mode::empty())?;
            for entry in Dir::read_from(&directory)? {
                let entry = entry?;
                let name = entry.file_name();
                if name.to_bytes().starts_with(b".") {
                    continue;
                }
                let start = Instant::now();
                if reads {
                    let length = read_file(&directory, name, &mut buffer).unwrap_or(0);
                    self.measured.one(start.elapsed(), length != FILE_BYTES);
                    self.measured.moved(false, length);
                } else {
                    let outcome = statat(&directory, name, AtFlags::empty());
                    self.measured.one(start.elapsed(), outcome.is_err());
                }
            }
            if Instant::now() >= end {
                break;
            }
        }
        Ok(())
    }

    fn create_unlink(&mut self, end: Instant) -> Result<()> {
        let mut first = 0;
        // Every round is finished even if the time is up, so that no files are left behind.
        while Instant::now() < end {
            for count in first..first + ROUND {
                let name = tree::new_name(self.number, count);
                let start = Instant::now();
                let outcome = openat(&self.root, &name, create(), Mode::from_raw_mode(0o644));
                drop(outcome?);
                self.measured.one(start.elapsed(), false);
            }
            for count in first..first + ROUND {
                let name = tree::new_name(self.number, count);
                let start = Instant::now();
                unlinkat(&self.root, &name, AtFlags::empty())?;
                self.measured.one(start.elapsed(), false);
            }
            first += ROUND;
        }
        Ok(())
    }

    fn big(&mut self, end: Instant) -> Result<()> {
        let mut blocks = Blocks::new(&self.args, self.number);
        let flags = if blocks.writes { create() } else { OFlags::RDONLY };
        let file = openat(&self.root, &blocks.path, flags, Mode::from_raw_mode(0o644))?;
        let mut buffer = vec![self.number as u8 + 1; self.args.bs];
        loop {
            let offset = blocks.advance(&mut self.random);
            let start = Instant::now();
            if start >= end {
                return Ok(());
            }
            let moved = if blocks.writes {
                pwrite(&file, &buffer, offset)
            } else {
                pread(&file, &mut buffer, offset)
            };
            let moved = moved.unwrap_or(0);
            self.measured.one(start.elapsed(), moved != self.args.bs);
            self.measured.moved(blocks.writes, moved);
        }
    }
}

fn create() -> OFlags {
    OFlags::from_bits_retain(CREATE)
}

fn read_file(base: &OwnedFd, name: impl rustix::path::Arg, target: &mut [u8]) -> Result<usize> {
    let file = openat(base, name, OFlags::RDONLY, Mode::empty())?;
    pread(&file, target, 0)
}
