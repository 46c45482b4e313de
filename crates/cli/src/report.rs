//! How commands report failures: one line each on standard error, and the exit status.

use crate::text::on_one_line;
use indicatif::ProgressBar;
use rustix::fs::OFlags;
use std::fmt::{self, Display};
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use towline_client::{Errno, Error};

/// The exit status that a shell reports for a program ended by SIGPIPE, a signal that Rust programs ignore.
const STATUS_PIPE: i32 = 141;

/// A failed operation, with the object it failed on if that is not obvious.
#[derive(Debug)]
pub(crate) struct Failure {
    subject: Option<String>,
    errno: Option<Errno>,
    text: String,
    is_usage: bool,
}

/// The result of an operation of a command.
pub(crate) type Outcome<T> = Result<T, Failure>;

impl Failure {
    /// A failure without an error number.
    pub(crate) fn new(text: impl Into<String>) -> Self {
        Self { subject: None, errno: None, text: text.into(), is_usage: false }
    }

    /// The command line is wrong.
    pub(crate) fn usage(text: impl Into<String>) -> Self {
        Self { is_usage: true, ..Self::new(text) }
    }

    /// Names the object, unless it has been named already. A text that begins with the same name loses it, so that
    /// it is printed once. An empty name is shown as `""`.
    pub(crate) fn about(mut self, subject: impl Display) -> Self {
        if self.subject.is_none() {
            let name = match subject.to_string() {
                empty if empty.is_empty() => "\"\"".to_owned(),
                name => name,
            };
            let begins = [format!("{name}: "), format!("URL \"{name}\": ")];
            if let Some(rest) = begins.iter().find_map(|begin| self.text.strip_prefix(begin)) {
                self.text = rest.to_owned();
            }
            self.subject = Some(name);
        }
        self
    }

    /// Appends to the message.
    pub(crate) fn with(mut self, more: impl Display) -> Self {
        self.text = format!("{}; {more}", self.text);
        self
    }

    /// Explains an error number whose usual message would mislead, unless the message has been extended
    /// already.
    fn explained(self) -> Self {
        let says_only = |errno: Errno| self.errno == Some(errno) && self.text == errno.to_string();
        if says_only(Errno::EXDEV) {
            return self.with("a symbolic link or \"..\" leads out of the export");
        }
        // There, files that are open are changed or opened again by name.
        if says_only(Errno::ENOENT) && !Path::new("/proc/self/fd").exists() {
            return self.with("the proc file system is not mounted at /proc");
        }
        self
    }

    /// Returns true if the failure has this error number.
    pub(crate) fn is(&self, errno: Errno) -> bool {
        self.errno == Some(errno)
    }

    /// Returns true if the object's file system does not support the operation or the user lacks permission.
    pub(crate) fn is_refusal(&self) -> bool {
        [Errno::EPERM, Errno::EACCES, Errno::EOPNOTSUPP, Errno::ENOSYS].iter().any(|e| self.is(*e))
    }
}

impl Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(subject) = &self.subject {
            write!(f, "{subject}: ")?;
        }
        f.write_str(&self.text)
    }
}

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Self {
        Error::from(errno).into()
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        // Only an answer of the server is about the file. A server that cannot be reached, or that was
        // restarted, says nothing about it.
        let errno = if let Error::Errno(errno) = error { Some(errno) } else { None };
        Self { errno, ..Self::new(error.to_string()) }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        let errno = error.raw_os_error().map(|_| Errno::of(&error));
        let text = match errno {
            Some(errno) if !errno.name().is_empty() => errno.to_string(),
            _ => error.to_string(),
        };
        Self { errno, ..Self::new(text) }
    }
}

impl From<rustix::io::Errno> for Failure {
    fn from(errno: rustix::io::Errno) -> Self {
        io::Error::from(errno).into()
    }
}

/// Prints a line on standard output and flushes it, for programs that read it at once.
pub(crate) fn say(text: impl Display) -> Result<(), String> {
    let mut out = io::stdout().lock();
    let said = writeln!(out, "{text}").and_then(|()| out.flush());
    printed(said).map_err(|failure| failure.to_string())
}

/// Ends the program as SIGPIPE would.
pub(crate) fn end_for_pipe() -> ! {
    std::process::exit(STATUS_PIPE)
}

/// Handles the result of writing to standard output. If the reader has gone away, ends the program quietly,
/// as SIGPIPE would.
pub(crate) fn printed(result: io::Result<()>) -> Outcome<()> {
    match result.and_then(|()| writable()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => end_for_pipe(),
        result => result.map_err(|error| Failure::from(error).about("standard output")),
    }
}

/// Fails if standard output is closed or open only for reading, which std does not report. The descriptor
/// that replaces a closed stream (`launch/system.rs`) is read-only.
pub(crate) fn writable() -> io::Result<()> {
    static FOUND: OnceLock<bool> = OnceLock::new();
    let is_writable = FOUND.get_or_init(|| {
        rustix::fs::fcntl_getfl(io::stdout())
            .is_ok_and(|flags| !(flags & (OFlags::WRONLY | OFlags::RDWR)).is_empty())
    });
    if *is_writable { Ok(()) } else { Err(rustix::io::Errno::BADF.into()) }
}

/// Prints a line on standard error in one write, since programs of a run write there, too. Names in it may
/// contain anything; what could break the line or upset a terminal is escaped. If the line cannot be written,
/// it is lost: the program continues even if the disk with its log is full.
pub(crate) fn note(text: impl Display) {
    let line = on_one_line(&text.to_string()) + "\n";
    let _ = io::stderr().write_all(line.as_bytes());
}

/// Prints the failures of one command, from any thread, and remembers whether there were any.
pub(crate) struct Report {
    command: &'static str,
    failed: AtomicBool,
    misused: AtomicBool,
    bar: OnceLock<ProgressBar>,
}

impl Report {
    /// Creates the report of the command with this name.
    pub(crate) fn new(command: &'static str) -> Self {
        Self {
            command,
            failed: AtomicBool::new(false),
            misused: AtomicBool::new(false),
            bar: OnceLock::new(),
        }
    }

    /// Prints above this progress bar from now on.
    pub(crate) fn print_above(&self, bar: ProgressBar) {
        // A second bar would be a bug, but only a cosmetic one.
        let _ = self.bar.set(bar);
    }

    /// Prints a failure about `subject`, or about the object that the failure itself names.
    pub(crate) fn error(&self, subject: impl Display, failure: Failure) {
        self.failed.store(true, Ordering::Relaxed);
        self.misused.fetch_or(failure.is_usage, Ordering::Relaxed);
        self.line(format_args!("{}", failure.explained().about(subject)));
    }

    /// Remembers a failure that another process has printed.
    pub(crate) fn failed_elsewhere(&self) {
        self.failed.store(true, Ordering::Relaxed);
    }

    /// Prints a remark that does not change the exit status.
    pub(crate) fn warning(&self, subject: impl Display, text: impl Display) {
        self.line(format_args!("{subject}: {text}"));
    }

    /// Prints a remark without a subject.
    pub(crate) fn remark(&self, text: impl Display) {
        self.line(format_args!("{text}"));
    }

    fn line(&self, text: fmt::Arguments<'_>) {
        let print = || note(format_args!("towline: {}: {text}", self.command));
        match self.bar.get() {
            Some(bar) => bar.suspend(print),
            None => print(),
        }
    }

    /// Returns the value, or prints the failure.
    pub(crate) fn check<T>(&self, subject: impl Display, result: Outcome<T>) -> Option<T> {
        result.map_err(|failure| self.error(subject, failure)).ok()
    }

    /// Handles the result of writing to standard output as [`printed`] does. A failure also ends the program.
    pub(crate) fn output(&self, result: io::Result<()>) {
        if let Err(failure) = printed(result) {
            self.error("standard output", failure);
            std::process::exit(1);
        }
    }

    /// The exit status.
    pub(crate) fn status(&self) -> ExitCode {
        match self.failed.load(Ordering::Relaxed) {
            true if self.misused.load(Ordering::Relaxed) => ExitCode::from(2),
            true => ExitCode::FAILURE,
            false => ExitCode::SUCCESS,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_subject_named_stays() {
        let failure = Failure::from(Errno::ENOENT).about("a").about("b").with("look elsewhere");
        assert_eq!(failure.to_string(), "a: no such file or directory; look elsewhere");
        assert!(failure.is(Errno::ENOENT) && !failure.is_refusal());
        assert_eq!(Failure::new("gone").about("").about("a").to_string(), "\"\": gone");
        for text in ["nbd://h/a: refused", "URL \"nbd://h/a\": refused", "refused"] {
            let once = Failure::new(text).about("nbd://h/a").to_string();
            assert_eq!(once, "nbd://h/a: refused");
        }
        assert_eq!(
            Failure::new("nbd://h/ab: x").about("nbd://h/a").to_string(),
            "nbd://h/a: nbd://h/ab: x"
        );
        let failure = Failure::from(rustix::io::Errno::PERM);
        assert!(failure.is_refusal());
        assert_eq!(failure.to_string(), "operation not permitted");
        let unknown = Failure::from(Error::Unknown);
        assert!(!unknown.is(Errno::EIO), "that is not said of the file");
        let led_out = Failure::from(Errno::EXDEV).explained().to_string();
        assert!(led_out.starts_with("invalid cross-device link; a symbolic link"), "{led_out}");
        let moved = Failure::from(Errno::EXDEV).with("use cp").explained().to_string();
        assert_eq!(moved, "invalid cross-device link; use cp");
    }
}
