//! What leaves a worker: the bins of one configuration, part by part, as there is room.
//!
//! Bins that stay in the process leave at once, by ticket. The others are announced, and encoded one after the other and chunk by chunk, while less
//! than a budget of bytes is *under way*: encoded, and not yet taken in by the worker that it went to, which says so. So a
//! migration costs the budget and one chunk, however large the bins are and however many move at once.
//!
//! Those go first for which rows wait where they go to, as far as that has been told; a bin that is begun is sent to its end.
//!
//! A bin stays in the table until its End is sent, out of service from the beginning: so it does not change while other bins are worked on; and
//! whatever ends the worker, the bin is deposited like any other.
//!
//! Measured (`penstock bench hot-first`): greatest latency of rows, ms, while 64 of 2^8 bins go over TCP at once to another process, 2^23 keys, half of the rows in
//! 4 of those bins, 1 MiB under way, two quiet cores: of the four bins 85 where they are asked for and 221 in the order of the control, of bins that stay as long either
//! way. A run encodes a portion, and its worker does something else meanwhile.
//!
//! Invariants: at most one bin is encoded at a time; more than the budget is under way by less than one chunk, which goes in pieces of at most the
//! budget.
//!
//! Departure from Megaphone, which sends a bin's state as it is uninstalled: it goes as there is room. S tells F what
//! it has taken in, and what rows wait for (after Meces, ATC 2022), on an edge that leads nowhere and so holds back no frontier; how many chunks and post-dated records a bin had is told
//! behind them and compared.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::RangeInclusive;
use std::sync::atomic::Ordering::Relaxed;

use penstock_progress::Timestamp;

use crate::bin::{BinState, Encoding, Extent};
use crate::control::Move;
use crate::error::BinsError;
use crate::message::{BinPart, Record};
use crate::route::Shared;
use crate::stats::BinEvent;

/// Bytes that one run encodes, and less than one chunk: then the rows of its worker have their turn, and it is heard what others wait for.
const PORTION: u64 = 1 << 19;

/// Bytes of a chunk in one message between processes, which has a limit of 256 MiB; the state of one key may be larger.
const PIECE: RangeInclusive<u64> = 64..=64 << 20;

/// Post-dated records in one message between processes.
const RECORDS_PER_MESSAGE: usize = 1024;

/// State that is encoded and not yet taken in, of one worker.
pub(crate) struct UnderWay {
    budget: u64,
    bytes: u64,
    by_receiver: BTreeMap<usize, u64>,
}

impl UnderWay {
    pub(crate) fn new(budget: usize) -> Self {
        Self { budget: budget as u64, bytes: 0, by_receiver: BTreeMap::new() }
    }

    /// Whether another part may be made. One always may when there is none.
    fn has_room(&self) -> bool {
        self.bytes == 0 || self.bytes < self.budget
    }

    /// Bytes of a chunk that go at once.
    fn piece(&self) -> usize {
        self.budget.clamp(*PIECE.start(), *PIECE.end()) as usize
    }

    fn sent(&mut self, to: u32, bytes: u64) {
        self.bytes += bytes;
        *self.by_receiver.entry(to as usize).or_default() += bytes;
    }

    /// A worker has taken so much in.
    pub(crate) fn taken(&mut self, worker: usize, bytes: u64) -> Result<(), BinsError> {
        let sent = self.by_receiver.entry(worker).or_default();
        *sent = sent.checked_sub(bytes).ok_or(BinsError::Overdrawn { worker, taken: bytes, sent: *sent })?;
        self.bytes -= bytes;
        Ok(())
    }
}

/// The bins that one configuration sends away at its time.
pub(crate) struct Shipment<T, P> {
    time: T,
    /// Those that stay in the process, until they have left.
    near: Vec<Move>,
    far: Queue,
    announced: bool,
    current: Option<Current<T, P>>,
}

/// Bins in the order in which they leave.
struct Queue {
    waiting: HashMap<u32, Move>,
    wanted: VecDeque<u32>,
    order: VecDeque<u32>,
}

impl Queue {
    fn new(moves: &[Move]) -> Self {
        let order = moves.iter().map(|m| m.bin).collect();
        Self { waiting: moves.iter().map(|m| (m.bin, *m)).collect(), wanted: VecDeque::new(), order }
    }

    /// These before those that nobody wants, if they are among them; those that were wanted earlier are before them.
    fn want(&mut self, bins: Vec<u32>) {
        self.wanted.extend(bins);
    }

    fn next(&mut self) -> Option<Move> {
        while let Some(bin) = self.wanted.pop_front().or_else(|| self.order.pop_front()) {
            let next = self.waiting.remove(&bin);
            if next.is_some() {
                return next;
            }
        }
        None
    }
}

/// What a run has left to send.
pub(crate) enum Left {
    Nothing,
    /// As much as there was room for was sent.
    NoRoom,
    /// There is room.
    More,
}

/// A bin of which the first parts are sent.
struct Current<T, P> {
    to: Move,
    stage: Stage<T, P>,
}

enum Stage<T, P> {
    /// So many chunks are sent, and so many bytes of the one at hand.
    State { encoding: Encoding, chunks: u64, chunk: Option<(Vec<u8>, usize)> },
    /// All of its state is, in so many chunks; so many post-dated records it had, and these are left.
    Records { chunks: u64, count: u64, records: std::vec::IntoIter<(T, P)> },
}

impl<T: Timestamp, P: Record> Shipment<T, P> {
    /// Nothing is sent yet.
    pub(crate) fn new<S: BinState>(time: T, moves: impl Iterator<Item = Move>, shared: &Shared<T, S, P>) -> Self {
        let (near, far) = moves.partition::<Vec<Move>, _>(|m| (shared.local)(m.to as usize));
        let mut table = shared.table.borrow_mut();
        far.iter().for_each(|m| table.begin_leaving(m.bin));
        Self { time, near, far: Queue::new(&far), announced: false, current: None }
    }

    /// Rows wait for these bins.
    pub(crate) fn want(&mut self, bins: Vec<u32>) {
        self.far.want(bins);
    }

    /// Sends what there is room for, up to a portion; what that leaves is for another run. Bins that stay in the process need not wait for room.
    pub(crate) fn send<S: BinState>(
        &mut self,
        shared: &Shared<T, S, P>,
        under_way: &mut UnderWay,
        send: &mut dyn FnMut(u32, BinPart<T, P>),
    ) -> Result<Left, BinsError> {
        let mut made = 0;
        for m in self.near.drain(..) {
            shared.announce(m, &self.time, send)?;
            shared.hand_over(m, send)?;
        }
        if !std::mem::replace(&mut self.announced, true) {
            let far = self.far.order.iter().filter_map(|bin| self.far.waiting.get(bin));
            far.copied().try_for_each(|m| shared.announce(m, &self.time, send))?;
        }
        loop {
            if self.current.is_none() {
                let Some(to) = self.far.next() else { return Ok(Left::Nothing) };
                let stage = Stage::State { encoding: shared.encoding(&self.time), chunks: 0, chunk: None };
                self.current = Some(Current { to, stage });
            }
            if !under_way.has_room() {
                return Ok(Left::NoRoom);
            }
            if made >= PORTION {
                return Ok(Left::More);
            }
            let Some(Current { to, stage }) = &mut self.current else { continue };
            let part = match stage {
                Stage::State { encoding, chunks, chunk } => {
                    let next = match chunk.take() {
                        Some(rest) => Some(rest),
                        None => shared.encode(to.bin, encoding)?.map(|chunk| (chunk, 0)),
                    };
                    match next {
                        Some((bytes, sent)) if bytes.len() - sent > under_way.piece() => {
                            let end = sent + under_way.piece();
                            let piece = bytes[sent..end].to_vec();
                            *chunk = Some((bytes, end));
                            BinPart::Piece { bin: to.bin, bytes: piece }
                        }
                        Some((bytes, sent)) => {
                            *chunks += 1;
                            let chunk = if sent == 0 { bytes } else { bytes[sent..].to_vec() };
                            BinPart::State { bin: to.bin, chunk }
                        }
                        None => {
                            let records = shared.pending.borrow_mut().take_bin(to.bin);
                            let (chunks, count) = (*chunks, records.len() as u64);
                            *stage = Stage::Records { chunks, count, records: records.into_iter() };
                            continue;
                        }
                    }
                }
                Stage::Records { chunks, count, records } => {
                    let some: Vec<_> = records.by_ref().take(RECORDS_PER_MESSAGE).collect();
                    if some.is_empty() {
                        send(to.to, BinPart::End { bin: to.bin, chunks: *chunks, records: *count });
                        shared.leave(to.bin, &self.time)?;
                        self.current = None;
                        continue;
                    }
                    BinPart::Pending { bin: to.bin, records: some }
                }
            };
            made += part.weight();
            under_way.sent(to.to, part.weight());
            send(to.to, part);
        }
    }
}

impl<T: Timestamp, S: BinState, P: Record> Shared<T, S, P> {
    /// Tells that a bin comes.
    fn announce(&self, m: Move, time: &T, send: &mut dyn FnMut(u32, BinPart<T, P>)) -> Result<(), BinsError> {
        let bin = m.bin;
        let table = self.table.borrow();
        if let Some(arrived) = table.coming(bin) {
            return Err(BinsError::Incomplete { bin, arrived, announced: None });
        }
        if table.get(bin).or_else(|| table.leaving(bin)).is_none() {
            return Err(BinsError::Absent { bin });
        }
        self.stats.record(self.index, bin, time.clone(), BinEvent::Prepare, 0);
        send(m.to, BinPart::Prepare { bin, epoch: table.epoch() });
        Ok(())
    }

    /// Sends all of a bin that stays in the process.
    fn hand_over(&self, m: Move, send: &mut dyn FnMut(u32, BinPart<T, P>)) -> Result<(), BinsError> {
        let bin = m.bin;
        let records = self.pending.borrow_mut().take_bin(bin);
        if !records.is_empty() {
            send(m.to, BinPart::Pending { bin, records });
        }
        let held = self.table.borrow_mut().uninstall_held(bin).ok_or(BinsError::Absent { bin })?;
        let ticket = self.shelf.put(&self.name, bin, held)?;
        send(m.to, BinPart::Shelved { bin, ticket });
        self.count_out();
        Ok(())
    }

    /// How a bin is encoded that leaves the process at this time.
    fn encoding(&self, time: &T) -> Encoding {
        // Between two epochs the record of the one that has ended is taken.
        let within = self.record && (self.begins)(time).is_none();
        Encoding::of(if within { Extent::Marked } else { Extent::All })
    }

    /// The next chunk of a bin, where it lies.
    fn encode(&self, bin: u32, encoding: &mut Encoding) -> Result<Option<Vec<u8>>, BinsError> {
        let table = self.table.borrow();
        let state = table.leaving(bin).ok_or(BinsError::Absent { bin })?;
        let chunk = state.encode(encoding).map_err(|source| BinsError::Encode { bin, source })?;
        let bytes = chunk.as_ref().map_or(0, Vec::len);
        self.stats.bytes_out.fetch_add(bytes as u64, Relaxed);
        Ok(chunk)
    }

    /// A bin of which all is sent leaves the table.
    fn leave(&self, bin: u32, time: &T) -> Result<(), BinsError> {
        let mut held = self.table.borrow_mut().uninstall_held(bin).ok_or(BinsError::Absent { bin })?;
        held.begins = (self.begins)(time);
        self.shelf.retain(&self.name, bin, held)?;
        self.left.borrow_mut().push(bin);
        self.count_out();
        Ok(())
    }

    /// All bins that have left are complete where they went.
    pub(crate) fn have_come(&self) {
        let left = self.left.take();
        if !left.is_empty() {
            self.shelf.have_come(&self.name, &left);
        }
    }

    fn count_out(&self) {
        self.stats.owned.fetch_sub(1, Relaxed);
        self.stats.moved_out.fetch_add(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_that_rows_wait_for_go_first() {
        let moves: Vec<Move> = (0..8).map(|bin| Move { bin, from: 0, to: 1 }).collect();
        let mut queue = Queue::new(&moves);
        let next = |queue: &mut Queue| queue.next().map(|m| m.bin);
        assert_eq!(next(&mut queue), Some(0));
        queue.want(vec![6, 0, 99]);
        queue.want(vec![2, 6]);
        let left: Vec<u32> = std::iter::from_fn(|| next(&mut queue)).collect();
        assert_eq!(left, [6, 2, 1, 3, 4, 5, 7]);
        queue.want(vec![5]);
        assert_eq!(next(&mut queue), None, "all have gone");
    }

    #[test]
    fn room_is_what_is_not_under_way() {
        let mut under_way = UnderWay::new(100);
        under_way.sent(1, 60);
        under_way.sent(2, 39);
        assert!(under_way.has_room());
        under_way.sent(2, 500);
        assert!(!under_way.has_room());
        under_way.taken(2, 539).unwrap();
        assert!(under_way.has_room());
        let refused = under_way.taken(1, 61);
        assert!(matches!(refused, Err(BinsError::Overdrawn { worker: 1, taken: 61, sent: 60 })), "{refused:?}");
        assert!(matches!(under_way.taken(7, 1), Err(BinsError::Overdrawn { worker: 7, taken: 1, sent: 0 })));
        under_way.taken(1, 60).unwrap();
        assert_eq!(under_way.bytes, 0);
        let mut nothing = UnderWay::new(0);
        assert!(nothing.has_room(), "one part at a time always goes");
        nothing.sent(0, 1);
        assert!(!nothing.has_room());
    }
}
