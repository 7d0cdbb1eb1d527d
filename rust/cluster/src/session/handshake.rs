//! Mutual authentication by HMAC-SHA256 over both nonces.
//!
//! ```text
//! client                                      server
//!   hello     role, nonce c, context   ->
//!                                      <-     challenge  nonce s, MAC("server", hello, s)
//!   proof     MAC("client", hello, s)  ->
//! ```
//! Both proofs cover the whole hello, hence the role and the context (query, generation, ...), and
//! the fresh nonce of the other side: a recorded conversation is worthless. The label in front
//! tells the directions apart, so a proof cannot be reflected to its author; a server also refuses
//! to meet its own nonce. Proofs are compared in constant time. The context is opaque here and is
//! interpreted only after the proof.
//!
//! [`Client`] and [`Server`] take messages and return messages; [`Wire`] puts them on a socket with
//! a budget of bytes and time.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use hmac::{Hmac, Mac};
use sha2::Sha256;
use subtle::ConstantTimeEq;
use thiserror::Error;

use super::{Limits, Secret};

const MAGIC: [u8; 4] = *b"pnsk";
const VERSION: u8 = 1;
const HEADER_BYTES: usize = 8;
const PROOF_BYTES: usize = 32;
/// Bytes of a nonce.
pub const NONCE_BYTES: usize = 32;

const HELLO: u8 = 1;
const CHALLENGE: u8 = 2;
const PROOF: u8 = 3;

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Role {
    /// A member at the registry.
    Member = 1,
    /// A source of rows at a member.
    Feed = 2,
    /// A reader of results at a member.
    Drain = 3,
    /// Another member of one query and generation.
    Mesh = 4,
}

impl Role {
    fn from_byte(byte: u8) -> Option<Role> {
        [Role::Member, Role::Feed, Role::Drain, Role::Mesh].into_iter().find(|role| *role as u8 == byte)
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
    #[error("handshake version {found}, not 1")]
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
    /// The other side does not know the secret, or repeats what somebody else said.
    #[error("the other side did not prove that it knows the secret")]
    Proof,
    /// The operating system gave no random bytes.
    #[error("no random bytes: {0}")]
    Random(String),
}

impl HandshakeError {
    /// True when the cause is the secret, not the network.
    pub fn is_authentication(&self) -> bool {
        matches!(self, HandshakeError::Proof)
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

fn proof(secret: &Secret, side: &[u8], hello: &[u8], nonce: &[u8]) -> [u8; PROOF_BYTES] {
    let mut mac = <Hmac<Sha256> as Mac>::new_from_slice(secret.bytes()).expect("any key length is allowed");
    mac.update(b"penstock handshake 1 ");
    mac.update(side);
    mac.update(&(hello.len() as u64).to_le_bytes());
    mac.update(hello);
    mac.update(nonce);
    mac.finalize().into_bytes().into()
}

/// The side that dials.
pub struct Client {
    secret: Secret,
    hello: Vec<u8>,
}

impl Client {
    /// Starts a handshake; returns the message to send first.
    pub fn hello(secret: &Secret, role: Role, context: &[u8], nonce: [u8; NONCE_BYTES]) -> (Client, Vec<u8>) {
        let hello = message(HELLO, &[&[role as u8], &nonce, context]);
        (Client { secret: secret.clone(), hello: hello.clone() }, hello)
    }

    /// Checks the server's proof; returns the message that ends the handshake.
    ///
    /// # Errors
    /// [`HandshakeError::Proof`] when the server does not know the secret; others when the message
    /// is not a challenge.
    pub fn answer(self, challenge: &[u8]) -> Result<Vec<u8>, HandshakeError> {
        let body = body(challenge, CHALLENGE)?;
        if body.len() != NONCE_BYTES + PROOF_BYTES {
            return Err(HandshakeError::Unexpected { kind: CHALLENGE, bytes: body.len() });
        }
        let (nonce, theirs) = body.split_at(NONCE_BYTES);
        let expected = proof(&self.secret, b"server", &self.hello, nonce);
        if !bool::from(expected.ct_eq(theirs)) {
            return Err(HandshakeError::Proof);
        }
        Ok(message(PROOF, &[&proof(&self.secret, b"client", &self.hello, nonce)]))
    }
}

/// The side that listens, after its first message.
pub struct Server {
    secret: Secret,
    hello: Vec<u8>,
    nonce: [u8; NONCE_BYTES],
    role: Role,
}

impl Server {
    /// Takes the client's first message; returns the challenge to send.
    ///
    /// # Errors
    /// When the message is not a hello, or [`HandshakeError::Proof`] when it carries our own nonce.
    pub fn challenge(
        secret: &Secret,
        hello: &[u8],
        nonce: [u8; NONCE_BYTES],
    ) -> Result<(Server, Vec<u8>), HandshakeError> {
        let body = body(hello, HELLO)?;
        if body.len() < 1 + NONCE_BYTES {
            return Err(HandshakeError::Unexpected { kind: HELLO, bytes: body.len() });
        }
        let role = Role::from_byte(body[0]).ok_or(HandshakeError::UnknownRole { found: body[0] })?;
        if body[1..1 + NONCE_BYTES] == nonce {
            return Err(HandshakeError::Proof);
        }
        let ours = proof(secret, b"server", hello, &nonce);
        let challenge = message(CHALLENGE, &[&nonce, &ours]);
        Ok((Server { secret: secret.clone(), hello: hello.to_vec(), nonce, role }, challenge))
    }

    /// Checks the client's proof; returns what the connection is for.
    ///
    /// # Errors
    /// [`HandshakeError::Proof`] when the client does not know the secret.
    pub fn verify(self, answer: &[u8]) -> Result<(Role, Vec<u8>), HandshakeError> {
        let theirs = body(answer, PROOF)?;
        let expected = proof(&self.secret, b"client", &self.hello, &self.nonce);
        if !bool::from(expected.ct_eq(theirs)) {
            return Err(HandshakeError::Proof);
        }
        Ok((self.role, self.hello[HEADER_BYTES + 1 + NONCE_BYTES..].to_vec()))
    }
}

/// A socket during the handshake: a budget of bytes, one deadline for everything.
pub(super) struct Wire<'a> {
    stream: &'a mut TcpStream,
    deadline: Instant,
    read: usize,
    limit: usize,
}

impl<'a> Wire<'a> {
    pub(super) fn new(stream: &'a mut TcpStream, limits: &Limits) -> Self {
        let deadline = Instant::now() + limits.handshake_time;
        Wire { stream, deadline, read: 0, limit: limits.handshake_bytes }
    }

    fn left(&self) -> Result<Duration, HandshakeError> {
        match self.deadline.saturating_duration_since(Instant::now()) {
            Duration::ZERO => Err(HandshakeError::Timeout),
            left => Ok(left),
        }
    }

    pub(super) fn send(&mut self, message: &[u8]) -> Result<(), HandshakeError> {
        self.stream.set_write_timeout(Some(self.left()?)).map_err(HandshakeError::Io)?;
        self.stream.write_all(message).map_err(translate)
    }

    /// Reads exactly one message and not a byte more.
    pub(super) fn receive(&mut self) -> Result<Vec<u8>, HandshakeError> {
        let mut message = vec![0; HEADER_BYTES];
        self.fill(&mut message)?;
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
            self.stream.set_read_timeout(Some(self.left()?)).map_err(HandshakeError::Io)?;
            match self.stream.read(into) {
                Ok(0) => return Err(HandshakeError::Truncated),
                Ok(read) => {
                    self.read += read;
                    into = &mut into[read..];
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(translate(error)),
            }
        }
        Ok(())
    }
}

fn translate(error: io::Error) -> HandshakeError {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => HandshakeError::Timeout,
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => HandshakeError::Truncated,
        _ => HandshakeError::Io(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(byte: u8) -> Secret {
        let mut bytes = [byte; 32];
        bytes[0] ^= 1;
        Secret::new(bytes).unwrap()
    }

    fn converse(ours: &Secret, theirs: &Secret) -> Result<(Role, Vec<u8>), HandshakeError> {
        let (client, hello) = Client::hello(theirs, Role::Feed, b"context", [1; 32]);
        let (server, challenge) = Server::challenge(ours, &hello, [2; 32])?;
        server.verify(&client.answer(&challenge)?)
    }

    #[test]
    fn equal_secrets_agree_on_role_and_context() {
        assert_eq!(converse(&secret(7), &secret(7)).unwrap(), (Role::Feed, b"context".to_vec()));
    }

    #[test]
    fn the_client_refuses_a_server_with_another_secret() {
        assert!(matches!(converse(&secret(7), &secret(8)), Err(HandshakeError::Proof)));
    }

    #[test]
    fn the_server_refuses_a_client_with_another_secret() {
        let (_, hello) = Client::hello(&secret(8), Role::Feed, b"", [1; 32]);
        let (server, challenge) = Server::challenge(&secret(7), &hello, [2; 32]).unwrap();
        // This client does not care whether the server is genuine.
        let nonce = &challenge[HEADER_BYTES..][..NONCE_BYTES];
        let forged = message(PROOF, &[&proof(&secret(8), b"client", &hello, nonce)]);
        assert!(matches!(server.verify(&forged), Err(HandshakeError::Proof)));
    }

    #[test]
    fn a_recorded_conversation_does_not_work_twice() {
        let (client, hello) = Client::hello(&secret(7), Role::Mesh, b"", [1; 32]);
        let (server, challenge) = Server::challenge(&secret(7), &hello, [2; 32]).unwrap();
        let answer = client.answer(&challenge).unwrap();
        server.verify(&answer).unwrap();
        let (server, _) = Server::challenge(&secret(7), &hello, [3; 32]).unwrap();
        assert!(matches!(server.verify(&answer), Err(HandshakeError::Proof)));
    }

    #[test]
    fn a_proof_reflected_to_its_author_is_refused() {
        let (_, hello) = Client::hello(&secret(7), Role::Feed, b"", [1; 32]);
        let (server, challenge) = Server::challenge(&secret(7), &hello, [2; 32]).unwrap();
        let echo = message(PROOF, &[&challenge[HEADER_BYTES + NONCE_BYTES..]]);
        assert!(matches!(server.verify(&echo), Err(HandshakeError::Proof)));
        assert!(Server::challenge(&secret(7), &hello, [1; 32]).is_err(), "its own nonce");
    }

    #[test]
    fn role_and_context_are_covered_by_the_proof() {
        for at in [HEADER_BYTES, HEADER_BYTES + 1 + NONCE_BYTES] {
            let (client, mut hello) = Client::hello(&secret(7), Role::Feed, b"a", [1; 32]);
            hello[at] ^= 1;
            let Ok((server, challenge)) = Server::challenge(&secret(7), &hello, [2; 32]) else {
                continue;
            };
            assert!(matches!(client.answer(&challenge), Err(HandshakeError::Proof)));
            drop(server);
        }
    }

    #[test]
    fn malformed_messages_are_named() {
        let refuse = |hello: &[u8]| Server::challenge(&secret(7), hello, [2; 32]).err().unwrap();
        assert!(matches!(refuse(b""), HandshakeError::Truncated));
        assert!(matches!(refuse(b"GET / HTTP/1.1"), HandshakeError::Magic { .. }));
        let (_, good) = Client::hello(&secret(7), Role::Feed, b"", [1; 32]);
        let mut other = good.clone();
        other[4] = 9;
        assert!(matches!(refuse(&other), HandshakeError::Version { found: 9 }));
        let mut other = good.clone();
        other[HEADER_BYTES] = 77;
        assert!(matches!(refuse(&other), HandshakeError::UnknownRole { found: 77 }));
        assert!(matches!(refuse(&message(PROOF, &[])), HandshakeError::Unexpected { .. }));
        assert!(matches!(refuse(&message(HELLO, &[&[2]])), HandshakeError::Unexpected { .. }));
        assert!(matches!(refuse(&good[..20]), HandshakeError::Unexpected { .. }));
    }
}
