//! numpy arrays, and what stands in for them, at the boundary: the only module that knows numpy.
//!
//! No Rust slice or reference to an array's memory is ever made: Python code may hold other views of it. All goes
//! through raw pointers and the strides that numpy vouches for. Pointers are taken only when no more Python code will
//! run: an `__index__` could resize an array.
//!
//! No GIL is relied on: on a free-threaded Python other threads run during any call. Lists and other containers may
//! change meanwhile: an item is then seen as before or after. So may numbers in an array: what decides where memory is
//! touched (block ids, slots, lengths, copies) is read once, into a copy, and that copy is checked.
//!
//! What callers must not do, as numpy itself guards nothing there: change the *shape, strides, dtype or size* of an
//! array object in place (`resize`, assignment to `.shape`, …) while a call has it as an argument. Nor write KV slots
//! that a running attention call reads, or read its output: those results mean nothing.

mod dtype;
pub(crate) mod ints;
pub(crate) mod kv;
pub(crate) mod new;
pub(crate) mod out;
pub(crate) mod rows;
pub(crate) mod view;
pub(crate) mod weight;
