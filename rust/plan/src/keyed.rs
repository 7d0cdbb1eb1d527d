//! A keyed step of a compiled plan: how blocks are routed to bins, the state of a bin, and the operator on it.
//!
//! Departure: only what is read travels. F sends the hashes and the inputs of a running aggregate, not whole rows.

use std::sync::Arc;

use arrow_array::{Array, ArrayRef, RecordBatch};
use arrow_schema::{DataType, Schema, SchemaRef};

use crate::agg::Aggregate;
use crate::callback::Callbacks;
use crate::column::{EventTime, plain, plain_type};
use crate::error::{OpError, StepName};
use crate::foreign::{EpochOp, Foreign, Late, StatefulMapOp};
use crate::group::{GroupBy, shape};
use crate::hash::hash_columns_of;
use crate::join::{Join, JoinOp, Sides};
use crate::key::KeyKind;
use crate::op::{BLOCK_BYTES, KeyedOp, bytes_of};
use crate::panes::Panes;
use crate::plan::names;
use crate::running::{Emit, RunningOp};
use crate::session::{SessionOp, Sessions};
use crate::spec::SideSpec;
use crate::state::State;
use crate::top::{self, Groups, Top, TopOp};
use crate::window::{Best, Cut, WindowOp, Windows};

/// See the module. Of an operator with two sides the columns and keys are those of the left one, and [`side`](KeyedSpec::side) shows the other.
#[derive(Clone, Debug, PartialEq)]
pub struct KeyedSpec {
    /// The step that the operator comes from.
    pub step: StepName,
    /// What its state is called: as the user says, else the step's word, numbered from the second on of those without a name (`agg`, `agg-2`). It does
    /// not change with steps that keep no state, nor with the name of a function. No two of a plan are equal.
    pub operator: String,
    /// The columns that make its state, by name, where the user does not say what that is called: then other ones are taken for another state.
    pub reads: Option<String>,
    /// Name shown to the user.
    pub name: String,
    /// Columns of the blocks that reach it before routing.
    pub input: SchemaRef,
    /// Columns of the routed blocks: the input, behind window bounds for a top over raw rows.
    pub routed: SchemaRef,
    /// Columns of its output.
    pub output: SchemaRef,
    /// Columns of the routed schema whose hash chooses the bin; none: all rows share one bin.
    pub keys: Vec<usize>,
    /// Whether a null key is an error.
    pub reject_nulls: bool,
    /// What it does.
    pub kind: KeyedKind,
}

/// What a keyed step does.
#[derive(Clone, Debug, PartialEq)]
pub enum KeyedKind {
    /// Aggregates by key within windows of an event-time column.
    Window {
        /// The windows.
        windows: Windows,
        /// The event-time column.
        event_time: EventTime,
        /// The aggregates.
        aggregates: Vec<Aggregate>,
        /// The rows of a window that are wanted, where that is not all.
        best: Option<Best>,
    },
    /// Aggregates by key within sessions of an event-time column.
    Session {
        /// Rows with no more than this between them are of one session.
        gap_us: i64,
        /// The event-time column.
        event_time: EventTime,
        /// The aggregates.
        aggregates: Vec<Aggregate>,
    },
    /// Aggregates by key over all rows.
    Running {
        /// When it speaks.
        emit: Emit,
        /// The aggregates.
        aggregates: Vec<Aggregate>,
    },
    /// User code with state per key.
    StatefulMap {
        /// Number of the call.
        call: usize,
        /// Whether it is called at the ends of epochs, too.
        ends: bool,
        /// Its side outputs.
        sides: Vec<SideSpec>,
    },
    /// Aggregates by key and window, with user code over blocks that speaks at the ends of epochs.
    Aggregate {
        /// Number of the call.
        call: usize,
        /// The windows, and the event-time column of the rows that enter.
        windows: Option<(Cut, EventTime)>,
    },
    /// User code over the groups of an epoch, with state and a timeout per key.
    GroupState {
        /// Number of the call.
        call: usize,
        /// Rows at or before the watermark in this column are late.
        late_by: Option<EventTime>,
        /// Its side outputs.
        sides: Vec<SideSpec>,
    },
    /// Rank with ties.
    Top(Top),
    /// Pairs of rows of two sides.
    Join(Join),
}

impl KeyedSpec {
    /// Names of its key columns, of those that it aggregates or keeps, and of its event time.
    pub(crate) fn columns_read(&self) -> String {
        let all = |schema: &Schema| names(schema, &(0..schema.fields().len()).collect::<Vec<_>>());
        let of = |aggregates: &[Aggregate]| {
            names(&self.input, &aggregates.iter().flat_map(Aggregate::columns).collect::<Vec<_>>())
        };
        let keys = || names(&self.routed, &self.keys);
        let (keys, kept, time) = match &self.kind {
            KeyedKind::Window { aggregates, event_time, .. } | KeyedKind::Session { aggregates, event_time, .. } => {
                (keys(), of(aggregates), Some(event_time))
            }
            KeyedKind::Running { aggregates, .. } => (keys(), of(aggregates), None),
            KeyedKind::Aggregate { windows, .. } => (keys(), String::new(), windows.as_ref().map(|(_, time)| time)),
            KeyedKind::GroupState { late_by, .. } => (keys(), String::new(), late_by.as_ref()),
            KeyedKind::StatefulMap { .. } => (keys(), String::new(), None),
            KeyedKind::Top(_) => (keys(), all(&self.routed), None),
            KeyedKind::Join(join) => {
                let [left, right] = join.sides.each_ref().map(|side| (side.schema(), side.keys()));
                let keys = format!("{} = {}", names(&left.0, &left.1), names(&right.0, &right.1));
                (keys, format!("{}, {}", all(&left.0), all(&right.0)), None)
            }
        };
        let time = time.map(|time| format!("time {}", time.name)).unwrap_or_default();
        let told = [keys, kept, time].into_iter().filter(|part| !part.is_empty());
        told.collect::<Vec<_>>().join("; ")
    }

    pub(crate) fn key_types(&self) -> Vec<DataType> {
        self.keys.iter().map(|&at| plain_type(self.routed.field(at).data_type()).clone()).collect()
    }

    /// The step as one of its sides sees it: with the columns and keys of that side. Blocks of a side are assigned, hashed and carried by it.
    #[must_use]
    pub fn side(&self, side: usize) -> KeyedSpec {
        let mut spec = self.clone();
        if let (KeyedKind::Join(join), 1) = (&mut spec.kind, side) {
            let right = &join.sides[1];
            let bounds = spec.keys.len() - right.on.len();
            (spec.input, spec.routed) = (right.input.clone(), right.routed.clone());
            spec.keys = right.on.iter().copied().chain(0..bounds).collect();
            join.own = 1;
        }
        spec
    }

    /// The rows to route: a join drops here rows that can meet none and do not come out without, a top step rows that the block itself shows to
    /// be out; a join in windows, user code in windows and a top over raw rows repeat each row for each of its windows.
    ///
    /// # Errors
    /// [`OpError::EventTime`] for a time out of range.
    pub fn assign(&self, batch: &RecordBatch) -> Result<RecordBatch, OpError> {
        match &self.kind {
            KeyedKind::Top(Top { assign: Some((windows, event_time)), .. }) => {
                Top::assign_windows(&self.step, &Cut::Windows(*windows), event_time, &self.routed, batch)
            }
            KeyedKind::Top(top) => top.cut(batch),
            KeyedKind::Aggregate { windows: Some((cut, event_time)), .. } => {
                Top::assign_windows(&self.step, cut, event_time, &self.routed, batch)
            }
            KeyedKind::Join(join) => join.assign(&self.step, batch),
            _ => Ok(batch.clone()),
        }
    }

    /// The parts of a block to assign one after the other: with all copies of its rows it might be longer than columns of text can be.
    #[must_use]
    pub fn parts(&self, batch: RecordBatch) -> Vec<RecordBatch> {
        let windows = match &self.kind {
            KeyedKind::Top(Top { assign: Some((windows, _)), .. }) => Some(windows),
            KeyedKind::Aggregate { windows: Some((Cut::Windows(windows), _)), .. } => Some(windows),
            KeyedKind::Join(join) => join.windows.as_ref(),
            _ => None,
        };
        let copies = windows.map_or(1, |windows| (windows.size_us() / windows.every_us()) as usize + 1);
        let (mut parts, mut left) = (Vec::new(), vec![batch]);
        while let Some(batch) = left.pop() {
            let rows = batch.num_rows();
            if copies > 2 && rows > 1 && bytes_of(&batch).saturating_mul(copies) > 4 * BLOCK_BYTES {
                left.extend([batch.slice(rows / 2, rows - rows / 2), batch.slice(0, rows / 2)]);
            } else {
                parts.push(batch);
            }
        }
        parts
    }

    /// The same of rows that come when a watermark is known up to which windows have closed: a top over raw rows leaves out here what the block
    /// itself shows to be out. Rows that are late stay, to be told of.
    ///
    /// # Errors
    /// As [`assign`](Self::assign).
    pub fn assign_after(&self, batch: &RecordBatch, watermark_us: i64) -> Result<RecordBatch, OpError> {
        match &self.kind {
            KeyedKind::Top(top) => match top.cut_raw(&self.step, batch, watermark_us)? {
                Some(few) => self.assign(&few),
                None => self.assign(batch),
            },
            _ => self.assign(batch),
        }
    }

    /// One key hash per row of an assigned block.
    ///
    /// # Errors
    /// [`OpError::NullKey`] where nulls are rejected.
    pub fn hashes(&self, routed: &RecordBatch) -> Result<Vec<u64>, OpError> {
        let columns = self.keys.iter().map(|&at| plain(routed.column(at))).collect::<Result<Vec<ArrayRef>, _>>()?;
        if self.reject_nulls {
            for (column, &at) in columns.iter().zip(&self.keys) {
                if let Some(row) = column.logical_nulls().and_then(|nulls| nulls.iter().position(|valid| !valid)) {
                    let column = self.routed.field(at).name().clone();
                    return Err(OpError::NullKey { step: self.step.clone(), column, row });
                }
            }
        }
        Ok(hash_columns_of(&columns, routed.num_rows())?)
    }

    /// The columns of the routed schema that travel to the operator, and how many of them it can do with in a block without null keys.
    /// A running aggregate reads its inputs; a key that is one integer travels as its hash. Other operators give rows back whole.
    fn carried(&self) -> Option<(Vec<usize>, usize)> {
        let KeyedKind::Running { aggregates, .. } = &self.kind else { return None };
        let mut columns: Vec<usize> = aggregates.iter().flat_map(Aggregate::columns).collect();
        columns.sort_unstable();
        columns.dedup();
        let values = columns.len();
        columns.extend(self.keys.iter().filter(|key| !columns[..values].contains(key)).copied().collect::<Vec<_>>());
        let bare = if KeyKind::of(&self.key_types()).has_bytes() { columns.len() } else { values };
        Some((columns, bare))
    }

    /// What of an assigned block its operator reads: all that has to travel beside the hashes.
    ///
    /// # Errors
    /// None for a block of the routed schema.
    pub fn carry(&self, routed: RecordBatch) -> Result<RecordBatch, OpError> {
        let Some((columns, bare)) = self.carried() else { return Ok(routed) };
        let nulls = columns[bare..].iter().any(|&at| routed.column(at).logical_null_count() > 0);
        Ok(routed.project(if nulls { &columns } else { &columns[..bare] })?)
    }

    /// Whether rows wait in its bins for the end of their epoch.
    #[must_use]
    pub fn waits_for_ends(&self) -> bool {
        matches!(
            &self.kind,
            KeyedKind::StatefulMap { ends: true, .. } | KeyedKind::GroupState { .. } | KeyedKind::Aggregate { .. }
        )
    }

    /// The outputs of its function beside the main one.
    pub fn sides(&self) -> &[SideSpec] {
        match &self.kind {
            KeyedKind::StatefulMap { sides, .. } | KeyedKind::GroupState { sides, .. } => sides,
            _ => &[],
        }
    }

    /// The state of a bin that has seen nothing.
    pub fn new_state(&self, callbacks: &Arc<dyn Callbacks>) -> State {
        let key_types = self.key_types();
        match &self.kind {
            KeyedKind::Window { aggregates, .. } => State::panes(Panes::new(shape(&key_types, aggregates, false))),
            KeyedKind::Session { gap_us, aggregates, .. } => {
                State::sessions(Sessions::new(shape(&key_types, aggregates, false), *gap_us))
            }
            KeyedKind::Running { emit, aggregates } => {
                State::panes(Panes::new(shape(&key_types, aggregates, emit.tracks())))
            }
            KeyedKind::StatefulMap { call, .. }
            | KeyedKind::GroupState { call, .. }
            | KeyedKind::Aggregate { call, .. } => State::foreign(callbacks.new_state(*call)),
            KeyedKind::Top(top) => State::groups(Groups::new(top.n, top::shape(top, &self.routed))),
            KeyedKind::Join(join) => State::sides(Sides::new(join.shape(), join.rules())),
        }
    }

    /// The operator, for one worker. It takes blocks as [`carry`](Self::carry) gives them.
    ///
    /// # Errors
    /// A column type that Arrow cannot encode; compilation has excluded it.
    pub fn operator(&self, callbacks: &Arc<dyn Callbacks>) -> Result<Box<dyn KeyedOp>, OpError> {
        let foreign =
            |call| Foreign::new(self.step.clone(), call, self.output.clone(), callbacks.clone(), self.sides());
        let group_by = |aggregates: &[Aggregate], bounds, track| {
            let (step, output) = (self.step.clone(), self.output.clone());
            let (mut keys, mut aggregates) = (self.keys.clone(), aggregates.to_vec());
            if let Some((columns, _)) = self.carried() {
                let place =
                    |at: &mut usize| *at = columns.iter().position(|column| column == at).expect("it is carried");
                keys.iter_mut().chain(aggregates.iter_mut().flat_map(Aggregate::columns_mut)).for_each(place);
            }
            GroupBy::new(step, keys, self.key_types(), &aggregates, output, bounds, track)
        };
        Ok(match &self.kind {
            KeyedKind::Window { windows, event_time, aggregates, best } => {
                let group_by = group_by(aggregates, Some((event_time.clone(), Some(*windows))), false)?;
                Box::new(WindowOp::new(group_by, *windows, event_time.clone(), *best))
            }
            KeyedKind::Session { gap_us, event_time, aggregates } => {
                let group_by = group_by(aggregates, Some((event_time.clone(), None)), false)?;
                Box::new(SessionOp::new(group_by, *gap_us, event_time.clone()))
            }
            KeyedKind::Running { emit, aggregates } => {
                Box::new(RunningOp::new(group_by(aggregates, None, emit.tracks())?, *emit))
            }
            KeyedKind::StatefulMap { call, ends: false, .. } => Box::new(StatefulMapOp(foreign(*call))),
            KeyedKind::StatefulMap { call, ends: true, .. } => Box::new(EpochOp::new(foreign(*call), Late::Never)),
            KeyedKind::GroupState { call, late_by, .. } => {
                let late = late_by.clone().map_or(Late::Never, Late::Behind);
                Box::new(EpochOp::new(foreign(*call), late))
            }
            KeyedKind::Aggregate { call, windows } => {
                let late = windows.clone().map_or(Late::Never, |(cut, time)| Late::Closed(cut, time));
                Box::new(EpochOp::new(foreign(*call), late))
            }
            KeyedKind::Join(join) => {
                Box::new(JoinOp::new(self.step.clone(), &self.keys, join, self.key_types(), self.output.clone())?)
            }
            KeyedKind::Top(top) => {
                Box::new(TopOp::new(self.step.clone(), top.clone(), self.routed.clone(), self.output.clone())?)
            }
        })
    }
}
