//! A directory on a file system that hangs. Other exports go on, though one core serves all; the server can
//! be stopped; and requests are answered when the file system goes on.

use crate::support::wait_until;
use crate::world::{
    CREATE, Ended, LONG, LOOKS, Mounted, Serving, WRITE, begin, connect, in_time, work_on,
};
use rustix::process::Signal;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use towline_client::Errno;

#[test]
fn those_who_do_not_use_a_file_system_that_hangs_go_on() {
    let directory = tempfile::tempdir().unwrap();
    let Some(mounted) = Mounted::new(directory.path()) else { return };
    let local = directory.path().join("local");
    fs::create_dir(&local).unwrap();
    fs::write(mounted.point.join("known"), vec![1; 100_000]).unwrap();
    let mut serving = Serving::new(1, "--dir", [("hangs", &mounted.point), ("local", &local)], &[]);
    assert!(serving.said.contains("\"hangs\" has files on fuse"), "{}", serving.said);
    assert!(!serving.said.contains("\"local\" has files"), "{}", serving.said);
    let port = serving.port;

    // Everything works while it does not hang.
    let writer = connect(port, false);
    let hangs = writer.attach(b"hangs").unwrap();
    let file = hangs.open(b"known", WRITE, 0).unwrap();
    let mut found = vec![0; 200_000];
    assert_eq!(file.read_at(&mut found, 0).unwrap(), 100_000);
    assert!(found[..100_000].iter().all(|byte| *byte == 1));
    assert_eq!(hangs.stat_path(b"missing", true).unwrap_err().errno(), Errno::ENOENT);
    // A session that will end while it has a file open there.
    let leaving = connect(port, false);
    let open = leaving.attach(b"hangs").unwrap().open(b"known", WRITE, 0).unwrap();
    open.write_at(b"left", 150_000).unwrap();

    mounted.hang();
    let looks: Vec<_> = (0..LOOKS)
        .map(|number| {
            begin(move || {
                let client = connect(port, number % 2 == 0);
                let root = client.attach(b"hangs").unwrap();
                root.stat_path(format!("never-{number}").as_bytes(), true).map_err(|e| e.errno())
            })
        })
        .collect();
    let data: Vec<u8> = (0..LONG).map(|at| (at / 1000) as u8).collect();
    let written = {
        let data = data.clone();
        begin(move || (file.write_at(&data, 0).map_err(|e| e.errno()), file))
    };
    let listed = begin(move || {
        let root = connect(port, false).attach(b"hangs").unwrap();
        root.list_all(true).unwrap().len()
    });
    let left = begin(move || drop((open, leaving)));

    for nearest in [false, true] {
        let other = begin(move || work_on(&connect(port, nearest), "other"));
        in_time(&other, "another session");
    }
    in_time(&left, "a session that ends");
    // The same session that has requests waiting there.
    let same = begin(move || {
        work_on(&writer, "same");
        writer
    });
    let writer = in_time(&same, "the same session");
    for look in &looks {
        assert!(look.try_recv().is_err(), "answered, though the file system hangs");
    }
    assert!(written.try_recv().is_err() && listed.try_recv().is_err());

    // Everything that waited is answered.
    mounted.go_on();
    for look in &looks {
        assert_eq!(in_time(look, "a look at a name").err(), Some(Errno::ENOENT));
    }
    let (count, file) = in_time(&written, "a write");
    assert_eq!(count.unwrap(), LONG);
    let read = begin(move || {
        let mut found = vec![0; LONG];
        assert_eq!(file.read_at(&mut found, 0).unwrap(), LONG);
        file.close().unwrap();
        found
    });
    assert!(in_time(&read, "a read") == data);
    assert!(in_time(&listed, "a list") >= 2);

    // The server can be stopped while requests hang.
    mounted.hang();
    let (connected, is_connected) = mpsc::channel();
    let stopped = begin(move || {
        let client = connect(port, false);
        connected.send(()).unwrap();
        client.attach(b"hangs").err().map(|e| e.errno())
    });
    in_time(&is_connected, "connecting");
    in_time(&begin(move || work_on(&writer, "last")), "others, once more");
    serving.process.signal(Signal::TERM);
    wait_until("the server has ended", || serving.process.0.try_wait().unwrap().is_some());
    assert!(serving.process.0.wait().unwrap().success());
    let refused = in_time(&stopped, "a request to a server that is gone");
    assert!(refused.is_some(), "answered by nobody");
}

#[test]
fn a_file_system_mounted_later_holds_up_nobody_else_either() {
    let directory = tempfile::tempdir().unwrap();
    let (tree, local) = (directory.path().join("tree"), directory.path().join("local"));
    fs::create_dir_all(&tree).unwrap();
    fs::create_dir(&local).unwrap();
    let serving = Serving::new(1, "--dir", [("tree", &tree), ("local", &local)], &[]);
    assert!(!serving.said.contains("has files on"), "{}", serving.said);
    let port = serving.port;
    // Opened before the mount, and still usable afterwards.
    let early = connect(port, false);
    let root = early.attach(b"tree").unwrap();
    let file = root.open(b"early", WRITE | CREATE, 0o600).unwrap();

    let Some(mounted) = Mounted::new(&tree) else { return };
    serving.says("\"tree\" has files on fuse");
    file.write_at(b"still here", 0).unwrap();
    fs::write(mounted.point.join("known"), b"known").unwrap();
    assert_eq!(root.stat_path(b"mounted/known", true).unwrap().size, 5);

    mounted.hang();
    let look = begin(move || {
        let root = connect(port, false).attach(b"tree").unwrap();
        root.stat_path(b"mounted/never", true).map_err(|e| e.errno())
    });
    for nearest in [false, true] {
        let other = begin(move || work_on(&connect(port, nearest), "other"));
        in_time(&other, "another session");
    }
    let same = begin(move || work_on(&early, "same"));
    in_time(&same, "a session from before");
    assert!(look.try_recv().is_err(), "answered, though the file system hangs");
    mounted.go_on();
    assert_eq!(in_time(&look, "a look at a name").err(), Some(Errno::ENOENT));
}

#[test]
fn a_start_that_waits_for_a_file_system_says_so() {
    let directory = tempfile::tempdir().unwrap();
    let Some(mounted) = Mounted::new(directory.path()) else { return };
    let local = directory.path().join("local");
    fs::create_dir(&local).unwrap();
    let image = mounted.point.join("disk");
    fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
    mounted.hang();
    let serve = |kind: &str, path: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_towline"));
        command.args(["serve", "--listen", "tcp://127.0.0.1:0", kind]);
        command.arg(format!("it={}", path.display()));
        let mut server = Ended(command.stderr(Stdio::piped()).spawn().unwrap());
        let mut says = BufReader::new(server.0.stderr.take().unwrap()).lines();
        let (sender, receiver) = mpsc::channel();
        std::thread::spawn(move || says.try_for_each(|line| sender.send(line.unwrap())));
        (server, receiver)
    };
    let servers = [
        ("export \"it\": directory", serve("--dir", &mounted.point.join("lost+found"))),
        ("disk \"it\"", serve("--disk", &image)),
    ];
    for (what, (_, says)) in &servers {
        let line = in_time(says, "a start without a word");
        assert!(line.contains(*what) && line.contains("waiting for its file system"), "{line}");
    }
    mounted.go_on();
    for (_, (_, says)) in &servers {
        while !in_time(says, "a start").contains("listening on") {}
    }
}
