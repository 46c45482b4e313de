//! The limit of open files.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Takes as many as allowed: a server has one for each connection and open file, a copy of a very
/// deep tree one for each directory from which on its paths are too long for the system.
pub(crate) fn raise_limit() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
    {
        log::warn!("cannot raise the limit of open files: {error}");
    }
}
