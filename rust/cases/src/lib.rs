//! How many cases a property is tried with. For tests alone: no crate depends on this but for its tests.
//!
//! A property whose cases are dear takes fewer than the usual 256. Written into its configuration the number would be fixed, and a longer
//! search would pass it by; so it is given as what a usual run takes, and PROPTEST_CASES raises or lowers all of them in proportion.

use proptest::test_runner::Config;

/// The usual configuration with `usual` cases where PROPTEST_CASES is 256 or unset, and in proportion where it is not; at least one.
pub fn cases(usual: u32) -> Config {
    let config = Config::default();
    Config { cases: scaled(usual, config.cases), ..config }
}

fn scaled(usual: u32, asked: u32) -> u32 {
    (u64::from(usual) * u64::from(asked) / 256).clamp(1, 1 << 30) as u32
}

#[cfg(test)]
mod tests {
    use super::{cases, scaled};
    use proptest::test_runner::Config;

    #[test]
    fn cases_follow_what_is_asked_for_in_proportion() {
        assert_eq!([8, 40, 256, 1500].map(|usual| scaled(usual, 256)), [8, 40, 256, 1500]);
        assert_eq!([8, 40, 256, 1500].map(|usual| scaled(usual, 2000)), [62, 312, 2000, 11_718]);
        assert_eq!([8, 40, 256, 1500].map(|usual| scaled(usual, 8)), [1, 1, 8, 46]);
        assert_eq!(scaled(u32::MAX, u32::MAX), 1 << 30);
        assert_eq!(cases(256).cases, Config::default().cases);
    }
}
