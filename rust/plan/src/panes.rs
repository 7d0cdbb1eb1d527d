//! The native state of one bin under a windowed or running aggregate: tables by pane.
//!
//! A pane is a stretch of event time that no window cuts; a running aggregate has the single pane 0. Chunks carry one pane's slots each.
//! Undo: each table undoes itself; panes born since the mark go, panes dropped since come back.

use std::collections::BTreeMap;

use crate::error::StateFault;
use crate::table::{Shape, Table};
use crate::wire::{Reader, put_i64};

/// Chunks stay at or below this size, but for single keys that exceed it.
pub(crate) const CHUNK_BYTES: usize = 1 << 20;
pub(crate) const TAG: u8 = b'P';
const VERSION: u8 = 1;
const HEADER_BYTES: usize = 64;

struct Pane {
    table: Table,
    /// Whether it was born since the mark.
    fresh: bool,
}

/// See the module.
pub(crate) struct Panes {
    shape: Shape,
    /// Windows that end at or before this have fired here, in microseconds.
    fired: i64,
    live: BTreeMap<i64, Pane>,
    undo: Option<Undo>,
}

struct Undo {
    fired: i64,
    dropped: Vec<(i64, Table)>,
}

impl Panes {
    pub(crate) fn new(shape: Shape) -> Self {
        Self { shape, fired: i64::MIN, live: BTreeMap::new(), undo: None }
    }

    pub(crate) fn fired(&self) -> i64 {
        self.fired
    }

    pub(crate) fn set_fired(&mut self, fired: i64) {
        self.fired = self.fired.max(fired);
    }

    /// The table of a pane, made when there is none.
    pub(crate) fn table_mut(&mut self, pane: i64) -> &mut Table {
        let marked = self.undo.is_some();
        let shape = &self.shape;
        let pane = self.live.entry(pane).or_insert_with(|| Pane { table: Table::new(shape), fresh: marked });
        &mut pane.table
    }

    pub(crate) fn first_pane_at(&self, at_least: i64) -> Option<i64> {
        self.live.range(at_least..).next().map(|(&pane, _)| pane)
    }

    pub(crate) fn range(&self, panes: std::ops::Range<i64>) -> impl Iterator<Item = (i64, &Table)> {
        self.live.range(panes).map(|(&start, pane)| (start, &pane.table))
    }

    pub(crate) fn existing_mut(&mut self, pane: i64) -> Option<&mut Table> {
        self.live.get_mut(&pane).map(|pane| &mut pane.table)
    }

    /// Drops the panes before `end`.
    pub(crate) fn drop_before(&mut self, end: i64) {
        while let Some(entry) = self.live.first_entry().filter(|entry| *entry.key() < end) {
            let (start, pane) = entry.remove_entry();
            if let (Some(undo), false) = (&mut self.undo, pane.fresh) {
                undo.dropped.push((start, pane.table));
            }
        }
    }

    pub(crate) fn encode(&self, chunk: &mut dyn FnMut(Vec<u8>)) {
        let header = |pane: i64| {
            let mut out = Vec::new();
            out.extend_from_slice(&[TAG, VERSION, self.shape.key as u8, u8::from(self.shape.track)]);
            out.push(u8::try_from(self.shape.accs.len()).expect("a plan has at most 255 aggregates in a step"));
            out.extend(self.shape.accs.iter().map(|kind| kind.byte()));
            put_i64(&mut out, self.fired);
            put_i64(&mut out, pane);
            out
        };
        if self.live.is_empty() && self.fired > i64::MIN {
            let mut out = header(0);
            Table::new(&self.shape).encode(0..0, &mut out);
            chunk(out);
        }
        for (&start, pane) in &self.live {
            for slots in pane.table.cut(CHUNK_BYTES - HEADER_BYTES - self.shape.accs.len()) {
                let mut out = header(start);
                pane.table.encode(slots, &mut out);
                chunk(out);
            }
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
        // Read aside first, so that a bad chunk changes nothing.
        let mut read = Table::decode(&self.shape, &mut reader)?;
        reader.finish()?;
        if read.len() > 0 {
            match self.live.get_mut(&start) {
                Some(pane) => pane.table.adopt(read)?,
                None => {
                    if self.undo.is_some() {
                        read.mark();
                    }
                    self.live.insert(start, Pane { table: read, fresh: false });
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
        let dropped = self.undo.as_ref().map_or(0, |undo| undo.dropped.iter().map(|(_, table)| table.bytes()).sum());
        self.live.values().map(|pane| pane.table.bytes()).sum::<usize>() + dropped
    }

    /// Keys held, counted once per pane.
    pub(crate) fn keys(&self) -> usize {
        self.live.values().map(|pane| pane.table.len()).sum()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.live.is_empty()
    }

    pub(crate) fn mark(&mut self) {
        self.undo = Some(Undo { fired: self.fired, dropped: Vec::new() });
        for pane in self.live.values_mut() {
            pane.fresh = false;
            pane.table.mark();
        }
    }

    /// Keeps no undo until the next mark.
    pub(crate) fn settle(&mut self) {
        self.undo = None;
        self.live.values_mut().for_each(|pane| pane.table.keep_no_undo());
    }

    pub(crate) fn rollback(&mut self) {
        let Some(undo) = &mut self.undo else {
            // Never marked: back to how it was made.
            self.fired = i64::MIN;
            self.live.clear();
            return;
        };
        self.fired = undo.fired;
        self.live.retain(|_, pane| !pane.fresh);
        for (start, table) in undo.dropped.drain(..) {
            self.live.insert(start, Pane { table, fresh: false });
        }
        self.live.values_mut().for_each(|pane| pane.table.rollback());
    }
}
