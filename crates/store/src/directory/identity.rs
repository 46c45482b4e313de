//! Acts as another user, for one thread and one call at a time.
//!
//! Linux keeps identities per thread. The wrappers of libc apply a change to all threads; those
//! used here do not. Changing the effective user from root to another also drops the effective
//! capabilities, and changing it back restores them, since the real and saved users stay.

use super::attributes::errno;
use crate::Caller;
use rustix::process::{Gid, Uid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use std::io::Write;
use std::marker::PhantomData;
use towline_wire::Errno;

/// The identity that the server runs as.
#[derive(Debug)]
pub(super) struct ServerIdentity {
    uid: Uid,
    gid: Gid,
    groups: Vec<Gid>,
}

/// Makes this thread act as another user until dropped.
#[derive(Debug)]
pub(super) struct Acting<'a> {
    server: &'a ServerIdentity,
    uid_changed: bool,
    gid_changed: bool,
    groups_changed: bool,
    /// Makes the type `!Send`: it must be dropped on the thread that created it.
    thread: PhantomData<*const ()>,
}

impl ServerIdentity {
    /// Returns the identity of this thread.
    pub(super) fn of_this_thread() -> std::io::Result<Self> {
        Ok(Self {
            uid: rustix::process::geteuid(),
            gid: rustix::process::getegid(),
            groups: rustix::process::getgroups()?,
        })
    }

    /// Takes on the identity of a caller with `enforce`; returns `None` for others.
    ///
    /// A server that does not run as root acts only as its own user (with its own groups). For any
    /// other user this fails with `EPERM`.
    pub(super) fn act_as(&self, caller: &Caller) -> Result<Option<Acting<'_>>, Errno> {
        if !caller.enforce || self.is_same_and_unprivileged(caller) {
            return Ok(None);
        }
        let invalid = u32::MAX;
        if caller.uid == invalid || caller.gid == invalid || caller.groups.contains(&invalid) {
            return Err(Errno::EPERM);
        }
        let mut acting = self.unchanged();
        let groups_equal = caller.groups.len() == self.groups.len()
            && caller.groups.iter().zip(&self.groups).all(|(a, b)| *a == b.as_raw());
        // Groups first: once the user has changed, the capability to change them is gone.
        if !groups_equal {
            let groups: Vec<Gid> = caller.groups.iter().map(|gid| Gid::from_raw(*gid)).collect();
            set_thread_groups(&groups).map_err(errno)?;
            acting.groups_changed = true;
        }
        if caller.gid != self.gid.as_raw() {
            set_thread_res_gid(None, Gid::from_raw(caller.gid), None).map_err(errno)?;
            acting.gid_changed = true;
        }
        acting.change_uid(caller.uid)?;
        Ok(Some(acting))
    }

    /// Takes on only the user, for reading and writing files that are already open: capabilities
    /// matter there (set-user-id bits, space reserved for root), but groups do not.
    pub(super) fn act_as_user(&self, caller: Option<&Caller>) -> Result<Option<Acting<'_>>, Errno> {
        let Some(caller) = caller.filter(|caller| caller.enforce) else { return Ok(None) };
        if caller.uid == self.uid.as_raw() {
            return Ok(None);
        }
        let mut acting = self.unchanged();
        acting.change_uid(caller.uid)?;
        Ok(Some(acting))
    }

    fn is_same_and_unprivileged(&self, caller: &Caller) -> bool {
        !self.uid.is_root() && caller.uid == self.uid.as_raw() && caller.gid == self.gid.as_raw()
    }

    fn unchanged(&self) -> Acting<'_> {
        Acting {
            server: self,
            uid_changed: false,
            gid_changed: false,
            groups_changed: false,
            thread: PhantomData,
        }
    }
}

impl Acting<'_> {
    fn change_uid(&mut self, uid: u32) -> Result<(), Errno> {
        if uid != self.server.uid.as_raw() {
            set_thread_res_uid(None, Uid::from_raw(uid), None).map_err(errno)?;
            self.uid_changed = true;
        }
        Ok(())
    }

    fn restore(&self) -> rustix::io::Result<()> {
        // The user first: that restores the capabilities to change the rest.
        if self.uid_changed {
            set_thread_res_uid(None, self.server.uid, None)?;
        }
        if self.gid_changed {
            set_thread_res_gid(None, self.server.gid, None)?;
        }
        if self.groups_changed {
            set_thread_groups(&self.server.groups)?;
        }
        Ok(())
    }
}

impl Drop for Acting<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.restore() {
            // The thread would serve the next client with the rights of this one. Not `eprintln`,
            // which panics if it cannot write.
            let text = format!("towline: cannot return to the server's own identity: {error}\n");
            let _ = std::io::stderr().write_all(text.as_bytes());
            std::process::abort();
        }
    }
}
