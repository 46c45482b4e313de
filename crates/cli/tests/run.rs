//! `towline run`: a script prints the same on a local and on a remote directory.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod support;

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use support::{TOWLINE, World, have};

/// The remote directory's path for the programs; it does not exist locally.
const PREFIX: &str = "/towline-run-test";

fn shell(script: &str, directory: &str, scratch: &Path, remote: Option<&str>) -> Output {
    let mut command = match remote {
        None => Command::new("bash"),
        Some(url) => {
            let mut command = Command::new(TOWLINE);
            command.args(["run", "--at", &format!("{PREFIX}={url}"), "--", "bash"]);
            command
        }
    };
    fs::create_dir_all(scratch).unwrap();
    command
        .args(["-c", &format!("cd {directory} || exit 99\n{script}"), "bash", directory])
        .env("HOME", scratch)
        .env("SCRATCH", scratch)
        .env("GIT_AUTHOR_DATE", "2020-01-01T00:00:00Z")
        .env("GIT_COMMITTER_DATE", "2020-01-01T00:00:00Z")
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

/// Runs a script on a local directory and under `run`, over TCP and over the Unix socket, and compares its
/// output, its exit status and the files it leaves.
fn same(script: &str) {
    let world = World::new();
    let local = world.local("local");
    fs::create_dir(&local).unwrap();
    let expected = shell(script, local.to_str().unwrap(), &world.local("scratch-l"), None);
    assert_ne!(expected.status.code(), Some(99));
    for transport in ["tcp", "unix"] {
        let top = format!("dir/{transport}");
        fs::create_dir(world.local("served").join(transport)).unwrap();
        let url = world.through(transport, &top);
        let scratch = world.local(&format!("scratch-{transport}"));
        let got = shell(script, PREFIX, &scratch, Some(&url));
        let text = |bytes: &[u8]| {
            String::from_utf8_lossy(bytes)
                .replace(local.to_str().unwrap(), PREFIX)
                .replace("scratch-l", &format!("scratch-{transport}"))
        };
        assert_eq!(text(&got.stdout), text(&expected.stdout), "{transport}: {}", text(&got.stderr));
        assert_eq!(text(&got.stderr), text(&expected.stderr), "{transport}");
        assert_eq!(got.status.code(), expected.status.code(), "{transport}");
        let listed = |directory: &Path| {
            let script =
                "find . -printf '%p %y %m %n %l\\n' | sort; find . -type f | sort | xargs cksum";
            let output = Command::new("sh").args(["-c", script]).current_dir(directory).output();
            text(&output.unwrap().stdout)
        };
        assert_eq!(listed(&world.local("served").join(transport)), listed(&local), "{transport}");
    }
}

#[test]
fn redirections_pipes_and_children() {
    same(
        r#"echo one > f; echo two >> f; while read line; do echo "got $line"; done < f
        cat < f | tr a-z A-Z; cat f f > g; wc -c g
        exec 5> h; echo five >&5; (echo child >&5); sh -c 'echo exec >&5'; exec 5>&-; cat h
        cat <<X
here document $(cat f | wc -l)
X
        for i in 1 2 3 4; do echo $i >> app & done; wait; sort app; rm app
        ls nothing 2> error; test -s error && echo complained
        exec 6< f; read a <&6; sh -c 'cat <&6'; read b <&6 || echo at the end
        env -i /bin/cat f; echo a b c | xargs -n1 -P3 sh -c 'echo $0 > x$0'; cat xa xb xc
        find . -name 'x?' -exec cat {} + | sort; diff <(cat f) <(cat f) && echo no difference
        cat /dev/fd/0 < f; cat /proc/self/fd/0 < f; cat - < f; umask 077; echo > private"#,
    );
}

#[test]
fn directories_and_working_directory() {
    same(
        r#"pwd; mkdir -p a/b/c; cd a/b; pwd; echo deep > c/file; cat c/file ../b/c/file
        (cd c && pwd && cat file && sh -c 'pwd; ls'); cd ..; ls -R; find . | sort; cd - > /dev/null
        cd /; cat "$1/a/b/c/file"; cd "$1"; realpath a/b/../b/c; ls -d */ .; rm -r a; ls
        mkdir d; rmdir d; rmdir d; mkdir x; touch x/y; rmdir x; mv x z; ls z; cp -a z w; ls w
        ln -s z link; readlink link; ls link/; cd link; pwd; pwd -P; cd ..; ln z/y hard
        stat -c %h hard; ln -s /etc/hostname out; cmp out /etc/hostname && echo out
        ln -s "$1/hard" "$SCRATCH/in"; cat "$SCRATCH/in" && echo in; ls missing; cat z"#,
    );
}

#[test]
fn coreutils_one_by_one() {
    same(
        r#"printf 'c\nb\na\n' > f; cat f; tac f; sort f; sort -o f f; cat f; head -n1 f; tail -n1 f
        wc f; cut -c1 f; paste f f; nl f; od -c f; base64 f; md5sum f; sha256sum f; cksum f; sum f
        cp f g; cp -p f h; mv g i; ln f j; ls; dd if=f of=k bs=1 count=3 status=none; cat k
        truncate -s 5 k; stat -c '%s %a %F' k; split -l1 f part; cat partaa; csplit -s f 2; cat xx00
        tee t < f > /dev/null; cat t; touch -d 2020-01-01 t; date -r t +%Y; chmod 640 t
        stat -c %a t; install -m 600 f u; stat -c %a u; shred -u u; ls u; mktemp -p . XXXXXX > /dev/null
        rm -f ./??????; mkfifo p; test -p p && echo fifo; test -w f && echo writable; comm f f
        join f f; uniq f; fold -w1 f; expand f; fmt f; pr -t f; shuf f | sort; tsort < /dev/null
        sync f; unlink j; du -a . > /dev/null; df . > /dev/null; readlink -f f | wc -l; dir; vdir > /dev/null
        sed -i s/a/A/ f; cat f; grep -n A f; awk '{print NR, $0}' f; tr a-z A-Z < f; rm -rf -- *"#,
    );
}

#[test]
fn tar_and_copies_of_trees() {
    if !have("tar") {
        return;
    }
    same(
        r#"mkdir tree; for d in 1 2 3; do mkdir tree/$d; for f in a b c; do
            head -c $((d * 5000)) /dev/zero | tr '\0' $f > tree/$d/$f; done; done
        ln -s a tree/1/link; chmod 600 tree/2/a; tar cf t.tar tree; tar tf t.tar | sort
        mkdir out; tar xf t.tar -C out; diff -r tree out/tree && echo same; cp -a tree copy
        diff -r tree copy && echo same; tar cf - tree | (mkdir piped; cd piped; tar xf -)
        diff -r tree piped/tree && echo same; grep -rl aaa tree | sort; rm -rf out piped copy t.tar"#,
    );
}

#[test]
fn programs_and_scripts_run_from_there() {
    same(
        r##"printf '#!/bin/sh\necho "script $1"; cat "$0" | wc -l\n' > s; ./s x; chmod +x s; ./s x
        cp /bin/echo e; ./e a program; PATH="$PWD:$PATH"; e found; env ./e by env; ./missing
        printf 'echo no interpreter\n' > n; chmod +x n; ./n; find . -name e -exec {} found \;"##,
    );
}

#[test]
fn git_works() {
    if !have("git") {
        return;
    }
    same(
        r#"git config --global user.email a@b; git config --global user.name n
        git config --global init.defaultBranch main; git init -q r; cd r; mkdir s; echo a > a
        echo b > s/b; git add .; git commit -qm one; echo c >> a; git status --short; git diff
        git commit -qam two; git gc -q; git fsck; cd ..; git clone -q r c; git -C c log --oneline
        rm -rf r c"#,
    );
}

#[test]
fn python_sees_files_as_ever() {
    if !have("python3") {
        return;
    }
    same(
        r#"python3 - <<'P'
import fcntl, glob, mmap, os, shutil, socket, subprocess, tempfile
with open('p', 'w') as f: f.write('hello\n' * 3)
with open('p', 'a') as f: f.write('more\n')
with open('p', 'r+b') as f:
    f.seek(2); f.write(b'XX'); f.seek(0); print(f.read())
print(sorted(os.listdir('.')), os.getcwd() == os.path.realpath('.'))
with tempfile.TemporaryFile(dir='.') as f:
    f.write(b'q' * 10); f.flush(); print(os.fstat(f.fileno()).st_size); f.seek(0); print(f.read())
fd = os.open('gone', os.O_RDWR | os.O_CREAT); os.write(fd, b'still'); os.unlink('gone')
print(subprocess.run(['cat', '/proc/self/fd/0'], stdin=os.open('p', 0), capture_output=True).stdout)
os.lseek(fd, 0, 0); print(subprocess.run(['cat'], stdin=fd, capture_output=True).stdout)
print(os.lseek(fd, 0, os.SEEK_CUR))
with open('mm', 'w+b') as f:
    f.write(b'0' * 10000); f.flush()
    with mmap.mmap(f.fileno(), 10000) as m:
        m[5000:5003] = b'abc'; m.flush(); f.seek(5000); print(f.read(3))
g = open('lk', 'w'); fcntl.lockf(g, fcntl.LOCK_EX); r, w = os.pipe()
if os.fork() == 0:
    try: fcntl.lockf(open('lk', 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB); os.write(w, b'got')
    except OSError: os.write(w, b'busy')
    os._exit(0)
os.wait(); print(os.read(r, 10), sorted(glob.glob('m*')))
a, b = socket.socketpair(); h = open('mm', 'rb'); socket.send_fds(a, [b'x'], [h.fileno()])
_, fds, _, _ = socket.recv_fds(b, 10, 5); h.seek(5000); print(os.read(fds[0], 3))
os.dup2(h.fileno(), 50); h.close(); os.lseek(50, 5001, 0); print(os.read(50, 2)); os.close(50)
try: os.read(50, 1)
except OSError as e: print(e.errno)
shutil.copy('p', 'p2'); os.rename('p2', 'p3'); os.truncate('p3', 4); print(open('p3').read())
P"#,
    );
}

#[test]
fn databases_are_not_torn() {
    if !have("sqlite3") {
        return;
    }
    same(
        r#"for mode in delete wal; do
            sqlite3 db "pragma journal_mode=$mode; create table t(a); insert into t values(1)"
            for i in 1 2 3 4; do
                for j in 1 2 3; do echo "insert into t values($i$j);"; done |
                    sqlite3 -cmd '.timeout 60000' db &
            done; wait
            sqlite3 db 'select count(*), sum(a) from t; pragma integrity_check'
            sqlite3 db 'pragma wal_checkpoint(truncate)' > /dev/null; rm db*
        done; ls"#,
    );
}

#[test]
fn a_project_is_built() {
    if !have("make") || !have("cc") {
        return;
    }
    same(
        r#"mkdir src; for i in 1 2 3 4 5 6; do
            printf '#include "all.h"\nint f%d(int a) { return a + %d; }\n' $i $i > src/f$i.c
            echo "int f$i(int a);" >> src/all.h; done
        printf '#include <stdio.h>\n#include "all.h"\nint main(void)' > src/main.c
        echo '{ printf("%d\n", f1(f2(f3(f4(f5(f6(0))))))); return 0; }' >> src/main.c
        printf 'OBJ = $(patsubst src/%%.c,%%.o,$(wildcard src/*.c))\nall: $(OBJ)\n' > Makefile
        printf '\tcc -o all $(OBJ)\n%%.o: src/%%.c src/all.h\n\tcc -c -o $@ $<\n' >> Makefile
        make -s -j3 all && ./all; make -s -q all && echo up to date; sleep 0.02
        touch src/f3.c; make -n all | wc -l; rm -f all *.o"#,
    );
}

#[test]
fn editors_and_other_languages() {
    // A program that is not installed gives the same message on both sides.
    for program in ["perl", "vim", "node", "rsync"] {
        have(program);
    }
    same(
        r#"printf 'one\ntwo\nthree\n' > f; vim -es -u NONE -c '%s/two/2/' -c 'wq' f; cat f
        perl -e 'open F, "+<", "f"; print <F>; seek F, 0, 0; print F "ONE"; close F;
            print -s "f", "\n"; opendir D, "."; print join(",", sort readdir D), "\n"'
        perl -pi -e 's/three/3/' f; cat f
        node -e 'const f = require("fs"); f.writeFileSync("n", "node\n"); f.appendFileSync("n", "x");
            console.log(f.readFileSync("n", "utf8"), f.readdirSync("."), f.statSync("n").size);
            f.renameSync("n", "m"); f.mkdirSync("a/b", {recursive: true}); f.rmSync("a", {recursive: true})'
        mkdir -p t/s; cp f t/s/; ln -s f t/s/l; ln t/s/f t/h; chmod 604 t/s/f; touch -d 2001-01-01 t/s
        rsync -aH t/ u/ && diff -r t u && echo same; echo more >> t/s/f; rsync -a --delete t/ u/
        diff -r t u && echo same; cp -a t v; for d in t u v; do
            (cd $d && find . -printf '%p %y %m %U %G %s %T@ %l\n' | sort > ../$d.list); done
        cmp t.list v.list && echo attributes; rm *.list"#,
    );
}

/// Data that was read ahead must not be used after another process of the run has changed the file.
#[test]
fn what_is_read_ahead_is_not_stale_within_a_run() {
    if !have("python3") {
        return;
    }
    same(
        r#"mkdir d; for i in 1 2 3 4 5 6 7 8 9; do echo $i > d/f$i; done
        for f in d/*; do mv $f $f.bak; [ -e $f ] && echo "$f is still there"; stat -c '%n %s' $f.bak; done
        python3 - <<'P'
import os, subprocess
def sizes(): return [os.lstat('d/' + name).st_size for name in sorted(os.listdir('d'))]
for turn in range(20):
    print(sizes(), [os.path.exists('d/no%d' % i) for i in range(5)])
    subprocess.run(['sh', '-c', 'echo more >> d/f%d.bak; echo > d/no%d' % (turn % 9 + 1, turn % 5)])
    f = open('d/f1.bak'); print(os.fstat(f.fileno()).st_size)
    subprocess.run(['sh', '-c', 'printf %d > d/f1.bak' % turn]); print(f.read(), f.read())
    print(os.path.getsize('d/f1.bak'), os.path.exists('d/no%d' % (turn % 5)))
    os.setxattr('d/f2.bak', 'user.x', b'%d' % turn); print(os.getxattr('d/f2.bak', 'user.x'))
    os.unlink('d/no%d' % (turn % 5)); print(os.path.exists('d/no%d' % (turn % 5)), len(sizes()))
r, w = os.pipe(); r2, w2 = os.pipe()
if os.fork() == 0:
    for turn in range(20):
        os.read(r, 1); open('d/f3.bak', 'a').write('x'); os.rename('d/a%d' % turn, 'd/a%d' % (turn + 1))
        os.write(w2, b'1')
    os._exit(0)
open('d/a0', 'w').close()
for turn in range(20):
    sizes(); before = os.stat('d/f3.bak').st_size; os.stat('d/f4.bak'); os.write(w, b'1'); os.read(r2, 1)
    print(os.stat('d/f3.bak').st_size - before, os.path.exists('d/a%d' % turn), os.path.exists('d/a%d' % (turn + 1)))
P"#,
    );
}

#[test]
fn parts_of_vectors_are_filled_in_order() {
    if !have("python3") {
        return println!("SKIPPED vectors: there is no python3");
    }
    same(
        r#"python3 - <<'P'
import os, zlib
fd = os.open('f', os.O_RDWR | os.O_CREAT)
data = b''.join(b'%07d' % n for n in range(60000))
print(os.pwritev(fd, [data[:100000], data[100000:100003], b'', data[100003:]], 0), os.fstat(fd).st_size)
for at, lengths in [(1000, (100000, 70000, 200000)), (5, (65536, 65536)), (300000, (90000, 90000, 90000)),
                    (7, (10, 20, 100000)), (419999, (70000, 70000)), (420000, (70000, 70000)), (3, (70000, 0, 5))]:
    parts = [bytearray(length) for length in lengths]
    count = os.preadv(fd, parts, at)
    print(count, b''.join(parts)[:count] == data[at:at + count], [zlib.crc32(part) for part in parts])
    os.lseek(fd, at, 0)
    print(os.readv(fd, parts), os.lseek(fd, 0, 1))
P"#,
    );
}

#[test]
fn wrong_use_is_explained_and_statuses_passed_on() {
    let world = World::new();
    let at = format!("{PREFIX}={}", world.url("dir"));
    let status = |arguments: &[&str]| {
        let output = Command::new(TOWLINE).arg("run").args(arguments).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    assert_eq!(status(&["--at", &at, "--", "sh", "-c", "exit 7"]), (Some(7), String::new()));
    let killed = |more: &[&str]| {
        let mut command = Command::new(TOWLINE);
        command.arg("run").args(more).args(["--at", &at, "--", "sh", "-c", "kill -9 $$"]);
        command.output().unwrap().status
    };
    assert_eq!(killed(&[]).signal(), Some(9));
    assert_eq!(killed(&["--report"]).code(), Some(137));
    assert_eq!(status(&["--at", &at, "--", "/no/such/program"]).0, Some(127));
    let (code, complaint) = status(&["--at", "relative=towline://h/x", "--", "true"]);
    assert!(code == Some(125) && complaint.contains("absolute"), "{complaint}");
    let gone = format!("{PREFIX}={}", world.url("none"));
    let marked = world.local("marked");
    let goes = world.local("goes");
    let text = format!("echo > {}; cd {PREFIX}; echo > {}\n", goes.display(), marked.display());
    let script = world.local("script");
    fs::write(&script, text).unwrap();
    let touch = ["touch", marked.to_str().unwrap(), PREFIX];
    let goes_there = ["sh", script.to_str().unwrap()];
    // Repeated often, since the program may be loaded before that is known, or after.
    for report in [&[][..], &["--report"]].into_iter().cycle().take(20) {
        // With and without the prefix in the arguments.
        for command in [&touch[..], &goes_there] {
            let (code, complaint) = status(&[report, &["--at", &gone, "--"], command].concat());
            let told = complaint.contains("has no export \"none\"");
            assert!(code == Some(125) && told, "{code:?}: {complaint}");
            assert_eq!(complaint.lines().count(), 1, "{complaint}");
            assert!(!marked.exists(), "the program went on");
        }
        assert!(report.len() == 1 || goes.exists(), "the program waited for what it did not ask");
    }
    let (code, complaint) = status(&["--at", PREFIX, "--", "true"]);
    assert!(code == Some(125) && complaint.contains("--serve"), "{complaint}");
    let at = format!("{PREFIX}=towline://127.0.0.1:1/x");
    let (code, complaint) = status(&["--serve", "/", "--at", &at, "--", "true"]);
    let told = "towline: run: --serve: nothing would use the directory";
    assert!(code == Some(125) && complaint.starts_with(told), "{complaint}");
    for url in ["http://h/x", "towlin+tcp://h/x", "://h"] {
        for own in [&[][..], &["--serve", "/"]] {
            let at = format!("{PREFIX}={url}");
            let (code, complaint) = status(&[own, &["--at", &at, "--", "true"]].concat());
            assert!(code == Some(125) && complaint.contains("unknown scheme"), "{complaint}");
        }
    }
}

#[test]
fn a_directory_is_served_for_the_time_of_a_run() {
    let world = World::new();
    let served = world.local("served");
    let output = Command::new(TOWLINE)
        .args(["run", "--serve", served.to_str().unwrap(), "--at", PREFIX, "--", "sh", "-c"])
        .arg(format!(
            "umask 022; echo x > {PREFIX}/made; cat {PREFIX}/made; stat -c %a {PREFIX}/made"
        ))
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "x\n644\n");
    assert_eq!(fs::read(served.join("made")).unwrap(), b"x\n");
}

/// The size of a file that the kernel generates when it is read means nothing, and reads may be short before
/// the end.
#[test]
fn files_whose_size_says_nothing_are_read_to_their_end() {
    let expected = fs::read("/proc/kallsyms").unwrap_or_default();
    if expected.len() < 100_000 {
        println!("SKIPPED files whose size says nothing: there is no long one in /proc");
        return;
    }
    let output = Command::new(TOWLINE)
        .args(["run", "--serve", "/proc", "--at", PREFIX, "--", "cat"])
        .arg(format!("{PREFIX}/kallsyms"))
        .output()
        .unwrap();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(0), expected.len()));
    let differs = output.stdout.iter().zip(&expected).position(|(found, wanted)| found != wanted);
    assert_eq!(differs, None, "the offset of the first byte that differs");
}

#[test]
fn libraries_of_other_versions_go_unless_a_run_uses_them() {
    let world = World::new();
    let runtime = world.local("runtime");
    let home = runtime.join(format!("towline-{}", rustix::process::geteuid().as_raw()));
    fs::create_dir_all(&home).unwrap();
    fs::set_permissions(&home, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    let (unused, used) = (home.join("preload-0-1.so"), home.join("preload-0-2.so"));
    fs::write(&unused, "").unwrap();
    fs::write(&used, "").unwrap();
    let recent = home.join("preload-0-3.so");
    fs::write(&recent, "").unwrap();
    let long_ago = std::time::SystemTime::now() - std::time::Duration::from_secs(7200);
    for library in [&unused, &used] {
        fs::File::options().write(true).open(library).unwrap().set_modified(long_ago).unwrap();
    }
    let lock = fs::File::open(&used).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockShared).unwrap();
    let run = || {
        let url = world.url("dir");
        let mut command = Command::new(TOWLINE);
        command.args(["run", "--at", &format!("{PREFIX}={url}"), "--", "ls", PREFIX]);
        let done = command.env("XDG_RUNTIME_DIR", &runtime).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    };
    run();
    assert!(!unused.exists() && used.exists() && recent.exists());
    let names = || {
        let mut names: Vec<_> = fs::read_dir(&home).unwrap().map(|e| e.unwrap().path()).collect();
        names.sort();
        names
    };
    let before = names();
    assert_eq!(
        before.len(),
        3,
        "the one in use, the recent one and our own, and nothing of the run: {before:?}"
    );
    run();
    assert_eq!(names(), before);
}

/// Its notes are in files of the user who began the run.
#[test]
fn a_program_that_becomes_another_user_is_reported() {
    if !rustix::process::geteuid().is_root() || !have("setpriv") {
        println!("SKIPPED: only root can become another user");
        return;
    }
    let world = World::new();
    fs::write(world.local("served/file"), "12345").unwrap();
    let prefix = world.local("at");
    let user = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "cat"];
    let output = Command::new(TOWLINE)
        .args(["run", "--report=json", "--serve"])
        .arg(world.local("served"))
        .args(["--at".as_ref(), prefix.as_os_str(), "--".as_ref()])
        .args(user)
        .arg(prefix.join("file"))
        .output()
        .unwrap();
    assert_eq!(output.stdout, b"12345");
    let report: serde_json::Value = serde_json::from_slice(&output.stderr).unwrap();
    assert_eq!(report["files"][prefix.join("file").to_str().unwrap()], 1, "{report}");
}

/// Runs a script of Python with the export at the prefix, over this transport.
fn python(world: &World, transport: &str, script: &str) -> std::process::Output {
    Command::new(TOWLINE)
        .args(["run", "--at", &format!("{PREFIX}={}", world.through(transport, "dir"))])
        .args(["--", "python3", "-c", script])
        .output()
        .unwrap()
}

/// As a store to that address would end it: the connection is not taken for a lost one.
#[test]
fn a_program_that_writes_from_a_bad_address_ends() {
    let world = World::new();
    // Over TCP and the socket, the data goes from the program's memory to the kernel.
    for transport in ["tcp", "unix"] {
        for length in [2000, 20_000, 1 << 20] {
            for call in ["write(fd, at, length)", "pwrite(fd, at, length, 0)"] {
                let script = format!(
                    "import ctypes, os\n\
                     libc, fd = ctypes.CDLL(None), os.open('{PREFIX}/f', os.O_RDWR | os.O_CREAT)\n\
                     length, at = ctypes.c_size_t({length}), ctypes.c_void_p(8192)\n\
                     print(libc.{call})"
                );
                let output = python(&world, transport, &script);
                let said = String::from_utf8_lossy(&output.stderr);
                assert_eq!(output.status.signal(), Some(libc::SIGSEGV), "{call} {length}: {said}");
            }
        }
    }
    assert_eq!(fs::metadata(world.local("served/f")).unwrap().len(), 0);
}

/// As from the kernel: what comes before the bad address, or `EFAULT`. The connection is not taken for a lost one.
#[test]
fn a_program_that_reads_to_an_address_that_turns_bad_gets_what_fits() {
    let world = World::new();
    fs::write(world.local("served/f"), support::noise(4 << 20, 5)).unwrap();
    for transport in ["tcp", "unix"] {
        for length in [40_000, 200_000, 3 << 20] {
            let script = format!(
                "import ctypes, errno, os\n\
                 libc, length = ctypes.CDLL(None, use_errno=True), {length}\n\
                 libc.mmap.restype = ctypes.c_void_p\n\
                 size = ctypes.c_size_t\n\
                 half = length // 2 // 4096 * 4096 + 8192\n\
                 at = libc.mmap(None, size(length + 4096), 3, 0x22, -1, 0)\n\
                 assert libc.munmap(ctypes.c_void_p(at + half), size(length + 4096 - half)) == 0\n\
                 fd = os.open('{PREFIX}/f', os.O_RDONLY)\n\
                 # Nothing is read ahead there.\n\
                 content = os.pread(fd, {length}, 300_000)\n\
                 for _ in range(3):\n\
                 \x20   read = libc.pread(fd, ctypes.c_void_p(at), size(length), ctypes.c_long(300_000))\n\
                 \x20   if read == -1:\n\
                 \x20       assert ctypes.get_errno() == errno.EFAULT, ctypes.get_errno()\n\
                 \x20   else:\n\
                 \x20       assert 0 < read <= half, read\n\
                 \x20       assert ctypes.string_at(at, read) == content[:read]\n\
                 \x20   assert os.pread(fd, {length}, 300_000) == content\n\
                 print('done')"
            );
            let output = python(&world, transport, &script);
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.stdout, b"done\n", "{transport} {length}: {}: {said}", output.status);
        }
    }
}
