//! Several requests at once on memory of one caller who waits for all.
#![allow(unsafe_code)]

use crate::Error;
use crate::core::{Core, Outcome, SlotRef};
use crate::lent::Buffer;
use std::collections::VecDeque;
use std::marker::PhantomData;
use std::sync::Arc;
use towline_wire::Request;

/// Requests of one caller that are under way at once.
const PARTS: usize = 16;
/// Requests that wait to be sent together.
const TOGETHER: usize = 64;

/// Requests under way that move bytes between the server and memory of the caller, for which they
/// are waited for in order. Dropping it waits for all of them.
pub(crate) struct UnderWay<'a> {
    core: &'a Arc<Core>,
    requests: VecDeque<Lent>,
    memory: PhantomData<&'a mut [u8]>,
}

struct Lent {
    slot: SlotRef,
    /// What is read into; of a write nothing.
    target: *mut [u8],
}

impl<'a> UnderWay<'a> {
    /// None yet. It must not be forgotten (`std::mem::forget`) while there are some.
    pub(crate) fn new(core: &'a Arc<Core>) -> Self {
        Self { core, requests: VecDeque::new(), memory: PhantomData }
    }

    /// Starts one that reads into `target`. It may leave with those that follow. False, and nothing
    /// was started: wait for an older one first.
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

    /// The same for one that sends `source`.
    pub(crate) fn write(&mut self, request: &Request<'_>, source: &'a [u8]) -> Result<bool, Error> {
        // SAFETY: the request is over before `self` is gone, and that before `'a` ends.
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
        // Who waits for a slot while it holds some would keep them from those it waits for.
        let waits = self.requests.is_empty();
        let slot = self.core.submit_if_room(&[*request], source, target, TOGETHER, waits)?;
        let started = slot.is_some();
        self.requests.extend(slot.map(|slot| Lent { slot, target: memory }));
        Ok(started)
    }

    /// Waits for the oldest one; yields what it read, too.
    pub(crate) fn wait(&mut self) -> Option<(Result<Outcome, Error>, &'a mut [u8])> {
        let Lent { slot, target } = self.requests.pop_front()?;
        let mut outcome = Outcome::default();
        let result = self.core.wait(&slot, &mut outcome).map(|_| outcome);
        // SAFETY: it is over, so that nobody else uses the memory, which was borrowed for `'a`.
        let target = unsafe { &mut *target };
        Some((result, target))
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        while self.wait().is_some() {}
    }
}
