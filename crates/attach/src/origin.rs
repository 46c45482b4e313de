//! The disk behind a device: of a Towline server, or of any NBD server.

use crate::native::Native;
use crate::nbd::{Lane, Source};
use crate::ublk::Event;
use crate::{Backend, Error, Geometry};
use std::fmt;
use std::sync::mpsc::{self, Sender};
use std::time::Duration;
use towline_client::Url;

/// Where a disk comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // there are these two
pub enum Origin {
    /// A disk of a Towline server.
    Towline(Url),
    /// A disk of an NBD server.
    Nbd(Source),
}

impl Origin {
    /// Reads a URL.
    ///
    /// # Errors
    /// A sentence that says what is wrong with it and what would be right.
    pub fn parse(text: &str) -> Result<Self, String> {
        if !Url::looks_like(text) {
            return Source::parse(text).map(Self::Nbd);
        }
        let url = Url::parse(text)?;
        if !url.path.is_empty() {
            return Err(format!("URL \"{text}\": a disk has no path behind its name"));
        }
        Ok(Self::Towline(url))
    }

    /// Connects to see what the disk is like, and, where the protocol tells, a number that names
    /// its bytes.
    ///
    /// # Errors
    /// When the server cannot be reached or has no such disk.
    pub fn look(&self) -> Result<(Geometry, Option<u64>), Error> {
        match self {
            Self::Nbd(source) => Ok((source.connect()?.geometry, None)),
            Self::Towline(url) => {
                let disk = Native::connect(url, Some(Duration::ZERO), 1, mpsc::channel().0)?;
                Ok((disk.geometry(), Some(disk.identity())))
            }
        }
    }

    /// Connects for a queue: see [`Lane::connect`] and [`Native::connect`].
    ///
    /// # Errors
    /// When the server cannot be reached or has no such disk.
    pub fn backend(
        &self,
        patience: Option<Duration>,
        depth: u16,
        tell: Sender<Event>,
    ) -> Result<Box<dyn Backend>, Error> {
        Ok(match self {
            Self::Nbd(source) => Box::new(Lane::connect(source, patience, tell)?),
            Self::Towline(url) => Box::new(Native::connect(url, patience, depth, tell)?),
        })
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nbd(source) => source.fmt(f),
            Self::Towline(url) => url.fmt(f),
        }
    }
}
