//! Errors of this crate.

use std::fmt::{self, Display};
use std::io;

/// Told when the kernel refuses to serve this user.
pub(crate) const NOT_ALLOWED: &str = "only root may attach disks";

/// Why a disk could not be attached, or why serving it ended.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// A system call failed.
    System {
        /// What was being done, with its object.
        what: String,
        /// The reason the system gives.
        source: io::Error,
    },
    /// It cannot be done, and trying again does not help.
    Refused(String),
    /// The server broke the protocol.
    Protocol(&'static str),
}

impl Error {
    pub(crate) fn system(what: impl Display) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::System { what: what.to_string(), source }
    }
}

/// The reason logged last, while the same thing is tried again and again.
#[derive(Debug, Default)]
pub(crate) struct Logged(String);

impl Logged {
    /// Returns false if the last attempt failed for the same reason, which has been logged then.
    pub(crate) fn is_new(&mut self, error: &Error) -> bool {
        let text = error.to_string();
        let is_new = self.0 != text;
        self.0 = text;
        is_new
    }

    /// Logs why something failed, unless the last attempt failed for the same reason.
    pub(crate) fn warn(&mut self, error: &Error) {
        if self.is_new(error) {
            log::warn!("{error}; trying again");
        }
    }
}

impl Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::System { what, source } => write!(f, "{what}: {source}"),
            Self::Refused(text) => f.write_str(text),
            Self::Protocol(text) => write!(f, "the server broke the protocol: {text}"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::System { source, .. } => Some(source),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Error, Logged};

    #[test]
    fn a_reason_is_logged_once() {
        let (away, other) = (Error::Protocol("away"), Error::Refused("another disk".to_owned()));
        let mut logged = Logged::default();
        let told = [&away, &away, &other, &other, &away].map(|error| logged.is_new(error));
        assert_eq!(told, [true, false, true, false, true]);
        assert!(Logged::default().is_new(&away));
    }
}
