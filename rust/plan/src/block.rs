//! The block that flows: rows with the hashes of their keys, a watermark, the processing time, the end of an epoch, or where joiners begin.
//!
//! Rows carry their side: in front of the first step the number of their source, on the way into a keyed operator the number of the input.
//!
//! On the wire: a tag byte, then for rows the side, the number of hashes, the hashes, and an Arrow IPC stream of one batch; all little-endian. Frames
//! around it carry version and checksum.

use arrow_array::{RecordBatch, RecordBatchOptions, UInt32Array};
use arrow_ipc::writer::StreamWriter;
use arrow_select::take::take;
use penstock_bins::Block;
use penstock_dataflow::wire::{Wire, WireError};

/// See the module.
#[derive(Clone, Debug, PartialEq)]
pub enum FlowBlock {
    /// Rows of a stage.
    Rows {
        /// The rows.
        batch: RecordBatch,
        /// One hash per row once routed for a keyed stage; empty before.
        hashes: Vec<u64>,
        /// Which input they belong to.
        side: u8,
    },
    /// The watermark in microseconds since 1970; `i64::MAX` at the end of input.
    Watermark(i64),
    /// Processing time of the epoch in milliseconds since 1970, before its watermark.
    Clock(i64),
    /// The epoch ends.
    EndEpoch,
    /// The watermark as it stands, in microseconds since 1970, for workers that have just come; nothing new to the others.
    Begin(i64),
}

impl FlowBlock {
    /// Rows that are not routed.
    pub fn rows(batch: RecordBatch) -> Self {
        Self::Rows { batch, hashes: Vec::new(), side: 0 }
    }

    /// Rows with the hashes of their keys.
    pub fn keyed(batch: RecordBatch, hashes: Vec<u64>) -> Self {
        Self::Rows { batch, hashes, side: 0 }
    }

    /// The same rows as those of an input; other blocks have none.
    pub fn of(mut self, input: u8) -> Self {
        if let Self::Rows { side, .. } = &mut self {
            *side = input;
        }
        self
    }
}

const ROWS: u8 = 1;
const WATERMARK: u8 = 2;
const END_EPOCH: u8 = 3;
const CLOCK: u8 = 4;
const BEGIN: u8 = 5;

impl Wire for FlowBlock {
    fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Rows { batch, hashes, side } => {
                out.extend([ROWS, *side]);
                out.extend_from_slice(&(hashes.len() as u32).to_le_bytes());
                crate::wire::put_items(out, hashes, u64::to_le_bytes);
                StreamWriter::try_new(&mut *out, &batch.schema())
                    .and_then(|mut writer| {
                        writer.write(batch)?;
                        writer.finish()
                    })
                    .expect("a valid batch is written to memory");
            }
            Self::Watermark(us) => {
                out.push(WATERMARK);
                out.extend_from_slice(&us.to_le_bytes());
            }
            Self::Clock(ms) => {
                out.push(CLOCK);
                out.extend_from_slice(&ms.to_le_bytes());
            }
            Self::EndEpoch => out.push(END_EPOCH),
            Self::Begin(us) => {
                out.push(BEGIN);
                out.extend_from_slice(&us.to_le_bytes());
            }
        }
    }

    fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let wrong = |what: &str| WireError(format!("a flow block: {what}"));
        match bytes.split_first() {
            Some((&END_EPOCH, [])) => Ok(Self::EndEpoch),
            Some((&WATERMARK, rest)) => {
                Ok(Self::Watermark(i64::from_le_bytes(rest.try_into().map_err(|_| wrong("watermark"))?)))
            }
            Some((&CLOCK, rest)) => Ok(Self::Clock(i64::from_le_bytes(rest.try_into().map_err(|_| wrong("clock"))?))),
            Some((&BEGIN, rest)) => Ok(Self::Begin(i64::from_le_bytes(rest.try_into().map_err(|_| wrong("begin"))?))),
            Some((&ROWS, rest)) => {
                let (&side, rest) = rest.split_first().ok_or_else(|| wrong("side"))?;
                let (count, rest) = rest.split_first_chunk().ok_or_else(|| wrong("length"))?;
                let len = u32::from_le_bytes(*count) as usize * 8;
                let (hashes, stream) = rest.split_at_checked(len).ok_or_else(|| wrong("hashes"))?;
                let hashes: Vec<u64> = hashes
                    .chunks_exact(8)
                    .map(|hash| u64::from_le_bytes(hash.try_into().expect("eight bytes")))
                    .collect();
                let arrow = |error: arrow_schema::ArrowError| wrong(&error.to_string());
                let batch = crate::ipc::batch(stream).map_err(arrow)?.ok_or_else(|| wrong("no batch"))?;
                if !hashes.is_empty() && hashes.len() != batch.num_rows() {
                    return Err(wrong("hashes and rows differ in number"));
                }
                Ok(Self::Rows { batch, hashes, side })
            }
            _ => Err(wrong("unknown tag")),
        }
    }
}

impl Block for FlowBlock {
    fn len(&self) -> usize {
        match self {
            Self::Rows { batch, .. } => batch.num_rows(),
            Self::Watermark(_) | Self::Clock(_) | Self::EndEpoch | Self::Begin(_) => 0,
        }
    }

    fn is_empty(&self) -> bool {
        matches!(self, Self::Rows { batch, .. } if batch.num_rows() == 0)
    }

    fn hashes(&self) -> Option<&[u64]> {
        match self {
            Self::Rows { batch, hashes, .. } if hashes.len() == batch.num_rows() => Some(hashes),
            _ => None,
        }
    }

    fn split(self, workers: &[u32], emit: &mut dyn FnMut(u32, Self)) {
        let Self::Rows { batch, hashes, side } = self else { unreachable!("only rows are divided") };
        let groups = workers.iter().max().map_or(0, |&last| last as usize + 1);
        let all = 0..batch.num_rows() as u32;
        let parted = part(&hashes, workers, groups);
        let rows = match batch.num_columns() {
            0 => vec![Vec::new(); groups],
            _ => part(&all.collect::<Vec<_>>(), workers, groups),
        };
        for (worker, (hashes, rows)) in
            (0..).zip(parted.into_iter().zip(rows)).filter(|(_, (hashes, _))| !hashes.is_empty())
        {
            let indices = UInt32Array::from(rows);
            let columns = batch
                .columns()
                .iter()
                .map(|column| take(column, &indices, None).expect("row numbers of the batch itself"))
                .collect();
            let options = RecordBatchOptions::new().with_row_count(Some(hashes.len()));
            let part = RecordBatch::try_new_with_options(batch.schema(), columns, &options)
                .expect("taken columns fit the batch's schema");
            emit(worker, Self::keyed(part, hashes).of(side));
        }
    }
}

/// As many groups are picked one after the other; with more, each item goes to its place.
const FEW_GROUPS: usize = 6;

/// Divides items by the group that each is in, in their order.
fn part<T: Copy + Default>(items: &[T], of: &[u32], groups: usize) -> Vec<Vec<T>> {
    if groups <= FEW_GROUPS {
        // No branch depends on the items, and no load waits for a store before it.
        return (0..groups as u32).map(|group| pick(items, of, group)).collect();
    }
    let mut parts: Vec<Vec<T>> = (0..groups).map(|_| Vec::with_capacity(items.len() / groups * 5 / 4)).collect();
    for (&item, &group) in items.iter().zip(of) {
        parts[group as usize].push(item);
    }
    parts
}

/// The items of one group.
fn pick<T: Copy + Default>(items: &[T], of: &[u32], group: u32) -> Vec<T> {
    let count = of.iter().map(|&other| usize::from(other == group)).sum::<usize>();
    // What is of another group is written, too, and overwritten by the next: the last one lies behind the end.
    let mut picked = vec![T::default(); count + 1];
    let mut next = 0;
    for (&item, &other) in items.iter().zip(of) {
        picked[next] = item;
        next += usize::from(other == group);
    }
    picked.truncate(count);
    picked
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow_array::{Int64Array, StringArray};
    use proptest::prelude::*;
    use std::sync::Arc;

    fn batch(rows: &[(i64, Option<String>)]) -> RecordBatch {
        let numbers = Int64Array::from_iter_values(rows.iter().map(|row| row.0));
        let names: StringArray = rows.iter().map(|row| row.1.clone()).collect();
        RecordBatch::try_from_iter_with_nullable([
            ("n", Arc::new(numbers) as _, false),
            ("s", Arc::new(names) as _, true),
        ])
        .unwrap()
    }

    proptest! {
        #[test]
        fn wire_and_split(rows in prop::collection::vec((any::<i64>(), any::<Option<String>>()), 0..40), peers in 1u32..10, side: u8) {
            let hashes: Vec<u64> = rows.iter().map(|row| row.0 as u64).collect();
            let block = FlowBlock::keyed(batch(&rows), hashes.clone()).of(side);
            let mut bytes = Vec::new();
            block.encode(&mut bytes);
            prop_assert_eq!(&FlowBlock::decode(&bytes).unwrap(), &block);
            for cut in 0..bytes.len().min(200) {
                prop_assert!(FlowBlock::decode(&bytes[..cut]).is_err());
            }
            let workers: Vec<u32> = hashes.iter().map(|hash| (hash % u64::from(peers)) as u32).collect();
            let bare = batch(&rows).project(&[]).unwrap();
            let bare = FlowBlock::keyed(bare, hashes.clone());
            bytes.clear();
            bare.encode(&mut bytes);
            prop_assert_eq!(&FlowBlock::decode(&bytes).unwrap(), &bare);
            let mut parts = Vec::new();
            bare.split(&workers, &mut |worker, part| parts.push((worker, part.hashes().unwrap().to_vec(), part.len())));
            for (worker, hashes, len) in parts {
                prop_assert_eq!(len, hashes.len());
                let expected: Vec<u64> = rows.iter().map(|row| row.0 as u64).filter(|hash| hash % u64::from(peers) == u64::from(worker)).collect();
                prop_assert_eq!(hashes, expected);
            }
            block.split(&workers, &mut |worker, part| {
                let expected: Vec<_> = rows.iter().filter(|row| row.0 as u64 % u64::from(peers) == u64::from(worker)).cloned().collect();
                assert_eq!(part, FlowBlock::keyed(batch(&expected), expected.iter().map(|row| row.0 as u64).collect()).of(side));
            });
        }
    }

    #[test]
    fn signals_stay_local_and_round_trip() {
        for block in [
            FlowBlock::Watermark(-7),
            FlowBlock::Begin(-3),
            FlowBlock::Clock(5),
            FlowBlock::EndEpoch,
            FlowBlock::rows(batch(&[(1, None)])),
        ] {
            assert_eq!(block.hashes(), None);
            assert!(!block.is_empty());
            let mut bytes = Vec::new();
            block.encode(&mut bytes);
            assert_eq!(FlowBlock::decode(&bytes).unwrap(), block);
        }
        assert!(FlowBlock::decode(&[]).is_err());
        assert!(FlowBlock::decode(&[9]).is_err());
        assert!(FlowBlock::decode(&[WATERMARK, 1]).is_err());
    }
}
