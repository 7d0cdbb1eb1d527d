//! The sending side of a connection between two processes: an outbox, and the thread that empties it.
//!
//! Two lanes: frames of the urgent one (progress, aborts) are written before any data frame that waits, so progress is never
//! stuck behind a full data buffer. Within a lane the order is kept.

use std::collections::VecDeque;
use std::io::{self, BufWriter, Write};
use std::net::Shutdown;
use std::sync::{Condvar, Mutex, MutexGuard};

use super::frame::{Frame, HEADER_BYTES, Kind, MAX_BODY_BYTES};
use super::{FabricTag, Lane};
use crate::error::{Error, Report};
use crate::wire::encode_serde;

/// How much data is taken between two looks at the urgent lane.
const CHUNK_BYTES: usize = 256 * 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Frames are accepted.
    Open,
    /// This process leaves: what waits is sent, then the goodbye.
    Closing,
    /// The other process said goodbye: nothing more is sent to it.
    Departed,
}

struct Lanes {
    urgent: VecDeque<Frame>,
    data: VecDeque<Frame>,
    phase: Phase,
}

/// Frames on their way to one process.
pub(super) struct Outbox {
    process: usize,
    tag: FabricTag,
    lanes: Mutex<Lanes>,
    ready: Condvar,
}

impl Outbox {
    pub(super) fn new(process: usize, tag: FabricTag) -> Self {
        let lanes = Lanes { urgent: VecDeque::new(), data: VecDeque::new(), phase: Phase::Open };
        Outbox { process, tag, lanes: Mutex::new(lanes), ready: Condvar::new() }
    }

    pub(super) fn process(&self) -> usize {
        self.process
    }

    fn lanes(&self) -> MutexGuard<'_, Lanes> {
        self.lanes.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn put(&self, kind: Kind, frame: Frame) -> Phase {
        let mut lanes = self.lanes();
        if lanes.phase == Phase::Open {
            match kind {
                Kind::Data => lanes.data.push_back(frame),
                _ => lanes.urgent.push_back(frame),
            }
            drop(lanes);
            self.ready.notify_one();
            return Phase::Open;
        }
        lanes.phase
    }

    /// Queues a message. Never blocks.
    pub(super) fn send(&self, channel: u64, from: usize, to: usize, lane: Lane, body: Vec<u8>) -> Result<(), Error> {
        if body.len() > MAX_BODY_BYTES {
            return Err(Error::TooLarge { bytes: body.len(), limit: MAX_BODY_BYTES });
        }
        let kind = match lane {
            Lane::Progress => Kind::Progress,
            Lane::Data => Kind::Data,
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

    /// Tells the other process why this fabric stops.
    pub(super) fn send_abort(&self, from: usize, error: &Error) {
        let mut body = Vec::new();
        encode_serde(&Report::of(error, from), &mut body);
        self.put(Kind::Abort, Frame::new(self.tag, Kind::Abort, 0, from, 0, body));
    }

    /// Ends the sending thread once everything is written.
    pub(super) fn close(&self) {
        let mut lanes = self.lanes();
        if lanes.phase == Phase::Open {
            lanes.phase = Phase::Closing;
        }
        drop(lanes);
        self.ready.notify_one();
    }

    /// The other process said goodbye.
    pub(super) fn depart(&self) {
        let mut lanes = self.lanes();
        lanes.phase = Phase::Departed;
        lanes.urgent.clear();
        lanes.data.clear();
        drop(lanes);
        self.ready.notify_one();
    }

    fn is_departed(&self) -> bool {
        self.lanes().phase == Phase::Departed
    }

    /// Takes what is to be written next; the phase says what to do when that is nothing.
    fn take(&self, frames: &mut Vec<Frame>, may_wait: bool) -> Option<Phase> {
        let mut lanes = self.lanes();
        loop {
            if !lanes.urgent.is_empty() {
                frames.extend(lanes.urgent.drain(..));
                return None;
            }
            if !lanes.data.is_empty() {
                let mut bytes = 0;
                while bytes < CHUNK_BYTES
                    && let Some(frame) = lanes.data.pop_front()
                {
                    bytes += HEADER_BYTES + frame.body.len();
                    frames.push(frame);
                }
                return None;
            }
            if lanes.phase != Phase::Open || !may_wait {
                return Some(lanes.phase);
            }
            lanes = self.ready.wait(lanes).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
    }

    /// The sending thread: writes until closed or departed. An error after the other side's goodbye is none.
    pub(super) fn run(
        &self,
        stream: Box<dyn Write + Send>,
        hangup: &(dyn Fn(Shutdown) + Send + Sync),
    ) -> io::Result<()> {
        let result = self.write_all(BufWriter::with_capacity(64 * 1024, stream));
        hangup(Shutdown::Write);
        match result {
            Err(_) if self.is_departed() => Ok(()),
            other => other,
        }
    }

    fn write_all(&self, mut stream: BufWriter<Box<dyn Write + Send>>) -> io::Result<()> {
        let mut frames = Vec::new();
        loop {
            let idle = match self.take(&mut frames, false) {
                Some(_) => {
                    stream.flush()?;
                    self.take(&mut frames, true)
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
                    stream.write_all(&Frame::new(self.tag, Kind::Goodbye, 0, 0, 0, Vec::new()).header)?;
                    return stream.flush();
                }
            }
        }
    }
}
