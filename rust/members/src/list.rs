//! The list of members: who takes part, in which standing, since which version.

use std::collections::{BTreeMap, BTreeSet};

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Most members of a run at a time. Everybody tells everybody a list, so what one costs in bytes grows with the cube of this: 30 KB in all for 16
/// members, 1.7 MB for 64.
pub const MAX_MEMBERS: usize = 1 << 12;

/// Most ids that a run gives out: tables are by id. Nobody joins after that.
pub const MAX_IDS: usize = 1 << 22;

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
    /// A full member begins to leave; others may be leaving.
    Leaving(Id),
    /// A leaver is gone, after so many bundles by dataflow.
    Closed {
        /// Who.
        leaver: Id,
        /// By dataflow: the number of its next bundle, which never comes.
        finals: BTreeMap<u64, u64>,
    },
}

/// Why something is no list that [`List::after`] makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ListFault {
    /// Too many members.
    #[error("{0} members, and a run has at most {MAX_MEMBERS} at a time")]
    Members(usize),
    /// Too many ids.
    #[error("{0} is the next id, and a run gives out at most {MAX_IDS}")]
    Next(Id),
    /// More lists than there can have been.
    #[error("version {version} with {next} workers so far, each of which joins and leaves once")]
    Version {
        /// Of the list.
        version: u64,
        /// Its next id.
        next: Id,
    },
    /// An id that was never given out.
    #[error("worker {0} takes part, whose id was never given out")]
    Unknown(Id),
    /// A member without a home, or a home without a member.
    #[error("{homes} homes of {members} members, or of others")]
    Homes {
        /// Homes.
        homes: usize,
        /// Members.
        members: usize,
    },
    /// Nobody to route data to, and to decide the next list.
    #[error("no full member")]
    NoLead,
    /// The standing of whom it is about is another one.
    #[error("worker {0} has not the standing that the change gives it")]
    Change(Id),
}

/// See the module. One that comes from elsewhere is one that [`List::after`] can have made, or is not decoded.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(remote = "Self")]
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

impl Serialize for List {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Self::serialize(self, serializer)
    }
}

impl<'de> Deserialize<'de> for List {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let list = Self::deserialize(deserializer)?;
        list.check().map_err(D::Error::custom)?;
        Ok(list)
    }
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

    /// The members that leave.
    pub fn leaving(&self) -> impl Iterator<Item = Id> + '_ {
        self.members.iter().filter(|(_, standing)| **standing == Standing::Leaving).map(|(id, _)| *id)
    }

    /// Who decides the next list.
    pub fn lead(&self) -> Option<Id> {
        self.full().next()
    }

    /// Whether so many more may be members.
    pub(crate) fn has_room(&self, count: usize) -> bool {
        let fits = |used: usize, most| used.saturating_add(count) <= most;
        fits(self.members.len(), MAX_MEMBERS) && fits(self.next, MAX_IDS)
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
                if members.len() > MAX_MEMBERS || next > MAX_IDS {
                    return None;
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
                if last || members.insert(*leaver, Standing::Leaving) != Some(Standing::Full) {
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

    /// Whether it can be a list of a run that has begun: what is by id has room for all, and somebody leads.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn check(&self) -> Result<(), ListFault> {
        let List { version, members, homes, speakers, change, next } = self;
        if members.len() > MAX_MEMBERS {
            return Err(ListFault::Members(members.len()));
        }
        if *next > MAX_IDS {
            return Err(ListFault::Next(*next));
        }
        // Each worker is admitted, seated, leaves and is closed, or less.
        if *version > 4 * *next as u64 {
            return Err(ListFault::Version { version: *version, next: *next });
        }
        let last = members.keys().chain(speakers).max();
        if let Some(unknown) = last.filter(|id| *id >= next) {
            return Err(ListFault::Unknown(*unknown));
        }
        if !homes.keys().eq(members.keys()) {
            return Err(ListFault::Homes { homes: homes.len(), members: members.len() });
        }
        if self.lead().is_none() {
            return Err(ListFault::NoLead);
        }
        let stands = |id: &Id, standing: Option<Standing>| match *id < *next && self.standing(*id) == standing {
            true => Ok(()),
            false => Err(ListFault::Change(*id)),
        };
        match change {
            Change::Founded => Ok(()),
            Change::Admitted(joiners) => joiners.iter().try_for_each(|id| stands(id, Some(Standing::Joining))),
            Change::Seated { joiner, granter } => {
                stands(joiner, Some(Standing::Full)).and_then(|()| stands(granter, Some(Standing::Full)))
            }
            Change::Withdrawn(joiner) => stands(joiner, None),
            Change::Leaving(leaver) => stands(leaver, Some(Standing::Leaving)),
            Change::Closed { leaver, .. } => stands(leaver, None),
        }
    }
}
