//! `towline bench net --procs`: requests of many client processes without Towline. As with Towline, few threads
//! answer them all.

use super::processes;
use super::processor::{self, end_with_parent};
use super::raw::{Answers, accept, ask, connect, listen};
use super::raw_args::Args;
use super::result::Measured;
use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;

/// Most client processes.
pub(super) const PROCS_MAX: usize = 10_000;

/// Measures the requests of `args.procs` client processes together.
pub(super) fn measure(args: &Args) -> Result<Vec<Measured>, String> {
    args.check()?;
    let failed = |error: io::Error| format!("tcp: {error}");
    let threads = processor::usable().len().clamp(1, args.procs);
    let listener = listen().map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    // Also tells at once if there is nothing to send.
    let answers = (0..threads).map(|_| Answers::new(args)).collect::<io::Result<Vec<_>>>();
    let answers = answers.map_err(failed)?;
    let procs = args.procs;
    // These threads end with the process: when the measurement fails, too.
    std::thread::spawn(move || far_end(&listener, procs, answers));
    processes::together(procs, args.ramp, args.secs, |_, command| {
        command.args(["bench", "net", "--near", &address.to_string()]);
        command.args(["--secs", &args.secs.to_string()]);
        command.args(["--request", &args.request.to_string(), "--bs", &args.bytes().to_string()]);
        command.args(["--qd", &args.qd.to_string()]);
    })
}

/// Runs one of the client processes.
pub(super) fn near_end(args: &Args, address: SocketAddr) -> Result<(), String> {
    end_with_parent();
    let socket = connect(address).map_err(|error| format!("tcp: {error}"))?;
    let measured = move |left: f64| {
        let secs = args.secs.min(left);
        ask(&socket, &Args { ramp: left - secs, secs, ..args.clone() })
    };
    // The socket is closed before the result is told: nobody reads what is still under way.
    processes::take_part(move |left| {
        Ok(vec![measured(left).map_err(|error| format!("tcp: {error}"))?])
    })
}

/// Accepts all connections and answers their requests, on as many threads as there are `answers`.
fn far_end(listener: &TcpListener, procs: usize, answers: Vec<Answers>) {
    let mut shares: Vec<Vec<OwnedFd>> = answers.iter().map(|_| Vec::new()).collect();
    for number in 0..procs {
        let Ok(socket) = accept(listener) else { return };
        let threads = shares.len();
        shares[number % threads].push(socket);
    }
    for (sockets, mut answers) in shares.into_iter().zip(answers) {
        // If it fails, the connections are closed, which their clients report.
        std::thread::spawn(move || serve(&sockets, &mut answers));
    }
}

/// Answers the requests that come over these connections.
fn serve(sockets: &[OwnedFd], answers: &mut Answers) -> io::Result<()> {
    let ready = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    for (number, socket) in sockets.iter().enumerate() {
        let data = epoll::EventData::new_u64(number as u64);
        epoll::add(&ready, socket, data, epoll::EventFlags::IN)?;
    }
    let mut events = Vec::with_capacity(256);
    loop {
        match epoll::wait(&ready, spare_capacity(&mut events), None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        for event in events.drain(..) {
            let socket = &sockets[event.data.u64() as usize];
            if answers.one(socket).is_err() {
                // Its client has measured enough, or reports the end of the connection.
                epoll::delete(&ready, socket)?;
                let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
            }
        }
    }
}
