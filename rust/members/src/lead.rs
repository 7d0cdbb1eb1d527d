//! The lead: which list comes next. One at a time, when the one before has settled here; everybody who may have sent something
//! under the list before that has then adopted it.

use std::collections::BTreeSet;

use crate::list::{Change, Home, Id, List, MAX_MEMBERS, Standing};
use crate::member::{Member, Output};
use crate::message::{Message, Request};

impl<P: Clone> Member<P> {
    /// Asks for so many joiners in the first process; the lead says which ids they have ([`Output::Admitted`]). Follow with [`Member::tick`].
    pub fn admit(&mut self, ticket: u64, count: usize) {
        self.admit_at(Home { process: 0, ticket }, count, BTreeSet::new());
    }

    /// Asks for so many joiners, up to [`MAX_MEMBERS`], whose process is connected with those processes. Who asks again for the same home adds to them.
    /// Follow with [`Member::tick`].
    pub fn admit_at(&mut self, home: Home, count: usize, linked: BTreeSet<usize>) {
        self.take_request(Request::Admit { home, count, linked });
    }

    /// Keeps a request until it can be granted or passed on.
    pub(crate) fn take_request(&mut self, mut request: Request) {
        if let Request::Admit { home: here, linked: reached, .. } = &mut request {
            self.requests.retain(|other| match other {
                Request::Admit { home, linked, .. } if home == here => {
                    // They may come in any order.
                    reached.extend(linked);
                    false
                }
                _ => true,
            });
        }
        self.requests.push_back(request);
    }

    /// The next list, if there is something to change now. Who does not lead passes on what was asked.
    pub(crate) fn decide(&mut self) -> Option<List> {
        match self.list.lead() {
            Some(lead) if lead != self.id => {
                for request in std::mem::take(&mut self.requests) {
                    self.send(lead, Message::Request(request));
                }
                return None;
            }
            _ if !self.leads() => return None,
            _ => {}
        }
        let open = self.requests.iter().filter(|request| self.is_open(request));
        let crowd: Vec<Home> = open.filter_map(|request| self.crowded(request)).collect();
        crowd.into_iter().for_each(|home| self.say(Output::Crowded(home)));
        let requests = std::mem::take(&mut self.requests).into_iter();
        self.requests = requests.filter(|request| self.is_open(request) && self.crowded(request).is_none()).collect();
        let next = self.requests.iter().enumerate().find_map(|(at, request)| Some((at, self.follows(request)?)));
        let Some((at, list)) = next else {
            self.stay();
            return None;
        };
        if let (Some(Request::Admit { home, .. }), Change::Admitted(joiners)) = (self.requests.remove(at), &list.change)
        {
            self.say(Output::Admitted { ticket: home.ticket, joiners: joiners.clone() });
        }
        Some(list)
    }

    /// Answers the last one, whom nobody would follow: its wish can come with the list that makes it the last one, so only the lead knows.
    /// While somebody joins it waits for that.
    fn stay(&mut self) {
        if !self.leaves || self.list.full().nth(1).is_some() || self.list.joining().next().is_some() {
            return;
        }
        let asked = self.requests.len();
        self.requests.retain(|request| !matches!(request, Request::Leave(_)));
        if self.requests.len() < asked {
            self.leaves = false;
            self.say(Output::Alone);
        }
    }

    /// Whether a request may still be granted: what was asked twice, or too late, is not.
    fn is_open(&self, request: &Request) -> bool {
        let stands = |id: &Id, standing| self.list.standing(*id) == Some(standing);
        match request {
            Request::Admit { home, count, .. } => {
                (1..=MAX_MEMBERS).contains(count) && !self.list.homes.values().any(|other| other == home)
            }
            Request::Seat { joiner, .. } => stands(joiner, Standing::Joining) && !self.mourned.contains(joiner),
            Request::Withdraw(joiner) => stands(joiner, Standing::Joining),
            // The answer to its own may have come before a copy of it.
            Request::Leave(leaver) => stands(leaver, Standing::Full) && (*leaver != self.id || self.leaves),
            Request::Close { leaver, .. } => stands(leaver, Standing::Leaving),
        }
    }

    /// Who asks for more than there is room for.
    fn crowded(&self, request: &Request) -> Option<Home> {
        match request {
            Request::Admit { home, count, .. } if !self.list.has_room(*count) => Some(*home),
            _ => None,
        }
    }

    /// The list that grants a request, if that can be done now.
    fn follows(&self, request: &Request) -> Option<List> {
        let list = self.list.after(self.change(request))?;
        let Request::Admit { home, linked, .. } = request else { return Some(list) };
        // A process with members is connected with those of all others.
        let processes = self.list.processes();
        let reached = processes.contains(&home.process) || processes.is_subset(linked);
        reached.then(|| list.housed(*home))
    }

    fn change(&self, request: &Request) -> Change {
        match request {
            Request::Admit { count, .. } => Change::Admitted((self.list.next..self.list.next + count).collect()),
            Request::Seat { joiner, granter } => {
                let stays = self.list.standing(*granter) == Some(Standing::Full);
                Change::Seated { joiner: *joiner, granter: if stays { *granter } else { self.id } }
            }
            Request::Withdraw(joiner) => Change::Withdrawn(*joiner),
            Request::Leave(leaver) => Change::Leaving(*leaver),
            Request::Close { leaver, finals } => Change::Closed { leaver: *leaver, finals: finals.clone() },
        }
    }

    /// Withdraws joiners that take longer than the limit. What the others keep them waiting does not count: as long as not all have the list, nor
    /// more than half of the limit for a time in which this member has not looked.
    pub(crate) fn withdraw_late(&mut self, now: u64) {
        let join = self.limits.join;
        let passed = now.saturating_sub(std::mem::replace(&mut self.looked, now)).min(join / 2);
        if !self.is_settled() {
            return;
        }
        self.waited.values_mut().for_each(|waited| *waited = Some(waited.map_or(0, |waited| waited + passed)));
        if self.list.lead() != Some(self.id) {
            return;
        }
        let late = |waited: &Option<u64>| waited.is_some_and(|waited| waited >= join);
        let late = self.waited.iter().filter(|(_, waited)| late(waited)).map(|(id, _)| *id);
        let late: Vec<Id> = late.filter(|id| !self.requests.contains(&Request::Withdraw(*id))).collect();
        self.requests.extend(late.into_iter().map(Request::Withdraw));
    }
}
