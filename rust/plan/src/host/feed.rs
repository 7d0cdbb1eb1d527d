//! Cutting released input into slices and dealing them to the workers of a process.
//!
//! Owns the numbering of slices. A flow whose result does not depend on order numbers each worker's
//! slices on its own, so all workers feed at once; blocks that are few rows share one, also of several sources, since each slice is a time that
//! passes through the whole plan. A flow with order-sensitive steps numbers a slice by
//! the position of its first row in (source, partition, row) order over all processes: unique, ascending, equal
//! on every number of workers.

use penstock_dataflow::BoxError;
use penstock_pace::{CLOSE, MARK};

use super::rows::Rows;
use crate::block::FlowBlock;
use crate::host::HostError;

/// Released rows of one source partition, in row order.
#[derive(Clone, Debug)]
pub struct PartitionRows {
    /// Number of the source that they are of.
    pub source: u8,
    /// Index of the source's partition; rows are ordered by (source, partition, row).
    pub partition: u32,
    /// The rows, in order. Stored blocks are read as a whole, so they should not be longer than a slice.
    pub batches: Vec<Rows>,
    /// Rows of all smaller partitions, and of all sources before, over all processes; read by order-sensitive flows only.
    pub rows_before: u64,
}

/// First data slice of an epoch.
const FIRST: u32 = MARK + 1;

/// One slice: its number within the epoch and its rows.
pub(crate) type Slice = (u32, Cut);

/// Some rows of a block.
#[derive(Clone, Debug)]
pub(crate) struct Cut {
    source: u8,
    block: Rows,
    offset: usize,
    rows: usize,
}

impl Cut {
    pub(crate) fn num_rows(&self) -> usize {
        self.rows
    }

    /// # Errors
    /// Those of [`Rows::read`].
    pub(crate) fn read(self) -> Result<FlowBlock, BoxError> {
        Ok(FlowBlock::rows(self.block.read()?.slice(self.offset, self.rows)).of(self.source))
    }
}

/// No block is cut smaller than this only to share it.
const LEAST_SHARE: usize = 1024;

/// Cuts `inputs` into slices of at most `slice_rows` rows, such that each worker has a share of every block, and deals them round robin
/// to `workers`. Several cuts may be of one slice.
///
/// # Errors
/// `EpochTooLarge` when an order-sensitive epoch has more rows than there are data slices (2^31 - 2).
/// Cost: nothing is read or copied.
pub(crate) fn deal(
    mut inputs: Vec<PartitionRows>,
    slice_rows: usize,
    workers: usize,
    ordered: bool,
) -> Result<Vec<Vec<Slice>>, HostError> {
    inputs.sort_by_key(|input| (input.source, input.partition));
    let mut dealt: Vec<Vec<Slice>> = vec![Vec::new(); workers];
    // Of each worker the slice that is being filled, and its rows.
    let mut filling = vec![(0_u64, 0_usize); workers];
    let mut next = 0;
    for input in inputs {
        let mut row = input.rows_before;
        for batch in input.batches {
            let share = batch.num_rows().div_ceil(workers).max(LEAST_SHARE);
            let most = slice_rows.min(share).min(batch.block_rows());
            let mut offset = 0;
            while offset < batch.num_rows() {
                let rows = most.min(batch.num_rows() - offset);
                let (mine, (slice, filled)) = (&mut dealt[next % workers], &mut filling[next % workers]);
                if *filled > 0 && *filled + rows > slice_rows {
                    (*slice, *filled) = (*slice + 1, 0);
                }
                *filled += rows;
                let number = if ordered { row } else { *slice };
                let slice = u32::try_from(number)
                    .ok()
                    .and_then(|number| number.checked_add(FIRST))
                    .filter(|slice| *slice < CLOSE)
                    .ok_or(HostError::EpochTooLarge { rows: number })?;
                mine.push((slice, Cut { source: input.source, block: batch.clone(), offset, rows }));
                next += 1;
                offset += rows;
                row += rows as u64;
            }
        }
    }
    Ok(dealt)
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow_array::{ArrayRef, Int64Array, RecordBatch};
    use std::sync::Arc;

    fn batch(values: std::ops::Range<i64>) -> Rows {
        let column: ArrayRef = Arc::new(Int64Array::from_iter_values(values));
        RecordBatch::try_from_iter([("x", column)]).unwrap().into()
    }

    #[test]
    fn ordered_slices_are_numbered_by_row_over_all_partitions() {
        let inputs = vec![
            PartitionRows { source: 0, partition: 1, batches: vec![batch(10..15)], rows_before: 10 },
            PartitionRows { source: 0, partition: 0, batches: vec![batch(0..4), batch(4..10)], rows_before: 0 },
        ];
        let dealt = deal(inputs, 3, 2, true).unwrap();
        let mut all: Vec<_> = dealt.iter().flatten().map(|(s, b)| (s - FIRST, b.num_rows())).collect();
        all.sort_unstable();
        assert_eq!(all, [(0, 3), (3, 1), (4, 3), (7, 3), (10, 3), (13, 2)]);
        for worker in &dealt {
            assert!(worker.windows(2).all(|pair| pair[0].0 < pair[1].0));
        }
    }

    #[test]
    fn unordered_slices_are_dense_on_each_worker() {
        let inputs = vec![PartitionRows { source: 0, partition: 0, batches: vec![batch(0..10)], rows_before: 7 }];
        let dealt = deal(inputs, 2, 2, false).unwrap();
        let numbers = |w: usize| dealt[w].iter().map(|(s, _)| s - FIRST).collect::<Vec<_>>();
        assert_eq!((numbers(0), numbers(1)), (vec![0, 1, 2], vec![0, 1]));
    }

    #[test]
    fn blocks_of_few_rows_share_a_slice_of_an_unordered_flow() {
        let of = |source, rows_before, blocks: &[i64]| PartitionRows {
            source,
            partition: 0,
            batches: blocks.iter().map(|&rows| batch(0..rows)).collect(),
            rows_before,
        };
        let inputs = || vec![of(0, 0, &[3, 2]), of(1, 5, &[4, 7, 1])];
        let cuts = |ordered| -> Vec<(u32, u8, usize)> {
            let dealt = deal(inputs(), 8, 1, ordered).unwrap();
            dealt[0].iter().map(|(slice, cut)| (slice - FIRST, cut.source, cut.num_rows())).collect()
        };
        assert_eq!(cuts(false), [(0, 0, 3), (0, 0, 2), (1, 1, 4), (2, 1, 7), (2, 1, 1)]);
        let slices: Vec<u32> = cuts(true).iter().map(|cut| cut.0).collect();
        assert!(slices.windows(2).all(|pair| pair[0] < pair[1]), "{slices:?}");
    }

    #[test]
    fn every_worker_has_a_share_of_a_large_block() {
        let inputs = vec![PartitionRows { source: 0, partition: 0, batches: vec![batch(0..10_000)], rows_before: 0 }];
        let dealt = deal(inputs, 1 << 16, 3, false).unwrap();
        let rows = |worker: usize| dealt[worker].iter().map(|(_, cut)| cut.num_rows()).collect::<Vec<_>>();
        assert_eq!((rows(0), rows(1), rows(2)), (vec![3_334], vec![3_334], vec![3_332]));
        let inputs = vec![PartitionRows { source: 0, partition: 0, batches: vec![batch(0..1_000)], rows_before: 0 }];
        assert_eq!(deal(inputs, 1 << 16, 3, false).unwrap()[0].len(), 1, "not cut below {LEAST_SHARE} rows");
    }

    #[test]
    fn an_epoch_beyond_the_slices_is_refused() {
        let inputs = vec![PartitionRows { source: 0, partition: 0, batches: vec![batch(0..1)], rows_before: 1 << 31 }];
        assert!(matches!(deal(inputs, 8, 1, true), Err(HostError::EpochTooLarge { .. })));
    }
}
