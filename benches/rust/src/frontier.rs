//! `frontier`: a maintained frontier moves by one, beside timely's `MutableAntichain`.
//!
//! A move is one call with two changes of counts: a later time comes, a minimal one goes. Over integers the live times are a
//! run of `live` successive ones, or (`random`) they lie anywhere and go in the order in which they came. With `owed` times their
//! consumption is heard of before their production, so their counts are below zero: `ahead` of a live time that stays, where a move
//! is one more of them and the production of the first, or between the live time and others, which it moves over. Over pairs they are an antichain of `width` elements whose members are replaced in turn by
//! one that is later in both coordinates. Both sides are first seen to report the same changes.

use std::hint::black_box;
use std::time::Duration;

use penstock_progress::{MutableAntichain, Product};
use timely::order::Product as PeerProduct;
use timely::progress::frontier::MutableAntichain as Peer;

use crate::harness::{Better, Case, Options, Report, compare, nanoseconds_each};

const LIVE: [u64; 4] = [1, 16, 256, 4_096];
const RANDOM: [u64; 2] = [16, 4_096];
const OWED: [u64; 2] = [256, 4_096];
const WIDTH: [u64; 3] = [4, 16, 64];
/// Moves of ours in a repeat: about a millisecond, which mostly fits into one time slice of a busy machine.
const MOVES: usize = 1 << 16;

/// A move: two changes of counts.
type Move<T> = [(T, i64); 2];

/// One time comes, another one goes.
fn replace<T>(comes: T, goes: T) -> Move<T> {
    [(comes, 1), (goes, -1)]
}

/// A time for a number, far from those of its neighbours.
fn scattered(at: u64) -> u64 {
    at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 16
}

/// Runs the bench.
pub fn run(options: &Options, report: &mut Report) {
    let budget = options.budget(LIVE.len() + RANDOM.len() + 2 * OWED.len() + WIDTH.len());
    for live in LIVE {
        let start = (0..live).map(|time| (time, 1)).collect();
        let moves = |at| replace(at + live, at);
        integers(budget, report, format!("live={live} in order"), start, rebuilds(live), moves);
    }
    for live in RANDOM {
        let start = (0..live).map(|at| (scattered(at), 1)).collect();
        let moves = |at| replace(scattered(at + live), scattered(at));
        // The peer sorts what has come, and looks through all of it, once in thousands of moves: in few of them neither shows.
        integers(budget, report, format!("random live={live}"), start, MOVES / 4, moves);
    }
    for owed in OWED {
        let start = std::iter::once((0, 1)).chain((1..=owed).map(|time| (time, -1)));
        let ahead = |at| [(at + owed + 1, -1), (at + 1, 1)];
        integers(budget, report, format!("owed={owed} ahead"), start.collect(), MOVES / 16, ahead);
        // The live time goes round, so that the owed ones stay between it and where it goes next.
        let between = (1..=owed).map(|time| (time, -1)).chain([(0, 1)]);
        let over = |at: u64| match at % 2 {
            0 => replace(owed + 1, 0),
            _ => replace(0, owed + 1),
        };
        integers(budget, report, format!("owed={owed} between"), between.collect(), rebuilds(owed), over);
    }
    for width in WIDTH {
        let element = move |at: u64| (at % width + at / width, width - at % width + at / width);
        let ours_at = move |at| Product::new(element(at).0, element(at).1);
        let peer_at = move |at| PeerProduct::new(element(at).0, element(at).1);
        let ours_moves = move |at| replace(ours_at(at + width), ours_at(at));
        let peer_moves = move |at| replace(peer_at(at + width), peer_at(at));
        let (mut ours, mut peer) = (MutableAntichain::new(), Peer::new());
        ours.update_iter((0..width).map(|at| (ours_at(at), 1)));
        peer.update_iter((0..width).map(|at| (peer_at(at), 1)));
        assert_eq!(ours.frontier().len() as u64, width, "an antichain");
        check(&mut ours.clone(), &mut peer.clone(), ours_moves, peer_moves, |time| {
            Product::new(time.outer, time.inner)
        });
        let (mut left, mut right) = (0, 0);
        let paired = compare(
            budget,
            || move_ours(MOVES / 8, &mut ours, &mut left, ours_moves),
            || move_peer((MOVES / 8 / width as usize).max(256), &mut peer, &mut right, peer_moves),
        );
        let case = format!("Product width={width} vs timely 0.31 MutableAntichain");
        report.case(Case::new(case, "ns/move", Better::Lower, paired));
    }
}

/// Moves of the peer in a repeat, where each one looks at so many times.
fn rebuilds(times: u64) -> usize {
    (MOVES / times as usize).max(64)
}

fn integers(
    budget: Duration,
    report: &mut Report,
    case: String,
    start: Vec<(u64, i64)>,
    peer_moves: usize,
    moves: impl Fn(u64) -> Move<u64> + Copy,
) {
    let (mut ours, mut peer) = (MutableAntichain::new(), Peer::new());
    ours.update_iter(start.iter().copied());
    peer.update_iter(start);
    check(&mut ours.clone(), &mut peer.clone(), moves, moves, |time| *time);
    let (mut left, mut right) = (0, 0);
    let paired = compare(
        budget,
        || move_ours(MOVES, &mut ours, &mut left, moves),
        || move_peer(peer_moves, &mut peer, &mut right, moves),
    );
    report.case(Case::new(format!("{case} vs timely 0.31 MutableAntichain"), "ns/move", Better::Lower, paired));
}

fn move_ours<T: penstock_progress::PartialOrder + Ord + Clone>(
    count: usize,
    frontier: &mut MutableAntichain<T>,
    at: &mut u64,
    moves: impl Fn(u64) -> Move<T>,
) -> f64 {
    nanoseconds_each(count, || {
        for _ in 0..count {
            for change in frontier.update_iter(moves(*at)) {
                black_box(change);
            }
            *at += 1;
        }
    })
}

fn move_peer<T: timely::order::PartialOrder + Ord + Clone>(
    count: usize,
    frontier: &mut Peer<T>,
    at: &mut u64,
    moves: impl Fn(u64) -> Move<T>,
) -> f64 {
    nanoseconds_each(count, || {
        for _ in 0..count {
            for change in frontier.update_iter(moves(*at)) {
                black_box(change);
            }
            *at += 1;
        }
    })
}

/// Both sides report the same changes and end at the same frontier.
fn check<T, P>(
    ours: &mut MutableAntichain<T>,
    peer: &mut Peer<P>,
    our_moves: impl Fn(u64) -> Move<T>,
    peer_moves: impl Fn(u64) -> Move<P>,
    same: impl Fn(&P) -> T,
) where
    T: penstock_progress::PartialOrder + Ord + Clone + std::fmt::Debug,
    P: timely::order::PartialOrder + Ord + Clone,
{
    for at in 0..300 {
        let left: Vec<_> = ours.update_iter(our_moves(at)).collect();
        let changes = peer.update_iter(peer_moves(at));
        let right: Vec<_> = changes.map(|(time, diff)| (same(&time), diff)).collect();
        assert_eq!(left, right, "the changes of move {at} differ");
    }
    let mut frontier: Vec<_> = peer.frontier().iter().map(same).collect();
    frontier.sort_unstable();
    assert_eq!(ours.frontier(), frontier, "the frontiers differ");
}
