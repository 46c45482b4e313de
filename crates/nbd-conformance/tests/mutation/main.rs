//! Tests the kit on a server that keeps every rule, and on the same server with one fault at a time: each
//! fault has to fail the rule that it breaks.
#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod faults;
mod server;
mod transmission;

use std::collections::BTreeSet;
use std::time::Duration;

use nbd_conformance::report::{Line, Verdict};
use nbd_conformance::rules;
use nbd_conformance::target::Target;
use nbd_conformance::uri::{Address, Location};
use server::{Running, Setup};

/// Long enough that no check of a server that answers times out on a loaded machine.
const PATIENT: Duration = Duration::from_secs(20);
/// For servers that are expected not to answer.
const IMPATIENT: Duration = Duration::from_millis(500);

fn target(server: &Running, timeout: Duration) -> (Target, bool) {
    let address = Address::Unix(server.path.clone());
    let mut target = Target::new(Location { address, export: "disk".to_owned() }, timeout, 7);
    let probed = target.probe().is_ok();
    (target, probed)
}

/// Returns the rules that a server without fault keeps. Panics if it fails one.
fn keeps_all(setup: Setup) -> BTreeSet<&'static str> {
    let server = Running::start(setup, "none");
    let (target, probed) = target(&server, PATIENT);
    assert!(probed || setup == Setup::Tls, "{setup:?}: cannot be probed");
    let mut passed = BTreeSet::new();
    for rule in rules::all() {
        let line = Line::of(rule, &target, true);
        assert_ne!(line.verdict, Verdict::Fail, "{setup:?}: {}: {}", rule.id, line.seen);
        if line.verdict == Verdict::Pass {
            passed.insert(rule.id);
        }
    }
    passed
}

#[test]
fn a_server_without_fault_keeps_every_rule() {
    let setups =
        [Setup::Full, Setup::Plain, Setup::ReadOnly, Setup::Slow, Setup::Coarse, Setup::Tls];
    let mut tried = BTreeSet::new();
    for setup in setups {
        tried.extend(keeps_all(setup));
    }
    let untried: Vec<_> =
        rules::all().map(|rule| rule.id).filter(|id| !tried.contains(id)).collect();
    assert!(untried.is_empty(), "never tried: {untried:?}");
}

#[test]
fn a_server_may_hang_up_after_the_error_of_a_read() {
    let server = Running::start(Setup::Full, "read-error-closes");
    let (target, probed) = target(&server, PATIENT);
    assert!(probed);
    for rule in rules::all().filter(|rule| rule.id.starts_with("read.beyond-end")) {
        let line = Line::of(rule, &target, false);
        assert_eq!(line.verdict, Verdict::Pass, "{}: {}", rule.id, line.seen);
    }
}

/// How often an undetected fault is tried: some show only if the server's threads are quick enough.
const TRIES: usize = 5;

/// Tries one fault. Returns what was seen if its rule does not fail.
fn undetected((setup, fault, rule): &(Setup, &'static str, &str)) -> Option<String> {
    let found = rules::all().find(|known| known.id == *rule);
    let found = found.unwrap_or_else(|| panic!("no rule is called {rule}"));
    let mut seen = String::new();
    for _ in 0..TRIES {
        let server = Running::start(*setup, fault);
        let timeout = if faults::SILENT.contains(fault) { IMPATIENT } else { PATIENT };
        let (target, _) = target(&server, timeout);
        let line = Line::of(found, &target, true);
        if line.verdict == Verdict::Fail {
            return None;
        }
        seen = format!("{fault}: {rule}: {:?}: {}", line.verdict, line.seen);
    }
    Some(seen)
}

#[test]
fn each_fault_fails_its_rule() {
    // Many at once, because most of the time goes into waiting for servers that do not answer.
    let undetected: Vec<_> = std::thread::scope(|scope| {
        let parts = faults::FAULTS.chunks(16);
        let threads: Vec<_> = parts
            .map(|part| scope.spawn(|| part.iter().filter_map(undetected).collect::<Vec<_>>()))
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    assert!(undetected.is_empty(), "{} undetected:\n{}", undetected.len(), undetected.join("\n"));
}

#[test]
fn each_rule_has_a_fault() {
    let covered: BTreeSet<_> = faults::FAULTS.iter().map(|(_, _, rule)| *rule).collect();
    let bare: Vec<_> =
        rules::all().map(|rule| rule.id).filter(|id| !covered.contains(id)).collect();
    assert!(bare.is_empty(), "rules without a fault: {bare:?}");
}
