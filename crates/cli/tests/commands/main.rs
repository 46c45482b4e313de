//! The commands other than `cp`, as users run them.
#![allow(clippy::unwrap_used)]

#[path = "../support/mod.rs"]
mod support;
mod told;

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, symlink};
use std::process::{Command, Stdio};
use support::{TOWLINE, World, bad, good, have, listening, noise, run, set_mode, text};

#[test]
fn listings() {
    let world = World::new();
    let served = world.local("served");
    fs::create_dir_all(served.join("b/c")).unwrap();
    fs::write(served.join("a"), b"12345").unwrap();
    fs::write(served.join(".hidden"), b"").unwrap();
    fs::write(served.join(std::ffi::OsStr::from_bytes(b"\xfe")), b"").unwrap();
    symlink("a", served.join("link")).unwrap();
    for transport in ["auto", "tcp", "unix", "shm"] {
        let url = |path: &str| world.through(transport, path);
        assert_eq!(text(&["ls", &url("")]), "dir\nmem\nro\nsmall\n");
        assert_eq!(good(&["ls", &url("dir")]), b"a\nb\nlink\n\xfe\n");
        assert_eq!(good(&["ls", "-a", &url("dir")]), b".hidden\na\nb\nlink\n\xfe\n");
        let long = good(&["ls", "-l", &url("dir")]);
        let long = String::from_utf8_lossy(&long);
        let lines: Vec<&str> = long.lines().collect();
        assert!(lines[0].starts_with("-rw") && lines[0].ends_with(" a"), "{long}");
        assert!(lines[1].starts_with("drwx") && lines[1].ends_with(" b"), "{long}");
        assert!(lines[2].starts_with("lrwx") && lines[2].ends_with(" link -> a"), "{long}");
        let tree = text(&["ls", "-R", &url("dir/b")]);
        assert_eq!(tree, format!("{}:\nc\n\n{}:\n", url("dir/b"), url("dir/b/c")));
        assert!(text(&["ls", "-ld", &url("dir/b")]).starts_with("drwx"));
        assert!(text(&["ls", "-l", &url("dir/a")]).starts_with("-rw"));
    }
    let mut names = Vec::new();
    for line in text(&["ls", "--json", &world.url("dir")]).lines() {
        let entry: serde_json::Value = serde_json::from_str(line).unwrap();
        assert!(entry["inode"].is_u64() && entry["url"].is_string(), "{line}");
        names.push((entry["name"].clone(), entry["name_hex"].clone()));
    }
    assert_eq!(names.len(), 4);
    assert_eq!(names[3].1, "fe");
    let complaint = bad(1, &["ls", &world.url("dir/none"), &world.url("dir/b")]);
    assert!(complaint.starts_with("towline: ls: towline://"), "{complaint}");
    assert!(complaint.ends_with("/dir/none: no such file or directory\n"), "{complaint}");
}

#[test]
fn links_that_lead_nowhere_are_listed_themselves() {
    let world = World::new();
    for target in ["/", "..", "../outside", "nowhere", "link"] {
        let link = world.local("served/link");
        symlink(target, &link).unwrap();
        let url = world.url("dir/link");
        assert_eq!(text(&["ls", &url]), format!("{url}\n"), "{target}");
        assert!(text(&["ls", "-l", &url]).ends_with(&format!(" {url} -> {target}\n")));
        // With a trailing slash, the target is meant, which cannot be listed.
        assert!(bad(1, &["ls", &format!("{url}/")]).contains(&url), "{target}");
        fs::remove_file(link).unwrap();
    }
}

#[test]
fn links_are_listed_themselves_in_long_form() {
    let world = World::new();
    for (export, target) in [("dir", "directory"), ("mem", "directory"), ("mem", "file")] {
        let at = |name: &str| world.url(&format!("{export}/{target}s/{name}"));
        good(&["mkdir", "-p", &at("directory/below")]);
        good(&["cp", "/dev/null", &at("file")]);
        good(&["ln", "-s", target, &at("link")]);
        let long = text(&["ls", "-l", &at("link")]);
        assert!(long.starts_with('l') && long.ends_with(&format!("/link -> {target}\n")), "{long}");
        if target == "directory" {
            assert_eq!(text(&["ls", &at("link")]), "below\n");
            let inside = text(&["ls", "-l", &at("link/")]);
            assert!(inside.starts_with('d') && inside.ends_with(" below\n"), "{inside}");
        }
    }
}

#[test]
fn a_large_directory_is_listed_whole_and_removed() {
    let world = World::new();
    let directory = world.local("served/many");
    fs::create_dir_all(directory.join("sub")).unwrap();
    // More entries than fit into one answer.
    for index in 0..9000 {
        fs::write(directory.join(format!("file-with-a-rather-long-name-{index:05}")), b"").unwrap();
    }
    fs::write(directory.join("sub/file"), b"").unwrap();
    let url = world.url("dir/many");
    for options in ["-l", "-lU", "-R", "-U"] {
        let lines =
            text(&["ls", options, &url]).lines().filter(|l| l.contains("long-name")).count();
        assert_eq!(lines, 9000, "{options}");
    }
    let sorted = text(&["ls", &url]);
    assert!(sorted.lines().is_sorted());
    assert!(bad(1, &["rm", &url]).contains("use -r"));
    good(&["rm", "-r", &url]);
    assert!(!directory.exists());
}

/// As for `rm`: a directory that may not be read can still be removed if it is empty.
#[test]
fn empty_directories_that_cannot_be_read_are_removed() {
    let is_root = rustix::process::geteuid().is_root();
    if is_root && !have("setpriv") {
        return;
    }
    let world = World::new();
    let (served, folder) = (world.local("served"), world.local("folder"));
    for directory in ["empty", "tree/empty", "full/inside", "mixed/8/closed/inside"] {
        fs::create_dir_all(served.join(directory)).unwrap();
    }
    let mut open = vec![served.join("tree"), served.join("mixed"), served.clone(), folder.clone()];
    for index in 0..40 {
        let inside = served.join(format!("mixed/{index}"));
        fs::create_dir_all(inside.join("below")).unwrap();
        fs::write(inside.join("below/file"), "").unwrap();
        open.extend([inside.join("below"), inside]);
    }
    fs::create_dir(&folder).unwrap();
    let closed = ["empty", "tree/empty", "full", "mixed/8/closed"].map(|name| served.join(name));
    for directory in closed.iter().chain(&open) {
        set_mode(directory, if closed.contains(directory) { 0 } else { 0o755 });
        if is_root {
            std::os::unix::fs::chown(directory, Some(65534), Some(65534)).unwrap();
        }
    }
    // A server that is not root may not read them.
    let socket = folder.join("socket").display().to_string();
    let user = ["--reuid=65534", "--regid=65534", "--clear-groups"];
    let mut server = Command::new(if is_root { "setpriv" } else { "env" })
        .args(if is_root { &user[..] } else { &[] })
        .args([TOWLINE, "serve", "--dir", &format!("dir={}", served.display())])
        .args(["--listen", &format!("unix://{socket}")])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut told = BufReader::new(server.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(told.any(|line| line.contains("unix://")));
    let remove = |name| run(&["rm", "-r", &format!("towline+unix:///dir/{name}?socket={socket}")]);
    let [empty, tree, full, mixed] = ["empty", "tree", "full", "mixed"].map(remove);
    server.kill().unwrap();
    server.wait().unwrap();
    closed.iter().filter(|path| path.exists()).for_each(|path| set_mode(path, 0o755));
    assert!(empty.status.success() && tree.status.success(), "{empty:?} {tree:?}");
    assert!(!served.join("empty").exists() && !served.join("tree").exists());
    let complaint = String::from_utf8_lossy(&full.stderr);
    assert!(complaint.contains("permission denied"), "{full:?}");
    assert!(served.join("full").exists());
    // Of what cannot be removed, only itself and the directories above it stay.
    let complaint = String::from_utf8_lossy(&mixed.stderr);
    assert!(complaint.contains("mixed/8/closed?"), "{complaint}");
    assert_eq!((mixed.status.code(), complaint.lines().count()), (Some(1), 1), "{complaint}");
    let names = |path: &str| {
        let entries = fs::read_dir(served.join(path)).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(names("mixed"), ["8"]);
    assert_eq!(names("mixed/8"), ["closed"]);
    assert_eq!(names("mixed/8/closed"), ["inside"]);
}

#[test]
fn removal_does_not_follow_links() {
    let world = World::new();
    let served = world.local("served");
    fs::create_dir_all(served.join("keep")).unwrap();
    fs::write(served.join("keep/file"), b"").unwrap();
    fs::create_dir(served.join("tree")).unwrap();
    symlink("../keep", served.join("tree/link")).unwrap();
    good(&["rm", "-r", &world.url("dir/tree")]);
    assert!(served.join("keep/file").exists() && !served.join("tree").exists());
    bad(1, &["rm", &world.url("dir/none")]);
    good(&["rm", "-f", &world.url("dir/none")]);
    let complaint = bad(1, &["rm", "-rf", &world.url("nosuchexport/tree")]);
    assert!(complaint.contains("no export \"nosuchexport\""), "{complaint}");
    bad(1, &["rm", &world.url("dir/keep/file/below")]);
    good(&["rm", "-f", &world.url("dir/keep/file/below")]);
    good(&["rm", "-rf", &world.url("dir/keep/file/below")]);
    assert!(bad(1, &["rm", "-rf", &world.url("dir")]).contains("not removed"));
    assert!(bad(1, &["rm", "-r", &world.url("ro/keep")]).contains("read-only"));
    bad(1, &["rm", "-rf", &world.url("dir/keep/..")]);
    assert!(served.join("keep/file").exists());
}

#[test]
fn deep_trees_are_copied_listed_and_removed() {
    let world = World::new();
    let name = "d".repeat(200);
    let top = world.local("deep");
    // Paths of 3 KiB: two of them do not fit into one request.
    fs::create_dir_all(top.join([name.as_str(); 15].join("/"))).unwrap();
    fs::write(top.join([name.as_str(); 15].join("/")).join("leaf"), b"leaf").unwrap();
    for export in ["dir", "mem"] {
        let url = world.url(&format!("{export}/deep"));
        good(&["cp", "-r", top.to_str().unwrap(), &url]);
        assert_eq!(text(&["ls", "-R", &url]).lines().filter(|line| *line == "leaf").count(), 1);
        assert!(text(&["sum", "-r", &url]).ends_with("/leaf\n"));
        good(&["rm", "-r", &url]);
        assert!(bad(1, &["ls", &url]).contains("no such file"));
    }
}

#[test]
fn names_are_made_moved_and_linked() {
    let world = World::new();
    let url = |path: &str| world.url(&format!("mem/{path}"));
    good(&["mkdir", "-p", &url("a/b/c"), &url("a/b")]);
    assert!(bad(1, &["mkdir", &url("a")]).contains("file exists"));
    bad(1, &["mkdir", &url("x/y")]);
    good(&["mkdir", "-m", "1700", &url("mode")]);
    assert!(text(&["ls", "-ld", &url("mode")]).starts_with("drwx-----T"));
    good(&["mkdir", "-p", "-m", "2755", &url("set/group")]);
    assert!(text(&["ls", "-ld", &url("set")]).starts_with("drwxr-xr-x"));
    assert!(text(&["ls", "-ld", &url("set/group")]).starts_with("drwxr-sr-x"));
    bad(2, &["mkdir", "-m", "9", &url("mode2")]);
    let local = world.local("file");
    fs::write(&local, b"contents").unwrap();
    good(&["cp", local.to_str().unwrap(), &url("file")]);
    good(&["mv", &url("file"), &url("a/b")]);
    good(&["mv", &url("a/b/file"), &url("moved")]);
    assert_eq!(text(&["cat", &url("moved")]), "contents");
    good(&["ln", &url("moved"), &url("hard")]);
    assert!(bad(1, &["ln", &url("moved"), &url("hard")]).contains("file exists"));
    // It is a link already.
    good(&["ln", "-f", &url("moved"), &url("hard")]);
    assert_eq!(text(&["cat", &url("moved"), &url("hard")]), "contentscontents");
    assert!(bad(1, &["ln", "-f", &url("hard"), &url("hard")]).contains("same file"));
    for again in ["moved", "hard"] {
        assert!(bad(1, &["mv", &url("moved"), &url(again)]).contains("same file"), "{again}");
        assert_eq!(text(&["cat", &url("moved"), &url("hard")]), "contentscontents");
    }
    // A target that cannot be linked to replaces nothing.
    let dir = |path: &str| world.url(&format!("dir/{path}"));
    for url in [&url as &dyn Fn(&str) -> String, &dir] {
        good(&["mkdir", "-p", &url("a/b")]);
        good(&["cp", local.to_str().unwrap(), &url("stays")]);
        bad(1, &["ln", "-f", &url("a"), &url("stays")]);
        assert_eq!(text(&["cat", &url("stays")]), "contents");
        good(&["rm", &url("stays")]);
    }
    good(&["ln", "-s", "moved", &url("soft")]);
    good(&["mkdir", "-p", &url("one"), &url("two"), &url("both")]);
    for directory in ["one", "two"] {
        good(&["cp", local.to_str().unwrap(), &url(&format!("{directory}/same"))]);
    }
    let complaint = bad(1, &["mv", &url("one/same"), &url("two/same"), &url("both")]);
    assert!(complaint.contains("two/same: not moved"), "{complaint}");
    assert_eq!(text(&["cat", &url("two/same"), &url("both/same")]), "contentscontents");
    // Only the link to the file would remain.
    assert!(bad(1, &["mv", &url("soft"), &url("moved")]).contains("would be lost"));
    assert_eq!(text(&["cat", &url("moved")]), "contents");
    good(&["ln", "-sf", "hard", &url("soft")]);
    assert_eq!(text(&["cat", &url("soft")]), "contents");
    assert!(text(&["stat", &url("soft")]).contains("-> hard"));
    assert!(text(&["stat", "-L", &url("soft")]).contains("Links: 2"));
    bad(1, &["mv", "-n", &url("moved"), &url("soft")]);
    // Links that form a circle or lead out of the export are replaced like others.
    for text in ["circle", "/etc"] {
        good(&["ln", "-s", text, &url("circle")]);
        good(&["ln", "-sf", "moved", &url("circle")]);
        assert!(self::text(&["stat", &url("circle")]).contains("-> moved"), "{text}");
        good(&["rm", &url("circle")]);
    }
    assert!(bad(1, &["mv", &url("moved"), &world.url("dir/x")]).contains("cross-device"));
    bad(1, &["ln", "-s", &url("moved"), &url("wrong")]);
}

#[test]
fn holes_are_summed_without_being_read() {
    let world = World::new();
    let path = world.local("served/sparse");
    let file = fs::File::create(&path).unwrap();
    // Reading it all at 10 GB/s would take two minutes.
    file.set_len(1 << 40).unwrap();
    file.write_all_at(&noise(100_000, 4), 3 << 38).unwrap();
    let sum_of = |name: &str| text(&["sum", name]).split_once(' ').unwrap().0.to_owned();
    let whole = sum_of(path.to_str().unwrap());
    assert_eq!(sum_of(&world.url("dir/sparse")), whole);
    good(&["cp", path.to_str().unwrap(), &world.url("mem/sparse")]);
    assert_eq!(sum_of(&world.url("mem/sparse")), whole);
    // One more byte at the end, or one less, changes the sum.
    file.write_all_at(b"!", (1 << 40) - 1).unwrap();
    assert_ne!(sum_of(&world.url("dir/sparse")), whole);
    file.set_len((1 << 40) - 1).unwrap();
    assert_ne!(sum_of(&world.url("dir/sparse")), whole);
}

#[test]
fn contents_and_their_sums() {
    let world = World::new();
    let data = noise(9 << 20, 3);
    fs::write(world.local("served/large"), &data).unwrap();
    fs::write(world.local("served/small"), b"123456789").unwrap();
    for transport in ["auto", "tcp", "unix", "shm"] {
        assert!(good(&["cat", &world.through(transport, "dir/large")]) == data, "{transport}");
        let url = world.through(transport, "dir/small");
        assert_eq!(text(&["sum", &url]), format!("e3069283            9  {url}\n"));
    }
    let local = world.local("served");
    assert_eq!(
        text(&["sum", "-r", local.to_str().unwrap()]),
        text(&["sum", "-r", &world.url("dir")])
    );
    bad(1, &["sum", &world.url("dir")]);
    bad(1, &["cat", &world.url("dir")]);
}

#[test]
fn a_reader_that_goes_away_ends_the_program_quietly() {
    let world = World::new();
    fs::write(world.local("served/large"), noise(20 << 20, 3)).unwrap();
    let large = world.url("dir/large");
    for arguments in [&["cat", &large][..], &["cp", &large, "/dev/stdout"]] {
        let mut command = Command::new(TOWLINE)
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut first = [0; 10];
        command.stdout.take().unwrap().read_exact(&mut first).unwrap();
        let output = command.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(141), "{arguments:?}: as a shell reports SIGPIPE");
        assert!(output.stderr.is_empty(), "{arguments:?}");
    }
}

#[test]
fn servers_are_described() {
    let world = World::new();
    let space = text(&["df", &world.url("")]);
    assert_eq!(space.lines().count(), 5, "{space}");
    assert!(text(&["df", "-h", &world.url("mem")]).contains("256M"));
    let complaint = bad(1, &["df", &world.url("mem/none")]);
    assert!(complaint.ends_with("/mem/none: no such file or directory\n"), "{complaint}");
    let stats = text(&["stats", &world.url("")]);
    assert!(stats.contains("engine") && stats.contains("T_server"), "{stats}");
    let json: serde_json::Value =
        serde_json::from_str(&text(&["stats", "--json", &world.url("")])).unwrap();
    assert!(json.is_object());
}

#[test]
fn doctor_examines_every_feature() {
    let found: serde_json::Value = serde_json::from_str(&text(&["doctor", "--json"])).unwrap();
    let told = text(&["doctor"]);
    let lines: Vec<&str> = told.lines().collect();
    let names = [
        "kernel",
        "cpus",
        "io_uring",
        "shm",
        "SEND_ZC",
        "memlock",
        "huge pages",
        "userfaultfd",
        "trap",
        "FUSE",
        "RDMA",
    ];
    assert_eq!((lines.len(), found.as_object().unwrap().len()), (2 * names.len(), names.len()));
    for (name, lines) in names.iter().zip(lines.chunks(2)) {
        let finding = &found[name];
        let mark = if finding["ok"].as_bool().unwrap() { "ok" } else { "--" };
        let [what, path] = ["found", "path"].map(|key| finding[key].as_str().unwrap());
        assert!(!what.is_empty() && !path.is_empty(), "{finding}");
        assert!(lines[0].starts_with(&format!("{mark} {name} ")), "{told}");
        assert!(lines[0].ends_with(&format!(" {what}")), "{told}");
        assert_eq!(lines[1].trim_start(), format!("-> {path}"), "{told}");
    }
    let fuse = fs::File::options().read(true).write(true).open("/dev/fuse");
    assert_eq!(found["FUSE"]["ok"], fuse.is_ok());
    let devices = fs::read_dir("/sys/class/infiniband").map_or(0, Iterator::count);
    assert_eq!(found["RDMA"]["ok"], devices > 0);
    let reserved = fs::read_to_string("/proc/sys/vm/nr_hugepages").unwrap_or("0".to_owned());
    let reserved = format!("; {} reserved", reserved.trim());
    assert!(found["huge pages"]["found"].as_str().unwrap().ends_with(&reserved), "{told}");
}

/// Returns total, used and free as `df` prints them for one export, below this header.
fn amounts(arguments: &[&str], header: &str) -> [u64; 3] {
    let table = text(&[&["df"], arguments].concat());
    let rows: Vec<Vec<&str>> =
        table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows.len(), 2, "{table}");
    assert_eq!(rows[0].join(" "), header);
    assert_eq!(rows[1].last(), arguments.last(), "{table}");
    [0, 1, 2].map(|column| rows[1][column].parse().unwrap())
}

#[test]
fn space_and_files_are_counted() {
    let world = World::new();
    let (mem, dir) = (world.url("mem"), world.url("dir"));
    let space = || amounts(&[&mem], "1K-blocks Used Available Use% Export");
    let files = |url: &str| amounts(&["-i", url], "Inodes IUsed IFree IUse% Export");
    let ([blocks, blocks_used, blocks_free], [all, used, free]) = (space(), files(&mem));
    assert_eq!((blocks, blocks_used + blocks_free), (256 << 10, blocks));
    assert!(used > 0 && free > 1000 && all == used + free, "{all}, {used}, {free}");
    let names = ["a", "b", "c"].map(|name| format!("{mem}/{name}"));
    good(&["mkdir", &names[0], &names[1], &names[2]]);
    let [all, more, less] = files(&mem);
    assert!(more == used + 3 && less <= free - 3 && all == more + less, "{all}, {more}, {less}");
    // Some file systems have as many as there is space for.
    let of_system = || rustix::fs::statvfs(world.local("served")).unwrap().f_files;
    let (before, [all, used, free], after) = (of_system(), files(&dir), of_system());
    assert!((before.min(after)..=before.max(after)).contains(&all), "{before}, {all}, {after}");
    assert_eq!(used + free, all);
}

#[test]
fn the_space_is_that_of_the_file_system_below_the_root() {
    let world = World::new();
    let socket = world.local("another");
    let address = format!("unix://{}", socket.display());
    let mut server = Command::new(TOWLINE)
        .args(["serve", "--dir", "all=/:ro", "--listen", "tcp://127.0.0.1:0", "--listen", &address])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    listening(&mut server, drop);
    let space = |path: &str| {
        let url = format!("towline+unix:///all{path}?socket={}", socket.display());
        let line = text(&["df", "--json", &url]);
        let found: serde_json::Value = serde_json::from_str(&line).unwrap();
        found["blocks"].as_u64().unwrap()
    };
    let (root, below) = (space(""), space("/proc"));
    server.kill().unwrap();
    server.wait().unwrap();
    assert!(root > 0 && below == 0, "{root}, {below}");
}

#[test]
fn the_tour_goes_to_its_end() {
    let world = World::new();
    fs::create_dir(world.local("tour")).unwrap();
    fs::write(world.local("tour/file"), noise(2 << 20, 3)).unwrap();
    let directory = world.local("tour").display().to_string();
    // Without a directory it makes one of its own.
    for (arguments, names) in
        [(&["demo", &directory][..], "(1 names, "), (&["demo"], "(21 names, ")]
    {
        let told = text(arguments);
        for part in ["first answer", names, "the same names", "equal", "stat, different", "shm"] {
            assert!(told.contains(part), "{part} is missing in {told}");
        }
        let served = told.split_once("process: ").unwrap().1.split_once(" as export").unwrap().0;
        assert_eq!(fs::exists(served).unwrap(), served == directory, "{served}");
    }
}

#[test]
fn a_tour_that_is_interrupted_leaves_nothing_behind() {
    for signal in [Some(rustix::process::Signal::INT), None] {
        let mut tour = Command::new(TOWLINE).arg("demo").stdout(Stdio::piped()).spawn().unwrap();
        let mut told = std::io::BufReader::new(tour.stdout.take().unwrap());
        let mut line = String::new();
        told.read_line(&mut line).unwrap();
        let place = line.split_once("process: ").unwrap().1.split_once("/tree ").unwrap().0;
        assert!(fs::exists(place).unwrap(), "{line}");
        // Its reader goes away; without a signal, that ends it.
        drop(told);
        if let Some(signal) = signal {
            let pid = rustix::process::Pid::from_child(&tour);
            rustix::process::kill_process(pid, signal).unwrap();
        }
        let status = tour.wait().unwrap();
        assert!(!status.success(), "{status}");
        assert!(!fs::exists(place).unwrap(), "{place} is left: {status}");
    }
}

/// Sums are held up by a full pipe, so that a directory that is listed but not yet entered can be replaced meanwhile.
#[test]
fn a_directory_that_becomes_a_link_is_not_followed() {
    let world = World::new();
    fs::create_dir(world.local("secret")).unwrap();
    fs::write(world.local("secret/file"), "elsewhere").unwrap();
    fs::create_dir(world.local("served/secret")).unwrap();
    fs::write(world.local("served/secret/file"), "elsewhere").unwrap();
    for (tree, named) in [
        (world.local("tree"), world.local("tree").display().to_string()),
        (world.local("served/tree"), world.url("dir/tree")),
    ] {
        fs::create_dir_all(tree.join("z/below")).unwrap();
        for count in 0..200 {
            fs::write(tree.join(format!("{count:0100}")), "").unwrap();
        }
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        rustix::pipe::fcntl_setpipe_size(&write, 4096).unwrap();
        let child = Command::new(TOWLINE)
            .args(["sum", "-r", &named])
            .stdout(write)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::with_capacity(128, fs::File::from(read));
        let mut printed = String::new();
        lines.read_line(&mut printed).unwrap();
        fs::rename(tree.join("z"), tree.join("moved")).unwrap();
        symlink("../secret", tree.join("z")).unwrap();
        lines.read_to_string(&mut printed).unwrap();
        let output = child.wait_with_output().unwrap();
        let complaint = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{named}: {complaint}");
        assert!(complaint.contains("/z: not a directory; it was replaced"), "{complaint}");
        assert_eq!(printed.lines().count(), 200, "{printed}");
    }
    // What is named with a slash after it is the directory that the link leads to.
    for named in [world.local("tree/z/").display().to_string(), world.url("dir/tree/z/")] {
        let copy = world.local("copy");
        let target = match named.contains("://") {
            true => copy.display().to_string(),
            false => world.url("mem/copy"),
        };
        good(&["cp", "-r", &named, &target]);
        assert!(text(&["sum", "-r", &target]).ends_with("  file\n"), "{named}");
    }
}
