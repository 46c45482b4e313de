//! The holder: a process that has open files of a server, and gives them to the next one.
//!
//! The two talk over a Unix socket in the state directory, in packets: a [`Kind`], then entries, and for
//! [`Kind::Keep`] a descriptor for each of them. After a connection is accepted, the holder sends all that it has,
//! then [`Kind::End`]; from then on the server sends. The directory is the server's own, so its peer is trusted.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::collections::HashMap;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use towline_net::{Wait, peer_credentials, receive_descriptors, send_descriptors};

/// Name of the socket in the state directory.
const SOCKET: &str = "files";
/// Maximum number of files, and of keys alone, in a packet.
pub(super) const FILES_MAX: usize = 4;
pub(super) const KEYS_MAX: usize = 64;
pub(super) const ENTRY_BYTES: usize = 32;
/// How long files are held while there is no server.
const ALONE: Duration = Duration::from_secs(120);
/// How often to look whether the directory is still there.
const LOOK: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };

/// How long the server and its holder wait for each other.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long the holder waits when it cannot accept a connection.
const AGAIN: Duration = Duration::from_millis(100);

/// Owner, by a secret, and handle of an open file.
pub(crate) type Key = (u64, u64);
/// Identity of the root of a store.
pub(crate) type Root = (u64, u64);
/// A file, and the store that it belongs to.
pub(crate) type Entry = (Key, Root);
type Held = HashMap<Key, (Root, OwnedFd)>;

/// What a packet is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Keep = 1,
    LetGo = 2,
    End = 3,
}

/// Returns the bytes of a packet.
pub(crate) fn message(kind: Kind, entries: &[Entry]) -> Vec<u8> {
    let mut bytes = vec![kind as u8];
    for ((owner, handle), (device, inode)) in entries {
        for word in [owner, handle, device, inode] {
            bytes.extend_from_slice(&word.to_ne_bytes());
        }
    }
    bytes
}

/// Reads a packet; `None` if it makes no sense.
pub(crate) fn parse(bytes: &[u8]) -> Option<(Kind, Vec<Entry>)> {
    let (kind, entries) = bytes.split_first()?;
    let kind = match kind {
        1 => Kind::Keep,
        2 => Kind::LetGo,
        3 => Kind::End,
        _ => return None,
    };
    let (words, []) = entries.as_chunks::<8>() else { return None };
    let (entries, []) = words.as_chunks::<4>() else { return None };
    let entry = |words: &[[u8; 8]; 4]| {
        let [owner, handle, device, inode] = words.map(u64::from_ne_bytes);
        ((owner, handle), (device, inode))
    };
    Some((kind, entries.iter().map(entry).collect()))
}

/// Connects to the holder of a state directory. If there is none, starts `command`, which has to call [`run`].
pub(super) fn connect(
    directory: &Path,
    command: &[OsString],
) -> io::Result<(OwnedFd, Option<Child>)> {
    let open = std::fs::File::open(directory)?;
    // Paths of sockets have at most 107 bytes.
    let place = Path::new("/proc/self/fd").join(open.as_raw_fd().to_string()).join(SOCKET);
    let address = SocketAddrUnix::new(&place)?;
    let socket = socket()?;
    if rustix::net::connect(&socket, &address).is_ok() {
        check_peer(&socket)?;
        return Ok((socket, None));
    }
    let _ = std::fs::remove_file(&place); // of a holder that has ended
    let listener = self::socket()?;
    rustix::net::bind(&listener, &address)?;
    std::fs::set_permissions(&place, std::fs::Permissions::from_mode(0o600))?;
    rustix::net::listen(&listener, 4)?;
    let (program, arguments) = command.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let child = Command::new(program)
        .arg0("towline") // in lists of processes
        .args(arguments)
        .arg(directory.join(SOCKET))
        .stdin(listener)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    rustix::net::connect(&socket, &address)?;
    Ok((socket, Some(child)))
}

/// Returns a socket that does not wait for long.
fn socket() -> io::Result<OwnedFd> {
    let kind = SocketType::SEQPACKET;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
    for timeout in [Timeout::Send, Timeout::Recv] {
        set_socket_timeout(&socket, timeout, Some(PATIENCE))?;
    }
    Ok(socket)
}

fn check_peer(socket: &OwnedFd) -> io::Result<()> {
    let is_same = peer_credentials(socket.as_fd())?.uid == rustix::process::geteuid().as_raw();
    if is_same { Ok(()) } else { Err(io::ErrorKind::PermissionDenied.into()) }
}

/// Holds files until no server has asked for them for two minutes, there are none and no server, or the socket at
/// `path` is gone. Connections arrive at standard input.
///
/// # Errors
/// Those of the socket; also if standard input is no listening socket, or there is nothing at `path`.
pub fn run(path: &Path) -> io::Result<()> {
    let listener = std::io::stdin();
    if !rustix::net::sockopt::socket_acceptconn(&listener)? {
        return Err(rustix::io::Errno::INVAL.into());
    }
    // It must outlive the server, also when a terminal ends all that was started there.
    let _ = rustix::process::setsid(); // fails if it leads a session already
    let path = std::path::absolute(path)?;
    std::env::set_current_dir("/")?;
    let own = Some(std::fs::symlink_metadata(&path)?.ino());
    let mut held = Held::new();
    let mut server: Option<OwnedFd> = None;
    let mut alone = Instant::now();
    loop {
        if server.is_none() && alone.elapsed() >= ALONE || inode(&path) != own {
            return Ok(());
        }
        let mut wait = vec![PollFd::new(&listener, PollFlags::IN)];
        wait.extend(server.iter().map(|server| PollFd::new(server, PollFlags::IN)));
        match poll(&mut wait, Some(&LOOK)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let ready: Vec<bool> = wait.iter().map(|one| !one.revents().is_empty()).collect();
        if ready[0] {
            // Only one server uses the directory, so an earlier one has ended.
            while let Some(old) = &server
                && is_readable(old)
                && heard(old, &mut held)
            {}
            (server, alone) = (None, Instant::now());
            match rustix::net::accept_with(listener.as_fd(), SocketFlags::CLOEXEC) {
                Ok(new) => server = give(&new, &held).is_ok().then_some(new),
                Err(_) => towline_net::pause(AGAIN),
            }
        } else if ready.get(1) == Some(&true)
            && let Some(connection) = &server
            && !heard(connection, &mut held)
        {
            if held.is_empty() {
                return Ok(());
            }
            (server, alone) = (None, Instant::now());
        }
    }
}

/// Returns the inode number of what is at a path.
fn inode(path: &Path) -> Option<u64> {
    std::fs::symlink_metadata(path).ok().map(|found| found.ino())
}

fn is_readable(server: &OwnedFd) -> bool {
    let mut wait = [PollFd::new(server, PollFlags::IN)];
    poll(&mut wait, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

/// Sends everything to a new server.
fn give(server: &OwnedFd, held: &Held) -> io::Result<()> {
    check_peer(server)?;
    // It may be stopped while it takes over.
    set_socket_timeout(server, Timeout::Send, Some(PATIENCE))?;
    let all: Vec<_> = held.iter().collect();
    for files in all.chunks(FILES_MAX) {
        let entries: Vec<Entry> = files.iter().map(|(key, (root, _))| (**key, *root)).collect();
        let files: Vec<_> = files.iter().map(|(_, (_, file))| file.as_fd()).collect();
        send_descriptors(server, &message(Kind::Keep, &entries), &files, Wait::Any)?;
    }
    send_descriptors(server, &message(Kind::End, &[]), &[], Wait::Any).map(drop)
}

/// Does what the server says next; returns false if it has ended.
fn heard(server: &OwnedFd, held: &mut Held) -> bool {
    let mut bytes = [0; 1 + KEYS_MAX * ENTRY_BYTES];
    let (length, files) = match receive_descriptors(server, &mut bytes, Wait::No) {
        Ok((0, _)) => return false,
        Ok(received) => received,
        // These files are not held: there are too many open ones.
        Err(error) if error.raw_os_error() == Some(libc::EMFILE) => return true,
        Err(error) => return error.kind() == io::ErrorKind::WouldBlock,
    };
    match parse(&bytes[..length]) {
        Some((Kind::Keep, entries)) => {
            let entries = entries.into_iter().zip(files);
            held.extend(entries.map(|((key, root), file)| (key, (root, file))));
        }
        Some((Kind::LetGo, entries)) => {
            entries.iter().for_each(|(key, _)| drop(held.remove(key)));
        }
        _ => {}
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_are_understood_or_refused() {
        for kind in [Kind::Keep, Kind::LetGo, Kind::End] {
            for entries in [vec![], vec![((1, 2), (3, 4))], vec![((u64::MAX, 0), (7, 8)); 3]] {
                assert_eq!(parse(&message(kind, &entries)), Some((kind, entries)));
            }
        }
        let whole = message(Kind::Keep, &[((1, 2), (3, 4))]);
        let cut = (0..whole.len()).filter(|length| *length != 1);
        assert!(cut.map(|length| parse(&whole[..length])).all(|parsed| parsed.is_none()));
        assert_eq!(parse(&[0]), None);
        assert_eq!(parse(&[4]), None);
    }
}
