//! Queues without a device: the threads of a device, and how they end.

use super::*;
use std::sync::{Condvar, Mutex};

/// Longer than anything here takes: a wait of this length is a hang.
const EVER: Duration = Duration::from_secs(20);

/// Does it on a thread of its own, to see whether it ends.
fn in_time<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, waiting) = mpsc::channel();
    std::thread::spawn(move || done.send(work()));
    waiting.recv_timeout(EVER).expect("it hangs, or panicked")
}

type Made = Result<Box<dyn Backend>, Error>;

fn connects(_: u16, _: Sender<Event>) -> Made {
    struct Idle;
    impl Backend for Idle {
        fn begin(&mut self, _: crate::Request) {}
        fn turn(&mut self) {}
        fn finished(&mut self) -> Option<crate::Finished> {
            None
        }
        fn interest(&self) -> Option<(std::os::fd::RawFd, bool)> {
            None
        }
        fn deadline(&self) -> Option<Instant> {
            None
        }
    }
    Ok(Box::new(Idle))
}

/// What a queue tells that never gets a device.
fn told(backend: fn(u16, Sender<Event>) -> Made) -> Vec<Event> {
    let (tell, events) = mpsc::channel();
    let shape = Shape { number: 0, depth: 1, buffer_bytes: 4096 };
    let device = mpsc::channel().1;
    let thread = std::thread::spawn(move || {
        run(&device, shape, &AtomicU64::new(0), &backend, &tell);
    });
    let _ = thread.join();
    events.try_iter().collect()
}

#[test]
fn a_queue_tells_how_it_ended_whatever_happens() {
    assert!(matches!(told(connects)[..], [Event::Connected, Event::Ended(true)]));
    let refused = |_, _| Err(Error::Protocol("no more connections"));
    assert!(matches!(told(refused)[..], [Event::Ended(false)]));
    let panics = |_, _| panic!("for a test");
    assert!(matches!(told(panics)[..], [Event::Ended(false)]));
}

#[test]
fn one_queue_that_ends_early_is_enough() {
    let wait = |told: &[Event]| {
        let (tell, events) = mpsc::channel();
        told.iter().for_each(|event| tell.send(*event).unwrap());
        in_time(move || await_each(&events, 2, |event| matches!(event, Event::Connected)))
    };
    let connected = Event::Connected;
    wait(&[connected, Event::Resized(7), Event::Epoch(7), connected]).unwrap();
    wait(&[connected, Event::Ended(false)]).unwrap_err();
}

#[test]
fn a_failed_queue_is_not_waited_for_with_the_others() {
    let (tell, events) = mpsc::channel();
    let (stopped, never) = mpsc::channel::<()>();
    let failed = tell.clone();
    let threads = vec![
        std::thread::spawn(move || failed.send(Event::Ended(false)).unwrap()),
        std::thread::spawn(move || never.recv().unwrap_or_default()),
    ];
    in_time(move || attend(&events, threads, |_| Ok(()), |_| ())).unwrap_err();
    drop((tell, stopped));
}

#[test]
fn a_stopped_device_tells_of_its_disk_until_then() {
    let (tell, events) = mpsc::channel();
    let threads = vec![std::thread::spawn(move || {
        tell.send(Event::Resized(512)).unwrap();
        tell.send(Event::Epoch(7)).unwrap();
        tell.send(Event::Ended(true)).unwrap();
    })];
    let told = Arc::new(Mutex::new(Vec::new()));
    let seen = told.clone();
    let attended = move || {
        let note = |number| seen.lock().unwrap().push(number);
        let resize = |bytes| {
            note(bytes);
            Ok(())
        };
        attend(&events, threads, resize, note)
    };
    in_time(attended).unwrap();
    assert_eq!(*told.lock().unwrap(), [512, 7]);
}

#[test]
fn a_queue_that_fetches_after_a_stop_is_stopped_as_well() {
    /// As the kernel does it: a stop ends the commands that it has, not later ones.
    #[derive(Default)]
    struct Commands {
        stops: u32,
        given_at: Option<u32>,
    }
    let shared = Arc::new((Mutex::new(Commands::default()), Condvar::new()));
    let kernel = shared.clone();
    let queue = std::thread::spawn(move || {
        let (commands, stopped) = &*kernel;
        let commands = commands.lock().unwrap();
        let mut commands = stopped.wait_while(commands, |c| c.stops == 0).unwrap();
        let given_at = commands.stops;
        commands.given_at = Some(given_at);
        drop(stopped.wait_while(commands, |c| c.stops == given_at).unwrap());
    });
    in_time(move || {
        end(vec![queue], || {
            shared.0.lock().unwrap().stops += 1;
            shared.1.notify_all();
        });
    });
}

#[test]
fn a_device_is_told_from_a_later_one_of_its_number() {
    let place = tempfile::tempdir().unwrap();
    let [path, later] = ["ublkc0", "later"].map(|name| place.path().join(name));
    let of = |path: &std::path::Path| identity(path.to_str().unwrap());
    assert_eq!(of(&path), Err(rustix::io::Errno::NOENT));
    std::fs::write(&path, "").unwrap();
    let first = of(&path).unwrap();
    assert_eq!(of(&path), Ok(first.clone()));
    std::fs::write(&later, "").unwrap();
    std::fs::rename(&later, &path).unwrap();
    assert_ne!(of(&path), Ok(first));
}
