//! Coverage-guided fuzzing of the `gguf` target: `cargo xtask fuzz gguf`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tritmill_fuzz::gguf(data));
