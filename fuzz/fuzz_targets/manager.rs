//! The KV manager against the model of its tests, on bytes that reach new code. See `rust/core/tests/manager_fuzz.rs`.
#![no_main]

#[path = "../../rust/core/tests/model/mod.rs"]
mod model;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    model::bytes::run(bytes);
});
