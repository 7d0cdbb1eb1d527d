//! What a run showed: how long each block took, when bins moved, and what these two say together.

use std::time::Duration;

/// Length of a sample of the series.
const SAMPLE: Duration = Duration::from_millis(250);

/// Seconds since the run began.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    pub(super) begin: f64,
    pub(super) end: f64,
}

impl Span {
    pub(super) fn seconds(&self) -> f64 {
        self.end - self.begin
    }
}

/// When each of some was due, and how long it took, seconds.
pub(super) type Latencies = Vec<(f64, f64)>;

/// What a run showed.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// Blocks, by when they were due.
    pub(super) blocks: Latencies,
    /// Rows of bins that stay, of hot ones that move, and of the others that move; where that is told apart.
    pub(super) rows: [Latencies; 3],
    pub(super) moves: Vec<Span>,
    pub(super) added_mib: f64,
    pub(super) state_mib: f64,
}

impl Seen {
    /// The 99.9th percentile of blocks that were due outside of moves and of what they left behind, ms.
    pub(super) fn at_rest_ms(&self) -> f64 {
        let settled = |due: f64| self.moves.iter().all(|span| due < span.begin || due > span.end + 0.02);
        let mut rest: Vec<f64> =
            self.blocks.iter().filter(|(due, _)| settled(*due)).map(|(_, latency)| *latency).collect();
        rest.sort_by(f64::total_cmp);
        let at = (rest.len() * 999 / 1000).min(rest.len().saturating_sub(1));
        rest.get(at).copied().unwrap_or(0.0) * 1e3
    }

    /// The greatest latency of a block that met a move, ms.
    pub(super) fn most_ms(&self, of: &Span) -> f64 {
        most_ms(&self.blocks, of)
    }

    /// For each sample its beginning in seconds, and the median and the greatest latency in ms.
    pub(super) fn series(&self) -> Vec<[f64; 3]> {
        let sample = SAMPLE.as_secs_f64();
        let end = self.blocks.iter().map(|(due, _)| *due).fold(0.0, f64::max);
        let samples = (0..=(end / sample) as usize).filter_map(|number| {
            let from = number as f64 * sample;
            let inside = self.blocks.iter().filter(|(due, _)| (from..from + sample).contains(due));
            let mut inside: Vec<f64> = inside.map(|(_, latency)| latency * 1e3).collect();
            inside.sort_by(f64::total_cmp);
            Some([from, inside.get(inside.len() / 2).copied()?, *inside.last()?])
        });
        samples.collect()
    }
}

/// The greatest latency of what met a move, ms.
pub(super) fn most_ms(all: &[(f64, f64)], of: &Span) -> f64 {
    let met = all.iter().filter(|(due, latency)| due + latency >= of.begin && *due <= of.end);
    met.map(|(_, latency)| latency * 1e3).fold(0.0, f64::max)
}

/// When a pause that began then is over: a block is in time again, so the backlog is part of it.
pub(super) fn caught_up(begin: f64, calm: f64, blocks: &[(f64, f64)]) -> f64 {
    blocks.iter().filter(|(_, latency)| *latency > calm).map(|(due, latency)| due + latency).fold(begin, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_those_of_the_blocks_that_met_a_move_and_of_those_that_did_not() {
        let (span, ms) = (Span { begin: 1.0, end: 1.5 }, 1e-3);
        // Before; under way when it begins; due in it; in its wake; at rest again.
        let blocks = vec![(0.5, 2.0 * ms), (0.99, 30.0 * ms), (1.2, 400.0 * ms), (1.51, 90.0 * ms), (1.9, 3.0 * ms)];
        let seen = Seen { blocks: blocks.clone(), moves: vec![span], ..Seen::default() };
        assert!((seen.most_ms(&span) - 400.0).abs() < 1e-9);
        assert!((seen.at_rest_ms() - 30.0).abs() < 1e-9, "what was due before it counts as at rest");
        assert_eq!(Seen { moves: vec![span], ..Seen::default() }.at_rest_ms(), 0.0);
        assert!((caught_up(1.0, 50.0 * ms, &blocks) - 1.6).abs() < 1e-9, "the last late one of them");
        assert_eq!(caught_up(1.0, 0.5, &blocks), 1.0, "nothing was late");
    }
}
