//! An HTTP page with the server's counters, for Prometheus.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

/// Longest request that is read.
const REQUEST_BYTES_MAX: u64 = 8192;

/// Answers on a thread of its own until the process ends.
pub(crate) fn start(
    address: SocketAddr,
    insecure: bool,
    page: impl Fn() -> String + Send + 'static,
) -> Result<SocketAddr, String> {
    if !address.ip().is_loopback() && !insecure {
        return Err(format!(
            "metrics on {address}: reachable from other machines; use loopback, or say --insecure"
        ));
    }
    let listener = TcpListener::bind(address).map_err(|e| format!("metrics on {address}: {e}"))?;
    let bound = listener.local_addr().map_err(|e| format!("metrics on {address}: {e}"))?;
    let serve = move || {
        for stream in listener.incoming().flatten() {
            // A client that goes away before it has its answer is no concern of ours.
            let _ = answer(&stream, &page);
        }
    };
    std::thread::Builder::new()
        .name("towline-metrics".into())
        .spawn(serve)
        .map_err(|e| format!("metrics: {e}"))?;
    Ok(bound)
}

fn answer(mut stream: &TcpStream, page: &dyn Fn() -> String) -> std::io::Result<()> {
    stream.set_read_timeout(Some(Duration::from_secs(2)))?;
    stream.set_write_timeout(Some(Duration::from_secs(2)))?;
    let mut lines = BufReader::new(stream.take(REQUEST_BYTES_MAX)).lines();
    let request = lines.next().transpose()?.unwrap_or_default();
    for line in lines {
        if line?.is_empty() {
            break;
        }
    }
    let (status, body) = match request.split(' ').take(2).collect::<Vec<_>>()[..] {
        ["GET", "/metrics"] => ("200 OK", page()),
        ["GET", _] => ("404 Not Found", "try /metrics\n".to_owned()),
        _ => ("405 Method Not Allowed", "only GET\n".to_owned()),
    };
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())
}
