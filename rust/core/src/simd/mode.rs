//! The floating-point mode of a thread: how it rounds, whether denormals are numbers, what traps.
//!
//! A caller may have changed its own (`torch.set_flush_denormal(True)`, `fesetround`), and a worker has what the thread
//! that started it had. Bits are promised under the default alone, which is also the only one that Rust's arithmetic is
//! defined for: who computes holds a [`DefaultMode`].

use std::marker::PhantomData;

/// The default floating-point mode of this thread, for as long as this lives: round to nearest even, denormals are numbers,
/// nothing traps. What was set before comes back, exception flags included, also when a panic unwinds.
///
/// What is computed from memory read since [`DefaultMode::enter`], and written to memory before the drop, is computed in
/// between: the compiler moves neither across. It knows nothing of modes, and may move arithmetic on mere values.
#[must_use = "the mode ends where this is dropped"]
pub(crate) struct DefaultMode {
    before: register::Bits,
    /// Not `Send`: the mode is this thread's.
    thread: PhantomData<*const ()>,
}

impl DefaultMode {
    #[inline]
    pub(crate) fn enter() -> Self {
        let before = register::read();
        // SAFETY: the mode that Rust expects, and this architecture's.
        unsafe { register::write(register::DEFAULT) };
        Self {
            before,
            thread: PhantomData,
        }
    }
}

impl Drop for DefaultMode {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: read on this thread. Where it is another mode than Rust expects, it was there before.
        unsafe { register::write(self.before) };
    }
}

/// MXCSR.
#[cfg(target_arch = "x86_64")]
mod register {
    use std::arch::asm;

    pub(super) type Bits = u32;
    /// All exceptions masked, and none seen.
    pub(super) const DEFAULT: Bits = 0x1f80;

    #[inline]
    pub(super) fn read() -> Bits {
        let mut bits = 0;
        // SAFETY: x86-64 has SSE; the instruction writes these four bytes.
        unsafe {
            asm!("stmxcsr [{}]", in(reg) &raw mut bits, options(nostack, preserves_flags));
        }
        bits
    }

    /// # Safety
    /// `bits` are the default, or came from [`read`].
    #[inline]
    pub(super) unsafe fn write(bits: Bits) {
        // SAFETY: x86-64 has SSE; the instruction reads these four bytes, and by the caller's promise none of them is
        // reserved. Without further options, memory accesses stay on their side, and exception flags may change.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const bits, options(nostack)) };
    }
}

/// FPCR.
#[cfg(target_arch = "aarch64")]
mod register {
    use std::arch::asm;

    pub(super) type Bits = u64;
    pub(super) const DEFAULT: Bits = 0;

    #[inline]
    pub(super) fn read() -> Bits {
        let bits;
        // SAFETY: every thread may read it.
        unsafe { asm!("mrs {}, fpcr", out(reg) bits, options(nostack, preserves_flags)) };
        bits
    }

    /// # Safety
    /// `bits` are the default, or came from [`read`].
    #[inline]
    pub(super) unsafe fn write(bits: Bits) {
        // SAFETY: every thread may write it. Without `nomem`, memory accesses stay on their side.
        unsafe { asm!("msr fpcr, {}", in(reg) bits, options(nostack, preserves_flags)) };
    }
}

/// Nothing: the mode is left as it is.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod register {
    pub(super) type Bits = ();
    pub(super) const DEFAULT: Bits = ();

    #[inline]
    pub(super) fn read() -> Bits {}

    /// # Safety
    /// None is needed.
    #[inline]
    pub(super) unsafe fn write((): Bits) {}
}

#[cfg(all(test, any(target_arch = "x86_64", target_arch = "aarch64")))]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::{DefaultMode, register};

    /// Towards zero, denormals flushed.
    #[cfg(target_arch = "x86_64")]
    const OTHER: register::Bits = 0xffc0;
    #[cfg(target_arch = "aarch64")]
    const OTHER: register::Bits = 0b111 << 22;

    #[test]
    fn the_mode_is_the_default_inside_and_comes_back_also_on_unwinding() {
        // The test's own mode comes back, too, whatever fails.
        let _own = DefaultMode::enter();
        // SAFETY: a mode that the register has; nobody computes under it.
        unsafe { register::write(OTHER) };
        let inside = {
            let _mode = DefaultMode::enter();
            register::read()
        };
        let after = register::read();
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let _mode = DefaultMode::enter();
            std::panic::resume_unwind(Box::new(()));
        }));
        let unwound = register::read();
        // SAFETY: the default.
        unsafe { register::write(register::DEFAULT) };
        assert!(panicked.is_err());
        assert_eq!([inside, after, unwound], [register::DEFAULT, OTHER, OTHER]);
    }
}
