//! Coverage-guided fuzzing of the `batch_line` target: `cargo xtask fuzz batch_line`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tritmill_fuzz::batch_line(data));
