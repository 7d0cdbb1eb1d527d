//! Blocks of records that F can route by the hashes of their keys.
//!
//! A block is columnar: its hashes lie side by side, its rows are divided in one pass. Routing a block costs one look-up per row,
//! and nothing is copied when all its rows go to one worker.

use penstock_dataflow::wire::Wire;

use crate::bin::bin;
use crate::routing::Routing;

/// A block that can be divided among workers.
pub trait Block: Wire + Sized {
    /// Rows.
    fn len(&self) -> usize;

    /// True without rows.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The hash of each row's key, in row order. `None` for a block without keys, such as a watermark: it stays on the worker
    /// that has it.
    fn hashes(&self) -> Option<&[u64]>;

    /// Divides the rows: row `i` goes to `workers[i]`. Emits at most one block per worker; the rows of each keep their
    /// order. Called only for blocks with hashes, with one worker per row.
    fn split(self, workers: &[u32], emit: &mut dyn FnMut(u32, Self));
}

/// Divides `block` by `routing`; `owners` is scratch space. Empty blocks vanish.
pub(crate) fn route_block<D: Block>(
    block: D,
    routing: &Routing,
    here: u32,
    owners: &mut Vec<u32>,
    emit: &mut dyn FnMut(u32, D),
) {
    let Some(hashes) = block.hashes() else { return emit(here, block) };
    let Some((&head, tail)) = hashes.split_first() else { return };
    let first = routing.owner(head);
    // One look at each bin, where there are fewer of them than rows, tells a worker that owns all.
    if routing.owners().len() <= hashes.len() && routing.owners().iter().all(|&owner| owner == first) {
        return emit(first, block);
    }
    owners.clear();
    owners.push(first);
    // Two loops, so that nothing is asked of each row where no bin is split. Measured by instructions, 2^8 bins: 19 a row where none is split (20
    // before bins could be), 24 with one that is, 51 of rows that all are in parts.
    let (whole, bits) = (routing.owners(), routing.bits());
    let differing = match routing.is_split() {
        false => look_up(tail, first, owners, |hash| whole[bin(hash, bits) as usize]),
        true => look_up(tail, first, owners, |hash| routing.owner(hash)),
    };
    if differing == 0 { emit(first, block) } else { block.split(owners, emit) }
}

/// The owner of each hash; not 0 where one is not `first`.
#[inline]
fn look_up(hashes: &[u64], first: u32, owners: &mut Vec<u32>, of: impl Fn(u64) -> u32) -> u32 {
    let mut differing = 0;
    owners.extend(hashes.iter().map(|&hash| {
        let owner = of(hash);
        differing |= owner ^ first;
        owner
    }));
    differing
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keyed::Keyed;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn rows_reach_their_owner_in_order(hashes in prop::collection::vec(any::<u64>(), 0..200), peers in 1usize..5) {
            let routing = Routing::new(3, peers).unwrap();
            let rows: Vec<_> = hashes.iter().enumerate().map(|(i, &hash)| (hash, i)).collect();
            let block = Keyed::new(rows.clone(), |hash| *hash);
            let mut got = Vec::new();
            let mut seen = std::collections::BTreeSet::new();
            route_block(block, &routing, 0, &mut vec![9; 3], &mut |worker, part| {
                assert!(seen.insert(worker), "one block per worker");
                assert_eq!(part.hashes().unwrap().len(), part.len());
                assert!(part.hashes().unwrap().iter().all(|hash| routing.owner(*hash) == worker));
                assert!(part.rows().windows(2).all(|w| w[0].1 < w[1].1), "stable");
                got.extend_from_slice(part.rows());
            });
            got.sort_by_key(|row| row.1);
            prop_assert_eq!(got, rows);
        }
    }

    #[test]
    fn local_blocks_stay_and_empty_ones_vanish() {
        let routing = Routing::new(3, 4).unwrap();
        let mut got = Vec::new();
        let local: Keyed<u64, u64> = Keyed::local(vec![(1, 2)]);
        route_block(local, &routing, 2, &mut Vec::new(), &mut |worker, part| got.push((worker, part.len())));
        let empty: Keyed<u64, u64> = Keyed::new(Vec::new(), |_| 0);
        route_block(empty, &routing, 2, &mut Vec::new(), &mut |worker, part| got.push((worker, part.len())));
        assert_eq!(got, [(2, 1)]);
    }
}
