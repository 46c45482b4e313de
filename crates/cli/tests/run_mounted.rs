//! `towline run`: programs behave the same with a remote directory and with one mounted at the prefix's path,
//! where the kernel itself defines how the boundary behaves. Also with random programs of system calls
//! (`programs/random.c`).

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod support;

use std::fs;
use std::path::Path;
use std::process::Command;
use support::compare::{Libc, compiled, finished, tree};
use support::{TOWLINE, World};

/// Returns a directory on another file system, if there is one: links and renames cannot reach it from
/// elsewhere, just as they cannot reach a remote tree.
fn other_file_system(world: &World) -> Option<tempfile::TempDir> {
    use std::os::unix::fs::MetadataExt;
    let device = |path: &Path| fs::metadata(path).map(|found| found.dev()).ok();
    let other = Path::new("/dev/shm");
    if device(other).is_none() || device(other) == device(&world.path) {
        println!("SKIPPED: /dev/shm is no file system of its own");
        return None;
    }
    tempfile::tempdir_in(other).ok()
}

/// Returns whether a directory can be mounted at another path in a separate namespace. A prefix is like such
/// a mount, so programs must behave the same on both.
fn can_mount(world: &World) -> bool {
    let at = world.local("mountable");
    fs::create_dir(&at).unwrap();
    let mounted = Command::new("unshare")
        .args(["-m", "mount", "--bind"])
        .args([&at, &at])
        .output()
        .is_ok_and(|output| output.status.success());
    if !mounted {
        println!("SKIPPED: directories cannot be mounted here, which needs root and `unshare`");
    }
    mounted
}

/// Number of kinds of steps in random programs.
const KINDS: u32 = 56;

/// Runs random programs with these seeds on both sides, using the first `kinds` kinds of steps.
fn random(seeds: impl Iterator<Item = u64>, steps: u32, kinds: u32) {
    let world = World::new();
    let Some(outside) = other_file_system(&world) else { return };
    if !can_mount(&world) {
        return;
    }
    let program = compiled(Libc::Shared, &world, "random.c");
    for seed in seeds {
        println!("random {seed} {steps} {kinds}");
        let turn = seed as usize;
        // Each has its own export. Names have the same length on both sides, since those of links have, and
        // there are directories above, which programs reach with `..`.
        let own = World::new();
        let sides = ["l", "r"].map(|side| {
            let parent = outside.path().join(format!("side-{side}-{seed}/a/b"));
            let out = outside.path().join(format!("out-{side}-{seed}/a/b"));
            fs::create_dir_all(&parent).unwrap();
            fs::create_dir_all(&out).unwrap();
            fs::write(parent.join("beside"), "beside").unwrap();
            fs::write(out.join("o"), "outer").unwrap();
            (parent.join("data"), out)
        });
        // Or a directory within an export, with other things above it than there are locally.
        let (export, served) =
            if turn.is_multiple_of(2) { ("dir", "") } else { ("dir/deep/data", "deep/data") };
        let served = own.local("served").join(served);
        fs::create_dir_all(&served).unwrap();
        if turn % 2 == 1 {
            fs::write(served.with_file_name("beside"), "another one").unwrap();
            fs::write(own.local("served/beside"), "a third").unwrap();
        }
        let numbers = [seed.to_string(), steps.to_string(), kinds.to_string()];
        let [(mounted, local_out), (prefix, out)] = &sides;
        fs::create_dir(mounted).unwrap();
        let local = own.local("local");
        fs::create_dir(&local).unwrap();
        let mut command = Command::new("unshare");
        command
            .args(["-m", "sh", "-c"])
            .args(["mount --bind \"$0\" \"$1\" && cd \"$1\" && shift && exec \"$@\""])
            .args([&local, mounted, &program])
            .args(&numbers)
            .env("OUTSIDE", local_out);
        let (expected, code) = finished(&mut command, &own.local("expected"));
        assert_eq!(code, Some(0), "seed {seed}: {expected}");
        let transport = ["shm", "tcp", "unix"][turn % 3];
        let url = own.through(transport, export);
        let mut command = Command::new(TOWLINE);
        command
            .args(["run", "--at", &format!("{}={url}", prefix.display()), "--", "sh", "-c"])
            .args(["cd \"$0\" && exec \"$@\""])
            .args([prefix, &program])
            .args(&numbers)
            .env("OUTSIDE", out);
        let (got, code) = finished(&mut command, &own.local("got"));
        let alike = |text: &str| {
            text.replace(&format!("out-r-{seed}"), &format!("out-l-{seed}"))
                .replace(&format!("side-r-{seed}"), &format!("side-l-{seed}"))
        };
        let got = alike(&got);
        if got != expected || code != Some(0) {
            let at = got.lines().zip(expected.lines()).position(|(one, other)| one != other);
            let at = at.unwrap_or_else(|| got.lines().count().min(expected.lines().count()));
            let around = |text: &str| {
                let lines: Vec<&str> = text.lines().skip(at.saturating_sub(8)).take(10).collect();
                lines.join("\n")
            };
            panic!(
                "`random {seed} {steps} {kinds}` over {transport} ends with {code:?} and differs at line {}.\n\
                 local:\n{}\n\nremote:\n{}",
                at + 1,
                around(&expected),
                around(&got)
            );
        }
        let what = format!("`random {seed} {steps} {kinds}` over {transport} leaves other files");
        assert_eq!(alike(&tree(&served)), tree(&local), "{what}");
        assert_eq!(alike(&tree(out)), tree(local_out), "{what} outside");
        fs::remove_dir(mounted).unwrap();
        let above = |path: &Path| tree(path.parent().unwrap());
        assert_eq!(alike(&above(prefix)), above(mounted), "{what} above");
        for path in [mounted, local_out, prefix, out] {
            fs::remove_dir_all(path.ancestors().nth(2).unwrap()).unwrap();
        }
    }
}

/// Links and `..` that lead out of a prefix lead to its local surroundings, whatever surrounds its directory
/// in the export: as in a mounted directory.
#[test]
fn nothing_leads_above_a_prefix_on_the_server() {
    let world = World::new();
    if !can_mount(&world) {
        return;
    }
    let script = r#"
        mkdir -p d/e; echo in > file; echo deep > d/e/f; echo moved > m
        ln -s ../beside up; ln -s ../../../beside d/e/up; ln -s ../../file d/e/down
        ln -s ../data/file around; ln -s ../into into; ln -s ../new made; ln -s /etc/hostname far
        ln -s .. above; ln -s ../none dangling
        cat up d/e/up d/e/down around into/f above/beside above/data/file d/../../beside
        (cd d/e; cat ../../../beside ../../up up; cd ../../..; cat beside data/file; ls into)
        (cd -P into && cat f && cat ../data/file && pwd -P | sed 's,.*/side-[a-z]*,,')
        readlink up d/e/up around; readlink -f up d/e/up around above | sed 's,.*/side-[a-z]*,,'
        echo written > made; cat ../new; test -e dangling || echo dangles; stat -Lc '%s %F' up d/e/up into above
        ls -d above/data/../beside .. | wc -l; ls into/ above/into
        mv into/f back && cat back; cp up copied && cat copied; ln up hard && echo linked; ln d/e/down hard && cat hard
        mv m above/m; cat ../m; rm above/m; ls ..| grep -v data; touch above/into/t; chmod 600 up; stat -Lc %a up
        exec 5< d/e; (cd /proc/self/fd/5/ && cat ../../up 2>&1 | sed 's,.*: ,,')
        find -L . -name beside -o -name t | sort; grep -rs beside . | sort
        echo done"#;
    // What each side finds in its surroundings: one word differs above the directory on the server.
    let prepare = |above: &Path, word: &str| {
        fs::create_dir_all(above.join("into")).unwrap();
        fs::create_dir(above.join("data")).unwrap();
        fs::write(above.join("beside"), format!("{word} beside\n")).unwrap();
        fs::write(above.join("into/f"), format!("{word} into\n")).unwrap();
    };
    let local = world.local("local");
    fs::create_dir(&local).unwrap();
    let side = |name: &str| world.local(&format!("side-{name}"));
    prepare(&side("l"), "here");
    let mounted = side("l").join("data");
    let mut command = Command::new("unshare");
    command
        .args(["-m", "sh", "-c", r#"mount --bind "$0" "$1" && cd "$1" && exec sh -c "$2""#])
        .args([local.as_os_str(), mounted.as_os_str(), script.as_ref()]);
    let (expected, code) = finished(&mut command, &world.local("expected"));
    assert_eq!(code, Some(0), "{expected}");
    assert!(expected.contains("here beside") && expected.ends_with("done\n"), "{expected}");
    prepare(&world.local("served/one/two"), "there");
    // The same above a directory of the memory export.
    let [from, to] = ["served/one", "all"].map(|name| world.local(name).display().to_string());
    let at = format!("{to}={}", world.url("mem"));
    support::good(&["run", "--at", &at, "--", "cp", "-r", &from, &to]);
    for (export, transport) in [("dir", "shm"), ("dir", "tcp"), ("mem", "shm")] {
        let name = format!("{export}{transport}");
        prepare(&side(&name), "here");
        if export == "dir" {
            let served = world.local("served/one/two/data");
            fs::remove_dir_all(&served).unwrap();
            fs::create_dir(served).unwrap();
        }
        let prefix = side(&name).join("data");
        let url = world.through(transport, &format!("{export}/one/two/data"));
        let mut command = Command::new(TOWLINE);
        command
            .args(["run", "--at", &format!("{}={url}", prefix.display()), "--", "sh", "-c"])
            .args(["cd \"$0\" && exec sh -c \"$1\"".as_ref(), prefix.as_os_str(), script.as_ref()]);
        let (got, code) = finished(&mut command, &world.local("got"));
        let alike = |text: &str| text.replace(&format!("side-{name}"), "side-l");
        assert_eq!(alike(&got), expected, "{export} over {transport}");
        assert_eq!(code, Some(0));
    }
    let there = fs::read_to_string(world.local("served/one/two/beside")).unwrap();
    assert_eq!(there, "there beside\n");
}

/// Cases that once differed: a working directory that was removed by way of a link; a name with a trailing
/// slash across a boundary; links in an open local directory that lead to remote files; directories known by
/// paths with links; errors in either name of two; `..` of a removed directory; a link made at a name with a
/// trailing slash; names relative to open links; reads and copies of nothing from directories; targets of
/// local links with a trailing slash that lead to remote files; an open directory that was renamed by a name
/// with a link in it; a file to be created through links that form a circle and end with a slash.
#[test]
fn random_programs_that_once_differed() {
    let seeds = [
        795_321_794,
        795_321_798,
        795_321_801,
        795_321_826,
        400_000_022,
        400_000_031,
        400_000_038,
        400_000_060,
        400_000_070,
        400_000_204,
        400_000_395,
        500_002_021,
        700_001_065,
        700_001_085,
        795_344_855,
        795_351_697,
        810_000_187,
    ];
    random(seeds.into_iter(), 1500, 46);
    random([860_000_233, 131_300_516].into_iter(), 1500, 56);
}

/// In the long tier the seeds are random, and `TOWLINE_LONG` gives their number in hundreds. The line before
/// a failure names the seed, and `TOWLINE_SEED` starts with it.
#[test]
fn random_programs_do_the_same() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().expect(name));
    let Some(length) = number("TOWLINE_LONG") else { return random(1..17, 250, KINDS) };
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let first = number("TOWLINE_SEED").unwrap_or(now.as_secs() % 1_000_000_000);
    random(first..first + 100 * length, 1500, KINDS);
}

/// File systems mounted in an export may use the same inode numbers. Neither programs of a run nor Towline's
/// commands may take two files for one.
#[test]
fn files_of_two_file_systems_in_one_export_are_two() {
    let world = World::new();
    if !can_mount(&world) {
        return;
    }
    let work = r#"
        echo one > a/f && echo two > b/f && echo root > f || exit 1
        test $(stat -c %i a/f) = $(stat -c %i b/f) || echo 'numbers differ'
        test a/f -ef b/f && echo 'one file'; test a/f -ef a/../a/f || echo 'two files'
        cmp -s a/f b/f && echo alike; find . -xdev -type f; find a/ -type f -samefile b/f
        ln a/f b/g 2> error || echo 'no link'; ln a/f a/g && stat -c %h a/g
        cp a/f b/h && cat b/h; mv a/f b/m && cat b/m a/g; tar -cf - a b f | tar -tvf - | grep -c ' link to '
        du -x --apparent-size b > du && cut -f2 du"#;
    let script = r#"cd "$1/served" && mkdir a b && mount -t tmpfs none a && mount -t tmpfs none b || exit 99
        echo == here; sh -c "$2" 2>&1
        umount a b && rm f du error && mount -t tmpfs none a && mount -t tmpfs none b || exit 99
        "$0" serve --dir "dir=$1/served" --listen "unix://$1/own" 2> "$1/log" & server=$!
        until test -S "$1/own"; do kill -0 $server || exit 98; sleep 0.05; done
        u=towline+unix:///dir s="?socket=$1/own"
        echo == run; "$0" run --at "/at=$u$s" -- sh -c "cd /at && $2" 2>&1
        echo == commands; cd "$1"; echo one > served/a/f; echo two > served/b/f
        "$0" ln -f "$u/a/f$s" "$u/b/f$s" 2>&1 | grep -c 'same file'; cat served/b/f
        "$0" cp "$u/a/f$s" "$u/b/f$s" && cat served/b/f
        "$0" cp -r "$u$s" copy && find copy -links +1 -type f | sort
        kill $server; wait $server"#;
    let path = world.path.to_str().unwrap();
    let output = Command::new("unshare")
        .args(["-m", "sh", "-c", script, TOWLINE, path, work])
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let part = |name: &str| {
        let (_, after) = text.split_once(&format!("== {name}\n")).expect(&text);
        after.split("== ").next().unwrap().to_owned()
    };
    let here = part("here");
    assert!(here.starts_with("./f\n") && here.contains("no link\n2\n"), "{text}");
    assert_eq!(part("run"), here);
    assert_eq!(part("commands"), "0\ntwo\none\n", "{text}");
}
