//! Sends what programs write to files of servers that are not next to us (`instance::behind`).

mod numbers;
mod window;

use super::directory::RunDirectory;
use super::pending::{Pending, UnderWay};
use super::servers::Mounts;
use super::source::Opened;
use numbers::Numbers;
use std::collections::HashSet;
use std::io;
use std::ops::RangeInclusive;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};
use towline_client::{Client, Errno, Error, File, Operation, Options, Url};
use towline_instance::behind::{Behind, Place, Queue};
use towline_instance::{State, Taken};
use towline_wire::limits::{FRAGMENT_BYTES_MAX, RECONNECT_SECONDS};
use window::{Mark, Window};

/// How long the end of a run waits for the next data to be written: longer than for a server that is away.
const WRITTEN: Duration = Duration::from_secs(RECONNECT_SECONDS + 10);
/// How long no connection is tried after one has failed.
const AWAY: Duration = Duration::from_secs(1);
/// Maximum number of bytes of a request: there are several under way.
const REQUEST_BYTES: RangeInclusive<usize> = 64 << 10..=FRAGMENT_BYTES_MAX;
/// Number of requests whose memory is used again.
const SPARE: usize = 16;
/// A server that answers within this time is so near that programs wait for their writes.
const NEAR: Duration = Duration::from_micros(50);
/// The most bytes that programs may write before the room is looked at again.
const ROOM_BYTES_MAX: i64 = 1 << 30;
/// Less room than this is looked at again, but not more often than this.
const ROOM_LOW: i64 = 128 << 20;
const ROOM_AGAIN: Duration = Duration::from_millis(500);

/// The writes behind of a run.
pub(super) struct Writes {
    directory: PathBuf,
    state: Arc<State>,
    servers: Vec<Mounts>,
    under_way: Arc<Pending>,
    is_over: Arc<AtomicBool>,
}

impl Writes {
    /// For the servers of a run.
    pub(super) fn new(directory: &RunDirectory, state: Arc<State>, servers: Vec<Mounts>) -> Self {
        let (under_way, is_over) = (Arc::default(), Arc::default());
        Self { directory: directory.path().to_owned(), state, servers, under_way, is_over }
    }

    /// Serves the servers for which programs have asked for it since the last call.
    pub(super) fn work(&self) {
        for server in &self.servers {
            let behind = self.state.behind(server[0].0);
            if behind.take_wish()
                && let Err(error) = self.serve(server)
            {
                behind.refuse();
                log::warn!("programs wait for each of their writes to a server: {error}");
            }
        }
    }

    fn serve(&self, mounts: &Mounts) -> io::Result<()> {
        let queue = Queue::create(self.directory.as_os_str().as_bytes(), mounts[0].0)?;
        let session = Session {
            state: Arc::clone(&self.state),
            mounts: mounts.clone(),
            client: None,
            failed: None,
            known: HashSet::new(),
        };
        let stream = Arc::new(Stream {
            mounts: mounts.iter().map(|(mount, _)| *mount).collect(),
            state: Arc::clone(&self.state),
            queue,
            session: Mutex::new(session),
            flight: Mutex::new(Flight {
                window: Window::new(),
                appends: Vec::new(),
                spare: Vec::new(),
            }),
            landed: Condvar::new(),
        });
        let (sender, sent) = mpsc::channel();
        let begin = || std::thread::Builder::new().name("writes".to_owned());
        let (ends, first) = (Arc::clone(&stream), stream.behind().added());
        begin().spawn(move || ends.finish_all(&sent, Numbers::before(first)))?;
        let (under_way, is_over) = (self.under_way.begin(), Arc::clone(&self.is_over));
        begin()
            .spawn(move || stream.send_all(&sender, Numbers::before(first), &is_over, under_way))
            .map(drop)
    }

    /// Waits, after all processes have ended, until everything is written, or nothing is any more.
    pub(super) fn finish(&self) {
        self.is_over.store(true, Ordering::Release);
        let queues = || self.servers.iter().map(|server| self.state.behind(server[0].0));
        queues().for_each(|behind| behind.nudge());
        let done = || -> Vec<u32> { queues().map(|behind| behind.done()).collect() };
        let mut before = done();
        while !self.under_way.wait(WRITTEN) {
            let now = done();
            if std::mem::replace(&mut before, now) == before {
                log::warn!("not everything that programs wrote has reached its server");
                return;
            }
        }
    }
}

/// What is written to a server. One thread sends what is in the queue; another one waits for the answers.
struct Stream {
    mounts: Vec<usize>,
    state: Arc<State>,
    queue: Queue,
    session: Mutex<Session>,
    flight: Mutex<Flight>,
    /// Something is done.
    landed: Condvar,
}

/// What is under way.
struct Flight {
    window: Window,
    /// Files to which something is being appended: what follows must not overtake it.
    appends: Vec<u64>,
    /// Memory of requests that are over.
    spare: Vec<Vec<u8>>,
}

/// A request under way.
struct Sent {
    place: Place,
    /// Numbers of its records.
    records: Vec<u32>,
    mark: Mark,
    started: Result<Started, Error>,
}

/// A request that has been sent.
enum Started {
    Write(Operation<(usize, Vec<u8>)>),
    Append(Operation<(usize, u64, Vec<u8>)>),
}

/// What became of a request.
struct Written {
    count: usize,
    /// Where it ends, if it was appended.
    end: Option<u64>,
    /// The request's memory.
    spare: Vec<u8>,
}

impl Started {
    fn wait(self) -> Result<Written, Error> {
        Ok(match self {
            Self::Write(write) => {
                let (count, spare) = write.wait()?;
                Written { count, end: None, spare }
            }
            Self::Append(append) => {
                let (count, at, spare) = append.wait()?;
                Written { count, end: Some(at + count as u64), spare }
            }
        })
    }
}

impl Stream {
    fn behind(&self) -> Behind<'_> {
        self.state.behind(self.mounts[0])
    }

    fn flight(&self) -> MutexGuard<'_, Flight> {
        self.flight.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn session(&self) -> MutexGuard<'_, Session> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends what programs write until the run is over.
    fn send_all(
        &self,
        sender: &mpsc::Sender<Sent>,
        mut sent: Numbers,
        is_over: &AtomicBool,
        _under_way: UnderWay,
    ) {
        let behind = self.behind();
        let mut looked = None;
        self.look_at_room(&mut looked);
        self.queue.limit(self.flight().window.bytes());
        behind.begin(std::process::id(), rustix::process::geteuid().as_raw());
        loop {
            let news = behind.news();
            if let Some(request) = self.send_next(&mut sent) {
                if sender.send(request).is_err() {
                    break;
                }
            } else {
                if behind.is_idle() {
                    self.session().forget_files();
                    self.flight().spare.clear();
                    if is_over.load(Ordering::Acquire) {
                        break;
                    }
                }
                behind.wait_for_news(news);
            }
            self.look_at_room(&mut looked);
        }
        if let Some(client) = self.session().client.take() {
            client.close();
        }
    }

    /// Sends records that can be sent together, once there is room under way. Returns `None` if there are none. They do
    /// not overlap with what is under way (`Queue::add`).
    fn send_next(&self, sent: &mut Numbers) -> Option<Sent> {
        let is_full = |flight: &mut Flight| flight.window.is_full();
        let waited = self.landed.wait_while(self.flight(), is_full);
        let mut flight = waited.unwrap_or_else(PoisonError::into_inner);
        let (number, first) = self.find(sent, &flight)?;
        let most = (flight.window.bytes() / 4).clamp(*REQUEST_BYTES.start(), *REQUEST_BYTES.end());
        let mut data = flight.spare.pop().unwrap_or_default();
        data.clear();
        let records = self.gather(sent, number, &first, most, &mut data);
        let mark = flight.window.sends(data.len(), Instant::now());
        if first.offset.is_none() {
            flight.appends.push(first.inode);
        }
        drop(flight);
        records.iter().for_each(|number| sent.add(*number));
        let started = self.session().start(&first, data);
        Some(Sent { place: first, records, mark, started })
    }

    /// Returns the first record that can be sent: not what is appended to a file while something else is.
    fn find(&self, sent: &Numbers, flight: &Flight) -> Option<(u32, Place)> {
        let mut number = sent.next();
        loop {
            let (place, ..) = self.queue.get(self.behind(), number)?;
            let has_to_wait = place.offset.is_none() && flight.appends.contains(&place.inode);
            if !sent.has(number) && !has_to_wait {
                return Some((number, place));
            }
            number = number.wrapping_add(1);
        }
    }

    /// Collects the data of a record and of those that continue it, between which other files' records may stand.
    /// Returns their numbers.
    fn gather(
        &self,
        sent: &Numbers,
        mut number: u32,
        first: &Place,
        most: usize,
        data: &mut Vec<u8>,
    ) -> Vec<u32> {
        let mut records = Vec::new();
        while let Some((place, from, length)) = self.queue.get(self.behind(), number) {
            let offset = first.offset.map(|offset| offset.wrapping_add(data.len() as u64));
            let continues = place == Place { offset, ..*first };
            let is_long = data.len() + length > most && !records.is_empty();
            if !sent.has(number) {
                if continues && !is_long {
                    self.queue.load(from, length, data);
                    records.push(number);
                } else if place.inode == first.inode {
                    break;
                }
            }
            number = number.wrapping_add(1);
        }
        records
    }

    /// Tells programs how much more they may write to each mount, if they are about to have used it up.
    fn look_at_room(&self, looked: &mut Option<Instant>) {
        let is_low = |mount: &&usize| self.state.behind(**mount).room() < ROOM_LOW;
        let was_looked = looked.is_some_and(|looked| looked.elapsed() < ROOM_AGAIN);
        let low = self.mounts.iter().filter(is_low);
        for mount in low.take_while(|_| !was_looked) {
            if let Some(root) = self.state.root(*mount)
                && let Ok(room) = self.session().room(root.handle)
            {
                // Half of it is for others. The mounts may be of one file system.
                let bytes = room.saturating_sub(self.flight().window.bytes() as u64);
                let bytes = i64::try_from(bytes / 2 / self.mounts.len() as u64);
                let bytes = bytes.map_or(ROOM_BYTES_MAX, |bytes| bytes.min(ROOM_BYTES_MAX));
                self.state.behind(*mount).set_room(bytes);
            }
            *looked = Some(Instant::now());
        }
    }
}

/// Waiting for the answers.
impl Stream {
    fn finish_all(&self, sent: &mpsc::Receiver<Sent>, mut done: Numbers) {
        while let Ok(request) = sent.recv() {
            self.finish(request, &mut done);
        }
    }

    /// Waits for the answer to the first request under way.
    fn finish(&self, request: Sent, done: &mut Numbers) {
        let Sent { place, records, mark, started } = request;
        let (behind, length) = (self.behind(), mark.length);
        let written = started.and_then(Started::wait);
        let took = self.is_over(&mark, written.as_ref().is_ok_and(|w| w.count >= length));
        let written = match written {
            Ok(Written { count, end, spare }) if count >= length => {
                behind.notice_trip(took);
                if took < NEAR {
                    // It was taken for farther away while this machine or the server was busy.
                    behind.refuse();
                }
                let mut flight = self.flight();
                if flight.spare.len() < SPARE {
                    flight.spare.push(spare);
                }
                Ok(end)
            }
            // Writing what is left tells why.
            Ok(Written { count, end: Some(end), .. }) => {
                self.move_position(&place, end);
                self.write_again(&place, &records, count)
            }
            Ok(_) => self.write_again(&place, &records, 0),
            Err(error) if is_closed(&error) => {
                // After a restart of the server, nobody may have asked for this file again yet.
                let reclaimed = self.session().reclaim(&place);
                reclaimed.and_then(|()| self.write_again(&place, &records, 0))
            }
            Err(error) => Err(error),
        };
        match written {
            Ok(end) => end.into_iter().for_each(|end| self.move_position(&place, end)),
            Err(error) => self.fail(&place, &error),
        }
        self.flight().appends.retain(|inode| place.offset.is_some() || *inode != place.inode);
        self.landed.notify_all();
        records.iter().for_each(|number| done.add(*number));
        behind.finish(done.next());
        if behind.is_idle() || place.offset.is_none() {
            // What comes next may have to wait for this.
            behind.nudge();
        }
    }

    /// Moves the position of a file to which something was appended.
    fn move_position(&self, place: &Place, end: u64) {
        if let Some(entry) = self.state.entry(place.entry) {
            entry.put_offset(end as i64);
        }
    }

    /// Notes that a request is no longer under way. Returns how long it was.
    fn is_over(&self, mark: &Mark, is_written: bool) -> Duration {
        let mut flight = self.flight();
        let took = flight.window.is_over(mark, is_written, Instant::now());
        self.queue.limit(flight.window.bytes());
        took
    }

    /// Writes once more, as a whole, what is still in the queue, but for its first bytes. Returns where it ends, if it
    /// is appended.
    fn write_again(
        &self,
        place: &Place,
        records: &[u32],
        done: usize,
    ) -> Result<Option<u64>, Error> {
        let mut data = Vec::new();
        for number in records {
            if let Some((_, from, length)) = self.queue.get(self.behind(), *number) {
                self.queue.load(from, length, &mut data);
            }
        }
        self.session().write(place, &data[done..])
    }

    /// Has the programs be told that have the file open for writing, and the user.
    fn fail(&self, place: &Place, error: &Error) {
        let state = &self.state;
        // Before anybody is told: what was not written is known to nobody any more.
        state.changes().fetch_add(2, Ordering::AcqRel);
        let mut is_new = false;
        for entry in state.used().filter_map(|number| state.entry(number)) {
            let opened = Opened::of(entry);
            let is_meant = self.mounts.contains(&(opened.mount as usize))
                && opened.inode == place.inode
                && opened.may_write()
                && entry.taken() != Taken::Free;
            is_new |= is_meant && entry.fail_write(i32::from(error.errno().0));
        }
        if is_new && let Some(entry) = state.entry(place.entry) {
            let config = state.config().unwrap_or_default();
            let prefix = config.mounts.get(place.mount).map_or(&b""[..], |at| &at.prefix);
            let path = [prefix, b"/", &entry.path()].concat();
            let path = String::from_utf8_lossy(&path);
            log::warn!("{path}: what a program has written to it is lost: {error}");
        }
    }
}

/// The session with a server in which programs' data is written. It is not the keeper's own, whose requests would be
/// delayed.
struct Session {
    state: Arc<State>,
    mounts: Mounts,
    client: Option<Client>,
    /// When the server could not be reached.
    failed: Option<(Instant, Error)>,
    /// Files that the client knows, by handle: it asks for them again after a restart of the server.
    known: HashSet<u64>,
}

impl Session {
    /// Returns the client, and connects if there is none.
    fn client(&mut self) -> Result<&Client, Error> {
        let client = self.client.take().map_or_else(|| self.connect(), Ok)?;
        Ok(self.client.insert(client))
    }

    fn connect(&mut self) -> Result<Client, Error> {
        // Each write would wait for it.
        if let Some((_, error)) = self.failed.as_ref().filter(|(at, _)| at.elapsed() < AWAY) {
            return Err(error.clone());
        }
        let mut options = Options::default();
        options.family = self.state.config().map_or(0, |config| config.family);
        Client::connect(&self.mounts[0].1.transport, options)
            .inspect_err(|error| self.failed = Some((Instant::now(), error.clone())))
    }

    fn url(&self, place: &Place) -> Url {
        let of_it = self.mounts.iter().find(|(mount, _)| *mount == place.mount);
        of_it.unwrap_or(&self.mounts[0]).1.clone()
    }

    /// Sends a write.
    fn start(&mut self, place: &Place, data: Vec<u8>) -> Result<Started, Error> {
        let client = self.client()?.clone();
        if self.known.insert(place.handle)
            && let Some(entry) = self.state.entry(place.entry)
        {
            Opened::of(entry).make_known(&client, &self.url(place));
        }
        client.with_handle(place.handle, 0, |file| match place.offset {
            Some(offset) => file.start_write_at(data, offset).map(Started::Write),
            None => file.start_append(data).map(Started::Append),
        })
    }

    /// Writes all of this and waits for it. Returns where it ends, if it is appended.
    fn write(&mut self, place: &Place, data: &[u8]) -> Result<Option<u64>, Error> {
        self.client()?.with_handle(place.handle, 0, |file| match place.offset {
            Some(offset) => file.write_all_at(data, offset).map(|()| None),
            None => append_all(file, data).map(Some),
        })
    }

    /// Asks the server for a file again, for all processes of the run.
    fn reclaim(&mut self, place: &Place) -> Result<(), Error> {
        let client = self.client()?.clone();
        let entry = self.state.entry(place.entry);
        entry.map_or(Ok(()), |entry| Opened::of(entry).reclaim(&client, &self.url(place)))
    }

    /// Returns how many bytes are free.
    fn room(&mut self, root: u64) -> Result<u64, Error> {
        let told = self.client()?.with_handle(root, 0, File::stat_fs)?;
        let is_unlimited = told.blocks == 0;
        let bytes = told.blocks_available.saturating_mul(told.block_bytes);
        Ok(if is_unlimited { u64::MAX } else { bytes })
    }

    /// Forgets the files that were written: their programs close them.
    fn forget_files(&mut self) {
        for handle in self.known.drain() {
            if let Some(client) = &self.client {
                client.forget_handle(handle);
            }
        }
    }
}

/// Appends all of this. Returns where it ends.
fn append_all(file: &File, data: &[u8]) -> Result<u64, Error> {
    let (mut done, mut end) = (0, 0);
    while done < data.len() {
        // If an append stops early, the next one reports why.
        let (count, at) = file.append(&data[done..])?;
        if count == 0 {
            return Err(Errno::ENOSPC.into());
        }
        (done, end) = (done + count, at + count as u64);
    }
    Ok(end)
}

/// Returns true if the file is not open on the server.
fn is_closed(error: &Error) -> bool {
    matches!(i32::from(error.errno().0), libc::EBADF | libc::ESTALE)
}
