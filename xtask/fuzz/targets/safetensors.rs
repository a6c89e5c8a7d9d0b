//! Coverage-guided fuzzing of the `safetensors` target: `cargo xtask fuzz safetensors`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tritmill_fuzz::safetensors(data));
