//! A mixture of valid and invalid requests in every mode, whose replies are searched for violations of the
//! rules of form. It runs once, and each of those rules looks for its own violations.

use crate::client::{Mode, Request, Session, Violation};
use crate::rule::Problem;
use crate::target::Target;
use crate::wire::*;

/// Runs the mixture and returns all violations.
pub(crate) fn violations(target: &Target) -> Result<Vec<Violation>, Problem> {
    let mut found = Vec::new();
    for mode in target.profile.modes.clone() {
        let contexts: Vec<_> = target.profile.contexts.iter().map(String::as_str).collect();
        let queries = if mode == Mode::Simple { &[] } else { contexts.as_slice() };
        let mut session = Session::open_with_contexts(target, mode, queries)?;
        for request in requests(target, &session) {
            found.extend(session.transact(&request)?.violations);
        }
        // The same requests at once, so that the server may interleave its replies.
        let mut cookies = Vec::new();
        for request in requests(target, &session) {
            cookies.push(session.send(&request)?);
        }
        for cookie in cookies {
            found.extend(session.wait(cookie)?.violations);
        }
    }
    Ok(found)
}

/// Returns requests of every kind that changes nothing, including some that have to fail.
fn requests(target: &Target, session: &Session) -> Vec<Request> {
    let block = target.block();
    let (size, usable) = (session.size, target.usable());
    let mut all = vec![
        Request::read(0, block.min(usable)),
        Request::read(0, target.clip(4096)),
        Request::read(0, target.clip(64 << 10)),
        Request::read(0, target.clip(1 << 20)),
        Request::read(0, target.clip(4 << 20)),
        Request::read(usable.saturating_sub(block), block.min(usable)),
        Request::read(size, block),
        Request::read(size.saturating_sub(block), 2 * block),
        Request::read(u64::MAX - block + 1, block),
        Request::read(0, block.min(usable)).with(CMD_FLAG_UNKNOWN),
        Request::new(CMD_UNKNOWN, 0, 0),
    ];
    if usable > 3 * block {
        all.push(Request::read(block, target.clip(usable / 2)));
    }
    if session.has(FLAG_SEND_DF) {
        all.push(Request::read(0, target.clip(DF_LENGTH_MIN)).with(CMD_FLAG_DF));
        all.push(Request::read(0, target.clip(4 << 20)).with(CMD_FLAG_DF));
    }
    if session.has(FLAG_SEND_FLUSH) {
        all.push(Request::new(CMD_FLUSH, 0, 0));
    }
    if session.has(FLAG_SEND_CACHE) {
        all.push(Request::new(CMD_CACHE, 0, target.clip(4096)));
        all.push(Request::new(CMD_CACHE, size, block));
    }
    if !session.contexts.is_empty() {
        let whole = usable.min(u64::from(u32::MAX) / block * block);
        all.push(Request::new(CMD_BLOCK_STATUS, 0, whole));
        all.push(Request::new(CMD_BLOCK_STATUS, 0, block));
        all.push(Request::new(CMD_BLOCK_STATUS, 0, whole).with(CMD_FLAG_REQ_ONE));
        all.push(Request::new(CMD_BLOCK_STATUS, 0, block).with(CMD_FLAG_REQ_ONE));
        all.push(Request::new(CMD_BLOCK_STATUS, usable / 2 / block * block, block));
        all.push(Request::new(CMD_BLOCK_STATUS, size, block));
    }
    all
}
