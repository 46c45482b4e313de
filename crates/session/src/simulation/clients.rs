//! Clients of the simulated server, which know the expected outcome of their requests.

use super::{Message, Random, Server, caller, failure, fragile};
use std::collections::{BTreeMap, BTreeSet};
use towline_store::{Listing, ReadOutcome};
use towline_wire::reply::parse_results;
use towline_wire::request::rename_flag::{EXCHANGE, NO_REPLACE, WHITEOUT};
use towline_wire::request::{CURRENT, DIRECTORY, encode_compound, write_flag};
use towline_wire::{Attr, Errno, Header, Kind, Reply, Request};

const CLIENTS: u64 = 3;
const SLOTS: u16 = 2;
const STEPS: u64 = 250;
const CREATE: u32 = 0o100 | 0o200 | 2;
/// Names that all clients create, move and remove.
const SHARED: [&str; 3] = ["s0", "sub/s1", "s2"];

/// What a client requested.
#[derive(Clone, Debug)]
enum Asked {
    /// Create a file of its own, possibly by another name or as a link to another one.
    Make { name: String, of: Option<String> },
    /// The same, kept open.
    Keep { name: String },
    /// Close that file.
    Close,
    /// Create two directories and rename one, in one request.
    Several { first: String, second: String },
    /// Remove a name.
    Remove { name: String },
    /// Move a name, which may leave a whiteout, or exchange two.
    Move { old: String, new: String, flags: u32 },
    /// Create or remove an extended attribute.
    Attribute { name: String, make: bool },
    /// Append a record with this number to the log.
    Append { number: u64 },
    /// Create, remove or move a shared name: what it takes and gives when it succeeds.
    Share { takes: Option<usize>, gives: Option<usize> },
}

struct Client {
    number: u64,
    id: u64,
    epoch: u32,
    /// Handles and identities.
    root: (u64, u64),
    log: (u64, u64),
    kept: BTreeMap<u64, (String, u64)>,
    slots: Vec<(u32, Option<(Asked, Message)>)>,
    /// Its names: whether each is a directory, and whether it has the attribute.
    names: BTreeMap<String, (bool, bool)>,
    /// Names that a request in progress uses.
    busy: BTreeSet<String>,
    next: u64,
    appended: BTreeMap<u64, u64>,
}

fn record(client: u64, number: u64) -> Vec<u8> {
    let length = 24 + number * 37 % 400;
    let mut bytes = Vec::new();
    for word in [client, number, length] {
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    bytes.resize(length as usize, 1 + number as u8 % 200);
    bytes
}

impl Client {
    fn fresh(&mut self) -> String {
        self.next += 1;
        let parent = if self.next.is_multiple_of(3) { "sub/" } else { "" };
        format!("{parent}c{}-{}", self.number, self.next)
    }

    fn some(&self, random: &mut Random, wanted: impl Fn(&(bool, bool)) -> bool) -> Option<String> {
        let kept = |name: &String| self.kept.values().any(|(kept, _)| kept == name);
        let free = |name: &&String| !self.busy.contains(*name) && !kept(name);
        let names: Vec<&String> = self
            .names
            .iter()
            .filter(|(_, n)| wanted(n))
            .map(|(name, _)| name)
            .filter(free)
            .collect();
        if names.is_empty() {
            return None;
        }
        Some(names[random.below(names.len() as u64) as usize].clone())
    }

    /// Chooses what to request, and encodes the request.
    fn ask(&mut self, random: &mut Random) -> Option<(Asked, Vec<u8>, Vec<u8>)> {
        let (base, _) = self.root;
        let open = |path| Request::Open { base, flags: CREATE, mode: 0o600, path };
        let close = Request::Close { handle: CURRENT };
        let mut data = Vec::new();
        let (asked, body) = match random.below(14) {
            0 => {
                let name = self.fresh();
                let body = encode_compound(&[open(name.as_bytes()), close]);
                (Asked::Make { name, of: None }, body)
            }
            1 => {
                let name = self.fresh();
                data = vec![5; 1 + random.below(90) as usize];
                let length = data.len() as u32;
                let write = Request::Write { handle: CURRENT, offset: 0, length, flags: 0 };
                let body = match random.below(2) {
                    0 => encode_compound(&[open(name.as_bytes()), write, close]),
                    _ => {
                        let part = self.fresh();
                        let (path, new_path) = (part.as_bytes(), name.as_bytes());
                        let (flags, new_base) = (NO_REPLACE, base);
                        let rename = Request::Rename { base, flags, path, new_base, new_path };
                        encode_compound(&[open(path), write, close, rename])
                    }
                };
                (Asked::Make { name, of: None }, body)
            }
            2 => {
                let name = self.fresh();
                (Asked::Keep { name: name.clone() }, encode_compound(&[open(name.as_bytes())]))
            }
            3 => {
                let (handle, _) = self.kept.pop_first()?;
                (Asked::Close, encode_compound(&[Request::Close { handle }]))
            }
            4 => {
                let name = self.fresh();
                let path = name.as_bytes();
                let mut of = None;
                let body = match random.below(3) {
                    0 => encode_compound(&[Request::MakeNode { base, mode: 0o600, rdev: 0, path }]),
                    1 => encode_compound(&[Request::Symlink { base, path, target: b"t" }]),
                    _ => {
                        let old = self.some(random, |(directory, _)| !directory)?;
                        let link = Request::Link {
                            base,
                            flags: 0,
                            path: old.as_bytes(),
                            new_base: base,
                            new_path: path,
                        };
                        let body = encode_compound(&[link]);
                        of = Some(old);
                        body
                    }
                };
                (Asked::Make { name, of }, body)
            }
            5 => {
                let (first, second) = (self.fresh(), self.fresh());
                let make = |path| Request::MakeDir { base, mode: 0o700, path };
                let rename = Request::Rename {
                    base,
                    flags: 0,
                    path: first.as_bytes(),
                    new_base: base,
                    new_path: second.as_bytes(),
                };
                let requests = [make(first.as_bytes()), rename, make(first.as_bytes())];
                let body = encode_compound(&requests);
                (Asked::Several { first, second }, body)
            }
            6 => {
                let name = self.some(random, |_| true)?;
                let flags = if self.names[&name].0 { DIRECTORY } else { 0 };
                let path = name.as_bytes();
                (
                    Asked::Remove { name: name.clone() },
                    encode_compound(&[Request::Unlink { base, flags, path }]),
                )
            }
            7 | 8 => {
                let old = self.some(random, |_| true)?;
                let exchange = random.below(2) == 0;
                let new = if exchange { self.some(random, |_| true)? } else { self.fresh() };
                let flags = match exchange {
                    true => EXCHANGE,
                    false => {
                        let all = [0, NO_REPLACE, WHITEOUT, NO_REPLACE | WHITEOUT];
                        all[random.below(4) as usize]
                    }
                };
                let rename = Request::Rename {
                    base,
                    flags,
                    path: old.as_bytes(),
                    new_base: base,
                    new_path: new.as_bytes(),
                };
                let body = encode_compound(&[rename]);
                (Asked::Move { old, new, flags }, body)
            }
            9 => {
                let name = self.some(random, |(directory, _)| *directory)?;
                let make = !self.names[&name].1;
                let (path, attribute) = (name.as_bytes(), &b"user.a"[..]);
                let body = if make {
                    let (how, value) = (1, &b"v"[..]);
                    encode_compound(&[Request::SetXattr {
                        base,
                        flags: 0,
                        how,
                        path,
                        name: attribute,
                        value,
                    }])
                } else {
                    encode_compound(&[Request::RemoveXattr {
                        base,
                        flags: 0,
                        path,
                        name: attribute,
                    }])
                };
                (Asked::Attribute { name: name.clone(), make }, body)
            }
            10 | 11 => {
                self.next += 1;
                let number = self.next;
                data = record(self.number, number);
                let append = Request::Write {
                    handle: self.log.0,
                    offset: 0,
                    length: data.len() as u32,
                    flags: write_flag::APPEND,
                };
                (Asked::Append { number }, encode_compound(&[append]))
            }
            _ => {
                let [from, to] = [(); 2].map(|()| random.below(SHARED.len() as u64) as usize);
                let (path, new_path) = (SHARED[from].as_bytes(), SHARED[to].as_bytes());
                let (takes, gives, request) = match random.below(3) {
                    0 => (None, Some(from), Request::MakeDir { base, mode: 0o700, path }),
                    1 => (Some(from), None, Request::Unlink { base, flags: DIRECTORY, path }),
                    _ if from == to => return None,
                    _ => {
                        let (flags, new_base) = (NO_REPLACE, base);
                        let rename = Request::Rename { base, flags, path, new_base, new_path };
                        (Some(from), Some(to), rename)
                    }
                };
                (Asked::Share { takes, gives }, encode_compound(&[request]))
            }
        };
        for name in asked.names() {
            self.busy.insert(name.to_owned());
        }
        Some((asked, body, data))
    }

    /// Takes the answer to a request.
    fn answered(&mut self, asked: Asked, results: &[u8], owned: &mut [i64]) {
        let failed = failure(results);
        for name in asked.names() {
            self.busy.remove(name);
        }
        if !matches!(asked, Asked::Share { .. }) {
            assert_eq!(failed, None, "client {}: {asked:?}", self.number);
        }
        let replies = parse_results(results).unwrap();
        match asked {
            Asked::Make { name, .. } => {
                assert_eq!(self.names.insert(name, (false, false)), None);
            }
            Asked::Keep { name } => {
                let Reply::Opened { handle, attr } = replies[0] else { panic!("not opened") };
                self.kept.insert(handle, (name.clone(), attr.identity()));
                self.names.insert(name, (false, false));
            }
            Asked::Close => {}
            Asked::Several { first, second } => {
                self.names.insert(first, (true, false));
                self.names.insert(second, (true, false));
            }
            Asked::Remove { name } => assert!(self.names.remove(&name).is_some()),
            Asked::Move { old, new, flags } => {
                let (a, b) = (self.names[&old], self.names.get(&new).copied());
                self.names.insert(new, a);
                match b {
                    Some(b) if flags & EXCHANGE != 0 => drop(self.names.insert(old, b)),
                    _ if flags & WHITEOUT != 0 => drop(self.names.insert(old, (false, false))),
                    _ => drop(self.names.remove(&old)),
                }
            }
            Asked::Attribute { name, make } => {
                self.names.get_mut(&name).expect("it is busy").1 = make;
            }
            Asked::Append { number } => {
                let Reply::Wrote { length, offset } = replies[0] else { panic!("not written") };
                assert_eq!(length as usize, record(self.number, number).len());
                self.appended.insert(number, offset);
            }
            Asked::Share { takes, gives } => match failed {
                None => {
                    takes.into_iter().for_each(|name| owned[name] -= 1);
                    gives.into_iter().for_each(|name| owned[name] += 1);
                }
                Some(errno) => assert!([Errno::ENOENT, Errno::EEXIST].contains(&errno), "{errno}"),
            },
        }
    }

    /// Comes back after a restart and reopens what it had open. A file that was being closed is closed.
    fn rejoin(&mut self, server: &mut Server) {
        for (_, asked) in &mut self.slots {
            asked.take_if(|(asked, _)| matches!(asked, Asked::Close));
        }
        server.join(self.id);
        let (root, inode) = self.root;
        let root = Request::Reclaim { handle: root, flags: 0, inode, export: b"", path: b"" };
        let (log, inode) = self.log;
        let log = Request::Reclaim { handle: log, flags: 1, inode, export: b"", path: b"log" };
        let kept = self.kept.iter().map(|(handle, (name, inode))| Request::Reclaim {
            handle: *handle,
            flags: CREATE,
            inode: *inode,
            export: b"",
            path: name.as_bytes(),
        });
        let all = [root, log].into_iter().chain(kept).chain([Request::Reclaimed {}]);
        for (number, request) in all.enumerate() {
            let results = server.reclaim(self.id, 1 + number as u32, &request);
            assert_eq!(failure(&results), None, "client {}: {request:?}", self.number);
        }
        self.epoch = server.epoch;
    }
}

impl Asked {
    fn names(&self) -> Vec<&str> {
        match self {
            Self::Make { name, of: Some(old) } => vec![name, old],
            Self::Make { name, of: None } | Self::Keep { name } => vec![name],
            Self::Remove { name } | Self::Attribute { name, .. } => vec![name],
            Self::Several { first, second } => vec![first, second],
            Self::Move { old, new, .. } => vec![old, new],
            Self::Close | Self::Append { .. } | Self::Share { .. } => Vec::new(),
        }
    }
}

fn connect(server: &mut Server, number: u64) -> Client {
    let id = server.begin();
    let mut open = |sequence, request: &Request<'_>| {
        let results = server.reclaim(id, sequence, request);
        match parse_results(&results).unwrap()[..] {
            [Reply::Opened { handle, attr }] => (handle, attr.identity()),
            ref other => panic!("{other:?}"),
        }
    };
    let root = open(1, &Request::Attach { name: b"" });
    let base = root.0;
    let log = open(2, &Request::Open { base, flags: 0o100 | 1, mode: 0o600, path: b"log" });
    if number == 0 {
        server.reclaim(id, 3, &Request::MakeDir { base, mode: 0o700, path: b"sub" });
    }
    Client {
        number,
        id,
        epoch: server.epoch,
        root,
        log,
        kept: BTreeMap::new(),
        slots: (0..SLOTS).map(|_| (0, None)).collect(),
        names: BTreeMap::new(),
        busy: BTreeSet::new(),
        next: 0,
        appended: BTreeMap::new(),
    }
}

/// Does one run; returns the server and the number of operations answered.
pub(super) fn run(seed: u64) -> (Server, u64) {
    let mut random = Random::new(seed + 1);
    let mut server = Server::start();
    let mut clients: Vec<Client> = (0..CLIENTS).map(|n| connect(&mut server, n)).collect();
    let mut owned = [0; SHARED.len()];
    let mut done = 0;
    let mut step = 0;
    loop {
        step += 1;
        let ending = step > STEPS;
        assert!(step < 50 * STEPS, "requests are not answered");
        if ending && clients.iter().all(|c| c.slots.iter().all(|(_, asked)| asked.is_none())) {
            break;
        }
        let number = random.below(CLIENTS) as usize;
        let slot = random.below(SLOTS.into()) as usize;
        let client = &mut clients[number];
        if client.slots[slot].1.is_none() && !ending {
            let Some((asked, body, data)) = client.ask(&mut random) else { continue };
            client.slots[slot].0 += 1;
            let mut header = Header::new(Kind::Request, slot as u16, client.slots[slot].0);
            if data.len() > 100 && random.below(2) == 0 {
                header.offset = data.len() as u64;
            }
            client.slots[slot].1 = Some((asked, Message { header, body, data }));
        }
        if client.slots[slot].1.is_none() {
            continue;
        }
        if !ending {
            match random.below(20) {
                0 => server.restart(),
                1..=7 => fragile::light(Some(random.below(14) as u32)),
                _ => {}
            }
        }
        let answer = server.survive(|server| {
            if client.epoch != server.epoch {
                client.rejoin(server);
            }
            let (_, message) = client.slots[slot].1.as_ref()?;
            server.arrive(client.id, message)
        });
        fragile::light(None);
        // The server was killed, the answer is still to come, or it is lost on its way.
        let Some(Some(results)) = answer else { continue };
        if !ending && random.below(3) == 0 {
            continue;
        }
        if let Some((asked, _)) = client.slots[slot].1.take() {
            client.answered(asked, &results, &mut owned);
            done += 1;
        }
    }
    check(&server, &clients, &owned);
    (server, done)
}

struct Found(Vec<String>);

impl Listing for Found {
    fn entry(&mut self, _: u64, _: u64, _: u8, name: &[u8], _: Option<Attr>) -> bool {
        self.0.push(String::from_utf8_lossy(name).into_owned());
        true
    }
}

/// Compares the files with what the clients were told.
fn check(server: &Server, clients: &[Client], owned: &[i64]) {
    let root = server.store.root().unwrap();
    let open = |path: &[u8]| {
        server.store.open(&caller(), (&*root, path), towline_store::OpenHow::default()).unwrap().0
    };
    let list = |path: &str| {
        let mut found = Found(Vec::new());
        assert!(open(path.as_bytes()).read_directory(0, false, &mut found).unwrap());
        found.0.retain(|name| name != "." && name != "..");
        found.0
    };
    let mut found: BTreeSet<String> =
        list("sub").iter().map(|name| format!("sub/{name}")).collect();
    found.extend(list(".").into_iter().filter(|name| name != "sub" && name != "log"));
    let mut wanted: BTreeSet<String> =
        clients.iter().flat_map(|client| client.names.keys().cloned()).collect();
    for (name, owned) in SHARED.iter().zip(owned) {
        assert!((0..=1).contains(owned), "{name} was made {owned} times more than removed");
        if *owned == 1 {
            wanted.insert((*name).to_owned());
        }
    }
    assert_eq!(found, wanted);
    let log = open(b"log");
    let size = log.stat().unwrap().size;
    let ReadOutcome::Ready(data) = log.read(0, size as usize, true).unwrap() else { panic!() };
    let mut bytes = vec![0; size as usize];
    data.copy_to(&mut bytes).unwrap();
    let mut records = 0;
    for client in clients {
        for (number, offset) in &client.appended {
            let record = record(client.number, *number);
            let at = *offset as usize;
            assert_eq!(bytes.get(at..at + record.len()), Some(&record[..]));
            records += record.len();
        }
    }
    assert_eq!(records as u64, size, "records lost or doubled");
}
