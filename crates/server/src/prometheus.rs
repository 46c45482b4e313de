//! The text format of Prometheus: every metric with its type and a line of help.

use crate::stats::Snapshot;
use std::fmt::Write;

/// Counters that only grow, and what they count. By custom, their names end in `_total` there.
const COUNTERS: [(&str, &str); 29] = [
    ("bytes_lent", "Bytes that clients read in shared memory instead of receiving them."),
    ("bytes_received", "Bytes received."),
    ("bytes_received_placed", "Bulk bytes received straight into their final place."),
    ("bytes_sent_copied", "Bytes that were copied to be sent."),
    ("bytes_sent_file", "Bytes sent from file pages without a copy (sendfile, splice)."),
    ("bytes_sent_in_place", "Bytes sent from memory without a copy (SEND_ZC)."),
    ("disk_bytes_direct", "Bytes read from disks past the page cache."),
    ("disk_bytes_holes", "Bytes read from holes of disks, for which nothing is moved."),
    ("disk_bytes_lent", "Bytes of disks sent from the page cache or memory by reference."),
    ("disk_bytes_registered", "Bytes of disks moved to or from buffers registered with io_uring."),
    ("disk_bytes_staged", "Bytes read from disks by a copy out of the page cache or memory."),
    ("disk_bytes_written_direct", "Bytes written to disks past the page cache."),
    ("disk_bytes_written_in_place", "Bytes received straight into the memory of disks."),
    ("disk_bytes_written_staged", "Bytes written to disks through the page cache or into memory."),
    ("lanes_moved", "Connections handed over to the core on the processor of their client."),
    ("listings_handed_over", "Directories listed by other threads while others were idle."),
    ("loans_exhausted", "Replies copied because too much shared memory was on loan."),
    ("messages_received", "Messages received."),
    ("messages_sent", "Messages sent."),
    ("payload_discarded", "Bytes received for requests that could not use them."),
    ("protocol_errors", "Connections closed because the client broke the protocol."),
    ("replays", "Repeated requests that were answered from memory."),
    ("replies_lent", "Replies whose data was lent in shared memory."),
    ("requests", "Finished requests."),
    ("requests_low_among_others", "Requests of low priority taken while others had requests."),
    ("sends_in_place_copied", "Sends without a copy that the kernel copied after all."),
    ("sends_in_place_given_up", "Connections that gave up sending without a copy."),
    ("system_calls", "System calls made to move bytes and to wait for them."),
    ("operations", "Finished requests by their first operation."),
];

/// Current or highest values, and what they show.
const GAUGES: [(&str, &str); 9] = [
    ("buffer_bytes_in_use", "Bytes of buffers for data in transit that are in use."),
    (
        "buffer_bytes_peak",
        "Sum of the most bytes of these buffers that each serving thread had in use.",
    ),
    ("bytes_on_loan", "Bytes of shared memory that clients have on loan."),
    ("cores_waiting", "Serving threads that wait for a device."),
    ("cores_waiting_seconds_max", "How long the longest of these waits has taken so far."),
    ("disks_failed", "Disks that are read-only since a flush failed."),
    ("lanes", "Connections."),
    ("sessions", "Sessions of clients, connected or not."),
    ("uptime_seconds", "Time since the start of the server."),
];

/// Returns everything in this format.
pub(crate) fn page(snapshot: &Snapshot) -> String {
    let mut page = Page(String::new());
    page.single("uptime_seconds", snapshot.uptime_seconds);
    for (name, value) in &snapshot.counters {
        page.single(name, value);
    }
    let metric = page.announce("operations");
    for (name, value) in &snapshot.operations {
        page.line(format_args!("{metric}{{operation=\"{name}\"}} {value}"));
    }
    page.line(format_args!("# HELP towline_stage_seconds Time of requests in each stage."));
    page.line(format_args!("# TYPE towline_stage_seconds summary"));
    for (name, stage) in &snapshot.stages {
        for (quantile, value) in
            [("0.5", stage.p50_us), ("0.99", stage.p99_us), ("0.999", stage.p999_us)]
        {
            let seconds = value / 1e6;
            page.line(format_args!(
                "towline_stage_seconds{{stage=\"{name}\",quantile=\"{quantile}\"}} {seconds:.9}"
            ));
        }
        page.line(format_args!("towline_stage_seconds_count{{stage=\"{name}\"}} {}", stage.count));
        let sum = stage.mean_us * stage.count as f64 / 1e6;
        page.line(format_args!("towline_stage_seconds_sum{{stage=\"{name}\"}} {sum:.9}"));
    }
    page.0
}

struct Page(String);

impl Page {
    fn line(&mut self, text: std::fmt::Arguments<'_>) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.0, "{text}");
    }

    /// Adds the help and the type of a metric. Returns its full name.
    fn announce(&mut self, name: &str) -> String {
        let find = |table: &[(&str, &'static str)]| {
            table.iter().find(|(known, _)| *known == name).map(|(_, help)| *help)
        };
        let (metric, kind, help) = match find(&GAUGES) {
            Some(help) => (format!("towline_{name}"), "gauge", help),
            None => (format!("towline_{name}_total"), "counter", find(&COUNTERS).unwrap_or(name)),
        };
        self.line(format_args!("# HELP {metric} {help}"));
        self.line(format_args!("# TYPE {metric} {kind}"));
        metric
    }

    /// Adds a metric with one value.
    fn single(&mut self, name: &str, value: impl std::fmt::Display) {
        let metric = self.announce(name);
        self.line(format_args!("{metric} {value}"));
    }
}

#[cfg(test)]
mod tests {
    use super::{COUNTERS, GAUGES};
    use crate::stats::{Stages, Statistics};
    use std::collections::HashMap;

    #[test]
    fn each_sample_has_its_help_and_type_before_it() {
        let statistics = Statistics::new(2);
        statistics.pools.lock().push(towline_mem::Pool::new(1 << 12, 1));
        statistics.cores[1].record(0, Stages::default());
        let text = statistics.to_prometheus();
        let (mut helped, mut types) = (HashMap::new(), HashMap::new());
        for line in text.lines() {
            if let Some(said) = line.strip_prefix("# HELP ") {
                let (name, help) = said.split_once(' ').unwrap();
                assert!(help.ends_with('.'), "{name} has no help: {help}");
                assert_eq!(helped.insert(name, help), None, "{name} twice");
                continue;
            }
            if let Some(said) = line.strip_prefix("# TYPE ") {
                let (name, kind) = said.split_once(' ').unwrap();
                assert!(helped.contains_key(name), "{line}");
                assert_eq!(kind == "counter", name.ends_with("_total"), "{line}");
                assert_eq!(types.insert(name, kind), None, "{name} twice");
                continue;
            }
            let name = line.split(['{', ' ']).next().unwrap();
            let of_summary = name.strip_suffix("_sum").or(name.strip_suffix("_count"));
            let name =
                of_summary.filter(|name| types.get(name) == Some(&"summary")).unwrap_or(name);
            assert!(types.contains_key(name), "{line}");
        }
        assert_eq!(types["towline_stage_seconds"], "summary");
        // The tables name nothing that is not there.
        let counters = COUNTERS.map(|(name, _)| format!("towline_{name}_total"));
        let gauges = GAUGES.map(|(name, _)| format!("towline_{name}"));
        for name in counters.iter().chain(&gauges) {
            assert!(types.contains_key(&**name), "{name}");
        }
    }
}
