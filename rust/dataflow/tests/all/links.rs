//! Links between processes: bounded, watched, and never in the way of progress.

use std::cell::Cell;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::frames::frame;
use crate::support::{self, Link, join, mesh_with, on_mesh};
use penstock_dataflow::fabric::{self, Duplex, Hangup};
use penstock_dataflow::{
    BoxError, Endpoint, Error, FabricGuard, InputHandle, Limits, OperatorBuilder, Pipeline, Worker, execute,
};
use penstock_progress::probe::ProbeHandle;

/// Limits that a test reaches: far apart, so that one test sees one of them.
fn limits() -> Limits {
    let hour = Duration::from_secs(3600);
    Limits { link_bytes: 1 << 16, beat: Duration::from_millis(20), silence: hour, stall: hour }
}

fn flow(
    worker: &mut Worker,
    name: &str,
    mut each: impl FnMut(usize) + 'static,
) -> (InputHandle<u64, Vec<u64>>, ProbeHandle<u64>) {
    worker.dataflow::<u64, _>(name, |scope| {
        let (handle, stream) = scope.new_input::<Vec<u64>>();
        let read = stream.exchange_by(|value| *value).unary::<u64, _>(Pipeline, "read", |_| {
            move |input, _, _| {
                input.for_each(|_, block: Vec<u64>| each(block.len()));
                Ok(())
            }
        });
        (handle, read.probe().0)
    })
}

fn spin(time: Duration) {
    let end = Instant::now() + time;
    while Instant::now() < end {
        std::hint::spin_loop();
    }
}

/// One byte on the wire per element: all for worker 1.
const BLOCK: usize = 4096;

#[test]
fn a_slow_reader_bounds_its_sender_and_progress_goes_on() {
    const BLOCKS: usize = 400;
    // Blocks sent and not yet read, and the most there ever were.
    let (waiting, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (held, peak) = (waiting.clone(), most.clone());
    let (gate, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let (opened, finished) = (gate.clone(), done.clone());
    let results = on_mesh(mesh_with(2, 1, Link::Tcp, limits()), move |worker: &mut Worker| {
        let (held, read) = (held.clone(), Rc::new(Cell::new(0)));
        let (counted, reader) = (read.clone(), held.clone());
        let (mut bulk, bulk_probe) = flow(worker, "bulk", move |_| {
            spin(Duration::from_micros(200));
            reader.fetch_sub(1, Ordering::SeqCst);
            counted.set(counted.get() + 1);
        });
        let (mut quick, quick_probe) = flow(worker, "quick", |_| ());
        if worker.index() == 0 {
            let mut stalls = 0;
            for _ in 0..BLOCKS {
                if worker.is_congested() {
                    stalls += 1;
                    // Later there may be room again between two looks.
                    assert!(stalls > 1 || bulk.is_congested());
                    // The other dataflow goes on: both workers step it, without room for data.
                    let next = quick.time() + 1;
                    quick.advance_to(next)?;
                    opened.store(true, Ordering::SeqCst);
                    worker.step_until(None, || !quick_probe.less_than(&next))?;
                    worker.wait_for_room()?;
                }
                peak.fetch_max(held.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                bulk.send(vec![1; BLOCK]);
            }
            assert!(stalls > 0, "the bound was never felt");
        } else {
            // Takes nothing before the sender has felt the bound.
            while !opened.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            while !finished.load(Ordering::SeqCst) && !quick_probe.done() {
                let next = *quick.time() + 1;
                quick.advance_to(next)?;
                worker.step_or_park(Some(Duration::from_millis(1)))?;
                if bulk_probe.done() {
                    finished.store(true, Ordering::SeqCst);
                }
                if read.get() == BLOCKS {
                    break;
                }
            }
        }
        bulk.close();
        quick.close();
        while worker.step_or_park(None)? {}
        Ok(read.get())
    });
    let read: Vec<usize> = results.into_iter().map(Result::unwrap).collect();
    assert_eq!(read, [0, BLOCKS]);
    // At most the limit at the sender or in the mailbox, once more what one step took in, and the block that went over.
    let bound = 2 * limits().link_bytes / BLOCK + 2;
    assert!(most.load(Ordering::SeqCst) <= bound, "{most:?} blocks were under way, {bound} allowed");
    drop(done);
}

#[test]
fn an_operator_that_expands_waits_for_room_and_runs_again() {
    const BLOCKS: usize = 400;
    let (waiting, most, full) =
        (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default(), Arc::new(AtomicBool::new(false)));
    let (peak, held) = (most.clone(), waiting.clone());
    let results = on_mesh(mesh_with(2, 1, Link::Tcp, limits()), move |worker: &mut Worker| {
        let (peak, held, full, read) = (peak.clone(), held.clone(), full.clone(), Rc::new(Cell::new(0)));
        let (sent, felt, taken, counted) = (held.clone(), full.clone(), held, read.clone());
        let mut input = worker.dataflow::<u64, _>("expand", |scope| {
            let (input, stream) = scope.new_input::<Vec<u64>>();
            let mut builder = OperatorBuilder::new(scope, "expand");
            let mut given = builder.input(&stream, Pipeline);
            let (mut output, made) = builder.output();
            let (again, here, mut left) = (builder.activator(), scope.clone(), None);
            builder.build(|_| {
                move |_| {
                    while let Some((capability, _)) = given.next() {
                        left = Some((capability.delayed(capability.time())?, BLOCKS));
                    }
                    while let Some((capability, count)) = left.as_mut().filter(|(_, count)| *count > 0) {
                        if !here.has_room(&again) {
                            felt.store(true, Ordering::SeqCst);
                            return Ok(());
                        }
                        *count -= 1;
                        peak.fetch_max(sent.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                        output.session(&*capability).give(vec![1; BLOCK]);
                    }
                    left = None;
                    Ok(())
                }
            });
            made.exchange_by(|value| *value).unary::<u64, _>(Pipeline, "read", |_| {
                move |input, _, _| {
                    input.for_each(|_, _: Vec<u64>| {
                        taken.fetch_sub(1, Ordering::SeqCst);
                        counted.set(counted.get() + 1);
                    });
                    Ok(())
                }
            });
            input
        });
        if worker.index() == 0 {
            input.send(vec![0]);
        }
        input.close();
        // The reader takes nothing before the bound was felt.
        while worker.index() == 1 && !full.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        while worker.step_or_park(None)? {}
        Ok(read.get())
    });
    let read: Vec<usize> = results.into_iter().map(Result::unwrap).collect();
    assert_eq!(read, [0, BLOCKS]);
    let bound = 2 * limits().link_bytes / BLOCK + 2;
    assert!(most.load(Ordering::SeqCst) <= bound, "{most:?} blocks were under way, {bound} allowed");
}

/// Starts process 0 of two against a peer of which only the socket exists.
fn against_socket(limits: Limits) -> (Vec<Endpoint>, FabricGuard, std::net::TcpStream) {
    let (ours, theirs) = support::tcp_pair();
    let streams: Vec<Option<Box<dyn Duplex>>> = vec![None, Some(Box::new(ours))];
    let (endpoints, guard) = fabric::processes_with(0, 1, streams, support::TAG, limits).unwrap();
    (endpoints, guard, theirs)
}

#[test]
fn a_peer_that_stops_reading_is_lost_and_named() {
    let limits = Limits { stall: Duration::from_millis(300), ..limits() };
    let (endpoints, guard, mut stuck) = against_socket(limits);
    let began = Instant::now();
    let threads = execute(endpoints, |worker: &mut Worker| -> Result<(), Error> {
        let (mut input, _probe) = flow(worker, "flow", |_| ());
        // More than the buffers of the system take.
        (0..16).for_each(|_| input.send(vec![1; 1 << 20]));
        while worker.step_or_park(None)? {}
        Ok(())
    });
    let error = join(threads).remove(0).unwrap_err();
    assert!(began.elapsed() >= Duration::from_millis(300));
    // Its link is hung up, so that leaving need not wait for it: what it reads ends before that.
    stuck.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    if let Err(error) = io::copy(&mut stuck, &mut io::sink()) {
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset, "the link is still there");
    }
    let lasted = began.elapsed().as_secs_f64();
    drop(guard);
    let Error::PeerLost { process: 1, reason } = error else { panic!("{error:?}") };
    let words: Vec<&str> = reason.split(' ').collect();
    let ["took", "none", "of", "the", bytes, .., "in", seconds, "s"] = words[..] else { panic!("{reason}") };
    assert!(bytes.parse::<u64>().unwrap() > 0, "{reason}");
    assert!((0.3..lasted + 0.1).contains(&seconds.parse::<f64>().unwrap()), "{reason} after {lasted} s");
}

#[test]
fn a_peer_that_is_connected_but_silent_is_lost() {
    let limits = Limits { silence: Duration::from_millis(200), ..limits() };
    let (endpoints, guard, mut silent) = against_socket(limits);
    let threads = execute(endpoints, |worker: &mut Worker| -> Result<(), Error> {
        let _flow = flow(worker, "flow", |_| ());
        while worker.step_or_park(None)? {}
        Ok(())
    });
    // It reads, so that nothing stalls, but says nothing.
    let reader = std::thread::spawn(move || io::copy(&mut silent, &mut io::sink()).unwrap_or(0));
    let error = join(threads).remove(0).unwrap_err();
    assert!(
        matches!(&error, Error::PeerLost { process: 1, reason } if reason.contains("nothing was heard")),
        "{error:?}"
    );
    drop(guard);
    assert!(reader.join().unwrap() > 0);
}

#[test]
fn the_links_of_a_worker_that_is_busy_for_long_go_on_beating() {
    let (endpoints, guard, mut peer) = against_socket(limits());
    let (begin, begun) = mpsc::channel();
    let (open, gate) = mpsc::channel::<()>();
    let gate = Arc::new(Mutex::new(gate));
    let threads = execute(endpoints, move |worker: &mut Worker| -> Result<(), Error> {
        let (begin, gate) = (begin.clone(), gate.clone());
        let (mut input, _probe) = flow(worker, "flow", move |_| {
            // One operator that lasts until the test has seen what it wants.
            begin.send(()).unwrap();
            let _ = gate.lock().unwrap().recv();
        });
        input.send(vec![0]);
        while worker.step_or_park(None)? {}
        Ok(())
    });
    begun.recv().unwrap();
    // What came before it was busy does not count.
    peer.set_nonblocking(true).unwrap();
    let mut before = Vec::new();
    assert_eq!(peer.read_to_end(&mut before).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    peer.set_nonblocking(false).unwrap();
    peer.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let (beat, mut heard, mut bytes) = (frame(4, 4, 0, 0, 1, None, &[]), Vec::<u8>::new(), [0; 56]);
    while heard.windows(6).filter(|seen| *seen == &beat[..6]).count() < 3 {
        let count = peer.read(&mut bytes).expect("it beats");
        heard.extend(&bytes[..count]);
    }
    drop((open, peer));
    let error = join(threads).remove(0).unwrap_err();
    assert!(matches!(error, Error::PeerLost { process: 1, .. }), "{error:?}");
    drop(guard);
}

#[test]
fn an_idle_link_carries_beats_and_nothing_else() {
    let (endpoints, guard, mut peer) = against_socket(limits());
    let worker = Worker::new(endpoints.into_iter().next().unwrap());
    let mut bytes = [0; 3 * 56];
    peer.read_exact(&mut bytes).unwrap();
    for header in bytes.chunks(56) {
        assert_eq!((header[4], header[5], &header[40..48]), (3, 4, &[0; 8][..]), "version 3, a beat, no body");
    }
    drop(worker);
    // The goodbye of the peer, so that leaving need not linger.
    peer.write_all(&frame(3, 4, 0, 1, 0, None, &[])).unwrap();
    drop(peer);
    drop(guard);
}

#[test]
fn credit_for_what_was_never_sent_breaks_the_protocol() {
    let (endpoints, guard, mut peer) = against_socket(limits());
    peer.write_all(&frame(5, 4, 0, 1, 0, None, &9u64.to_le_bytes())).unwrap();
    let threads = execute(endpoints, |worker: &mut Worker| -> Result<(), Error> {
        let _flow = flow(worker, "flow", |_| ());
        while worker.step_or_park(None)? {}
        Ok(())
    });
    let error = join(threads).remove(0).unwrap_err();
    assert!(matches!(error, Error::Protocol { process: 1, .. }), "{error:?}");
    drop(peer);
    drop(guard);
}

#[test]
fn limits_that_make_no_sense_are_refused() {
    let (milliseconds, nothing) = (Duration::from_millis, Duration::ZERO);
    let millisecond = milliseconds(1);
    for (limits, names) in [
        (Limits { link_bytes: 0, ..limits() }, "link_bytes"),
        (Limits { beat: nothing, ..limits() }, "beat 0ns must be at least 10ms"),
        (Limits { beat: millisecond, silence: 4 * millisecond, ..limits() }, "beat 1ms must be at least 10ms"),
        (Limits { stall: nothing, ..limits() }, "stall 0ns must be at least 40ms"),
        (Limits { stall: milliseconds(39), ..limits() }, "stall 39ms must be at least 40ms"),
        (Limits { silence: milliseconds(79), ..limits() }, "silence 79ms must be at least 80ms"),
        (Limits { beat: Duration::MAX, ..limits() }, "silence 3600s must be at least"),
    ] {
        let Err(Error::Setup { reason }) = fabric::processes_with(0, 1, vec![None], support::TAG, limits) else {
            panic!("accepted {limits:?}")
        };
        assert!(reason.contains(names), "{reason}");
    }
}

#[test]
fn room_wakes_a_parked_source() {
    // The sender parks without a limit in `wait_for_room`; only the credit of its slow peer can wake it.
    let (go, gone) = mpsc::channel::<()>();
    let gone = Arc::new(Mutex::new(gone));
    let go = Arc::new(Mutex::new(Some(go)));
    let results = on_mesh(mesh_with(2, 1, Link::Unix, limits()), move |worker: &mut Worker| -> Result<(), BoxError> {
        let (mut input, _probe) = flow(worker, "flow", |_| ());
        if worker.index() == 0 {
            while !worker.is_congested() {
                input.send(vec![1; BLOCK]);
            }
            drop(go.lock().unwrap().take());
            worker.wait_for_room()?;
            assert!(!worker.is_congested());
        } else {
            let _ = gone.lock().unwrap().recv();
        }
        input.close();
        while worker.step_or_park(None)? {}
        Ok(())
    });
    assert!(results.iter().all(Result::is_ok), "{results:?}");
}

/// A process that hangs when another leaves is given up when it has been silent for as long as it may, and both is told.
#[test]
fn leaving_gives_up_who_is_silent_and_says_so() {
    // The thread that beats may be late by much of it.
    let limits = Limits { silence: Duration::from_secs(3), ..limits() };
    let (endpoints, guard, mut peer) = against_socket(limits);
    endpoints.into_iter().for_each(|seat| drop(Worker::new(seat)));
    let hangs = std::thread::spawn(move || {
        // It lives until it is told goodbye.
        let (mut heard, mut bytes) = (Vec::new(), [0; 4096]);
        let goodbye = frame(3, support::TAG.generation, 0, 0, 0, None, &[]);
        peer.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        while !heard.ends_with(&goodbye) {
            let _ = peer.write_all(&frame(4, support::TAG.generation, 0, 1, 0, None, &[]));
            match peer.read(&mut bytes) {
                Ok(0) => break,
                Ok(count) => heard.extend(&bytes[..count]),
                Err(_) => {}
            }
        }
        peer
    });
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || guard.leave(|text| tell.send(text.to_string()).unwrap()));
    for begins in ["leaving waits for process 1, which", "leaving waits no longer for process 1: nothing was heard"] {
        let text = told.recv_timeout(Duration::from_secs(60)).expect("it waits for ever");
        assert!(text.starts_with(begins), "{text}");
    }
    assert_eq!(told.recv_timeout(Duration::from_secs(60)), Err(mpsc::RecvTimeoutError::Disconnected), "it has left");
    drop(hangs.join().unwrap());
}

/// A link that takes a byte now and then, until it is hung up; the other process has said goodbye when it has taken all.
struct Slow {
    taken: Sender<u8>,
    whole: (Sender<()>, Receiver<()>),
    cut: Arc<AtomicBool>,
}

impl Duplex for Slow {
    fn hangup(&self) -> io::Result<Hangup> {
        let (cut, whole) = (self.cut.clone(), self.whole.0.clone());
        Ok(Box::new(move |how| {
            if how != Shutdown::Write {
                cut.store(true, Ordering::SeqCst);
            }
            let _ = whole.send(());
        }))
    }

    fn split(self: Box<Self>) -> io::Result<(Box<dyn Read + Send>, Box<dyn Write + Send>)> {
        Ok((Box::new(Ended(self.whole.1)), Box::new(Trickle(self.taken, self.cut))))
    }
}

struct Ended(Receiver<()>);

impl Read for Ended {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        let _ = self.0.recv();
        Ok(0)
    }
}

struct Trickle(Sender<u8>, Arc<AtomicBool>);

impl Write for Trickle {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        std::thread::sleep(Duration::from_millis(60));
        if self.1.load(Ordering::SeqCst) {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let _ = self.0.send(bytes[0]);
        Ok(1)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// However long that takes, what waits when a process leaves is sent, with the goodbye behind it.
#[test]
fn leaving_waits_for_a_slow_link() {
    let (taken, bytes) = mpsc::channel();
    let slow = Slow { taken, whole: mpsc::channel(), cut: Arc::default() };
    // No beats.
    let limits = Limits { beat: Duration::from_secs(600), ..limits() };
    let streams: Vec<Option<Box<dyn Duplex>>> = vec![None, Some(Box::new(slow))];
    let (seats, guard) = fabric::processes_with(0, 1, streams, support::TAG, limits).unwrap();
    seats.into_iter().for_each(|seat| drop(Worker::new(seat)));
    drop(guard);
    let leave = frame(6, support::TAG.generation, 0, 0, 0, None, &0u64.to_le_bytes());
    let goodbye = frame(3, support::TAG.generation, 0, 0, 0, None, &[]);
    assert!(bytes.into_iter().eq([leave, goodbye].concat()), "it takes more than a linger time");
}
