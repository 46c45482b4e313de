//! Servers and clients that are killed (`SIGKILL`) during their work, and servers without free descriptors or
//! memory that they may lock. Answered writes survive.
#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

use rustix::net::{AddressFamily, SocketType, sockopt};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::SocketAddrV4;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

const TOWLINE: &str = env!("CARGO_BIN_EXE_towline");
const MIB: u64 = 1 << 20;
const SIZE: u64 = 16 * MIB;
const BLOCK: u64 = 16 * 1024;
/// Each writer has its own blocks.
const WRITERS: u64 = 3;

/// A server of one disk on a Unix socket.
struct Server(Child);

impl Server {
    fn start(disk: &str, socket: &Path, before: &[&str]) -> Self {
        // Left by the server that was killed.
        let _ = std::fs::remove_file(socket);
        Self::start_at(disk, &format!("unix://{}", socket.display()), before).0
    }

    /// Also returns the line that says where it listens.
    fn start_at(disk: &str, nbd: &str, before: &[&str]) -> (Self, String) {
        let words = [before, &[TOWLINE, "serve", "--disk", disk, "--nbd", nbd]].concat();
        let mut child =
            Command::new(words[0]).args(&words[1..]).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut lines_on = lines.by_ref().map(Result::unwrap);
        let listens = lines_on.find(|line| line.contains("listening for NBD"));
        let listens = listens.expect("the server did not start");
        std::thread::spawn(move || lines.for_each(|line| eprintln!("{}", line.unwrap())));
        (Self(child), listens)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have been killed already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A client with simple replies.
struct Client(UnixStream);

impl Client {
    fn connect(socket: &Path) -> std::io::Result<Self> {
        Self::over(UnixStream::connect(socket)?)
    }

    fn over(stream: UnixStream) -> std::io::Result<Self> {
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        let mut this = Self(stream);
        this.take(18)?;
        // Fixed newstyle, then EXPORT_NAME with the empty name.
        this.0.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\0")?;
        this.take(10)?;
        Ok(this)
    }

    fn take(&mut self, count: usize) -> std::io::Result<Vec<u8>> {
        let mut bytes = vec![0; count];
        self.0.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn ask(&mut self, kind: u8, offset: u64, length: u64, data: &[u8]) -> std::io::Result<()> {
        self.send(kind, offset, length, data)?;
        self.answer()
    }

    fn send(&mut self, kind: u8, offset: u64, length: u64, data: &[u8]) -> std::io::Result<()> {
        let mut bytes = vec![0x25, 0x60, 0x95, 0x13, 0, 0, 0, kind];
        bytes.extend_from_slice(&7u64.to_be_bytes());
        bytes.extend_from_slice(&offset.to_be_bytes());
        bytes.extend_from_slice(&(length as u32).to_be_bytes());
        bytes.extend_from_slice(data);
        self.0.write_all(&bytes)
    }

    fn answer(&mut self) -> std::io::Result<()> {
        let reply = self.take(16)?;
        assert_eq!(reply[4..8], [0; 4], "no request fails");
        Ok(())
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> std::io::Result<()> {
        self.ask(1, offset, data.len() as u64, data)
    }

    fn read(&mut self, offset: u64, length: u64) -> std::io::Result<Vec<u8>> {
        self.ask(0, offset, length, &[])?;
        self.take(length as usize)
    }
}

/// What round `round` writes to a block.
fn contents(block: u64, round: u64) -> Vec<u8> {
    (block << 32 | round).to_le_bytes().repeat(BLOCK as usize / 8)
}

/// Writes its blocks again and again until the connection breaks. Returns the last answered round of each
/// block, and the block and round of the unanswered write.
fn write_until_killed(
    socket: &Path,
    writer: u64,
    from: u64,
    begun: &Sender<()>,
) -> (Vec<u64>, Option<(u64, u64)>) {
    let blocks = SIZE / BLOCK / WRITERS;
    let mut answered = vec![0; blocks as usize];
    let mut client = Client::connect(socket).unwrap();
    for count in 0.. {
        let (number, round) = (count * 7 % blocks, from + count / blocks + 1);
        let block = writer * blocks + number;
        if client.write(block * BLOCK, &contents(block, round)).is_err() {
            return (answered, Some((number, round)));
        }
        answered[number as usize] = round;
        if count == 0 {
            begun.send(()).unwrap();
        }
    }
    (answered, None)
}

/// Returns the disks to test: all whose contents survive a server.
fn disks(directory: &Path) -> Vec<String> {
    let file = |name: &str, size: u64| -> PathBuf {
        let path = directory.join(name);
        std::fs::File::create(&path).unwrap().set_len(size).unwrap();
        path
    };
    let shown = |path: PathBuf| path.to_str().unwrap().to_owned();
    let members = [file("one", SIZE / 2), file("two", SIZE / 2)].map(shown);
    vec![
        format!("d={}:cached", shown(file("cached", SIZE))),
        format!("d={}:direct", shown(file("direct", SIZE))),
        format!("d={}:read-direct", shown(file("read-direct", SIZE))),
        format!("d=stripe:64K:{}", members.join(",")),
    ]
}

#[test]
fn what_was_answered_survives_the_death_of_the_server() {
    // Not in memory: files there may not support O_DIRECT.
    let directory = tempfile::TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let socket = directory.path().join("socket");
    let rounds = if std::env::var_os("TOWLINE_LONG").is_some() { 30 } else { 2 };
    for disk in disks(directory.path()) {
        let mut known: Vec<Vec<u64>> = vec![vec![0; (SIZE / BLOCK / WRITERS) as usize]; 3];
        for round in 0..rounds {
            let mut server = Server::start(&disk, &socket, &[]);
            let from = (round + 1) << 16;
            // Kill the server only after each writer has written something, however slow the machine is.
            let (begun, has_begun) = channel();
            let outcomes: Vec<_> = std::thread::scope(|scope| {
                let writers: Vec<_> = (0..WRITERS)
                    .map(|writer| {
                        scope.spawn({
                            let (socket, begun) = (&socket, begun.clone());
                            move || write_until_killed(socket, writer, from, &begun)
                        })
                    })
                    .collect();
                for _ in 0..WRITERS {
                    has_begun.recv_timeout(Duration::from_secs(60)).expect("nothing is written");
                }
                std::thread::sleep(Duration::from_millis(300 + 37 * round));
                server.0.kill().unwrap();
                writers.into_iter().map(|writer| writer.join().unwrap()).collect()
            });
            server.0.wait().unwrap();
            let _server = Server::start(&disk, &socket, &[]);
            let mut client = Client::connect(&socket).unwrap();
            for (writer, (answered, pending)) in outcomes.into_iter().enumerate() {
                assert!(answered.iter().any(|round| *round > 0), "{disk}: it wrote something");
                for (number, last) in answered.into_iter().enumerate() {
                    let block = writer as u64 * (SIZE / BLOCK / WRITERS) + number as u64;
                    let last = last.max(known[writer][number]);
                    let found = client.read(block * BLOCK, BLOCK).unwrap();
                    let before =
                        if last == 0 { vec![0; BLOCK as usize] } else { contents(block, last) };
                    let torn = pending.filter(|(at, _)| *at == number as u64);
                    match torn {
                        None => assert!(
                            found == before,
                            "{disk}: block {block} is not what was answered"
                        ),
                        // In the block of the unanswered write, each byte is old or new.
                        Some((_, round)) => {
                            let after = contents(block, round);
                            let right =
                                |at: usize| found[at] == before[at] || found[at] == after[at];
                            assert!((0..found.len()).all(right), "{disk}: block {block}");
                            client.write(block * BLOCK, &before).unwrap();
                        }
                    }
                    known[writer][number] = last;
                }
            }
        }
    }
}

/// The body of a client in its own process, which is killed.
#[test]
#[ignore = "started by the test below as a process of its own"]
fn a_client_to_be_killed() {
    let socket = PathBuf::from(std::env::var_os("TOWLINE_TEST_SOCKET").unwrap());
    println!("READY");
    let (begun, _has_begun) = channel();
    write_until_killed(&socket, 0, 0, &begun);
}

#[test]
fn clients_are_killed_under_load() {
    let directory = tempfile::TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let socket = directory.path().join("socket");
    let times = if std::env::var_os("TOWLINE_LONG").is_some() { 100 } else { 4 };
    for disk in disks(directory.path()) {
        let _server = Server::start(&disk, &socket, &[]);
        let blocks = SIZE / BLOCK / WRITERS;
        // The blocks of another client, which writes them all the time.
        let mut client = Client::connect(&socket).unwrap();
        for round in 1..=times {
            let mut victims: Vec<Child> = (0..2)
                .map(|_| {
                    Command::new(std::env::current_exe().unwrap())
                        .args(["--ignored", "--exact", "a_client_to_be_killed", "--nocapture"])
                        .env("TOWLINE_TEST_SOCKET", &socket)
                        .stdout(Stdio::piped())
                        .spawn()
                        .unwrap()
                })
                .collect();
            for victim in &mut victims {
                let mut lines = BufReader::new(victim.stdout.take().unwrap()).lines();
                assert!(lines.any(|line| line.unwrap().contains("READY")));
            }
            for number in 0..40 {
                let block = blocks + (round * 40 + number) % blocks;
                client.write(block * BLOCK, &contents(block, round)).unwrap();
            }
            for victim in &mut victims {
                victim.kill().unwrap();
                victim.wait().unwrap();
            }
            for number in 0..40 {
                let block = blocks + (round * 40 + number) % blocks;
                let found = client.read(block * BLOCK, BLOCK).unwrap();
                assert!(found == contents(block, round), "{disk}: block {block} in round {round}");
            }
        }
        // Each block of the killed clients consists of words that they sent, or zeros.
        for block in 0..blocks {
            let found = client.read(block * BLOCK, BLOCK).unwrap();
            for word in found.as_chunks::<8>().0 {
                let word = u64::from_le_bytes(*word);
                assert!(word == 0 || word >> 32 == block, "{disk}: block {block} holds {word:#x}");
            }
        }
    }
}

/// If no descriptors are left, new clients wait. They are served when others have gone, without another
/// client that wakes the server.
#[test]
fn clients_wait_for_descriptors() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("socket");
    let limit = ["sh", "-c", "ulimit -n 48; exec \"$@\"", "sh"];
    let server = Server::start("d=mem:1M", &socket, &limit);
    let mut first = Client::connect(&socket).unwrap();
    let crowd: Vec<UnixStream> = (0..60).map(|_| UnixStream::connect(&socket).unwrap()).collect();
    let waiting = std::thread::spawn({
        let socket = socket.clone();
        move || Client::connect(&socket).and_then(|mut client| client.read(0, 512))
    });
    assert_eq!(first.read(0, 512).unwrap(), [0; 512], "who is connected is served");
    std::thread::sleep(Duration::from_millis(200));
    assert!(!waiting.is_finished(), "there was no descriptor for it");
    drop(crowd);
    assert_eq!(waiting.join().unwrap().unwrap(), [0; 512]);
    drop(server);
}

/// What the network refers to of sends without a copy counts as locked memory, unless the server may lock as much as
/// it likes. So clients that take their answers slowly use up what it may lock.
#[test]
fn without_memory_to_lock_answers_are_copied() {
    const LENGTH: u64 = 4 * MIB;
    let limit = "ulimit -l 1024; test $(id -u) = 0 && set -- setpriv --bounding-set=-ipc_lock \"$@\"; exec \"$@\"";
    let (_server, line) =
        Server::start_at("d=mem:4M:zero-copy", "127.0.0.1:0", &["sh", "-c", limit, "sh"]);
    let at = line.split("tcp://").nth(1).and_then(|at| at.split(' ').next());
    let at: SocketAddrV4 = at.and_then(|at| at.parse().ok()).expect("it listens somewhere");
    let connect = || {
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        sockopt::set_socket_recv_buffer_size(&socket, 4096).unwrap();
        rustix::net::connect(&socket, &at).unwrap();
        Client::over(socket.into()).unwrap()
    };
    let data: Vec<u8> = (0..LENGTH / 8).flat_map(u64::to_le_bytes).collect();
    connect().write(0, &data).unwrap();
    let mut slow: Vec<Client> = (0..4).map(|_| connect()).collect();
    slow.iter_mut().for_each(|client| client.send(0, 0, LENGTH, &[]).unwrap());
    // The answers begin before the network refers to all that it may.
    slow.iter_mut().for_each(|client| client.answer().unwrap());
    assert!(connect().read(0, LENGTH).unwrap() == data);
    for mut client in slow {
        assert!(client.take(LENGTH as usize).unwrap() == data);
    }
}
