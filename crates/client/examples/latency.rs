//! Times operations on one remote file: `latency URL`, for example
//! `cargo run --release -p towline-client --example latency towline://127.0.0.1/data/file`.

use std::time::Instant;
use towline_client::{Client, Error, File, Options, Url};

const ROUNDS: usize = 20_000;

fn median(mut run: impl FnMut() -> Result<(), Error>) -> Result<f64, Error> {
    let mut times = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        let start = Instant::now();
        run()?;
        times.push(start.elapsed());
    }
    times.sort_unstable();
    Ok(times[ROUNDS / 2].as_secs_f64() * 1e6)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let text = std::env::args().nth(1).ok_or("usage: latency URL")?;
    let url = Url::parse(&text)?;
    let client = Client::connect(&url.transport, Options::default())?;
    let root: File = client.attach(&url.export)?;
    let file = root.open(&url.path, 0, 0)?;
    let mut buffer = [0; 4096];
    let stat = median(|| root.stat_path(&url.path, true).map(drop))?;
    let whole = median(|| root.read_path(&url.path, 0, &mut buffer).map(drop))?;
    let read = median(|| file.read_at(&mut buffer, 0).map(drop))?;
    println!("medians in us: stat {stat:.1}, open+read+close {whole:.1}, read of 4 KiB {read:.1}");
    Ok(())
}
