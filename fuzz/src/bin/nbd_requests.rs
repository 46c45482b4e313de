//! Fuzzes the receiver of NBD requests: the handler gets only requests that keep the rules.
#![no_main]

use towline_nbd::{Agreement, Command, Context, Form, Handler, Offer, Receiver, Refusal, Request};

/// A handler that checks the rules.
struct Strict {
    missing: u64,
    buffer: Vec<u8>,
}

const SIZE: u64 = 1 << 20;

impl Handler for Strict {
    fn is_full(&self) -> bool {
        false
    }

    fn command(&mut self, command: Command, request: &Request, _contexts: &[Context]) {
        if command != Command::Flush {
            assert!(request.length > 0 && request.offset + request.length <= SIZE);
        }
    }

    fn refuse(&mut self, _request: &Request, _refusal: Refusal) {}

    fn write_now(&mut self, request: &Request, payload: &[u8]) -> bool {
        assert_eq!(request.length, payload.len() as u64);
        payload.len() < 64
    }

    fn write_begin(&mut self, request: &Request) -> Result<(), Refusal> {
        assert!(request.length > 0 && request.offset + request.length <= SIZE);
        assert_eq!(self.missing, 0, "the write before is complete");
        self.missing = request.length;
        Ok(())
    }

    fn put(&mut self, bytes: &[u8]) -> usize {
        assert!(bytes.len() as u64 <= self.missing);
        let count = bytes.len().min(self.buffer.len());
        self.buffer[..count].copy_from_slice(&bytes[..count]);
        self.missing -= count as u64;
        count
    }
}

libfuzzer_sys::fuzz_target!(|data: (u8, Vec<u8>)| {
    let form = [Form::Simple, Form::Structured, Form::Extended][usize::from(data.0 % 3)];
    let export = Offer {
        name: "d".into(),
        description: String::new(),
        size: SIZE,
        block_minimum: 1,
        block_preferred: 4096,
        read_only: data.0 & 4 != 0,
        rotational: false,
        zeroes_fast: true,
        whole_reads: true,
        contexts: vec!["base:allocation".into()],
    };
    let contexts = vec![Context { number: 0 }];
    let agreed = Agreement { export, form, contexts };
    let mut receiver = Receiver::new(agreed);
    let mut handler = Strict { missing: 0, buffer: vec![0; 100] };
    if let Ok(received) = receiver.receive(&data.1, &mut handler) {
        assert!(received.used <= data.1.len());
    }
});
