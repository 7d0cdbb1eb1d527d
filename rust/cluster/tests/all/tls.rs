//! Encrypted connections: what is on the wire, who is refused, and that nothing else changes.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::{Begin, Driver, SECRET, batch, keys, limits, member_keys, release, until, values};
use penstock_cluster::message::{DrainContext, FeedContext, Which};
use penstock_cluster::session::{HandshakeError, Keys, Limits, Role, Secret, Session};
use penstock_cluster::{ClusterError, Feed, Registry, drain_with};
use serde_json::{Value, json};

const TEXT: &[u8] = b"known to whoever reads it";

fn engine() -> Secret {
    Secret::new(SECRET).unwrap()
}

fn encrypted(count: usize) -> Driver {
    Driver::with_keys(count, limits(), &keys().always_encrypted(), &member_keys().always_encrypted())
}

/// Passes bytes on and keeps those of the client; `change` may change them.
struct Relay {
    address: String,
    seen: Arc<Mutex<Vec<u8>>>,
}

impl Relay {
    fn before(target: &str, change: fn(usize, &mut [u8])) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (target, seen) = (target.to_owned(), Arc::<Mutex<Vec<u8>>>::default());
        let kept = seen.clone();
        thread::spawn(move || {
            let (near, _) = listener.accept().unwrap();
            let far = TcpStream::connect(target).unwrap();
            let (mut back_from, mut back_to) = (far.try_clone().unwrap(), near.try_clone().unwrap());
            let back = thread::spawn(move || {
                let _ = std::io::copy(&mut back_from, &mut back_to);
                let _ = back_to.shutdown(Shutdown::Write);
            });
            let (mut near, mut far, mut bytes) = (near, far, [0; 4096]);
            while let Ok(read @ 1..) = near.read(&mut bytes) {
                let before = kept.lock().unwrap().len();
                kept.lock().unwrap().extend_from_slice(&bytes[..read]);
                change(before, &mut bytes[..read]);
                if far.write_all(&bytes[..read]).is_err() {
                    break;
                }
            }
            let _ = far.shutdown(Shutdown::Write);
            back.join().unwrap();
        });
        Relay { address, seen }
    }
}

fn contains(bytes: &[u8], text: &[u8]) -> bool {
    bytes.windows(text.len()).any(|window| window == text)
}

/// Whether these bytes are records of TLS 1.3 and nothing else: type, legacy version, length.
fn are_records(mut bytes: &[u8]) -> bool {
    while let [kind, 3, 1..=3, high, low, rest @ ..] = bytes {
        let length = usize::from(u16::from_be_bytes([*high, *low]));
        if !(20..=23).contains(kind) || length > (16 << 10) + 256 || rest.len() < length {
            return false;
        }
        bytes = &rest[length..];
    }
    bytes.is_empty()
}

/// Rows whose bytes hold the text.
fn telling() -> arrow_array::RecordBatch {
    let words: Vec<i64> = TEXT.chunks_exact(8).map(|word| i64::from_le_bytes(word.try_into().unwrap())).collect();
    batch(&words)
}

#[test]
fn what_is_on_the_wire_is_tls_and_rows_are_read_by_nobody() {
    for always in [false, true] {
        let mut driver = if always { encrypted(1) } else { Driver::new(1) };
        assert_eq!(driver.start("q", &[0], &Begin::default())[0]["ok"], true);
        let relay = Relay::before(&driver.members[0].address, |_, _| {});
        let feed = Keys::of(&engine(), Role::Feed, "q 0");
        let feed = if always { feed.always_encrypted() } else { feed };
        let rows = telling();
        let fed = Feed::connect(&relay.address, &feed, "q", 0, 0, 1, &rows.schema());
        if always {
            let mut fed = fed.unwrap();
            fed.push(&rows).unwrap();
            assert_eq!(fed.finish().unwrap().rows, 3);
        } else {
            // Who passes on what it reads is not the one who was dialled.
            let error = fed.err().unwrap();
            assert!(matches!(error, ClusterError::Handshake(HandshakeError::Proof)), "{error}");
        }
        let seen = relay.seen.lock().unwrap().clone();
        assert!(!contains(&seen, &TEXT[..24]));
        assert_eq!(contains(&seen, b"pnsk"), !always);
        assert_eq!(are_records(&seen), always);
        driver.close();
    }
}

#[test]
fn members_feeds_drains_and_a_mesh_work_as_without() {
    let mut driver = encrypted(3);
    let started = driver.start("q", &[0, 1, 2], &Begin::default());
    assert!(started.iter().all(|answer| answer["ok"] == true), "{started:?}");
    for epoch in 0..3u64 {
        let scope = format!("q {epoch}");
        let (feed, drain) = (Keys::of(&engine(), Role::Feed, &scope), Keys::of(&engine(), Role::Drain, &scope));
        let (feed, drain) = (feed.always_encrypted(), drain.always_encrypted());
        // Longer than a record, a read and what is encrypted at once.
        let many: Vec<i64> = (0..100_000).collect();
        let context = FeedContext { query: "q".into(), epoch, source: 0, partition: 0, attempt: 1 };
        for place in 0..3 {
            let rows = batch(&many);
            let address = &driver.members[place].address;
            let mut fed = Feed::connect_with(address, &feed, &context, None, &rows.schema(), limits()).unwrap();
            for _ in 0..3 {
                fed.push(&rows).unwrap();
            }
            assert_eq!(fed.finish().unwrap().rows, 300_000);
            assert_eq!(driver.ask(place, &release("q", 1, epoch, &[(0, 1, 300_000)]))["ok"], true);
            let context = DrainContext { query: "q".into(), epoch, piece: 0, which: Which::Rows };
            let read = drain_with(&driver.members[place].address, &drain, &context, None, &limits()).unwrap();
            let batches: Vec<_> = read.map(Result::unwrap).collect();
            assert_eq!(values(&batches), [&many[..], &many, &many].concat());
        }
    }
    driver.close();
}

#[test]
fn who_does_not_encrypt_is_told_and_who_is_of_another_engine_is_not_let_in() {
    let registry = Registry::bind_with("127.0.0.1", 0, None, keys().always_encrypted(), limits()).unwrap();
    let address = registry.address();
    let dial = |keys: &Keys| Session::dial(address, keys, Role::Member, "", &Value::Null, &limits());
    let plain = dial(&keys());
    assert!(matches!(&plain, Err(ClusterError::Handshake(HandshakeError::TlsDue))), "{plain:?}");
    until("it is counted", || registry.metrics().refused_plain == 1);
    let claim = Secret::new(SECRET).unwrap().claim();
    assert!(Session::answers(address, claim, Duration::from_secs(5)).unwrap(), "the engine of the claim is there");
    assert!(!Session::answers(address, claim + 1, Duration::from_secs(5)).unwrap(), "the port is another engine's");
    assert_eq!(registry.metrics().refused_plain, 1, "who only asks is not refused");

    let other = Keys::all(&Secret::new(*b"vutsrqponmlkjihgfedcba9876543210").unwrap()).always_encrypted();
    let stranger = dial(&other);
    assert!(matches!(&stranger, Err(ClusterError::Handshake(HandshakeError::Certificate(_)))), "{stranger:?}");
    assert!(stranger.unwrap_err().is_authentication());
    // Seen from a listener that takes TLS where it is offered.
    let open = Registry::bind("127.0.0.1", 0, None, SECRET).unwrap();
    let session =
        Session::dial(open.address(), &member_keys().always_encrypted(), Role::Member, "", &Value::Null, &limits());
    assert!(session.unwrap().is_encrypted());
    // A task's certificate is no member's: a member that dials it as the registry sees who it is.
    let feed = Keys::of(&engine(), Role::Feed, "q 0").always_encrypted();
    let posing = Session::dial(open.address(), &feed, Role::Member, "", &Value::Null, &limits());
    assert!(matches!(&posing, Err(ClusterError::NoKey { .. })), "{posing:?}");
    registry.close();
    open.close();
}

#[test]
fn garbage_slow_and_oversize_tls_is_refused_and_counted() {
    let bound = |limits| Registry::bind_with("127.0.0.1", 0, None, keys().always_encrypted(), limits).unwrap();
    // Who is refused for what it said is refused long before it is slow.
    let registry = bound(limits());
    let ended = |mut stream: TcpStream| {
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        assert!(rest.len() < 2048 && are_records(&rest), "an alert at most, and no challenge: {} bytes", rest.len());
    };
    let dial = |registry: &Registry| TcpStream::connect(registry.address()).unwrap();
    let mut stream = dial(&registry);
    let _ = stream.write_all(&[&[0x16, 3, 1, 2, 0][..], &[7; 5000]].concat());
    ended(stream);
    until("garbage", || registry.metrics().refused_malformed == 1);
    // A client hello that never ends: more than may come before authentication.
    let mut stream = dial(&registry);
    for _ in 0..4 {
        let _ = stream.write_all(&[&[0x16, 3, 1, 0x20, 0, 1, 0, 0xff, 0xff][..], &[0; 0x2000 - 4]].concat());
    }
    ended(stream);
    until("too much", || registry.metrics().refused_malformed == 2);
    assert_eq!(registry.metrics().accepted, 0);
    registry.close();
    let patience = Duration::from_millis(800);
    let registry = bound(Limits { handshake_time: patience, ..limits() });
    let (began, mut stream) = (Instant::now(), dial(&registry));
    for byte in [0x16, 3, 1, 2, 0].into_iter().chain(std::iter::repeat(0)) {
        if stream.write_all(&[byte]).is_err() {
            break;
        }
        thread::sleep(Duration::from_millis(40));
    }
    assert!(began.elapsed() >= patience / 2);
    until("too slow", || registry.metrics().refused_slow == 1);
    assert_eq!(registry.metrics().accepted, 0);
    registry.close();
}

#[test]
fn a_byte_that_is_changed_on_the_way_ends_the_connection() {
    let mut driver = encrypted(1);
    assert_eq!(driver.start("q", &[0], &Begin::default())[0]["ok"], true);
    // The handshake is over by then; it is some row.
    let relay = Relay::before(&driver.members[0].address, |before, bytes| {
        if before <= 20_000 && before + bytes.len() > 20_000 {
            bytes[20_000 - before] ^= 1;
        }
    });
    let feed = Keys::of(&engine(), Role::Feed, "q 0").always_encrypted();
    let rows = batch(&[7; 20_000]);
    let mut fed = Feed::connect(&relay.address, &feed, "q", 0, 0, 1, &rows.schema()).unwrap();
    let staged = fed.push(&rows).and_then(|()| fed.finish());
    assert!(staged.is_err(), "{staged:?}");
    let stats = driver.ask(0, &json!({"do": "stats", "query": null}));
    assert_eq!(stats["queries"]["q"]["staged_rows"], 0);
    driver.close();
}
