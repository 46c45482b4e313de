//! The data paths: each is taken when the rules or the options say so, moves the right bytes, and is counted.

use crate::client::{Client, Form};
use crate::page_cache::is_told;
use crate::{World, pattern, wait_until};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use towline_net::address::Address;
use towline_server::{CacheMode, Config, DataPath, Delivery, DiskKind, EngineWish};

const MIB: u64 = 1 << 20;

/// Creates a file on a disk, all of it in the page cache.
fn file() -> (tempfile::NamedTempFile, Vec<u8>) {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let data = pattern(0, 4 << 20, 5);
    std::fs::write(file.path(), &data).unwrap();
    (file, data)
}

fn kind(file: &tempfile::NamedTempFile, mode: CacheMode) -> DiskKind {
    DiskKind::File(file.path().to_path_buf(), mode)
}

/// Drops a file from the page cache.
fn forget(file: &tempfile::NamedTempFile) {
    file.as_file().sync_all().unwrap();
    rustix::fs::fadvise(file.as_file(), 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

fn over_tcp(config: &mut Config) {
    config.nbd = vec![Address::parse("tcp://127.0.0.1:0").unwrap()];
}

fn tcp_client(to: SocketAddr, form: Form) -> Client {
    let stream = TcpStream::connect(to).unwrap();
    Client::over(UnixStream::from(OwnedFd::from(stream)), form, "")
}

fn tcp_address(world: &World) -> SocketAddr {
    let Address::Tcp(address) = world.server.nbd_addresses()[0] else { panic!("not TCP") };
    address
}

fn has_ring(world: &World) -> bool {
    let has = world.server.engine() == "io_uring";
    if !has {
        eprintln!("SKIPPED: no io_uring here, so no registered buffers and no sends in place");
    }
    has
}

/// Reads everything and returns the MiB moved by reference from the page cache, copied out of it, and read
/// around it.
fn moved(kind: DiskKind, delivery: Delivery, data: &[u8]) -> [u64; 3] {
    let world = World::delivered(kind, delivery);
    for form in [Form::Structured, Form::Simple, Form::Extended] {
        let mut client = world.client(form);
        assert!(client.read(0, data.len() as u64).unwrap() == data, "{form:?} {delivery:?}");
    }
    let ways = || {
        ["disk_bytes_lent", "disk_bytes_staged", "disk_bytes_direct"].map(|way| world.counter(way))
    };
    // Sends are counted after they are done, which the client may see first.
    wait_until("all is counted", || ways().iter().sum::<u64>() == 3 * data.len() as u64);
    let [by_reference, ..] = ways();
    wait_until("all pages have left by sendfile", || {
        world.counter("bytes_sent_file") == by_reference
    });
    ways().map(|bytes| bytes / (3 * MIB))
}

#[test]
fn each_rung_is_the_one_meant() {
    let (file, data) = file();
    if !is_told(file.as_file()) {
        return;
    }
    let cached = || kind(&file, CacheMode::Cached);
    let by = |path| Delivery { path, serial: false };
    assert_eq!(moved(cached(), Delivery::default(), &data), [4, 0, 0], "what is there is lent");
    assert_eq!(moved(cached(), by(DataPath::Sendfile), &data), [4, 0, 0]);
    assert_eq!(moved(cached(), by(DataPath::Staged), &data), [0, 4, 0]);
    for path in [DataPath::Auto, DataPath::Staged, DataPath::Sendfile, DataPath::ZeroCopy] {
        for serial in [false, true] {
            let way = moved(kind(&file, CacheMode::Direct), Delivery { path, serial }, &data);
            assert_eq!(way, [0, 0, 4], "around the cache, whatever follows");
        }
    }
}

#[test]
fn pages_are_brought_in_before_they_are_lent() {
    let (file, data) = file();
    if !is_told(file.as_file()) {
        return;
    }
    for serial in [false, true] {
        forget(&file);
        let delivery = Delivery { path: DataPath::Sendfile, serial };
        assert_eq!(moved(kind(&file, CacheMode::Cached), delivery, &data), [4, 0, 0]);
    }
}

#[test]
fn direct_transfers_use_registered_buffers_where_there_is_a_ring() {
    let (file, data) = file();
    let registered = |engine| {
        let world = World::with(kind(&file, CacheMode::Direct), |c| c.engine = engine);
        let mut client = world.client(Form::Extended);
        assert_eq!(client.write(0, 0, &data[..1 << 20]), 0);
        assert!(client.read(0, 4 * MIB).unwrap() == data);
        assert_eq!(world.counter("disk_bytes_written_direct"), MIB);
        assert_eq!(world.counter("disk_bytes_direct"), 4 * MIB);
        let placed = world.counter("bytes_received_placed");
        assert!(placed > MIB / 2, "payload lands where it is written from: {placed}");
        has_ring(&world).then(|| world.counter("disk_bytes_registered") / MIB)
    };
    assert_eq!(registered(EngineWish::Automatic).unwrap_or(5), 5);
    assert_eq!(registered(EngineWish::Epoll).unwrap_or(0), 0);
}

/// Within a machine the kernel copies. So sends in place are not used unless forced, and then the kernel
/// reports that it copied.
#[test]
fn sends_in_place_are_for_other_machines() {
    let (file, data) = file();
    for (path, expected) in [(DataPath::Auto, false), (DataPath::ZeroCopy, true)] {
        let delivery = Delivery { path, serial: false };
        let world = World::with(kind(&file, CacheMode::Direct), |config| {
            over_tcp(config);
            config.disks[0].delivery = delivery;
        });
        if !has_ring(&world) {
            return;
        }
        for form in [Form::Structured, Form::Simple, Form::Extended] {
            let mut client = tcp_client(tcp_address(&world), form);
            assert!(client.read(0, 4 * MIB).unwrap() == data, "{form:?}");
        }
        let sent = world.counter("bytes_sent_in_place");
        if !expected {
            assert_eq!(sent, 0);
            continue;
        }
        assert!(sent > 10 * MIB, "{sent}");
        wait_until("the kernel said that it copied", || world.counter("sends_in_place_copied") > 0);
        assert_eq!(world.counter("sends_in_place_given_up"), 0, "what is forced stays");
        wait_until("all memory is back", || world.counter("buffer_bytes_in_use") == 0);
    }
}

/// A virtual cable whose far end is in a network namespace of its own; removed when dropped.
struct Cable {
    name: String,
}

impl Cable {
    fn new() -> Option<Self> {
        let name = format!("tl{}", std::process::id());
        let cable = Self { name };
        let (space, near, far) = (&cable.name, format!("{}a", cable.name), "far");
        let steps = [
            format!("netns add {space}"),
            format!("link add {near} type veth peer name {far} netns {space}"),
            format!("addr add 10.213.77.1/30 dev {near}"),
            format!("link set {near} up"),
            format!("-n {space} addr add 10.213.77.2/30 dev {far}"),
            format!("-n {space} link set {far} up"),
        ];
        for step in steps {
            if !ip(&step) {
                eprintln!("SKIPPED: no network of our own here: \"ip {step}\" fails");
                return None;
            }
        }
        Some(cable)
    }

    /// Connects from the far end.
    fn connect(&self, to: SocketAddr) -> TcpStream {
        let space = std::fs::File::open(format!("/run/netns/{}", self.name)).unwrap();
        let connect = move || {
            use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
            use std::os::fd::AsFd;
            let network = Some(LinkNameSpaceType::Network);
            move_into_link_name_space(space.as_fd(), network).unwrap();
            TcpStream::connect_timeout(&to, std::time::Duration::from_secs(20)).unwrap()
        };
        std::thread::spawn(connect).join().unwrap()
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        ip(&format!("link del {}a", self.name));
        ip(&format!("netns del {}", self.name));
    }
}

fn ip(arguments: &str) -> bool {
    let mut command = std::process::Command::new("ip");
    command.args(arguments.split_whitespace()).stderr(std::process::Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// The peer's address looks like another machine's, but the cable copies.
#[test]
fn a_network_that_copies_is_noticed() {
    let (file, data) = file();
    let Some(cable) = Cable::new() else { return };
    let world = World::with(kind(&file, CacheMode::Direct), |config| {
        config.nbd = vec![Address::parse("tcp://10.213.77.1:0").unwrap()];
        config.insecure = true;
    });
    if !has_ring(&world) {
        return;
    }
    let stream = cable.connect(tcp_address(&world));
    let mut client = Client::over(UnixStream::from(OwnedFd::from(stream)), Form::Structured, "");
    assert!(client.read(0, 4 * MIB).unwrap() == data);
    assert!(world.counter("bytes_sent_in_place") > 0, "it is tried with other machines");
    wait_until("it was given up", || world.counter("sends_in_place_given_up") > 0);
    let before = world.counter("bytes_sent_in_place");
    assert!(client.read(0, 4 * MIB).unwrap() == data);
    assert_eq!(world.counter("bytes_sent_in_place"), before, "from then on it is not tried");
}
