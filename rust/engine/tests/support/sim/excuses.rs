//! Which errors a call may end with: each kind for what went wrong in that call only, and when the engine has tried as often as it is to.
//!
//! What nothing excuses the engine has to mend by itself: that somebody starts the query again, and it goes on, hides nothing.

use std::collections::{BTreeMap, BTreeSet};

use super::faults::Fault;
use super::world::{START_MS, World};
use crate::machine::{EngineError, MemberId, Setup};

/// What an engine has been through since its call began.
#[derive(Debug, Default)]
pub struct Endured {
    /// Members that are gone, but for those that it has sent away.
    pub lost: BTreeSet<MemberId>,
    /// A feed task died as often as it may, although its member lives.
    pub stage_failed: bool,
    pub sink_calls: u32,
    /// How many were lost when the sink was called last.
    pub lost_before_sink: usize,
    /// The sink raised.
    pub raised: bool,
    /// How often the store failed, by member; those of the driver itself are under none.
    pub refused: BTreeMap<Option<MemberId>, u32>,
}

impl Fault {
    /// Whether an engine gets over it within its call, until its tries are used up.
    pub fn is_mended(&self) -> bool {
        use Fault::*;
        let dies = matches!(self, CrashMember(_) | Silence(..) | Drain(..) | CutMesh);
        let moves = matches!(self, Migrate | MigrateAll | Recut | RecutAll | Rescale(_) | CancelRescale);
        dies || moves || matches!(self, Edit | Copy)
    }
}

impl World {
    /// A member, or the driver, is told that the store does not work.
    pub fn refuse(&mut self, driver: usize, member: Option<MemberId>) {
        self.reached("store refused");
        *self.drivers[driver].endured.refused.entry(member).or_default() += 1;
    }

    /// Whether an error that sends its user to start the query again had to be; `stopped`: who called waits no more.
    pub fn is_excused(&self, driver: usize, stopped: bool, error: &EngineError) -> bool {
        let Setup { tries: attempts, sink_tries, store_tries, .. } = Setup::default();
        let one = &self.drivers[driver];
        let Endured { lost, stage_failed, sink_calls, lost_before_sink, raised, refused } = &one.endured;
        let holder = self.storage.holder().filter(|holder| *holder != one.nonce);
        let other = self.drivers.iter().find(|one| Some(one.nonce) == holder);
        match error {
            EngineError::Abandoned { .. } => stopped,
            // What an engine had asked for may be done when it is dead.
            EngineError::Held { .. } => other.is_some_and(|one| one.alive || one.late_claim),
            // With a copy an older claim of one's own may come back.
            EngineError::Fenced { .. } => other.is_some() || self.times("put back") > 0,
            // Another engine has gone on since Spark asked here, and has let go what this one would begin with.
            EngineError::NoManifest { asked, newest } => *asked < self.spark.commits && *newest >= Some(*asked),
            EngineError::Sink { .. } => {
                // Who is lost while it runs may be why it fails, whatever it says.
                let tried = !self.scenario.retry_sink || *sink_calls == sink_tries;
                if lost.len() > *lost_before_sink { tried } else { *raised || (!lost.is_empty() && tried) }
            }
            EngineError::Feed { .. } => *stage_failed,
            EngineError::Store { tries, .. } => {
                *tries == store_tries && refused.values().any(|refused| refused >= tries)
            }
            EngineError::NoMembers { .. } => self.no_slots_until > self.now.saturating_sub(START_MS),
            EngineError::Broken { tries, .. } => {
                *tries == attempts && lost.len() as u64 + self.times("mesh cut") >= u64::from(*tries)
            }
            _ => false,
        }
    }

    /// At the end of a run in which little more than members died: nobody had to start the query again, but for a store that gave up, or a
    /// sink that was called as often as it may be.
    pub fn check_restarts(&mut self) {
        let few = self.times("crash") + self.times("mesh cut") < u64::from(Setup::default().tries);
        let (restarted, excused) = (self.times("restarted"), self.times("store failed") + self.times("sink failed"));
        if self.scenario.durable && self.only_mended && few && restarted > excused {
            self.violate(format!("the query was started again {restarted} times, where members died and nothing else"));
        }
    }
}
