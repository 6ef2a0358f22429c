//! Floating-point modes that callers may be in.
#![allow(missing_docs, unreachable_pub)]

use std::arch::asm;

/// Denormals are zeros, going in and coming out; towards zero; both, with exceptions seen before.
#[cfg(target_arch = "x86_64")]
pub const MODES: [u64; 3] = [0x9fc0, 0x7f80, 0xffff];
#[cfg(target_arch = "aarch64")]
pub const MODES: [u64; 3] = [1 << 24, 0b11 << 22, 0b111 << 22];

#[cfg(target_arch = "x86_64")]
pub fn mode() -> u64 {
    let mut mode = 0_u32;
    // SAFETY: it is written to these four bytes.
    unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut mode) };
    mode.into()
}
#[cfg(target_arch = "aarch64")]
pub fn mode() -> u64 {
    let mode;
    // SAFETY: it is read, and that is all.
    unsafe { asm!("mrs {}, fpcr", out(reg) mode) };
    mode
}

fn set(mode: u64) {
    // SAFETY: the register has this mode; this crate computes nothing under it.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        asm!("ldmxcsr [{}]", in(reg) &raw const mode);
    }
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        asm!("msr fpcr, {}", in(reg) mode);
    }
}

/// Calls under a mode, which must be as it was afterwards.
pub fn under<T>(wanted: u64, call: impl FnOnce() -> T) -> T {
    let own = mode();
    set(wanted);
    let result = call();
    let left = mode();
    set(own);
    assert_eq!(left, wanted, "{left:x} instead of {wanted:x}");
    result
}
