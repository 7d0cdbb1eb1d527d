//! The start spread (B-05) is measured and reported, in process and over TCP; a start before the last arrival is an error. How
//! small the spread is depends on the machine: no bound.

#[path = "../../examples/spread.rs"]
#[allow(unreachable_pub, clippy::module_inception)]
mod spread;

use std::time::Duration;

#[test]
fn the_spread_after_a_barrier_is_reported() {
    let skew = Duration::from_millis(50);
    for workers in [2, 3] {
        for (name, measured) in
            [("threads", spread::in_process(workers, 5, skew)), ("over TCP", spread::over_tcp(workers, 5, skew))]
        {
            let [least, median, most] = measured.unwrap();
            assert!(least <= median && median <= most);
            println!("{workers} {name}: {least:?} .. {median:?} .. {most:?}");
        }
    }
}
