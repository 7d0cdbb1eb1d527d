//! Certificates of an engine: an authority made of its secret, and what it signs for each role.
//!
//! Owns the form: X.509 with Ed25519 keys, written here field by field since it never varies; whoever checks one (module `tls`)
//! does so by rustls's verifier. Keys and certificates follow from the secret (HMAC, deterministic signatures), so the driver
//! keeps nothing and a registry needs nothing but its secret. The authority lives as long as the secret does, which is the life
//! of the engine: certificates name no end of their own, and clocks that differ turn nobody away.
//!
//! Names are for roles, not hosts: `registry.penstock`, `member.penstock`, `mesh.penstock` for those who listen, and of each
//! role and scope `<hash of the scope>.<role>.penstock` for those who dial.

use std::fmt::Write as _;
use std::sync::Arc;

use rustls::SignatureScheme;
use rustls::crypto::ring::sign::any_eddsa_type;
use rustls::pki_types::PrivatePkcs8KeyDer;
use rustls::sign::SigningKey;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::Role;
use super::keys::{KEY_BYTES, derive};

/// The name of the authority; it is its key that is trusted.
const AUTHORITY: &str = "penstock engine";
const REGISTRY: &str = "registry.penstock";
const MEMBER: &str = "member.penstock";
const MESH: &str = "mesh.penstock";

/// The parts of an Ed25519 private key in PKCS #8 before its 32 bytes.
const PKCS8: [u8; 16] = [0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20];
const ED25519: [u8; 7] = [0x30, 5, 6, 3, 0x2b, 0x65, 0x70];
const SERVER: [u8; 10] = [6, 8, 0x2b, 6, 1, 5, 5, 7, 3, 1];
const CLIENT: [u8; 10] = [6, 8, 0x2b, 6, 1, 5, 5, 7, 3, 2];

/// A certificate with its key.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Leaf {
    pub(super) certificate: Vec<u8>,
    seed: [u8; KEY_BYTES],
}

impl Leaf {
    /// The private key.
    pub(super) fn key(&self) -> PrivatePkcs8KeyDer<'static> {
        pkcs8(&self.seed)
    }
}

/// What signs the certificates of an engine.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Authority {
    seed: [u8; KEY_BYTES],
}

impl Authority {
    /// The one of a secret.
    pub(super) fn of(secret: &[u8; KEY_BYTES]) -> Self {
        Authority { seed: derive(secret, b"penstock authority 1 ", b"") }
    }

    /// What it signs with: of a seed that is used for nothing else.
    fn signing(&self) -> Arc<dyn SigningKey> {
        signing(&derive(&self.seed, b"penstock authority key 1 ", b""))
    }

    /// Its own certificate, which everybody of the engine trusts.
    pub(super) fn certificate(&self) -> Vec<u8> {
        let constraints = extension(&[0x55, 0x1d, 0x13], true, &sequence(&[&[1, 1, 0xff]]));
        // May sign certificates, and nothing else.
        let usage = extension(&[0x55, 0x1d, 0x0f], true, &[3, 2, 2, 4]);
        let key = self.signing();
        self.sign(&key, AUTHORITY, &[&constraints, &usage])
    }

    /// For the registry.
    pub(super) fn registry(&self) -> Leaf {
        // Whoever has the authority may be all of them.
        self.leaf("registry", &[REGISTRY, MEMBER, MESH], &[&SERVER])
    }

    /// For a member: listens as one, joins in its slot, and dials other members.
    pub(super) fn member(&self, slot: &str) -> Leaf {
        let own = client_name(Role::Member, slot);
        self.leaf(&own, &[&own, MEMBER, MESH], &[&SERVER, &CLIENT])
    }

    /// For who dials in a role under a scope, and in a mesh listens as well.
    pub(super) fn dialler(&self, role: Role, scope: &str) -> Leaf {
        let own = client_name(role, scope);
        match role {
            Role::Mesh => self.leaf(&own, &[&own], &[&SERVER, &CLIENT]),
            _ => self.leaf(&own, &[&own], &[&CLIENT]),
        }
    }

    fn leaf(&self, common: &str, names: &[&str], uses: &[&[u8]]) -> Leaf {
        let seed = derive(&self.seed, b"penstock certificate 1 ", common.as_bytes());
        let names: Vec<Vec<u8>> = names.iter().map(|name| tlv(0x82, &[name.as_bytes()])).collect();
        let names: Vec<&[u8]> = names.iter().map(Vec::as_slice).collect();
        let names = extension(&[0x55, 0x1d, 0x11], false, &sequence(&names));
        let uses = extension(&[0x55, 0x1d, 0x25], true, &sequence(uses));
        let certificate = self.sign(&signing(&seed), common, &[&names, &uses]);
        Leaf { certificate, seed }
    }

    fn sign(&self, subject: &Arc<dyn SigningKey>, common: &str, extensions: &[&[u8]]) -> Vec<u8> {
        let public = subject.public_key().expect("an Ed25519 key tells its public half");
        let mut serial = Sha256::digest([common.as_bytes(), &public].concat())[..16].to_vec();
        serial[0] = serial[0] & 0x7f | 0x40; // positive, and of one length
        let validity = sequence(&[&tlv(0x17, &[b"700101000000Z"]), &tlv(0x18, &[b"99991231235959Z"])]);
        let extensions = tlv(0xa3, &[&sequence(extensions)]);
        let signed = sequence(&[
            &tlv(0xa0, &[&[2, 1, 2]]),
            &tlv(2, &[&serial]),
            &ED25519,
            &name(AUTHORITY),
            &validity,
            &name(common),
            &public,
            &extensions,
        ]);
        let signer = self.signing().choose_scheme(&[SignatureScheme::ED25519]).expect("this is its scheme");
        let signature = signer.sign(&signed).expect("Ed25519 signs everything");
        sequence(&[&signed, &ED25519, &tlv(3, &[&[0], &signature])])
    }
}

/// Whom a dialler of this role expects.
pub(super) fn server_name(role: Role) -> &'static str {
    match role {
        Role::Member => REGISTRY,
        Role::Feed | Role::Drain => MEMBER,
        Role::Mesh => MESH,
    }
}

/// Who a dialler of this role and scope has to be.
pub(super) fn client_name(role: Role, scope: &str) -> String {
    let role = match role {
        Role::Member => "member",
        Role::Feed => "feed",
        Role::Drain => "drain",
        Role::Mesh => return MESH.to_owned(),
    };
    let mut name = String::with_capacity(48);
    for byte in &Sha256::digest(scope)[..16] {
        write!(name, "{byte:02x}").expect("a string takes everything");
    }
    name + "." + role + ".penstock"
}

fn pkcs8(seed: &[u8; KEY_BYTES]) -> PrivatePkcs8KeyDer<'static> {
    PrivatePkcs8KeyDer::from([&PKCS8[..], seed].concat())
}

fn signing(seed: &[u8; KEY_BYTES]) -> Arc<dyn SigningKey> {
    any_eddsa_type(&pkcs8(seed)).expect("32 bytes are an Ed25519 key")
}

fn tlv(tag: u8, parts: &[&[u8]]) -> Vec<u8> {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    let mut out = vec![tag];
    match u8::try_from(length) {
        Ok(short @ 0..0x80) => out.push(short),
        Ok(byte) => out.extend([0x81, byte]),
        Err(_) => out.extend([0x82, (length >> 8) as u8, length as u8]),
    }
    parts.iter().for_each(|part| out.extend_from_slice(part));
    out
}

fn sequence(parts: &[&[u8]]) -> Vec<u8> {
    tlv(0x30, parts)
}

fn name(common: &str) -> Vec<u8> {
    let attribute = sequence(&[&[6, 3, 0x55, 4, 3], &tlv(0x0c, &[common.as_bytes()])]);
    sequence(&[&tlv(0x31, &[&attribute])])
}

fn extension(identifier: &[u8], critical: bool, value: &[u8]) -> Vec<u8> {
    let critical: &[u8] = if critical { &[1, 1, 0xff] } else { &[] };
    sequence(&[&tlv(6, &[identifier]), critical, &tlv(4, &[value])])
}

#[cfg(test)]
mod tests {
    use rustls::RootCertStore;
    use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
    use rustls::server::WebPkiClientVerifier;
    use rustls::server::danger::ClientCertVerifier;

    use super::*;
    use crate::session::tls;

    fn verifier(authority: &Authority) -> Arc<dyn ClientCertVerifier> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from(authority.certificate())).unwrap();
        WebPkiClientVerifier::builder_with_provider(Arc::new(roots), tls::provider()).build().unwrap()
    }

    #[test]
    fn a_certificate_is_of_its_authority_role_and_scope() {
        let (ours, theirs) = (Authority::of(&[7; 32]), Authority::of(&[8; 32]));
        let feed = ours.dialler(Role::Feed, "q 7");
        let der = CertificateDer::from(feed.certificate.clone());
        let is = |name: &str| {
            let parsed = rustls::server::ParsedCertificate::try_from(&der).unwrap();
            rustls::client::verify_server_name(&parsed, &ServerName::try_from(name.to_owned()).unwrap()).is_ok()
        };
        for now in [1_800_000_000, 250_000_000_000] {
            let now = UnixTime::since_unix_epoch(std::time::Duration::from_secs(now));
            verifier(&ours).verify_client_cert(&der, &[], now).unwrap();
            assert!(verifier(&theirs).verify_client_cert(&der, &[], now).is_err(), "another engine");
        }
        assert!(is(&client_name(Role::Feed, "q 7")));
        let others =
            [client_name(Role::Feed, "q 8"), client_name(Role::Drain, "q 7"), client_name(Role::Member, "q 7")];
        for other in others.iter().map(String::as_str).chain([REGISTRY, MEMBER, MESH]) {
            assert!(!is(other), "{other}");
        }
        assert_eq!(feed.certificate, ours.dialler(Role::Feed, "q 7").certificate, "nothing is left to chance");
    }

    #[test]
    fn any_length_is_written() {
        for length in [0, 1, 127, 128, 255, 256, 4000] {
            let bytes = vec![9; length];
            let written = tlv(4, &[&bytes]);
            let header = written.len() - length;
            assert_eq!(
                header,
                if length < 128 {
                    2
                } else if length < 256 {
                    3
                } else {
                    4
                }
            );
            assert_eq!(&written[header..], &bytes);
        }
    }
}
