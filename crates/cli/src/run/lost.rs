//! Takes away the memory of mapped files that were lost in a restart of their server. Programs learn of that by
//! themselves when they use such a file (`preload/hooks/lost.rs`); those that only look at their mappings never
//! would.

use super::memory::Memory;
use super::source::Opened;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use towline_client::{Client, Errno, Error, File, Url};
use towline_instance::{MAPPINGS, State, memory};

/// When to look again at files that are lost by the first look. A process may be about to reopen one: only it
/// knows that it was renaming the file when the server ended.
const AGAIN: Duration = Duration::from_secs(1);

/// The servers of a run, and which of their runs this is.
pub(super) struct Losses {
    mappings: PathBuf,
    state: Arc<State>,
    /// By mount number, with the boot epoch when it was last looked at.
    servers: Vec<(Client, Url, u32)>,
}

impl Losses {
    /// For the servers of a run, by mount number.
    pub(super) fn new(directory: &Path, state: Arc<State>, servers: &[(Client, Url)]) -> Self {
        let seen =
            |(client, url): &(Client, Url)| (client.clone(), url.clone(), client.boot_epoch());
        let servers = servers.iter().map(seen).collect();
        Self { mappings: directory.join(MAPPINGS), state, servers }
    }

    /// To be called when connections have been replaced: looks for lost files of servers that were restarted.
    /// Does not wait for them.
    pub(super) fn work(&mut self) {
        for (mount, (client, url, seen)) in self.servers.iter_mut().enumerate() {
            let epoch = client.boot_epoch();
            if std::mem::replace(seen, epoch) == epoch
                || self.state.mapped().load(Ordering::Acquire) == 0
            {
                continue;
            }
            let mount = Mount {
                number: mount as u32,
                mappings: self.mappings.clone(),
                state: Arc::clone(&self.state),
                client: client.clone(),
                url: url.clone(),
            };
            let thread = std::thread::Builder::new().name("lost".to_owned());
            let work = move || {
                if let Err(error) = mount.look() {
                    log::warn!("mapped files may be lost in a restart of the server: {error}");
                }
            };
            if let Err(error) = thread.spawn(work) {
                log::warn!("mapped files may be lost in a restart of the server: {error}");
            }
        }
    }
}

/// Tells the user of a lost file; the path is empty if it is not known.
pub(super) fn tell(path: &[u8], is_unwritten: bool) {
    let path = if path.is_empty() { "a mapped file".into() } else { String::from_utf8_lossy(path) };
    let more =
        if is_unwritten { "; what they have stored there and not written is lost" } else { "" };
    log::warn!(
        "{path} was lost in a restart of its server: programs that have mapped it get SIGBUS{more}"
    );
}

/// A prefix whose server was restarted.
struct Mount {
    number: u32,
    mappings: PathBuf,
    state: Arc<State>,
    client: Client,
    url: Url,
}

impl Mount {
    /// Looks at all memories of mappings.
    fn look(&self) -> Result<(), Error> {
        let names = std::fs::read_dir(&self.mappings).into_iter().flatten().flatten();
        let name = |name: std::fs::DirEntry| memory::parse_name(name.file_name().to_str()?);
        let of_this = names.filter_map(name).filter(|(mount, _)| *mount == self.number);
        let mut lost = Vec::new();
        for (_, inode) in of_this {
            if self.is_every_lost(inode)? {
                lost.push(inode);
            }
        }
        if !lost.is_empty() {
            towline_net::pause(AGAIN);
        }
        for inode in lost {
            if self.is_every_lost(inode)? {
                self.take_away(inode);
            }
        }
        Ok(())
    }

    /// Returns true if programs have this inode open, and all these files are lost. Of a mapped file that nobody
    /// has open, only those know that have mapped it.
    fn is_every_lost(&self, inode: u64) -> Result<bool, Error> {
        let opened = Opened::all(&self.state, self.number, inode);
        for open in &opened {
            if !self.is_lost(open, inode)? {
                return Ok(false);
            }
        }
        Ok(!opened.is_empty())
    }

    fn take_away(&self, inode: u64) {
        let path = self.mappings.join(memory::name(self.number, inode));
        // On an error, a process has taken it away.
        if let Ok(Some(is_unwritten)) = Memory::open(path).and_then(|memory| memory.lose()) {
            let config = self.state.config();
            let mount = config.as_ref().and_then(|all| all.mounts.get(self.number as usize));
            let opened = Opened::all(&self.state, self.number, inode);
            let path = match (mount, opened.first()) {
                (Some(mount), Some(Opened { path, .. })) => {
                    [&mount.prefix[..], b"/", path].concat()
                }
                _ => Vec::new(),
            };
            tell(&path, is_unwritten);
        }
    }

    /// Returns true if an open file was lost: no process of the run has it open on the new server, the server has
    /// not kept it, and it is not at its path.
    fn is_lost(&self, open: &Opened, inode: u64) -> Result<bool, Error> {
        let found = match self.client.with_handle(open.handle, 0, File::stat) {
            Err(Error::Errno(Errno::EBADF | Errno::ESTALE)) => {
                match open.reclaim(&self.client, &self.url) {
                    Ok(()) => {
                        open.close_unless_open(&self.client, &self.state);
                        return Ok(false);
                    }
                    // Not at its path, or closed to this user.
                    Err(Error::Errno(_)) => {
                        let root = self.client.attach(&self.url.root());
                        root.and_then(|root| root.stat_path(&open.path, true))
                    }
                    Err(error) => Err(error),
                }
            }
            found => found,
        };
        match found {
            Ok(attr) => Ok(attr.identity() != inode),
            Err(error @ Error::Connection { .. }) => Err(error),
            Err(error) => {
                Ok(matches!(error.errno(), Errno::ENOENT | Errno::ENOTDIR | Errno::ESTALE))
            }
        }
    }
}
