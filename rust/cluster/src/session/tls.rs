//! TLS 1.3 between two processes of an engine.
//!
//! Both ends show a certificate of the engine's authority, and both look at the name in it: a dialler wants a registry, member or
//! process of its run, a listener wants the role and scope that the handshake inside proves as well. There is no resumption and
//! no early data, no other version, and no certificate of anybody else is trusted.

use std::io::{self, Read};
use std::net::TcpStream;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use rustls::client::Resumption;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::{NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection};

use super::certificates::{self, Authority, Leaf};
use super::handshake::{self, HandshakeError, left};
use super::{Limits, Role};

/// The first byte of a TLS connection: a handshake record.
pub(super) const FIRST_BYTE: u8 = 0x16;
/// How much is read at once of a handshake.
const STEP_BYTES: usize = 2048;
/// Under this name both ends get bytes that are of this connection only.
const BINDING: &[u8] = b"EXPORTER-penstock";

/// Suites of TLS 1.3 alone, the fastest first.
pub(super) fn provider() -> Arc<CryptoProvider> {
    static PROVIDER: OnceLock<Arc<CryptoProvider>> = OnceLock::new();
    let made = || {
        use ring::cipher_suite::{TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256};
        let cipher_suites = vec![TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256];
        Arc::new(CryptoProvider { cipher_suites, ..ring::default_provider() })
    };
    PROVIDER.get_or_init(made).clone()
}

fn roots(authority: &[u8]) -> Result<RootCertStore, HandshakeError> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from(authority.to_vec())).map_err(classified)?;
    Ok(roots)
}

fn chain(leaf: &Leaf) -> Vec<CertificateDer<'static>> {
    vec![CertificateDer::from(leaf.certificate.clone())]
}

/// How one listens.
pub(super) fn server(authority: &[u8], leaf: &Leaf) -> Result<Arc<ServerConfig>, HandshakeError> {
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots(authority)?), provider())
        .build()
        .map_err(|error| HandshakeError::Tls(error.to_string()))?;
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(classified)?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain(leaf), leaf.key().into())
        .map_err(classified)?;
    config.send_tls13_tickets = 0;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    Ok(Arc::new(config))
}

/// How one dials.
fn client(authority: &[u8], leaf: &Leaf) -> Result<Arc<ClientConfig>, HandshakeError> {
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(classified)?
        .with_root_certificates(roots(authority)?)
        .with_client_auth_cert(chain(leaf), leaf.key().into())
        .map_err(classified)?;
    config.resumption = Resumption::disabled();
    config.enable_sni = false;
    Ok(Arc::new(config))
}

/// A connection after its handshake, and bytes that are of it alone.
pub(super) struct Secured {
    pub(super) connection: Connection,
    pub(super) binding: [u8; 32],
}

/// Dials: the peer is whom a dialler of this role expects.
pub(super) fn dial(
    socket: &TcpStream,
    authority: &[u8],
    leaf: &Leaf,
    role: Role,
    deadline: Instant,
    limits: &Limits,
) -> Result<Secured, HandshakeError> {
    let name = ServerName::try_from(certificates::server_name(role)).expect("a name of ours");
    let made = ClientConnection::new(client(authority, leaf)?, name).map_err(classified)?;
    complete(socket, made.into(), deadline, limits)
}

/// Accepts: the peer has a certificate of ours, whose name is looked at by [`is_of`].
pub(super) fn accept(
    socket: &TcpStream,
    config: &Arc<ServerConfig>,
    deadline: Instant,
    limits: &Limits,
) -> Result<Secured, HandshakeError> {
    let made = ServerConnection::new(config.clone()).map_err(classified)?;
    complete(socket, made.into(), deadline, limits)
}

/// Whether the certificate of the peer is that of a role and scope.
pub(super) fn is_of(connection: &Connection, role: Role, scope: &str) -> bool {
    let name = ServerName::try_from(certificates::client_name(role, scope)).expect("a name of ours");
    let shown = connection.peer_certificates().and_then(|shown| shown.first());
    let parsed = shown.and_then(|shown| ParsedCertificate::try_from(shown).ok());
    parsed.is_some_and(|parsed| rustls::client::verify_server_name(&parsed, &name).is_ok())
}

/// Runs a handshake with one deadline and as many bytes as may come before authentication.
fn complete(
    mut socket: &TcpStream,
    mut connection: Connection,
    deadline: Instant,
    limits: &Limits,
) -> Result<Secured, HandshakeError> {
    connection.set_buffer_limit(None);
    let (mut read, mut bytes) = (0, [0; STEP_BYTES]);
    loop {
        socket.set_write_timeout(Some(left(deadline)?)).map_err(HandshakeError::Io)?;
        while connection.wants_write() {
            connection.write_tls(&mut socket).map_err(HandshakeError::from_io)?;
        }
        if !connection.is_handshaking() {
            break;
        }
        socket.set_read_timeout(Some(left(deadline)?)).map_err(HandshakeError::Io)?;
        let came = match socket.read(&mut bytes) {
            Ok(0) => return Err(HandshakeError::Truncated),
            Ok(came) => came,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(HandshakeError::from_io(error)),
        };
        if read == 0 && handshake::is_crowded(&bytes[..came]) {
            return Err(HandshakeError::Crowded);
        }
        read += came;
        if read > limits.handshake_bytes {
            return Err(HandshakeError::TooLong { bytes: read, limit: limits.handshake_bytes });
        }
        let mut rest = &bytes[..came];
        while !rest.is_empty() {
            connection.read_tls(&mut rest).map_err(HandshakeError::Io)?;
            if let Err(error) = connection.process_new_packets() {
                // The alert says why; a peer that is gone need not know.
                let _ = connection.write_tls(&mut socket);
                return Err(classified(error));
            }
        }
    }
    let binding = connection.export_keying_material([0; 32], BINDING, None).map_err(classified)?;
    Ok(Secured { connection, binding })
}

/// What is the fault of a certificate, and what of anything else.
pub(super) fn classified(error: rustls::Error) -> HandshakeError {
    use rustls::AlertDescription as Alert;
    match error {
        rustls::Error::InvalidCertificate(_) | rustls::Error::NoCertificatesPresented => {
            HandshakeError::Certificate(error.to_string())
        }
        rustls::Error::AlertReceived(
            Alert::UnknownCA
            | Alert::BadCertificate
            | Alert::CertificateUnknown
            | Alert::CertificateRequired
            | Alert::UnsupportedCertificate
            | Alert::DecryptError
            | Alert::AccessDenied,
        ) => HandshakeError::Certificate(error.to_string()),
        other => HandshakeError::Tls(other.to_string()),
    }
}

/// The certificates with which one process shows itself, and when.
#[derive(Clone, serde::Serialize, serde::Deserialize)]
pub(super) struct Identity {
    /// The certificate that is trusted.
    pub(super) authority: Vec<u8>,
    pub(super) own: Own,
    /// Also between two processes of one host.
    pub(super) always: bool,
}

/// Who one is.
#[derive(Clone, serde::Serialize, serde::Deserialize)]
pub(super) enum Own {
    /// Whoever it wants to be.
    Authority(Authority),
    /// One of them.
    Leaf(Leaf),
}

impl Identity {
    /// What to show when dialling in a role under a scope.
    pub(super) fn dialler(&self, role: Role, scope: &str) -> Leaf {
        match &self.own {
            Own::Authority(authority) => authority.dialler(role, scope),
            Own::Leaf(leaf) => leaf.clone(),
        }
    }

    /// What to show when listening.
    pub(super) fn listener(&self) -> Leaf {
        match &self.own {
            Own::Authority(authority) => authority.registry(),
            Own::Leaf(leaf) => leaf.clone(),
        }
    }

    /// Whether a connection with this host has to be encrypted.
    pub(super) fn is_due(&self, host: std::net::IpAddr) -> bool {
        self.always || !host.to_canonical().is_loopback()
    }
}
