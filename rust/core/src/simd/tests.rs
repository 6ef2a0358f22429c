//! Every method of every instruction set of this CPU against plain Rust, on random bits at odd addresses.
#![allow(clippy::needless_range_loop)] // indices name lanes and parts of several arrays at once

use half::{bf16, f16};

use super::{Dispatch, Isa, Kernel, MAX_LANES, Simd};

const ROUNDS: usize = 200;

/// Bytes that begin at an odd address, with a margin on both sides that nobody may write.
struct Memory {
    bytes: [u8; Self::MARGIN + Self::SIZE + Self::MARGIN],
}

impl Memory {
    const MARGIN: usize = 65;
    const SIZE: usize = 128;
    const UNTOUCHED: u8 = 0xa5;

    fn new() -> Self {
        Self {
            bytes: [Self::UNTOUCHED; 2 * Self::MARGIN + Self::SIZE],
        }
    }

    fn of(words: &[u32]) -> Self {
        let mut memory = Self::new();
        for (i, word) in words.iter().enumerate() {
            memory.bytes[Self::MARGIN + 4 * i..][..4].copy_from_slice(&word.to_le_bytes());
        }
        memory
    }

    #[inline(always)]
    fn at<T>(&mut self) -> *mut T {
        self.bytes[Self::MARGIN..].as_mut_ptr().cast()
    }

    fn words(&self) -> [u32; MAX_LANES] {
        std::array::from_fn(|i| {
            let word = &self.bytes[Self::MARGIN + 4 * i..][..4];
            u32::from_le_bytes(word.try_into().unwrap())
        })
    }

    /// What was written: `n` bytes and nothing around them.
    fn written(&self, n: usize) -> &[u8] {
        let (before, rest) = self.bytes.split_at(Self::MARGIN);
        let (written, after) = rest.split_at(n);
        assert!(
            [before, after]
                .concat()
                .iter()
                .all(|&b| b == Self::UNTOUCHED)
        );
        written
    }
}

/// Random words, many of them special floats.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 24) as u32
    }

    fn words(&mut self) -> [u32; MAX_LANES] {
        std::array::from_fn(|_| self.bits())
    }

    /// Any float, and often a special one.
    fn any(&mut self) -> [f32; MAX_LANES] {
        const SPECIAL: [f32; 10] = [
            0.0,
            -0.0,
            1.0,
            f32::NAN,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::MIN_POSITIVE,
            1e-42,
            f32::MAX,
            -1.5,
        ];
        std::array::from_fn(|_| {
            let bits = self.bits();
            let special = SPECIAL.get(bits as usize % 40).copied();
            special.unwrap_or_else(|| f32::from_bits(self.bits()))
        })
    }

    /// Floats of magnitudes around 1, never special.
    fn plain(&mut self) -> [f32; MAX_LANES] {
        std::array::from_fn(|_| {
            let exponent = 120 + self.bits() % 14;
            f32::from_bits(self.bits() & 0x807f_ffff | exponent << 23)
        })
    }
}

/// The same float: the same bits, or NaN both.
#[track_caller]
fn same(got: f32, want: f32, what: &str) {
    let equal = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
    assert!(
        equal,
        "{what}: {got:e} ({:08x}), expected {want:e} ({:08x})",
        got.to_bits(),
        want.to_bits()
    );
}

struct Check(Isa);

impl Dispatch for Check {
    type Output = ();
    fn run<S: Simd>(self, s: S) {
        s.vectorize(self);
    }
}

impl Kernel for Check {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut random = Random(0x9e37_79b9_7f4a_7c15);
        for _ in 0..ROUNDS {
            floats(s, self.0, &mut random);
            lanes(s, self.0, &mut random);
            bf16_pairs(s, self.0, &mut random);
            integers(s, self.0, &mut random);
            shuffles(s, self.0, &mut random);
        }
        widening(s, self.0);
        s.prefetch(std::ptr::null());
        s.prefetch(std::ptr::without_provenance(usize::MAX));
    }
}

#[inline(always)]
fn load<S: Simd>(s: S, x: &[f32; MAX_LANES]) -> S::F32 {
    // SAFETY: an array has MAX_LANES floats.
    unsafe { s.load(x.as_ptr()) }
}

#[inline(always)]
fn store<S: Simd>(s: S, x: S::F32) -> [f32; MAX_LANES] {
    let mut lanes = [0.0; MAX_LANES];
    // SAFETY: as above.
    unsafe { s.store(lanes.as_mut_ptr(), x) };
    lanes
}

#[inline(always)]
fn floats<S: Simd>(s: S, isa: Isa, random: &mut Random) {
    let [x, y, z] = [random.any(), random.any(), random.any()];
    let [a, b, c] = [x, y, z].map(|x| load(s, &x));
    let fma = |a: f32, b: f32, c: f32| {
        if isa.rounds_twice() {
            a * b + c
        } else {
            a.mul_add(b, c)
        }
    };
    let below = |a, b, c| if a < z[0] { b } else { c };
    let results = [
        store(s, s.add(a, b)),
        store(s, s.sub(a, b)),
        store(s, s.mul(a, b)),
        store(s, s.div(a, b)),
        store(s, s.fma(a, b, c)),
        store(s, s.select_below(a, z[0], b, c)),
        store(s, s.splat(x[0])),
    ];
    let larger = store(s, s.max(a, b));
    for i in 0..S::LANES {
        let (x, y, z) = (x[i], y[i], z[i]);
        let wants = [x + y, x - y, x * y, x / y, fma(x, y, z), below(x, y, z)];
        let names = ["add", "sub", "mul", "div", "fma", "select_below"];
        for ((got, want), name) in results.iter().zip(wants).zip(names) {
            same(
                got[i],
                want,
                &format!("{isa} {name} of {x:e}, {y:e}, {z:e}"),
            );
        }
        same(results[6][i], results[6][0], "splat");
        if !x.is_nan() && !y.is_nan() {
            assert_eq!(larger[i], x.max(y), "{isa} max of {x}, {y}");
        } else if y.is_nan() {
            assert!(larger[i].is_nan(), "{isa} max of {x}, {y}");
        }
    }

    let words = random.words();
    let moved = store(s, s.exponents(load(s, &words.map(f32::from_bits))));
    for i in 0..S::LANES {
        assert_eq!(moved[i].to_bits(), words[i] << 23, "{isa} exponents");
    }
}

#[inline(always)]
fn lanes<S: Simd>(s: S, isa: Isa, random: &mut Random) {
    let (x, y) = (random.words(), random.words());
    let [a, b] = [x, y].map(|x| load(s, &x.map(f32::from_bits)));
    let bits = |x: S::F32| store(s, x).map(f32::to_bits);

    let (mut from, mut to) = (Memory::of(&x), Memory::new());
    // SAFETY: there is room for MAX_LANES words.
    unsafe { s.store(to.at(), s.load(from.at())) };
    to.written(4 * S::LANES);
    assert_eq!(
        to.words()[..S::LANES],
        x[..S::LANES],
        "{isa} load and store"
    );

    let (low, high) = s.zip(a, b);
    let zipped = [&bits(low)[..S::LANES], &bits(high)[..S::LANES]].concat();
    for i in 0..S::LANES {
        assert_eq!(zipped[2 * i..][..2], [x[i], y[i]], "{isa} zip");
    }
    for (lo, hi) in (0..=S::LANES).flat_map(|lo| (lo..=S::LANES).map(move |hi| (lo, hi))) {
        let selected = bits(s.select_lanes(lo, hi, a, b));
        for i in 0..S::LANES {
            let want = if (lo..hi).contains(&i) { x[i] } else { y[i] };
            assert_eq!(selected[i], want, "{isa} lanes {lo}..{hi}");
        }
    }

    let x = random.plain();
    let a = load(s, &x);
    let (mut tree, mut n) = (x, S::LANES);
    while n > 1 {
        n /= 2;
        for i in 0..n {
            tree[i] += tree[i + n];
        }
    }
    same(s.sum(a), tree[0], &format!("{isa} sum"));
    let largest = x[..S::LANES]
        .iter()
        .copied()
        .fold(f32::NEG_INFINITY, f32::max);
    same(s.maximum(a), largest, &format!("{isa} maximum"));
    same(s.first(a), x[0], &format!("{isa} first"));

    let x = random.any();
    let rounded = store(s, s.round_bf16(load(s, &x)));
    for i in 0..S::LANES {
        same(
            rounded[i],
            bf16::from_f32(x[i]).to_f32(),
            &format!("{isa} round_bf16"),
        );
    }

    // All that f16 can say, its subnormals and what rounds to infinity; half of them ties or near to one.
    let mut x = random.any();
    for x in x.iter_mut().filter(|x| x.is_finite()) {
        let bits = x.to_bits();
        let tie = if bits & 1 == 0 { !0xfff } else { !0 };
        *x = f32::from_bits(bits & 0x807f_ffff & tie | (100 + bits % 48) << 23);
    }
    narrowing(s, isa, &x);

    let rows: [[f32; MAX_LANES]; MAX_LANES] = std::array::from_fn(|_| random.plain());
    let mut vectors = [a; MAX_LANES];
    for i in 0..MAX_LANES {
        vectors[i] = load(s, &rows[i]);
    }
    let sums = store(s, s.sums(&vectors));
    for i in 0..S::LANES {
        same(sums[i], s.sum(load(s, &rows[i])), &format!("{isa} sums"));
    }
}

/// To halves, bit by bit: NaN has the sign and the leading bits that it had.
#[inline(always)]
fn narrowing<S: Simd>(s: S, isa: Isa, x: &[f32; MAX_LANES]) {
    let a = load(s, x);
    let [mut half, mut brain] = [Memory::new(), Memory::new()];
    // SAFETY: there is room for MAX_LANES elements.
    unsafe {
        s.store_f16(half.at(), a);
        s.store_bf16_narrow(brain.at(), a);
    }
    let [half, brain] = [&half, &brain].map(|memory| memory.written(2 * S::LANES));
    for i in 0..S::LANES {
        let want = [
            f16::from_f32(x[i]).to_bits(),
            bf16::from_f32(x[i]).to_bits(),
        ];
        for (got, want) in [half, brain].into_iter().zip(want) {
            let got = u16::from_le_bytes([got[2 * i], got[2 * i + 1]]);
            // What is left of a signalling NaN is up to the hardware.
            let quiet = !x[i].is_nan() || x[i].to_bits() & 1 << 22 != 0;
            assert!(
                got == want || !quiet,
                "{isa} narrowing of {:e}: {got:04x}, expected {want:04x}",
                x[i]
            );
        }
    }
}

/// The words of one pair of bf16, given its bits.
fn bf16_words<S: Simd>([first, second]: [u16; 2]) -> [u32; 2] {
    let (first, second) = (u32::from(first), u32::from(second) << 16);
    match S::BF16_PARTS {
        1 => [first | second, 0],
        _ => [first << 16, second],
    }
}

/// Products of pairs, and of the halves of pairs.
#[inline(always)]
fn bf16_pairs<S: Simd>(s: S, isa: Isa, random: &mut Random) {
    let parts = S::BF16_PARTS;
    let narrow = |x: f32| bf16::from_f32(x).to_bits();
    let wide = |bits: u16| bf16::from_bits(bits).to_f32();
    let pairs: [[u16; 2]; MAX_LANES] = {
        let [x, y] = [random.plain(), random.plain()];
        std::array::from_fn(|i| [x[i], y[i]].map(narrow))
    };
    let (factor, sum) = (random.plain(), random.plain());
    let factor = [factor[0], factor[1]].map(narrow);
    let words = bf16_words::<S>(factor);
    let mut memory = Memory::of(&pairs.map(|[x, y]| u32::from(x) | u32::from(y) << 16));
    let mut all = load(s, &sum);
    for part in 0..parts {
        // SAFETY: there is room for MAX_LANES words.
        let a = unsafe { s.load_bf16(memory.at(), part) };
        all = s.dot_bf16(a, s.splat_bf16(words[part]), all);
    }
    let all = store(s, all);
    let check = |what: &str, got: f32, sum: f32, terms: [f32; 2]| {
        // In whatever order the instruction adds: three roundings.
        let exact = f64::from(sum) + terms.map(f64::from).iter().sum::<f64>();
        let size = f64::from(sum.abs()) + terms.map(|x| f64::from(x.abs())).iter().sum::<f64>();
        let error = (f64::from(got) - exact).abs();
        assert!(
            error <= 2e-7 * size,
            "{isa} dot_bf16 {what}: {sum:e} + {terms:?} is {got:e}, expected {exact:e}"
        );
    };
    for i in 0..S::LANES {
        let terms = [0, 1].map(|j| wide(pairs[i][j]) * wide(factor[j]));
        check("of both", all[i], sum[i], terms);
        if parts == 2 && !isa.rounds_twice() {
            let [x, y] = [0, 1].map(|j| (wide(pairs[i][j]), wide(factor[j])));
            same(
                all[i],
                y.0.mul_add(y.1, x.0.mul_add(x.1, sum[i])),
                &format!("{isa} dot_bf16"),
            );
        }
    }

    if parts == 1 {
        // A NaN in the element that is cleared is gone.
        for last in [false, true] {
            let mut pairs = pairs;
            pairs
                .iter_mut()
                .for_each(|pair| pair[usize::from(!last)] = 0xffff);
            let mut memory = Memory::of(&pairs.map(|[x, y]| u32::from(x) | u32::from(y) << 16));
            // SAFETY: as above.
            let a = unsafe { s.load_bf16(memory.at(), 0) };
            let kept = s.dot_bf16(s.keep_bf16(a, last), s.splat_bf16(words[0]), load(s, &sum));
            for (i, got) in store(s, kept)[..S::LANES].iter().enumerate() {
                let j = usize::from(last);
                check(
                    &format!("of one, last: {last}"),
                    *got,
                    sum[i],
                    [wide(pairs[i][j]) * wide(factor[j]), 0.0],
                );
            }
        }
    }

    // Any float but NaN, and ties; where pairs are one operation, subnormal numbers are zero.
    let tie = random.bits();
    let x = random.any().map(|x| {
        if tie & 1 == 0 {
            x
        } else {
            f32::from_bits(x.to_bits() & 0xffff_0000 | 0x8000)
        }
    });
    let x = x.map(|x| {
        if x.is_nan() || x.is_subnormal() {
            1.0
        } else {
            x
        }
    });
    for at in [0, S::LANES] {
        let mut words = Memory::new();
        let first = at * parts / 2;
        // SAFETY: as above, for twice as many.
        unsafe { s.store_bf16(words.at::<u32>().sub(first), at, load(s, &x)) };
        words.written(2 * S::LANES * parts);
        let got = words.words();
        for i in (0..S::LANES).step_by(2) {
            let want = bf16_words::<S>([narrow(x[i]), narrow(x[i + 1])]);
            assert_eq!(
                got[i / 2 * parts..][..parts],
                want[..parts],
                "{isa} store_bf16 of {}, {}",
                x[i],
                x[i + 1]
            );
        }
    }
}

/// Groups of four bytes, times groups of four 16-bit integers.
#[inline(always)]
fn integers<S: Simd>(s: S, isa: Isa, random: &mut Random) {
    let (x, sums) = (random.words(), random.words().map(|x| x >> 8));
    let x = x.map(|x| {
        if x % 16 == 0 {
            [0x8080_8080, 0x7f7f_7f7f, 0xffff_ffff][x as usize % 3]
        } else {
            x
        }
    });
    let factors: [i16; 4] = std::array::from_fn(|_| match random.bits() {
        x if x % 8 == 0 => [i16::MIN, i16::MAX][x as usize / 8 % 2],
        x => x as i16,
    });
    let words = [0, 1].map(|part| {
        let [first, third] = [factors[part], factors[part + 2]].map(|x| u32::from(x as u16));
        first | third << 16
    });
    let (mut bytes, mut start, mut out) = (Memory::of(&x), Memory::of(&sums), Memory::new());
    // SAFETY: there is room for MAX_LANES words.
    let sum = unsafe {
        let mut sum = s.load_i32(start.at());
        for part in 0..2 {
            sum = s.dot_i16(s.load_i8(bytes.at(), part), s.splat_i32(words[part]), sum);
        }
        s.store_i32(out.at(), sum);
        sum
    };
    out.written(4 * S::LANES);
    let (integers, floats) = (out.words(), store(s, s.to_f32(sum)));
    for i in 0..S::LANES {
        let group = x[i].to_le_bytes().map(|b| i32::from(b as i8));
        let products = group.iter().zip(factors).map(|(&x, f)| x * i32::from(f));
        let want = sums[i] as i32 + products.sum::<i32>();
        assert_eq!(
            integers[i] as i32, want,
            "{isa} dot_i16 of {group:?} and {factors:?}"
        );
        same(floats[i], want as f32, &format!("{isa} to_f32"));
    }

    // Halves and all that a weight may be.
    let x = random
        .words()
        .map(|x| ((x % 131_069) as f32 - 65_534.0) / 2.0);
    for at in [0, S::LANES] {
        let mut words = Memory::new();
        // SAFETY: as above.
        unsafe { s.store_i16(words.at::<u32>().sub(at / 2), at, load(s, &x)) };
        words.written(2 * S::LANES);
        let got = words.words();
        for i in (0..S::LANES).step_by(4) {
            let n: [u32; 4] =
                std::array::from_fn(|j| u32::from(x[i + j].round_ties_even() as i16 as u16));
            let want = [n[0] | n[2] << 16, n[1] | n[3] << 16];
            assert_eq!(
                got[i / 2..][..2],
                want,
                "{isa} store_i16 of {:?}",
                &x[i..][..4]
            );
        }
    }
}

/// What packs rows into tiles: bits are moved, whatever they are.
#[inline(always)]
fn shuffles<S: Simd>(s: S, isa: Isa, random: &mut Random) {
    let n = S::LANES;
    let x = random.words();
    let (mut low, mut high) = (Memory::new(), Memory::new());
    let words = load(s, &x.map(f32::from_bits));
    // SAFETY: there is room for MAX_LANES words.
    unsafe { s.store_halves(low.at(), high.at(), words) };
    let halves = |half: u32| -> Vec<u8> {
        x[..n]
            .iter()
            .flat_map(|x| ((x >> (16 * half)) as u16).to_le_bytes())
            .collect()
    };
    assert_eq!(low.written(2 * n), halves(0), "{isa} store_halves, low");
    assert_eq!(high.written(2 * n), halves(1), "{isa} store_halves, high");

    let mut rows = [0; 4].map(|_| Memory::of(&random.words()));
    let bytes = |row: &Memory| row.words().map(u32::to_le_bytes).concat();
    let content = [0, 1, 2, 3].map(|i| bytes(&rows[i]));
    let at = rows.each_mut().map(|row| row.at::<u8>().cast_const());
    let (mut two, mut four) = (Memory::new(), Memory::new());
    // SAFETY: as above.
    unsafe {
        s.interleave_2([at[0].cast(), at[1].cast()], two.at());
        s.interleave_4(at, four.at());
    }
    let interleaved = |rows: &[Vec<u8>], size: usize| -> Vec<u8> {
        let elements = (0..n).flat_map(|i| rows.iter().map(move |row| &row[i * size..][..size]));
        elements.flatten().copied().collect()
    };
    assert_eq!(
        two.written(4 * n),
        interleaved(&content[..2], 2),
        "{isa} interleave_2"
    );
    assert_eq!(
        four.written(4 * n),
        interleaved(&content, 1),
        "{isa} interleave_4"
    );
}

/// Every f16.
#[inline(always)]
fn widening<S: Simd>(s: S, isa: Isa) {
    for first in (0..=u16::MAX).step_by(S::LANES) {
        let bits: [u16; MAX_LANES] = std::array::from_fn(|i| first.wrapping_add(i as u16));
        // SAFETY: an array has MAX_LANES elements.
        let wide = store(s, unsafe { s.load_f16(bits.as_ptr()) });
        for i in 0..S::LANES {
            same(
                wide[i],
                f16::from_bits(bits[i]).to_f32(),
                &format!("{isa} load_f16"),
            );
        }
        // SAFETY: as above.
        let wide = store(s, unsafe { s.load_bf16_wide(bits.as_ptr()) });
        for i in 0..S::LANES {
            let want = bf16::from_bits(bits[i]).to_f32();
            same(wide[i], want, &format!("{isa} load_bf16_wide"));
        }
    }
    for bits in 0..=u16::MAX {
        let pair = [bits, !bits, 0, 0];
        // SAFETY: there are four elements.
        let wide = unsafe { s.load_f16_pair(pair.as_ptr()) };
        for (wide, bits) in wide.into_iter().zip(pair) {
            let want = f16::from_bits(bits).to_f32();
            same(wide, want, &format!("{isa} load_f16_pair"));
        }
    }
    let scales = [0.0, 1.0, -0.37, 65504.0, 6e-8, 3.1e-5].map(|x| f16::from_f32(x).to_f32());
    for first in (0..=u8::MAX).step_by(S::LANES) {
        let bytes: [u8; MAX_LANES] = std::array::from_fn(|i| first.wrapping_add(i as u8));
        // SAFETY: an array has MAX_LANES elements.
        let wide = store(s, unsafe { s.load_i8_wide(bytes.as_ptr()) });
        for i in 0..S::LANES {
            let want = f32::from(bytes[i] as i8);
            same(wide[i], want, &format!("{isa} load_i8_wide"));
        }
        for (scale, offset) in scales.into_iter().flat_map(|a| scales.map(|b| (a, b))) {
            for upper in [false, true] {
                // SAFETY: as above.
                let wide = unsafe { s.load_u4_wide(bytes.as_ptr(), upper, scale, offset) };
                let wide = store(s, wide);
                for i in 0..S::LANES {
                    let q = if upper { bytes[i] >> 4 } else { bytes[i] & 15 };
                    let want = f32::from(q) * scale + offset;
                    same(wide[i], want, &format!("{isa} load_u4_wide"));
                }
            }
        }
    }
}

#[test]
fn every_instruction_set_does_what_plain_rust_does() {
    for isa in Isa::available() {
        isa.dispatch(Check(isa));
    }
}

#[test]
fn a_forced_instruction_set_is_taken_or_refused_by_name() {
    assert_eq!(Isa::parse("scalar"), Ok(Isa::Scalar));
    let unknown = Isa::parse("sse9").unwrap_err().to_string();
    assert!(
        unknown.contains("LEAFKV_ISA") && unknown.contains("sse9"),
        "{unknown}"
    );
    let absent = if cfg!(target_arch = "aarch64") {
        "avx2"
    } else {
        "neon"
    };
    let absent = Isa::parse(absent).unwrap_err().to_string();
    assert!(absent.contains("this CPU has no"), "{absent}");
}
