//! A peer over shared memory, below the client library.

use super::common::Setup;
use super::{KIB, common, socket};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;
use towline_mem::SharedMemory;
use towline_net::{
    Counters, Doorbell, Link, SHM_BYTES, ShmLink, ShmSide, Wait, receive_descriptors,
};
use towline_wire::extents::Extents;
use towline_wire::header::{reply_flag, request_flag};
use towline_wire::hello::want;
use towline_wire::limits::HEADER_BYTES;
use towline_wire::reply::parse_results;
use towline_wire::request::encode_compound;
use towline_wire::{Header, Hello, Kind, Reply, Request, Welcome};

/// A peer over shared memory that sends arbitrary messages.
pub(super) struct Raw {
    pub(super) link: Link,
    pub(super) welcome: Welcome,
    pub(super) socket: UnixStream,
    pub(super) memories: Vec<SharedMemory>,
    pub(super) received: Vec<u8>,
    pub(super) sequences: [u32; 64],
}

impl Raw {
    pub(super) fn connect(setup: &Setup, session: u64, secret: u64) -> Self {
        let socket = UnixStream::connect(socket(setup)).unwrap();
        let hello = Hello { want: want::SHARED_MEMORY, session, secret, ..common::hello() };
        std::io::Write::write_all(&mut &socket, &common::hello_message(&hello)).unwrap();
        let mut bytes = [0; 512];
        let (count, descriptors) = receive_descriptors(&socket, &mut bytes, Wait::Any).unwrap();
        let welcome = Welcome::parse(&bytes[HEADER_BYTES..count]).unwrap();
        let [memory, bell] = <[_; 2]>::try_from(descriptors).unwrap();
        let memory = Arc::new(SharedMemory::open(memory, SHM_BYTES, true).unwrap());
        let link = ShmLink::new(
            memory,
            ShmSide::Client,
            Doorbell::new(bell),
            socket.try_clone().unwrap().into(),
        );
        let link = Link::Shm(Box::new(link.unwrap()));
        Self { link, welcome, socket, memories: vec![], received: vec![], sequences: [0; 64] }
    }

    pub(super) fn shm(&self) -> &ShmLink {
        match &self.link {
            Link::Shm(link) => link,
            _ => unreachable!("made as one"),
        }
    }

    pub(super) fn send(&self, bytes: &[u8]) {
        assert_eq!(self.link.send(&[bytes], &Counters::default()).unwrap(), bytes.len());
    }

    /// Returns the next message: header, body, payload.
    pub(super) fn receive(&mut self) -> (Header, Vec<u8>, Vec<u8>) {
        let fill = |received: &mut Vec<u8>, wanted: usize| {
            while received.len() < wanted {
                let mut part = vec![0; 64 * KIB];
                let count = self
                    .link
                    .receive_wait(
                        &mut towline_net::Target::Own(&mut part),
                        &mut towline_net::Spin::new(Duration::ZERO),
                        false,
                    )
                    .unwrap();
                received.extend_from_slice(&part[..count]);
            }
        };
        fill(&mut self.received, HEADER_BYTES);
        let header = Header::parse(self.received.first_chunk().unwrap()).unwrap();
        let body = HEADER_BYTES + header.body_bytes as usize;
        let end = body + header.payload_bytes as usize;
        fill(&mut self.received, end);
        let message: Vec<u8> = self.received.drain(..end).collect();
        (header, message[HEADER_BYTES..body].to_vec(), message[body..].to_vec())
    }

    pub(super) fn request(
        &mut self,
        slot: u16,
        request: Request<'_>,
    ) -> (Header, Vec<u8>, Vec<u8>) {
        let sequence = &mut self.sequences[usize::from(slot)];
        *sequence += 1;
        let mut header = Header::new(Kind::Request, slot, *sequence);
        header.flags = request_flag::BORROWS;
        self.send(&common::message(header, &encode_compound(&[request]), &[]));
        let (mut reply, body, mut payload) = self.receive();
        while reply.kind == Kind::Data {
            let (next, body, rest) = self.receive();
            payload.extend(rest);
            if next.kind == Kind::Reply {
                return (next, body, payload);
            }
            reply = next;
        }
        assert_eq!((reply.kind, reply.slot), (Kind::Reply, slot));
        (reply, body, payload)
    }

    pub(super) fn open(&mut self, path: &[u8]) -> u64 {
        let handle = |body: &[u8]| match parse_results(body).unwrap()[0] {
            Reply::Opened { handle, .. } => handle,
            other => panic!("not opened: {other:?}"),
        };
        let (_, body, _) = self.request(0, Request::Attach { name: b"mem" });
        let base = handle(&body);
        let (_, body, _) = self.request(0, Request::Open { base, flags: 2, mode: 0, path });
        handle(&body)
    }

    /// Reads; returns where the data is lent, if it is.
    pub(super) fn read(
        &mut self,
        slot: u16,
        handle: u64,
        offset: u64,
        length: usize,
    ) -> Option<Extents> {
        let length = length as u32;
        let (header, body, _) = self.request(slot, Request::Read { handle, offset, length });
        if header.flags & reply_flag::LENT == 0 {
            return None;
        }
        let extents = Extents::parse(&body[header.offset as usize..]).unwrap();
        assert_eq!(extents.bytes(), u64::from(length));
        if extents.memory as usize == self.memories.len() {
            let (fd, length) = self.shm().take_over().unwrap();
            self.memories.push(SharedMemory::open(fd, length, false).unwrap());
        }
        Some(extents)
    }

    pub(super) fn bytes(&self, lent: &Extents) -> Vec<u8> {
        let mut bytes = Vec::new();
        for extent in &lent.extents {
            let mut part = vec![0; extent.length as usize];
            if let Some(offset) = extent.offset {
                self.memories[lent.memory as usize].copy_out(offset as usize, &mut part);
            }
            bytes.extend(part);
        }
        bytes
    }

    pub(super) fn release(&self, slot: u16, sequence: u32) {
        self.send(&Header::new(Kind::Release, slot, sequence).to_bytes());
    }
}
