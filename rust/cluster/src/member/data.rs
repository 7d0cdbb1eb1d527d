//! The data port: feeds bring rows, drains fetch results, other members build meshes.

use std::time::Duration;

use arrow_array::RecordBatch;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::core::{Core, Query};
use crate::columns::{Decoder, Encoder, difference, under};
use crate::error::{ClusterError, Failure};
use crate::host::{Host, Rows};
use crate::message::{DrainContext, FeedContext, MESH_SCOPE, MeshContext, StreamEnd};
use crate::session::{Accepted, Kind, Role, Session};
use crate::spill::SpillError;

/// How long a peer may take to read why it was refused.
const REFUSAL_PATIENCE: Duration = Duration::from_secs(5);

/// Serves one authenticated connection to its end.
pub(super) fn serve<H: Host>(accepted: Accepted, core: &Core<H>) {
    let Accepted { session, role, scope, context } = accepted;
    match role {
        Role::Feed => feed(session, &scope, &context, core),
        Role::Drain => drain(session, &scope, &context, core),
        Role::Mesh => mesh(session, &scope, &context, core),
        // The acceptor lets nobody else in.
        Role::Member => {}
    }
}

fn parse<T: DeserializeOwned>(context: &[u8]) -> Result<T, Failure> {
    serde_json::from_slice(context).map_err(|error| Failure::new("protocol", error.to_string()))
}

/// Whoever has proved a key for one thing does not get another.
fn within<H: Host>(core: &Core<H>, scope: &str, wanted: &str) -> Result<(), Failure> {
    if scope == wanted {
        return Ok(());
    }
    core.metrics.refuse(&core.metrics.refused_role);
    Err(Failure::new("wrong_scope", format!("the key is for {scope:?}, not for {wanted:?}")))
}

fn refuse(mut session: Session, failure: Failure) {
    // The peer may be gone; then there is nobody to tell.
    let _ = session.answer(&Err(failure));
    session.linger(REFUSAL_PATIENCE);
}

/// Takes an attempt out of the list of those that arrive, unless it was kept.
struct Ticket<'a, H: Host> {
    query: &'a Query<H>,
    context: &'a FeedContext,
    number: u64,
}

impl<H: Host> Drop for Ticket<'_, H> {
    fn drop(&mut self) {
        self.query.staging().abandon(self.context, self.number);
    }
}

fn feed<H: Host>(mut session: Session, scope: &str, context: &[u8], core: &Core<H>) {
    let opened = parse::<FeedContext>(context).and_then(|context| {
        within(core, scope, &context.scope())?;
        let query = core.query(&context.query)?;
        let program = query.program()?;
        let reader = session.try_clone().map_err(|error| Failure::new("protocol", error.to_string()))?;
        let number = query.staging().open(&context, move || reader.stop_reading())?;
        Ok((context, query, program, number))
    });
    let (context, query, program, number) = match opened {
        Ok(opened) => opened,
        Err(failure) => return refuse(session, failure),
    };
    let ticket = Ticket { query: &query, context: &context, number };
    if session.answer(&Ok(json!({ "ok": true, "member": core.member }))).is_err() {
        return;
    }
    let staged = gather(&mut session, core, &query, &program, context.source).and_then(|gathered| match gathered {
        Some((batches, end, latest)) => {
            query.staging().keep(&context, number, batches)?;
            Ok(Some((end, latest)))
        }
        // Broken off here, which it is told, or there.
        None => query.staging().still_arriving(&context, number).map(|()| None),
    });
    // Before the peer hears about it: it may try again at once.
    drop(ticket);
    let (end, max_event_time) = match staged {
        Ok(Some(staged)) => staged,
        Ok(None) => return,
        Err(failure) => return refuse(session, failure),
    };
    let receipt = json!({
        "ok": true,
        "rows": end.rows,
        "checksum": end.checksum,
        "max_event_time": max_event_time,
        "member": core.member,
    });
    // If the feed does not get its receipt it fails, and its attempt is never released.
    if session.answer(&Ok(receipt)).is_ok() {
        session.linger(REFUSAL_PATIENCE);
    }
}

type Gathered = (Vec<Rows>, StreamEnd, Option<i64>);

/// Reads a whole stream of rows and keeps them, each batch before the next frame is read; None when the feed broke off.
fn gather<H: Host>(
    session: &mut Session,
    core: &Core<H>,
    query: &Query<H>,
    program: &H::Program,
    source: u8,
) -> Result<Option<Gathered>, Failure> {
    let malformed = |error: ClusterError| Failure::new("protocol", error.to_string());
    let expected = core.host.input_schema(program, source)?;
    let mut decoder = Decoder::default();
    let (mut batches, mut arrived) = (Vec::new(), Vec::new());
    let (mut checked, mut latest) = (false, None);
    loop {
        let frame = match session.receive() {
            Ok(Some(frame)) => frame,
            Ok(None) => return Ok(None),
            Err(error) => return Err(malformed(error)),
        };
        let end = match frame.kind {
            Kind::Data => {
                decoder.push(frame.payload, &mut arrived).map_err(malformed)?;
                None
            }
            Kind::End => {
                let body = frame.into_body().map_err(|error| malformed(error.into()))?;
                let end = serde_json::from_value::<StreamEnd>(body.json);
                Some(end.map_err(|error| Failure::new("protocol", error.to_string()))?)
            }
            other => return Err(Failure::new("protocol", format!("{other:?} within a feed"))),
        };
        if !checked && let Some(schema) = decoder.schema() {
            if let Some(what) = difference(&expected, &schema) {
                return Err(Failure::new("schema", what));
            }
            checked = true;
        }
        for batch in arrived.drain(..) {
            decoder.count(batch.num_rows());
            let batch = under(&expected, batch).map_err(|error| Failure::new("schema", error.to_string()))?;
            latest = latest.max(core.host.max_event_time(program, source, &batch)?);
            if batch.num_rows() > 0 {
                batches.extend(query.shelf.stage(batch).map_err(|error| error.to_failure())?);
            }
        }
        if let Some(end) = end {
            let end = decoder.finish(end).map_err(malformed)?;
            return Ok(Some((batches, end, latest)));
        }
    }
}

/// Takes a read out of the list of those that are under way.
struct Reading<'a, H: Host> {
    query: &'a Query<H>,
    ticket: u64,
}

impl<H: Host> Drop for Reading<'_, H> {
    fn drop(&mut self) {
        self.query.outputs().ended(self.ticket);
    }
}

fn drain<H: Host>(mut session: Session, scope: &str, context: &[u8], core: &Core<H>) {
    let opened = parse::<DrainContext>(context).and_then(|context| {
        within(core, scope, &context.scope())?;
        let query = core.query(&context.query)?;
        let program = query.program()?;
        let writer = session.try_clone().map_err(|error| Failure::new("protocol", error.to_string()))?;
        let (ticket, blocks) = query.outputs().read(&context, move || writer.shutdown())?;
        Ok((context, query, program, ticket, blocks))
    });
    let (context, query, program, ticket, blocks) = match opened {
        Ok(opened) => opened,
        Err(failure) => return refuse(session, failure),
    };
    let reading = Reading { query: &query, ticket };
    let beside = context.which == crate::message::Which::Beside;
    let first = blocks.first().map(read).transpose();
    let schema = match first.map(|first| first.map(|batch| batch.schema())) {
        Ok(schema) => schema.unwrap_or_else(|| core.host.output_schema(&program, beside)),
        Err(failure) => return refuse(session, failure),
    };
    let mut pour = || -> Result<(), ClusterError> {
        session.answer(&Ok(json!({ "ok": true, "member": core.member })))?;
        // A sink may take its time for each row, and reads no more until then: that is not what silence is.
        session.set_write_timeout(None)?;
        let mut encoder = Encoder::new(&schema)?;
        for rows in &*blocks {
            match read(rows) {
                Ok(batch) => encoder.push(&mut session, &batch)?,
                // In the place of the next rows.
                Err(failure) => return session.answer(&Err(failure)),
            }
        }
        encoder.finish(&mut session)?;
        Ok(())
    };
    let poured = pour();
    // What was sent is sent: nobody has to break that off.
    drop((reading, blocks));
    // A drain that broke off has an incomplete stream and knows it.
    if poured.is_ok() {
        session.linger(REFUSAL_PATIENCE);
    }
}

fn read(rows: &Rows) -> Result<RecordBatch, Failure> {
    rows.read().map_err(|error| match error.downcast_ref::<SpillError>() {
        Some(spill) => spill.to_failure(),
        None => Failure::new("storage", error.to_string()),
    })
}

fn mesh<H: Host>(mut session: Session, scope: &str, context: &[u8], core: &Core<H>) {
    let admitted = parse::<MeshContext>(context).and_then(|context| {
        within(core, scope, MESH_SCOPE)?;
        if context.member != core.member {
            let message = format!("this is member {}, not {}", core.member, context.member);
            return Err(Failure::new("wrong_member", message));
        }
        if let Ok(query) = core.query(&context.query) {
            query.admit(context.stamp.generation)?;
        }
        Ok(context)
    });
    let context = match admitted {
        Ok(context) => context,
        Err(failure) => {
            core.metrics.refuse(&core.metrics.refused_stale);
            return refuse(session, failure);
        }
    };
    let accepted: Result<Value, Failure> = Ok(json!({ "ok": true, "member": core.member }));
    if session.answer(&accepted).is_err() {
        return;
    }
    let Ok(stream) = session.into_stream() else { return };
    let MeshContext { query, stamp, from, .. } = context;
    let generation = stamp.generation;
    // A lobby that is full drops the connection: its dialler sees a lost peer.
    let _ = core.lobby.offer((query.clone(), generation, from), stream, core.limits.parked());
    if core.query(&query).is_ok_and(|query| query.admit(generation).is_err()) {
        // The generation ended between the question and the offer.
        core.lobby.wake(&query, generation);
    }
}
