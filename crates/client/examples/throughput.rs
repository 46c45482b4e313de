//! Reads a remote file from start to end, again and again for two seconds, in pieces of a given
//! size, and prints GB/s: `throughput URL [BYTES]`.

use std::time::{Duration, Instant};
use towline_client::{Client, Options, Url};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let text = std::env::args().nth(1).ok_or("usage: throughput URL [BYTES]")?;
    let piece = std::env::args().nth(2).map_or(Ok(1 << 20), |bytes| bytes.parse())?;
    let url = Url::parse(&text)?;
    let client = Client::connect(&url.transport, Options::default())?;
    let file = client.attach(&url.export)?.open(&url.path, 0, 0)?;
    let mut buffer = vec![0; piece];
    let (start, mut total, mut offset) = (Instant::now(), 0, 0);
    while start.elapsed() < Duration::from_secs(2) {
        let count = file.read_at(&mut buffer, offset)?;
        offset = if count < piece { 0 } else { offset + count as u64 };
        total += count;
    }
    println!("{:.2} GB/s", total as f64 / start.elapsed().as_secs_f64() / 1e9);
    Ok(())
}
