//! Keeps several connections at work on one thread, as the same number of clients on other machines would.
//!
//! With a thread for each connection, each answer would wake another thread, which sends from its own pages,
//! long evicted from every cache. If clients and server share the processors, that cost would be measured,
//! too.

use super::nbd_client::{Client, Load, Outcome, PATIENCE, Run};
use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};
use std::io;
use std::time::Instant;

/// Runs the load on each connection until the limit.
pub(super) fn run(clients: &mut [Client], load: Load) -> io::Result<Vec<Outcome>> {
    if let [client] = clients {
        return Ok(vec![client.run(load)?]);
    }
    let first = Instant::now();
    let ready = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let mut runs: Vec<Run> = Vec::with_capacity(clients.len());
    for (number, client) in clients.iter_mut().enumerate() {
        // All connections end at the same time.
        let limit = load.limit.saturating_sub(first.elapsed());
        let run = client.begin(Load { limit, ..load })?;
        client.send()?;
        runs.push(run);
        let data = epoll::EventData::new_u64(number as u64);
        epoll::add(&ready, client.socket(), data, epoll::EventFlags::IN)?;
    }
    let patience = Timespec::try_from(PATIENCE).map_err(io::Error::other)?;
    let mut left = runs.iter().filter(|run| run.goes_on()).count();
    let mut events = Vec::with_capacity(256);
    while left > 0 {
        match epoll::wait(&ready, spare_capacity(&mut events), Some(&patience)) {
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        for event in events.drain(..) {
            let number = event.data.u64() as usize;
            let (client, run) = (&mut clients[number], &mut runs[number]);
            while run.goes_on() {
                client.step(run)?;
                if !client.has_input() {
                    break;
                }
            }
            if run.goes_on() {
                client.send()?;
            } else {
                // Only the end of the connection can still arrive.
                epoll::delete(&ready, client.socket())?;
                left -= 1;
            }
        }
    }
    clients.iter_mut().zip(runs).map(|(client, run)| client.end(run)).collect()
}
