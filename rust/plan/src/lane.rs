//! One column of accumulator values, by slot.

use crate::error::StateFault;
use crate::wire::{Reader, put_blob, put_items};

/// Values of one type by slot; the accumulator knows what they mean.
#[derive(Clone)]
pub(crate) enum Lane {
    None,
    I64(Vec<i64>),
    I128(Vec<i128>),
    F64(Vec<f64>),
    Bytes(Vec<Box<[u8]>>),
}

macro_rules! each {
    ($lane:expr, $values:ident => $body:expr, $none:expr) => {
        match $lane {
            Lane::None => $none,
            Lane::I64($values) => $body,
            Lane::I128($values) => $body,
            Lane::F64($values) => $body,
            Lane::Bytes($values) => $body,
        }
    };
}

macro_rules! pair {
    ($a:expr, $b:expr, $x:ident, $y:ident => $body:expr) => {
        match ($a, $b) {
            (Lane::None, Lane::None) => {}
            (Lane::I64($x), Lane::I64($y)) => $body,
            (Lane::I128($x), Lane::I128($y)) => $body,
            (Lane::F64($x), Lane::F64($y)) => $body,
            (Lane::Bytes($x), Lane::Bytes($y)) => $body,
            _ => unreachable!("lanes of one kind"),
        }
    };
}

impl Lane {
    pub(crate) fn resize(&mut self, len: usize) {
        each!(self, values => values.resize_with(len, Default::default), ());
    }

    pub(crate) fn truncate(&mut self, len: usize) {
        each!(self, values => values.truncate(len), ());
    }

    // `clone` copies plain numbers and allocates only for byte values.
    #[allow(clippy::clone_on_copy)]
    pub(crate) fn push_from(&mut self, other: &Self, slot: usize) {
        pair!(self, other, to, from => to.push(from[slot].clone()));
    }

    #[allow(clippy::clone_on_copy)]
    pub(crate) fn copy_from(&mut self, slot: usize, other: &Self, at: usize) {
        pair!(self, other, to, from => to[slot] = from[at].clone());
    }

    pub(crate) fn append(&mut self, other: &mut Self) {
        pair!(self, other, to, from => to.append(from));
    }

    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::None => 0,
            Self::I64(values) => values.capacity() * 8,
            Self::I128(values) => values.capacity() * 16,
            Self::F64(values) => values.capacity() * 8,
            Self::Bytes(values) => values.capacity() * 16 + values.iter().map(|value| value.len()).sum::<usize>(),
        }
    }

    pub(crate) fn encoded_len(&self, slot: usize) -> usize {
        match self {
            Self::None => 0,
            Self::I64(_) | Self::F64(_) => 8,
            Self::I128(_) => 16,
            Self::Bytes(values) => 4 + values[slot].len(),
        }
    }

    pub(crate) fn encode(&self, slots: std::ops::Range<usize>, out: &mut Vec<u8>) {
        match self {
            Self::None => {}
            Self::I64(values) => put_items(out, &values[slots], i64::to_le_bytes),
            Self::I128(values) => put_items(out, &values[slots], i128::to_le_bytes),
            Self::F64(values) => put_items(out, &values[slots], f64::to_le_bytes),
            Self::Bytes(values) => values[slots].iter().for_each(|value| put_blob(out, value)),
        }
    }

    pub(crate) fn decode(&mut self, reader: &mut Reader<'_>, count: usize) -> Result<(), StateFault> {
        match self {
            Self::None => Ok(()),
            Self::I64(values) => reader.items(count, values, i64::from_le_bytes),
            Self::I128(values) => reader.items(count, values, i128::from_le_bytes),
            Self::F64(values) => reader.items(count, values, f64::from_le_bytes),
            Self::Bytes(values) => {
                for _ in 0..count {
                    let len = reader.u32()? as usize;
                    values.push(reader.take(len)?.into());
                }
                Ok(())
            }
        }
    }
}
