//! The joiner's half of a bootstrap.
//!
//! It collects a snapshot, the numbers with which each link begins, and the bundles that neither has; then it installs all at once. So another
//! server can be asked at any time before, and nothing of the first one's answers is left.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use penstock_progress::caster::Caster;

use crate::list::{Id, List, Standing};
use crate::member::{Failure, Host, Member};
use crate::message::{Bundle, Message, Range, RangeFault, Request, State};

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Joining<P> {
    /// Who is to be asked first.
    preferred: Option<Id>,
    server: Option<Id>,
    attempt: u64,
    /// The first tick after the server was asked, or of all while none was.
    since: Option<u64>,
    /// The server takes too long, is gone, or answered with a fault.
    failed: bool,
    /// Those whose progress was under way when this one was admitted; `None` before the first list.
    speakers: Option<BTreeSet<Id>>,
    /// By sender and dataflow: the number with which the link begins.
    starts: BTreeMap<Id, BTreeMap<u64, u64>>,
    states: Option<Arc<BTreeMap<u64, State<P>>>>,
    /// What was asked for, and what came.
    ranges: BTreeMap<Range, Option<Vec<Bundle<P>>>>,
    installed: bool,
    /// The lead has changed: what was asked of the one before may be lost.
    ask_again: bool,
}

impl<P: Clone> Joining<P> {
    pub(crate) fn new(preferred: Option<Id>) -> Self {
        Joining {
            preferred,
            server: None,
            attempt: 0,
            since: None,
            failed: false,
            speakers: None,
            starts: BTreeMap::new(),
            states: None,
            ranges: BTreeMap::new(),
            installed: false,
            ask_again: false,
        }
    }

    pub(crate) fn is_installed(&self) -> bool {
        self.installed
    }

    /// The first marker of each sender is the first thing on its link.
    pub(crate) fn starts(&mut self, sender: Id, next: BTreeMap<u64, u64>) {
        self.starts.entry(sender).or_insert(next);
    }

    pub(crate) fn adopted(&mut self, list: &List, lead: Option<Id>) {
        self.speakers.get_or_insert_with(|| list.speakers.clone());
        let serves = |server: &Id| list.members.contains_key(server);
        self.failed |= self.server.is_some_and(|server| !serves(&server));
        self.ask_again |= self.installed && list.lead() != lead;
    }

    pub(crate) fn begin(&mut self, attempt: u64, states: Arc<BTreeMap<u64, State<P>>>) {
        if attempt == self.attempt && self.states.is_none() {
            self.states = Some(states);
        }
    }

    pub(crate) fn answered(&mut self, attempt: u64, range: Range, bundles: Result<Vec<Bundle<P>>, RangeFault>) {
        if attempt != self.attempt {
            return;
        }
        match bundles {
            Ok(bundles) => {
                if let Some(slot) = self.ranges.get_mut(&range) {
                    slot.get_or_insert(bundles);
                }
            }
            Err(_) => self.failed = true,
        }
    }

    pub(crate) fn tick(&mut self, now: u64, limit: u64) {
        if now < *self.since.get_or_insert(now) + limit {
            return;
        }
        match self.server {
            Some(_) => self.failed |= !self.installed,
            None => self.preferred = None,
        }
    }

    /// Who is asked next: the preferred one first, then the others in turn.
    fn choose(&self, list: &List) -> Option<Id> {
        let serves = |id: &Id| list.standing(*id) == Some(Standing::Full) && self.starts.contains_key(id);
        if self.server.is_none()
            && let Some(preferred) = self.preferred.filter(|id| list.standing(*id) == Some(Standing::Full))
        {
            return Some(preferred).filter(serves);
        }
        let after = self.server.map_or(0, |server| server + 1);
        let all = || self.starts.keys().copied().filter(serves);
        all().find(|id| *id >= after).or_else(|| all().next())
    }

    /// What neither the snapshot nor the links have, once both are known.
    fn missing(&self) -> Option<Vec<Range>> {
        let (states, speakers) = (self.states.as_ref()?, self.speakers.as_ref()?);
        if !speakers.iter().all(|sender| self.starts.contains_key(sender)) {
            return None;
        }
        let mut missing = Vec::new();
        for (dataflow, state) in &**states {
            for (sender, starts) in &self.starts {
                let start = state.next.get(sender).copied().unwrap_or(0);
                let end = starts.get(dataflow).copied().unwrap_or(0);
                if start < end {
                    missing.push(Range { dataflow: *dataflow, sender: *sender, start, end });
                }
            }
        }
        Some(missing)
    }
}

impl<P: Clone> Member<P> {
    /// Asks for what is missing, and installs when nothing is.
    pub(crate) fn advance_join(&mut self, host: &mut impl Host<Part = P>) -> Result<(), Failure> {
        let list = self.list.clone();
        let Some(joining) = &mut self.joining else { return Ok(()) };
        if joining.server.is_none() || joining.failed {
            let Some(server) = joining.choose(&list) else { return Ok(()) };
            let before = joining.server.replace(server).filter(|before| list.members.contains_key(before));
            let dropped = joining.attempt;
            joining.attempt += 1;
            joining.since = None;
            (joining.failed, joining.states) = (false, None);
            joining.ranges.clear();
            let attempt = joining.attempt;
            if let Some(before) = before {
                self.send(before, Message::Done { attempt: dropped });
            }
            self.send(server, Message::Bootstrap { attempt });
            return Ok(());
        }
        let (Some(missing), Some(server)) = (joining.missing(), joining.server) else { return Ok(()) };
        let attempt = joining.attempt;
        let asks: Vec<Range> = missing.into_iter().filter(|range| !joining.ranges.contains_key(range)).collect();
        joining.ranges.extend(asks.iter().map(|range| (*range, None)));
        let complete = joining.ranges.values().all(Option::is_some);
        for range in asks {
            self.send(server, Message::Ask { attempt, range });
        }
        if complete {
            self.install(server, host)?;
            self.send(server, Message::Done { attempt });
            self.requests.push_back(Request::Seat { joiner: self.id, granter: server });
            return self.check(host);
        }
        Ok(())
    }

    /// Begins with the snapshot, then what it lacks, then what came over the links meanwhile.
    fn install(&mut self, server: Id, host: &mut impl Host<Part = P>) -> Result<(), Failure> {
        let Some(joining) = &mut self.joining else { return Ok(()) };
        joining.installed = true;
        let (states, ranges) = (joining.states.take(), std::mem::take(&mut joining.ranges));
        let Some(states) = states else { return Ok(()) };
        let dataflows: BTreeSet<u64> = self.casters.keys().chain(states.keys()).copied().collect();
        for dataflow in &dataflows {
            let mismatch = Failure::Mismatch { dataflow: *dataflow, peer: server };
            let (Some(caster), Some(state)) = (self.casters.get_mut(dataflow), states.get(dataflow)) else {
                return Err(mismatch);
            };
            if !host.begin(*dataflow, &state.counts) {
                return Err(mismatch);
            }
            *caster = Caster::resume(state.next.clone());
            self.covered.extend(state.next.iter().map(|(sender, next)| ((*dataflow, *sender), *next)));
        }
        for (range, bundles) in ranges {
            for bundle in bundles.iter().flatten() {
                self.take_in(range.dataflow, range.sender, bundle, host)?;
            }
        }
        dataflows.into_iter().try_for_each(|dataflow| self.release(dataflow, host))
    }

    /// Repeats what may have been lost with a lead that left.
    pub(crate) fn ask_again(&mut self) {
        let Some(joining) = &mut self.joining else { return };
        if std::mem::take(&mut joining.ask_again)
            && let Some(granter) = joining.server
            && self.list.standing(self.id) == Some(Standing::Joining)
        {
            self.requests.push_back(Request::Seat { joiner: self.id, granter });
        }
    }
}
