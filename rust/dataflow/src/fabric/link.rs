//! The sending side of a connection between two processes: an outbox, and the thread that empties it.
//!
//! Three lanes: frames of the urgent one (progress, credits, beats, aborts) are written before any data frame that waits, so
//! progress is never stuck behind a full data buffer; and data before state that moves, which who sends it bounds. Within a lane the
//! order is kept. Putting a frame never blocks.
//!
//! Data is charged when it is queued and credited when the receiving process tells that its workers have taken it from their
//! mailboxes: so the limit covers the buffers at both ends. Above it the link is congested until half of it is free again;
//! nothing is refused then, sources are asked to wait ([`crate::Worker::is_congested`]). Operators are not: a loop whose
//! operators wait for room deadlocks (Faucet §1, F-09), and so does an operator that may not send what would let its peer go on.
//! For the same reason taking a block into the worker credits it, not its consumption by an operator that may be waiting for a
//! frontier which only the throttled source can move.
//!
//! Departure: only sources feel the bound. Progress ignores it, and so does state that moves, which has its own;
//! between threads of a process probes bound data.

use std::io::{self, BufWriter, Write};
use std::net::Shutdown;
use std::sync::atomic::{AtomicU64, Ordering};

use super::door::Ask;
use super::frame::{Frame, HEADER_BYTES, Kind, MAX_BODY_BYTES};
use super::lanes::{Lane, Lanes, Phase};
use super::verdict::Cause;
use super::{FabricTag, MemberLane};
use crate::error::{Error, Report};
use crate::wire::encode_serde;

/// How much data is taken between two looks at the urgent lane, and given to the stream in one call.
const CHUNK_BYTES: u64 = 256 * 1024;

/// Longest text of a cause that is told, in bytes.
const REPORT_BYTES: usize = 1 << 20;

/// Frames on their way to one process, and how many of its own we have taken.
pub(super) struct Outbox {
    process: usize,
    tag: FabricTag,
    limit: u64,
    lanes: Lanes<Frame>,
    /// Bytes that the stream has taken.
    accepted: AtomicU64,
    /// Bytes of data from there that workers here have taken, and how many of them we have told.
    drained: AtomicU64,
    told: AtomicU64,
}

impl Outbox {
    pub(super) fn new(process: usize, tag: FabricTag, link_bytes: usize) -> Self {
        let limit = link_bytes as u64;
        Outbox {
            process,
            tag,
            limit,
            lanes: Lanes::new(limit),
            accepted: AtomicU64::new(0),
            drained: AtomicU64::new(0),
            told: AtomicU64::new(0),
        }
    }

    pub(super) fn process(&self) -> usize {
        self.process
    }

    fn put(&self, kind: Kind, frame: Frame) -> Phase {
        let lane = match kind {
            Kind::Data => Lane::Data,
            Kind::Behind => Lane::Behind,
            _ => Lane::Urgent,
        };
        self.put_in(lane, frame)
    }

    fn put_in(&self, lane: Lane, frame: Frame) -> Phase {
        let bytes = frame.bytes();
        self.lanes.put(lane, frame, bytes)
    }

    /// Queues a message. Never blocks.
    pub(super) fn send(&self, channel: u64, from: usize, to: usize, lane: Lane, body: Vec<u8>) -> Result<(), Error> {
        if body.len() > MAX_BODY_BYTES {
            return Err(Error::TooLarge { bytes: body.len(), limit: MAX_BODY_BYTES });
        }
        let kind = match lane {
            Lane::Urgent => Kind::Progress,
            Lane::Data | Lane::Mark => Kind::Data,
            Lane::Behind => Kind::Behind,
        };
        match self.put(kind, Frame::new(self.tag, kind, channel, from, to, body)) {
            Phase::Open => Ok(()),
            Phase::Closing => Err(Error::Aborted { worker: from, reason: "this process left the fabric".to_string() }),
            Phase::Departed => Err(Error::PeerLost {
                process: self.process,
                reason: "left before the dataflow was finished".to_string(),
            }),
        }
    }

    /// Tells the other process why this fabric stops. Data that waits is of no use to it any more.
    pub(super) fn send_abort(&self, from: usize, cause: &Cause) {
        let mut body = Vec::new();
        encode_serde(&(cause.origin, Report::of(&cause.error, from).cut(REPORT_BYTES)), &mut body);
        self.lanes.drop_data();
        self.put(Kind::Abort, Frame::new(self.tag, Kind::Abort, 0, from, 0, body));
    }

    /// Tells the other process that a worker leaves after it built this many dataflows.
    pub(super) fn send_leave(&self, from: usize, built: u64) {
        self.put(Kind::Leave, Frame::new(self.tag, Kind::Leave, 0, from, 0, built.to_le_bytes().to_vec()));
    }

    /// Queues a message of a member, behind what is in its lane. A process that has left needs none.
    pub(super) fn send_member(&self, from: usize, to: usize, lane: MemberLane, body: Vec<u8>) -> Result<(), Error> {
        if body.len() > MAX_BODY_BYTES {
            return Err(Error::TooLarge { bytes: body.len(), limit: MAX_BODY_BYTES });
        }
        let (code, queue) = match lane {
            MemberLane::Urgent => (0, Lane::Urgent),
            MemberLane::Data => (1, Lane::Mark),
            MemberLane::Behind => (2, Lane::Behind),
        };
        self.put_in(queue, Frame::new(self.tag, Kind::Member, code, from, to, body));
        Ok(())
    }

    /// Tells a worker there that one here does not join after all.
    pub(super) fn send_given_up(&self, from: usize, to: usize) {
        self.put(Kind::GivenUp, Frame::new(self.tag, Kind::GivenUp, 0, from, to, Vec::new()));
    }

    /// Asks the members of the other process to let workers of this one in.
    pub(super) fn send_ask(&self, ask: &Ask) {
        let mut body = Vec::new();
        encode_serde(ask, &mut body);
        self.put(Kind::Ask, Frame::new(self.tag, Kind::Ask, 0, 0, 0, body));
    }

    /// Tells the other process that this one uses the link, and with how many workers the run began (0: it does not know).
    pub(super) fn send_welcome(&self, founders: usize) {
        let body = (founders as u64).to_le_bytes().to_vec();
        self.put(Kind::Welcome, Frame::new(self.tag, Kind::Welcome, 0, 0, 0, body));
    }

    /// Tells the other process that there is no room for what it asked for.
    pub(super) fn send_crowded(&self, ticket: u64) {
        let body = ticket.to_le_bytes().to_vec();
        self.put(Kind::Crowded, Frame::new(self.tag, Kind::Crowded, 0, 0, 0, body));
    }

    /// Tells the other process that all dataflows are finished.
    pub(super) fn send_over(&self) {
        self.put(Kind::Over, Frame::new(self.tag, Kind::Over, 0, 0, 0, Vec::new()));
    }

    /// Takes what would be written next, without a stream: for simulations, which say whether it is the turn of what is behind data. The phase
    /// once there is nothing.
    pub(super) fn take_frames(&self, frames: &mut Vec<Frame>, behind: bool) -> Option<Phase> {
        self.lanes.favour_behind(behind);
        self.lanes.take(frames, 1, false)
    }

    /// How many frames wait to be taken.
    pub(super) fn waiting(&self) -> usize {
        self.lanes.waiting()
    }

    /// The last frame of a process that leaves.
    pub(super) fn goodbye(&self) -> Frame {
        Frame::new(self.tag, Kind::Goodbye, 0, 0, 0, Vec::new())
    }

    /// Whether the other process has left, or is lost.
    pub(super) fn is_departed(&self) -> bool {
        self.lanes.is_departed()
    }

    pub(super) fn send_beat(&self) {
        self.put(Kind::Beat, Frame::new(self.tag, Kind::Beat, 0, 0, 0, Vec::new()));
    }

    /// Counts data from the other process that a worker here has taken; tells it now and then.
    pub(super) fn take_in(&self, body_bytes: usize) {
        let bytes = (HEADER_BYTES + body_bytes) as u64;
        let drained = self.drained.fetch_add(bytes, Ordering::AcqRel) + bytes;
        // Another worker may have told more by now.
        if drained.saturating_sub(self.told.load(Ordering::Acquire)) >= self.limit / 8 {
            self.tell();
        }
    }

    /// Tells the other process how much of its data was taken, unless it knows.
    pub(super) fn tell(&self) {
        let drained = self.drained.load(Ordering::Acquire);
        // The greatest number wins, whoever of us sends it; the other side takes totals, so order is all that matters,
        // and only who raised the number sends.
        if self.told.fetch_max(drained, Ordering::AcqRel) < drained {
            let body = drained.to_le_bytes().to_vec();
            self.put(Kind::Credit, Frame::new(self.tag, Kind::Credit, 0, 0, 0, body));
        }
    }

    /// The other process has taken this much of our data in all; true when that ended the congestion, `None` when it cannot be.
    pub(super) fn credit(&self, total: u64) -> Option<bool> {
        self.lanes.credit(total)
    }

    /// Whether sources should wait.
    pub(super) fn is_over(&self) -> bool {
        self.lanes.is_over()
    }

    /// Bytes that the stream has taken.
    pub(super) fn accepted(&self) -> u64 {
        self.accepted.load(Ordering::Acquire)
    }

    /// Bytes ever queued, and those of them that the stream has taken; `None` once the other process has left.
    pub(super) fn traffic(&self) -> Option<(u64, u64)> {
        let (accepted, offered) = (self.accepted(), self.lanes.offered());
        (!self.lanes.is_departed()).then_some((offered, accepted))
    }

    /// Ends the sending thread once everything is written.
    pub(super) fn close(&self) {
        self.lanes.close();
    }

    /// The other process said goodbye.
    pub(super) fn depart(&self) {
        self.lanes.depart();
    }

    /// The sending thread: writes until closed or departed. An error after the other side's goodbye is none.
    pub(super) fn run(
        &self,
        stream: Box<dyn Write + Send>,
        hangup: &(dyn Fn(Shutdown) + Send + Sync),
    ) -> io::Result<()> {
        let counted = Counted { stream, accepted: &self.accepted };
        let result = self.write_all(BufWriter::with_capacity(64 * 1024, counted));
        hangup(Shutdown::Write);
        match result {
            Err(_) if self.lanes.is_departed() => Ok(()),
            other => other,
        }
    }

    fn write_all(&self, mut stream: BufWriter<Counted<'_>>) -> io::Result<()> {
        let mut frames = Vec::new();
        loop {
            let idle = match self.lanes.take(&mut frames, CHUNK_BYTES, false) {
                Some(_) => {
                    stream.flush()?;
                    self.lanes.take(&mut frames, CHUNK_BYTES, true)
                }
                None => None,
            };
            for frame in frames.drain(..) {
                stream.write_all(&frame.header)?;
                stream.write_all(&frame.body)?;
            }
            match idle {
                None | Some(Phase::Open) => {}
                Some(Phase::Departed) => return stream.flush(),
                Some(Phase::Closing) => {
                    stream.write_all(&self.goodbye().header)?;
                    return stream.flush();
                }
            }
        }
    }
}

/// Counts what a stream takes, in portions small enough to see it move.
struct Counted<'a> {
    stream: Box<dyn Write + Send>,
    accepted: &'a AtomicU64,
}

impl Write for Counted<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = self.stream.write(&bytes[..bytes.len().min(CHUNK_BYTES as usize)])?;
        self.accepted.fetch_add(taken as u64, Ordering::AcqRel);
        Ok(taken)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outbox(limit: usize) -> Outbox {
        Outbox::new(1, FabricTag { query: 0, generation: 0 }, limit)
    }

    fn send(outbox: &Outbox, lane: Lane, bytes: usize) {
        outbox.send(0, 0, 1, lane, vec![0; bytes - HEADER_BYTES]).expect("an open link");
    }

    #[test]
    fn a_link_is_congested_above_its_limit_until_half_is_free() {
        let outbox = outbox(1000);
        send(&outbox, Lane::Data, 1000);
        send(&outbox, Lane::Urgent, 5000);
        assert!(!outbox.is_over(), "at the limit, and progress does not count");
        send(&outbox, Lane::Data, 100);
        assert!(outbox.is_over());
        assert_eq!((outbox.credit(599), outbox.is_over()), (Some(false), true), "501 of 1000 are under way");
        assert_eq!((outbox.credit(600), outbox.is_over()), (Some(true), false));
        assert_eq!(outbox.credit(1100), Some(false), "nobody waits any more");
        assert_eq!(outbox.credit(1101), None, "more than was sent");
    }

    #[test]
    fn data_goes_before_state_and_state_moves_on() {
        let outbox = outbox(1 << 30);
        let sizes = |outbox: &Outbox| {
            let mut frames = Vec::new();
            outbox.lanes.take(&mut frames, 1, false);
            frames.iter().map(Frame::bytes).collect::<Vec<_>>()
        };
        (0..3).for_each(|_| send(&outbox, Lane::Behind, 1000));
        (0..9).for_each(|_| send(&outbox, Lane::Data, 500));
        send(&outbox, Lane::Urgent, 100);
        assert_eq!(sizes(&outbox), [100]);
        (0..8).for_each(|_| assert_eq!(sizes(&outbox), [500]));
        assert_eq!(sizes(&outbox), [1000], "four times as much data has gone before it");
        assert_eq!(sizes(&outbox), [500]);
        (0..2).for_each(|_| assert_eq!(sizes(&outbox), [1000]));
        assert!(!outbox.is_over() && outbox.credit(4500).is_some(), "only data is charged");
        assert_eq!(outbox.credit(4501), None);
        send(&outbox, Lane::Behind, 1000);
        outbox.send_abort(0, &Cause { origin: 0, error: Error::Setup { reason: "test".to_string() } });
        assert_eq!(sizes(&outbox).len(), 1);
        assert_eq!(sizes(&outbox), [] as [u64; 0], "an abort drops state that waits");
    }

    /// A frame that is too large would be told as a fault of this process.
    #[test]
    fn a_cause_that_is_too_long_is_cut() {
        let outbox = outbox(1 << 20);
        let reason = "\u{20ac}".repeat(REPORT_BYTES);
        let error = Error::Aborted { worker: 3, reason };
        outbox.send_abort(0, &Cause { origin: 0, error });
        let mut frames = Vec::new();
        outbox.lanes.take(&mut frames, 1, false);
        let (_, report): (usize, Report) = crate::wire::decode_serde(&frames[0].body).unwrap();
        let Error::Aborted { worker: 3, reason } = report.into_error() else { panic!("another error") };
        assert_eq!(reason, format!("{}... ({} bytes)", "\u{20ac}".repeat(REPORT_BYTES / 3), 3 * REPORT_BYTES));
    }

    #[test]
    fn what_was_taken_is_told_once_and_in_portions() {
        let outbox = outbox(8000);
        let told = |outbox: &Outbox| {
            let mut frames = Vec::new();
            outbox.lanes.take(&mut frames, 1, false);
            frames.len()
        };
        outbox.take_in(500 - HEADER_BYTES);
        assert_eq!(told(&outbox), 0);
        outbox.take_in(500 - HEADER_BYTES);
        assert_eq!(told(&outbox), 1, "an eighth of the limit");
        outbox.tell();
        assert_eq!(told(&outbox), 0, "it knows");
        outbox.take_in(0);
        outbox.tell();
        assert_eq!(told(&outbox), 1);
    }

    #[test]
    fn an_abort_drops_data_that_waits_and_nothing_else() {
        let outbox = outbox(1 << 20);
        send(&outbox, Lane::Urgent, 300);
        send(&outbox, Lane::Data, 70_000);
        outbox.send_abort(0, &Cause { origin: 0, error: Error::Setup { reason: "test".to_string() } });
        let mut frames = Vec::new();
        while outbox.lanes.take(&mut frames, u64::MAX, false).is_none() {}
        assert_eq!(
            frames.iter().map(|frame| frame.header[5]).collect::<Vec<_>>(),
            [Kind::Progress as u8, Kind::Abort as u8]
        );
        assert_eq!(outbox.lanes.offered(), frames.iter().map(Frame::bytes).sum::<u64>());
    }
}
