//! The second worker in a process of its own: `penstock-bench --migration-worker`.
//!
//! It reads one line of JSON that says what to do, fills its bins, or takes them in from files that a run before it has left, connects, and says
//! `ready`. `begin` with the nanoseconds since 1970 of the first tick starts it, `end` with a tick says where all stop; both may also
//! come late. It answers with one line, and leaves its bins in a file if it was told to.
//!
//! Invariant: both processes measure from one moment of the machine's clock of the day, so that no message between them is in a latency.

use std::borrow::Cow;
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use penstock_bins::{BoxError, Routing, Shelf, Strategy};
use penstock_dataflow::fabric::{self, Duplex, FabricGuard, FabricTag};
use penstock_dataflow::{Endpoint, Worker, execute};
use serde_json::{Value, json};

use super::course::{Bins, Course, Domain, Driven, End, Tell, WORKERS, decoded, drive, encoded};
use super::seen::Latencies;

/// Which of the two it is.
pub(super) const OTHER: usize = 1;

/// Where a run begins and what it leaves behind.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Place<'a> {
    /// Whether bins are where a migration leads to, and not at home.
    pub(super) moved: bool,
    /// The folder with the files of all workers of the run before; else bins have no counts.
    pub(super) from: Option<&'a Path>,
    /// The folder that bins are left in.
    pub(super) into: Option<&'a Path>,
}

impl Place<'_> {
    pub(super) fn routing(self, domain: Domain) -> Routing {
        if self.moved { domain.moved() } else { domain.home() }
    }

    /// The bins of a worker at its beginning.
    pub(super) fn bins(self, domain: Domain, worker: usize) -> Bins {
        match self.from {
            None => domain.filled(worker),
            Some(folder) => take_in(folder, &self.routing(domain), worker).expect("files that were just written"),
        }
    }

    /// Leaves the bins of a worker behind, if that is wanted.
    pub(super) fn leave(self, worker: usize, bins: Bins) {
        if let Some(folder) = self.into {
            write_out(&file_of(folder, worker), bins).expect("the temporary folder takes files");
        }
    }
}

fn file_of(folder: &Path, worker: usize) -> PathBuf {
    folder.join(format!("worker-{worker}"))
}

/// Each chunk behind its bin and length.
fn write_out(file: &Path, bins: Bins) -> std::io::Result<()> {
    let mut to = BufWriter::with_capacity(1 << 20, File::create(file)?);
    for (bin, chunk) in encoded(bins) {
        to.write_all(&bin.to_le_bytes())?;
        to.write_all(&(chunk.len() as u64).to_le_bytes())?;
        to.write_all(&chunk)?;
    }
    to.flush()
}

/// The bins that a routing gives a worker, of the files of all.
fn take_in(folder: &Path, routing: &Routing, worker: usize) -> std::io::Result<Bins> {
    let mut chunks = Vec::new();
    for number in 0..WORKERS {
        let mut from = BufReader::with_capacity(1 << 20, File::open(file_of(folder, number))?);
        let (mut bin, mut length) = ([0; 4], [0; 8]);
        while from.read_exact(&mut bin).is_ok() {
            from.read_exact(&mut length)?;
            let length = u64::from_le_bytes(length);
            if routing.owner_of(u32::from_le_bytes(bin)) as usize == worker {
                let mut chunk = Vec::new();
                from.by_ref().take(length).read_to_end(&mut chunk)?;
                chunks.push((u32::from_le_bytes(bin), Cow::Owned(chunk)));
            } else {
                from.seek_relative(length as i64)?;
            }
        }
    }
    Ok(decoded(routing, worker, chunks))
}

fn nanoseconds_of(at: Instant) -> i128 {
    let (now, day) = (Instant::now(), SystemTime::now().duration_since(UNIX_EPOCH).expect("it is later than 1970"));
    let ahead = at.saturating_duration_since(now).as_nanos() as i128;
    day.as_nanos() as i128 + ahead - now.saturating_duration_since(at).as_nanos() as i128
}

fn instant_of(nanoseconds: i128) -> Instant {
    let (now, day) = (Instant::now(), SystemTime::now().duration_since(UNIX_EPOCH).expect("it is later than 1970"));
    let ahead = nanoseconds - day.as_nanos() as i128;
    let distance = Duration::from_nanos(u64::try_from(ahead.unsigned_abs()).expect("some seconds"));
    if ahead > 0 { now + distance } else { now.checked_sub(distance).unwrap_or(now) }
}

/// A seat beside another process over a connection.
fn seated(own: usize, stream: TcpStream) -> (Vec<Endpoint>, FabricGuard) {
    stream.set_nodelay(true).expect("a socket of TCP");
    let mut streams: Vec<Option<Box<dyn Duplex>>> = vec![None, None];
    streams[1 - own] = Some(Box::new(stream));
    fabric::processes(own, 1, streams, FabricTag { query: 7, generation: 1 }).expect("two processes over a stream")
}

fn driven(own: usize, stream: TcpStream, course: Course, routing: Routing, bins: Bins) -> (Driven, Bins) {
    let (endpoints, guard) = seated(own, stream);
    let bins = Mutex::new(Some(bins));
    let threads = execute(endpoints, move |worker: &mut Worker| -> Result<_, BoxError> {
        let mine = bins.lock().expect("nobody panics with it").take().expect("there is one worker");
        drive(worker, &course, &routing, mine, Shelf::new(), true)
    });
    let thread = threads.into_iter().next().expect("there is one");
    let made = thread.join().expect("no panic").expect("no worker fails");
    // Waits for the other's end of the connection.
    drop(guard);
    made
}

/// The other process: what it is told, what it says, and a wait for its end.
struct Other {
    tell: Tell,
    said: Box<dyn BufRead>,
    wait: Box<dyn FnOnce()>,
}

#[cfg(not(test))]
fn launched() -> Other {
    use std::process::{Command, Stdio};
    let program = std::env::current_exe().expect("this program has a path");
    let mut command = Command::new(program);
    command.arg("--migration-worker").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("the system grants a process");
    let tell = child.stdin.take().expect("it was asked for");
    let said = child.stdout.take().expect("it was asked for");
    let wait = move || {
        let status = child.wait().expect("it ends");
        assert!(status.success(), "the other process ended with {status}");
    };
    Other { tell: Arc::new(Mutex::new(tell)), said: Box::new(BufReader::new(said)), wait: Box::new(wait) }
}

/// The program of the tests has no such word: there it is a thread that hears and says the same.
#[cfg(test)]
fn launched() -> Other {
    let (heard, tell) = std::io::pipe().expect("the system grants a pipe");
    let (said, say) = std::io::pipe().expect("the system grants a pipe");
    let thread = std::thread::spawn(move || serve(BufReader::new(heard), say));
    let wait = move || thread.join().expect("no panic").expect("it serves");
    Other { tell: Arc::new(Mutex::new(tell)), said: Box::new(BufReader::new(said)), wait: Box::new(wait) }
}

fn tell(to: &Tell, line: &dyn std::fmt::Display) {
    let mut to = to.lock().expect("nobody panics with it");
    writeln!(to, "{line}").and_then(|()| to.flush()).expect("the other process reads");
}

fn heard(from: &mut dyn BufRead) -> Result<String, String> {
    let mut line = String::new();
    match from.read_line(&mut line) {
        Ok(0) => Err("the other process ended".into()),
        Ok(_) => Ok(line.trim().to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// Runs both workers over a course, this one leading; what comes of both, and when its clock began. Without `clock` it is when both have their
/// bins, which for this one are made by `own` meanwhile.
pub(super) fn beside(
    course: &Course,
    place: Place<'_>,
    clock: Option<Instant>,
    own: impl FnOnce() -> Bins,
) -> (Vec<Driven>, Instant) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port of loopback");
    let port = listener.local_addr().expect("it is bound").port();
    let Other { tell: to, mut said, wait } = launched();
    let Domain { keys, bits, skewed } = course.domain;
    let task = json!({
        "port": port, "keys": keys, "bits": bits, "skewed": skewed, "moved": place.moved, "from": place.from,
        "into": place.into, "rows": course.rows, "first": course.first, "rest": course.rest, "paced": course.paced,
        "ship_bytes": course.ship_bytes, "hot_first": course.hot_first,
    });
    tell(&to, &task);
    let (stream, _) = listener.accept().expect("it connects");
    let bins = own();
    assert_eq!(heard(&mut said).as_deref(), Ok(READY));
    let clock = clock.unwrap_or_else(|| course.begins());
    tell(&to, &format!("begin {}", nanoseconds_of(clock)));
    let course = Course { clock, end: End::told_to(to), ..course.clone() };
    let (mine, bins) = driven(0, stream, course.clone(), place.routing(course.domain), bins);
    place.leave(0, bins);
    let answer = heard(&mut said).expect("it answers");
    wait();
    let told = serde_json::from_str(&answer).expect("it answers in JSON");
    (vec![mine, answered(&told).expect("all of its figures")], clock)
}

const READY: &str = "ready";

fn answer(driven: &Driven) -> Value {
    let Driven { blocks, rows, sent, counted, next, added_mib, moves: _ } = driven;
    json!({"blocks": blocks, "rows": rows, "sent": sent, "counted": counted, "next": next, "added_mib": added_mib})
}

fn answered(told: &Value) -> Option<Driven> {
    let latencies = |told: &Value| -> Option<Latencies> {
        told.as_array()?.iter().map(|pair| Some((pair.get(0)?.as_f64()?, pair.get(1)?.as_f64()?))).collect()
    };
    let [one, two, three] = &told["rows"].as_array()?[..] else { return None };
    Some(Driven {
        blocks: latencies(&told["blocks"])?,
        rows: [latencies(one)?, latencies(two)?, latencies(three)?],
        moves: Vec::new(),
        sent: told["sent"].as_u64()?,
        counted: told["counted"].as_u64()?,
        next: told["next"].as_u64()?,
        added_mib: told["added_mib"].as_f64()?,
    })
}

/// The task in a line: the port to connect to, where bins come from and go, and what to do with them.
fn task(told: &Value) -> Option<(u16, bool, [Option<PathBuf>; 2], Course)> {
    let number = |name: &str| told[name].as_u64();
    let folder = |name: &str| told[name].as_str().map(PathBuf::from);
    let domain = Domain { keys: number("keys")?, bits: number("bits")? as u8, skewed: told["skewed"].as_bool()? };
    let course = Course {
        domain,
        rows: number("rows")? as usize,
        clock: Instant::now(),
        first: number("first")?,
        rest: number("rest")?,
        to: Vec::new(),
        strategy: Strategy::Fluid,
        paced: told["paced"].as_bool()?,
        ship_bytes: number("ship_bytes")? as usize,
        hot_first: told["hot_first"].as_bool()?,
        end: End::default(),
    };
    let port = u16::try_from(number("port")?).ok()?;
    Some((port, told["moved"].as_bool()?, [folder("from"), folder("into")], course))
}

/// Is the second worker of a run.
///
/// # Errors
/// What was wrong, for people.
///
/// # Panics
/// When the run fails.
pub fn serve(mut from: impl BufRead + Send + 'static, mut to: impl Write) -> Result<(), String> {
    let line = heard(&mut from)?;
    let told: Value = serde_json::from_str(&line).map_err(|error| format!("{line:?} is no JSON: {error}"))?;
    let (port, moved, [begins, left], mut course) = task(&told).ok_or_else(|| format!("{told} is no task"))?;
    let place = Place { moved, from: begins.as_deref(), into: left.as_deref() };
    let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).map_err(|error| error.to_string())?;
    let bins = place.bins(course.domain, OTHER);
    let mut say = |line: &dyn std::fmt::Display| {
        writeln!(to, "{line}").and_then(|()| to.flush()).map_err(|error| error.to_string())
    };
    say(&READY)?;
    let line = heard(&mut from)?;
    let begin = line.strip_prefix("begin ").and_then(|number| number.parse().ok());
    course.clock = instant_of(begin.ok_or_else(|| format!("{line:?}: no begin"))?);
    let end = course.end.clone();
    let hearing = std::thread::spawn(move || -> Result<(), String> {
        let line = heard(&mut from)?;
        let tick = line.strip_prefix("end ").and_then(|number| number.parse().ok());
        end.set(tick.ok_or_else(|| format!("{line:?}: no end"))?);
        Ok(())
    });
    let (made, bins) = driven(OTHER, stream, course.clone(), place.routing(course.domain), bins);
    hearing.join().map_err(|_| "the thread that hears has panicked")??;
    place.leave(OTHER, bins);
    say(&answer(&made))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_is_the_same_in_both_processes() {
        for at in [Instant::now() + Duration::from_secs(2), Instant::now() - Duration::from_millis(300)] {
            // The least of some: between its two clocks a thread may stand still.
            let apart = || {
                let again = instant_of(nanoseconds_of(at));
                again.max(at) - again.min(at)
            };
            let apart = (0..20).map(|_| apart()).min().unwrap();
            assert!(apart < Duration::from_millis(20), "{apart:?}");
        }
    }

    #[test]
    fn what_no_run_asks_for_is_told() {
        for line in ["", "x", "{}", r#"{"port": 1}"#] {
            assert!(serve(std::io::Cursor::new(format!("{line}\n")), Vec::new()).is_err(), "{line}");
        }
        assert!(answered(&json!({"blocks": [[0.5]], "rows": [[], [], []]})).is_none());
    }

    #[test]
    fn bins_come_back_from_files_where_another_routing_has_them() {
        let folder = std::env::temp_dir().join(format!("penstock-bench-files-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let domain = Domain { keys: 1_000, bits: 4, skewed: false };
        let left = Place { into: Some(&folder), ..Place::default() };
        (0..WORKERS).for_each(|worker| left.leave(worker, left.bins(domain, worker)));
        let found = Place { moved: true, from: Some(&folder), into: None };
        let mut keys = Vec::new();
        for worker in 0..WORKERS {
            for (bin, state) in found.bins(domain, worker) {
                assert_eq!(domain.moved().owner_of(bin) as usize, worker);
                keys.extend(state.iter().map(|(key, _)| *key));
            }
        }
        keys.sort_unstable();
        assert_eq!(keys, (0..1_000).collect::<Vec<_>>());
        std::fs::remove_dir_all(folder).unwrap();
    }
}
