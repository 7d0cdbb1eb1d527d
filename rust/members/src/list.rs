//! The list of members: who takes part, in which standing, since which version.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

/// A worker. Ids are never used again; keys are divided by rank among the full members.
pub type Id = usize;

/// Where a worker runs, and with which request it came.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Home {
    /// The process. Numbers are never used again.
    pub process: usize,
    /// Of that process's choice, from 1 on; 0 for founders.
    pub ticket: u64,
}

/// What a member may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Standing {
    /// Gets progress, counts nothing.
    Joining,
    /// Takes part in everything.
    Full,
    /// Is routed nothing any more, works off what it has.
    Leaving,
}

/// How a list differs from the one before.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Change {
    /// The first one.
    Founded,
    /// Workers begin to join.
    Admitted(Vec<Id>),
    /// A joiner becomes a full member; `granter` gives it capabilities.
    Seated {
        /// Who.
        joiner: Id,
        /// Whose capabilities it gets.
        granter: Id,
    },
    /// A join ended early.
    Withdrawn(Id),
    /// A full member begins to leave.
    Leaving(Id),
    /// A leaver is gone, after so many bundles by dataflow.
    Closed {
        /// Who.
        leaver: Id,
        /// By dataflow: the number of its next bundle, which never comes.
        finals: BTreeMap<u64, u64>,
    },
}

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct List {
    /// 0 for founders, 1 more with each list.
    pub version: u64,
    /// The members.
    pub members: BTreeMap<Id, Standing>,
    /// Where the members run.
    pub homes: BTreeMap<Id, Home>,
    /// Those of the list before who may have sent something under it: their markers are waited for.
    pub speakers: BTreeSet<Id>,
    /// What is new.
    pub change: Change,
    /// The next id that is given out.
    pub next: Id,
}

impl List {
    /// The list of founders, with ids from 0 on, all of one process.
    pub fn founded(founders: usize) -> Self {
        Self::founded_at(founders, founders.max(1))
    }

    /// The list of founders, so many of each process.
    pub fn founded_at(founders: usize, threads: usize) -> Self {
        let members = (0..founders).map(|id| (id, Standing::Full)).collect();
        let homes = (0..founders).map(|id| (id, Home { process: id / threads, ticket: 0 })).collect();
        List { version: 0, members, homes, speakers: BTreeSet::new(), change: Change::Founded, next: founders }
    }

    /// Where a member runs.
    pub fn home(&self, id: Id) -> Option<Home> {
        self.homes.get(&id).copied()
    }

    /// The processes of all members.
    pub fn processes(&self) -> BTreeSet<usize> {
        self.homes.values().map(|home| home.process).collect()
    }

    /// The same list, with joiners that it admits at home.
    pub(crate) fn housed(mut self, home: Home) -> Self {
        if let Change::Admitted(joiners) = &self.change {
            self.homes.extend(joiners.iter().map(|joiner| (*joiner, home)));
        }
        self
    }

    /// The standing of a member.
    pub fn standing(&self, id: Id) -> Option<Standing> {
        self.members.get(&id).copied()
    }

    /// The full members, to whom data are routed, by rank.
    pub fn full(&self) -> impl Iterator<Item = Id> + '_ {
        self.members.iter().filter(|(_, standing)| **standing == Standing::Full).map(|(id, _)| *id)
    }

    /// The members that join.
    pub fn joining(&self) -> impl Iterator<Item = Id> + '_ {
        self.members.iter().filter(|(_, standing)| **standing == Standing::Joining).map(|(id, _)| *id)
    }

    /// The one that leaves.
    pub fn leaver(&self) -> Option<Id> {
        self.members.iter().find(|(_, standing)| **standing == Standing::Leaving).map(|(id, _)| *id)
    }

    /// Who decides the next list.
    pub fn lead(&self) -> Option<Id> {
        self.full().next()
    }

    /// The list after this one, if the change is possible now.
    pub fn after(&self, change: Change) -> Option<List> {
        let mut members = self.members.clone();
        let mut next = self.next;
        match &change {
            Change::Founded => return None,
            Change::Admitted(joiners) => {
                for joiner in joiners {
                    if *joiner < next || members.insert(*joiner, Standing::Joining).is_some() {
                        return None;
                    }
                    next = joiner + 1;
                }
            }
            Change::Seated { joiner, granter } => {
                let granted = matches!(self.standing(*granter), Some(Standing::Full));
                if !granted || members.insert(*joiner, Standing::Full) != Some(Standing::Joining) {
                    return None;
                }
            }
            Change::Withdrawn(joiner) => {
                if members.remove(joiner) != Some(Standing::Joining) {
                    return None;
                }
            }
            Change::Leaving(leaver) => {
                let last = self.full().nth(1).is_none();
                if last || self.leaver().is_some() || members.insert(*leaver, Standing::Leaving) != Some(Standing::Full)
                {
                    return None;
                }
            }
            Change::Closed { leaver, .. } => {
                if members.remove(leaver) != Some(Standing::Leaving) {
                    return None;
                }
            }
        }
        let speaks = |(id, standing): (&Id, &Standing)| (*standing != Standing::Joining).then_some(*id);
        let speakers = self.members.iter().filter_map(speaks).collect();
        let mut homes = self.homes.clone();
        homes.retain(|id, _| members.contains_key(id));
        Some(List { version: self.version + 1, members, homes, speakers, change, next })
    }
}
