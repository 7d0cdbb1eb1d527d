#![no_main]

// A panic of Arrow's reader is an error of what reads, so it is not reported; one that gets out still is.
libfuzzer_sys::fuzz_target!(
    init: std::panic::set_hook(Box::new(|_| {})),
    |data: &[u8]| {
        penstock_fuzz::spilled(data);
    }
);
