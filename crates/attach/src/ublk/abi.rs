//! Structures and numbers of the kernel's ublk interface (`linux/ublk_cmd.h`).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Direction bits of an `ioctl` number: the kernel writes, or it reads and writes.
const READ: u32 = 2;
const READ_WRITE: u32 = 3;

const fn number(direction: u32, command: u32, bytes: usize) -> u32 {
    direction << 30 | (bytes as u32) << 16 | (b'u' as u32) << 8 | command
}

const fn control(direction: u32, command: u32) -> u32 {
    number(direction, command, size_of::<ControlCommand>())
}

const fn io(command: u32) -> u32 {
    number(READ_WRITE, command, size_of::<IoCommand>())
}

pub(super) const ADD_DEVICE: u32 = control(READ_WRITE, 0x04);
pub(super) const DELETE_DEVICE: u32 = control(READ_WRITE, 0x05);
pub(super) const START_DEVICE: u32 = control(READ_WRITE, 0x06);
pub(super) const STOP_DEVICE: u32 = control(READ_WRITE, 0x07);
pub(super) const SET_PARAMETERS: u32 = control(READ_WRITE, 0x08);
pub(super) const GET_PARAMETERS: u32 = control(READ, 0x09);
pub(super) const START_RECOVERY: u32 = control(READ_WRITE, 0x10);
pub(super) const END_RECOVERY: u32 = control(READ_WRITE, 0x11);
pub(super) const GET_INFORMATION: u32 = control(READ, 0x02);
pub(super) const DELETE_DEVICE_LATER: u32 = control(READ, 0x14);
pub(super) const GET_FEATURES: u32 = control(READ, 0x13);
pub(super) const UPDATE_SIZE: u32 = control(READ_WRITE, 0x15);

pub(super) const FETCH: u32 = io(0x20);
pub(super) const COMMIT_AND_FETCH: u32 = io(0x21);

/// "No queue" and "any device".
pub(super) const NO_QUEUE: u16 = u16::MAX;
pub(super) const ANY_DEVICE: u32 = u32::MAX;

/// Maximum number of requests of a queue, for which its part of the mapped descriptors has room.
pub(super) const DEPTH_MAX: usize = 4096;

/// Features of a device.
pub(super) mod feature {
    pub(in super::super) const USER_RECOVERY: u64 = 1 << 3;
    pub(in super::super) const USER_RECOVERY_REISSUE: u64 = 1 << 4;
    pub(in super::super) const IOCTL_NUMBERS: u64 = 1 << 6;
    pub(in super::super) const UPDATE_SIZE: u64 = 1 << 10;
}

/// Bits for the parts of [`Parameters`] that are set.
pub(super) mod part {
    pub(in super::super) const BASIC: u32 = 1;
    pub(in super::super) const DISCARD: u32 = 2;
}

/// Attributes in [`Parameters`].
pub(super) mod attribute {
    pub(in super::super) const READ_ONLY: u32 = 1;
    pub(in super::super) const ROTATIONAL: u32 = 1 << 1;
    pub(in super::super) const VOLATILE_CACHE: u32 = 1 << 2;
    pub(in super::super) const FUA: u32 = 1 << 3;
}

/// Operations and flags of a [`Descriptor`].
pub(super) mod operation {
    pub(in super::super) const MASK: u32 = 0xff;
    pub(in super::super) const READ: u32 = 0;
    pub(in super::super) const WRITE: u32 = 1;
    pub(in super::super) const FLUSH: u32 = 2;
    pub(in super::super) const DISCARD: u32 = 3;
    pub(in super::super) const WRITE_ZEROES: u32 = 5;
    pub(in super::super) const FUA: u32 = 1 << 13;
    pub(in super::super) const NO_UNMAP: u32 = 1 << 15;
}

/// Payload of a command for the control device.
#[derive(Clone, Copy, Debug, Default, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct ControlCommand {
    pub(super) device: u32,
    pub(super) queue: u16,
    /// Length of what is at `address`.
    pub(super) length: u16,
    pub(super) address: u64,
    pub(super) data: u64,
    pub(super) path_length: u16,
    pub(super) padding: u16,
    pub(super) reserved: u32,
}

/// Payload of a command for a device.
#[derive(Clone, Copy, Debug, Default, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct IoCommand {
    pub(super) queue: u16,
    pub(super) tag: u16,
    /// Number of bytes done, or a negative error number.
    pub(super) result: i32,
    /// Address of the buffer that the kernel copies to or from.
    pub(super) address: u64,
}

/// One request of the kernel, in memory that is mapped from the device.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Descriptor {
    pub(super) operation: u32,
    pub(super) sectors: u32,
    pub(super) first_sector: u64,
    pub(super) address: u64,
}

/// What the driver knows about a device.
#[derive(Clone, Copy, Debug, Default, IntoBytes, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct DeviceInformation {
    pub(super) queues: u16,
    pub(super) depth: u16,
    pub(super) state: u16,
    pub(super) padding_0: u16,
    pub(super) transfer_bytes_max: u32,
    pub(super) device: u32,
    pub(super) server_pid: i32,
    pub(super) padding_1: u32,
    pub(super) features: u64,
    /// Stored by the driver for the server process, unused.
    pub(super) ours: u64,
    pub(super) owner_uid: u32,
    pub(super) owner_gid: u32,
    pub(super) reserved: [u64; 2],
}

/// What a device looks like to its users. Newer kernels know more parts than these.
#[derive(Clone, Copy, Debug, Default, IntoBytes, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Parameters {
    pub(super) length: u32,
    pub(super) parts: u32,
    pub(super) attributes: u32,
    pub(super) logical_block_shift: u8,
    pub(super) physical_block_shift: u8,
    pub(super) optimal_io_shift: u8,
    pub(super) minimal_io_shift: u8,
    pub(super) transfer_sectors_max: u32,
    pub(super) chunk_sectors: u32,
    pub(super) sectors: u64,
    pub(super) virtual_boundary_mask: u64,
    pub(super) discard_alignment: u32,
    pub(super) discard_granularity: u32,
    pub(super) discard_sectors_max: u32,
    pub(super) zero_sectors_max: u32,
    pub(super) discard_segments_max: u16,
    pub(super) reserved: u16,
    pub(super) padding: u32,
}

const _: () = assert!(size_of::<ControlCommand>() == 32);
const _: () = assert!(size_of::<IoCommand>() == 16);
const _: () = assert!(size_of::<Descriptor>() == 24);
const _: () = assert!(size_of::<DeviceInformation>() == 64);
const _: () = assert!(std::mem::offset_of!(Parameters, sectors) == 24);
const _: () = assert!(std::mem::offset_of!(Parameters, discard_alignment) == 40);
