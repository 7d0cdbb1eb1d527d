//! `frontier`: a maintained frontier moves by one, beside timely's `MutableAntichain`.
//!
//! A move is one call with two changes of counts: a later time comes, a minimal one goes. Over integers the live times are a
//! run of `live` successive ones. Over pairs they are an antichain of `width` elements whose members are replaced in turn by
//! one that is later in both coordinates. Both sides are first seen to report the same changes.

use std::hint::black_box;

use penstock_progress::{MutableAntichain, Product};
use timely::order::Product as PeerProduct;
use timely::progress::frontier::MutableAntichain as Peer;

use crate::harness::{Better, Case, Options, Report, compare, nanoseconds_each};

const LIVE: [u64; 4] = [1, 16, 256, 4_096];
const WIDTH: [u64; 3] = [4, 16, 64];
/// Moves of ours in a repeat: about a millisecond, which mostly fits into one time slice of a busy machine.
const MOVES: usize = 1 << 16;

/// A move: the time that comes and the one that goes.
type Move<T> = (T, T);

/// Runs the bench.
pub fn run(options: &Options, report: &mut Report) {
    let budget = options.budget(LIVE.len() + WIDTH.len());
    for live in LIVE {
        let moves = move |at: u64| (at + live, at);
        let (mut ours, mut peer) = (MutableAntichain::new(), Peer::new());
        ours.update_iter((0..live).map(|time| (time, 1)));
        peer.update_iter((0..live).map(|time| (time, 1)));
        check(&mut ours.clone(), &mut peer.clone(), moves, moves, |time| *time);
        let (mut left, mut right) = (0, 0);
        let paired = compare(
            budget,
            || move_ours(MOVES, &mut ours, &mut left, moves),
            || move_peer((MOVES / live as usize).max(64), &mut peer, &mut right, moves),
        );
        report.case(Case::new(
            format!("live={live} vs timely 0.31 MutableAntichain"),
            "ns/move",
            Better::Lower,
            paired,
        ));
    }
    for width in WIDTH {
        let element = move |at: u64| (at % width + at / width, width - at % width + at / width);
        let ours_at = move |at| Product::new(element(at).0, element(at).1);
        let peer_at = move |at| PeerProduct::new(element(at).0, element(at).1);
        let ours_moves = move |at| (ours_at(at + width), ours_at(at));
        let peer_moves = move |at| (peer_at(at + width), peer_at(at));
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

fn move_ours<T: penstock_progress::PartialOrder + Ord + Clone>(
    count: usize,
    frontier: &mut MutableAntichain<T>,
    at: &mut u64,
    moves: impl Fn(u64) -> Move<T>,
) -> f64 {
    nanoseconds_each(count, || {
        for _ in 0..count {
            let (comes, goes) = moves(*at);
            for change in frontier.update_iter([(comes, 1), (goes, -1)]) {
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
            let (comes, goes) = moves(*at);
            for change in frontier.update_iter([(comes, 1), (goes, -1)]) {
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
        let ((comes, goes), (peer_comes, peer_goes)) = (our_moves(at), peer_moves(at));
        let left: Vec<_> = ours.update_iter([(comes, 1), (goes, -1)]).collect();
        let changes = peer.update_iter([(peer_comes, 1), (peer_goes, -1)]);
        let right: Vec<_> = changes.map(|(time, diff)| (same(&time), diff)).collect();
        assert_eq!(left, right, "the changes of move {at} differ");
    }
    let mut frontier: Vec<_> = peer.frontier().iter().map(same).collect();
    frontier.sort_unstable();
    assert_eq!(ours.frontier(), frontier, "the frontiers differ");
}
