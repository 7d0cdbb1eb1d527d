//! The mesh of a generation: its members connect with each other.
//!
//! The lower process dials the higher one, at the data port that serves feeds and drains, too. A dialled member that does not know
//! the generation yet lets the connection wait in its [`Lobby`](super::lobby::Lobby), so nobody has to try twice.
//!
//! Departure: parked dials, for as long as who dialled waits for a first word; so members start in any order. A member meets the others when
//! it has loaded the user's functions. Where that takes so much longer than elsewhere that nobody waits any more, it costs a try: what it
//! has loaded serves the next start, which is in time.

use std::time::{Duration, Instant};

use super::core::{Core, Query};
use crate::error::{ClusterError, Failure};
use crate::host::{Host, Launch};
use crate::message::{MESH_SCOPE, MeshContext, Peer};
use crate::session::{Limits, Session, Stream};

/// What is left for meeting the others however long this one has loaded.
const LEAST: Duration = Duration::from_secs(5);

/// One connection to every other process, None in our own place.
///
/// `began` is when this one was asked to begin, before it has loaded functions.
///
/// # Errors
/// `peer_lost` when a process cannot be reached or does not come in time; `stale_generation` when
/// it has gone on to a newer one, or we have.
pub(super) fn connect<H: Host>(
    core: &Core<H>,
    query: &Query<H>,
    launch: &Launch,
    peers: &[Peer],
    began: Instant,
) -> Result<Vec<Option<Stream>>, Failure> {
    // Others count from when they had loaded, and the next try is for who is late: no need to wait as long once more.
    let deadline = (began + core.limits.mesh_time).max(Instant::now() + LEAST.min(core.limits.mesh_time));
    let generation = launch.stamp.generation;
    let mut mesh: Vec<Option<Stream>> = peers.iter().map(|_| None).collect();
    for (process, peer) in peers.iter().enumerate().skip(launch.process + 1) {
        query.admit(generation)?;
        let left = deadline.saturating_duration_since(Instant::now());
        let limits = Limits { dial_time: left.min(core.limits.dial_time), ..core.limits.clone() };
        let stream = dial(core, launch, process, peer, &limits).map_err(|error| lost(process, peer, error))?;
        mesh[process] = Some(stream);
    }
    for (process, peer) in peers.iter().enumerate().take(launch.process) {
        let key = (launch.query.clone(), generation, process);
        let over = || query.admit(generation).is_err();
        match core.lobby.take(&key, deadline, &over) {
            Some(stream) => mesh[process] = Some(stream),
            None => {
                query.admit(generation)?;
                let waited = format!(
                    "it did not connect within {:?}: there is no way from it to here, or it loads functions for longer than \
                     others; then the next try finds them loaded",
                    core.limits.mesh_time
                );
                return Err(lost(process, peer, ClusterError::Closed(waited)));
            }
        }
    }
    Ok(mesh)
}

fn dial<H: Host>(
    core: &Core<H>,
    launch: &Launch,
    process: usize,
    peer: &Peer,
    limits: &Limits,
) -> Result<Stream, ClusterError> {
    let context = MeshContext {
        query: launch.query.clone(),
        stamp: launch.stamp,
        from: launch.process,
        to: process,
        member: peer.id,
    };
    let context = serde_json::to_value(context).expect("names and numbers are JSON");
    // Who insisted until a crowded peer took the call still waits for its answer.
    let patience = (limits.handshake_time, limits.handshake_time);
    Session::dial_mesh(&peer.address, &core.keys, MESH_SCOPE, &context, limits, patience)
}

fn lost(process: usize, peer: &Peer, error: ClusterError) -> Failure {
    match error {
        ClusterError::Refused(failure) if failure.kind == "stale_generation" => failure,
        error => Failure::new("peer_lost", format!("process {process}: {error}"))
            .with("process", process)
            .with("member", peer.id),
    }
}
