//! Connections that must change nothing: on the registry and on a member's data port.

mod common;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use common::{Begin, Driver, PATIENCE, SECRET, batch, limits, release, until};
use penstock_cluster::session::{Client, HandshakeError, Limits, MetricsSnapshot, Role, Secret, Server, Session};
use penstock_cluster::{ClusterError, Feed, Registry, RegistryEvent};
use serde_json::{Value, json};

const HEADER_BYTES: usize = 8;
const NONCE_BYTES: usize = 32;
/// Shortened, so that slow attackers do not make slow tests.
const PATIENCE_WITH_ATTACKERS: Duration = Duration::from_millis(1200);

fn secret() -> Secret {
    Secret::new(SECRET).unwrap()
}

fn wrong() -> Secret {
    Secret::new(*b"vutsrqponmlkjihgfedcba9876543210").unwrap()
}

fn dial(address: &str) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Reads one handshake message.
fn message(stream: &mut TcpStream) -> Vec<u8> {
    let mut bytes = vec![0; HEADER_BYTES];
    stream.read_exact(&mut bytes).unwrap();
    let length = u16::from_le_bytes([bytes[6], bytes[7]]);
    bytes.resize(HEADER_BYTES + usize::from(length), 0);
    stream.read_exact(&mut bytes[HEADER_BYTES..]).unwrap();
    bytes
}

fn proof(body: &[u8]) -> Vec<u8> {
    let mut bytes = b"pnsk\x01\x03".to_vec();
    bytes.extend_from_slice(&(body.len() as u16).to_le_bytes());
    bytes.extend_from_slice(body);
    bytes
}

/// The other side has ended the connection without saying anything more.
fn ended(mut stream: TcpStream) {
    let mut rest = Vec::new();
    // A reset is an end, too: it is what unread input turns a close into.
    let _ = stream.read_to_end(&mut rest);
    assert_eq!(rest, b"");
}

/// A conversation that succeeds; returns what the client said.
fn record(address: &str, role: Role, context: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let mut stream = dial(address);
    let (client, hello) = Client::hello(&secret(), role, context, [3; NONCE_BYTES]);
    stream.write_all(&hello).unwrap();
    let answer = client.answer(&message(&mut stream)).unwrap();
    stream.write_all(&answer).unwrap();
    (hello, answer)
}

/// One attack: the counter that it must raise.
type Attack = (&'static str, fn(&str, Role), fn(&MetricsSnapshot) -> u64);

const ATTACKS: &[Attack] = &[
    ("no secret", no_secret, |m| m.refused_secret),
    ("a forged proof", forged, |m| m.refused_secret),
    ("a replayed conversation", replayed, |m| m.refused_secret),
    ("a reflected proof", reflected, |m| m.refused_secret),
    ("another secret, honestly", honest, |m| m.refused_malformed),
    ("a hello cut short", cut_hello, |m| m.refused_malformed),
    ("no proof", no_proof, |m| m.refused_malformed),
    ("too much", oversize, |m| m.refused_malformed),
    ("too slow", slow, |m| m.refused_slow),
    ("silent", silent, |m| m.refused_slow),
    ("garbage", garbage, |m| m.refused_malformed),
    ("another protocol", http, |m| m.refused_malformed),
    ("another version", version, |m| m.refused_malformed),
    ("an unknown role", unknown_role, |m| m.refused_malformed),
    ("a proof first", proof_first, |m| m.refused_malformed),
];

fn no_secret(address: &str, role: Role) {
    let mut stream = dial(address);
    let (_, hello) = Client::hello(&wrong(), role, b"", [1; NONCE_BYTES]);
    stream.write_all(&hello).unwrap();
    message(&mut stream);
    stream.write_all(&proof(&[0; 32])).unwrap();
    ended(stream);
}

fn forged(address: &str, role: Role) {
    let mut stream = dial(address);
    let (client, hello) = Client::hello(&wrong(), role, b"", [1; NONCE_BYTES]);
    stream.write_all(&hello).unwrap();
    let challenge = message(&mut stream);
    // Make the client believe the server, so that it answers with its own secret.
    let nonce = challenge[HEADER_BYTES..][..NONCE_BYTES].try_into().unwrap();
    let (_, believed) = Server::challenge(&wrong(), &hello, nonce).unwrap();
    stream.write_all(&client.answer(&believed).unwrap()).unwrap();
    ended(stream);
}

fn replayed(address: &str, role: Role) {
    let (hello, answer) = record(address, role, b"null");
    let mut stream = dial(address);
    stream.write_all(&hello).unwrap();
    message(&mut stream);
    stream.write_all(&answer).unwrap();
    ended(stream);
}

fn reflected(address: &str, role: Role) {
    let mut stream = dial(address);
    let (_, hello) = Client::hello(&secret(), role, b"", [1; NONCE_BYTES]);
    stream.write_all(&hello).unwrap();
    let challenge = message(&mut stream);
    stream.write_all(&proof(&challenge[HEADER_BYTES + NONCE_BYTES..])).unwrap();
    ended(stream);
}

fn honest(address: &str, role: Role) {
    let error = Session::dial(address, &wrong(), role, &Value::Null, &limits()).unwrap_err();
    assert!(error.is_authentication(), "{error}");
}

fn cut_hello(address: &str, role: Role) {
    let mut stream = dial(address);
    let (_, hello) = Client::hello(&secret(), role, b"", [1; NONCE_BYTES]);
    stream.write_all(&hello[..hello.len() - 1]).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    ended(stream);
}

fn no_proof(address: &str, role: Role) {
    let mut stream = dial(address);
    let (_, hello) = Client::hello(&secret(), role, b"", [1; NONCE_BYTES]);
    stream.write_all(&hello).unwrap();
    message(&mut stream);
}

fn oversize(address: &str, role: Role) {
    let mut stream = dial(address);
    let (_, hello) = Client::hello(&secret(), role, &[b' '; 4096], [1; NONCE_BYTES]);
    let began = Instant::now();
    // Only what announces the length: nobody waits for the rest.
    stream.write_all(&hello[..HEADER_BYTES]).unwrap();
    ended(stream);
    assert!(began.elapsed() < PATIENCE_WITH_ATTACKERS);
}

fn slow(address: &str, role: Role) {
    let mut stream = dial(address);
    let (_, hello) = Client::hello(&secret(), role, b"", [1; NONCE_BYTES]);
    let began = Instant::now();
    // A byte now and then buys no time.
    for byte in hello {
        thread::sleep(Duration::from_millis(60));
        if stream.write_all(&[byte]).is_err() {
            break;
        }
    }
    assert!(began.elapsed() >= PATIENCE_WITH_ATTACKERS);
    ended(stream);
}

fn silent(address: &str, _: Role) {
    ended(dial(address));
}

fn garbage(address: &str, _: Role) {
    let mut stream = dial(address);
    let mut state = 1u32;
    let bytes: Vec<u8> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    })
    .take(100_000)
    .collect();
    let _ = stream.write_all(&bytes);
    ended(stream);
}

fn http(address: &str, _: Role) {
    let mut stream = dial(address);
    stream.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    ended(stream);
}

fn version(address: &str, role: Role) {
    let mut stream = dial(address);
    let (_, mut hello) = Client::hello(&secret(), role, b"", [1; NONCE_BYTES]);
    hello[4] = 2;
    stream.write_all(&hello).unwrap();
    ended(stream);
}

fn unknown_role(address: &str, role: Role) {
    let mut stream = dial(address);
    let (_, mut hello) = Client::hello(&secret(), role, b"", [1; NONCE_BYTES]);
    hello[HEADER_BYTES] = 200;
    stream.write_all(&hello).unwrap();
    ended(stream);
}

fn proof_first(address: &str, _: Role) {
    let mut stream = dial(address);
    stream.write_all(&proof(&[0; 32])).unwrap();
    ended(stream);
}

#[test]
fn hostile_handshakes_are_refused_and_counted_and_change_nothing() {
    let mut driver = Driver::with(1, Limits { handshake_time: PATIENCE_WITH_ATTACKERS, ..limits() });
    assert_eq!(driver.start("q", &[0], &Begin::default())[0]["ok"], true);
    let member = driver.members[0].address.clone();
    let registry = driver.registry.address().to_owned();
    let mut refused = 0;
    for (what, attack, counter) in ATTACKS {
        let before = driver.registry.metrics();
        attack(&registry, Role::Member);
        until(what, || driver.registry.metrics().refused > before.refused);
        let after = driver.registry.metrics();
        assert_eq!(after.refused, before.refused + 1, "{what}");
        assert_eq!(counter(&after), counter(&before) + 1, "{what}: {after:?}");

        attack(&member, Role::Drain);
        refused += 1;
        let deadline = Instant::now() + PATIENCE;
        loop {
            let stats = driver.ask(0, &json!({"do": "stats", "query": null}));
            if stats["process"]["refused_connections"] == refused {
                break;
            }
            assert!(Instant::now() < deadline, "{what} is not counted: {stats}");
        }
    }
    // A member that only authenticates and then leaves is no member.
    let events = driver.registry.poll(Duration::ZERO);
    assert!(!events.iter().any(|event| matches!(event, RegistryEvent::Joined { .. })), "{events:?}");
    assert_eq!(driver.registry.members().len(), 1);
    assert_eq!(driver.ask(0, &release("q", 1, 0, &[]))["ok"], true);
    let place = driver.join();
    assert_eq!(driver.ask(place, &json!({"do": "stats"}))["ok"], true);
    driver.close();
}

#[test]
fn roles_are_served_on_their_own_port_only() {
    let driver = Driver::new(1);
    let kind = |address: &str, role| {
        let mut session = Session::dial(address, &secret(), role, &Value::Null, &limits()).unwrap();
        match session.receive_answer() {
            Err(ClusterError::Refused(failure)) => failure.kind,
            other => panic!("{other:?}"),
        }
    };
    for role in [Role::Feed, Role::Drain, Role::Mesh] {
        assert_eq!(kind(driver.registry.address(), role), "wrong_role");
    }
    assert_eq!(driver.registry.metrics().refused_role, 3);
    assert_eq!(kind(&driver.members[0].address, Role::Member), "wrong_role");
    // The right role with a context that says nothing.
    for role in [Role::Feed, Role::Drain, Role::Mesh] {
        assert_eq!(kind(&driver.members[0].address, role), "protocol");
    }
    driver.close();
}

#[test]
fn frames_that_members_do_not_send_end_that_member_only() {
    use penstock_cluster::session::Kind;
    let mut driver = Driver::new(1);
    let bad: [fn(&mut Session); 4] = [
        |session| session.send(Kind::Data, &[b"rows"]).unwrap(),
        |session| session.send_body(Kind::Reply, 999, "{}", &[]).unwrap(),
        |session| session.send(Kind::Reply, &[b"short"]).unwrap(),
        |session| session.send_body(Kind::Join, 0, "{}", &[]).unwrap(),
    ];
    for send in bad {
        let address = driver.registry.address().to_owned();
        let mut session = Session::dial(&address, &secret(), Role::Member, &Value::Null, &limits()).unwrap();
        session.send_body(Kind::Join, 0, "{}", &[]).unwrap();
        let member = session.receive_answer().unwrap()["member"].as_u64().unwrap();
        send(&mut session);
        driver.await_event(|event| matches!(event, RegistryEvent::Lost { member: lost, .. } if *lost == member));
    }
    assert_eq!(driver.ask(0, &json!({"do": "stats"}))["ok"], true);
    driver.close();
}

#[test]
fn at_most_64_connections_may_be_unauthenticated_a_quarter_of_them_from_known_hosts() {
    let limits = Limits { handshake_time: PATIENCE, ..Limits::default() };
    assert_eq!(limits.pending, 64);
    let registry = Registry::bind_with("127.0.0.1", 0, None, SECRET, limits.clone()).unwrap();
    for room in [48, 64] {
        let before = registry.metrics();
        let idle: Vec<TcpStream> = (0..room).map(|_| dial(registry.address())).collect();
        // They are accepted in order, so this one is one too many.
        ended(dial(registry.address()));
        assert_eq!(registry.metrics().refused_crowded, before.refused_crowded + 1);
        let turned_away = Session::dial(
            registry.address(),
            &secret(),
            Role::Member,
            &Value::Null,
            &Limits { dial_time: Duration::ZERO, ..limits.clone() },
        );
        assert!(matches!(turned_away, Err(ClusterError::TurnedAway { tries: 1, .. })), "{turned_away:?}");
        assert_eq!(registry.metrics().refused, before.refused + 2);
        drop(idle);
        until("room again", || registry.metrics().refused_malformed == before.refused_malformed + room);
        // From now on this host is known.
        Session::dial(registry.address(), &secret(), Role::Member, &Value::Null, &limits).unwrap();
        until("the proof is seen", || registry.metrics().accepted == before.accepted + 1);
    }
    registry.close();
}

#[test]
fn an_honest_dial_that_is_turned_away_comes_back() {
    let limits = Limits { handshake_time: PATIENCE, dial_time: PATIENCE, pending: 4, ..limits() };
    let registry = Registry::bind_with("127.0.0.1", 0, None, SECRET, limits.clone()).unwrap();
    let idle: Vec<TcpStream> = (0..3).map(|_| dial(registry.address())).collect();
    let address = registry.address();
    thread::scope(|scope| {
        let dials: Vec<_> = (0..8)
            .map(|_| scope.spawn(|| Session::dial(address, &secret(), Role::Member, &Value::Null, &limits)))
            .collect();
        until("all are turned away, some again", || registry.metrics().refused_crowded > 16);
        assert_eq!(registry.metrics().accepted, 0);
        drop(idle);
        dials.into_iter().for_each(|dial| drop(dial.join().unwrap().unwrap()));
    });
    until("the other side has seen it too", || registry.metrics().accepted == 8);
    registry.close();
}

#[test]
fn many_feeds_at_a_member_with_few_seats_all_arrive() {
    let mut driver = Driver::with(1, Limits { pending: 2, ..limits() });
    assert_eq!(driver.start("q", &[0], &Begin::default())[0]["ok"], true);
    let address = driver.members[0].address.clone();
    // While these two do not speak there is no seat for anybody else.
    let idle = [dial(&address), dial(&address)];
    let refused = |driver: &mut Driver| {
        driver.ask(0, &json!({"do": "stats", "query": null}))["process"]["refused_connections"].as_u64().unwrap()
    };
    thread::scope(|scope| {
        let feeds: Vec<_> = (0..40u32)
            .map(|partition| {
                let address = &address;
                scope.spawn(move || -> Result<u64, ClusterError> {
                    let rows = batch(&[i64::from(partition)]);
                    let mut feed = Feed::connect(address, SECRET, "q", 0, partition, 1, &rows.schema())?;
                    feed.push(&rows)?;
                    Ok(feed.finish()?.rows)
                })
            })
            .collect();
        until("all are turned away, some again", || refused(&mut driver) > 80);
        drop(idle);
        for feed in feeds {
            assert_eq!(feed.join().unwrap().unwrap(), 1);
        }
    });
    driver.close();
}

#[test]
fn a_context_that_no_server_reads_is_refused_before_anybody_is_called() {
    let context = Value::from("x".repeat(4096));
    let error = Session::dial("127.0.0.1:1", &secret(), Role::Feed, &context, &limits()).unwrap_err();
    assert!(
        matches!(error, ClusterError::Handshake(HandshakeError::TooLong { bytes, limit: 4096 }) if bytes > 4096),
        "{error}"
    );
}
