//! Disks over sessions: every kind of disk over every transport, lost connections, restarts of the
//! server, hostile peers.
#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod agree;
#[path = "../common/mod.rs"]
mod common;
mod data;
mod deaf;
mod empty;
mod hostile;
mod lost;
mod odd;
mod rates;
mod setup;
mod torn;

#[test]
#[ignore = "not a test: the server that other tests kill"]
fn child_server() {
    common::child_server();
}
