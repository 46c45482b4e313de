//! Serves an HTTP page with the server's counters for Prometheus.

use super::http::{self, Asked};
use super::resolve;
use rustix::event::{PollFd, PollFlags, poll};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

/// Maximum number of clients that are sending their requests. Another one takes the place of the oldest, so
/// that clients that connect and send nothing keep nobody out.
const CLIENTS_MAX: usize = 64;

/// Parses the address to listen on.
pub(crate) fn parse_address(text: &str) -> Result<SocketAddr, String> {
    resolve(text, "HOST:PORT")
}

/// Answers requests on a separate thread until the process ends.
pub(crate) fn start(
    address: SocketAddr,
    insecure: bool,
    page: impl Fn() -> String + Send + 'static,
) -> Result<SocketAddr, String> {
    if !address.ip().is_loopback() && !insecure {
        return Err(format!(
            "metrics on {address}: reachable from other machines; use loopback, or --insecure"
        ));
    }
    let listener = TcpListener::bind(address).map_err(|e| format!("metrics on {address}: {e}"))?;
    let bound = listener.local_addr().map_err(|e| format!("metrics on {address}: {e}"))?;
    listener.set_nonblocking(true).map_err(|e| format!("metrics on {address}: {e}"))?;
    let serve = move || {
        let mut clients = Vec::new();
        loop {
            turn(&listener, &mut clients, &page);
        }
    };
    std::thread::Builder::new()
        .name("towline-metrics".into())
        .spawn(serve)
        .map_err(|e| format!("metrics: {e}"))?;
    Ok(bound)
}

/// A client and the part of its request that has arrived.
struct Asking {
    stream: TcpStream,
    request: Vec<u8>,
}

/// Waits for input or a new client, and answers all complete requests.
fn turn(listener: &TcpListener, clients: &mut Vec<Asking>, page: &dyn Fn() -> String) {
    let ready = {
        let all = clients.iter().map(|client| PollFd::new(&client.stream, PollFlags::IN));
        let mut watched: Vec<_> = all.chain([PollFd::new(listener, PollFlags::IN)]).collect();
        if poll(&mut watched, None).is_err() {
            return;
        }
        watched.iter().map(|fd| !fd.revents().is_empty()).collect::<Vec<_>>()
    };
    let mut asked = ready.iter();
    clients.retain_mut(|client| {
        let more = asked.next() != Some(&true) || client.read();
        if !more {
            // A client may go away before it has its answer.
            let _ = client.answer(page);
        }
        more
    });
    if ready.last() != Some(&true) {
        return;
    }
    match listener.accept().and_then(|(stream, _)| stream.set_nonblocking(true).map(|()| stream)) {
        Ok(stream) => {
            if clients.len() == CLIENTS_MAX {
                clients.remove(0);
            }
            clients.push(Asking { stream, request: Vec::new() });
        }
        Err(error)
            if [ErrorKind::WouldBlock, ErrorKind::ConnectionAborted].contains(&error.kind()) => {}
        // Possibly out of descriptors: there may be some again later.
        Err(_) => std::thread::sleep(Duration::from_millis(100)),
    }
}

impl Asking {
    /// Reads the available input. Returns false when no more is needed or can come.
    fn read(&mut self) -> bool {
        let mut bytes = [0; 1024];
        match self.stream.read(&mut bytes) {
            Ok(0) => return false,
            Ok(count) => self.request.extend_from_slice(&bytes[..count]),
            Err(error) => return error.kind() == ErrorKind::WouldBlock,
        }
        !http::is_enough(&self.request)
    }

    fn answer(&mut self, page: &dyn Fn() -> String) -> std::io::Result<()> {
        let (status, body) = match http::asked(&self.request) {
            Asked::Metrics => ("200 OK", page()),
            Asked::Other => ("404 Not Found", "try /metrics\n".to_owned()),
            Asked::Wrong => ("405 Method Not Allowed", "only GET\n".to_owned()),
        };
        let length = body.len();
        let head = format!(
            "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
        );
        // A page has a few thousand bytes, which the socket accepts at once.
        self.stream.write_all((head + &body).as_bytes())
    }
}
