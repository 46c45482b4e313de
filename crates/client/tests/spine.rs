//! One server, real sockets: every operation of the protocol on each back end over each transport.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod common;

use common::{CREATE, eventually, has_whiteouts, pattern, remove, setup, skipped};
use std::sync::Arc;
use towline_client::{Client, Errno, File, Group, LinkKind, Options, Transport};
use towline_server::EngineWish;

fn each(test: impl Fn(&Client, &File)) {
    for engine in [EngineWish::Automatic, EngineWish::Epoll] {
        let setup = setup(engine);
        for transport in &setup.transports {
            for export in ["dir", "mem"] {
                eprintln!("{transport:?} {export}");
                let client = Client::connect(transport, Options::default()).unwrap();
                let root = client.attach(export.as_bytes()).unwrap();
                root.make_directory(b"t", 0o755).unwrap();
                test(&client, &root.open(b"t", 0, 0).unwrap());
                remove(&root, b"t");
            }
        }
    }
}

#[test]
fn bytes_of_all_sizes_come_back() {
    each(|_, top| {
        for (number, length) in [
            0,
            1,
            4096,
            16384,
            16385,
            70_000,
            1 << 18,
            (1 << 18) + 1,
            1 << 20,
            (1 << 20) + 1,
            9_000_000,
        ]
        .into_iter()
        .enumerate()
        {
            let name = format!("f{number}");
            let file = top.open(name.as_bytes(), CREATE, 0o644).unwrap();
            let data = pattern(length, number as u8);
            assert_eq!(file.write_at(&data, 0).unwrap(), length);
            let mut back = vec![0; length + 10];
            assert_eq!(file.read_at(&mut back, 0).unwrap(), length, "length {length}");
            assert!(back[..length] == data[..], "bytes of {length} differ");
            let mut part = vec![0; 5000];
            let from = length / 2;
            let got = file.read_at(&mut part, from as u64).unwrap();
            assert!(part[..got] == data[from..(from + 5000).min(length)]);
            assert_eq!(file.stat().unwrap().size, length as u64);
            file.close().unwrap();
        }
        top.write_path(b"w", CREATE, 0o600, &pattern(300_000, 9)).unwrap();
        let mut back = vec![0; 400_000];
        assert_eq!(top.read_path(b"w", 0, &mut back).unwrap(), 300_000);
        assert!(back[..300_000] == pattern(300_000, 9)[..]);
    });
}

#[test]
fn parts_are_written_in_their_order_within_the_file() {
    each(|_, top| {
        let file = top.open(b"parts", CREATE, 0o644).unwrap();
        file.write_at(&[b'.'; 20], 0).unwrap();
        file.write_parts(&[
            (15, b"fifteen"),
            (0, b"first"),
            (2, b"again"),
            (20, b"out"),
            (99, b""),
        ])
        .unwrap();
        let mut back = [0; 30];
        assert_eq!(file.read_at(&mut back, 0).unwrap(), 20, "the file has not grown");
        assert_eq!(back[..20], *b"fiagain........fifte");
        file.write_parts(&[]).unwrap();
        let (all, one) = ([b'x'; 16 * 1024], [b'y']);
        assert_eq!(file.write_parts(&[(0, &all), (0, &one)]).unwrap_err().errno(), Errno::EMSGSIZE);
        let many = vec![(3, &one[..]); 1025];
        assert_eq!(file.write_parts(&many).unwrap_err().errno(), Errno::EMSGSIZE);
        file.write_parts(&[(0, &all)]).unwrap();
        file.write_parts(&many[..1024]).unwrap();
        assert_eq!(file.read_at(&mut back, 0).unwrap(), 20);
        assert_eq!(back[..20], *b"xxxyxxxxxxxxxxxxxxxx");
        let reading = top.open(b"parts", 0, 0).unwrap();
        assert_eq!(reading.write_parts(&[(0, b"x")]).unwrap_err().errno(), Errno::EBADF);
        assert_eq!(top.write_parts(&[(0, b"x")]).unwrap_err().errno(), Errno::EBADF);
    });
}

#[test]
fn names_attributes_and_errors() {
    each(|client, top| {
        assert_eq!(client.exports().unwrap(), [b"dir".to_vec(), b"mem".to_vec(), b"ro".to_vec()]);
        assert_eq!(client.attach(b"none").err().unwrap().errno(), Errno::ENOENT);
        assert_eq!(top.stat_path(b"none", true).unwrap_err().errno(), Errno::ENOENT);
        top.write_path(b"a", CREATE, 0o640, b"hello").unwrap();
        let attr = top.stat_path(b"a", false).unwrap();
        assert_eq!((attr.size, attr.mode & 0o7777, attr.links), (5, 0o640, 1));
        top.link(b"a", false, top, b"b").unwrap();
        assert_eq!(top.stat_path(b"b", false).unwrap().links, 2);
        top.symlink(b"s", b"a").unwrap();
        assert_eq!(top.read_link(b"s").unwrap(), b"a");
        assert_eq!(top.stat_path(b"s", true).unwrap().inode, attr.inode);
        top.rename(b"a", top, b"c", 0).unwrap();
        assert_eq!(top.stat_path(b"s", true).unwrap_err().errno(), Errno::ENOENT);
        assert_eq!(top.rename(b"b", top, b"c", 1).unwrap_err().errno(), Errno::EEXIST);
        // RENAME_EXCHANGE with RENAME_WHITEOUT, and a flag that does not exist.
        assert_eq!(top.rename(b"b", top, b"c", 6).unwrap_err().errno(), Errno::EINVAL);
        assert_eq!(top.rename(b"b", top, b"w", 8).unwrap_err().errno(), Errno::EINVAL);
        assert_eq!(top.open(b"c", 0o200 | CREATE, 0).err().unwrap().errno(), Errno::EEXIST);
        assert_eq!(top.open(b"c/d", 0, 0).err().unwrap().errno(), Errno::ENOTDIR);
        assert_eq!(top.unlink(b"c", true).unwrap_err().errno(), Errno::ENOTDIR);
        assert_eq!(top.stat_path(&[b'x'; 256], true).unwrap_err().errno(), Errno::ENAMETOOLONG);
        assert_eq!(top.stat_path(b"../../../etc/passwd", true).unwrap_err().errno(), Errno::EXDEV);
        top.make_directory(b"d\xff", 0o700).unwrap();
        top.make_directory(b"d\xff/e", 0o700).unwrap();
        assert_eq!(top.unlink(b"d\xff", true).unwrap_err().errno(), Errno::ENOTEMPTY);
        for number in 0..2500 {
            top.write_path(format!("d\u{fffd}{number:05}").as_bytes(), CREATE, 0o600, b"x")
                .unwrap();
        }
        let names = top.list_all(true).unwrap();
        assert_eq!(names.len(), 2500 + 4);
        assert!(names.iter().all(|entry| entry.attr.is_some()));
        assert_eq!(top.read_at(&mut [0; 5], 0).unwrap_err().errno(), Errno::EISDIR);
        assert!(client.statistics().unwrap().contains("T_server"));
    });
}

#[test]
fn renames_leave_whiteouts_where_they_are_wanted() {
    if !has_whiteouts(&std::env::temp_dir()) {
        return skipped("whiteouts: the file system of the temporary directory has none");
    }
    each(|_, top| {
        top.write_path(b"a", CREATE, 0o640, b"hello").unwrap();
        top.make_directory(b"d", 0o755).unwrap();
        let before = [&b"a"[..], b"d"].map(|name| top.stat_path(name, false).unwrap().inode);
        assert_eq!(top.rename(b"a", top, b"d", 5).unwrap_err().errno(), Errno::EEXIST);
        top.rename(b"a", top, b"b", 4).unwrap();
        top.rename(b"d", top, b"e", 5).unwrap();
        for (name, inode) in [&b"b"[..], b"e"].into_iter().zip(before) {
            assert_eq!(top.stat_path(name, false).unwrap().inode, inode);
        }
        for name in [&b"a"[..], b"d"] {
            let attr = top.stat_path(name, false).unwrap();
            assert_eq!((attr.mode, attr.rdev, attr.links), (0o020_000, 0, 1));
            assert_eq!(top.open(name, 0, 0).err().unwrap().errno(), Errno::ENXIO);
        }
        top.rename(b"b", top, b"a", 0).unwrap();
        let mut back = [0; 9];
        assert_eq!(top.read_path(b"a", 0, &mut back).unwrap(), 5);
    });
}

#[test]
fn the_server_tells_where_the_time_goes() {
    let setup = setup(EngineWish::Automatic);
    let client = Client::connect(&setup.transports[0], Options::default()).unwrap();
    let top = client.attach(b"dir").unwrap();
    let file = top.open(b"long", 0o2 | CREATE, 0o600).unwrap();
    file.write_all_at(&pattern(1 << 20, 1), 0).unwrap();
    file.read_at(&mut vec![0; 1 << 20], 0).unwrap();
    for _ in 0..100 {
        top.stat().unwrap();
    }
    let told = || serde_json::from_str::<serde_json::Value>(&client.statistics().unwrap()).unwrap();
    let count = |stage: &str| told()["stages"][stage]["count"].as_u64().unwrap();
    eventually("it is recorded", || count("T_server") > 100);
    let longest = |stage: &str| told()["stages"][stage]["max_us"].as_f64().unwrap();
    for stage in ["T_server", "T_storage", "T_control"] {
        assert!(longest(stage) > 0.0, "{stage}: {}", told());
    }
    // One request in 16 is split.
    assert!((5..50).contains(&count("T_control")) && count("T_control") == count("T_storage"));
    // Of the write and of the read.
    assert!(count("T_data") >= 2 && longest("T_overlapped") > 0.0, "{}", told());
}

/// The server would take such requests for illegal and close the connection, and the client would send
/// them again and again.
#[test]
fn what_cannot_be_sent_is_refused_at_once() {
    each(|client, top| {
        top.write_path(b"f", CREATE, 0o600, b"x").unwrap();
        for (name, wanted) in [
            (&[b'n'; 256][..], Errno::ERANGE),
            (&[b'n'; 5000][..], Errno::ERANGE),
            (b"user.a\0b", Errno::EINVAL),
        ] {
            assert_eq!(top.xattr(b"f", true, name).unwrap_err().errno(), wanted);
            assert_eq!(top.set_xattr(b"f", true, name, b"v", 0).unwrap_err().errno(), wanted);
            assert_eq!(top.remove_xattr(b"f", true, name).unwrap_err().errno(), wanted);
        }
        for length in [65_537, 100_000] {
            let error = top.set_xattr(b"f", true, b"user.a", &vec![0; length], 0).unwrap_err();
            assert_eq!(error.errno(), Errno::E2BIG);
        }
        assert_eq!(top.symlink(b"s", b"a\0b").unwrap_err().errno(), Errno::EINVAL);
        assert_eq!(client.attach(b"mem/a\0b").err().unwrap().errno(), Errno::EINVAL);
        let long = [&b"mem"[..], &b"/d".repeat(3000)].concat();
        assert_eq!(client.attach(&long).err().unwrap().errno(), Errno::ENAMETOOLONG);
        assert_eq!(client.disk(&[b'n'; 100_000]).err().unwrap().errno(), Errno::ENOENT);
        assert_eq!(top.stat_path(b"f", true).unwrap().size, 1);
    });
}

#[test]
fn an_open_directory_knows_where_it_is() {
    each(|client, top| {
        top.make_directory(b"d", 0o755).unwrap();
        top.make_directory(b"d/e", 0o755).unwrap();
        top.symlink(b"s", b"d/e").unwrap();
        let open = top.open(b"s", 0, 0).unwrap();
        assert_eq!(top.path().unwrap(), b"t");
        assert_eq!(open.path().unwrap(), b"t/d/e");
        assert_eq!(top.path_to_enter(b"s/../../s").unwrap().unwrap(), b"t/d/e");
        top.rename(b"d", top, b"f", 0).unwrap();
        assert_eq!(open.path().unwrap(), b"t/f/e");
        assert_eq!(open.path_to_enter(b"..").unwrap().unwrap(), b"t/f");
        assert_eq!(top.path_to_enter(b"../..").unwrap_err().errno(), Errno::EXDEV);
        top.write_path(b"file", CREATE, 0o600, b"").unwrap();
        assert_eq!(top.path_to_enter(b"file").unwrap_err().errno(), Errno::ENOTDIR);
        match top.open(b"file", 0, 0).unwrap().path() {
            Ok(path) => assert_eq!(path, b"t/file"),
            // Memory exports know only the paths of directories.
            Err(error) => assert_eq!(error.errno(), Errno::ENOTDIR),
        }
        top.unlink(b"f/e", true).unwrap();
        assert_eq!(open.path().unwrap_err().errno(), Errno::ENOENT);
        assert_eq!(open.path_to_enter(b".").unwrap().unwrap_err().errno(), Errno::ENOENT);
        assert_eq!(open.path_to_enter(b"..").unwrap().unwrap(), b"t/f");
        for export in [b"dir", b"mem"] {
            assert_eq!(client.attach(export).unwrap().path().unwrap(), b".");
        }
    });
}

#[test]
fn many_threads_share_a_client_and_groups_complete_in_any_order() {
    each(|_, top| {
        std::thread::scope(|scope| {
            for thread in 0..8u8 {
                scope.spawn(move || {
                    for round in 0..30 {
                        let name = format!("t{thread}-{round}");
                        let data = pattern(1000 * usize::from(thread) * round, thread);
                        top.write_path(name.as_bytes(), CREATE, 0o600, &data).unwrap();
                        let mut back = vec![0; data.len() + 1];
                        assert_eq!(
                            top.read_path(name.as_bytes(), 0, &mut back).unwrap(),
                            data.len()
                        );
                        assert!(back[..data.len()] == data[..]);
                    }
                });
            }
        });
        let mut group = Group::new();
        for tag in 0..16 {
            group.add(
                top.start_read_path(format!("t{}-7", tag % 8).as_bytes(), 0, 100_000).unwrap(),
                tag,
            );
        }
        let mut seen = 0;
        while let Some((tag, bytes)) = group.wait_any() {
            assert_eq!(bytes.unwrap().len(), 7000 * (tag as usize % 8));
            seen += 1;
        }
        assert_eq!(seen, 16);
    });
}

#[test]
fn two_clients_see_each_other_and_append_without_loss() {
    let setup = setup(EngineWish::Automatic);
    let clients: Vec<Client> =
        setup.transports.iter().map(|t| Client::connect(t, Options::default()).unwrap()).collect();
    for export in ["dir", "mem"] {
        let roots: Vec<Arc<File>> =
            clients.iter().map(|c| Arc::new(c.attach(export.as_bytes()).unwrap())).collect();
        roots[0].write_path(b"shared", CREATE, 0o600, b"").unwrap();
        std::thread::scope(|scope| {
            for root in &roots {
                scope.spawn(move || {
                    let file = root.open(b"shared", 2, 0).unwrap();
                    for _ in 0..200 {
                        file.append(&[b'x'; 100]).unwrap();
                    }
                });
            }
        });
        assert_eq!(
            roots[1].stat_path(b"shared", true).unwrap().size,
            200 * 100 * roots.len() as u64
        );
        roots[2].write_path(b"shared", CREATE | 0o1000, 0o600, b"now").unwrap();
        let mut back = [0; 10];
        assert_eq!(roots[0].read_path(b"shared", 0, &mut back).unwrap(), 3);
    }
    setup.server.unwrap().stop();
}

#[test]
fn a_client_on_the_same_machine_moves_to_shared_memory() {
    let setup = setup(EngineWish::Automatic);
    let Transport::Tcp(host, port) = setup.transports[0].clone() else { panic!("no TCP") };
    let client = Client::connect(&Transport::Nearest(host, port), Options::default()).unwrap();
    assert_eq!(client.link_kind(), LinkKind::Shm);
    let top = client.attach(b"mem").unwrap();
    top.write_path(b"near", CREATE, 0o600, &pattern(300_000, 3)).unwrap();
    let mut back = vec![0; 300_000];
    assert_eq!(top.read_path(b"near", 0, &mut back).unwrap(), 300_000);
    assert!(back == pattern(300_000, 3));

    let client = setup.client();
    assert_eq!(client.link_kind(), LinkKind::Tcp, "where it was told to stay");
}

/// Nothing is lost or done twice when it moves while several threads make requests.
#[test]
fn a_client_moves_to_shared_memory_when_that_pays() {
    let setup = setup(EngineWish::Automatic);
    let Transport::Tcp(host, port) = setup.transports[0].clone() else { panic!("no TCP") };
    let mut far = Options::default();
    far.nearer_after = 40;
    let shared = setup.transports[2].clone();
    for (number, transport) in [Transport::Nearest(host, port), shared].iter().enumerate() {
        let client = Client::connect(transport, far.clone()).unwrap();
        let top = client.attach(b"mem").unwrap();
        let name = format!("log{number}");
        drop(top.open(name.as_bytes(), CREATE, 0o600).unwrap());
        for _ in 0..9 {
            top.stat_path(name.as_bytes(), true).unwrap();
        }
        assert_ne!(client.link_kind(), LinkKind::Shm, "not after a dozen requests");
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let file = top.open(name.as_bytes(), 2, 0).unwrap();
                    for _ in 0..50 {
                        file.append(b"line\n").unwrap();
                    }
                });
            }
        });
        let mut back = vec![0; 1000];
        let length = top.read_path(name.as_bytes(), 0, &mut back).unwrap();
        assert_eq!(length, 3 * 50 * 5);
        assert!(back[..length].chunks(5).all(|line| line == b"line\n"));
        // With nothing under way, it has moved by now.
        top.stat_path(name.as_bytes(), true).unwrap();
        assert_eq!(client.link_kind(), LinkKind::Shm);
    }
}

#[test]
fn more_clients_than_have_room_in_shared_memory_stay_on_their_socket() {
    let setup = setup(EngineWish::Automatic);
    let clients: Vec<Client> = (0..200)
        .map(|_| Client::connect(&setup.transports[2], Options::default()).unwrap())
        .collect();
    let near = clients.iter().filter(|c| c.link_kind() == LinkKind::Shm).count();
    assert!((1..200).contains(&near), "{near}");
    for client in &clients {
        client.attach(b"mem").unwrap().stat().unwrap();
    }
}

#[test]
fn operations_that_leave_together_all_come_back() {
    let setup = setup(EngineWish::Automatic);
    for transport in &setup.transports {
        let mut options = Options::default();
        options.coalesce = 8;
        let client = Client::connect(transport, options).unwrap();
        let top = client.attach(b"mem").unwrap();
        top.write_path(b"f", CREATE, 0o600, &pattern(200_000, 5)).unwrap();
        let file = top.open(b"f", 2, 0).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..3u64 {
                let file = &file;
                scope.spawn(move || {
                    let mut group = Group::new();
                    for round in 0..200 {
                        let at = (round * 997 + thread * 31) % 190_000;
                        group.add(file.start_read_at(vec![0; 5000], at).unwrap(), at);
                        if group.len() == 16 {
                            let (at, bytes) = group.wait_any().unwrap();
                            let whole = pattern(200_000, 5);
                            assert!(bytes.unwrap().1 == whole[at as usize..at as usize + 5000]);
                        }
                        // A request that a caller waits for leaves at once, and takes the others
                        // along.
                        if round % 50 == 0 {
                            assert_eq!(file.stat().unwrap().size, 200_000);
                        }
                    }
                    while let Some((_, bytes)) = group.wait_any() {
                        assert_eq!(bytes.unwrap().0, 5000);
                    }
                });
            }
        });
        file.close().unwrap();
        top.unlink(b"f", false).unwrap();
    }
}
