//! The user's functions of random plans: the rows that they make of rows, which the oracle asks for as well, and what they are to workers.
//!
//! The state of a bin is a map. It undoes, tells what has changed and comes back from files as that of Python functions does.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use arrow_array::{ArrayRef, BooleanArray, Float64Array, Int64Array, RecordBatch, StringArray};
use arrow_schema::{DataType, SchemaRef};
use penstock_files::{Chunk, ChunkWriter, Entry, is_entries};
use penstock_plan::{
    CallError, Callbacks, Encoding, EpochEnd, Expansion, Extent, ForeignState, Grouped, NULL_HASH, SideRows, Spoiled,
    StateFault, States, StepSpec, hash_int,
};

use super::plans::Made;
use super::{Bag, Row, plain, schema};
use crate::common::{Cell, cells};

/// What a call does. But for what filters, all make rows of the [plain columns](super::PLAIN).
#[derive(Clone, Debug)]
pub(crate) enum Call {
    /// A row of the plain columns that says something of all columns of a row. Where there is a key, a time or a text, it is kept.
    Plain { key: Option<usize>, time: Option<usize>, text: Option<usize> },
    /// Some of the rows.
    Some(SchemaRef),
    /// None to two rows of each, which is an input, or of all rows of a block.
    Copies { each: bool },
    /// The body of a loop: halves the value, and goes on with what is left of it.
    Halves,
    /// Sums by key, which speak at once of what was before the epoch, of all of it at its end, and of each row when its time is over.
    Sums,
    /// What the order of a key's rows changes.
    Orders,
}

/// Something of all that is in a row.
fn fold(row: &[Cell]) -> i64 {
    let mut folded = 17_i64;
    for cell in row {
        let word = match plain(cell.clone()) {
            Cell::Null => 3,
            Cell::Int(value) => value as i64,
            Cell::Text(text) => text.bytes().fold(5_i64, |sum, byte| sum.wrapping_mul(31) + i64::from(byte)),
            Cell::Float(_) => unreachable!("a plain cell"),
        };
        folded = folded.wrapping_mul(1_000_003).wrapping_add(word);
    }
    (folded >> 9).rem_euclid(1 << 40)
}

fn int(value: i64) -> Cell {
    Cell::Int(value.into())
}

fn number(cell: &Cell) -> Option<i64> {
    match cell {
        Cell::Int(value) => Some(*value as i64),
        _ => None,
    }
}

impl Call {
    /// What a function with so many side outputs gives to one of them when it sees a row: of some rows, a row of the plain columns.
    pub(super) fn aside(row: &Row, sides: usize) -> Option<(usize, Row)> {
        let folded = fold(row);
        (sides > 0 && folded % 3 == 1).then(|| {
            let (side, word) = (folded / 3 % sides as i64, ["", "b", "aside"][folded as usize / 9 % 3]);
            (side as usize, vec![int(folded % 7), int(folded % 50), int(folded % 41 - 5), Cell::text(word)])
        })
    }

    /// What it makes of a row, without state. Of the body of a loop it is what one round makes.
    pub(super) fn rows(&self, row: &Row) -> Bag {
        let folded = fold(row);
        match self {
            Self::Plain { key, time, text } => {
                let kept = |at: &Option<usize>, other: Cell| at.map_or(other, |at| row[at].clone());
                let value = if folded % 13 == 0 { Cell::Null } else { int(folded % 41 - 5) };
                let text = kept(text, Cell::text(["", "b", "ccc"][folded as usize % 3]));
                vec![vec![kept(key, int(folded % 7)), kept(time, int(folded % 50)), value, text]]
            }
            Self::Some(_) if folded % 4 == 0 => Vec::new(),
            Self::Some(_) => vec![row.clone()],
            Self::Copies { .. } => (0..folded % 3).map(|copy| with_value(row, |value| value + copy)).collect(),
            Self::Halves => {
                let mut made = with_value(row, |value| value / 2);
                made.push(int(i64::from(number(&made[2]).is_some_and(|value| value > 4))));
                vec![made]
            }
            Self::Sums | Self::Orders => unreachable!("it keeps state"),
        }
    }

    fn made(&self) -> SchemaRef {
        match self {
            Self::Some(schema) => schema.clone(),
            Self::Halves => schema(&super::PLAIN, true),
            _ => schema(&super::PLAIN, false),
        }
    }
}

fn with_value(row: &Row, of: impl Fn(i64) -> i64) -> Row {
    let mut made = row.clone();
    made[2] = number(&row[2]).map_or(Cell::Null, |value| int(of(value)));
    made
}

/// Rows as a block.
pub(super) fn block(schema: &SchemaRef, rows: &[Row]) -> RecordBatch {
    let column = |at: usize| -> ArrayRef {
        let numbers = rows.iter().map(|row| number(&row[at]));
        match schema.field(at).data_type() {
            DataType::Boolean => Arc::new(numbers.map(|value| value.map(|value| value != 0)).collect::<BooleanArray>()),
            DataType::Int64 => Arc::new(numbers.collect::<Int64Array>()),
            DataType::Float64 => {
                let value = |row: &Row| match row[at] {
                    Cell::Float(bits) => Some(f64::from_bits(bits)),
                    _ => None,
                };
                Arc::new(rows.iter().map(value).collect::<Float64Array>())
            }
            DataType::Utf8 => {
                let text = |row: &Row| match &row[at] {
                    Cell::Text(text) => Some(text.clone()),
                    _ => None,
                };
                Arc::new(rows.iter().map(text).collect::<StringArray>())
            }
            other => panic!("no plan has {other}"),
        }
    };
    RecordBatch::try_new(schema.clone(), (0..schema.fields().len()).map(column).collect()).unwrap()
}

/// The functions of a plan, by number; told to, one of the next calls fails.
pub(super) struct Functions {
    calls: Vec<Call>,
    /// How many side outputs each has.
    sides: Vec<usize>,
    /// Calls until one fails; it does at 0.
    left: AtomicI64,
}

impl Functions {
    pub(super) fn new(made: &Made) -> Self {
        let mut sides = vec![0; made.calls.len()];
        for step in made.spec.steps.iter().map(|node| &node.step).flat_map(|step| step.body().iter().chain([step])) {
            use StepSpec::*;
            if let MapBatches { call, .. } | FlatMap { call, .. } | StatefulMap { call, .. } = step {
                sides[*call] = step.sides().len();
            }
        }
        Self { calls: made.calls.clone(), sides, left: AtomicI64::new(-1) }
    }

    /// What a call gives beside what it makes of some rows.
    fn aside<'a>(&self, call: usize, seen: impl IntoIterator<Item = &'a Row>, sides: &mut SideRows) {
        for (side, row) in seen.into_iter().filter_map(|row| Call::aside(row, self.sides[call])) {
            sides.push((side, block(&schema(&super::PLAIN, false), &[row])));
        }
    }

    /// The call after so many fails.
    pub(super) fn fail_after(&self, calls: i64) {
        self.left.store(calls, Ordering::SeqCst);
    }

    /// Whether a call that was to fail has done so; none will now.
    pub(super) fn has_failed(&self) -> bool {
        self.left.swap(-1, Ordering::SeqCst) < 0
    }

    fn count(&self) -> Result<(), CallError> {
        let count = self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| (left >= 0).then_some(left - 1));
        if count == Ok(0) { Err(CallError::new("a function", "it was told to fail")) } else { Ok(()) }
    }
}

impl Callbacks for Functions {
    fn map(&self, call: usize, batch: &RecordBatch, sides: &mut SideRows) -> Result<RecordBatch, CallError> {
        self.count()?;
        let rows = cells(batch);
        self.aside(call, &rows, sides);
        let call = &self.calls[call];
        Ok(block(&call.made(), &rows.iter().flat_map(|row| call.rows(row)).collect::<Bag>()))
    }

    fn expand(&self, call: usize, batch: &RecordBatch, _: bool) -> Result<Box<dyn Expansion>, CallError> {
        self.count()?;
        let (call, sides) = (self.calls[call].clone(), self.sides[call]);
        let each = matches!(call, Call::Copies { each: true });
        Ok(Box::new(Expanding { call, sides, each, inputs: cells(batch).into(), made: VecDeque::new() }))
    }

    fn new_state(&self, _: usize) -> Box<dyn ForeignState> {
        Box::<Memory>::default()
    }

    fn apply(&self, call: usize, block: &mut Grouped<'_>, sides: &mut SideRows) -> Result<RecordBatch, CallError> {
        self.count()?;
        self.aside(call, &cells(block.batch), sides);
        let call = &self.calls[call];
        block.each(|state: &mut Memory, batch| {
            let made: Bag = cells(batch).iter().map(|row| state.apply(call, row)).collect();
            Ok(self::block(&call.made(), &made))
        })
    }

    fn end_epoch(
        &self,
        call: usize,
        end: &EpochEnd,
        states: &mut States<'_>,
        sides: &mut SideRows,
    ) -> Result<Vec<RecordBatch>, CallError> {
        self.count()?;
        let ms = end.after_us.map_or(i64::MIN, |us| if us == i64::MAX { us } else { us.div_euclid(1_000) });
        let made: Bag = states.held().into_iter().flat_map(|bin| states.of::<Memory>(bin).end_epoch(ms)).collect();
        self.aside(call, &made, sides);
        Ok(vec![block(&self.calls[call].made(), &made)])
    }
}

struct Expanding {
    call: Call,
    /// How many side outputs it has.
    sides: usize,
    /// Whether a row is an input.
    each: bool,
    inputs: VecDeque<Row>,
    /// Rows, and of those of a side output which.
    made: VecDeque<(Option<usize>, Row)>,
}

impl Expansion for Expanding {
    fn left(&self) -> u64 {
        match self.each {
            true => self.inputs.len() as u64 + u64::from(!self.made.is_empty()),
            false => u64::from(!self.inputs.is_empty() || !self.made.is_empty()),
        }
    }

    fn draw(&mut self, room: usize, sides: &mut SideRows) -> (Vec<RecordBatch>, Result<(), Spoiled>) {
        while self.made.len() < room {
            let Some(row) = self.inputs.pop_front() else { break };
            self.made.extend(Call::aside(&row, self.sides).map(|(side, row)| (Some(side), row)));
            self.made.extend(self.call.rows(&row).into_iter().map(|row| (None, row)));
        }
        let mut drawn = Bag::new();
        for (side, row) in self.made.drain(..room.min(self.made.len())) {
            match side {
                Some(side) => sides.push((side, block(&schema(&super::PLAIN, false), &[row]))),
                None => drawn.push(row),
            }
        }
        (vec![block(&self.call.made(), &drawn)], Ok(()))
    }
}

/// What a key has.
#[derive(Clone, Debug, Default)]
struct Kept {
    /// Of all epochs before.
    before: i64,
    /// Of this one: the sum, the rows, and the last time of one.
    now: i64,
    rows: i64,
    last: Option<i64>,
    /// Times of rows that are not over, and their values.
    timers: Vec<(i64, i64)>,
}

type Key = Option<i64>;

/// The state of a bin; of all keys, for the oracle.
#[derive(Clone, Debug, Default)]
pub(super) struct Memory {
    keys: BTreeMap<Key, Kept>,
    /// What keys were at the mark that were changed since; none before there was one.
    changed: Option<BTreeMap<Key, Option<Kept>>>,
}

impl Memory {
    /// Notes what a key was.
    fn touch(&mut self, key: Key) {
        if let Some(changed) = &mut self.changed {
            changed.entry(key).or_insert_with(|| self.keys.get(&key).cloned());
        }
    }

    pub(super) fn apply(&mut self, call: &Call, row: &Row) -> Row {
        let (key, time, value) = (number(&row[0]), number(&row[1]), number(&row[2]).unwrap_or(0));
        self.touch(key);
        let kept = self.keys.entry(key).or_default();
        if matches!(call, Call::Orders) {
            kept.before = (kept.before * 31 + value).rem_euclid(1_009);
            return vec![row[0].clone(), row[1].clone(), int(kept.before), row[3].clone()];
        }
        (kept.now, kept.rows, kept.last) = (kept.now + value, kept.rows + 1, kept.last.max(time));
        kept.timers.extend(time.map(|time| (time + 15, value)));
        vec![row[0].clone(), row[1].clone(), int((kept.before + value).rem_euclid(97)), row[3].clone()]
    }

    /// What it has to say when the watermark is so far, in milliseconds.
    pub(super) fn end_epoch(&mut self, reached: i64) -> Bag {
        let mut made = Bag::new();
        let cell = |number: Option<i64>| number.map_or(Cell::Null, int);
        for key in self.keys.keys().copied().collect::<Vec<_>>() {
            let kept = &self.keys[&key];
            let due = kept.timers.iter().any(|(time, _)| *time <= reached);
            if kept.rows == 0 && !due {
                continue;
            }
            self.touch(key);
            let kept = self.keys.get_mut(&key).unwrap();
            if kept.rows > 0 {
                kept.before = (kept.before * 31 + kept.now + kept.rows).rem_euclid(1_009);
                made.push(vec![cell(key), cell(kept.last), int(kept.before), Cell::text("end")]);
                (kept.now, kept.rows, kept.last) = (0, 0, None);
            }
            for (time, value) in kept.timers.extract_if(.., |(time, _)| *time <= reached) {
                made.push(vec![cell(key), int(time), int((kept.before + value).rem_euclid(97)), Cell::text("due")]);
            }
            if kept.timers.is_empty() && kept.before % 3 == 0 {
                self.keys.remove(&key);
            }
        }
        made
    }

    fn put(key: Key, kept: &Kept) -> Vec<u8> {
        let option = |value: Option<i64>| [i64::from(value.is_some()), value.unwrap_or(0)];
        let mut numbers = option(key).to_vec();
        numbers.extend([kept.before, kept.now, kept.rows]);
        numbers.extend(option(kept.last));
        numbers.extend(kept.timers.iter().flat_map(|(time, value)| [*time, *value]));
        numbers.into_iter().flat_map(i64::to_le_bytes).collect()
    }

    fn read(bytes: &[u8]) -> (Key, Kept) {
        let numbers: Vec<i64> = bytes.chunks(8).map(|word| i64::from_le_bytes(word.try_into().unwrap())).collect();
        let option = |at: usize| (numbers[at] == 1).then_some(numbers[at + 1]);
        let timers = numbers[7..].chunks(2).map(|pair| (pair[0], pair[1])).collect();
        let kept = Kept { before: numbers[2], now: numbers[3], rows: numbers[4], last: option(5), timers };
        (option(0), kept)
    }

    /// Changes as a chunk of entries, three keys at a time.
    fn entries(&self, keys: &[Key]) -> Vec<u8> {
        let mut writer = ChunkWriter::new(b"memory");
        for key in keys {
            let hash = key.map_or(NULL_HASH, hash_int);
            let name = Self::put(*key, &Kept::default());
            match self.keys.get(key) {
                Some(kept) => writer.push(Entry::Put { hash, key: &name, value: &Self::put(*key, kept) }),
                None => writer.push(Entry::Gone { hash, key: &name }),
            }
        }
        writer.finish()
    }
}

/// What is left to be encoded.
struct Left {
    rows: VecDeque<Key>,
    entries: VecDeque<Key>,
}

impl ForeignState for Memory {
    fn encode(&self, encoding: &mut Encoding) -> Result<Option<Vec<u8>>, StateFault> {
        let extent = encoding.extent();
        let left = encoding.place(|| {
            let changed = |key: &Key| self.changed.as_ref().is_none_or(|changed| changed.contains_key(key));
            let all = self.keys.keys().copied();
            let told = self.changed.as_ref().map_or_else(|| all.clone().collect(), |it| it.keys().copied().collect());
            let none = VecDeque::new;
            let (rows, entries) = match extent {
                Extent::All => (all.collect(), none()),
                Extent::Marked => (all.filter(|key| !changed(key)).collect(), told),
                Extent::Changed => (none(), told),
                Extent::Anew => (none(), all.collect()),
            };
            Left { rows, entries }
        });
        if let Some(key) = left.rows.pop_front() {
            return Ok(Some([vec![0], Self::put(key, &self.keys[&key])].concat()));
        }
        let some: Vec<Key> = left.entries.drain(..left.entries.len().min(3)).collect();
        Ok((!some.is_empty()).then(|| self.entries(&some)))
    }

    fn absorb(&mut self, chunk: &[u8]) -> Result<(), StateFault> {
        if !is_entries(chunk) {
            let (key, kept) = Self::read(&chunk[1..]);
            assert!(self.keys.insert(key, kept).is_none(), "a key came twice");
            return Ok(());
        }
        self.changed.get_or_insert_default();
        for entry in Chunk::parse(chunk).unwrap().entries() {
            match entry.unwrap() {
                Entry::Put { value, .. } => {
                    let (key, kept) = Self::read(value);
                    self.touch(key);
                    self.keys.insert(key, kept);
                }
                Entry::Gone { key, .. } => {
                    let (key, _) = Self::read(key);
                    self.touch(key);
                    self.keys.remove(&key);
                }
                other => panic!("an entry that no map makes: {other:?}"),
            }
        }
        Ok(())
    }

    fn bytes(&self) -> usize {
        100 * self.keys.len()
    }

    fn keys(&self) -> usize {
        self.keys.len()
    }

    fn mark(&mut self) {
        self.changed = Some(BTreeMap::new());
    }

    fn rollback(&mut self) -> Result<(), StateFault> {
        for (key, was) in self.changed.replace(BTreeMap::new()).unwrap_or_default() {
            match was {
                Some(kept) => _ = self.keys.insert(key, kept),
                None => _ = self.keys.remove(&key),
            }
        }
        Ok(())
    }
}
