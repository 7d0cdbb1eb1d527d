//! Rows that feeds have delivered and nobody has committed yet.
//!
//! Keyed by epoch, source, partition and attempt. An attempt appears here only when its stream was complete
//! and checked; one that broke off leaves nothing. An attempt that connects again before it is
//! complete replaces itself: its older connection can no longer complete it. Which attempts count is decided by the release
//! of the epoch, which takes copies of the (shared) batches, so that the epoch can be released
//! again after a rollback; they go when the epoch is complete or discarded.
//!
//! Rows are in the member's store: in memory while they fit its budget, else in files. A feed is read no faster than its rows
//! are kept, and never waits for the dataflow: a task that waited for it while it waits for the task's rows would wait
//! for ever. Attempts that do not count go when the epoch is released.
//!
//! Departure: staging outlives the release; the rows of an epoch stay until it is complete, so that it runs again
//! without feeding.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use penstock_engine::Commit;

use crate::error::Failure;
use crate::host::{PartitionRows, Rows};
use crate::message::FeedContext;

/// Source, partition and attempt.
type Key = (u8, u32, u64);

impl FeedContext {
    fn key(&self) -> Key {
        (self.source, self.partition, self.attempt)
    }
}

fn key_of(feed: &Commit) -> Key {
    (feed.source, feed.partition, feed.attempt)
}

#[derive(Debug)]
struct Attempt {
    batches: Vec<Rows>,
    rows: u64,
}

/// A feed under way, and what breaks it off. An end that comes by itself takes it out of the list.
struct Arriving {
    ticket: u64,
    stop: Box<dyn Fn() + Send>,
}

impl fmt::Debug for Arriving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Arriving").field(&self.ticket).finish()
    }
}

/// The staging area of one query.
#[derive(Debug, Default)]
pub(crate) struct Staging {
    /// Epochs before this are complete: nobody may feed them.
    floor: u64,
    /// An epoch that runs: nobody may feed it until it is discarded.
    released: Option<u64>,
    tickets: u64,
    /// Feeds that have not come to their end. One that cannot count any more is broken off: its peer may have vanished without a word, and
    /// what it has brought would stay.
    arriving: BTreeMap<(u64, Key), Arriving>,
    epochs: BTreeMap<u64, BTreeMap<Key, Attempt>>,
}

impl Staging {
    /// A feed begins; returns its ticket. `stop` breaks it off, from any thread.
    pub(crate) fn open(&mut self, feed: &FeedContext, stop: impl Fn() + Send + 'static) -> Result<u64, Failure> {
        self.still_open(feed)?;
        let key = feed.key();
        if self.epochs.get(&feed.epoch).is_some_and(|epoch| epoch.contains_key(&key)) {
            let message = format!(
                "attempt {} of partition {} of epoch {} is here already",
                feed.attempt, feed.partition, feed.epoch
            );
            return Err(Failure::new("staging", message));
        }
        self.tickets += 1;
        let arriving = Arriving { ticket: self.tickets, stop: Box::new(stop) };
        if let Some(older) = self.arriving.insert((feed.epoch, key), arriving) {
            (older.stop)();
        }
        Ok(self.tickets)
    }

    /// A feed that was opened has ended.
    pub(crate) fn abandon(&mut self, feed: &FeedContext, ticket: u64) {
        if self.still_arriving(feed, ticket).is_ok() {
            self.arriving.remove(&(feed.epoch, feed.key()));
        }
    }

    /// A feed that was opened is complete.
    pub(crate) fn keep(&mut self, feed: &FeedContext, ticket: u64, batches: Vec<Rows>) -> Result<(), Failure> {
        self.still_arriving(feed, ticket)?;
        self.abandon(feed, ticket);
        self.still_open(feed)?;
        let rows = batches.iter().map(|batch| batch.num_rows() as u64).sum();
        let attempt = Attempt { batches, rows };
        let epoch = self.epochs.entry(feed.epoch).or_default();
        epoch.insert(feed.key(), attempt);
        Ok(())
    }

    /// Whether a feed was not broken off.
    ///
    /// # Errors
    /// Why it was.
    pub(crate) fn still_arriving(&self, feed: &FeedContext, ticket: u64) -> Result<(), Failure> {
        if self.arriving.get(&(feed.epoch, feed.key())).is_some_and(|feed| feed.ticket == ticket) {
            return Ok(());
        }
        self.still_open(feed)?;
        let message = format!(
            "the feed of epoch {} was broken off: that is fed again, or another connection has taken the place of this one",
            feed.epoch
        );
        Err(Failure::new("staging", message))
    }

    fn still_open(&self, feed: &FeedContext) -> Result<(), Failure> {
        if feed.epoch >= self.floor && self.released != Some(feed.epoch) {
            return Ok(());
        }
        let what = if feed.epoch < self.floor { "complete" } else { "released" };
        let message = format!("epoch {} is {what}, {} is next", feed.epoch, self.floor);
        Err(Failure::new("epoch", message).with("given", feed.epoch).with("next", self.floor))
    }

    /// The rows of the attempts that count, by source and partition. Changes nothing.
    ///
    /// # Errors
    /// When one is not staged here with that many rows, or a partition of a source is named twice.
    pub(crate) fn select(&self, epoch: u64, feeds: &[Commit]) -> Result<Vec<PartitionRows>, Failure> {
        let mut chosen = BTreeMap::new();
        for feed in feeds {
            let fail = |what: String| {
                Err(Failure::new("staging", what)
                    .with("epoch", epoch)
                    .with("partition", feed.partition)
                    .with("attempt", feed.attempt))
            };
            let Some(attempt) = self.epochs.get(&epoch).and_then(|epoch| epoch.get(&key_of(feed))) else {
                return fail("this attempt is not staged here".into());
            };
            if attempt.rows != feed.rows {
                return fail(format!("{} rows are staged, not {}", attempt.rows, feed.rows));
            }
            let staged = PartitionRows {
                source: feed.source,
                partition: feed.partition,
                batches: attempt.batches.clone(),
                rows_before: feed.rows_before,
            };
            if chosen.insert((feed.source, feed.partition), staged).is_some() {
                return fail("two attempts of this partition are to count".into());
            }
        }
        Ok(chosen.into_values().collect())
    }

    /// An epoch runs with these attempts, which [`select`](Self::select) gave out: the others go.
    pub(crate) fn release(&mut self, epoch: u64, feeds: &[Commit]) {
        self.released = Some(epoch);
        if let Some(attempts) = self.epochs.get_mut(&epoch) {
            let chosen: BTreeSet<Key> = feeds.iter().map(key_of).collect();
            attempts.retain(|key, _| chosen.contains(key));
        }
    }

    /// Forgets one epoch, which may be fed again.
    pub(crate) fn discard(&mut self, epoch: u64) {
        self.break_off(|arriving| arriving == epoch);
        self.epochs.remove(&epoch);
        self.released.take_if(|released| *released == epoch);
    }

    /// From now on `next` is the first epoch that may be fed; what is before it goes.
    pub(crate) fn set_floor(&mut self, next: u64) {
        self.break_off(|epoch| epoch < next);
        self.floor = next;
        self.released = None;
        self.epochs = self.epochs.split_off(&next);
    }

    /// The query is forgotten: nobody feeds it any more.
    pub(crate) fn close(&mut self) {
        self.set_floor(u64::MAX);
    }

    fn break_off(&mut self, over: impl Fn(u64) -> bool) {
        for (_, feed) in self.arriving.extract_if(.., |(epoch, _), _| over(*epoch)) {
            (feed.stop)();
        }
    }

    /// Rows staged.
    pub(crate) fn rows(&self) -> u64 {
        self.epochs.values().flat_map(BTreeMap::values).map(|attempt| attempt.rows).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow_array::{ArrayRef, Int64Array, RecordBatch};
    use std::sync::Arc;

    fn batch(values: &[i64]) -> RecordBatch {
        let column: ArrayRef = Arc::new(Int64Array::from(values.to_vec()));
        RecordBatch::try_from_iter([("v", column)]).unwrap()
    }

    fn read(staged: &PartitionRows) -> Vec<RecordBatch> {
        staged.batches.iter().map(|rows| rows.read().unwrap()).collect()
    }

    fn feed(epoch: u64, partition: u32, attempt: u64) -> FeedContext {
        FeedContext { query: "q".into(), epoch, source: 0, partition, attempt }
    }

    fn commit(partition: u32, attempt: u64, rows: u64) -> Commit {
        Commit { source: 0, partition, attempt, rows, rows_before: 0 }
    }

    #[test]
    fn one_attempt_brings_rows_of_several_sources() {
        let mut staging = Staging::default();
        let of = |source| FeedContext { source, ..feed(0, 2, 5) };
        for (source, values) in [(1, &[1, 2][..]), (0, &[3])] {
            let ticket = staging.open(&of(source), || {}).unwrap();
            staging.keep(&of(source), ticket, vec![batch(values).into()]).unwrap();
        }
        assert!(staging.open(&of(1), || {}).is_err(), "it is here");
        let commits = [Commit { source: 1, ..commit(2, 5, 2) }, commit(2, 5, 1)];
        let taken = staging.select(0, &commits).unwrap();
        assert_eq!(taken.iter().map(|staged| staged.source).collect::<Vec<_>>(), [0, 1]);
        assert_eq!(read(&taken[1]), [batch(&[1, 2])]);
        assert!(staging.select(0, &[Commit { source: 2, ..commit(2, 5, 0) }]).is_err());
        staging.release(0, &commits[..1]);
        assert_eq!(staging.rows(), 2, "what does not count has gone");
    }

    #[test]
    fn only_complete_chosen_attempts_are_released() {
        let mut staging = Staging::default();
        for (partition, attempt, values) in [(1, 5, &[1, 2][..]), (0, 6, &[3]), (1, 7, &[4, 5])] {
            let ticket = staging.open(&feed(3, partition, attempt), || {}).unwrap();
            staging.keep(&feed(3, partition, attempt), ticket, vec![batch(values).into()]).unwrap();
        }
        let ticket = staging.open(&feed(3, 2, 8), || {}).unwrap();
        staging.abandon(&feed(3, 2, 8), ticket);
        assert!(staging.select(3, &[commit(2, 8, 0)]).is_err());
        assert!(staging.select(3, &[commit(1, 5, 3)]).is_err(), "other row count");
        assert!(staging.select(3, &[commit(1, 5, 2), commit(1, 7, 2)]).is_err());
        let taken = staging.select(3, &[commit(1, 7, 2), commit(0, 6, 1)]).unwrap();
        assert_eq!(read(&taken[0]), [batch(&[3])]);
        assert_eq!(read(&taken[1]), [batch(&[4, 5])]);
        assert_eq!(staging.rows(), 5, "selecting takes nothing away");
        let late = staging.open(&feed(3, 4, 8), || {}).unwrap();
        staging.release(3, &[commit(1, 7, 2), commit(0, 6, 1)]);
        assert_eq!(staging.rows(), 3, "what does not count has gone");
        assert_eq!(staging.keep(&feed(3, 4, 8), late, vec![]).unwrap_err().kind, "epoch");
        assert_eq!(staging.open(&feed(3, 5, 8), || {}).unwrap_err().kind, "epoch");
        assert_eq!(staging.select(3, &[commit(1, 7, 2), commit(0, 6, 1)]).unwrap().len(), 2, "for a replay");
        staging.discard(3);
        assert!(staging.open(&feed(3, 5, 8), || {}).is_ok(), "fed again");
        staging.set_floor(4);
        assert_eq!(staging.rows(), 0);
        assert_eq!(staging.open(&feed(3, 0, 9), || {}).unwrap_err().kind, "epoch");
    }

    #[test]
    fn an_attempt_comes_once_and_not_after_its_epoch() {
        let mut staging = Staging::default();
        let old = staging.open(&feed(0, 0, 1), || {}).unwrap();
        let new = staging.open(&feed(0, 0, 1), || {}).unwrap();
        staging.abandon(&feed(0, 0, 1), old);
        assert_eq!(staging.keep(&feed(0, 0, 1), old, vec![]).unwrap_err().kind, "staging");
        staging.keep(&feed(0, 0, 1), new, vec![]).unwrap();
        assert!(staging.open(&feed(0, 0, 1), || {}).is_err(), "it is here");
        staging.discard(0);
        let ticket = staging.open(&feed(0, 0, 1), || {}).unwrap();
        staging.set_floor(1);
        assert!(staging.keep(&feed(0, 0, 1), ticket, vec![]).is_err(), "its epoch ended meanwhile");
        staging.set_floor(0);
        staging.open(&feed(0, 0, 1), || {}).unwrap();
    }
    #[test]
    fn a_feed_that_cannot_count_any_more_is_broken_off() {
        let mut staging = Staging::default();
        let broken: Arc<std::sync::Mutex<Vec<&str>>> = Arc::default();
        let stop = |name| {
            let broken = Arc::clone(&broken);
            move || broken.lock().unwrap().push(name)
        };
        let told = || std::mem::take(&mut *broken.lock().unwrap());
        staging.open(&feed(1, 0, 1), stop("older")).unwrap();
        let newer = staging.open(&feed(1, 0, 1), stop("newer")).unwrap();
        assert_eq!(told(), ["older"]);
        staging.open(&feed(1, 1, 1), stop("fed again")).unwrap();
        staging.keep(&feed(1, 0, 1), newer, vec![]).unwrap();
        staging.open(&feed(2, 0, 1), stop("next")).unwrap();
        staging.discard(1);
        assert_eq!(told(), ["fed again"]);
        let ticket = staging.open(&feed(1, 1, 2), stop("slow")).unwrap();
        staging.release(1, &[]);
        assert_eq!(told(), [""; 0], "its task may end by itself");
        staging.set_floor(2);
        assert_eq!(told(), ["slow"]);
        assert_eq!(staging.still_arriving(&feed(1, 1, 2), ticket).unwrap_err().kind, "epoch");
        staging.close();
        assert_eq!(told(), ["next"]);
    }
}
