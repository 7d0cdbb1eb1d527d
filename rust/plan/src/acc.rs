//! Accumulators: words of a row that a function of an aggregate keeps, and the loops that add to them, one column at a time.
//!
//! Every accumulator begins with the number of values seen. Wide sums are two words, low first; byte values are numbered from 1, and
//! the number of one stands behind the number of values seen. Moments are the mean and the sum of squared distances from it, updated as Welford
//! and merged as Chan et al. do, in the order of operations that Spark has.

use std::borrow::Cow;
use std::cell::RefCell;

use arrow_buffer::{NullBuffer, ScalarBuffer};
use arrow_row::Rows;

use crate::bytes::ByteColumn;
use crate::column::Codes;
use crate::gather::histogram::{self, Fresh};
use crate::gather::{registers, set};

/// How an aggregate is stored; the byte is part of the state format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Rows,
    Valid,
    Int {
        unsigned: bool,
    },
    /// Of a mean the sum goes on where it leaves 128 bits, see [`COARSE`].
    Decimal {
        mean: bool,
    },
    Float,
    Code {
        greatest: bool,
    },
    Wide {
        greatest: bool,
    },
    Bytes {
        greatest: bool,
    },
    /// Mean and squared distances.
    Moments,
    /// The distinct values, all of eight bytes or of any length, and how many there are.
    Set {
        fixed: bool,
    },
    /// Of so many bits.
    Registers(u8),
    /// Of so many digits.
    Histogram(u8),
}

impl Kind {
    pub(crate) fn byte(self) -> u8 {
        match self {
            Self::Rows => 1,
            Self::Valid => 2,
            Self::Int { unsigned: false } => 3,
            Self::Int { unsigned: true } => 4,
            Self::Decimal { .. } => 5,
            Self::Float => 6,
            Self::Code { greatest: false } => 7,
            Self::Code { greatest: true } => 8,
            Self::Bytes { greatest: false } => 9,
            Self::Bytes { greatest: true } => 10,
            Self::Wide { greatest: false } => 11,
            Self::Wide { greatest: true } => 12,
            Self::Moments => 13,
            Self::Set { fixed: true } => 14,
            Self::Set { fixed: false } => 15,
            Self::Registers(bits) => 32 + bits,
            Self::Histogram(digits) => 64 + digits,
        }
    }

    /// Words in a row.
    pub(crate) fn words(self) -> usize {
        match self {
            Self::Rows | Self::Valid => 1,
            Self::Float | Self::Code { .. } | Self::Bytes { .. } | Self::Registers(_) | Self::Histogram(_) => 2,
            Self::Int { .. } | Self::Decimal { .. } | Self::Wide { .. } | Self::Moments | Self::Set { .. } => 3,
        }
    }

    /// Whether its second word is the number of a byte value.
    pub(crate) fn has_blob(self) -> bool {
        matches!(self, Self::Bytes { .. } | Self::Set { .. } | Self::Registers(_) | Self::Histogram(_))
    }

    /// Whether its byte value is needed to tell the result.
    pub(crate) fn tells_blob(self) -> bool {
        self.has_blob() && !matches!(self, Self::Set { .. })
    }

    /// What of a byte value is written.
    pub(crate) fn pack(self, blob: &[u8]) -> &[u8] {
        if matches!(self, Self::Set { .. }) { set::packed(blob) } else { blob }
    }

    /// The byte value of an accumulator of these words that was written so; `None` if it is wrong.
    pub(crate) fn unpack<'a>(self, cell: &[u64], packed: &'a [u8]) -> Option<Cow<'a, [u8]>> {
        match self {
            Self::Set { fixed } => {
                let (set, count) = set::unpack(packed, fixed)?;
                (count == cell[2] && count > 0).then(|| Cow::Owned(set.into()))
            }
            Self::Registers(bits) => registers::is_sound(packed, bits).then_some(Cow::Borrowed(packed)),
            Self::Histogram(digits) => histogram::is_sound(packed, digits).then_some(Cow::Borrowed(packed)),
            _ => Some(Cow::Borrowed(packed)),
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
    /// Hashes of the values.
    Hashes(Vec<u64>, Option<NullBuffer>),
    /// Buckets of the values, and those that are new to a table.
    Buckets(Vec<i32>, Option<NullBuffer>, RefCell<Fresh>),
}

/// Byte values of a table. Those that were there at the last mark stay as they are, so that an undo finds what its rows name.
#[derive(Clone, Debug, Default)]
pub(crate) struct Blobs {
    values: Vec<Box<[u8]>>,
    heap: usize,
    /// How many values stay as they are.
    kept: usize,
    /// Those among them that no row names any more, unless there is an undo.
    replaced: Vec<u64>,
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
        if *word as usize > self.kept {
            let old = &mut self.values[*word as usize - 1];
            self.heap -= old.len();
            if old.len() == value.len() { old.copy_from_slice(value) } else { *old = value.into() }
        } else {
            self.replaced.extend((*word != 0).then_some(*word));
            self.values.push(value.into());
            *word = self.values.len() as u64;
        }
    }

    /// Changes the value that `word` names, where it lies or as a copy; 0 names none, and then it is empty.
    pub(crate) fn edit<T>(&mut self, word: &mut u64, change: impl FnOnce(&mut Box<[u8]>) -> T) -> T {
        if *word as usize <= self.kept {
            let value = if *word == 0 { Box::default() } else { self.values[*word as usize - 1].clone() };
            self.heap += value.len();
            self.replaced.extend((*word != 0).then_some(*word));
            self.values.push(value);
            *word = self.values.len() as u64;
        }
        let value = &mut self.values[*word as usize - 1];
        self.heap -= value.len();
        let done = change(value);
        self.heap += value.len();
        done
    }

    /// Values that are there now stay as they are, too.
    pub(crate) fn keep(&mut self) {
        self.kept = self.values.len();
    }

    /// There is no undo any more: lets go of values that were kept for it.
    pub(crate) fn let_go(&mut self) {
        self.kept = 0;
        for word in std::mem::take(&mut self.replaced) {
            let value = std::mem::take(&mut self.values[word as usize - 1]);
            self.heap -= value.len();
        }
    }

    /// Forgets values behind the first so many, which an undo has given their names back.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.replaced.clear();
        for value in self.values.drain(len..) {
            self.heap -= value.len();
        }
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.heap + self.values.capacity() * size_of::<Box<[u8]>>() + self.replaced.capacity() * 8
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

/// Set in the number of values where the sum of a mean of decimals has left 128 bits: from there on it counts in units of 2^62, too large to
/// leave them again, and far below what a double shows of values that make such a sum. The order of rows decides when, and so the last bits of
/// the mean.
const COARSE: u64 = 1 << 63;
const COARSE_BITS: u32 = 62;

/// Adds the sum of so many values, which may be coarse; says whether it had room.
fn add_decimal(cell: &mut [u64], (more, seen): (i128, u64), mean: bool) -> bool {
    let coarse = |n: u64| mean && n & COARSE != 0;
    let (sum, n) = (wide(cell, 1), cell[0]);
    let added = sum.checked_add(more).filter(|_| coarse(n) == coarse(seen));
    if added.is_none() && !mean {
        return false;
    }
    if mean {
        let shifted = |sum: i128, n| if coarse(n) { sum } else { sum >> COARSE_BITS };
        // Forged state may claim any number.
        set_wide(cell, 1, added.unwrap_or_else(|| shifted(sum, n).saturating_add(shifted(more, seen))));
        let coarse = if added.is_none() { COARSE } else { n & COARSE };
        cell[0] = (n & !COARSE).saturating_add(seen & !COARSE).min(!COARSE) | coarse;
    } else {
        set_wide(cell, 1, added.unwrap_or(sum));
        cell[0] = n.saturating_add(seen);
    }
    true
}

/// The sum behind a mean of decimals, which counts in their least units, and of how many values it is.
pub(crate) fn decimals((n, sum): (u64, i128)) -> (f64, u64) {
    match n & COARSE {
        0 => (sum as f64, n),
        _ => (sum as f64 * 2f64.powi(COARSE_BITS as i32), n & !COARSE),
    }
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
            (Input::Decimal(values, nulls), Kind::Decimal { mean }) => each(self, nulls, rows, cells, |row, cell| {
                wrapped |= !add_decimal(cell, (values[row], 1), mean);
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
            (Input::Float(values, nulls), Kind::Moments) => each(self, nulls, rows, cells, |row, cell| {
                let (mean, squares) = (f64::from_bits(cell[1]), f64::from_bits(cell[2]));
                cell[0] += 1;
                let distance = values[row] - mean;
                let step = distance / cell[0] as f64;
                cell[1] = (mean + step).to_bits();
                cell[2] = (squares + distance * (distance - step)).to_bits();
            }),
            (Input::Code(codes), Kind::Set { fixed: true }) => each(self, &codes.nulls, rows, cells, |row, cell| {
                wrapped |= gather(cell, blobs, &codes.values[row].to_le_bytes(), true);
            }),
            (Input::Bytes(values, nulls), Kind::Set { fixed: false }) => each(self, nulls, rows, cells, |row, cell| {
                wrapped |= gather(cell, blobs, values.get(row), false);
            }),
            (Input::Ordered(values, nulls), Kind::Set { fixed: false }) => {
                each(self, nulls, rows, cells, |row, cell| {
                    wrapped |= gather(cell, blobs, values.row(row).data(), false);
                })
            }
            (Input::Hashes(hashes, nulls), Kind::Registers(bits)) => each(self, nulls, rows, cells, |row, cell| {
                blobs.edit(&mut cell[1], |found| registers::insert(found, hashes[row], bits));
                cell[0] += 1;
            }),
            (Input::Buckets(buckets, nulls, fresh), Kind::Histogram(_)) => {
                let mut fresh = fresh.borrow_mut();
                each(self, nulls, rows, cells, |row, cell| {
                    if !blobs.edit(&mut cell[1], |found| histogram::count(found, buckets[row])) {
                        fresh.push(cell[1], buckets[row], blobs);
                    }
                    cell[0] += 1;
                });
                fresh.pass(rows.len(), blobs);
            }
            _ => unreachable!("input and accumulator are made by one kind"),
        }
        if wrapped { Err(Wrapped) } else { Ok(()) }
    }

    /// Takes the accumulators at `from[i]` of another table, which were merged, away from those at `at[i]`; only of kinds that
    /// [part](Kind::parts).
    pub(crate) fn part(self, words: &mut [u64], other: &[u64], from: &[u32], at: &[u32]) {
        debug_assert!(self.kind.parts(), "{:?} does not part", self.kind);
        for (&from, &at) in from.iter().zip(at) {
            let (from, word) = (self.word(from), self.word(at));
            if matches!(self.kind, Kind::Int { .. }) {
                set_wide(words, word + 1, wide(words, word + 1).wrapping_sub(wide(other, from + 1)));
            }
            // Forged state may claim any number.
            words[word] = words[word].saturating_sub(other[from]);
        }
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
                Kind::Decimal { mean } => {
                    wrapped |= !add_decimal(&mut words[word..], (wide(other, from + 1), seen), mean);
                    continue;
                }
                Kind::Int { .. } => {
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
                Kind::Moments if words[word] == 0 => {
                    words[word + 1..word + 3].copy_from_slice(&other[from + 1..from + 3])
                }
                Kind::Moments => {
                    let [mean, squares, theirs, more] =
                        [words[word + 1], words[word + 2], other[from + 1], other[from + 2]].map(f64::from_bits);
                    let (n, m) = (words[word] as f64, seen as f64);
                    let distance = theirs - mean;
                    let step = distance / (n + m);
                    words[word + 1] = (mean + step * m).to_bits();
                    words[word + 2] = (squares + more + distance * step * n * m).to_bits();
                }
                Kind::Set { fixed } => {
                    let theirs = set::iter(other_blobs.get(other[from + 1]), fixed);
                    let [word, count] = words.get_disjoint_mut([word + 1, word + 2]).expect("two words of a cell");
                    blobs.edit(word, |found| {
                        theirs.for_each(|value| match set::insert(found, value, fixed) {
                            Ok(fresh) => *count += u64::from(fresh),
                            Err(set::Full) => wrapped = true,
                        })
                    });
                }
                Kind::Registers(bits) => {
                    let theirs = other_blobs.get(other[from + 1]);
                    blobs.edit(&mut words[word + 1], |found| registers::merge(found, theirs, bits));
                }
                Kind::Histogram(_) => {
                    let theirs = other_blobs.get(other[from + 1]);
                    blobs.edit(&mut words[word + 1], |found| histogram::merge(found, theirs));
                }
            }
            // Forged state may claim any number.
            words[word] = words[word].saturating_add(seen);
        }
        if wrapped { Err(Wrapped) } else { Ok(()) }
    }
}

impl Input {
    /// So many rows of one table are to be added in the next updates: what costs less for all of them waits for the last.
    pub(crate) fn begin(&self, rows: usize) {
        if let Self::Buckets(_, _, fresh) = self {
            fresh.borrow_mut().begin(rows);
        }
    }
}

impl Kind {
    /// Whether its value is the number of values seen.
    pub(crate) fn counts(self) -> bool {
        matches!(self, Self::Rows | Self::Valid)
    }

    /// Whether what was merged can be taken away again, to the bit.
    pub(crate) fn parts(self) -> bool {
        matches!(self, Self::Rows | Self::Valid | Self::Int { .. })
    }
}

/// Adds a value to those of a cell; says whether they are too many.
fn gather(cell: &mut [u64], blobs: &mut Blobs, value: &[u8], fixed: bool) -> bool {
    let fresh = blobs.edit(&mut cell[1], |found| set::insert(found, value, fixed));
    cell[0] += 1;
    cell[2] += u64::from(fresh == Ok(true));
    fresh == Err(set::Full)
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
