#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    penstock_fuzz::members(data);
});
