//! The native state of one bin under a windowed or running aggregate: tables by pane.
//!
//! A pane is a stretch of event time that no window cuts; a running aggregate has the single pane 0. Chunks carry one pane's slots each.
//! Undo: each table undoes itself; panes born since the mark go, panes dropped since come back.

use std::collections::VecDeque;
use std::ops::Range;

use penstock_bins::Encoding;
use smallvec::SmallVec;

use crate::error::StateFault;
use crate::record::Shape;
use crate::table::Table;
use crate::wire::{Reader, put_i64};

/// Chunks stay at or below this size, but for single keys that exceed it.
pub(crate) const CHUNK_BYTES: usize = 1 << 20;
pub(crate) const TAG: u8 = b'P';
const VERSION: u8 = 2;
const HEADER_BYTES: usize = 64;

struct Pane {
    start: i64,
    table: Table,
    /// Whether it was born since the mark.
    fresh: bool,
}

/// See the module.
pub(crate) struct Panes {
    /// Ascending. Nearly always there is one, or the last one is asked for.
    live: SmallVec<[Pane; 1]>,
    /// Windows that end at or before this have fired here, in microseconds.
    fired: i64,
    // Apart, so that what an update reads of thousands of bins fits into the caches.
    shape: Box<Shape>,
    undo: Option<Box<Undo>>,
}

struct Undo {
    fired: i64,
    dropped: Vec<Pane>,
}

/// How far an encoding is.
#[derive(Default)]
struct Place {
    /// Panes that are begun.
    begun: usize,
    /// What is left of the last of them.
    left: VecDeque<Range<usize>>,
    /// Of a bin without panes: whether it was told what has fired.
    told: bool,
}

impl Panes {
    pub(crate) fn new(shape: Shape) -> Self {
        Self { shape: Box::new(shape), fired: i64::MIN, live: SmallVec::new(), undo: None }
    }

    pub(crate) fn fired(&self) -> i64 {
        self.fired
    }

    pub(crate) fn set_fired(&mut self, fired: i64) {
        self.fired = self.fired.max(fired);
    }

    /// Where a pane is, or where it belongs.
    #[inline]
    fn find(&self, start: i64) -> Result<usize, usize> {
        match self.live.last() {
            Some(last) if last.start == start => Ok(self.live.len() - 1),
            Some(last) if last.start > start => self.live.binary_search_by_key(&start, |pane| pane.start),
            _ => Err(self.live.len()),
        }
    }

    /// The table of a pane, made when there is none.
    #[inline]
    pub(crate) fn table_mut(&mut self, start: i64) -> &mut Table {
        let at = self.find(start).unwrap_or_else(|at| {
            let pane = Pane { start, table: Table::new(&self.shape), fresh: self.undo.is_some() };
            self.live.insert(at, pane);
            at
        });
        &mut self.live[at].table
    }

    /// Reads the lines that finding the last table will read.
    #[inline]
    pub(crate) fn touch_head(&self) -> u64 {
        self.live.last().map_or(0, |pane| pane.table.touch_head() ^ pane.start as u64)
    }

    /// The table of a pane, when there is one.
    #[inline]
    pub(crate) fn table(&self, start: i64) -> Option<&Table> {
        Some(&self.live[self.find(start).ok()?].table)
    }

    pub(crate) fn first_pane_at(&self, at_least: i64) -> Option<i64> {
        self.live.get(self.find(at_least).unwrap_or_else(|at| at)).map(|pane| pane.start)
    }

    pub(crate) fn range(&self, panes: Range<i64>) -> impl Iterator<Item = &Table> {
        let from = self.find(panes.start).unwrap_or_else(|at| at);
        self.live[from..].iter().take_while(move |pane| pane.start < panes.end).map(|pane| &pane.table)
    }

    pub(crate) fn existing_mut(&mut self, start: i64) -> Option<&mut Table> {
        let at = self.find(start).ok()?;
        Some(&mut self.live[at].table)
    }

    /// Drops the panes before `end`.
    pub(crate) fn drop_before(&mut self, end: i64) {
        let count = self.live.iter().take_while(|pane| pane.start < end).count();
        for pane in self.live.drain(..count) {
            if let (Some(undo), false) = (&mut self.undo, pane.fresh) {
                undo.dropped.push(pane);
            }
        }
    }

    /// The next chunk; none after the last.
    pub(crate) fn encode(&self, encoding: &mut Encoding) -> Option<Vec<u8>> {
        let header = |pane: i64| {
            let mut out = Vec::new();
            out.extend_from_slice(&[TAG, VERSION, self.shape.key as u8, u8::from(self.shape.track)]);
            out.push(u8::try_from(self.shape.accs.len()).expect("a plan has at most 255 aggregates in a step"));
            out.extend(self.shape.accs.iter().map(|kind| kind.byte()));
            put_i64(&mut out, self.fired);
            put_i64(&mut out, pane);
            out
        };
        let place = encoding.place(Place::default);
        if self.live.is_empty() && self.fired > i64::MIN && !std::mem::replace(&mut place.told, true) {
            let mut out = header(0);
            Table::new(&self.shape).encode(0..0, &mut out);
            return Some(out);
        }
        loop {
            if let Some(positions) = place.left.pop_front() {
                let pane = &self.live[place.begun - 1];
                let mut out = header(pane.start);
                pane.table.encode(positions, &mut out);
                return Some(out);
            }
            let pane = self.live.get(place.begun)?;
            place.begun += 1;
            place.left = pane.table.cut(CHUNK_BYTES - HEADER_BYTES - self.shape.accs.len()).into();
        }
    }

    /// Takes one chunk of `encode`. What has come so far becomes the state that a rollback returns to.
    pub(crate) fn absorb(&mut self, chunk: &[u8]) -> Result<(), StateFault> {
        let mut reader = Reader::new(chunk);
        if reader.u8()? != TAG {
            return Err(StateFault::Shape { what: "not the state of an aggregate" });
        }
        let version = reader.u8()?;
        if version != VERSION {
            return Err(StateFault::Version { found: version, supported: VERSION });
        }
        if reader.u8()? != self.shape.key as u8 {
            return Err(StateFault::Shape { what: "the key" });
        }
        if reader.u8()? != u8::from(self.shape.track) {
            return Err(StateFault::Shape { what: "the emit mode" });
        }
        let count = usize::from(reader.u8()?);
        if !reader.take(count)?.iter().copied().eq(self.shape.accs.iter().map(|kind| kind.byte())) {
            return Err(StateFault::Shape { what: "the aggregates" });
        }
        let fired = reader.i64()?;
        let start = reader.i64()?;
        match self.find(start) {
            Ok(at) => self.live[at].table.absorb(&self.shape, &mut reader)?,
            Err(at) => {
                let mut table = Table::new(&self.shape);
                table.absorb(&self.shape, &mut reader)?;
                if table.len() > 0 {
                    if self.undo.is_some() {
                        table.mark();
                    }
                    self.live.insert(at, Pane { start, table, fresh: false });
                }
            }
        }
        self.fired = self.fired.max(fired);
        if let Some(undo) = &mut self.undo {
            undo.fired = self.fired;
        }
        Ok(())
    }

    pub(crate) fn bytes(&self) -> usize {
        let dropped = self.undo.as_ref().map_or(0, |undo| undo.dropped.iter().map(|pane| pane.table.bytes()).sum());
        self.live.iter().map(|pane| pane.table.bytes()).sum::<usize>() + dropped
    }

    /// Keys held, counted once per pane.
    pub(crate) fn keys(&self) -> usize {
        self.live.iter().map(|pane| pane.table.len()).sum()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.live.is_empty()
    }

    pub(crate) fn mark(&mut self) {
        self.undo = Some(Box::new(Undo { fired: self.fired, dropped: Vec::new() }));
        for pane in &mut self.live {
            pane.fresh = false;
            pane.table.mark();
        }
    }

    /// Keeps no undo until the next mark.
    pub(crate) fn settle(&mut self) {
        self.undo = None;
        self.live.iter_mut().for_each(|pane| pane.table.keep_no_undo());
    }

    pub(crate) fn rollback(&mut self) {
        let Some(undo) = &mut self.undo else {
            // Never marked: back to how it was made.
            self.fired = i64::MIN;
            self.live.clear();
            return;
        };
        self.fired = undo.fired;
        self.live.retain(|pane| !pane.fresh);
        self.live.extend(undo.dropped.drain(..));
        self.live.sort_unstable_by_key(|pane| pane.start);
        self.live.iter_mut().for_each(|pane| pane.table.rollback());
    }
}
