//! Connections that must change nothing: on the registry and on a member's data port.

mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use common::{Begin, Driver, PATIENCE, SECRET, batch, keys, limits, member_keys, release, until};
use hmac::{Hmac, Mac};
use penstock_cluster::message::{DrainContext, FeedContext, Which};
use penstock_cluster::session::{
    Client, HandshakeError, Keys, Limits, MetricsSnapshot, Role, Secret, Server, Session, listening_at,
};
use penstock_cluster::{ClusterError, Feed, Registry, RegistryEvent, drain_with};
use serde_json::{Value, json};
use sha2::Sha256;

const HEADER_BYTES: usize = 8;
const NONCE_BYTES: usize = 32;
/// Shortened, so that slow attackers do not make slow tests; who is honest has as long.
const PATIENCE_WITH_ATTACKERS: Duration = Duration::from_secs(3);

fn wrong() -> Keys {
    Keys::all(&Secret::new(*b"vutsrqponmlkjihgfedcba9876543210").unwrap())
}

fn hello(keys: &Keys, role: Role, context: &[u8], nonce: u8) -> (Client, Vec<u8>) {
    Client::hello(keys, role, "", context, [nonce; NONCE_BYTES]).unwrap()
}

fn dial(address: &str) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// What the handshake of a connection is bound to.
fn there(stream: &TcpStream) -> Vec<u8> {
    bound(stream).unwrap()
}

/// The same where the other side may have cut it.
fn bound(stream: &TcpStream) -> std::io::Result<Vec<u8>> {
    Ok(listening_at(stream.peer_addr()?))
}

/// Reads one handshake message.
fn message(stream: &mut TcpStream) -> Vec<u8> {
    heard(stream).unwrap()
}

/// The same for who may be sent away, as any stranger in a crowd.
fn heard(stream: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![0; HEADER_BYTES];
    stream.read_exact(&mut bytes)?;
    let length = u16::from_le_bytes([bytes[6], bytes[7]]);
    bytes.resize(HEADER_BYTES + usize::from(length), 0);
    stream.read_exact(&mut bytes[HEADER_BYTES..])?;
    Ok(bytes)
}

fn proof(body: &[u8]) -> Vec<u8> {
    let mut bytes = b"pnsk\x02\x03".to_vec();
    bytes.extend_from_slice(&(body.len() as u16).to_le_bytes());
    bytes.extend_from_slice(body);
    bytes
}

/// The other side has ended the connection without saying anything more.
/// What says that there is no room.
const CROWDED: &[u8] = b"pnsk\x02\x07\0\0";

fn rest_of(mut stream: TcpStream) -> Vec<u8> {
    let mut rest = Vec::new();
    // A reset is an end, too: it is what unread input turns a close into.
    let _ = stream.read_to_end(&mut rest);
    rest
}

fn ended(stream: TcpStream) {
    assert_eq!(rest_of(stream), b"");
}

/// A conversation that succeeds; returns what the client said.
fn record(address: &str, role: Role, context: &[u8]) -> std::io::Result<(Vec<u8>, Vec<u8>)> {
    let mut stream = dial(address);
    let (client, hello) = hello(&keys(), role, context, 3);
    stream.write_all(&hello)?;
    let answer = client.answer(&heard(&mut stream)?, &bound(&stream)?).map_err(std::io::Error::other)?;
    stream.write_all(&answer)?;
    Ok((hello, answer))
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
    ("garbage", garbage, |m| m.refused_malformed),
    ("another protocol", http, |m| m.refused_malformed),
    ("another version", version, |m| m.refused_malformed),
    ("an unknown role", unknown_role, |m| m.refused_malformed),
    ("a proof first", proof_first, |m| m.refused_malformed),
];

/// Those that last as long as a handshake may.
const SLOW_ATTACKS: &[Attack] = &[("too slow", slow, |m| m.refused_slow), ("silent", silent, |m| m.refused_slow)];

fn no_secret(address: &str, role: Role) {
    let mut stream = dial(address);
    let (_, hello) = hello(&wrong(), role, b"", 1);
    stream.write_all(&hello).unwrap();
    message(&mut stream);
    stream.write_all(&proof(&[0; 32])).unwrap();
    ended(stream);
}

fn forged(address: &str, role: Role) {
    let mut stream = dial(address);
    let (client, hello) = hello(&wrong(), role, b"", 1);
    stream.write_all(&hello).unwrap();
    let challenge = message(&mut stream);
    // Make the client believe the server, so that it answers with its own secret.
    let nonce = challenge[HEADER_BYTES..][..NONCE_BYTES].try_into().unwrap();
    let (_, believed) = Server::challenge(&wrong(), &hello, nonce, &there(&stream)).unwrap();
    stream.write_all(&client.answer(&believed, &there(&stream)).unwrap()).unwrap();
    ended(stream);
}

fn replayed(address: &str, role: Role) {
    replay(address, role).unwrap();
}

fn replay(address: &str, role: Role) -> std::io::Result<()> {
    let (hello, answer) = record(address, role, b"null")?;
    let mut stream = dial(address);
    stream.write_all(&hello)?;
    heard(&mut stream)?;
    stream.write_all(&answer)?;
    ended(stream);
    Ok(())
}

fn reflected(address: &str, role: Role) {
    let mut stream = dial(address);
    let (_, hello) = hello(&keys(), role, b"", 1);
    stream.write_all(&hello).unwrap();
    let challenge = message(&mut stream);
    stream.write_all(&proof(&challenge[HEADER_BYTES + NONCE_BYTES..])).unwrap();
    ended(stream);
}

fn honest(address: &str, role: Role) {
    let error = Session::dial(address, &wrong(), role, "", &Value::Null, &limits()).unwrap_err();
    assert!(error.is_authentication(), "{error}");
}

fn cut_hello(address: &str, role: Role) {
    let mut stream = dial(address);
    let (_, hello) = hello(&keys(), role, b"", 1);
    stream.write_all(&hello[..hello.len() - 1]).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    ended(stream);
}

fn no_proof(address: &str, role: Role) {
    let mut stream = dial(address);
    let (_, hello) = hello(&keys(), role, b"", 1);
    stream.write_all(&hello).unwrap();
    message(&mut stream);
}

fn oversize(address: &str, role: Role) {
    announce(address, role).unwrap();
}

fn announce(address: &str, role: Role) -> std::io::Result<()> {
    let mut stream = dial(address);
    let (_, hello) = hello(&keys(), role, &[b' '; 4096], 1);
    // Only what announces the length: nobody waits for the rest, or it would count as slow.
    stream.write_all(&hello[..HEADER_BYTES])?;
    ended(stream);
    Ok(())
}

fn slow(address: &str, role: Role) {
    let began = Instant::now();
    let mut stream = dial(address);
    let (_, hello) = hello(&keys(), role, b"", 1);
    // A byte now and then buys no time.
    for byte in hello {
        thread::sleep(PATIENCE_WITH_ATTACKERS / 20);
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
    let _ = stream.write_all(&noise(1, 100_000));
    ended(stream);
}

fn http(address: &str, _: Role) {
    let mut stream = dial(address);
    stream.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    ended(stream);
}

fn version(address: &str, role: Role) {
    let mut stream = dial(address);
    let (_, mut hello) = hello(&keys(), role, b"", 1);
    hello[4] = 3;
    stream.write_all(&hello).unwrap();
    ended(stream);
}

fn unknown_role(address: &str, role: Role) {
    let mut stream = dial(address);
    let (_, mut hello) = hello(&keys(), role, b"", 1);
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
    // Who is refused for what it said is refused long before it is slow.
    attacked(ATTACKS, PATIENCE);
    attacked(SLOW_ATTACKS, PATIENCE_WITH_ATTACKERS);
}

fn attacked(attacks: &[Attack], handshake_time: Duration) {
    let mut driver = Driver::with(1, Limits { handshake_time, ..limits() });
    assert_eq!(driver.start("q", &[0], &Begin::default())[0]["ok"], true);
    let member = driver.members[0].address.clone();
    let registry = driver.registry.address().to_owned();
    let mut refused = 0;
    for (what, attack, counter) in attacks {
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
        let mut session = Session::dial(address, &keys(), role, "", &Value::Null, &limits()).unwrap();
        match session.receive_answer() {
            Err(ClusterError::Refused(failure)) => failure.kind,
            other => panic!("{other:?}"),
        }
    };
    for role in [Role::Feed, Role::Drain, Role::Mesh] {
        assert_eq!(kind(driver.registry.address(), role), "wrong_role");
    }
    assert_eq!(driver.registry.metrics().refused_role, 3);
    // A member cannot let others in as one, nor pass for the registry.
    let refused = Session::dial(&driver.members[0].address, &keys(), Role::Member, "", &Value::Null, &limits());
    assert!(matches!(&refused, Err(error) if error.is_authentication()), "{refused:?}");
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
        let mut session = Session::dial(&address, &keys(), Role::Member, "", &Value::Null, &limits()).unwrap();
        session.send_body(Kind::Join, 0, "{}", &[]).unwrap();
        let member = session.receive_answer().unwrap()["member"].as_u64().unwrap();
        send(&mut session);
        driver.await_event(|event| matches!(event, RegistryEvent::Lost { member: lost, .. } if *lost == member));
    }
    assert_eq!(driver.ask(0, &json!({"do": "stats"}))["ok"], true);
    driver.close();
}

/// Has a place there: it has said who it wants to be, and proves nothing.
fn holds(address: &str, role: Role) -> TcpStream {
    let mut stream = dial(address);
    stream.write_all(&hello(&wrong(), role, b"", 1).1).unwrap();
    message(&mut stream);
    stream
}

#[test]
fn at_most_64_connections_may_be_unauthenticated_48_of_one_host_and_24_of_one_that_is_not_known() {
    let limits = Limits { handshake_time: PATIENCE, ..Limits::default() };
    assert_eq!(limits.pending, 64);
    let registry = Registry::bind_with("127.0.0.1", 0, None, keys(), limits.clone()).unwrap();
    for room in [24, 48] {
        let before = registry.metrics();
        let idle: Vec<TcpStream> = (0..room).map(|_| holds(registry.address(), Role::Member)).collect();
        assert_eq!(rest_of(dial(registry.address())), CROWDED);
        until("it counts", || registry.metrics().refused_crowded == before.refused_crowded + 1);
        let turned_away = Session::dial(
            registry.address(),
            &keys(),
            Role::Member,
            "",
            &Value::Null,
            &Limits { dial_time: Duration::ZERO, ..limits.clone() },
        );
        assert!(matches!(turned_away, Err(ClusterError::TurnedAway { tries: 1, .. })), "{turned_away:?}");
        until("both count", || registry.metrics().refused == before.refused + 2);
        drop(idle);
        until("room again", || registry.metrics().refused_malformed == before.refused_malformed + room);
        // From now on this host is known.
        Session::dial(registry.address(), &keys(), Role::Member, "", &Value::Null, &limits).unwrap();
        until("the proof is seen", || registry.metrics().accepted == before.accepted + 1);
    }
    registry.close();
}

#[test]
fn an_honest_dial_that_is_turned_away_comes_back() {
    let limits = Limits { handshake_time: PATIENCE, dial_time: PATIENCE, pending: 4, ..limits() };
    let registry = Registry::bind_with("127.0.0.1", 0, None, keys(), limits.clone()).unwrap();
    let address = registry.address();
    let idle: Vec<TcpStream> = (0..2).map(|_| holds(address, Role::Member)).collect();
    thread::scope(|scope| {
        let dials: Vec<_> = (0..8)
            .map(|_| scope.spawn(|| Session::dial(address, &keys(), Role::Member, "", &Value::Null, &limits)))
            .collect();
        until("all are turned away, some again", || registry.metrics().refused_crowded > 16);
        assert_eq!(registry.metrics().accepted, 0);
        drop(idle);
        dials.into_iter().for_each(|dial| drop(dial.join().unwrap().unwrap()));
    });
    until("the other side has seen it too", || registry.metrics().accepted == 8);
    registry.close();
}

/// Silent ones that come back as soon as they are turned away, at the address of a host of the cluster.
#[test]
fn who_says_nothing_has_a_place_only_while_nobody_else_needs_it() {
    // None of them is turned away for its silence alone.
    let limits = Limits { handshake_time: 10 * PATIENCE, dial_time: PATIENCE, ..limits() };
    let mut driver = Driver::with(1, limits);
    assert_eq!(driver.start("q", &[0], &Begin::default())[0]["ok"], true);
    let (registry, member) = (driver.registry.address().to_owned(), driver.members[0].address.clone());
    let rows = batch(&[1]);
    let feed = |attempt| -> Result<u64, ClusterError> {
        let context = FeedContext { query: "q".into(), epoch: 0, source: 0, partition: 0, attempt };
        let mut feed = Feed::connect_with(&member, &keys(), &context, None, &rows.schema(), driver.limits.clone())?;
        feed.push(&rows)?;
        Ok(feed.finish()?.rows)
    };
    // From now on this host is known there, too.
    assert_eq!(feed(1).unwrap(), 1);
    let over = AtomicBool::new(false);
    let turned_away = AtomicUsize::new(0);
    thread::scope(|scope| {
        let (over, turned_away) = (&over, &turned_away);
        let _end = Ends(over);
        for address in [&registry, &member] {
            for _ in 0..70 {
                scope.spawn(move || {
                    while !over.load(Relaxed) {
                        let mut stream = dial(address);
                        stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
                        loop {
                            match stream.read(&mut [0; 64]) {
                                Err(error) if error.kind() == ErrorKind::WouldBlock && !over.load(Relaxed) => {}
                                Ok(read) if read > 0 => _ = turned_away.fetch_add(1, Relaxed),
                                _ => break,
                            }
                        }
                    }
                });
            }
        }
        until("there are more than there is room for", || turned_away.load(Relaxed) > 200);
        for attempt in 2..6 {
            assert_eq!(feed(attempt).unwrap(), 1);
            let join = Session::dial(&registry, &member_keys(), Role::Member, "", &Value::Null, &driver.limits);
            join.unwrap();
        }
    });
    assert!(driver.registry.metrics().refused_crowded > 0);
    assert_eq!(driver.registry.metrics().refused_slow, 0);
    driver.close();
}

#[test]
fn who_asks_at_a_crowded_port_whether_its_engine_lives_comes_back_and_takes_the_crowd_for_life() {
    let limits = Limits { handshake_time: PATIENCE, pending: 1, ..limits() };
    let registry = Registry::bind_with("127.0.0.1", 0, None, keys(), limits).unwrap();
    let (address, claim) = (registry.address().to_owned(), Secret::new(SECRET).unwrap().claim());
    let idle = holds(&address, Role::Member);
    assert!(Session::answers(&address, claim, Duration::from_secs(3)).unwrap(), "nothing says that it is dead");
    let before = registry.metrics().refused_crowded;
    assert!(before > 1, "it was asked again");
    thread::scope(|scope| {
        let other = scope.spawn(|| Session::answers(&address, claim + 1, PATIENCE));
        until("it is turned away", || registry.metrics().refused_crowded > before);
        drop(idle);
        assert!(!other.join().unwrap().unwrap(), "an answer counts more than a crowd");
    });
    assert!(Session::answers(&address, claim, PATIENCE).unwrap());
    registry.close();
    assert!(!Session::answers(&address, claim, PATIENCE).unwrap(), "nobody listens there any more");
}

/// Whatever has the port of an engine that is gone, where it does not say that it is crowded.
#[test]
fn who_ends_the_question_without_a_word_is_another() {
    let (claim, patience) = (Secret::new(SECRET).unwrap().claim(), Duration::from_millis(200));
    for reads in [false, true] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        thread::scope(|scope| {
            let answers = scope.spawn(|| Session::answers(&address, claim, patience));
            listener.set_nonblocking(true).unwrap();
            while !answers.is_finished() {
                match listener.accept() {
                    Ok((mut stream, _)) if reads => drop(stream.read(&mut [0; 100])),
                    Ok(_) => {}
                    Err(_) => thread::yield_now(),
                }
            }
            assert!(!answers.join().unwrap().unwrap(), "reads: {reads}");
        });
    }
    // The port of another engine's member takes it for a malformed greeting.
    let driver = Driver::new(1);
    assert!(!Session::answers(&driver.members[0].address, claim, patience).unwrap());
    driver.close();
}

/// As where a name does not resolve for a moment, or the network comes up later than this process: nothing is known of who is asked.
#[test]
fn who_cannot_ask_whether_an_engine_lives_does_not_take_it_for_dead() {
    let (claim, patience) = (Secret::new(SECRET).unwrap().claim(), Duration::from_millis(200));
    // A name for which no resolver has to be asked, and a host that no connection leads to.
    for address in ["driver:seven", "224.0.0.1:7"] {
        let began = Instant::now();
        let error = Session::answers(address, claim, patience).unwrap_err();
        assert!(matches!(error, ClusterError::Address { .. } | ClusterError::Io { .. }), "{error}");
        assert!(began.elapsed() >= patience, "it was asked again");
    }
}

#[test]
fn many_feeds_at_a_member_with_few_seats_all_arrive() {
    let mut driver = Driver::with(1, Limits { pending: 2, ..limits() });
    assert_eq!(driver.start("q", &[0], &Begin::default())[0]["ok"], true);
    let address = driver.members[0].address.clone();
    // While these two do not speak there is no seat for anybody else.
    let idle = [holds(&address, Role::Feed), holds(&address, Role::Feed)];
    let refused = |driver: &mut Driver| {
        driver.ask(0, &json!({"do": "stats", "query": null}))["process"]["refused_connections"].as_u64().unwrap()
    };
    thread::scope(|scope| {
        let feeds: Vec<_> = (0..40u32)
            .map(|partition| {
                let address = &address;
                scope.spawn(move || -> Result<u64, ClusterError> {
                    let rows = batch(&[i64::from(partition)]);
                    let mut feed = Feed::connect(address, &keys(), "q", 0, partition, 1, &rows.schema())?;
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
    let error = Session::dial("127.0.0.1:1", &keys(), Role::Feed, "", &context, &limits()).unwrap_err();
    assert!(
        matches!(error, ClusterError::Handshake(HandshakeError::TooLong { bytes, limit: 4096 }) if bytes > 4096),
        "{error}"
    );
}

fn engine() -> Secret {
    Secret::new(SECRET).unwrap()
}

/// What a task has in its hands: the bytes of the one key that it got.
fn stolen(keys: &Keys, scope: &str) -> [u8; 32] {
    let before = 5 + scope.len(); // version, one key, its role, that it has a scope, the length of that
    keys.to_bytes()[before..][..32].try_into().unwrap()
}

/// The last message of a client that does not ask whether its server is genuine.
fn shameless(key: &[u8; 32], hello: &[u8], challenge: &[u8], binding: &[u8]) -> Vec<u8> {
    let mut mac = <Hmac<Sha256> as Mac>::new_from_slice(key).unwrap();
    mac.update(b"penstock handshake 2 client");
    mac.update(&(hello.len() as u64).to_le_bytes());
    mac.update(hello);
    mac.update(&challenge[HEADER_BYTES..][..NONCE_BYTES]);
    mac.update(binding);
    proof(&mac.finalize().into_bytes())
}

#[test]
fn a_task_with_its_key_passes_for_nobody_else() {
    let mut driver = Driver::new(1);
    assert_eq!(driver.start("q", &[0], &Begin::default())[0]["ok"], true);
    let (registry, member) = (driver.registry.address().to_owned(), driver.members[0].address.clone());
    let (feed, drain) = (Keys::of(&engine(), Role::Feed, "q 0"), Keys::of(&engine(), Role::Drain, "q 0"));
    let strangers = |driver: &mut Driver| {
        let there = driver.registry.metrics().refused_secret;
        let stats = driver.ask(0, &json!({"do": "stats", "query": null}));
        there + stats["process"]["connections"]["refused_secret"].as_u64().unwrap()
    };
    let posing = [
        (&feed, &registry, Role::Member, "q 0"),
        (&feed, &registry, Role::Member, ""),
        (&drain, &registry, Role::Member, ""),
        (&feed, &member, Role::Mesh, ""),
        (&feed, &member, Role::Drain, "q 0"),
        (&drain, &member, Role::Feed, "q 0"),
        (&feed, &member, Role::Feed, "q 1"),
        (&feed, &member, Role::Feed, "p 0"),
    ];
    for (refused, (keys, address, role, scope)) in (1..).zip(posing) {
        let asked = Session::dial(address, keys, role, scope, &Value::Null, &limits());
        assert!(matches!(asked, Err(ClusterError::NoKey { .. })), "{role:?} {scope}: {asked:?}");
        let (_, hello) = Client::hello(&common::keys(), role, scope, b"null", [1; NONCE_BYTES]).unwrap();
        let mut stream = dial(address);
        stream.write_all(&hello).unwrap();
        let challenge = message(&mut stream);
        stream.write_all(&shameless(&stolen(keys, "q 0"), &hello, &challenge, &there(&stream))).unwrap();
        ended(stream);
        until("it is counted", || strangers(&mut driver) == refused);
    }
    // The same bytes do what they are for.
    let rows = batch(&[1]);
    let mut feed = Feed::connect(&member, &feed, "q", 0, 0, 1, &rows.schema()).unwrap();
    feed.push(&rows).unwrap();
    assert_eq!(feed.finish().unwrap().rows, 1);
    assert_eq!(driver.registry.members().len(), 1);
    driver.close();
}

#[test]
fn a_key_for_one_thing_gets_no_other_by_its_context() {
    let mut driver = Driver::new(1);
    assert_eq!(driver.start("q", &[0], &Begin::default())[0]["ok"], true);
    let member = driver.members[0].address.clone();
    let kind = |keys: &Keys, role, scope: &str, context: Value| {
        let mut session = Session::dial(&member, keys, role, scope, &context, &limits()).unwrap();
        match session.receive_answer() {
            Err(ClusterError::Refused(failure)) => failure.kind,
            other => panic!("{other:?}"),
        }
    };
    let feed = Keys::of(&engine(), Role::Feed, "q 0");
    let context = json!({"query": "q", "epoch": 1, "partition": 0, "attempt": 1});
    assert_eq!(kind(&feed, Role::Feed, "q 0", context), "wrong_scope");
    let drain = Keys::of(&engine(), Role::Drain, "p 0");
    let context = json!({"query": "q", "epoch": 0, "piece": 0, "which": "rows"});
    assert_eq!(kind(&drain, Role::Drain, "p 0", context), "wrong_scope");
    // A resident of one slot does not join in another.
    let third = Keys::member(&engine(), "3");
    let mut session =
        Session::dial(driver.registry.address(), &third, Role::Member, "3", &Value::Null, &limits()).unwrap();
    session.send_body(penstock_cluster::session::Kind::Join, 0, r#"{"slot": 4}"#, &[]).unwrap();
    let answer = session.receive_answer();
    assert!(matches!(&answer, Err(ClusterError::Refused(failure)) if failure.kind == "wrong_scope"), "{answer:?}");
    assert_eq!(driver.registry.metrics().refused_role, 1);
    let stats = driver.ask(0, &json!({"do": "stats", "query": null}));
    assert_eq!(stats["process"]["connections"]["refused_role"], 2);
    assert_eq!(driver.registry.members().len(), 1);
    driver.close();
}

/// Bytes of nothing, the same in each run.
fn noise(seed: u32, bytes: usize) -> Vec<u8> {
    let mut state = seed;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    std::iter::repeat_with(next).take(bytes).collect()
}

fn contains(bytes: &[u8], text: &[u8]) -> bool {
    bytes.windows(text.len()).any(|window| window == text)
}

/// A frame that announces 4 GiB.
fn boast() -> Vec<u8> {
    let mut bytes = b"PF\x01\x08".to_vec();
    bytes.extend_from_slice(&u32::MAX.to_le_bytes());
    bytes.extend_from_slice(&[0; 64]);
    bytes
}

/// A peer that has a key and then says `bytes`: a raw socket that did the handshake by hand.
fn insider(address: &str, keys: &Keys, role: Role, scope: &str, context: &Value, bytes: &[u8]) -> std::io::Result<()> {
    let mut stream = dial(address);
    let context = context.to_string();
    let (client, hello) = Client::hello(keys, role, scope, context.as_bytes(), [9; NONCE_BYTES]).unwrap();
    stream.write_all(&hello)?;
    let answer = client.answer(&heard(&mut stream)?, &bound(&stream)?).map_err(std::io::Error::other)?;
    stream.write_all(&answer)?;
    // It may be sent away before it has said all.
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(Shutdown::Write);
    let mut said = Vec::new();
    let _ = stream.read_to_end(&mut said);
    assert!(said.len() < 4096, "{} bytes for an insider that speaks no frame", said.len());
    Ok(())
}

fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().strip_suffix("kB").unwrap().trim().parse::<u64>().unwrap() << 10
}

/// Whoever goes on until it is over.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

#[test]
fn honest_work_goes_on_beside_every_attack_and_memory_stays_where_it_is() {
    // The slow ones end by themselves; who is honest may stand still for a while.
    let mut driver = Driver::with(2, Limits { handshake_time: 4 * PATIENCE_WITH_ATTACKERS, ..limits() });
    assert!(driver.start("q", &[0, 1], &Begin::default()).iter().all(|answer| answer["ok"] == true));
    let before = resident();
    let over = AtomicBool::new(false);
    let (registry, members) = (driver.registry.address().to_owned(), driver.members[0].address.clone());
    let feed_context = json!({"query": "q", "epoch": 0, "partition": 9, "attempt": 9});
    thread::scope(|scope| {
        let (over, registry, member, context) = (&over, &registry, &members, &feed_context);
        // Also where something is wrong: the scope waits for all of them.
        let _end = Ends(over);
        for seed in 0..3 {
            // Slow ones, up to as many as strangers may be.
            scope.spawn(move || {
                let (_, hello) = hello(&wrong(), Role::Feed, b"", 1);
                while !over.load(Relaxed) {
                    let mut slow: Vec<TcpStream> = (0..12).map(|_| dial(member)).collect();
                    for byte in &hello {
                        slow.retain_mut(|stream| stream.write_all(&[*byte]).is_ok());
                        thread::sleep(Duration::from_millis(15));
                        if over.load(Relaxed) || slow.is_empty() {
                            break;
                        }
                    }
                }
            });
            scope.spawn(move || {
                let feed = Keys::of(&engine(), Role::Feed, "q 0");
                for round in 0.. {
                    if over.load(Relaxed) {
                        return;
                    }
                    for (address, role) in [(registry, Role::Member), (member, Role::Drain)] {
                        let mut stream = dial(address);
                        let _ = stream.write_all(&noise(seed * 1000 + round, 20_000));
                        let rest = rest_of(stream);
                        assert!(rest.is_empty() || rest == CROWDED, "{rest:?}");
                        // In this crowd they may not even be heard.
                        let _ = replay(address, role).and_then(|()| announce(address, role));
                    }
                    let bytes = if round % 2 == 0 { noise(round, 50_000) } else { boast() };
                    let _ = insider(member, &feed, Role::Feed, "q 0", context, &bytes);
                    let _ = insider(registry, &Keys::member(&engine(), "7"), Role::Member, "7", &Value::Null, &bytes);
                }
            });
        }
        for epoch in 0..30u64 {
            let mut sent = Vec::new();
            for (place, seat) in driver.members.iter().enumerate() {
                let keys = Keys::of(&engine(), Role::Feed, &format!("q {epoch}"));
                let rows = batch(&[epoch as i64, place as i64]);
                let mut feed =
                    Feed::connect(&seat.address, &keys, "q", epoch, place as u32, 100 + epoch, &rows.schema()).unwrap();
                feed.push(&rows).unwrap();
                assert_eq!(feed.finish().unwrap().rows, 2);
                sent.push((place as u32, 100 + epoch, 2));
            }
            for place in 0..2 {
                let answer = driver.ask(place, &release("q", 1, epoch, &sent[place..=place]));
                let pieces = answer["answer"]["Released"]["pieces"].as_array().unwrap();
                assert_eq!(pieces.iter().map(|piece| piece[1].as_u64().unwrap()).sum::<u64>(), 2, "{answer}");
                driver.ask(place, &common::ask("q", penstock_engine::Request::CloseEpoch { epoch }));
            }
        }
        until("some of each kind were heard and refused", || {
            let metrics = driver.registry.metrics();
            let stats = driver.ask(0, &json!({"do": "stats", "query": null}));
            let seen = &stats["process"]["connections"];
            metrics.refused_malformed > 0
                && metrics.refused_secret > 0
                && ["refused_malformed", "refused_secret"].iter().all(|why| seen[why].as_u64().unwrap() > 0)
        });
    });
    assert_eq!(driver.registry.members().len(), 2);
    let grown = resident().saturating_sub(before);
    assert!(grown < 96 << 20, "{} MiB more than before", grown >> 20);
    driver.close();
}

/// A peer that has a key, on a connection of whichever kind the key asks for, and then says `bytes`; what it was told after that.
fn pour(address: &str, keys: &Keys, role: Role, scope: &str, context: &Value, bytes: &[u8]) -> Vec<u8> {
    let mut stream = Session::dial(address, keys, role, scope, context, &limits()).unwrap().into_stream().unwrap();
    // It may be sent away before it has said all.
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(Shutdown::Write);
    let mut said = Vec::new();
    let _ = stream.read_to_end(&mut said);
    said
}

#[test]
fn garbage_after_the_proof_costs_its_own_connection_in_every_role() {
    for always in [false, true] {
        let sealed = |keys: Keys| if always { keys.always_encrypted() } else { keys };
        let mut driver = Driver::with_keys(1, limits(), &sealed(keys()), &sealed(common::member_keys()));
        assert_eq!(driver.start("q", &[0], &Begin::default())[0]["ok"], true);
        let (registry, member) = (driver.registry.address().to_owned(), driver.members[0].address.clone());
        let key = |role, scope: &str| sealed(Keys::of(&engine(), role, scope));
        let rows = batch(&[1, 2]);
        let mut feed = Feed::connect(&member, &key(Role::Feed, "q 0"), "q", 0, 0, 1, &rows.schema()).unwrap();
        feed.push(&rows).unwrap();
        feed.finish().unwrap();
        assert_eq!(driver.ask(0, &release("q", 1, 0, &[(0, 1, 2)]))["ok"], true);
        let piece = json!({"query": "q", "epoch": 0, "piece": 0, "which": "rows"});
        for bytes in [noise(1, 50_000), boast()] {
            let context = json!({"query": "q", "epoch": 1, "partition": 9, "attempt": 9});
            let said = pour(&member, &key(Role::Feed, "q 1"), Role::Feed, "q 1", &context, &bytes);
            assert!(contains(&said, b"protocol"), "a feed is told what is wrong");
            // A drain is told its rows, whatever it says.
            let said = pour(&member, &key(Role::Drain, "q 0"), Role::Drain, "q 0", &piece, &bytes);
            assert!(said.len() < 4096, "{} bytes for a drain of two rows", said.len());
            let slot = sealed(Keys::member(&engine(), "7"));
            let said = pour(&registry, &slot, Role::Member, "7", &Value::Null, &bytes);
            assert!(said.len() < 4096, "{} bytes for a member that speaks no frame", said.len());
        }
        let context = DrainContext { query: "q".into(), epoch: 0, piece: 0, which: Which::Rows };
        let read = drain_with(&member, &key(Role::Drain, "q 0"), &context, None, &limits()).unwrap();
        let read: Vec<_> = read.map(Result::unwrap).collect();
        assert_eq!(common::values(&read), [1, 2]);
        assert_eq!(driver.registry.members().len(), 1);
        driver.close();
    }
}

/// Whoever has the key of the mesh passes for a member of a generation that is being made: it costs that generation, not the member.
#[test]
fn garbage_in_a_mesh_that_is_being_made_costs_its_generation() {
    for always in [false, true] {
        let sealed = |keys: Keys| if always { keys.always_encrypted() } else { keys };
        let mut driver = Driver::with_keys(2, limits(), &sealed(keys()), &sealed(common::member_keys()));
        let key = sealed(Keys::of(&engine(), Role::Mesh, ""));
        let (id, address) = (driver.members[1].id, driver.members[1].address.clone());
        let context = |from: u64, member: u64| json!({"query": "q", "stamp": common::stamp(1), "from": from, "to": 1, "member": member});
        let dial = |context: &Value| Session::dial(&address, &key, Role::Mesh, "", context, &limits()).unwrap();
        // The second member waits for the first one.
        let body = driver.start_body("q", &[0, 1], 1, &Begin::default());
        let call = driver.send(1, &body);
        let refused = dial(&context(0, id + 1)).receive_answer();
        assert!(
            matches!(&refused, Err(ClusterError::Refused(failure)) if failure.kind == "wrong_member"),
            "{refused:?}"
        );
        // A process that nobody waits for.
        let mut nobody = dial(&context(u64::MAX, id));
        nobody.receive_answer().unwrap();
        let mut posing = dial(&context(0, id));
        posing.receive_answer().unwrap();
        let mut posing = posing.into_stream().unwrap();
        posing.write_all(&noise(1, 50_000)).unwrap();
        assert_eq!(driver.reply(call)["ok"], true);
        let failed = |event: &RegistryEvent| matches!(event, RegistryEvent::Message { member, .. } if *member == id);
        let RegistryEvent::Message { body, .. } = driver.await_event(failed) else { unreachable!("matched") };
        assert_eq!(common::kind(&body), "peer_lost");
        assert_eq!(driver.ask(1, &common::stop("q", 2, 0))["ok"], true);
        let _ = posing.read_to_end(&mut Vec::new());
        let started = driver.start("q", &[0, 1], &Begin { generation: 2, ..Begin::default() });
        assert!(started.iter().all(|body| body["ok"] == true), "{started:?}");
        assert_eq!(driver.ask(1, &release("q", 2, 0, &[]))["ok"], true);
        let stale = dial(&context(0, id)).receive_answer();
        assert!(
            matches!(&stale, Err(ClusterError::Refused(failure)) if failure.kind == "stale_generation"),
            "{stale:?}"
        );
        assert_eq!(driver.registry.members().len(), 2);
        drop(nobody);
        driver.close();
    }
}

#[test]
fn nothing_that_could_be_unpickled_comes_with_an_answer() {
    // Somebody with the key of a feed listens in the place of a member.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let posing = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let hello = message(&mut stream);
        let (server, challenge) =
            Server::challenge(&keys(), &hello, [5; NONCE_BYTES], &listening_at(stream.local_addr().unwrap())).unwrap();
        stream.write_all(&challenge).unwrap();
        assert_eq!(server.verify(&message(&mut stream)).unwrap().scope, "q 0");
        let body = br#"{"error": {"kind": "user_function", "message": "look at this"}}"#;
        let head = [&0u64.to_le_bytes()[..], &(body.len() as u32).to_le_bytes()].concat();
        let kind = penstock_cluster::session::Kind::Answer;
        penstock_cluster::session::write_frame(&mut stream, kind, &[&head, body, b"cos\nsystem\n"], 1 << 20).unwrap();
        let _ = stream.read(&mut [0]);
    });
    let feed = Keys::of(&engine(), Role::Feed, "q 0");
    let error = Feed::connect(&address, &feed, "q", 0, 0, 1, &common::schema()).err().unwrap();
    let ClusterError::Refused(failure) = error else { panic!("{error}") };
    assert_eq!((failure.kind.as_str(), failure.attachment.len()), ("user_function", 0));
    posing.join().unwrap();
}
