//! Prints the GB/s of each strategy over each link, next to memcpy: open a context, copy its bytes into
//! memory of the program, close it. Each figure is the fastest of many short rounds, which on a busy
//! machine is the one disturbed least.
//!
//! `cargo run --release -p towline-transfer --example strategies`

use std::io::Write;
use std::time::{Duration, Instant};
use towline_transfer::{
    Access, Address, Choice, Error, Global, Intent, Node, Options, Strategy, import,
};

const SIZES: [usize; 3] = [4 * 1024, 64 * 1024, 1024 * 1024];
const ROUND: Duration = Duration::from_millis(8);
const ROUNDS: usize = if cfg!(test) { 1 } else { 60 };

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("{:<26}{:>24}{:>24}{:>24}", "GB/s (us for each)", "4 KiB", "64 KiB", "1 MiB");
    print!("{:<26}", "memcpy");
    for size in SIZES {
        let source = vec![1u8; size];
        let mut target = vec![0u8; size];
        report(size, || {
            std::hint::black_box(&mut target).copy_from_slice(std::hint::black_box(&source));
            Ok(())
        })?;
    }
    println!();
    for (name, rings) in [("tcp", false), ("unix", false), ("shm", true)] {
        link(name, rings)?;
    }
    Ok(())
}

#[test]
fn runs_to_its_end() -> Result<(), Box<dyn std::error::Error>> {
    main()
}

fn link(name: &str, rings: bool) -> Result<(), Box<dyn std::error::Error>> {
    let options = Options { rings, ..Options::default() };
    let (owner, receiver) = (Node::new(options)?, Node::new(options)?);
    let address = if name == "tcp" {
        Address::parse("tcp://127.0.0.1:0")?
    } else {
        Address::Unix(std::env::temp_dir().join(format!("towline-bench-{}", std::process::id())))
    };
    let address = owner.listen(&address)?;
    let server = owner.clone();
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let stopped = stop.clone();
    let serving = std::thread::spawn(move || -> Result<(), Error> {
        while !stopped.load(std::sync::atomic::Ordering::Relaxed) {
            server.serve(Duration::from_millis(100))?;
        }
        Ok(())
    });
    receiver.connect(&address)?;
    for (memory, strategy) in [
        ("host", Strategy::Inline),
        ("host", Strategy::Pull),
        ("file", Strategy::Pull),
        ("host", Strategy::PullDirect),
        ("shared", Strategy::Map),
    ] {
        print!("{:<26}", format!("{name} {memory} {strategy:?}"));
        for size in SIZES {
            let global = globalize(&owner, memory, size)?;
            let mut target = vec![0; size];
            let mut once = || {
                let context = receiver.open(&global, Intent::Read, Choice::Forced(strategy))?;
                context.read_at(0, &mut target)?;
                context.close()
            };
            match once() {
                Ok(()) => report(size, once)?,
                Err(Error::Strategy(_)) => print!("{:>24}", "-"),
                Err(error) => return Err(error.into()),
            }
        }
        println!();
    }
    write_back(name, &owner, &receiver)?;
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    serving.join().map_err(|_| "owner failed")??;
    Ok(())
}

/// Measures the way back: data is written into the owner's shared memory.
fn write_back(name: &str, owner: &Node, writer: &Node) -> Result<(), Error> {
    let (from, _) = owner.peers()[0];
    owner.grant_push(from, 8)?;
    owner.send(from, b"granted")?;
    writer.receive(None)?;
    for (memory, strategy) in [("shared", Strategy::Push), ("shared", Strategy::Pull)] {
        print!("{:<26}", format!("{name} {memory} write {strategy:?}"));
        for size in SIZES {
            let memory = import::shared_memory(size, Access::ReadWrite)?;
            let global = owner.globalize(import::shared(&memory), Access::ReadWrite)?;
            let source = vec![3; size];
            report(size, || {
                let choice = Choice::Forced(strategy);
                let mut context = writer.open(&global, Intent::Write, choice)?;
                context.write_at(0, &source)?;
                context.close()
            })?;
        }
        println!();
    }
    Ok(())
}

fn globalize(owner: &Node, kind: &str, size: usize) -> Result<Global, Error> {
    let local = match kind {
        "shared" => {
            let memory = import::shared_memory(size, Access::Read)?;
            memory.copy_in(0, &vec![2; size]);
            import::shared(&memory)
        }
        "file" => {
            let mut file = tempfile::tempfile()?;
            file.write_all(&vec![3; size])?;
            import::file(file, 0, size as u64)?
        }
        _ => import::host(vec![1; size]),
    };
    owner.globalize(local, Access::Read)
}

fn report(size: usize, mut once: impl FnMut() -> Result<(), Error>) -> Result<(), Error> {
    let mut seconds = f64::MAX;
    for _ in 0..ROUNDS {
        let (start, mut count) = (Instant::now(), 0u32);
        while start.elapsed() < ROUND {
            once()?;
            count += 1;
        }
        seconds = seconds.min(start.elapsed().as_secs_f64() / f64::from(count));
    }
    let text = format!("{:.2} ({:.1})", size as f64 / seconds / 1e9, seconds * 1e6);
    print!("{text:>24}");
    let _ = std::io::stdout().flush();
    Ok(())
}
