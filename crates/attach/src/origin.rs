//! The disk behind a device: a disk of a Towline server, or of any NBD server.

use crate::native::Native;
use crate::nbd::{Lane, Source};
use crate::ublk::Event;
use crate::{Backend, Error, Geometry};
use std::fmt;
use std::sync::mpsc::{self, Sender};
use std::time::Duration;
use towline_client::{DiskInfo, Durability, Url};

/// What [`Origin::look`] found.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Found {
    /// The disk, by its own name, see [`Source::named`].
    pub origin: Origin,
    /// Size, block sizes and abilities.
    pub geometry: Geometry,
    /// Identifies the contents, if the protocol tells: other contents have another number.
    pub identity: Option<u64>,
    /// Changes when answered changes that were not flushed may be lost, if the protocol tells.
    pub epoch: Option<u64>,
    /// The shortest time the server took to answer.
    pub round_trip: Duration,
}

/// Options for the connection behind a queue.
#[derive(Clone, Debug, Default)]
#[allow(clippy::exhaustive_structs)] // given by callers
pub struct BackendOptions {
    /// The device has several connections, see [`Lane::connect`]. All connections to a Towline server see the same
    /// disk.
    pub several: bool,
    /// Time that requests wait while the server is away, for ever if absent. With a Towline server, they and all later
    /// ones then fail.
    pub patience: Option<Duration>,
    /// Maximum number of requests under way.
    pub depth: u16,
    /// What all connections of the device know of the durability of its contents, if the server is a Towline server.
    pub durability: Durability,
}

impl BackendOptions {
    /// For a connection that asks one question at a time, and waits for no server.
    pub(crate) fn for_questions(durability: Durability) -> Self {
        Self { several: false, patience: Some(Duration::ZERO), depth: 1, durability }
    }
}

/// A disk and its server.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // there are these two
pub enum Origin {
    /// A disk of a Towline server.
    Towline(Url),
    /// A disk of an NBD server.
    Nbd(Source),
}

impl Origin {
    /// Parses a URL.
    ///
    /// # Errors
    /// A text that says what is wrong with the URL and what is expected.
    pub fn parse(text: &str) -> Result<Self, String> {
        if Source::looks_like(text) {
            return Source::parse(text).map(Self::Nbd);
        }
        if !Url::looks_like(text) {
            return Err(format!(
                "URL \"{text}\": not that of a disk; expected towline://HOST/NAME, nbd://HOST/NAME or nbd+unix:///NAME?socket=PATH"
            ));
        }
        let url = Url::parse(text)?;
        if url.export.is_empty() {
            return Err(format!(
                "URL \"{text}\": no disk is named; `towline disk info` lists those of a server"
            ));
        }
        if !url.path.is_empty() {
            return Err(format!("URL \"{text}\": a disk's name cannot be followed by a path"));
        }
        Ok(Self::Towline(url))
    }

    /// Connects to find out size, block sizes and abilities of the disk.
    ///
    /// # Errors
    /// When the server cannot be reached or has no such disk.
    pub fn look(&self) -> Result<Found, Error> {
        match self {
            Self::Nbd(source) => {
                let connection = source.connect()?;
                let (geometry, round_trip) = (connection.geometry, connection.round_trip);
                let origin = Self::Nbd(source.named(&connection));
                connection.leave();
                Ok(Found { origin, geometry, identity: None, epoch: None, round_trip })
            }
            Self::Towline(url) => {
                let options = BackendOptions::for_questions(Durability::default());
                let disk = Native::connect(url, &options, mpsc::channel().0)?;
                let DiskInfo { identity, epoch, .. } = disk.info();
                Ok(Found {
                    origin: self.clone(),
                    geometry: disk.geometry(),
                    identity: Some(identity),
                    epoch: Some(epoch),
                    round_trip: disk.round_trip()?,
                })
            }
        }
    }

    /// Connects on behalf of a queue. Changes of the disk's size are reported through `tell`.
    ///
    /// # Errors
    /// When the server cannot be reached, has no such disk, does not allow several connections, or has lost changes.
    pub fn backend(
        &self,
        options: &BackendOptions,
        tell: Sender<Event>,
    ) -> Result<Box<dyn Backend>, Error> {
        Ok(match self {
            Self::Nbd(source) => {
                Box::new(Lane::connect(source, options.several, options.patience, tell)?)
            }
            Self::Towline(url) => Box::new(Native::connect(url, options, tell)?),
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

#[cfg(test)]
mod tests {
    use super::Origin;

    #[test]
    fn what_names_no_disk_is_refused_with_what_would() {
        for (text, said) in [
            ("/dev/sda", "expected towline://HOST/NAME, nbd://HOST/NAME"),
            ("http://host/vm1", "expected towline://HOST/NAME, nbd://HOST/NAME"),
            ("nbd://host:x/", "bad port"),
            ("towline://host", "no disk is named"),
            ("towline+unix:///?socket=/s", "no disk is named"),
            ("towline://host/vm1/part", "cannot be followed by a path"),
        ] {
            let error = Origin::parse(text).unwrap_err();
            assert!(error.contains(text) && error.contains(said), "{error}");
        }
        for text in ["towline://host:1/vm1", "nbd://host:10809/", "nbd+unix:///a?socket=/s"] {
            assert_eq!(Origin::parse(text).unwrap().to_string(), text);
        }
    }
}
