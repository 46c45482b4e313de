//! What the program does where a machine lacks something it usually has, if possible in separate mount
//! namespaces.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod support;

use std::fs;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::process::{Command, Stdio};
use support::{TOWLINE, World, forbidding, have, noise};

/// Runs a script in a mount namespace. Returns its exit status and output. Prints a message and returns
/// `None` if that is impossible.
fn apart(script: &str, arguments: &[&str]) -> Option<(i32, String)> {
    let user: &[&str] = if rustix::process::geteuid().is_root() { &[] } else { &["-r"] };
    let unshare = |script: &str| {
        let mut command = Command::new("unshare");
        command.arg("-m").args(user).args(["sh", "-c", script, TOWLINE]).args(arguments);
        command.stdin(Stdio::null()).env_remove("XDG_RUNTIME_DIR");
        command
    };
    let possible = unshare("mount -t tmpfs none /mnt").output();
    if !possible.is_ok_and(|output| output.status.success()) {
        println!("SKIPPED: nothing can be mounted here");
        return None;
    }
    let output = unshare(&format!("exec 2>&1; {script}")).output().unwrap();
    Some((output.status.code().unwrap(), String::from_utf8_lossy(&output.stdout).into_owned()))
}

#[test]
fn a_server_without_proc_says_so() {
    let script = "mount -t tmpfs none /proc && exec timeout 60 \"$0\" serve --mem m=1M --listen tcp://127.0.0.1:0";
    let Some((status, said)) = apart(script, &[]) else { return };
    assert_eq!(status, 1, "{said}");
    assert!(said.contains("has to be mounted at /proc"), "{said}");
    // A feature that could not be tried is not reported as missing.
    let script = "mount -t tmpfs none /proc && exec \"$0\" doctor";
    let Some((_, said)) = apart(script, &[]) else { return };
    let uring = said.split_once("io_uring").unwrap().1.split_once("SEND_ZC").unwrap().0;
    assert!(uring.contains("not tried") && !uring.contains("epoll"), "{said}");
}

#[test]
fn copies_that_need_proc_say_so() {
    let world = World::new();
    fs::write(world.local("served/file"), noise(2 << 20, 1)).unwrap();
    let script = "mount -t tmpfs none /proc && exec \"$0\" cp \"$1\" \"$2\"";
    let target = world.local("copy");
    let arguments = [world.url("dir/file"), target.display().to_string()];
    let Some((status, said)) = apart(script, &arguments.each_ref().map(|a| &**a)) else { return };
    assert_eq!(status, 1, "{said}");
    assert!(said.contains("not mounted at /proc"), "{said}");
    assert!(!target.exists());
}

/// Comments in the user database are often in an older encoding.
#[test]
fn owners_have_names_although_the_user_database_is_not_text() {
    let world = World::new();
    let file = world.local("served/file");
    fs::write(&file, "").unwrap();
    let (uid, gid) = fs::metadata(&file).map(|file| (file.uid(), file.gid())).unwrap();
    let script = "mount -t tmpfs none /mnt && cd /mnt || exit
printf 'other:x:1:1:Andr\\351:/:/bin/sh\\nolder:x:%s:1:Andr\\351:/:/bin/sh\\n' $2 >passwd
printf 'oth\\351r:x:1:\\nelders:x:%s:\\n' $3 >group
mount --bind passwd /etc/passwd && mount --bind group /etc/group || exit
\"$0\" ls -l \"$1\" && \"$0\" ls -ln \"$1\" && \"$0\" stat \"$1\"";
    let arguments = [world.url("dir/file"), uid.to_string(), gid.to_string()];
    let Some((status, said)) = apart(script, &arguments.each_ref().map(|a| &**a)) else { return };
    assert_eq!(status, 0, "{said}");
    assert!(said.contains(" older elders "), "{said}");
    assert!(said.contains(&format!(" {uid} {gid} ")), "{said}");
    assert!(said.contains(&format!("({uid}/older)   Gid: ({gid}/elders)")), "{said}");
}

#[test]
fn doctor_needs_no_directory_to_try_rings() {
    let script =
        "mount -t tmpfs -o ro none /dev/shm && export TMPDIR=/dev/shm && exec \"$0\" doctor";
    let Some((_, said)) = apart(script, &[]) else { return };
    assert!(!said.contains("io_uring     Read-only"), "{said}");
    assert!(said.contains("/dev/shm/towline-doctor-") && said.contains("TMPDIR"), "{said}");
}

#[test]
fn a_run_without_room_says_where() {
    let world = World::new();
    let at = format!("/towline-lacking={}", world.url("dir"));
    for size in ["16k", "256k"] {
        let script = format!(
            "mount -t tmpfs -o size={size} none /mnt && export XDG_RUNTIME_DIR=/mnt && \"$0\" run --at \"$1\" -- true; \
             echo $?; ls /mnt/towline-*"
        );
        let Some((_, said)) = apart(&script, &[&at]) else { return };
        let told = said.contains("/mnt/towline-") && said.contains("XDG_RUNTIME_DIR");
        assert!(told && said.contains("no space left"), "{size}: {said}");
        assert!(said.contains("125\n"), "{size}: {said}");
        assert!(!said.contains("preload-new"), "{size}: a part of the library is left: {said}");
    }
}

/// Without the library's state of the run, remote names would be taken for local ones.
#[test]
fn a_program_without_room_for_the_run_does_not_begin() {
    let world = World::new();
    fs::write(world.local("served/file"), b"12345").unwrap();
    let at = format!("/towline-lacking={}", world.url("dir"));
    let script = "ulimit -v 60000; exec cat /towline-lacking/file";
    let output = Command::new(TOWLINE)
        .args(["run", "--at", &at, "--", "sh", "-c", script])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("leaves no room for the state of the run"), "{said}");
    assert_eq!((output.status.code(), output.stdout.len()), (Some(125), 0), "{said}");
}

/// The dynamic linker would not find the library there, and programs would then take local files for remote ones.
#[test]
fn folders_whose_names_cannot_be_used_are_not_used() {
    let world = World::new();
    fs::write(world.local("served/file"), b"12345").unwrap();
    let at = format!("/towline-lacking={}", world.url("dir"));
    for name in ["a b", "a:b", "$LIB", &"long".repeat(30)] {
        let runtime = world.local(name);
        fs::DirBuilder::new().mode(0o700).create(&runtime).unwrap();
        for more in [&[][..], &["--report"]] {
            let mut command = Command::new(TOWLINE);
            command.arg("run").args(more).args(["--at", &at, "--", "cat", "/towline-lacking/file"]);
            command.env("XDG_RUNTIME_DIR", &runtime).stdin(Stdio::null());
            let output = command.output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.stdout, b"12345", "{name}: {said}");
            assert!(!said.contains("ld.so") && !said.contains("WARN"), "{name}: {said}");
        }
        assert!(fs::read_dir(&runtime).unwrap().next().is_none(), "{name}");
    }
    let script =
        "mount -t tmpfs -o ro none /dev/shm && mkdir '/mnt/a b' && export TMPDIR='/mnt/a b'
exec \"$0\" run --at \"$1\" -- true";
    let script = format!("mount -t tmpfs none /mnt && {script}");
    let Some((status, said)) = apart(&script, &[&at]) else { return };
    assert_eq!(status, 125, "{said}");
    assert!(said.contains("a space, : or $") && said.contains("XDG_RUNTIME_DIR"), "{said}");
}

/// The kernel's socket that stands for a remote one has a longer name than those of the run itself.
#[test]
fn remote_sockets_have_room_where_the_path_of_the_folder_is_long() {
    if !have("python3") {
        return println!("SKIPPED: python3 is not installed");
    }
    let world = World::new();
    let user = rustix::process::geteuid().as_raw();
    let own = world.local("").display().to_string().trim_end_matches('/').len();
    let runtime = world.local(&"r".repeat(85 - own - format!("/towline-{user}").len()));
    fs::DirBuilder::new().mode(0o700).create(&runtime).unwrap();
    let mut command = Command::new(TOWLINE);
    command.args(["run", "--at", &format!("/towline-lacking={}", world.url("dir"))]);
    let script = "import socket; socket.socket(socket.AF_UNIX).bind('/towline-lacking/socket')";
    command.args(["--", "python3", "-c", script]).env("XDG_RUNTIME_DIR", &runtime);
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(world.local("served/socket").symlink_metadata().is_ok());
}

/// Beyond the limit on file sizes the kernel ends a process by a signal, although it may not want to write anything.
#[test]
fn a_limit_on_file_sizes_ends_neither_a_run_nor_its_programs() {
    let world = World::new();
    fs::write(world.local("served/file"), b"12345").unwrap();
    let runtime = world.local("runtime");
    fs::DirBuilder::new().mode(0o700).create(&runtime).unwrap();
    let limited = |limit: &str, arguments: &[&str]| {
        let script = format!("ulimit -f {limit}; exec \"$0\" run \"$@\"");
        let mut command = Command::new("sh");
        command.args(["-c", &script, TOWLINE]).args(arguments);
        command.stdin(Stdio::null()).env("XDG_RUNTIME_DIR", &runtime).output().unwrap()
    };
    let at = format!("/towline-lacking={}", world.url("dir"));
    for more in [&[][..], &["--report"]] {
        let output = limited("100", &[more, &["--at", &at, "--", "true"]].concat());
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(125), "{said}");
        assert!(said.contains("ulimit -f"), "{said}");
        assert!(fs::read_dir(&runtime).unwrap().next().is_none());
    }
    if !have("python3") {
        return println!("SKIPPED: python3 is not installed");
    }
    let script = "import errno, mmap, signal
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
file = open('/towline-lacking/file')
print(mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ)[:])
try:
    mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
except OSError as error:
    print(errno.errorcode[error.errno])";
    let output = limited("1000000", &["--at", &at, "--", "python3", "-c", script]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "b'12345'\nEFBIG\n", "{said}");
}

/// Requests are served without more threads, and the log says so once.
#[test]
fn a_lack_of_threads_and_processes_is_told() {
    let world = World::new();
    let place = world.local("place");
    fs::create_dir_all(place.join("tree")).unwrap();
    (0..5).for_each(|n| fs::write(place.join(format!("tree/{n}")), b"file").unwrap());
    // The limit on processes does not apply to root.
    let mut command = Command::new("setpriv");
    if rustix::process::geteuid().is_root() {
        fs::set_permissions(&place, fs::Permissions::from_mode(0o777)).unwrap();
        command.args(["--reuid=65533", "--regid=65533", "--clear-groups"]);
    }
    let script = "exec 2>&1; url() { echo \"towline+unix:///$1?socket=$PWD/socket\"; }
prlimit --nproc=1 \"$0\" run --at /towline-lacking=\"$(url d)\" -- true; echo \"run $?\"
prlimit --nproc=1 \"$0\" serve --mem m=1M --listen unix:///$PWD/none; echo \"serve $?\"
\"$0\" serve --dir d=. --cores 1 --listen unix:///$PWD/socket &
for i in $(seq 600); do \"$0\" stat \"$(url d)\" >/dev/null 2>&1 && break; sleep 0.1; done
prlimit --nproc=1:1 --pid $!
\"$0\" cp -r tree \"$(url d/copy)\" && diff -r tree copy && echo copied
\"$0\" run --at /towline-lacking=\"$(url d)\" -- sync /towline-lacking/copy/0 /towline-lacking/copy/1
kill $!; wait $!";
    command.args(["timeout", "100", "sh", "-c", script, TOWLINE]).current_dir(&place);
    let output = command.env_remove("XDG_RUNTIME_DIR").stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let run = said.contains("cannot create a process: ") && said.contains("run 125\n");
    assert!(run && said.contains("cannot create a thread: "), "{said}");
    assert!(said.contains("serve 1\n") && said.contains("copied\n"), "{said}");
    assert_eq!(said.matches("a thread for blocking work").count(), 1, "{said}");
}

/// Even where there is no `/dev/null`.
#[test]
fn closed_streams_need_no_devices() {
    let world = World::new();
    let script = "mount -t tmpfs none /dev && \"$0\" mkdir \"$1\" <&- >&- 2>&-";
    let Some((status, said)) = apart(script, &[&world.url("dir/new")]) else { return };
    assert_eq!(status, 0, "{said}");
    assert!(world.local("served/new").is_dir());
}

/// A state file with holes on a full disk, where touching them would kill the server.
#[test]
fn a_state_without_room_is_kept_and_told() {
    let script = "mount -t tmpfs -o size=2m none /mnt && cd /mnt || exit
serve() { timeout 60 \"$0\" serve --mem m=1M --state \"$1\" --listen unix:///mnt/socket; }
await() { for i in $(seq 600); do [ -S socket ] && break; sleep 0.1; done; }
serve a & await
\"$0\" mkdir 'towline+unix:///m/d?socket=/mnt/socket'
kill $(cat /proc/$!/task/$!/children); wait; rm -f socket
mkdir b; cp --sparse=always a/* b; rm -r a; head -c 3M /dev/zero >fill
serve b; echo \"status $?\"; rm fill
serve b & await
kill $(cat /proc/$!/task/$!/children); wait; ls b";
    let Some((_, said)) = apart(script, &[]) else { return };
    assert!(said.contains("the disk has no room") && said.contains("status 1"), "{said}");
    assert!(!said.contains("damaged"), "{said}");
}

/// An export may hold several file systems.
#[test]
fn a_link_to_another_file_system_is_told_as_such() {
    let script = "mount -t tmpfs none /mnt && mkdir /mnt/other && mount -t tmpfs none /mnt/other && cd /mnt || exit
echo >other/file; ln -s / out
timeout 60 \"$0\" serve --dir e=/mnt --listen unix:///mnt/socket & for i in $(seq 600); do [ -S socket ] && break; sleep 0.1; done
link() { \"$0\" ln \"towline+unix:///e/$1?socket=/mnt/socket\" \"towline+unix:///e/$2?socket=/mnt/socket\"; }
link other/file link; link other/file other/link && stat -c %h other/link; link out/etc/passwd link; link other/file out/tmp/link
mkdir -p tree/sub to/sub && mount -t tmpfs none to/sub && echo >tree/a && ln tree/a tree/sub/a
for to in to 'towline+unix:///e/to?socket=/mnt/socket'; do \"$0\" cp -a 'towline+unix:///e/tree/.?socket=/mnt/socket' \"$to\"; done
\"$0\" cp -r 'towline+unix:///e/tree/.?socket=/mnt/socket' to && cmp tree/a to/sub/a && echo copied
kill $(cat /proc/$!/task/$!/children); wait";
    let Some((_, said)) = apart(script, &[]) else { return };
    let told = |words: &str| said.lines().filter(|line| line.contains(words)).count();
    assert_eq!(
        told("e/link?socket=/mnt/socket: invalid cross-device link; a hard link must"),
        1,
        "{said}"
    );
    assert_eq!(told("leads out of the export"), 2, "{said}");
    assert_eq!(told("without --preserve=links"), 2, "{said}");
    assert_eq!(told("copied"), 1, "{said}");
    assert!(said.lines().any(|line| line == "2"), "{said}");
}

/// The folder for runs may be on a disk, whose file systems have a lower limit on file lengths than those in
/// memory.
#[test]
fn programs_map_files_where_the_folder_for_runs_is_on_a_disk() {
    if Command::new("python3").arg("--version").stdout(Stdio::null()).status().is_err() {
        return println!("SKIPPED: python3 is not installed");
    }
    let world = World::new();
    fs::write(world.local("served/file"), noise(3 << 20, 3)).unwrap();
    let runtime = world.local("runtime");
    fs::DirBuilder::new().mode(0o700).create(&runtime).unwrap();
    let script = "import mmap,sys
with open(sys.argv[1], 'r+b') as f:
    for access in (mmap.ACCESS_READ, mmap.ACCESS_WRITE, mmap.ACCESS_COPY):
        m = mmap.mmap(f.fileno(), 0, access=access)
        f.seek(0)
        assert m[:] == f.read(), access
        m.close()
    m = mmap.mmap(f.fileno(), 0)
    m[70000:70005] = b'there'
    m.flush()
";
    let at = format!("/towline-lacking={}", world.url("dir"));
    let output = Command::new(TOWLINE)
        .args(["run", "--at", &at, "--", "python3", "-c", script, "/towline-lacking/file"])
        .env("XDG_RUNTIME_DIR", &runtime)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let written = fs::read(world.local("served/file")).unwrap();
    assert_eq!(&written[70000..70005], b"there");
}

/// The number of inotify queues per user is limited, and many runs and servers at once can use them up.
/// Mappings are filled on demand anyway, and files that were left are closed as soon as there is a queue
/// again.
#[test]
fn runs_begin_without_a_queue_of_events() {
    let number = "/proc/sys/user/max_inotify_instances";
    let unshared = ["-Ur", "sh", "-c"];
    let can = Command::new("unshare").args(unshared).arg(format!("echo 0 >{number}")).output();
    if !have("python3") || !have("flock") || !can.is_ok_and(|output| output.status.success()) {
        println!("SKIPPED runs without a queue of events: no user namespace, or no program");
        return;
    }
    let world = World::new();
    let huge = if support::maps_on_demand() { 1u64 << 36 } else { 1 << 13 };
    fs::File::create(world.local("served/huge")).unwrap().set_len(huge).unwrap();
    let script = "cd /towline-lacking
python3 -c 'import mmap
with open(\"huge\") as f:
    print(mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)[-1])'
(flock 9) 9>>lock; flock -n lock true || echo held
echo 128 >\"$0\"
for i in $(seq 100); do (flock 9) 9>>lock$i; flock -n lock$i echo free && break; sleep 0.1; done";
    for transport in ["tcp", "shm"] {
        let at = format!("/towline-lacking={}", world.through(transport, "dir"));
        let run =
            "echo 0 >\"$0\" && exec timeout 100 \"$1\" run --at \"$2\" -- sh -c \"$3\" \"$0\"";
        let mut command = Command::new("unshare");
        let output =
            command.args(unshared).args([run, number, TOWLINE, &at, script]).output().unwrap();
        let complaint = String::from_utf8_lossy(&output.stderr);
        let said = String::from_utf8_lossy(&output.stdout);
        assert_eq!(said, "0\nheld\nfree\n", "{transport}: {complaint}");
        assert!(complaint.contains("max_user_instances"), "{transport}: {complaint}");
    }
}

/// Runs a script on a remote directory while these system calls fail for it. Returns its output and its
/// complaints.
fn without(calls: &[libc::c_long], url: &str, script: &str) -> (String, String) {
    let mut command = Command::new("timeout");
    command.args(["100", TOWLINE, "run", "--at", &format!("/towline-lacking={url}"), "--"]);
    for call in calls {
        let filter = forbidding(*call);
        // Each filter starts the next one, whose path it is given.
        command.arg("/usr/bin/env").arg(filter.get_program()).args(filter.get_args());
    }
    let output = command.args(["/bin/sh", "-c", script]).stdin(Stdio::null()).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

/// A program's filter may forbid a system call that only the library makes.
#[test]
fn programs_that_may_not_wait_reach_their_files() {
    if !have("python3") || !have("flock") {
        return;
    }
    let world = World::new();
    let script = "cd /towline-lacking && cp file copy && cmp file copy || exit
for i in $(seq 40); do [ -e missing$i ] || echo $i >>list; done
(flock 9; sleep 0.3; echo first >>list) 9>>lock & sleep 0.1
(flock 9; echo second >>list) 9>>lock; wait
(flock 9; flock -w 0.3 lock true || echo waited >>list) 9>>lock; tail -4 list";
    fs::write(world.local("served/file"), noise(600_000, 3)).unwrap();
    let calls = [
        libc::SYS_ppoll,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_poll,
    ];
    for (call, transport) in calls.iter().flat_map(|call| ["tcp", "unix", "shm"].map(|t| (call, t)))
    {
        let (said, complaint) = without(&[*call], &world.through(transport, "dir"), script);
        assert_eq!(said, "40\nfirst\nsecond\nwaited\n", "{call} {transport}: {complaint}");
        fs::remove_file(world.local("served/list")).unwrap();
    }
}

/// Programs that may not sleep instead either, with and without one of the two calls for it.
#[test]
fn programs_that_may_not_sleep_wait_all_the_same() {
    if !have("python3") || !have("flock") {
        return;
    }
    let world = World::new();
    let script = "cd /towline-lacking && (flock 9; flock -w 0.3 lock true || echo waited) 9>>lock";
    let calls = [libc::SYS_ppoll, libc::SYS_clock_nanosleep, libc::SYS_nanosleep];
    for calls in [&calls[..2], &calls] {
        let (said, complaint) = without(calls, &world.url("dir"), script);
        assert_eq!(said, "waited\n", "{calls:?}: {complaint}");
    }
}

/// As in libc, which stores a byte in each block.
#[test]
fn files_are_allocated_where_their_file_system_cannot() {
    if !have("python3") {
        return;
    }
    let script = "mount -t ramfs none /mnt && exec \"$0\" run --serve /mnt --at /towline-lacking -- python3 -c '
import os
path = \"/towline-lacking/f\"
with open(path, \"wb\") as file:
    file.write(b\"x\" * 5000 + bytes(5000))
for flags in (os.O_RDWR, os.O_RDWR | os.O_APPEND):
    fd = os.open(path, flags)
    os.posix_fallocate(fd, 10, 9000)
    print(os.stat(fd).st_size)
fd = os.open(path, os.O_RDWR)
os.posix_fallocate(fd, 100, (3 << 20) + 5)
with open(path, \"rb\") as file:
    print(file.read() == b\"x\" * 5000 + bytes((3 << 20) + 105 - 5000), os.stat(path).st_blocks * 512 > 3 << 20)
'";
    let Some((status, said)) = apart(script, &[]) else { return };
    assert_eq!((status, said.as_str()), (0, "10000\n10000\nTrue True\n"));
}

/// Of a device that the kernel does not have, the record can be removed, but nothing can be resumed.
#[test]
fn a_device_that_is_gone_leaves_a_record() {
    let script = "mount -t tmpfs none /run && mkdir -p /run/towline/attached && cd /run/towline/attached || exit
record='{\"kind\":\"KIND\",\"number\":1048575,\"url\":\"nbd://127.0.0.1:1/x\",\"process\":999999,\"size\":1048576,
\"connections\":1,\"patience\":null,\"identity\":null,\"owner\":\"\"}'
echo \"$record\" | sed s/KIND/ublk/ >ublkb1048575.json; echo log >ublkb1048575.log
echo \"$record\" | sed s/KIND/nbd/ >nbd1048575.json; echo \"$record\" | sed s/KIND/nbd/ >nbd1048575.json.new
\"$0\" attach --list; \"$0\" attach --resume
flock nbd1048575.json \"$0\" attach --resume=nbd1048575
\"$0\" detach ublkb1048575 && \"$0\" detach --force nbd://127.0.0.1:1/x && ls";
    let Some((status, said)) = apart(script, &[]) else { return };
    assert_eq!(said.matches(" gone ").count(), 2, "{said}");
    assert_eq!(said.matches("removes its record").count(), 2, "{said}");
    assert_eq!(said.matches("served already").count(), 1, "{said}");
    assert!(status == 0 && said.ends_with("served already\nnbd1048575.json.new\n"), "{said}");
}

/// Opening a device waits in the kernel while its server is away; here opening a file waits for whoever has a lease
/// on it.
#[test]
fn a_detach_that_waits_can_be_interrupted() {
    if !have("python3") {
        return println!("SKIPPED: python3 is not installed");
    }
    let script = "mount -t tmpfs none /run && mkdir -p /run/towline/attached /run/dev && touch /run/dev/null &&
mount --bind /dev/null /run/dev/null && mount --rbind /run/dev /dev && cd /run/towline/attached || exit
touch /dev/ublkc5 /dev/ublkb5
owner=$(stat -c %i /dev/ublkc5)
echo '{\"kind\":\"ublk\",\"number\":5,\"url\":\"nbd://127.0.0.1:1/x\",\"process\":999999,\"size\":1048576,
\"connections\":1,\"patience\":null,\"identity\":null,\"owner\":\"OWNER\"}' | sed s/OWNER/$owner/ >ublkb5.json
exec python3 -c 'import fcntl, os, signal, subprocess, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGIO])
record = open(\"ublkb5.json\")
fcntl.flock(record, fcntl.LOCK_EX)
device = open(\"/dev/ublkb5\", \"r+\")
fcntl.fcntl(device, fcntl.F_SETLEASE, fcntl.F_WRLCK)
unblock = lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGIO])
detach = subprocess.Popen([sys.argv[1], \"detach\", \"ublkb5\", \"ublkb6\"], preexec_fn=unblock)
signal.sigwait([signal.SIGIO])
detach.terminate()
print(detach.wait(60), os.listdir(\".\"))' \"$0\"";
    let Some((status, said)) = apart(script, &[]) else { return };
    let interrupted =
        "towline: detach: ublkb5: interrupted while waiting for its server; it stays attached\n";
    assert_eq!((status, said), (0, format!("{interrupted}-15 ['ublkb5.json']\n")));
}
