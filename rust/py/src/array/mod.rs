//! numpy arrays, and what stands in for them, at the boundary: the only module that knows numpy.
//!
//! No Rust slice or reference to an array's memory is ever made: Python code may hold other views of it, and threads
//! of a free-threaded Python may write to it meanwhile. All goes through raw pointers and the strides that numpy
//! vouches for. Pointers are taken only when no more Python code will run: an `__index__` could resize an array.

mod dtype;
pub(crate) mod ints;
pub(crate) mod kv;
pub(crate) mod out;
pub(crate) mod view;
