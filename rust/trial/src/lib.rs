//! Paired trials: which of two variants is faster here and now, at a bounded price.
//!
//! Owns [`Trial`], which compares two variants in alternating periods, and [`Allowance`], which says how soon the next trial may begin. Pure:
//! both are told what was measured and when, and know no thread and no clock.
//!
//! Why in pairs: machines have neighbours, and work changes. Only what is measured side by side can be compared; a figure of a minute
//! ago says little. Why sequential: who loses clearly should not be served longer than it takes to see that.
//!
//! Invariants: a trial ends after at most `wins + losses - 1` pairs. What it has lost is the time of the slower variant times what that
//! fell short of the faster one by. While every trial waits for its [`Allowance`], what all have lost up to the beginning of one is at most
//! the share of the time until then, and one trial more at any other moment.
//!
//! Users: the bounds of a scope (`bounded::controller`), the scheduler that chooses among others (`ordered::schedule::adaptive`), whether a
//! pipeline is worth its workers (`ordered::pipeline`), and, by the classes of `rust/python/src/trial.rs`, where an ordered run in Python
//! calls its functions (`penstock.ordered._policy`).

mod allowance;

pub use allowance::Allowance;

/// One of the two variants of a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The one that stays unless the other proves better. It goes first in each pair.
    Incumbent,
    /// The one that has to prove itself.
    Challenger,
}

/// What a challenger has to show.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rule {
    /// Pairs that it has to win.
    pub wins: u32,
    /// Pairs with which it has lost.
    pub losses: u32,
    /// By how much it must be faster in sum: 0.05 is 5 %. Below 0: by how much it may be slower, in each pair and in sum.
    pub gain: f64,
    /// Who wins the first so many pairs, each by the factor, has won at once.
    pub sweep: Option<(u32, f64)>,
}

/// Two variants in alternating periods. Who runs it serves [`Trial::turn`] for a period, says how fast that was, and so on until there is a
/// winner.
///
/// ```
/// use penstock_trial::{Rule, Side, Trial};
///
/// let rate = |side| if side == Side::Challenger { 3.0 } else { 2.0 };
/// let mut trial = Trial::new(Rule { wins: 3, losses: 2, gain: 0.1, sweep: Some((2, 2.0)) });
/// let winner = loop {
///     if let Some(winner) = trial.judge(rate(trial.turn()), 1_000) {
///         break winner;
///     }
/// };
/// assert_eq!(winner, Side::Challenger);
/// assert_eq!(trial.lost_ns(), 1_000, "three periods, a third less in each");
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Trial {
    rule: Rule,
    /// Rate of the incumbent in the pair that has begun.
    first: Option<f64>,
    won: u32,
    lost: u32,
    /// Pairs won by the factor of a sweep.
    swept: u32,
    /// Of the incumbent and the challenger: sum of the rates, and time.
    rates: (f64, f64),
    spent_ns: (u64, u64),
}

impl Trial {
    /// A trial that begins with a period of the incumbent.
    #[must_use]
    pub fn new(rule: Rule) -> Self {
        Self { rule, first: None, won: 0, lost: 0, swept: 0, rates: (0.0, 0.0), spent_ns: (0, 0) }
    }

    /// Who is served in this period.
    #[must_use]
    pub fn turn(&self) -> Side {
        if self.first.is_none() { Side::Incumbent } else { Side::Challenger }
    }

    /// Takes in a period of the one whose turn it was: how much per time it got done, in any unit, and how long it was served in all, with what
    /// was not measured. The winner, if that decides.
    pub fn judge(&mut self, rate: f64, spent_ns: u64) -> Option<Side> {
        let Some(first) = self.first.take() else {
            self.first = Some(rate);
            self.spent_ns.0 += spent_ns;
            return None;
        };
        self.spent_ns.1 += spent_ns;
        self.rates = (self.rates.0 + first, self.rates.1 + rate);
        if rate > first * (1.0 + self.rule.gain.min(0.0)) {
            self.won += 1;
        } else {
            self.lost += 1;
        }
        let swept = self.rule.sweep.is_some_and(|(pairs, factor)| {
            self.swept += u32::from(rate > first && rate >= first * factor);
            self.swept == pairs && self.won + self.lost == pairs
        });
        let gained = self.rates.1 / self.rates.0.max(f64::MIN_POSITIVE) >= 1.0 + self.rule.gain;
        let enough = self.won >= self.rule.wins;
        if enough && gained || swept {
            Some(Side::Challenger)
        } else if enough || self.lost >= self.rule.losses {
            Some(Side::Incumbent)
        } else {
            None
        }
    }

    /// Whether the challenger, in its period, cannot reach what it has to, being at most so fast.
    #[must_use]
    pub fn is_hopeless(&self, at_most: f64) -> bool {
        self.first.is_some_and(|first| at_most < first * (1.0 + self.rule.gain))
    }

    /// Ends the trial in a period of a challenger that [is hopeless](Self::is_hopeless).
    pub fn give_up(&mut self, at_most: f64, spent_ns: u64) -> Side {
        let first = self.first.take().unwrap_or(0.0);
        self.rates = (self.rates.0 + first, self.rates.1 + at_most);
        self.spent_ns.1 += spent_ns;
        Side::Incumbent
    }

    /// By how much of the incumbent's speed the challenger fell short in the pairs so far; 0 where it did not.
    #[must_use]
    pub fn shortfall(&self) -> f64 {
        let (incumbent, challenger) = self.rates;
        if challenger < incumbent { 1.0 - challenger / incumbent } else { 0.0 }
    }

    /// What was lost beside the faster one in the pairs so far, nanoseconds.
    #[must_use]
    pub fn lost_ns(&self) -> u64 {
        let ((incumbent, challenger), spent_ns) = (self.rates, self.spent_ns);
        // As many periods of each, so their sums compare as their means do.
        let lost = |spent_ns: u64, slower: f64, faster: f64| spent_ns as f64 * (1.0 - slower / faster);
        let lost_ns = match incumbent.total_cmp(&challenger) {
            std::cmp::Ordering::Less => lost(spent_ns.0, incumbent, challenger),
            std::cmp::Ordering::Equal => 0.0,
            std::cmp::Ordering::Greater => lost(spent_ns.1, challenger, incumbent),
        };
        lost_ns.round() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULE: Rule = Rule { wins: 3, losses: 2, gain: 0.1, sweep: Some((2, 2.0)) };

    /// Runs it; the winner and how many periods it took.
    fn run(rule: Rule, mut rate: impl FnMut(Side) -> f64) -> (Side, u32, u64) {
        let mut trial = Trial::new(rule);
        for period in 1.. {
            let side = trial.turn();
            assert_eq!(side == Side::Incumbent, period % 2 == 1, "they take turns");
            if let Some(winner) = trial.judge(rate(side), 1_000) {
                assert!(period <= 2 * (rule.wins + rule.losses - 1), "{period} periods");
                return (winner, period, trial.lost_ns());
            }
        }
        unreachable!("the bound on periods is asserted")
    }

    fn two(incumbent: f64, challenger: f64) -> impl FnMut(Side) -> f64 {
        move |side| if side == Side::Incumbent { incumbent } else { challenger }
    }

    #[test]
    fn a_challenger_has_to_win_pairs_and_in_sum() {
        assert_eq!(run(RULE, two(10.0, 12.0)).0, Side::Challenger);
        assert_eq!(run(RULE, two(10.0, 10.5)), (Side::Incumbent, 6, 143), "faster, but not by a tenth");
        assert_eq!(run(RULE, two(10.0, 9.0)), (Side::Incumbent, 4, 200));
        assert_eq!(run(RULE, two(10.0, 10.0)), (Side::Incumbent, 4, 0), "equal ones change nothing");
        assert_eq!(run(RULE, two(0.0, 0.0)), (Side::Incumbent, 4, 0), "nor does what stands still");
    }

    #[test]
    fn a_clear_winner_ends_it_early_and_one_lucky_pair_does_not() {
        assert_eq!(run(RULE, two(10.0, 20.0)), (Side::Challenger, 4, 1_000));
        let mut pairs = [(1.0, 10.0), (10.0, 9.0), (10.0, 9.0)].into_iter();
        let mut pair = (0.0, 0.0);
        let (winner, periods, _) = run(RULE, |side| {
            if side == Side::Incumbent {
                pair = pairs.next().expect("three pairs decide");
                return pair.0;
            }
            pair.1
        });
        assert_eq!((winner, periods), (Side::Incumbent, 6));
    }

    #[test]
    fn an_unlucky_pair_does_not_end_it() {
        let mut unlucky = true;
        let (winner, periods, _) = run(Rule { gain: 0.0, ..RULE }, |side| match side {
            Side::Incumbent => 10.0,
            Side::Challenger if std::mem::take(&mut unlucky) => 5.0,
            Side::Challenger => 15.0,
        });
        assert_eq!((winner, periods), (Side::Challenger, 8));
    }

    #[test]
    fn below_zero_the_gain_is_what_a_challenger_may_lack() {
        let rule = Rule { gain: -0.03, ..RULE };
        assert_eq!(run(rule, two(10.0, 9.8)).0, Side::Challenger);
        assert_eq!(run(rule, two(10.0, 9.6)).0, Side::Incumbent);
        assert_eq!(run(rule, two(0.0, 0.0)).0, Side::Incumbent);
    }

    #[test]
    fn a_hopeless_challenger_is_given_up_within_its_period() {
        let mut trial = Trial::new(RULE);
        assert!(!trial.is_hopeless(0.0), "it is not its turn");
        assert_eq!(trial.judge(10.0, 1_000), None);
        assert!(trial.is_hopeless(10.9) && !trial.is_hopeless(11.1));
        assert_eq!(trial.give_up(2.5, 400), Side::Incumbent);
        assert_eq!((trial.shortfall(), trial.lost_ns()), (0.75, 300));
    }

    /// Below 1 (splitmix64).
    fn luck(state: &mut u64) -> f64 {
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = *state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    #[test]
    fn noise_seldom_chooses_the_slower_one() {
        let mut state = 5;
        let mut wrong = [0, 0];
        for turn in 0..2_000 {
            let better = turn % 2 == 0;
            let (winner, ..) = run(Rule { gain: 0.05, ..RULE }, |side| {
                // Four periods of ten are disturbed by up to a half.
                let disturbed = if luck(&mut state) < 0.4 { 0.5 + 0.5 * luck(&mut state) } else { 1.0 };
                disturbed * if (side == Side::Challenger) == better { 13.0 } else { 10.0 }
            });
            wrong[usize::from(better)] += u32::from((winner == Side::Challenger) != better);
        }
        assert!(wrong[0] < 60, "{} of 1000 times the slower challenger", wrong[0]);
        assert!(wrong[1] < 400, "{} of 1000 times the slower incumbent, which is tried again", wrong[1]);
    }

    /// In virtual time: trials as often as they are allowed, of periods that last as long as an item takes.
    #[test]
    fn however_dear_an_item_trials_cost_no_more_than_their_share() {
        for (item_ns, slower) in [(1_000_u64, 3.0), (1_000_000, 1.2), (10_000_000_000, 24.0)] {
            let (mut allowance, mut now_ns, mut lost_ns, mut trials) = (Allowance::new(0.05), 0, 0.0, 0);
            while trials < 50 {
                if !allowance.allows(now_ns, 1.0) {
                    now_ns += item_ns;
                    continue;
                }
                assert!(lost_ns <= 0.05 * now_ns as f64 + 1.0, "{lost_ns} of {now_ns} ns before trial {trials}");
                let mut trial = Trial::new(RULE);
                trials += 1;
                loop {
                    let challenger = trial.turn() == Side::Challenger;
                    let spent_ns = if challenger { (item_ns as f64 * slower) as u64 } else { item_ns };
                    now_ns += spent_ns;
                    lost_ns += (spent_ns - item_ns) as f64;
                    if trial.judge(1.0 / spent_ns as f64, spent_ns).is_some() {
                        break;
                    }
                }
                allowance.spend(now_ns, trial.lost_ns());
            }
            let share = lost_ns / now_ns as f64;
            assert!(share > 0.03, "{share}: what may be spent is spent");
        }
    }
}
