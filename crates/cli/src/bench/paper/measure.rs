//! Measures bandwidth and latency of each system, by size and number of requests.

use super::server::Server;
use super::{Args, DiskName, Files, Point, escaped, limit, local, median};
use crate::bench::nbd_client::{Client, Load, Order, Outcome};
use std::collections::HashMap;

/// A system that is compared.
#[derive(Clone, Copy, Debug)]
pub(super) struct System {
    pub(super) name: &'static str,
    /// The options of its disk.
    pub(super) options: &'static str,
    pub(super) order: Order,
    /// Writes are measured, too, since this system's differ from those of the others.
    pub(super) writes: bool,
}

const STAGED: System =
    System { name: "staged", options: ":cached:staged", order: Order::Ascending, writes: true };
const SENDFILE: System = System {
    name: "sendfile",
    options: ":cached:sendfile",
    order: Order::Ascending,
    writes: false,
};
const DIRECT: System =
    System { name: "direct", options: ":direct:serial", order: Order::Ascending, writes: false };
const SYNCHRONISED: System =
    System { name: "synchronised", options: ":direct", order: Order::Ascending, writes: true };
const STREAMS: System =
    System { name: "streams", options: ":direct", order: Order::Any, writes: false };

/// Returns the systems to measure on a disk.
fn systems(disk: DiskName) -> Vec<System> {
    let memory = |system| System {
        options: if system == "direct" { ":serial" } else { "" },
        ..match system {
            "direct" => DIRECT,
            _ => SYNCHRONISED,
        }
    };
    match disk {
        DiskName::Plain => vec![STAGED, SENDFILE, DIRECT, SYNCHRONISED, STREAMS],
        DiskName::Stripe => vec![STAGED, SENDFILE, DIRECT, SYNCHRONISED, STREAMS],
        DiskName::Delay => {
            vec![memory("direct"), memory("synchronised"), System { options: "", ..STREAMS }]
        }
    }
}

/// Delay and bandwidth of the delayed disk as an option: 200 us and 1 GiB/s.
const DELAY: &str = "200:1G";
/// The same in seconds and in bytes per second.
const DELAY_IS: (f64, f64) = (200e-6, (1 << 30) as f64);

/// Returns the seconds that the delayed disk takes for one read of `size` bytes.
pub(super) fn delay_seconds(size: u64) -> f64 {
    DELAY_IS.0 + size as f64 / DELAY_IS.1
}

/// Returns the `--disk` argument for a disk with these options.
pub(super) fn export(disk: DiskName, files: &Files, args: &Args, options: &str) -> String {
    match disk {
        DiskName::Plain => format!("d={}{options}", escaped(&files.plain())),
        DiskName::Stripe => {
            let [even, odd] = files.members().map(|path| escaped(&path));
            format!("d=stripe:64K:{even},{odd}{options}")
        }
        DiskName::Delay => format!("d=delay:{}:{DELAY}{options}", args.span),
    }
}

/// Identifies one measured point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    disk: DiskName,
    system: &'static str,
    writes: bool,
    size: u64,
    outstanding: usize,
}

#[derive(Default)]
struct Samples {
    rate: Vec<f64>,
    whole: Vec<f64>,
    first: Vec<f64>,
    stages: Vec<[f64; 3]>,
    cpu: Vec<f64>,
}

/// Measures all systems on all disks.
pub(super) fn all(args: &Args, files: &Files) -> Result<Vec<Point>, String> {
    let mut servers = Vec::new();
    for disk in &args.disks {
        for system in systems(*disk) {
            let server = Server::start(&export(*disk, files, args, system.options), None, None)?;
            servers.push((*disk, system, server));
        }
    }
    let network = Server::start(&format!("d=mem:{}", args.span), None, None)?;
    fill(&network, args.span).map_err(|error| format!("filling memory: {error}"))?;
    let mut order = Vec::new();
    let mut samples: HashMap<Key, Samples> = HashMap::new();
    let mut note = |key: Key, outcome: &Outcome, disk_us: Option<f64>, cpu: Option<f64>| {
        let entry = samples.entry(key).or_insert_with(|| {
            order.push(key);
            Samples::default()
        });
        entry.rate.push(outcome.bytes as f64 / outcome.seconds.max(1e-9));
        entry.whole.push(median(outcome.whole_us.clone()));
        if !outcome.first_us.is_empty() {
            entry.first.push(median(outcome.first_us.clone()));
        }
        if let (Some(disk), false) = (disk_us, outcome.first_us.is_empty()) {
            // Means, because the server's time is a mean.
            let mean = |all: &[f64]| all.iter().sum::<f64>() / all.len() as f64;
            entry.stages.push(stages(mean(&outcome.whole_us), mean(&outcome.first_us), disk));
        }
        entry
            .cpu
            .extend(cpu.map(|cpu| cpu / (outcome.bytes as f64 / f64::from(1 << 30)).max(1e-9)));
    };
    for round in 0..args.rounds {
        for (size, outstanding, writes) in cases(args) {
            let load = Load {
                writes,
                random: false,
                size: size as usize,
                outstanding,
                span: args.span,
                again: false,
                limit: limit(args),
            };
            for disk in &args.disks {
                let key = |system| Key { disk: *disk, system, writes, size, outstanding };
                if *disk == DiskName::Plain {
                    let outcome = local::direct(&files.plain(), load).map_err(|e| e.to_string())?;
                    note(key("disk"), &outcome, None, None);
                }
                for (_, system, server) in servers.iter().filter(|(of, ..)| of == disk) {
                    if writes && !system.writes {
                        continue;
                    }
                    files.forget().map_err(|error| error.to_string())?;
                    let (outcome, disk_us, cpu) = one(server, system.order, load)
                        .map_err(|error| format!("{} {disk:?}: {error}", system.name))?;
                    note(key(system.name), &outcome, disk_us, Some(cpu));
                }
                if !writes {
                    let (outcome, _, cpu) = one(&network, Order::Any, load)?;
                    note(key("network"), &outcome, None, Some(cpu));
                }
            }
        }
        crate::report::note(format_args!("towline: round {} of {}", round + 1, args.rounds));
    }
    let mut points: Vec<Point> = order
        .into_iter()
        .filter_map(|key| {
            let samples = samples.remove(&key)?;
            let some = |list: Vec<f64>| (!list.is_empty()).then(|| median(list));
            Some(Point {
                disk: key.disk,
                system: key.system,
                writes: key.writes,
                size: key.size,
                outstanding: key.outstanding,
                bytes_per_s: median(samples.rate),
                request_us: median(samples.whole),
                first_data_us: some(samples.first),
                stages_us: (!samples.stages.is_empty()).then(|| {
                    [0, 1, 2].map(|part| median(samples.stages.iter().map(|s| s[part]).collect()))
                }),
                cpu_s_per_gib: some(samples.cpu),
            })
        })
        .collect();
    points.extend(known(args, &points));
    Ok(points)
}

/// Fills the disk with data, since holes would not be sent over the network.
pub(super) fn fill(server: &Server, span: u64) -> std::io::Result<()> {
    let limit = std::time::Duration::MAX;
    let load = Load {
        writes: true,
        random: false,
        size: 1 << 20,
        outstanding: 2,
        span,
        again: false,
        limit,
    };
    Client::connect(&server.nbd, "", Order::Any)?.run(load).map(drop)
}

/// Splits the time of one read into the disk alone, both together, and the network alone. The disk starts
/// with the request; the network is at work from the first data on.
fn stages(whole: f64, first: f64, disk: f64) -> [f64; 3] {
    let disk = disk.min(whole);
    let alone = first.min(disk);
    [alone, disk - alone, whole - disk]
}

/// Returns all combinations of request size, number of requests and direction (true for writes).
fn cases(args: &Args) -> Vec<(u64, usize, bool)> {
    let mut cases = Vec::new();
    for writes in [false, true] {
        for outstanding in &args.outstanding {
            cases.extend(args.sizes.iter().map(|size| (*size, *outstanding, writes)));
        }
    }
    cases
}

/// Runs one measurement. Also returns the disk's time per request in microseconds, and the server's CPU
/// seconds.
pub(super) fn one(
    server: &Server,
    order: Order,
    load: Load,
) -> Result<(Outcome, Option<f64>, f64), String> {
    let failed = |error: std::io::Error| error.to_string();
    let mut client = Client::connect(&server.nbd, "", order).map_err(failed)?;
    let before = server.counters()?;
    let cpu = server.cpu_seconds();
    let outcome = client.run(load).map_err(failed)?;
    let cpu = server.cpu_seconds() - cpu;
    let after = server.counters()?;
    let rise = |what: &str| {
        let name = format!("towline_stage_seconds_{what}{{stage=\"T_disk\"}}");
        let of = |counters: &HashMap<String, f64>| counters.get(&name).copied().unwrap_or(0.0);
        of(&after) - of(&before)
    };
    let count = rise("count");
    Ok((outcome, (count > 0.0).then(|| rise("sum") / count * 1e6), cpu))
}

/// Returns the points that are known without measuring: the delayed disk's own rate, and the rate of disk and
/// network one after the other.
fn known(args: &Args, points: &[Point]) -> Vec<Point> {
    let mut known = Vec::new();
    let of = |key: Key, rate: f64| Point {
        disk: key.disk,
        system: key.system,
        writes: key.writes,
        size: key.size,
        outstanding: key.outstanding,
        bytes_per_s: rate,
        request_us: key.size as f64 * key.outstanding as f64 / rate * 1e6,
        first_data_us: None,
        stages_us: None,
        cpu_s_per_gib: None,
    };
    for (size, outstanding, writes) in cases(args) {
        for disk in args.disks.iter().copied().filter(|disk| *disk != DiskName::Stripe) {
            let key = |system| Key { disk, system, writes, size, outstanding };
            let rate = |system: &str| {
                let is = |p: &&Point| {
                    (p.disk, p.system, p.writes, p.size) == (disk, system, writes, size)
                        && p.outstanding == outstanding
                };
                points.iter().find(is).map(|point| point.bytes_per_s)
            };
            let mut own = rate("disk");
            if disk == DiskName::Delay {
                // Requests share the bandwidth, but their latencies overlap.
                let alone = size as f64 / delay_seconds(size);
                let rate = (alone * outstanding as f64).min(DELAY_IS.1);
                known.push(of(key("disk"), rate));
                own = Some(rate);
            }
            if let (Some(own), Some(network)) = (own, rate("network")) {
                known.push(of(key("formula"), 1.0 / (1.0 / own + 1.0 / network)));
            }
        }
    }
    known
}
