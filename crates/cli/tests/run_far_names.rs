//! `towline run`: what is known of names on a far server, also after changes by the process itself.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod support;

use std::fs;
use std::process::{Command, Output, Stdio};
use std::time::Duration;
use support::far::Far;
use support::{TOWLINE, World, have};
use towline_wire::Request;

/// Makes the server far.
fn is_request(_: &[Request<'_>]) -> bool {
    std::thread::sleep(Duration::from_millis(6));
    true
}

/// Runs a program in Python with the export `dir` at `AT`, and at `OTHER` once more; it must succeed.
fn python(world: &World, far: &Far, text: &str) {
    let (at, other) = (world.local("at"), world.local("other"));
    let prefixes = [&at, &other].map(|path| format!("{}={}", path.display(), far.url("dir")));
    let Output { status, stderr, .. } = Command::new(TOWLINE)
        .args(["run", "--at", &prefixes[0], "--at", &prefixes[1], "--", "python3", "-c"])
        .arg(format!("{PYTHON}{text}"))
        .envs([("AT", &at), ("OTHER", &other)])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(status.success(), "{}", String::from_utf8_lossy(&stderr));
}

const PYTHON: &str = "
import errno, os, subprocess
at, other = os.environ['AT'], os.environ['OTHER']
def make(path):
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
def fails(call, *arguments):
    try:
        call(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno]
def is_missing(path):
    found = fails(os.stat, path), fails(os.lstat, path)
    link, is_there = fails(os.readlink, path), os.access(path, os.F_OK)
    assert found[0] == found[1] and is_there == (found[0] is None), found
    assert found[0] in (None, 'ENOENT') and is_there == (link != 'ENOENT'), (found, link)
    return not is_there
";

/// Looking for names in a directory that was just made asks for nothing, nor does what follows on making them.
#[test]
fn own_changes_leave_what_is_known() {
    if !have("python3") {
        return println!("SKIPPED own changes: there is no python3");
    }
    const FILES: usize = 20;
    let world = World::new();
    let requests = || {
        let _ = fs::remove_dir_all(world.local("served/d"));
        let far = Far::new(&world, 1, is_request);
        let text = format!(
            "
os.stat(at), os.mkdir(at + '/d')
for name in range({FILES}):
    path = at + '/d/' + str(name)
    assert is_missing(path)
    make(path)
    assert os.stat(path).st_size == 0 and fails(os.readlink, path) == 'EINVAL'
    os.rename(path, path + '.new')
    assert is_missing(path) and fails(os.readlink, path + '.new') == 'EINVAL'
assert not is_missing(at + '/d')
"
        );
        python(&world, &far, &text);
        far.requests()
    };
    // Otherwise eight for each file. On a busy machine, what is known may be too old.
    assert!((0..5).any(|_| requests() < 3 * FILES));
}

#[test]
fn a_path_is_resolved_with_one_request() {
    if !have("python3") {
        return println!("SKIPPED paths that are resolved: there is no python3");
    }
    let world = World::new();
    fs::create_dir_all(world.local("served/a/b/c/d")).unwrap();
    fs::write(world.local("served/a/b/c/d/file"), "").unwrap();
    std::os::unix::fs::symlink("a/b/c", world.local("served/link")).unwrap();
    let far = Far::new(&world, 1, is_request);
    let text = "
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.realpath.restype = ctypes.c_char_p
def resolved(path):
    return libc.realpath(path.encode(), ctypes.create_string_buffer(4096))
for _ in range(5):
    assert resolved(at + '/link/d/../d/file').decode() == at + '/a/b/c/d/file'
    assert resolved(at + '/link/none') is None and ctypes.get_errno() == errno.ENOENT
";
    python(&world, &far, text);
    // The two to begin with are those for the prefixes.
    assert!(far.requests() <= 12);
}

/// What changes may alter without being named is not taken for known.
#[test]
fn own_changes_are_seen_wherever_they_matter() {
    if !have("python3") {
        return println!("SKIPPED own changes: there is no python3");
    }
    let world = World::new();
    let far = Far::new(&world, 1, is_request);
    let text = "
os.mkdir(at + '/a'), os.mkdir(at + '/b'), os.symlink('a', at + '/to_a')
a = os.open(at + '/a', os.O_RDONLY)

# Other paths to the same directory.
assert is_missing(at + '/to_a/x') and is_missing(at + '/a/x') and is_missing(at + '/b/../a/x')
assert is_missing(other + '/a/x') and fails(lambda: os.stat('x', dir_fd=a)) == 'ENOENT'
make(at + '/a/x')
assert not is_missing(at + '/to_a/x') and not is_missing(at + '/a/x')
assert not is_missing(at + '/b/../a/x') and not is_missing(other + '/a/x')
assert os.stat('x', dir_fd=a).st_nlink == 1
os.unlink('x', dir_fd=a)
assert is_missing(at + '/to_a/x') and is_missing(at + '/a/x') and is_missing(other + '/a/x')

# A file with two names, one of which is removed or written.
make(at + '/a/one'), os.link(at + '/a/one', at + '/b/two')
assert [os.stat(at + name).st_nlink for name in ('/a/one', '/b/two')] == [2, 2]
with open(at + '/a/one', 'w') as file:
    file.write('text')
assert os.stat(at + '/b/two').st_size == 4
os.unlink(at + '/to_a/one')
assert is_missing(at + '/a/one') and os.stat(at + '/b/two').st_nlink == 1

# Renaming one of two names of a file to the other does nothing; the same name by two paths.
make(at + '/a/f')
assert not is_missing(at + '/a/f') and not is_missing(at + '/to_a/f')
os.rename(at + '/a/f', at + '/to_a/f')
assert not is_missing(at + '/a/f') and not is_missing(at + '/to_a/f')
os.unlink(at + '/a/f')

# Links in the middle of paths come, go and change; so do directories.
os.mkdir(at + '/b/sub'), os.symlink('b', at + '/link')
assert not is_missing(at + '/link/sub') and is_missing(at + '/link/n')
os.unlink(at + '/link')
assert is_missing(at + '/link/sub')
os.symlink('a', at + '/link'), os.symlink('b', at + '/next')
assert is_missing(at + '/link/sub')
os.rename(at + '/next', at + '/link')
assert not is_missing(at + '/link/sub')
os.rename(at + '/b/sub', at + '/b/moved'), os.symlink('moved', at + '/b/sub')
assert not is_missing(at + '/link/sub')
os.rmdir(at + '/b/moved')
assert fails(os.stat, at + '/link/sub') == 'ENOENT' and fails(os.readlink, at + '/link/sub') is None

# A link that leads nowhere, until something is made there.
os.symlink('new/../b', at + '/nowhere')
assert is_missing(at + '/nowhere/two') and is_missing(at + '/new')
os.mkdir(at + '/new')
assert not is_missing(at + '/nowhere/two') and is_missing(at + '/new/two')
os.symlink('new/file', at + '/file')
assert is_missing(at + '/new/file') and fails(os.stat, at + '/file') == 'ENOENT'
open(at + '/file', 'w').close()
assert not is_missing(at + '/new/file') and os.readlink(at + '/file') == 'new/file'
assert is_missing(at + '/nofile/x')
make(at + '/nofile')
assert fails(os.stat, at + '/nofile/x') == 'ENOTDIR'

# Attributes of directories.
before = os.stat(at + '/new').st_mtime_ns, os.stat(at + '/new/.').st_nlink
os.mkdir(at + '/new/d')
assert os.stat(at + '/new').st_mtime_ns != before[0] and os.stat(at + '/new/.').st_nlink == before[1] + 1
os.chmod(at + '/new', 0o711)
assert os.stat(at + '/new').st_mode & 0o777 == 0o711

# Other processes of the run.
assert is_missing(at + '/new/child') and not is_missing(at + '/new/d')
subprocess.run(['sh', '-c', 'rmdir $AT/new/d; : > $AT/new/child'], check=True)
assert not is_missing(at + '/new/child') and is_missing(at + '/new/d')
make(at + '/new/d')
if os.fork() == 0:
    os.unlink(at + '/new/d')
    os._exit(0)
os.wait()
assert is_missing(at + '/new/d')
";
    python(&world, &far, text);
}
