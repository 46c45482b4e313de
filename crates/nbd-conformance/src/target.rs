//! The server under test, and what it offers.

use std::cell::OnceCell;
use std::time::Duration;

use crate::client::{BlockSizes, Haggle, Mode, Session, Violation, context_data, info_data};
use crate::ensure;
use crate::link::Link;
use crate::rule::Problem;
use crate::rules::traffic;
use crate::uri::{Address, Location};
use crate::wire::*;

/// Alignment if the server announces none: the text's advice to clients.
const BLOCK_DEFAULT: u64 = 512;

/// The server under test.
pub struct Target {
    /// Where the server listens.
    pub address: Address,
    /// The export to test.
    pub export: String,
    /// Longest wait for any answer.
    pub timeout: Duration,
    /// Seed of the random parts.
    pub seed: u64,
    /// What the server offers; empty if [`Self::probe`] failed.
    pub profile: Profile,
    violations: OnceCell<Result<Vec<Violation>, Problem>>,
}

/// What a server offers, determined once before the rules are tried.
#[derive(Debug, Clone, Default)]
pub struct Profile {
    /// Size of the export in bytes.
    pub size: u64,
    /// Transmission flags in the most capable mode.
    pub flags: u16,
    /// Block size constraints.
    pub blocks: Option<BlockSizes>,
    /// Modes offered, the simple one first.
    pub modes: Vec<Mode>,
    /// Names of metadata contexts.
    pub contexts: Vec<String>,
    /// Names of exports, if the server lists them.
    pub exports: Vec<String>,
    /// Whether the server accepts names of exports that nobody configured.
    pub accepts_any_name: bool,
}

/// An export name that no administrator uses.
pub const NOBODYS_NAME: &str = "nbd-conformance: no such export";

impl Target {
    /// Makes a target without connecting to it.
    pub fn new(location: Location, timeout: Duration, seed: u64) -> Self {
        Self {
            address: location.address,
            export: location.export,
            timeout,
            seed,
            profile: Profile::default(),
            violations: OnceCell::new(),
        }
    }

    /// Determines what the server offers.
    ///
    /// # Errors
    /// Fails if the export cannot be opened.
    pub fn probe(&mut self) -> Result<(), Problem> {
        let mut haggle = Haggle::open(self)?;
        let list = haggle.option(OPT_LIST, &[])?;
        let exports = list.replies.iter().filter_map(|reply| {
            let (length, rest) = reply.data.split_first_chunk::<4>()?;
            let name = rest.get(..u32::from_be_bytes(*length) as usize)?;
            String::from_utf8(name.to_vec()).ok()
        });
        self.profile.exports = exports.collect();
        let unknown = haggle.option(OPT_INFO, &info_data(NOBODYS_NAME, &[]))?;
        self.profile.accepts_any_name = unknown.is_ack();
        drop(haggle);
        for mode in [Mode::Simple, Mode::Structured, Mode::Extended] {
            match Session::open(self, mode) {
                Ok(session) => self.note(&session),
                Err(Problem::Skip(_)) => {}
                Err(problem) => return Err(problem),
            }
        }
        if self.profile.modes.len() > 1 {
            let mut haggle = Haggle::open(self)?;
            haggle.option(OPT_STRUCTURED_REPLY, &[])?;
            let answer = haggle.option(OPT_LIST_META_CONTEXT, &context_data(&self.export, &[]))?;
            if answer.is_ack() {
                self.profile.contexts =
                    answer.contexts()?.into_iter().map(|(_, name)| name).collect();
            }
        }
        Ok(())
    }

    /// Returns true if the server says that it does not have the export, or not for this client: the rules
    /// cannot be tried, and none is broken.
    pub fn is_denied(&self) -> bool {
        let data = info_data(&self.export, &[INFO_BLOCK_SIZE]);
        let answer = Haggle::open(self).and_then(|mut haggle| haggle.option(OPT_GO, &data));
        answer.is_ok_and(|answer| matches!(answer.last.kind, REP_ERR_UNKNOWN | REP_ERR_POLICY))
    }

    fn note(&mut self, session: &Session) {
        self.profile.modes.push(session.mode);
        self.profile.size = session.size;
        self.profile.flags = session.flags;
        self.profile.blocks = session.blocks;
    }

    /// Connects.
    ///
    /// # Errors
    /// Fails with the address and the reason.
    pub fn connect(&self) -> Result<Link, Problem> {
        Link::connect(&self.address, self.timeout)
            .map_err(|error| Problem::Fail(format!("cannot connect to {}: {error}", self.address)))
    }

    /// Returns the alignment and smallest length of valid requests, in bytes.
    pub fn block(&self) -> u64 {
        self.profile.blocks.map_or(BLOCK_DEFAULT, |blocks| blocks.minimum.max(1).into())
    }

    /// Returns the largest payload that the server announces, or else [`PORTABLE_PAYLOAD_MAX`].
    pub fn payload_max(&self) -> u64 {
        self.profile.blocks.map_or(PORTABLE_PAYLOAD_MAX, |blocks| blocks.maximum.into())
    }

    /// Returns the size of the export in bytes, rounded down to whole blocks.
    pub fn usable(&self) -> u64 {
        self.profile.size / self.block() * self.block()
    }

    /// Turns `length` into the length of one valid request: whole blocks, at least one if the export has
    /// any, and no more than the export or one payload can hold.
    pub fn clip(&self, length: u64) -> u64 {
        self.share(1, length)
    }

    /// Like [`Self::clip`], but so that the export holds `count` adjacent ranges of that length. Returns
    /// zero if it cannot.
    pub fn share(&self, count: u64, length: u64) -> u64 {
        let block = self.block();
        let length = length.max(block).min(self.usable() / count).min(self.payload_max());
        length / block * block
    }

    /// Runs a check in every mode that the server offers, and joins what was seen.
    ///
    /// # Errors
    /// The first failure, with its mode. Skips only if every mode skips.
    pub fn each_mode(
        &self,
        check: impl Fn(&mut Session) -> Result<String, Problem>,
    ) -> Result<String, Problem> {
        self.each_of(&self.profile.modes, check)
    }

    /// Like [`Self::each_mode`], but only in modes that reply in chunks.
    ///
    /// # Errors
    /// As [`Self::each_mode`].
    pub fn each_chunked_mode(
        &self,
        check: impl Fn(&mut Session) -> Result<String, Problem>,
    ) -> Result<String, Problem> {
        let mut modes = self.profile.modes.clone();
        modes.retain(|mode| *mode != Mode::Simple);
        if modes.is_empty() {
            crate::skip!("server offers neither structured replies nor extended headers");
        }
        self.each_of(&modes, check)
    }

    fn each_of(
        &self,
        modes: &[Mode],
        check: impl Fn(&mut Session) -> Result<String, Problem>,
    ) -> Result<String, Problem> {
        ensure!(!modes.is_empty(), "the export cannot be opened");
        let mut seen: Vec<(String, Vec<String>)> = Vec::new();
        let mut skipped = None;
        for mode in modes {
            match Session::open(self, *mode).and_then(|mut session| check(&mut session)) {
                Ok(text) => match seen.iter_mut().find(|(known, _)| *known == text) {
                    Some((_, modes)) => modes.push(mode.to_string()),
                    None => seen.push((text, vec![mode.to_string()])),
                },
                Err(Problem::Fail(text)) => return Err(Problem::Fail(format!("{mode}: {text}"))),
                Err(skip) => skipped = Some(skip),
            }
        }
        match (seen.as_slice(), skipped) {
            ([], Some(skip)) => Err(skip),
            ([(text, _)], _) => Ok(text.clone()),
            (several, _) => {
                let parts =
                    several.iter().map(|(text, modes)| format!("{}: {text}", modes.join(", ")));
                Ok(parts.collect::<Vec<_>>().join("; "))
            }
        }
    }

    /// Returns the violations of the rules on the form of replies, collected once over a mixture of valid
    /// and invalid requests.
    ///
    /// # Errors
    /// The problem that ended the mixture early.
    pub fn violations(&self) -> Result<&[Violation], Problem> {
        match self.violations.get_or_init(|| traffic::violations(self)) {
            Ok(violations) => Ok(violations),
            Err(problem) => Err(problem.clone()),
        }
    }
}
