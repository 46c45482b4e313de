//! Finds the system calls that a binary makes itself, by decoding its code.

use iced_x86::{Code, Decoder, DecoderOptions, Instruction, Register};
use object::elf::FileHeader64;
use object::read::elf::ElfFile;
use object::{Architecture, Endianness, Object, ObjectSection, ObjectSymbol, SectionKind};
use std::collections::BTreeSet;
use syscalls::{aarch64, x86_64};

/// The number of `io_uring_setup`, the same on all architectures.
const URING: u32 = 425;

/// Maximum number of instructions from the one that sets the number of a call to the call.
const NEAR: u32 = 12;

/// The calls that were found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Calls {
    /// Number of places in the code.
    pub(crate) sites: usize,
    /// Names of the calls whose numbers are set near the call.
    pub(crate) names: BTreeSet<String>,
    /// The binary uses io_uring, through its library, by number or with `syscall(2)`.
    pub(crate) uring: bool,
}

/// Examines a binary for 64-bit x86 or ARM. Finds nothing in others.
pub(crate) fn of(bytes: &[u8]) -> Calls {
    let mut calls = Calls::default();
    let Ok(binary) = ElfFile::<FileHeader64<Endianness>>::parse(bytes) else { return calls };
    let mut imported = binary.dynamic_symbols().filter(|symbol| symbol.is_undefined());
    calls.uring =
        imported.any(|symbol| symbol.name_bytes().is_ok_and(|n| n.starts_with(b"io_uring_")));
    let look = match binary.architecture() {
        Architecture::X86_64 => look_x86_64,
        Architecture::Aarch64 => look_aarch64,
        _ => return calls,
    };
    for section in binary.sections().filter(|section| section.kind() == SectionKind::Text) {
        if let Ok(code) = section.data() {
            look(code, section.address(), &mut calls);
        }
    }
    calls
}

/// Decodes code from beginning to end. Compiled code contains no data that would mislead the decoder for
/// long.
fn look_x86_64(code: &[u8], address: u64, calls: &mut Calls) {
    let uring = u64::from(URING);
    let mut decoder = Decoder::with_ip(64, code, address, DecoderOptions::NONE);
    let mut instruction = Instruction::default();
    let mut number = None;
    let mut since = u32::MAX;
    while decoder.can_decode() {
        decoder.decode_out(&mut instruction);
        since = since.saturating_add(1);
        match instruction.code() {
            Code::Mov_r32_imm32 | Code::Mov_rm64_imm32 => {
                let value = instruction.immediate(1);
                match instruction.op0_register() {
                    Register::EAX | Register::RAX => (number, since) = (Some(value), 0),
                    // The first argument of `syscall(2)`.
                    Register::EDI | Register::RDI if value == uring => calls.uring = true,
                    _ => {}
                }
            }
            Code::Xor_r32_rm32 | Code::Xor_rm32_r32
                if instruction.op0_register() == Register::EAX
                    && instruction.op1_register() == Register::EAX =>
            {
                (number, since) = (Some(0), 0);
            }
            Code::Syscall => {
                calls.sites += 1;
                let known = number.take().filter(|_| since <= NEAR);
                calls.uring |= known == Some(uring);
                let name = known.and_then(|n| x86_64::Sysno::new(usize::try_from(n).ok()?));
                calls.names.extend(name.map(|name| name.name().to_owned()));
            }
            _ => {}
        }
    }
}

/// Does the same for ARM, where each instruction is one word.
fn look_aarch64(code: &[u8], _: u64, calls: &mut Calls) {
    const CALL: u32 = 0xd400_0001; // svc 0
    // `movz` to a 32-bit or 64-bit register.
    const SET: u32 = 0x5280_0000;
    const NOT_THESE: u32 = !(1 << 31 | 0xffff << 5 | 0x1f);
    let mut number = None;
    let mut since = u32::MAX;
    for word in code.chunks_exact(4) {
        let word = word.iter().rev().fold(0, |word, byte| word << 8 | u32::from(*byte));
        since = since.saturating_add(1);
        let value = word >> 5 & 0xffff;
        match word & 0x1f {
            8 if word & NOT_THESE == SET => (number, since) = (Some(value), 0),
            // The first argument of `syscall(2)`.
            0 if word & NOT_THESE == SET && value == URING => calls.uring = true,
            _ if word == CALL => {
                calls.sites += 1;
                let known = number.take().filter(|_| since <= NEAR);
                calls.uring |= known == Some(URING);
                let name = known.and_then(|n| aarch64::Sysno::new(n as usize));
                calls.names.extend(name.map(|name| name.name().to_owned()));
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_found_where_they_are() {
        let mut calls = Calls::default();
        // mov eax, 257; lea rsi, [rip+0x050f]; syscall; xor eax, eax; syscall; ret
        let code = b"\xb8\x01\x01\0\0\x48\x8d\x35\x0f\x05\0\0\x0f\x05\x31\xc0\x0f\x05\xc3";
        look_x86_64(code, 0, &mut calls);
        let names = ["openat", "read"].map(str::to_owned).into();
        assert_eq!(calls, Calls { sites: 2, names, uring: false });
        let mut calls = Calls::default();
        look_x86_64(b"\xbf\xa9\x01\0\0\xe8\0\0\0\0\xc3", 0, &mut calls);
        assert_eq!(calls, Calls { uring: true, ..Calls::default() });
        assert_eq!(of(b"no binary"), Calls::default());
    }

    #[test]
    fn calls_are_found_in_code_for_arm() {
        let code =
            |words: &[u32]| -> Vec<u8> { words.iter().flat_map(|w| w.to_le_bytes()).collect() };
        let mut calls = Calls::default();
        // mov x8, 56; mov x1, x0; svc 0; mov w8, 63; svc 0; svc 1; ret
        let words = [
            0xd280_0708,
            0xaa00_03e1,
            0xd400_0001,
            0x5280_07e8,
            0xd400_0001,
            0xd400_0021,
            0xd65f_03c0,
        ];
        look_aarch64(&code(&words), 0, &mut calls);
        let names = ["openat", "read"].map(str::to_owned).into();
        assert_eq!(calls, Calls { sites: 2, names, uring: false });
        let mut calls = Calls::default();
        // mov w0, 425; bl
        look_aarch64(&code(&[0x5280_3520, 0x9400_0000]), 0, &mut calls);
        assert_eq!(calls, Calls { uring: true, ..Calls::default() });
    }
}
