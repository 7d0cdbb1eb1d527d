//! Mutual authentication by HMAC-SHA256 over both nonces.
//!
//! ```text
//! client                                      server
//!   hello     role, nonce c, scope, context   ->
//!                                             <-     challenge  nonce s, MAC("server", hello, s)
//!   proof     MAC("client", hello, s)         ->
//! ```
//! A listener that wants TLS on this connection says so instead of a challenge, and no more. Within TLS both proofs cover bytes
//! that are of this TLS connection alone, too: nobody passes them on from another.
//! The key is that of the role under the scope (module `keys`). A server that has none answers with a proof that is of no key.
//! Both proofs cover the whole hello, hence the role, the scope and the context (query, generation, ...), and
//! the fresh nonce of the other side: a recorded conversation is worthless. The label in front
//! tells the directions apart, so a proof cannot be reflected to its author; a server also refuses
//! to meet its own nonce. Proofs are compared in constant time. The context is opaque here and is
//! interpreted only after the proof.
//!
//! Whether an engine is there that has made a claim on a checkpoint may be asked without a key: the question is a nonce, the answer a MAC of
//! it by a key that the claim's number makes ([`Alive`]). Who has not read the claim cannot give it; it opens nothing, and the connection ends.
//!
//! [`Client`] and [`Server`] take messages and return messages; [`Wire`] puts them on a socket with
//! a budget of bytes and time.

use std::io::{self, Write};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use hmac::{Hmac, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;
use subtle::ConstantTimeEq;
use thiserror::Error;

use super::keys::KEY_BYTES;
use super::stream::Stream;
use super::{Keys, Limits, tls};

const MAGIC: [u8; 4] = *b"pnsk";
const VERSION: u8 = 2;
const HEADER_BYTES: usize = 8;
const PROOF_BYTES: usize = 32;
/// Bytes of a nonce.
pub const NONCE_BYTES: usize = 32;

const HELLO: u8 = 1;
const CHALLENGE: u8 = 2;
const PROOF: u8 = 3;
const TLS_DUE: u8 = 4;
const ASK: u8 = 5;
const ALIVE: u8 = 6;
const CROWDED: u8 = 7;

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u8)]
pub enum Role {
    /// A member at the registry.
    Member = 1,
    /// A source of rows at a member.
    Feed = 2,
    /// A reader of results at a member.
    Drain = 3,
    /// Another member of one query and generation, or another process of a run.
    Mesh = 4,
}

impl Role {
    pub(super) const ALL: [Role; 4] = [Role::Member, Role::Feed, Role::Drain, Role::Mesh];

    fn from_byte(byte: u8) -> Option<Role> {
        Role::ALL.into_iter().find(|role| *role as u8 == byte)
    }
}

/// Why two ends did not authenticate each other.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum HandshakeError {
    /// The socket failed.
    #[error("{0}")]
    Io(io::Error),
    /// It took longer than allowed.
    #[error("it took too long")]
    Timeout,
    /// The other side ended the connection.
    #[error("the other side ended the connection")]
    Truncated,
    /// The other side serves as many handshakes as it may.
    #[error("the other side serves as many handshakes as it may")]
    Crowded,
    /// More bytes than allowed before authentication.
    #[error("{bytes} bytes before authentication, at most {limit} are allowed")]
    TooLong {
        /// Bytes received and announced so far.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// These are not our messages.
    #[error("wrong magic {found:02x?}")]
    Magic {
        /// The bytes in its place.
        found: [u8; 4],
    },
    /// Another version of the protocol.
    #[error("handshake version {found}, not 2")]
    Version {
        /// The version byte.
        found: u8,
    },
    /// A message of another kind than the one that is due, or of a wrong length.
    #[error("message of kind {kind} and {bytes} bytes is not due now")]
    Unexpected {
        /// Kind byte.
        kind: u8,
        /// Body length.
        bytes: usize,
    },
    /// No such role.
    #[error("unknown role {found}")]
    UnknownRole {
        /// The role byte.
        found: u8,
    },
    /// The other side does not know the key, or repeats what somebody else said.
    #[error("the other side did not prove that it knows the key")]
    Proof,
    /// We have no key with which to serve such a peer.
    #[error("no key for {role:?} of {scope:?}")]
    NoKey {
        /// What it wanted to be.
        role: Role,
        /// Of what.
        scope: String,
    },
    /// The certificate of one side is not of this engine, or of somebody else in it.
    #[error("certificate: {0}")]
    Certificate(String),
    /// What came is not TLS as we speak it.
    #[error("TLS: {0}")]
    Tls(String),
    /// One side takes the connection for a local one, the other does not.
    #[error("the listener takes this connection for one that leaves the host, and wants TLS: give tls=\"always\"")]
    TlsDue,
    /// The other side only wanted to know who is here, and was told.
    #[error("it only asked whether somebody is here")]
    Asked,
    /// The operating system gave no random bytes.
    #[error("no random bytes: {0}")]
    Random(String),
}

impl HandshakeError {
    /// True when the cause is a key, not the network.
    pub fn is_authentication(&self) -> bool {
        matches!(self, HandshakeError::Proof | HandshakeError::Certificate(_))
    }
}

/// A fresh nonce from the operating system.
pub(super) fn nonce() -> Result<[u8; NONCE_BYTES], HandshakeError> {
    let mut nonce = [0; NONCE_BYTES];
    getrandom::fill(&mut nonce).map_err(|error| HandshakeError::Random(error.to_string()))?;
    Ok(nonce)
}

/// Refuses a hello that no server reads to its end: it would close without a word.
pub(super) fn fits(hello: &[u8], limits: &Limits) -> Result<(), HandshakeError> {
    let bytes = hello.len() + HEADER_BYTES + PROOF_BYTES;
    if bytes > limits.handshake_bytes {
        return Err(HandshakeError::TooLong { bytes, limit: limits.handshake_bytes });
    }
    Ok(())
}

fn message(kind: u8, body: &[&[u8]]) -> Vec<u8> {
    let length: usize = body.iter().map(|part| part.len()).sum();
    // A body that the length field cannot hold is far past every limit of the receiver, which
    // refuses the message by its announced length.
    let announced = u16::try_from(length).unwrap_or(u16::MAX);
    let mut out = Vec::with_capacity(HEADER_BYTES + length);
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&[VERSION, kind]);
    out.extend_from_slice(&announced.to_le_bytes());
    body.iter().for_each(|part| out.extend_from_slice(part));
    out
}

/// Checks a header; returns kind and body length.
fn header(bytes: &[u8]) -> Result<(u8, usize), HandshakeError> {
    let bytes: &[u8; HEADER_BYTES] =
        bytes.get(..HEADER_BYTES).and_then(|b| b.try_into().ok()).ok_or(HandshakeError::Truncated)?;
    let magic: [u8; 4] = bytes[..4].try_into().expect("four bytes");
    if magic != MAGIC {
        return Err(HandshakeError::Magic { found: magic });
    }
    if bytes[4] != VERSION {
        return Err(HandshakeError::Version { found: bytes[4] });
    }
    Ok((bytes[5], usize::from(u16::from_le_bytes([bytes[6], bytes[7]]))))
}

fn body(bytes: &[u8], due: u8) -> Result<&[u8], HandshakeError> {
    let (kind, length) = header(bytes)?;
    let body = &bytes[HEADER_BYTES..];
    if kind != due || body.len() != length {
        return Err(HandshakeError::Unexpected { kind, bytes: body.len() });
    }
    Ok(body)
}

/// What the parts of a hello's body are.
struct Hello<'a> {
    role: Role,
    nonce: &'a [u8],
    scope: &'a str,
    context: &'a [u8],
}

impl<'a> Hello<'a> {
    fn parse(hello: &'a [u8]) -> Result<Self, HandshakeError> {
        let body = body(hello, HELLO)?;
        let short = || HandshakeError::Unexpected { kind: HELLO, bytes: body.len() };
        let (fixed, rest) = body.split_at_checked(1 + NONCE_BYTES + 2).ok_or_else(short)?;
        let role = Role::from_byte(fixed[0]).ok_or(HandshakeError::UnknownRole { found: fixed[0] })?;
        let length = u16::from_le_bytes([fixed[1 + NONCE_BYTES], fixed[2 + NONCE_BYTES]]);
        let (scope, context) = rest.split_at_checked(usize::from(length)).ok_or_else(short)?;
        let scope = std::str::from_utf8(scope).map_err(|_| short())?;
        Ok(Hello { role, nonce: &fixed[1..1 + NONCE_BYTES], scope, context })
    }
}

fn proof(key: &[u8; KEY_BYTES], side: &[u8], hello: &[u8], nonce: &[u8], binding: &[u8]) -> [u8; PROOF_BYTES] {
    let mut mac = <Hmac<Sha256> as Mac>::new_from_slice(key).expect("any key length is allowed");
    mac.update(b"penstock handshake 2 ");
    mac.update(side);
    mac.update(&(hello.len() as u64).to_le_bytes());
    mac.update(hello);
    mac.update(nonce);
    mac.update(binding);
    mac.finalize().into_bytes().into()
}

/// The side that dials.
pub struct Client {
    key: [u8; KEY_BYTES],
    hello: Vec<u8>,
}

impl Client {
    /// Starts a handshake; returns the message to send first. None when the key is not among `keys`.
    #[must_use]
    pub fn hello(
        keys: &Keys,
        role: Role,
        scope: &str,
        context: &[u8],
        nonce: [u8; NONCE_BYTES],
    ) -> Option<(Client, Vec<u8>)> {
        let key = keys.find(role, scope)?;
        let length = u16::try_from(scope.len()).unwrap_or(u16::MAX).to_le_bytes();
        let hello = message(HELLO, &[&[role as u8], &nonce, &length, scope.as_bytes(), context]);
        Some((Client { key, hello: hello.clone() }, hello))
    }

    /// Checks the server's proof; returns the message that ends the handshake. `binding` is of the TLS connection, else
    /// [`listening_at`] of the server.
    ///
    /// # Errors
    /// [`HandshakeError::Proof`] when the server does not know the key, [`HandshakeError::TlsDue`] when it wants TLS; others
    /// when the message is not a challenge.
    pub fn answer(self, challenge: &[u8], binding: &[u8]) -> Result<Vec<u8>, HandshakeError> {
        if header(challenge)?.0 == TLS_DUE {
            return Err(HandshakeError::TlsDue);
        }
        let body = body(challenge, CHALLENGE)?;
        if body.len() != NONCE_BYTES + PROOF_BYTES {
            return Err(HandshakeError::Unexpected { kind: CHALLENGE, bytes: body.len() });
        }
        let (nonce, theirs) = body.split_at(NONCE_BYTES);
        let expected = proof(&self.key, b"server", &self.hello, nonce, binding);
        if !bool::from(expected.ct_eq(theirs)) {
            return Err(HandshakeError::Proof);
        }
        Ok(message(PROOF, &[&proof(&self.key, b"client", &self.hello, nonce, binding)]))
    }
}

/// Who has proved what it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proved {
    /// What the connection is for.
    pub role: Role,
    /// What the peer's key is for.
    pub scope: String,
    /// What it said.
    pub context: Vec<u8>,
}

/// The side that listens, after its first message.
pub struct Server {
    /// None: nobody can prove it.
    key: Option<[u8; KEY_BYTES]>,
    hello: Vec<u8>,
    nonce: [u8; NONCE_BYTES],
    binding: Vec<u8>,
}

/// What a handshake without TLS is bound to: the address at which the server took the connection. Who stands between the ends listens
/// elsewhere, and what it passes on proves nothing.
#[must_use]
pub fn listening_at(address: SocketAddr) -> Vec<u8> {
    format!("{} {}", address.ip().to_canonical(), address.port()).into_bytes()
}

impl Server {
    /// Takes the client's first message; returns the challenge to send. The client of a role or scope that is not among `keys`
    /// gets one that proves nothing. `binding` is of the TLS connection, else [`listening_at`] of the server.
    ///
    /// # Errors
    /// When the message is not a hello, or [`HandshakeError::Proof`] when it carries our own nonce.
    pub fn challenge(
        keys: &Keys,
        hello: &[u8],
        nonce: [u8; NONCE_BYTES],
        binding: &[u8],
    ) -> Result<(Server, Vec<u8>), HandshakeError> {
        let said = Hello::parse(hello)?;
        if said.nonce == nonce {
            return Err(HandshakeError::Proof);
        }
        let key = keys.admits(said.role, said.scope);
        let ours = key.map_or([0; PROOF_BYTES], |key| proof(&key, b"server", hello, &nonce, binding));
        let challenge = message(CHALLENGE, &[&nonce, &ours]);
        let (hello, binding) = (hello.to_vec(), binding.to_vec());
        Ok((Server { key, hello, nonce, binding }, challenge))
    }

    /// Checks the client's proof; returns what the connection is for.
    ///
    /// # Errors
    /// [`HandshakeError::Proof`] when the client does not know the key; [`HandshakeError::NoKey`] when we do not.
    pub fn verify(&self, answer: &[u8]) -> Result<Proved, HandshakeError> {
        let theirs = body(answer, PROOF)?;
        let Hello { role, scope, context, .. } = Hello::parse(&self.hello)?;
        let Some(key) = &self.key else {
            return Err(HandshakeError::NoKey { role, scope: scope.to_owned() });
        };
        let expected = proof(key, b"client", &self.hello, &self.nonce, &self.binding);
        if !bool::from(expected.ct_eq(theirs)) {
            return Err(HandshakeError::Proof);
        }
        Ok(Proved { role, scope: scope.to_owned(), context: context.to_vec() })
    }

    /// Why a client that went away without an answer had to.
    pub(super) fn missed(&self, error: HandshakeError) -> HandshakeError {
        match (&self.key, Hello::parse(&self.hello)) {
            (None, Ok(said)) => HandshakeError::NoKey { role: said.role, scope: said.scope.to_owned() },
            _ => error,
        }
    }
}

/// The question whether the engine of a claim is there.
pub(super) struct Alive {
    claim: u64,
    ask: Vec<u8>,
}

impl Alive {
    /// Of the number in a claim; the message to send.
    pub(super) fn ask(claim: u64, nonce: [u8; NONCE_BYTES]) -> (Alive, Vec<u8>) {
        let ask = message(ASK, &[&nonce]);
        (Alive { claim, ask: ask.clone() }, ask)
    }

    /// The answer to such a message; None for any other message.
    pub(super) fn reply(claim: u64, asked: &[u8]) -> Option<Vec<u8>> {
        let nonce = body(asked, ASK).ok()?;
        (nonce.len() == NONCE_BYTES).then(|| message(ALIVE, &[&Self::proof(claim, asked)]))
    }

    /// Whether that was answered by who knows the claim.
    pub(super) fn is_answered(&self, answer: &[u8]) -> bool {
        body(answer, ALIVE).is_ok_and(|proof| bool::from(Self::proof(self.claim, &self.ask).ct_eq(proof)))
    }

    fn proof(claim: u64, asked: &[u8]) -> [u8; PROOF_BYTES] {
        let mut key = [0; KEY_BYTES];
        key[..8].copy_from_slice(&claim.to_le_bytes());
        proof(&key, b"alive", asked, &[], &[])
    }
}

/// Both sides of the question whether an engine lives, which anybody may put: whether bytes are such a question. Who does not know the claim
/// answers none. For the fuzz targets.
#[doc(hidden)]
#[must_use]
pub fn fuzz_alive(bytes: &[u8]) -> bool {
    let (alive, _) = Alive::ask(u64::MAX, [3; NONCE_BYTES]);
    assert!(!alive.is_answered(bytes), "an answer without the claim");
    match Alive::reply(7, bytes) {
        Some(answer) => {
            assert!(answer.len() < 128 && !alive.is_answered(&answer), "one claim does not answer for another");
            true
        }
        None => false,
    }
}

/// Tells a client that speaks without TLS that it is due.
pub(super) fn tls_due() -> Vec<u8> {
    message(TLS_DUE, &[])
}

/// Tells whoever comes that there is no room for one more.
pub(super) fn crowded() -> Vec<u8> {
    message(CROWDED, &[])
}

/// Whether it is that what came, also where TLS is due.
pub(super) fn is_crowded(bytes: &[u8]) -> bool {
    bytes == crowded()
}

/// What is left of a handshake's time.
pub(super) fn left(deadline: Instant) -> Result<Duration, HandshakeError> {
    match deadline.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(HandshakeError::Timeout),
        left => Ok(left),
    }
}

/// A stream during the handshake: a budget of bytes, one deadline for everything.
pub(super) struct Wire<'a> {
    stream: &'a Stream,
    deadline: Instant,
    read: usize,
    limit: usize,
}

impl<'a> Wire<'a> {
    pub(super) fn new(stream: &'a Stream, deadline: Instant, limits: &Limits) -> Self {
        Wire { stream, deadline, read: 0, limit: limits.handshake_bytes }
    }

    pub(super) fn send(&mut self, message: &[u8]) -> Result<(), HandshakeError> {
        self.stream.socket().set_write_timeout(Some(left(self.deadline)?)).map_err(HandshakeError::Io)?;
        (&mut &*self.stream).write_all(message).map_err(HandshakeError::from_io)
    }

    /// Reads exactly one message and not a byte more.
    pub(super) fn receive(&mut self) -> Result<Vec<u8>, HandshakeError> {
        let mut message = vec![0; HEADER_BYTES];
        self.fill(&mut message)?;
        if is_crowded(&message) {
            return Err(HandshakeError::Crowded);
        }
        let (_, length) = header(&message)?;
        let bytes = self.read + length;
        if bytes > self.limit {
            return Err(HandshakeError::TooLong { bytes, limit: self.limit });
        }
        message.resize(HEADER_BYTES + length, 0);
        self.fill(&mut message[HEADER_BYTES..])?;
        Ok(message)
    }

    fn fill(&mut self, mut into: &mut [u8]) -> Result<(), HandshakeError> {
        while !into.is_empty() {
            // The deadline holds for the whole handshake: a peer that sends a byte now and then
            // does not buy time.
            match self.stream.read_by(into, Some(self.deadline)) {
                Ok(0) => return Err(HandshakeError::Truncated),
                Ok(read) => {
                    self.read += read;
                    into = &mut into[read..];
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(HandshakeError::from_io(error)),
            }
        }
        Ok(())
    }
}

impl HandshakeError {
    /// What a failed read or write means.
    pub(super) fn from_io(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => HandshakeError::Timeout,
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => HandshakeError::Truncated,
            _ => match error.downcast::<rustls::Error>() {
                Ok(error) => tls::classified(error),
                Err(error) => HandshakeError::Io(error),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Secret;
    use super::*;

    fn secret(byte: u8) -> Keys {
        let mut bytes = [byte; 32];
        bytes[0] ^= 1;
        Keys::all(&Secret::new(bytes).unwrap())
    }

    fn begin(keys: &Keys, role: Role, context: &[u8]) -> (Client, Vec<u8>) {
        Client::hello(keys, role, "q 7", context, [1; 32]).unwrap()
    }

    fn converse(ours: &Keys, theirs: &Keys) -> Result<Proved, HandshakeError> {
        let (client, hello) = begin(theirs, Role::Feed, b"context");
        let (server, challenge) = Server::challenge(ours, &hello, [2; 32], b"")?;
        server.verify(&client.answer(&challenge, b"")?)
    }

    #[test]
    fn equal_secrets_agree_on_role_and_context() {
        assert_eq!(
            converse(&secret(7), &secret(7)).unwrap(),
            Proved { role: Role::Feed, scope: "q 7".into(), context: b"context".to_vec() }
        );
    }

    #[test]
    fn the_client_refuses_a_server_with_another_secret() {
        assert!(matches!(converse(&secret(7), &secret(8)), Err(HandshakeError::Proof)));
    }

    #[test]
    fn the_server_refuses_a_client_with_another_secret() {
        let (_, hello) = begin(&secret(8), Role::Feed, b"");
        let (server, challenge) = Server::challenge(&secret(7), &hello, [2; 32], b"").unwrap();
        // This client does not care whether the server is genuine.
        let nonce = &challenge[HEADER_BYTES..][..NONCE_BYTES];
        let forged =
            message(PROOF, &[&proof(&secret(8).find(Role::Feed, "q 7").unwrap(), b"client", &hello, nonce, b"")]);
        assert!(matches!(server.verify(&forged), Err(HandshakeError::Proof)));
    }

    #[test]
    fn a_recorded_conversation_does_not_work_twice() {
        let (client, hello) = begin(&secret(7), Role::Mesh, b"");
        let (server, challenge) = Server::challenge(&secret(7), &hello, [2; 32], b"").unwrap();
        let answer = client.answer(&challenge, b"").unwrap();
        server.verify(&answer).unwrap();
        let (server, _) = Server::challenge(&secret(7), &hello, [3; 32], b"").unwrap();
        assert!(matches!(server.verify(&answer), Err(HandshakeError::Proof)));
    }

    #[test]
    fn a_proof_reflected_to_its_author_is_refused() {
        let (_, hello) = begin(&secret(7), Role::Feed, b"");
        let (server, challenge) = Server::challenge(&secret(7), &hello, [2; 32], b"").unwrap();
        let echo = message(PROOF, &[&challenge[HEADER_BYTES + NONCE_BYTES..]]);
        assert!(matches!(server.verify(&echo), Err(HandshakeError::Proof)));
        assert!(Server::challenge(&secret(7), &hello, [1; 32], b"").is_err(), "its own nonce");
    }

    #[test]
    fn role_scope_and_context_are_covered_by_the_proof() {
        let scope = HEADER_BYTES + 1 + NONCE_BYTES + 2;
        for at in [HEADER_BYTES, scope, scope + 3] {
            let (client, mut hello) = begin(&secret(7), Role::Feed, b"a");
            hello[at] ^= 1;
            let Ok((server, challenge)) = Server::challenge(&secret(7), &hello, [2; 32], b"") else {
                continue;
            };
            assert!(matches!(client.answer(&challenge, b""), Err(HandshakeError::Proof)));
            drop(server);
        }
    }

    #[test]
    fn a_key_of_another_role_or_scope_proves_nothing() {
        let (all, feed) = (Secret::new(std::array::from_fn(|at| at as u8)).unwrap(), Role::Feed);
        let ours = Keys::all(&all);
        let one = Keys::of(&all, feed, "q 7");
        assert_eq!(converse(&ours, &one).unwrap().scope, "q 7");
        assert!(Client::hello(&one, feed, "q 8", b"", [1; 32]).is_none());
        assert!(Client::hello(&one, Role::Member, "q 7", b"", [1; 32]).is_none());
        // One who writes another role or scope over it.
        for (role, scope) in [(Role::Member, "q 7"), (Role::Drain, "q 7"), (feed, "q 8")] {
            let (_, hello) = Client::hello(&ours, role, scope, b"", [1; 32]).unwrap();
            let (server, challenge) = Server::challenge(&ours, &hello, [2; 32], b"").unwrap();
            let key = one.find(feed, "q 7").unwrap();
            let thief = Client { key, hello: hello.clone() };
            assert!(matches!(thief.answer(&challenge, b""), Err(HandshakeError::Proof)));
            let forged = message(PROOF, &[&proof(&key, b"client", &hello, &[2; 32], b"")]);
            assert!(matches!(server.verify(&forged), Err(HandshakeError::Proof)));
        }
    }

    #[test]
    fn a_server_without_the_key_proves_nothing_and_believes_nobody() {
        let secret = Secret::new(std::array::from_fn(|at| at as u8)).unwrap();
        let (all, member) = (Keys::all(&secret), Keys::member(&secret, "0"));
        let (client, hello) = Client::hello(&all, Role::Member, "1", b"", [1; 32]).unwrap();
        let (server, challenge) = Server::challenge(&member, &hello, [2; 32], b"").unwrap();
        assert!(matches!(client.answer(&challenge, b""), Err(HandshakeError::Proof)));
        let known = all.find(Role::Member, "1").unwrap();
        let right = message(PROOF, &[&proof(&known, b"client", &hello, &[2; 32], b"")]);
        let refused = server.verify(&right);
        assert!(
            matches!(&refused, Err(HandshakeError::NoKey { role: Role::Member, scope }) if scope == "1"),
            "{refused:?}"
        );
        let zero = message(PROOF, &[&[0; PROOF_BYTES]]);
        assert!(server.verify(&zero).is_err());
    }

    #[test]
    fn proofs_of_another_tls_connection_are_refused() {
        let keys = secret(7);
        let (client, hello) = begin(&keys, Role::Feed, b"");
        let (server, challenge) = Server::challenge(&keys, &hello, [2; 32], b"one").unwrap();
        assert!(matches!(client.answer(&challenge, b"other"), Err(HandshakeError::Proof)));
        let (client, _) = begin(&keys, Role::Feed, b"");
        server.verify(&client.answer(&challenge, b"one").unwrap()).unwrap();
        let (client, _) = begin(&keys, Role::Feed, b"");
        assert!(matches!(client.answer(&tls_due(), b""), Err(HandshakeError::TlsDue)));
    }

    #[test]
    fn only_who_knows_the_claim_says_that_its_engine_is_there() {
        let (alive, ask) = Alive::ask(7, [3; 32]);
        let right = Alive::reply(7, &ask).unwrap();
        assert!(alive.is_answered(&right));
        assert!(!alive.is_answered(&Alive::reply(8, &ask).unwrap()), "another engine");
        let (other, again) = Alive::ask(7, [4; 32]);
        assert!(!other.is_answered(&right), "an answer of before");
        for wrong in [&ask[..], &again, &tls_due(), b"HTTP/1.1 400 ", b"", &message(ALIVE, &[]), &right[..20]] {
            assert!(!alive.is_answered(wrong));
        }
        let (_, hello) = begin(&secret(7), Role::Feed, b"");
        for no_question in [&hello[..], &ask[..20], &message(ASK, &[b"short"]), b""] {
            assert!(Alive::reply(7, no_question).is_none());
        }
        assert!(Server::challenge(&secret(7), &ask, [2; 32], b"").is_err(), "a question is no hello");
    }

    #[test]
    fn malformed_messages_are_named() {
        let refuse = |hello: &[u8]| Server::challenge(&secret(7), hello, [2; 32], b"").err().unwrap();
        assert!(matches!(refuse(b""), HandshakeError::Truncated));
        assert!(matches!(refuse(b"GET / HTTP/1.1"), HandshakeError::Magic { .. }));
        let (_, good) = begin(&secret(7), Role::Feed, b"");
        let mut other = good.clone();
        other[4] = 9;
        assert!(matches!(refuse(&other), HandshakeError::Version { found: 9 }));
        let mut other = good.clone();
        other[HEADER_BYTES] = 77;
        assert!(matches!(refuse(&other), HandshakeError::UnknownRole { found: 77 }));
        assert!(matches!(refuse(&message(PROOF, &[])), HandshakeError::Unexpected { .. }));
        assert!(matches!(refuse(&message(HELLO, &[&[2]])), HandshakeError::Unexpected { .. }));
        assert!(matches!(refuse(&good[..20]), HandshakeError::Unexpected { .. }));
        let mut other = good.clone();
        other[HEADER_BYTES + 1 + NONCE_BYTES] = 200; // a scope of 200 bytes
        assert!(matches!(refuse(&other), HandshakeError::Unexpected { .. }));
        let mut other = good.clone();
        other[HEADER_BYTES + 1 + NONCE_BYTES + 2] = 0xff; // a scope that is no text
        assert!(matches!(refuse(&other), HandshakeError::Unexpected { .. }));
    }
}
