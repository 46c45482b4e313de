//! Shows the network API in the papers' terms, with two programs in one process, linked over a Unix
//! socket. The client imports buffers, globalizes them, packs the descriptor and sends it. The server
//! unpacks it, opens a context, works on the data, and acknowledges by closing the context.
//!
//! `cargo run --release -p towline-transfer --example network_api`

use std::io::Write;
use std::time::{Duration, Instant};
use towline_transfer::{Access, Address, Choice, Error, Global, Intent, Node, Options, import};

const LIMIT: Option<Duration> = Some(Duration::from_secs(10));
const BYTES: usize = 1024 * 1024;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::temp_dir().join(format!("towline-network-api-{}", std::process::id()));
    let server = Node::new(Options::default())?;
    server.listen(&Address::Unix(path.clone()))?;
    let serving = std::thread::spawn(move || serve(&server));

    let client = Node::new(Options::default())?;
    let server = client.connect(&Address::Unix(path))?;

    // Import: ordinary memory, shared memory and a file become local aggregates, without copying.
    let memory = import::shared_memory(BYTES, Access::Read)?;
    memory.copy_in(0, &vec![2; BYTES]);
    let mut file = tempfile::tempfile()?;
    file.write_all(&vec![3; BYTES])?;
    let buffers = [
        ("small host memory", import::host(vec![1; 8 * 1024])),
        ("host memory", import::host(vec![1; BYTES])),
        ("shared memory", import::shared(&memory)),
        ("a file", import::file(file, 0, BYTES as u64)?),
    ];
    println!("the client's buffers, and what the server did with them:");
    for (name, aggregate) in buffers {
        // Globalize: the buffers get a name that any node may hold. Pack: the name becomes bytes.
        let global = client.globalize(aggregate, Access::Read)?;
        let descriptor = global.pack()?;
        client.send(server, &descriptor)?;
        let answer = client.receive(LIMIT)?;
        println!("  {name:<18} descriptor of {} bytes; {}", descriptor.len(), text(&answer.bytes));
        // The server has closed its context, so the buffers belong to the client again.
        client.acknowledged(&global, 1, LIMIT)?;
        client.reclaim(&global, LIMIT)?;
    }

    // Buffers for the server to write to: it opens them for writing, and closing brings the data back.
    let global = client.globalize(import::host(vec![0; 100_000]), Access::ReadWrite)?;
    client.send(server, &global.pack()?)?;
    let answer = client.receive(LIMIT)?;
    let written = client.reclaim(&global, LIMIT)?.to_vec()?;
    println!("  {:<18} {}; first byte now {}", "to be written", text(&answer.bytes), written[0]);
    client.disconnect(server);
    serving.join().map_err(|_| "server failed")??;
    println!("\nwhat the client counted:\n{}", client.counts());
    println!("the rule:\n{}", towline_transfer::choose::table());
    Ok(())
}

#[test]
fn runs_to_its_end() -> Result<(), Box<dyn std::error::Error>> {
    main()
}

fn text(bytes: &[u8]) -> std::borrow::Cow<'_, str> {
    String::from_utf8_lossy(bytes)
}

fn serve(node: &Node) -> Result<(), Error> {
    loop {
        let message = match node.receive(Some(Duration::from_millis(200))) {
            Ok(message) => message,
            Err(Error::TimedOut) if node.peers().is_empty() => return Ok(()),
            Err(Error::TimedOut) => continue,
            Err(error) => return Err(error),
        };
        // Unpack: every field is checked; the owner checks again whether the buffers exist.
        let global = Global::unpack(&message.bytes)?;
        let writable = global.parts().all(|part| part.access == Access::ReadWrite);
        let intent = if writable { Intent::Write } else { Intent::Read };

        let start = Instant::now();
        // Choice::Forced(Strategy::Pull), for example, would override the rule.
        let mut context = node.open(&global, intent, Choice::Automatic)?;
        let opened = start.elapsed();
        let ways: Vec<_> = context.ways().map(|(way, bytes)| format!("{way} {bytes}")).collect();
        // Work: add up the bytes, or write some.
        let result = if writable {
            context.write_at(0, &vec![7; global.len() as usize])?;
            "wrote sevens".to_string()
        } else {
            let sum: u64 = context.to_vec()?.iter().map(|byte| u64::from(*byte)).sum();
            format!("sum {sum}")
        };
        // End of access: acknowledges, and brings back what was written.
        context.close()?;
        let answer = format!(
            "{result} by {} bytes, opened in {opened:?}, closed after {:?}",
            ways.join(" + "),
            start.elapsed()
        );
        node.send(message.peer, answer.as_bytes())?;
    }
}
