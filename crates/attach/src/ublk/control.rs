//! The control device of ublk, which creates, starts, stops and removes devices.
#![allow(unsafe_code)]

use super::abi::{self, ControlCommand, DeviceInformation, Parameters};
use crate::Error;
use crate::error::NOT_ALLOWED;
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use rustix::fs::{Mode, OFlags};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use zerocopy::{FromBytes, Immutable, IntoBytes};

const PATH: &str = "/dev/ublk-control";

/// State of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum State {
    /// Not started yet, or stopped.
    Dead,
    /// Served by a process.
    Live,
    /// Its process is gone, and requests wait for another one.
    Waiting,
    /// Its process is gone, and requests fail.
    Failing,
}

/// What the driver knows about a device.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Information {
    /// The number N in `/dev/ublkbN`.
    pub number: u32,
    /// Its state.
    pub state: State,
    /// The process that serves it, or served it last.
    pub server: i32,
    /// Number of queues, each with its thread.
    pub queues: u16,
    /// Maximum number of requests under way in each queue.
    pub depth: u16,
    /// Longest read or write in bytes.
    pub transfer_maximum: u32,
    pub(super) features: u64,
}

/// An open control device, which carries out one command at a time.
pub struct Control {
    ring: IoUring<squeue::Entry128, cqueue::Entry>,
    file: OwnedFd,
    features: u64,
}

impl std::fmt::Debug for Control {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Control").field("features", &self.features).finish_non_exhaustive()
    }
}

impl Control {
    /// Opens the control device.
    ///
    /// # Errors
    /// If the kernel has no ublk or is older than 6.5, or if this user lacks permission.
    pub fn open() -> Result<Self, Error> {
        let file = rustix::fs::open(PATH, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(
            |error| match error {
                rustix::io::Errno::NOENT | rustix::io::Errno::NXIO => Error::Refused(format!(
                    "{PATH} is missing: the kernel has no ublk, or its module is not loaded (try modprobe ublk_drv)"
                )),
                rustix::io::Errno::ACCESS | rustix::io::Errno::PERM => {
                    Error::Refused(format!("{PATH}: {NOT_ALLOWED}"))
                }
                _ => Error::system(PATH)(error.into()),
            },
        )?;
        let ring = IoUring::builder().build(4).map_err(Error::system("io_uring"))?;
        let mut control = Self { ring, file, features: 0 };
        let mut features = 0_u64;
        control.command(abi::GET_FEATURES, abi::ANY_DEVICE, 0, &mut features).map_err(|_| {
            Error::Refused(format!("{PATH}: this kernel's ublk is too old (before 6.5)"))
        })?;
        control.features = features;
        Ok(control)
    }

    /// Returns true if the driver has all features of `wanted`.
    pub(super) fn has(&self, wanted: u64) -> bool {
        self.features & wanted == wanted
    }

    /// Carries out a command with a structure that the kernel reads and writes, and waits until it is done.
    fn command<T: IntoBytes + FromBytes + Immutable>(
        &mut self,
        command: u32,
        device: u32,
        data: u64,
        structure: &mut T,
    ) -> io::Result<()> {
        let payload = ControlCommand {
            device,
            queue: abi::NO_QUEUE,
            length: size_of::<T>() as u16,
            address: if size_of::<T>() == 0 { 0 } else { std::ptr::from_mut(structure) as u64 },
            data,
            ..ControlCommand::default()
        };
        let mut bytes = [0; 80];
        bytes[..size_of::<ControlCommand>()].copy_from_slice(payload.as_bytes());
        let entry =
            opcode::UringCmd80::new(types::Fd(self.file.as_raw_fd()), command).cmd(bytes).build();
        // SAFETY: `structure` is plain bytes of the given length, and stays borrowed until the
        // command is done, because this function does not return earlier.
        unsafe { self.ring.submission().push(&entry) }.expect("commands are done one at a time");
        loop {
            match self.ring.submit_and_wait(1) {
                Ok(_) => (),
                // The command is still under way.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => (),
                // Returning is not possible while the kernel may still write to `structure`.
                Err(error) => panic!("waiting for a command of ublk: {error}"),
            }
            if let Some(completion) = self.ring.completion().next() {
                return match completion.result() {
                    0.. => Ok(()),
                    error => Err(io::Error::from_raw_os_error(-error)),
                };
            }
        }
    }

    fn plain(&mut self, command: u32, device: u32, data: u64) -> io::Result<()> {
        self.command(command, device, data, &mut [0_u8; 0])
    }

    /// Returns what the driver knows about a device; `None` if there is no device of this number.
    ///
    /// # Errors
    /// If this user lacks permission.
    pub fn information(&mut self, device: u32) -> Result<Option<Information>, Error> {
        let mut raw = DeviceInformation::default();
        match self.command(abi::GET_INFORMATION, device, 0, &mut raw) {
            Ok(()) => Ok(Some(Information {
                number: raw.device,
                state: match raw.state {
                    1 => State::Live,
                    2 => State::Waiting,
                    3 => State::Failing,
                    _ => State::Dead,
                },
                server: raw.server_pid,
                queues: raw.queues,
                depth: raw.depth,
                transfer_maximum: raw.transfer_bytes_max,
                features: raw.features,
            })),
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(None),
            Err(error) => Err(Error::system(format_args!("ublk device {device}"))(error)),
        }
    }

    /// Adds a device, which gets its size and limits by [`Control::set_parameters`]. Without a number
    /// the driver chooses one.
    pub(super) fn add(
        &mut self,
        number: Option<u32>,
        queues: u16,
        depth: u16,
        transfer_bytes_max: u32,
        features: u64,
    ) -> Result<Information, Error> {
        let device = number.unwrap_or(abi::ANY_DEVICE);
        let mut raw = DeviceInformation {
            queues,
            depth,
            transfer_bytes_max,
            device,
            features: features | abi::feature::IOCTL_NUMBERS,
            ..DeviceInformation::default()
        };
        self.command(abi::ADD_DEVICE, device, 0, &mut raw)
            .map_err(|error| refused(number, error))?;
        Ok(Information {
            number: raw.device,
            state: State::Dead,
            server: 0,
            queues: raw.queues,
            depth: raw.depth,
            transfer_maximum: raw.transfer_bytes_max,
            features: raw.features,
        })
    }

    pub(super) fn set_parameters(
        &mut self,
        device: u32,
        parameters: &Parameters,
    ) -> Result<(), Error> {
        let mut parameters = Parameters { length: size_of::<Parameters>() as u32, ..*parameters };
        self.command(abi::SET_PARAMETERS, device, 0, &mut parameters)
            .map_err(Error::system(format_args!("parameters of ublk device {device}")))
    }

    pub(super) fn parameters(&mut self, device: u32) -> Result<Parameters, Error> {
        let mut parameters =
            Parameters { length: size_of::<Parameters>() as u32, ..Parameters::default() };
        self.command(abi::GET_PARAMETERS, device, 0, &mut parameters)
            .map_err(Error::system(format_args!("parameters of ublk device {device}")))?;
        Ok(parameters)
    }

    /// Waits until all queues fetch, and makes the device usable. The kernel then reads the partition table
    /// through the queues.
    pub(super) fn start(&mut self, device: u32) -> Result<(), Error> {
        self.plain(abi::START_DEVICE, device, pid())
            .map_err(Error::system(format_args!("starting ublk device {device}")))
    }

    /// Begins the recovery of a device whose process is gone.
    pub(super) fn start_recovery(&mut self, device: u32) -> io::Result<()> {
        self.plain(abi::START_RECOVERY, device, 0)
    }

    /// Waits until all queues fetch, and lets requests through again.
    pub(super) fn end_recovery(&mut self, device: u32) -> Result<(), Error> {
        self.plain(abi::END_RECOVERY, device, pid())
            .map_err(Error::system(format_args!("taking over ublk device {device}")))
    }

    pub(super) fn update_size(&mut self, device: u32, sectors: u64) -> Result<(), Error> {
        self.plain(abi::UPDATE_SIZE, device, sectors)
            .map_err(Error::system(format_args!("new size of ublk device {device}")))
    }

    /// Stops a device: its users lose it. Requests under way are finished if a process serves them, and
    /// fail otherwise.
    ///
    /// # Errors
    /// If there is no such device, or this user lacks permission.
    pub fn stop(&mut self, device: u32) -> Result<(), Error> {
        self.plain(abi::STOP_DEVICE, device, 0)
            .map_err(Error::system(format_args!("stopping ublk device {device}")))
    }

    /// Removes a device as soon as it is closed, which it is not while it is mounted. Kernels before
    /// 6.9 wait for that.
    ///
    /// # Errors
    /// If there is no such device, or this user lacks permission.
    pub fn delete_later(&mut self, device: u32) -> Result<(), Error> {
        match self.plain(abi::DELETE_DEVICE_LATER, device, 0) {
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => self.delete(device),
            other => other.map_err(Error::system(format_args!("removing ublk device {device}"))),
        }
    }

    /// Waits until a device is closed, and removes it.
    ///
    /// # Errors
    /// If there is no such device, or this user lacks permission.
    pub fn delete(&mut self, device: u32) -> Result<(), Error> {
        self.plain(abi::DELETE_DEVICE, device, 0)
            .map_err(Error::system(format_args!("removing ublk device {device}")))
    }
}

/// Explains why the driver added no device, and what to do if that is known.
fn refused(number: Option<u32>, error: io::Error) -> Error {
    match (number, error.raw_os_error()) {
        (Some(number), Some(libc::EEXIST)) => {
            Error::Refused(format!("/dev/ublkb{number} exists already: choose another number"))
        }
        _ => Error::system("adding a ublk device")(error),
    }
}

fn pid() -> u64 {
    u64::from(std::process::id())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_is_taken_is_told() {
        let said = |number, errno| refused(number, io::Error::from_raw_os_error(errno)).to_string();
        let taken = "/dev/ublkb3 exists already: choose another number";
        assert_eq!(said(Some(3), libc::EEXIST), taken);
        assert!(said(Some(3), libc::ENOMEM).starts_with("adding a ublk device: "));
    }
}
