//! Accumulators: words of a row that a function of an aggregate keeps, and the loops that add to them, one column at a time.
//!
//! Every accumulator begins with the number of values seen. Wide sums are two words, low first; byte values are numbered from 1.

use arrow_buffer::{NullBuffer, ScalarBuffer};
use arrow_row::Rows;

use crate::bytes::ByteColumn;
use crate::column::Codes;

/// How an aggregate is stored; the byte is part of the state format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Rows,
    Valid,
    Int { unsigned: bool },
    Decimal,
    Float,
    Code { greatest: bool },
    Wide { greatest: bool },
    Bytes { greatest: bool },
}

impl Kind {
    pub(crate) fn byte(self) -> u8 {
        match self {
            Self::Rows => 1,
            Self::Valid => 2,
            Self::Int { unsigned: false } => 3,
            Self::Int { unsigned: true } => 4,
            Self::Decimal => 5,
            Self::Float => 6,
            Self::Code { greatest: false } => 7,
            Self::Code { greatest: true } => 8,
            Self::Bytes { greatest: false } => 9,
            Self::Bytes { greatest: true } => 10,
            Self::Wide { greatest: false } => 11,
            Self::Wide { greatest: true } => 12,
        }
    }

    /// Words in a row.
    pub(crate) fn words(self) -> usize {
        match self {
            Self::Rows | Self::Valid => 1,
            Self::Float | Self::Code { .. } | Self::Bytes { .. } => 2,
            Self::Int { .. } | Self::Decimal | Self::Wide { .. } => 3,
        }
    }
}

/// The column of a block in the form its accumulator reads.
pub(crate) enum Input {
    Rows,
    Valid(Option<NullBuffer>),
    Int(Codes),
    Decimal(ScalarBuffer<i128>, Option<NullBuffer>),
    Float(ScalarBuffer<f64>, Option<NullBuffer>),
    Code(Codes),
    /// Text and binary as they are.
    Bytes(ByteColumn, Option<NullBuffer>),
    /// Bytes in the order of the values.
    Ordered(Rows, Option<NullBuffer>),
}

/// Byte values of a table. Between marks values are only appended, so that an undo finds what its rows name.
#[derive(Clone, Debug, Default)]
pub(crate) struct Blobs {
    values: Vec<Box<[u8]>>,
    heap: usize,
    /// Whether a value that gives way is kept.
    pub(crate) append: bool,
}

impl Blobs {
    pub(crate) fn get(&self, word: u64) -> &[u8] {
        &self.values[word as usize - 1]
    }

    pub(crate) fn len(&self) -> usize {
        self.values.len()
    }

    /// Replaces the value that `word` names; 0 names none.
    pub(crate) fn put(&mut self, word: &mut u64, value: &[u8]) {
        self.heap += value.len();
        if *word != 0 && !self.append {
            let old = std::mem::replace(&mut self.values[*word as usize - 1], value.into());
            self.heap -= old.len();
        } else {
            self.values.push(value.into());
            *word = self.values.len() as u64;
        }
    }

    pub(crate) fn truncate(&mut self, len: usize) {
        for value in self.values.drain(len..) {
            self.heap -= value.len();
        }
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.heap + self.values.capacity() * size_of::<Box<[u8]>>()
    }
}

/// A 128-bit sum wrapped.
pub(crate) struct Wrapped;

fn wide(words: &[u64], at: usize) -> i128 {
    (u128::from(words[at + 1]) << 64 | u128::from(words[at])) as i128
}

fn set_wide(words: &mut [u64], at: usize, value: i128) {
    words[at] = value as u64;
    words[at + 1] = (value as u128 >> 64) as u64;
}

/// Where an accumulator lies in the words of a table.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub(crate) kind: Kind,
    pub(crate) stride: usize,
    pub(crate) offset: usize,
}

/// Where the accumulators of some records lie, one record after the other.
pub(crate) trait Cells {
    /// Records.
    fn len(&self) -> usize;
    /// The words of the accumulator at `place` for record `i`.
    fn cell(&mut self, place: Place, i: usize) -> &mut [u64];
}

/// Records at positions of one table.
pub(crate) struct At<'a> {
    pub(crate) words: &'a mut [u64],
    pub(crate) at: &'a [u32],
}

impl Cells for At<'_> {
    fn len(&self) -> usize {
        self.at.len()
    }

    #[inline]
    fn cell(&mut self, place: Place, i: usize) -> &mut [u64] {
        place.cell(self.words, self.at[i])
    }
}

impl Place {
    /// The words of the accumulator at a position of a table with these words.
    #[inline]
    pub(crate) fn cell(self, words: &mut [u64], position: u32) -> &mut [u64] {
        let word = self.word(position);
        &mut words[word..word + self.kind.words()]
    }

    #[inline]
    fn word(self, position: u32) -> usize {
        position as usize * self.stride + self.offset
    }

    /// Adds row `rows[i]` of a block to the `i`-th cell. A count of rows reads no rows.
    pub(crate) fn update(
        self,
        cells: &mut impl Cells,
        blobs: &mut Blobs,
        input: &Input,
        rows: &[u32],
    ) -> Result<(), Wrapped> {
        #[inline]
        fn each(
            place: Place,
            nulls: &Option<NullBuffer>,
            rows: &[u32],
            cells: &mut impl Cells,
            mut add: impl FnMut(usize, &mut [u64]),
        ) {
            let rows = rows.iter().map(|&row| row as usize).enumerate();
            match nulls {
                None => rows.for_each(|(i, row)| add(row, cells.cell(place, i))),
                Some(nulls) => {
                    rows.filter(|&(_, row)| nulls.is_valid(row)).for_each(|(i, row)| add(row, cells.cell(place, i)));
                }
            }
        }
        let mut wrapped = false;
        match (input, self.kind) {
            (Input::Rows, _) => (0..cells.len()).for_each(|i| cells.cell(self, i)[0] += 1),
            (Input::Valid(nulls), _) => each(self, nulls, rows, cells, |_, cell| cell[0] += 1),
            (Input::Int(codes), Kind::Int { unsigned }) => each(self, &codes.nulls, rows, cells, |row, cell| {
                let code = codes.values[row];
                let more = if unsigned { i128::from(code as u64) } else { i128::from(code) };
                cell[0] += 1;
                let sum = wide(cell, 1) + more;
                set_wide(cell, 1, sum);
            }),
            (Input::Decimal(values, nulls), Kind::Decimal) => each(self, nulls, rows, cells, |row, cell| {
                let (sum, over) = wide(cell, 1).overflowing_add(values[row]);
                wrapped |= over;
                cell[0] += 1;
                set_wide(cell, 1, sum);
            }),
            (Input::Decimal(values, nulls), Kind::Wide { greatest }) => each(self, nulls, rows, cells, |row, cell| {
                if cell[0] == 0 || beats(&values[row], &wide(cell, 1), greatest) {
                    set_wide(cell, 1, values[row]);
                }
                cell[0] += 1;
            }),
            (Input::Float(values, nulls), Kind::Float) => each(self, nulls, rows, cells, |row, cell| {
                cell[0] += 1;
                cell[1] = (f64::from_bits(cell[1]) + values[row]).to_bits();
            }),
            (Input::Code(codes), Kind::Code { greatest }) => each(self, &codes.nulls, rows, cells, |row, cell| {
                let code = codes.values[row];
                if cell[0] == 0 || beats(&code, &(cell[1] as i64), greatest) {
                    cell[1] = code as u64;
                }
                cell[0] += 1;
            }),
            (Input::Bytes(values, nulls), Kind::Bytes { greatest }) => each(self, nulls, rows, cells, |row, cell| {
                best(cell, blobs, values.get(row), greatest);
            }),
            (Input::Ordered(values, nulls), Kind::Bytes { greatest }) => each(self, nulls, rows, cells, |row, cell| {
                best(cell, blobs, values.row(row).data(), greatest);
            }),
            _ => unreachable!("input and accumulator are made by one kind"),
        }
        if wrapped { Err(Wrapped) } else { Ok(()) }
    }

    /// Merges the accumulators at `from[i]` of another table into those at `at[i]`.
    pub(crate) fn merge(
        self,
        words: &mut [u64],
        blobs: &mut Blobs,
        (other, other_blobs): (&[u64], &Blobs),
        from: &[u32],
        at: &[u32],
    ) -> Result<(), Wrapped> {
        let mut wrapped = false;
        for (&from, &at) in from.iter().zip(at) {
            let (from, word) = (self.word(from), self.word(at));
            let seen = other[from];
            if seen == 0 {
                continue;
            }
            match self.kind {
                Kind::Rows | Kind::Valid => {}
                Kind::Int { .. } | Kind::Decimal => {
                    let (sum, over) = wide(words, word + 1).overflowing_add(wide(other, from + 1));
                    wrapped |= over;
                    set_wide(words, word + 1, sum);
                }
                Kind::Wide { greatest } => {
                    let value = wide(other, from + 1);
                    if words[word] == 0 || beats(&value, &wide(words, word + 1), greatest) {
                        set_wide(words, word + 1, value);
                    }
                }
                Kind::Float => {
                    let sum = f64::from_bits(words[word + 1]) + f64::from_bits(other[from + 1]);
                    words[word + 1] = sum.to_bits();
                }
                Kind::Code { greatest } => {
                    let code = other[from + 1] as i64;
                    if words[word] == 0 || beats(&code, &(words[word + 1] as i64), greatest) {
                        words[word + 1] = code as u64;
                    }
                }
                Kind::Bytes { greatest } => {
                    let value = other_blobs.get(other[from + 1]);
                    if words[word] == 0 || beats(value, blobs.get(words[word + 1]), greatest) {
                        blobs.put(&mut words[word + 1], value);
                    }
                }
            }
            // Forged state may claim any number.
            words[word] = words[word].saturating_add(seen);
        }
        if wrapped { Err(Wrapped) } else { Ok(()) }
    }
}

fn best(cell: &mut [u64], blobs: &mut Blobs, value: &[u8], greatest: bool) {
    if cell[0] == 0 || beats(value, blobs.get(cell[1]), greatest) {
        blobs.put(&mut cell[1], value);
    }
    cell[0] += 1;
}

#[inline]
fn beats<T: PartialOrd + ?Sized>(value: &T, best: &T, greatest: bool) -> bool {
    if greatest { value > best } else { value < best }
}
