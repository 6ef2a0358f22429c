//! The best logits of each row.
//!
//! A row is no distribution where it holds NaN or plus infinity, or nothing but minus infinity (which alone means that a
//! token cannot come): nothing is then its best.

use std::marker::PhantomData;
use std::ops::Range;

use super::Rows;
use super::lanes::load;
use super::split::{self, Each};
use crate::simd::{Isa, Simd};
use crate::{Error, Result};

/// Elements whose largest is found first, and which are looked at one by one only if that is good enough.
const GROUP: usize = 64;

/// What stands for the best of a row that is no distribution.
pub(super) const NOTHING: i64 = -1;

/// The index of each row's largest element, the lowest among equals; -1 where a row is no distribution.
///
/// # Errors
/// `out` does not have an entry a row, or this CPU lacks `isa`. Nothing is then written.
pub fn argmax(
    isa: Isa,
    logits: &Rows<'_>,
    out: &mut [i64],
    num_threads: Option<usize>,
) -> Result<()> {
    let [rows, _] = logits.shape();
    let (logits, ids) = (*logits, Out::new("out", out, [rows, 1])?);
    let threads = split::threads(logits.shape(), num_threads)?;
    split::run(isa, rows, threads, &ArgMax { logits, ids })
}

/// Each row's `k` largest elements and their indices, row after row: the largest first, the lowest index first among
/// equals. Where a row is no distribution, they are NaN and -1.
///
/// # Errors
/// A row does not have `k` elements, or has more than 2^32; `values` or `ids` do not have `k` entries a row; this CPU lacks `isa`. Nothing is then
/// written.
pub fn top_k(
    isa: Isa,
    logits: &Rows<'_>,
    k: usize,
    values: &mut [f32],
    ids: &mut [i64],
    num_threads: Option<usize>,
) -> Result<()> {
    let [rows, columns] = logits.shape();
    if !(1..=columns).contains(&k) {
        return Err(Error::invalid(
            "k",
            format!("got {k}, expected 1 to {columns}, the columns of logits"),
        ));
    }
    if u32::try_from(columns - 1).is_err() {
        return Err(Error::invalid("logits", format!("got {columns} columns")));
    }
    let work = TopK {
        logits: *logits,
        values: Out::new("values", values, [rows, k])?,
        ids: Out::new("ids", ids, [rows, k])?,
    };
    let threads = split::threads(logits.shape(), num_threads)?;
    split::run(isa, rows, threads, &work)
}

/// Rows of results, each written by one thread.
pub(super) struct Out<'a, T> {
    base: *mut T,
    columns: usize,
    memory: PhantomData<&'a mut [T]>,
}

// SAFETY: it is a `&mut [T]`, whose rows `Each::rows` gives to one thread each.
unsafe impl<T: Send> Sync for Out<'_, T> {}

impl<'a, T> Out<'a, T> {
    pub(super) fn new(
        argument: &'static str,
        out: &'a mut [T],
        [rows, columns]: [usize; 2],
    ) -> Result<Self> {
        if out.len() != rows * columns {
            return Err(Error::invalid(
                argument,
                format!("got {} entries, expected {}", out.len(), rows * columns),
            ));
        }
        Ok(Self {
            base: out.as_mut_ptr(),
            columns,
            memory: PhantomData,
        })
    }

    /// # Safety
    /// The row is in bounds, and nobody else has it.
    #[allow(clippy::mut_from_ref)] // by the caller's promise
    pub(super) unsafe fn row(&self, row: usize) -> &mut [T] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(row * self.columns), self.columns) }
    }
}

struct ArgMax<'a> {
    logits: Rows<'a>,
    ids: Out<'a, i64>,
}

impl Each for ArgMax<'_> {
    #[inline(always)]
    unsafe fn rows<S: Simd>(&self, s: S, rows: Range<usize>) {
        let [_, n] = self.logits.shape();
        for row in rows {
            // SAFETY: the row is there and this thread's, by the caller's promise.
            unsafe { self.ids.row(row)[0] = first_of_largest(s, self.logits.row(row), n) };
        }
    }
}

/// # Safety
/// There are `n` floats.
#[inline(always)]
pub(super) unsafe fn first_of_largest<S: Simd>(s: S, x: *const f32, n: usize) -> i64 {
    let (mut best, mut at, mut odd) = (f32::NEG_INFINITY, n, s.splat(0.0));
    for first in (0..n).step_by(GROUP) {
        // SAFETY: the caller's promise.
        let largest = unsafe { largest(s, x.add(first), n - first, &mut odd) };
        if largest > best {
            (best, at) = (largest, first);
        }
    }
    if s.maximum(odd) > 0.0 {
        return NOTHING;
    }
    // SAFETY: as above.
    let is_best = |i: &usize| unsafe { x.add(*i).read_unaligned() == best };
    (at..n).find(is_best).map_or(NOTHING, |i| i as i64)
}

/// The largest of at most `n` and at most [`GROUP`] elements. Where one is NaN or plus infinity, some lane of `odd` is 1
/// afterwards, and the result means nothing.
///
/// # Safety
/// There are so many floats.
#[inline(always)]
unsafe fn largest<S: Simd>(s: S, x: *const f32, n: usize, odd: &mut S::F32) -> f32 {
    let mut largest = s.splat(f32::NEG_INFINITY);
    for i in (0..GROUP).step_by(S::LANES) {
        if i >= n {
            break;
        }
        // SAFETY: the caller's promise.
        let x = unsafe { load(s, x.add(i), S::LANES.min(n - i), f32::NEG_INFINITY) };
        *odd = s.select_below(x, f32::INFINITY, *odd, s.splat(1.0));
        largest = s.max(largest, x);
    }
    s.maximum(largest)
}

struct TopK<'a> {
    logits: Rows<'a>,
    values: Out<'a, f32>,
    ids: Out<'a, i64>,
}

impl Each for TopK<'_> {
    #[inline(always)]
    unsafe fn rows<S: Simd>(&self, s: S, rows: Range<usize>) {
        let [_, n] = self.logits.shape();
        let (mut groups, mut best) = (vec![], vec![]);
        for row in rows {
            // SAFETY: the row is there and this thread's, by the caller's promise; places are below n.
            unsafe {
                let (x, values, ids) = (
                    self.logits.row(row),
                    self.values.row(row),
                    self.ids.row(row),
                );
                find_best(s, x, n, ids.len(), &mut groups, &mut best);
                values.fill(f32::NAN);
                ids.fill(NOTHING);
                for (i, place) in best.iter().enumerate() {
                    values[i] = x.add(place.index()).read_unaligned();
                    ids[i] = place.index() as i64;
                }
            }
        }
    }
}

/// The places of the `k` best elements, in order; nothing where there is no distribution.
///
/// # Safety
/// There are `n` floats.
#[inline(always)]
pub(super) unsafe fn find_best<S: Simd>(
    s: S,
    x: *const f32,
    n: usize,
    k: usize,
    groups: &mut Vec<Place>,
    best: &mut Vec<Place>,
) {
    groups.clear();
    best.clear();
    groups.reserve(n.div_ceil(GROUP));
    let mut odd = s.splat(0.0);
    for first in (0..n).step_by(GROUP) {
        // SAFETY: the caller's promise.
        let largest = unsafe { largest(s, x.add(first), n - first, &mut odd) };
        groups.push(Place::new(largest, first));
    }
    // No other group has one of the k best: the largest of each of these comes before all that it has.
    let bound = keep(groups, k);
    let nothing = |group: &Place| group.value() == f32::NEG_INFINITY;
    if s.maximum(odd) > 0.0 || groups.iter().all(nothing) {
        return;
    }
    for group in groups.iter() {
        let first = group.index();
        for i in first..n.min(first + GROUP) {
            // SAFETY: as above.
            let x = unsafe { x.add(i).read_unaligned() };
            if x >= bound {
                best.push(Place::new(x, i));
            }
        }
    }
    keep(best, k);
    best.sort_unstable();
}

/// Where an element stands in order: the larger before the smaller, then by index. Rank in the high half, index in the
/// low one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place(u64);

impl Place {
    #[inline(always)]
    fn new(x: f32, index: usize) -> Self {
        // Minus zero becomes zero.
        let rank = Self::mirror((x + 0.0).to_bits());
        Self(u64::from(rank) << 32 | index as u64)
    }

    pub(super) fn value(self) -> f32 {
        f32::from_bits(Self::mirror((self.0 >> 32) as u32))
    }

    fn index(self) -> usize {
        self.0 as u32 as usize
    }

    /// Bits of floats grow with the magnitude: turned around, those of positive ones fall. And back.
    #[inline(always)]
    fn mirror(bits: u32) -> u32 {
        if bits >> 31 == 0 {
            bits ^ 0x7fff_ffff
        } else {
            bits
        }
    }
}

/// Keeps the first `k` places, in any order. Returns the value of the last of them, minus infinity where there are fewer.
fn keep(places: &mut Vec<Place>, k: usize) -> f32 {
    if places.len() < k {
        return f32::NEG_INFINITY;
    }
    let (_, last, _) = places.select_nth_unstable(k - 1);
    let value = last.value();
    places.truncate(k);
    value
}
