//! The server's half of a bootstrap: a snapshot, and what was taken in since.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::list::{Id, Standing};
use crate::member::{Host, Member};
use crate::message::{Bundle, Message, Range, RangeFault, State};

/// What one joiner is served.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Record<P> {
    pub(crate) attempt: u64,
    /// By dataflow: the numbers of the snapshot, with which the record begins.
    first: BTreeMap<u64, BTreeMap<Id, u64>>,
    /// By dataflow and sender: what was taken in since, up to what goes to the joiner itself.
    bundles: BTreeMap<(u64, Id), Vec<Bundle<P>>>,
    /// What was asked for and has not come.
    asked: Vec<Range>,
}

impl<P: Clone> Member<P> {
    /// Whether its snapshot would have all that those said who are gone: nobody tells a joiner that any more.
    pub(crate) fn may_serve(&self) -> bool {
        self.seated && self.departing.is_empty() && !self.held.keys().any(|(_, sender)| self.is_gone(*sender))
    }

    /// Answers with a snapshot and begins to record, in one step.
    pub(crate) fn asked_for_snapshot(&mut self, joiner: Id, attempt: u64, host: &mut impl Host<Part = P>) {
        let again = self.records.get(&joiner).is_some_and(|record| record.attempt >= attempt);
        if self.list.standing(joiner) != Some(Standing::Joining) || again {
            return;
        }
        if !self.may_serve() {
            self.askers.insert(joiner, attempt);
            return;
        }
        let dataflows: Vec<u64> = self.casters.keys().copied().collect();
        let (mut states, mut first) = (BTreeMap::new(), BTreeMap::new());
        for dataflow in dataflows {
            self.cast(dataflow, host);
            let Some(caster) = self.casters.get(&dataflow) else { continue };
            let next = caster.snapshot(self.id);
            first.insert(dataflow, next.clone());
            states.insert(dataflow, State { next, counts: host.snapshot(dataflow) });
        }
        self.records.insert(joiner, Record { attempt, first, bundles: BTreeMap::new(), asked: Vec::new() });
        self.send(joiner, Message::Snapshot { attempt, states: Arc::new(states) });
    }

    /// Keeps a bundle for the joiners to which its sender does not send it.
    pub(crate) fn record(&mut self, dataflow: u64, sender: Id, bundle: &Bundle<P>) {
        for (joiner, record) in &mut self.records {
            let end = self.ends.get(joiner).and_then(|ends| ends.get(&sender)?.get(&dataflow));
            if end.is_none_or(|end| bundle.number < *end) {
                record.bundles.entry((dataflow, sender)).or_default().push(bundle.clone());
            }
        }
    }

    pub(crate) fn asked_for_range(&mut self, joiner: Id, attempt: u64, range: Range) {
        match self.records.get_mut(&joiner).filter(|record| record.attempt == attempt) {
            Some(record) => record.asked.push(range),
            None if self.list.members.contains_key(&joiner) => {
                let bundles = Err(RangeFault::Unknown(joiner));
                self.send(joiner, Message::Answer { attempt, range, bundles });
            }
            // Nobody that a list has named yet: there is no way to it.
            None => {}
        }
    }

    /// Answers what can be answered now.
    pub(crate) fn answer(&mut self) {
        let mut answers = Vec::new();
        for (joiner, record) in &self.records {
            for range in &record.asked {
                if let Some(bundles) = self.find(*joiner, record, *range) {
                    answers.push((*joiner, record.attempt, *range, bundles));
                }
            }
        }
        for (joiner, attempt, range, bundles) in answers {
            if let Some(record) = self.records.get_mut(&joiner) {
                record.asked.retain(|asked| *asked != range);
            }
            self.send(joiner, Message::Answer { attempt, range, bundles });
        }
    }

    /// The bundles of a range, or what is wrong with it; `None` while they have not come.
    fn find(&self, joiner: Id, record: &Record<P>, range: Range) -> Option<Result<Vec<Bundle<P>>, RangeFault>> {
        let Range { dataflow, sender, start, end } = range;
        if end <= start {
            return Some(Err(RangeFault::Empty { start, end }));
        }
        let nowhere = RangeFault::Nowhere { dataflow, sender };
        let (Some(caster), Some(first)) = (self.casters.get(&dataflow), record.first.get(&dataflow)) else {
            return Some(Err(nowhere));
        };
        if self.is_gone(sender) && !first.contains_key(&sender) {
            return Some(Err(nowhere));
        }
        let first = first.get(&sender).copied().unwrap_or(0);
        if start < first {
            return Some(Err(RangeFault::Dropped { start, first }));
        }
        let last = self.ends.get(&joiner).and_then(|ends| ends.get(&sender)?.get(&dataflow).copied());
        // What this server sends goes to the joiner itself since before the snapshot.
        let last = if sender == self.id { Some(first) } else { last };
        if let Some(last) = last.filter(|last| end > *last) {
            return Some(Err(RangeFault::Beyond { end, last }));
        }
        if caster.expected(sender) < end {
            return None;
        }
        let recorded = record.bundles.get(&(dataflow, sender))?;
        Some(Ok(recorded.get((start - first) as usize..(end - first) as usize)?.to_vec()))
    }
}
