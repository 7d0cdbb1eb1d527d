//! The user's functions of random plans: the rows that they make of rows, which the oracle asks for as well, and what they are to workers.
//!
//! [The state of a bin](state) is a map. It undoes, tells what has changed and comes back from files as that of Python functions does.

mod gather;
mod groups;
mod state;
mod sums;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use arrow_array::{ArrayRef, BooleanArray, Float64Array, Int64Array, RecordBatch, StringArray};
use arrow_schema::{DataType, SchemaRef};
use penstock_plan::{
    CallError, Callbacks, EpochEnd, Expansion, ForeignState, Grouped, SideRows, Spoiled, States, StepSpec,
};

pub(crate) use self::gather::Gather;
pub(super) use self::groups::{BATCH, Group, Moment};
pub(crate) use self::groups::{Groups, Timeout};
use self::state::Bin;
pub(super) use self::sums::Memory;
use super::plans::Made;
use super::{Bag, PLAIN, Row, plain, schema};
use crate::common::{Cell, cells};

/// What a call does. But for what filters, all make rows of the [plain columns](super::PLAIN).
#[derive(Clone, Debug)]
pub(crate) enum Call {
    /// A row of the plain columns that says something of all columns of a row. Where there is a key, a time or a text, it is kept.
    Plain {
        key: Option<usize>,
        time: Option<usize>,
        text: Option<usize>,
    },
    /// Some of the rows.
    Some(SchemaRef),
    /// None to two rows of each, which is an input, or of all rows of a block.
    Copies {
        each: bool,
    },
    /// The body of a loop: halves the value, and goes on with what is left of it.
    Halves,
    /// Rows of the plain columns at times that are at least so much apart: the next one, or the last one.
    Apart {
        width: i64,
        next: bool,
    },
    /// Rows of the plain columns of a key and a time, whose value is another time: so much later at most.
    Ends {
        width: i64,
        unit: i64,
    },
    /// Sums by key, which speak at once of what was before the epoch, of all of it at its end, and of each row so much after its time.
    Sums {
        after: i64,
    },
    /// What the order of a key's rows changes.
    Orders,
    Gather(Gather),
    Groups(Groups),
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
            Self::Apart { width, next } => {
                let place = |time: i64| (if *next { time + width - 1 } else { time }).div_euclid(*width) * width;
                let mut made = row.clone();
                made[1] = number(&row[1]).map_or(Cell::Null, |time| int(place(time)));
                vec![made]
            }
            Self::Ends { width, unit } => {
                let (key, time) = (&row[0], &row[row.len() - 1]);
                let end = number(time).map_or(Cell::Null, |time| int(time + folded % (width / unit + 1) * unit));
                let text =
                    if row.len() > 2 { row[1].clone() } else { Cell::text(["", "b", "ccc"][folded as usize % 3]) };
                vec![vec![key.clone(), time.clone(), end, text]]
            }
            Self::Sums { .. } | Self::Orders | Self::Gather(_) | Self::Groups(_) => unreachable!("it keeps state"),
        }
    }

    fn made(&self) -> SchemaRef {
        match self {
            Self::Some(schema) => schema.clone(),
            Self::Halves => schema(&PLAIN, true),
            Self::Gather(gather) => gather.made.clone(),
            _ => schema(&PLAIN, false),
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
            if let MapBatches { call, .. } | FlatMap { call, .. } | StatefulMap { call, .. } | GroupState { call, .. } =
                step
            {
                sides[*call] = step.sides().len();
            }
        }
        Self { calls: made.calls.clone(), sides, left: AtomicI64::new(-1) }
    }

    /// What a call gives beside what it makes of some rows.
    fn aside<'a>(&self, call: usize, seen: impl IntoIterator<Item = &'a Row>, sides: &mut SideRows) {
        for (side, row) in seen.into_iter().filter_map(|row| Call::aside(row, self.sides[call])) {
            sides.push((side, block(&schema(&PLAIN, false), &[row])));
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

    fn new_state(&self, call: usize) -> Box<dyn ForeignState> {
        match &self.calls[call] {
            Call::Gather(gather) => Box::new(Bin::<gather::Windows>::new(gather.names.clone())),
            Call::Groups(groups) => Box::new(Bin::<Group>::new(groups.names.clone())),
            _ => Box::new(Memory::new(schema(&PLAIN[..1], false))),
        }
    }

    fn apply(&self, call: usize, block: &mut Grouped<'_>, sides: &mut SideRows) -> Result<RecordBatch, CallError> {
        self.count()?;
        let of = &self.calls[call];
        let nothing = || Ok(self::block(&of.made(), &[]));
        match of {
            Call::Gather(gather) => block.each(|bin: &mut Bin<gather::Windows>, batch| {
                bin.take(gather, &cells(batch));
                nothing()
            }),
            Call::Groups(_) => block.each(|bin: &mut Bin<Group>, batch| {
                bin.waiting.extend(cells(batch));
                nothing()
            }),
            _ => {
                self.aside(call, &cells(block.batch), sides);
                block.each(|state: &mut Memory, batch| {
                    let made: Bag = cells(batch).iter().map(|row| state.apply(of, row)).collect();
                    Ok(self::block(&of.made(), &made))
                })
            }
        }
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
        let (mut made, mut seen) = (Bag::new(), Bag::new());
        for bin in states.held() {
            match &self.calls[call] {
                Call::Gather(gather) => made.extend(states.of::<Bin<gather::Windows>>(bin).end_epoch(gather, end)),
                Call::Groups(groups) => {
                    let mut see = |row: &Row| seen.push(row.clone());
                    made.extend(states.of::<Bin<Group>>(bin).end_epoch(groups, end, &mut see));
                }
                _ => {
                    let ended = states.of::<Memory>(bin).end_epoch(ms);
                    seen.extend(ended.iter().cloned());
                    made.extend(ended);
                }
            }
        }
        self.aside(call, &seen, sides);
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
                Some(side) => sides.push((side, block(&schema(&PLAIN, false), &[row]))),
                None => drawn.push(row),
            }
        }
        (vec![block(&self.call.made(), &drawn)], Ok(()))
    }
}
