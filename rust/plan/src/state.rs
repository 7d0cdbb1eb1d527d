//! The state of one bin, whatever operator it belongs to.
//!
//! Chunks of native state are versioned little-endian plain data of at most 1 MiB (a single key may exceed it); chunks of foreign state are
//! what the user's side writes. What has changed since a mark is told in chunks of entries ([`penstock_files::Chunk`]), which need no
//! operator to be merged and divided; the rest of a bin moves in chunks of the operator's own.

use penstock_bins::{BinState, BinTable, Encoding, Extent, StateError, dealt_to};
use penstock_files::{Chunk, Range, is_entries};

use crate::callback::{ForeignState, Unreadable};
use crate::error::OpError;
use crate::join::Sides;
use crate::op::Bins;
use crate::panes::Panes;
use crate::session::Sessions;
use crate::top::Groups;

/// The state of one bin of one keyed step. Made by [`KeyedSpec::new_state`](crate::keyed::KeyedSpec::new_state).
pub struct State(Inner);

enum Inner {
    Panes(Panes),
    Groups(Groups),
    Sides(Sides),
    Sessions(Sessions),
    Foreign(Box<dyn ForeignState>),
}

macro_rules! each {
    ($state:expr, $inner:ident => $body:expr) => {
        match $state {
            Inner::Panes($inner) => $body,
            Inner::Groups($inner) => $body,
            Inner::Sides($inner) => $body,
            Inner::Sessions($inner) => $body,
            Inner::Foreign($inner) => $body,
        }
    };
}

impl State {
    pub(crate) fn panes(panes: Panes) -> Self {
        Self(Inner::Panes(panes))
    }

    pub(crate) fn groups(groups: Groups) -> Self {
        Self(Inner::Groups(groups))
    }

    pub(crate) fn sides(sides: Sides) -> Self {
        Self(Inner::Sides(sides))
    }

    pub(crate) fn sessions(sessions: Sessions) -> Self {
        Self(Inner::Sessions(sessions))
    }

    /// Wraps state that lives in another language.
    pub fn foreign(state: Box<dyn ForeignState>) -> Self {
        Self(Inner::Foreign(state))
    }

    /// Takes a chunk of files, as [`ForeignState::restore`] does.
    pub(crate) fn restore(&mut self, chunk: &[u8]) -> Result<(), StateError> {
        match &mut self.0 {
            Inner::Foreign(state) if is_entries(chunk) => state.restore(chunk).map_err(StateError::from_source),
            _ => self.absorb(chunk),
        }
    }

    /// Gives an extent that is entries to those whose ranges they are of.
    fn pour(&self, extent: Extent, ranges: &[Range], parts: &mut [Self]) -> Result<(), StateError> {
        let part_of = dealt_to(ranges);
        let mut encoding = Encoding::of(extent);
        while let Some(chunk) = self.encode(&mut encoding)? {
            let chunk = Chunk::parse(&chunk).map_err(StateError::from_source)?;
            let dealt = chunk.dealt(parts.len(), &part_of).map_err(StateError::from_source)?;
            for (own, part) in dealt.into_iter().zip(&mut *parts) {
                own.map_or(Ok(()), |own| part.absorb(&own))?;
            }
        }
        Ok(())
    }

    /// See [`ForeignState::unreadable`].
    pub(crate) fn unreadable(&self) -> Result<Option<Unreadable>, StateError> {
        match &self.0 {
            Inner::Foreign(state) => state.unreadable().map_err(StateError::from_source),
            _ => Ok(None),
        }
    }
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").field("keys", &self.keys()).finish_non_exhaustive()
    }
}

impl BinState for State {
    fn encode(&self, encoding: &mut Encoding) -> Result<Option<Vec<u8>>, StateError> {
        match &self.0 {
            Inner::Panes(panes) => Ok(panes.encode(encoding)),
            Inner::Groups(groups) => Ok(groups.encode(encoding)),
            Inner::Sides(sides) => Ok(sides.encode(encoding)),
            Inner::Sessions(sessions) => Ok(sessions.encode(encoding)),
            Inner::Foreign(state) => state.encode(encoding).map_err(StateError::from_source),
        }
    }

    fn absorb(&mut self, chunk: &[u8]) -> Result<(), StateError> {
        self.home();
        let taken = match &mut self.0 {
            Inner::Panes(panes) if is_entries(chunk) => panes.absorb_changes(chunk),
            Inner::Groups(groups) if is_entries(chunk) => groups.absorb_changes(chunk),
            Inner::Sides(sides) if is_entries(chunk) => sides.absorb_changes(chunk),
            Inner::Sessions(sessions) if is_entries(chunk) => sessions.absorb_changes(chunk),
            state => each!(state, state => state.absorb(chunk)),
        };
        taken.map_err(StateError::from_source)
    }

    /// By entries, which need no operator to be divided. Rows that wait for the end of their epoch are in no entry, so it is divided between two epochs.
    fn divide(&self, ranges: &[Range], extent: Extent, new: &dyn Fn() -> Self) -> Result<Vec<Self>, StateError> {
        let mut parts: Vec<Self> = ranges.iter().map(|_| new()).collect();
        self.pour(Extent::Anew, ranges, &mut parts)?;
        if extent == Extent::Marked {
            parts.iter_mut().for_each(BinState::mark);
            self.pour(Extent::Changed, ranges, &mut parts)?;
        }
        Ok(parts)
    }

    /// See [`ForeignState::hand_over`].
    fn hand_over(&self, part_of: &dyn Fn(u64) -> Option<usize>, parts: &mut [Self]) -> Result<bool, StateError> {
        fn foreign(state: &mut State) -> Option<&mut (dyn ForeignState + 'static)> {
            match &mut state.0 {
                Inner::Foreign(state) => Some(&mut **state),
                _ => None,
            }
        }
        match (&self.0, parts.iter_mut().map(foreign).collect::<Option<Vec<_>>>()) {
            (Inner::Foreign(state), Some(mut parts)) => {
                state.hand_over(part_of, &mut parts).map_err(StateError::from_source)
            }
            _ => Ok(false),
        }
    }

    fn bytes(&self) -> usize {
        each!(&self.0, state => state.bytes())
    }

    fn keys(&self) -> usize {
        each!(&self.0, state => state.keys())
    }

    fn is_empty(&self) -> bool {
        each!(&self.0, state => state.is_empty())
    }

    fn mark(&mut self) {
        self.home();
        each!(&mut self.0, state => state.mark());
    }

    fn rollback(&mut self) -> Result<(), StateError> {
        self.home();
        match &mut self.0 {
            Inner::Panes(panes) => panes.rollback(),
            Inner::Groups(groups) => groups.rollback(),
            Inner::Sides(sides) => sides.rollback(),
            Inner::Sessions(sessions) => sessions.rollback(),
            Inner::Foreign(state) => return state.rollback().map_err(StateError::from_source),
        }
        Ok(())
    }

    fn settle(&mut self) {
        each!(&mut self.0, state => state.settle());
    }

    fn leave(&mut self) {
        self.home();
    }
}

impl Bins for BinTable<State> {
    fn bits(&self) -> u8 {
        BinTable::bits(self)
    }

    fn is_split(&self) -> bool {
        BinTable::is_split(self)
    }

    fn bin_of(&self, hash: u64) -> u32 {
        BinTable::bin_of(self, hash)
    }

    fn state(&mut self, bin: u32) -> Option<&mut State> {
        self.get_mut(bin)
    }

    fn holds(&self, bin: u32) -> bool {
        self.get(bin).is_some()
    }

    fn held(&self) -> Vec<u32> {
        self.owned().map(|(bin, _)| bin).collect()
    }

    fn take_changed(&mut self) -> Vec<u32> {
        BinTable::take_changed(self)
    }
}

fn inner(bins: &mut dyn Bins, bin: u32) -> Result<&mut Inner, OpError> {
    bins.state(bin).map(|state| &mut state.0).ok_or_else(|| OpError::BinMissing { bin })
}

pub(crate) fn panes_of(bins: &mut dyn Bins, bin: u32) -> Result<&mut Panes, OpError> {
    match inner(bins, bin)? {
        Inner::Panes(panes) => {
            panes.home();
            Ok(panes)
        }
        _ => Err(OpError::StateKind { bin }),
    }
}

impl State {
    /// Takes back what is lent.
    fn home(&mut self) {
        match &mut self.0 {
            Inner::Panes(panes) => panes.home(),
            Inner::Sides(sides) => sides.home(),
            _ => {}
        }
    }

    /// The rows of a join's bin, whether or not they are lent.
    pub(crate) fn sides_mut(&mut self) -> Option<&mut Sides> {
        match &mut self.0 {
            Inner::Sides(sides) => Some(sides),
            _ => None,
        }
    }

    /// The panes of an aggregate's bin, whether or not they are lent.
    pub(crate) fn panes_mut(&mut self) -> Option<&mut Panes> {
        match &mut self.0 {
            Inner::Panes(panes) => Some(panes),
            _ => None,
        }
    }
}

pub(crate) fn groups_of(bins: &mut dyn Bins, bin: u32) -> Result<&mut Groups, OpError> {
    match inner(bins, bin)? {
        Inner::Groups(groups) => Ok(groups),
        _ => Err(OpError::StateKind { bin }),
    }
}

pub(crate) fn sides_of(bins: &mut dyn Bins, bin: u32) -> Result<&mut Sides, OpError> {
    match inner(bins, bin)? {
        Inner::Sides(sides) => {
            sides.home();
            Ok(sides)
        }
        _ => Err(OpError::StateKind { bin }),
    }
}

pub(crate) fn sessions_of(bins: &mut dyn Bins, bin: u32) -> Result<&mut Sessions, OpError> {
    match inner(bins, bin)? {
        Inner::Sessions(sessions) => Ok(sessions),
        _ => Err(OpError::StateKind { bin }),
    }
}

pub(crate) fn foreign_of(bins: &mut dyn Bins, bin: u32) -> Result<&mut dyn ForeignState, OpError> {
    match inner(bins, bin)? {
        Inner::Foreign(state) => Ok(&mut **state),
        _ => Err(OpError::StateKind { bin }),
    }
}
