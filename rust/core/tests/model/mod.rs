//! A slow, obvious model of `KvManager`, and a world in which the two are compared after every call.
//!
//! * `op`: what may be done, with small numbers that pick among what there is;
//! * `reference`: the model. It knows blocks by numbers of its own, never used again, and predicts everything;
//! * `log`: its events;
//! * `memory`: of which prefix each slot holds the KV;
//! * `mirror`: a listener that rebuilds the cache's content from events;
//! * `rows`: block tables in rows that a caller keeps from step to step;
//! * `world`: drives the manager and compares;
//! * `bytes`: operations out of any string of bytes, for fuzzing.
#![allow(dead_code, missing_docs, unreachable_pub)] // each test crate uses a part

pub mod bytes;
pub mod log;
pub mod memory;
pub mod mirror;
pub mod op;
pub mod reference;
pub mod rows;
pub mod world;
