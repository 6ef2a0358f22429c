//! AMX: a unit of eight tile registers that multiplies matrices of bf16, on Intel's server CPUs since 2023. It stands
//! beside AVX-512, which does all the rest.
//!
//! Its intrinsics are not stable in Rust, and what a tile register holds cannot be handed from one piece of assembly to
//! the next: so each function here is a whole loop. Bits: a product adds the even, and by itself the odd elements of
//! a depth of 32 (or 16) in order, then both to the sum; denormals are zero; each row is on its own.

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::sync::OnceLock;

use super::{Depth, KeyTiles, MATRIX_ROWS, ValueTiles};

/// Whether this CPU has AMX with bf16, and this process may use it.
pub(super) fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| is_supported() && is_permitted())
}

fn is_supported() -> bool {
    const OSXSAVE: u32 = 1 << 27;
    /// AMX-BF16 and AMX-TILE.
    const AMX: u32 = 1 << 22 | 1 << 24;
    /// The system saves tile registers and their configuration.
    const TILES: u32 = 1 << 17 | 1 << 18;
    if __cpuid(0).eax < 7 || __cpuid(1).ecx & OSXSAVE == 0 || __cpuid_count(7, 0).edx & AMX != AMX {
        return false;
    }
    let states: u32;
    // SAFETY: OSXSAVE says that the instruction exists.
    unsafe {
        asm!("xgetbv", in("ecx") 0, out("eax") states, out("edx") _, options(nomem, nostack, preserves_flags));
    }
    states & TILES == TILES
}

/// Linux makes room for a process's tile registers when it asks: `arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)`.
#[cfg(target_os = "linux")]
fn is_permitted() -> bool {
    const ARCH_PRCTL: isize = 158;
    let mut result = ARCH_PRCTL;
    // SAFETY: the call reads and writes no memory of this process; the kernel clobbers rcx and r11.
    unsafe {
        asm!("syscall", inout("rax") result, in("rdi") 0x1023, in("rsi") 18, out("rcx") _, out("r11") _,
            options(nomem, nostack));
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}

/// The shapes of the tile registers: sums (0 to 3), left and right factors of whole depth (4 and 5), and of a token tile
/// (6 and 7).
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    /// Bytes of a row, and rows.
    bytes: [u16; 16],
    rows: [u8; 16],
}

static SHAPES: Shapes = {
    let (line, rows) = (64, MATRIX_ROWS as u8);
    let (mut bytes, mut all) = ([0; 16], [0; 16]);
    let mut t = 0;
    while t < 8 {
        (bytes[t], all[t]) = (line, rows);
        t += 1;
    }
    (bytes[6], all[7]) = (line / 2, rows / 2);
    Shapes {
        palette: 1,
        start_row: 0,
        reserved: [0; 14],
        bytes,
        rows: all,
    }
};

/// Gives the tile registers of this thread their shapes.
///
/// # Safety
/// AMX is available.
pub(super) unsafe fn begin() {
    // SAFETY: the caller's promise; the configuration is a valid one.
    unsafe {
        asm!("ldtilecfg [{}]", in(reg) &raw const SHAPES, options(nostack, preserves_flags, readonly));
    };
}

/// Gives them back, so that the system need not save them.
///
/// # Safety
/// AMX is available.
pub(super) unsafe fn end() {
    // SAFETY: the caller's promise.
    unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
}

/// Prefetches of eight cache lines from `$at` on.
macro_rules! ask {
    ($hint:literal, $at:literal) => {
        concat!(
            ".irp line,0,64,128,192,256,320,384,448\n",
            $hint,
            " [",
            $at,
            " + \\line]\n.endr\n"
        )
    };
}

/// See [`Simd::matrix_scores`](super::Simd::matrix_scores).
///
/// # Safety
/// As there; the tile registers have their shapes.
pub(super) unsafe fn scores(
    query: *const u32,
    keys: &KeyTiles,
    depth: Depth,
    scores: *mut f32,
    stride: usize,
) {
    // `ask0` and `more0` prefetch the first and the second half of what a step of the first tile has, and so on.
    macro_rules! run {
        ($ask0:expr, $more0:expr, $ask1:expr, $more1:expr) => {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "test {whole}, {whole}",
                "jz 3f",
                "2:",
                "tileloadd tmm4, [{query} + {line}]",
                "tileloadd tmm5, [{k0} + {line}]",
                "tdpbf16ps tmm0, tmm4, tmm5",
                $ask0,
                $more0,
                "tileloadd tmm5, [{k1} + {line}]",
                "tdpbf16ps tmm1, tmm4, tmm5",
                $ask1,
                $more1,
                ".irp pointer,{query},{k0},{k1},{a0},{a1},{n0},{n1}",
                "add \\pointer, 1024",
                ".endr",
                "dec {whole}",
                "jnz 2b",
                "3:",
                "test {half}, {half}",
                "jz 4f",
                "tileloadd tmm6, [{query} + {line}]",
                "tileloadd tmm7, [{k0} + {line}]",
                "tdpbf16ps tmm0, tmm6, tmm7",
                $ask0,
                "tileloadd tmm7, [{k1} + {line}]",
                "tdpbf16ps tmm1, tmm6, tmm7",
                $ask1,
                "4:",
                "tilestored [{scores} + {stride}], tmm0",
                "tilestored [{scores} + {stride} + 64], tmm1",
                query = inout(reg) query => _,
                k0 = inout(reg) keys.tiles[0] => _,
                k1 = inout(reg) keys.tiles[1] => _,
                a0 = inout(reg) keys.ahead[0] => _,
                a1 = inout(reg) keys.ahead[1] => _,
                n0 = inout(reg) keys.near[0] => _,
                n1 = inout(reg) keys.near[1] => _,
                whole = inout(reg) depth.whole => _,
                half = in(reg) usize::from(depth.half),
                line = in(reg) 64_usize,
                scores = in(reg) scores,
                stride = in(reg) stride,
                out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            )
        };
    }
    macro_rules! asks {
        ($near:literal, $ahead:literal) => {
            concat!(ask!("prefetcht0", $near), ask!("prefetcht1", $ahead))
        };
    }
    // SAFETY: the caller's promise. A prefetch may name any address.
    unsafe {
        if keys.ahead[0].is_null() {
            run!("", "", "", "");
        } else {
            run!(
                asks!("{n0}", "{a0}"),
                asks!("{n0} + 512", "{a0} + 512"),
                asks!("{n1}", "{a1}"),
                asks!("{n1} + 512", "{a1} + 512")
            );
        }
    }
}

/// See [`Simd::matrix_values`](super::Simd::matrix_values).
///
/// # Safety
/// As there; the tile registers have their shapes.
pub(super) unsafe fn values(
    weights: *const u32,
    stride: usize,
    values: &ValueTiles<'_>,
    out: *mut f32,
    out_stride: usize,
) {
    // `columns` has a number for each tile of columns; `ask` is done for each, `near` once a tile of tokens.
    macro_rules! run {
        ($columns:literal, $ask:expr, $near:expr) => {
            asm!(
                concat!(".irp n,", $columns),
                "tilezero tmm\\n",
                ".endr",
                "2:",
                "mov {v}, [{tiles}]",
                "mov {a}, [{ahead}]",
                "tileloadd tmm6, [{weights} + {stride}]",
                concat!(".irp n,", $columns),
                "tileloadd tmm7, [{v} + {row} + 64*\\n]",
                "tdpbf16ps tmm\\n, tmm6, tmm7",
                $ask,
                ".endr",
                "add {tiles}, 8",
                "add {ahead}, 8",
                "add {weights}, 32",
                $near,
                "dec {n}",
                "jnz 2b",
                concat!(".irp n,", $columns),
                "tilestored [{out} + {out_stride} + 64*\\n], tmm\\n",
                ".endr",
                tiles = inout(reg) values.tiles.as_ptr() => _,
                ahead = inout(reg) values.ahead.as_ptr() => _,
                v = out(reg) _,
                a = out(reg) _,
                n = inout(reg) values.ahead.len() => _,
                row = in(reg) values.row,
                row3 = in(reg) 3 * values.row,
                weights = inout(reg) weights => _,
                stride = in(reg) stride,
                out = in(reg) out,
                out_stride = in(reg) out_stride,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            )
        };
    }
    macro_rules! near {
        ($columns:literal) => {
            concat!(
                "mov {v}, [{tiles}]\nlea {a}, [{v} + 4*{row}]\n",
                ".irp n,",
                $columns,
                "\n.irp base,{v},{a}\n",
                "prefetcht0 [\\base + 64*\\n]\nprefetcht0 [\\base + {row} + 64*\\n]\n",
                "prefetcht0 [\\base + 2*{row} + 64*\\n]\nprefetcht0 [\\base + {row3} + 64*\\n]\n",
                ".endr\n.endr"
            )
        };
    }
    macro_rules! columns {
        ($columns:literal) => {
            if values.ahead[0].is_null() {
                run!($columns, "", "/* {row3} */");
            } else {
                run!(
                    $columns,
                    ask!("prefetcht1", "{a} + 512*\\n"),
                    near!($columns)
                );
            }
        };
    }
    assert!(values.tiles.len() > values.ahead.len() && !values.ahead.is_empty());
    // SAFETY: the caller's promise, and what was just asserted. A prefetch may name any address.
    unsafe {
        match values.columns {
            1 => columns!("0"),
            2 => columns!("0,1"),
            3 => columns!("0,1,2"),
            4 => columns!("0,1,2,3"),
            n => unreachable!("{n} vectors of columns do not fit the registers"),
        }
    }
}
