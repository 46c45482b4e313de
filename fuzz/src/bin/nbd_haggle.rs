//! Fuzzes the option haggling of NBD.
#![no_main]

use towline_nbd::{Catalogue, Ended, Haggle, Offer, Progress};

struct One;

impl Catalogue for One {
    fn find(&self, name: &[u8]) -> Option<Offer> {
        (name.len() < 2).then(|| Offer {
            name: "d".into(),
            description: "disk".into(),
            size: 1 << 20,
            block_minimum: 1,
            block_preferred: 4096,
            read_only: false,
            rotational: false,
            zeroes_fast: true,
            whole_reads: true,
            contexts: vec!["base:allocation".into()],
        })
    }

    fn list(&self) -> Vec<(String, String)> {
        vec![("d".into(), "disk".into())]
    }
}

// The client's bytes give the same replies wherever they are cut.
libfuzzer_sys::fuzz_target!(|data: (Vec<u8>, u16)| {
    let (bytes, cut) = (&data.0, usize::from(data.1).min(data.0.len()));
    let run = |parts: &[&[u8]]| {
        let (mut haggle, mut out, mut held) = (Haggle::default(), Vec::new(), Vec::new());
        for part in parts {
            held.extend_from_slice(part);
            match haggle.receive(&held, &mut out, &One) {
                Err(error) => return (out, Some(error.0)),
                Ok(Progress { ended: Some(Ended::Agreed(_)), .. }) => return (out, Some("agreed")),
                Ok(Progress { ended: Some(_), .. }) => return (out, Some("aborted")),
                Ok(Progress { used, .. }) => drop(held.drain(..used)),
            }
        }
        (out, None)
    };
    assert_eq!(run(&[bytes]), run(&[&bytes[..cut], &bytes[cut..]]));
});
