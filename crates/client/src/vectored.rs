//! Several requests at once on the memory of one caller, which waits for all of them.
#![allow(unsafe_code)]

use crate::Error;
use crate::core::{Core, Outcome, SlotRef};
use crate::lent::Buffer;
use std::collections::VecDeque;
use std::marker::PhantomData;
use std::sync::Arc;
use towline_wire::Request;

/// Most requests of one caller under way at once.
const PARTS: usize = 16;
/// Number of queued messages at which they are sent.
const TOGETHER: usize = 64;

/// Requests under way between the server and memory of the caller, which waits for them in order.
/// Dropping this waits for all of them.
pub(crate) struct UnderWay<'a> {
    core: &'a Arc<Core>,
    requests: VecDeque<Lent>,
    memory: PhantomData<&'a mut [u8]>,
}

struct Lent {
    slot: SlotRef,
    /// What is read into; empty for a write.
    target: *mut [u8],
}

impl<'a> UnderWay<'a> {
    /// With no requests yet. Must not be forgotten (`std::mem::forget`) while requests are under
    /// way.
    pub(crate) fn new(core: &'a Arc<Core>) -> Self {
        Self { core, requests: VecDeque::new(), memory: PhantomData }
    }

    /// Starts a request that reads into `target`; it may be sent together with the following ones.
    /// Returns false, with nothing started, if the caller must first wait for an older request.
    pub(crate) fn read(
        &mut self,
        request: &Request<'_>,
        target: &mut Option<&'a mut [u8]>,
    ) -> Result<bool, Error> {
        let Some(memory) = target.take() else { return Ok(true) };
        let memory = std::ptr::from_mut(memory);
        let buffer = Buffer::Target(memory.cast(), memory.len());
        let started = self.submit(request, Buffer::none(), buffer, memory)?;
        if !started {
            // SAFETY: nobody else got it, and it was borrowed for `'a`.
            *target = Some(unsafe { &mut *memory });
        }
        Ok(started)
    }

    /// As [`UnderWay::read`], for a request that sends `source`.
    pub(crate) fn write(&mut self, request: &Request<'_>, source: &'a [u8]) -> Result<bool, Error> {
        // SAFETY: the request is over before `self` is gone, and `self` is gone before `'a` ends.
        let buffer = unsafe { Buffer::source(source) };
        self.submit(request, buffer, Buffer::none(), std::ptr::from_mut(&mut []))
    }

    fn submit(
        &mut self,
        request: &Request<'_>,
        source: Buffer,
        target: Buffer,
        memory: *mut [u8],
    ) -> Result<bool, Error> {
        if self.requests.len() >= PARTS {
            return Ok(false);
        }
        // Waiting for a slot while holding some could keep them from those it waits for.
        let waits = self.requests.is_empty();
        let slot = self.core.submit_if_room(&[*request], source, target, TOGETHER, waits)?;
        let started = slot.is_some();
        self.requests.extend(slot.map(|slot| Lent { slot, target: memory }));
        Ok(started)
    }

    /// Waits for the oldest request; also returns what it read.
    pub(crate) fn wait(&mut self) -> Option<(Result<Outcome, Error>, &'a mut [u8])> {
        let Lent { slot, target } = self.requests.pop_front()?;
        let mut outcome = Outcome::default();
        let result = self.core.wait(&slot, &mut outcome).map(|_| outcome);
        // SAFETY: the request is over, so nobody else uses the memory, which was borrowed for `'a`.
        let target = unsafe { &mut *target };
        Some((result, target))
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        while self.wait().is_some() {}
    }
}
