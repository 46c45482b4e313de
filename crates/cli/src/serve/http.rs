//! What HTTP clients ask for: the end of a request, and the first line, of which only the method and the path count.

/// Maximum length of a request.
const REQUEST_BYTES_MAX: usize = 8192;

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    /// The page with the counters.
    Metrics,
    /// Another page.
    Other,
    /// Something else than a page, or nothing.
    Wrong,
}

/// Returns true if no more of a request is needed: it is complete, or too long.
pub(crate) fn is_enough(request: &[u8]) -> bool {
    let ends = |end: &[u8]| request.windows(end.len()).any(|part| part == end);
    request.len() >= REQUEST_BYTES_MAX || ends(b"\r\n\r\n") || ends(b"\n\n")
}

/// Returns what a request asks for, of which the end may be missing.
pub(crate) fn asked(request: &[u8]) -> Asked {
    let request = String::from_utf8_lossy(request);
    let mut words = request.lines().next().unwrap_or_default().split(' ');
    // Prometheus adds a query if its configuration has parameters; there is nothing to choose here.
    let is_metrics = |target: &str| target.split('?').next() == Some("/metrics");
    match (words.next(), words.next()) {
        (Some("GET"), Some(target)) if is_metrics(target) => Asked::Metrics,
        (Some("GET"), Some(_)) => Asked::Other,
        _ => Asked::Wrong,
    }
}
