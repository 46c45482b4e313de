//! Sends what programs write to files of far servers (`instance::behind`).

use super::directory::RunDirectory;
use super::pending::{Pending, UnderWay};
use super::source::Opened;
use std::collections::{HashSet, VecDeque};
use std::io;
use std::ops::RangeInclusive;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};
use towline_client::{Client, Error, File, Operation, Options, Url};
use towline_instance::State;
use towline_instance::behind::{Behind, Place, Queue, RECORD_BYTES_MAX};
use towline_wire::limits::{FRAGMENT_BYTES_MAX, INLINE_BYTES_MAX};

/// How long the end of a run waits for data to be written.
const WRITTEN: Duration = Duration::from_secs(60);
/// Maximum number of bytes of a request: there are several under way.
const REQUEST_BYTES: RangeInclusive<usize> = 64 << 10..=FRAGMENT_BYTES_MAX;
/// Bytes that may be under way: at least and at most, and at first.
const WINDOW_BYTES: RangeInclusive<usize> = RECORD_BYTES_MAX..=8 << 20;
const WINDOW_BYTES_FIRST: usize = 1 << 20;
/// The most bytes that programs may write before the room is looked at again.
const ROOM_BYTES_MAX: i64 = 1 << 30;
/// Less room than this is looked at again, but not more often than this.
const ROOM_LOW: i64 = 128 << 20;
const ROOM_AGAIN: Duration = Duration::from_millis(500);

/// The writes behind of a run.
pub(super) struct Writes {
    directory: PathBuf,
    state: Arc<State>,
    /// By mount number.
    urls: Vec<Url>,
    under_way: Arc<Pending>,
    is_over: Arc<AtomicBool>,
}

impl Writes {
    /// For the servers of a run, by mount number.
    pub(super) fn new(directory: &RunDirectory, state: Arc<State>, urls: Vec<Url>) -> Self {
        let (under_way, is_over) = (Arc::default(), Arc::default());
        Self { directory: directory.path().to_owned(), state, urls, under_way, is_over }
    }

    /// Serves the mounts for which programs have asked for it since the last call.
    pub(super) fn work(&self) {
        for mount in 0..self.urls.len() {
            let behind = self.state.behind(mount);
            if behind.is_asked()
                && let Err(error) = self.serve(mount)
            {
                behind.refuse();
                log::warn!("programs wait for each of their writes to a far server: {error}");
            }
        }
    }

    fn serve(&self, mount: usize) -> io::Result<()> {
        let queue = Queue::create(self.directory.as_os_str().as_bytes(), mount)?;
        let server = Server {
            state: Arc::clone(&self.state),
            url: self.urls[mount].clone(),
            client: None,
            known: HashSet::new(),
        };
        let stream = Arc::new(Stream {
            mount,
            state: Arc::clone(&self.state),
            queue,
            server: Mutex::new(server),
            flight: Mutex::new(Flight { ranges: VecDeque::new(), window: WINDOW_BYTES_FIRST }),
            landed: Condvar::new(),
        });
        let (sender, sent) = mpsc::channel();
        let begin = || std::thread::Builder::new().name("writes".to_owned());
        let ends = Ends { stream: Arc::clone(&stream), trips: [None; 2], narrowed: Instant::now() };
        begin().spawn(move || ends.finish_all(&sent))?;
        let (under_way, is_over) = (self.under_way.begin(), Arc::clone(&self.is_over));
        begin().spawn(move || stream.send_all(&sender, &is_over, under_way)).map(drop)
    }

    /// Waits, after all processes have ended, until everything is written.
    pub(super) fn finish(&self) {
        self.is_over.store(true, Ordering::Release);
        (0..self.urls.len()).for_each(|mount| self.state.behind(mount).nudge());
        if !self.under_way.wait(WRITTEN) {
            log::warn!("not everything that programs wrote has reached its server");
        }
    }
}

/// What is written to a mount. One thread sends what is in the queue; another one waits for the answers.
struct Stream {
    mount: usize,
    state: Arc<State>,
    queue: Queue,
    server: Mutex<Server>,
    flight: Mutex<Flight>,
    /// Something is done.
    landed: Condvar,
}

/// What is under way.
struct Flight {
    /// Where it is written, and how much, in the order of the queue.
    ranges: VecDeque<(Place, usize)>,
    /// How many bytes it may be.
    window: usize,
}

/// A request under way.
struct Sent {
    place: Place,
    length: usize,
    /// The numbers of its first record, and behind its last one.
    records: (u32, u32),
    at: Instant,
    started: Result<Operation<(usize, Vec<u8>)>, Error>,
}

impl Flight {
    fn bytes(&self) -> usize {
        self.ranges.iter().map(|(_, length)| length).sum()
    }

    /// Returns true if a write does not overlap with what is under way, which it must not overtake.
    fn is_free(&self, place: &Place, length: usize) -> bool {
        let overlaps = |(other, other_length): &(Place, usize)| {
            other.inode == place.inode
                && other.offset < place.offset.saturating_add(length as u64)
                && place.offset < other.offset.saturating_add(*other_length as u64)
        };
        !self.ranges.iter().any(overlaps)
    }
}

impl Stream {
    fn flight(&self) -> MutexGuard<'_, Flight> {
        self.flight.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn server(&self) -> MutexGuard<'_, Server> {
        self.server.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends what programs write until the run is over.
    fn send_all(&self, sent: &mpsc::Sender<Sent>, is_over: &AtomicBool, _under_way: UnderWay) {
        let behind = self.state.behind(self.mount);
        let mut looked = None;
        let mut next = behind.added();
        self.look_at_room(behind, &mut looked);
        self.queue.limit(WINDOW_BYTES_FIRST);
        behind.begin(std::process::id(), rustix::process::geteuid().as_raw());
        loop {
            if behind.added() == next {
                if behind.is_idle() {
                    self.server().forget_files();
                    if is_over.load(Ordering::Acquire) {
                        break;
                    }
                }
                self.look_at_room(behind, &mut looked);
                behind.wait_for(next);
            } else if let Some(request) = self.send_next(behind, next) {
                next = request.records.1;
                if sent.send(request).is_err() {
                    break;
                }
                self.look_at_room(behind, &mut looked);
            }
        }
        if let Some(client) = self.server().client.take() {
            client.close();
        }
    }

    /// Sends the records from this number on that can be sent together. Waits for room, or for what they must not
    /// overtake.
    fn send_next(&self, behind: Behind<'_>, number: u32) -> Option<Sent> {
        let (first, _, first_length) = self.queue.get(behind, number)?;
        let must_wait = |flight: &mut Flight| {
            flight.bytes() >= flight.window || !flight.is_free(&first, first_length)
        };
        let waited = self.landed.wait_while(self.flight(), must_wait);
        let mut flight = waited.unwrap_or_else(PoisonError::into_inner);
        let most = (flight.window / 4).clamp(*REQUEST_BYTES.start(), *REQUEST_BYTES.end());
        let mut data = Vec::new();
        let mut end = number;
        while let Some((place, from, length)) = self.queue.get(behind, end) {
            let offset = first.offset.wrapping_add(data.len() as u64);
            let is_long = data.len() + length > most && end != number;
            if place != (Place { offset, ..first }) || is_long || !flight.is_free(&place, length) {
                break;
            }
            self.queue.load(from, length, &mut data);
            end = end.wrapping_add(1);
        }
        let (length, at) = (data.len(), Instant::now());
        flight.ranges.push_back((first, length));
        drop(flight);
        let started = self.server().start(&first, data);
        Some(Sent { place: first, length, records: (number, end), at, started })
    }

    /// Tells programs how much more they may write, if they are about to have used it up.
    fn look_at_room(&self, behind: Behind<'_>, looked: &mut Option<Instant>) {
        let was_looked = looked.is_some_and(|looked| looked.elapsed() < ROOM_AGAIN);
        if behind.room() >= ROOM_LOW || was_looked {
            return;
        }
        if let Some(root) = self.state.root(self.mount)
            && let Ok(room) = self.server().room(root.handle)
        {
            // Half of it is for others.
            let under_way = self.flight().window as u64;
            let bytes = i64::try_from(room.saturating_sub(under_way) / 2);
            behind.set_room(bytes.map_or(ROOM_BYTES_MAX, |bytes| bytes.min(ROOM_BYTES_MAX)));
        }
        *looked = Some(Instant::now());
    }
}

/// Waits for the answers.
struct Ends {
    stream: Arc<Stream>,
    /// The shortest time that the answer to a request took, whose data came with it, or was asked for.
    trips: [Option<Duration>; 2],
    /// When the window was reduced.
    narrowed: Instant,
}

impl Ends {
    fn finish_all(mut self, sent: &mpsc::Receiver<Sent>) {
        while let Ok(request) = sent.recv() {
            self.finish(request);
        }
    }

    /// Waits for the answer to the first request under way.
    fn finish(&mut self, request: Sent) {
        let Sent { place, length, records, at, started } = request;
        let stream = Arc::clone(&self.stream);
        let behind = stream.state.behind(stream.mount);
        let written = started.and_then(Operation::wait).map(|(count, _)| count);
        let took = at.elapsed();
        let written = match written {
            Ok(count) if count >= length => {
                self.adapt(took, length);
                Ok(())
            }
            // A whole write tells why.
            Ok(_) => self.write_again(behind, &place, records),
            Err(error) if is_closed(&error) => {
                // After a restart of the server, nobody may have asked for this file again yet.
                let reclaimed = stream.server().reclaim(&place);
                reclaimed.and_then(|()| self.write_again(behind, &place, records))
            }
            Err(error) => Err(error),
        };
        if let Err(error) = written {
            self.fail(&place, &error);
        }
        stream.flight().ranges.pop_front();
        stream.landed.notify_all();
        behind.finish(records.1);
        if behind.is_idle() {
            // What comes next may have to wait for this.
            behind.nudge();
        }
    }

    /// Writes once more, as a whole, what is still in the queue.
    fn write_again(
        &self,
        behind: Behind<'_>,
        place: &Place,
        (mut number, end): (u32, u32),
    ) -> Result<(), Error> {
        let queue = &self.stream.queue;
        let mut data = Vec::new();
        while number != end
            && let Some((_, from, length)) = queue.get(behind, number)
        {
            queue.load(from, length, &mut data);
            number = number.wrapping_add(1);
        }
        self.stream.server().write(place, &data)
    }

    /// Adapts how much may be under way to how long an answer took: whoever asks the server for anything waits for
    /// all of it.
    fn adapt(&mut self, took: Duration, length: usize) {
        let known = &mut self.trips[usize::from(length > INLINE_BYTES_MAX)];
        let trip = known.map_or(took, |trip| trip.min(took));
        *known = Some(trip);
        let mut flight = self.stream.flight();
        if took < trip + trip / 4 {
            flight.window = (flight.window + length).min(*WINDOW_BYTES.end());
        } else if took > trip + trip / 2 && self.narrowed.elapsed() > took {
            // The answers that come now were asked for with what was too much.
            self.narrowed = Instant::now();
            flight.window = (flight.window / 4 * 3).max(*WINDOW_BYTES.start());
        }
        self.stream.queue.limit(flight.window);
    }

    /// Has the programs that have the file open be told, and the user.
    fn fail(&self, place: &Place, error: &Error) {
        let Some(entry) = self.stream.state.entry(place.entry) else { return };
        if entry.handle.load(Ordering::Acquire) == place.handle
            && entry.fail_write(i32::from(error.errno().0))
        {
            let config = self.stream.state.config().unwrap_or_default();
            let prefix = config.mounts.get(self.stream.mount).map_or(&b""[..], |at| &at.prefix);
            let path = [prefix, b"/", &entry.path()].concat();
            let path = String::from_utf8_lossy(&path);
            log::warn!("{path}: what a program has written to it is lost: {error}");
        }
    }
}

/// The server of a mount.
struct Server {
    state: Arc<State>,
    url: Url,
    /// A session of its own, in which what is written does not delay the keeper's other requests.
    client: Option<Client>,
    /// Files that the client knows, by handle: it asks for them again after a restart of the server.
    known: HashSet<u64>,
}

impl Server {
    /// Returns the session, and connects if there is none.
    fn client(&mut self) -> Result<&Client, Error> {
        let client = match self.client.take() {
            Some(client) => client,
            None => {
                let mut options = Options::default();
                options.family = self.state.config().map_or(0, |config| config.family);
                Client::connect(&self.url.transport, options)?
            }
        };
        Ok(self.client.insert(client))
    }

    /// Sends a write.
    fn start(
        &mut self,
        place: &Place,
        data: Vec<u8>,
    ) -> Result<Operation<(usize, Vec<u8>)>, Error> {
        let client = self.client()?.clone();
        if self.known.insert(place.handle)
            && let Some(entry) = self.state.entry(place.entry)
        {
            Opened::of(entry).make_known(&client, &self.url);
        }
        client.with_handle(place.handle, 0, |file| file.start_write_at(data, place.offset))
    }

    /// Writes all of this and waits for it.
    fn write(&mut self, place: &Place, data: &[u8]) -> Result<(), Error> {
        let write = |file: &File| file.write_all_at(data, place.offset);
        self.client()?.with_handle(place.handle, 0, write)
    }

    /// Asks the server for a file again, for all processes of the run.
    fn reclaim(&mut self, place: &Place) -> Result<(), Error> {
        let client = self.client()?.clone();
        let entry = self.state.entry(place.entry);
        entry.map_or(Ok(()), |entry| Opened::of(entry).reclaim(&client, &self.url))
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

/// Returns true if the file is not open on the server.
fn is_closed(error: &Error) -> bool {
    matches!(i32::from(error.errno().0), libc::EBADF | libc::ESTALE)
}
