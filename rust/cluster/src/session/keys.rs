//! Keys: what a process proves itself with, and whom it lets in.
//!
//! ```text
//! secret                               the driver's, leaves it never
//!   role key   HMAC(secret, role)      of members for feeds, drains and meshes: they let them in
//!     key      HMAC(role key, scope)   of one resident's slot; of the feeds, or drains, of one epoch of one query
//! ```
//! Whoever has a key speaks in that role under that scope and in no other: the role keys of others cannot be computed from it.
//! So a task that Spark runs carries no more than its own work needs. Both ends of a connection take the scope from the
//! hello; the server compares it with what the connection is for once the peer has proved the key.
//!
//! Beside its keys a process has a certificate of the engine's authority for the same role and scope (module `certificates`).

use std::fmt;

use hmac::{Hmac, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use super::Role;
use super::certificates::Authority;
use super::tls::{Identity, Own};
use crate::error::ClusterError;

pub(super) const KEY_BYTES: usize = 32;
/// Of the form of keys as bytes.
const VERSION: u8 = 2;

/// The secret of one engine: 256 bits of which all its keys are made. Never printed, and never sent.
#[derive(Clone)]
pub struct Secret([u8; KEY_BYTES]);

impl Secret {
    /// Takes the bytes of a secret.
    ///
    /// # Errors
    /// [`ClusterError::WeakSecret`] when all bytes are equal, as in a buffer nobody filled.
    pub fn new(bytes: [u8; KEY_BYTES]) -> Result<Self, ClusterError> {
        if bytes.iter().all(|byte| *byte == bytes[0]) {
            return Err(ClusterError::WeakSecret);
        }
        Ok(Secret(bytes))
    }

    /// The number by which an engine of this secret marks its claims on checkpoints: whoever reads a claim knows it.
    #[must_use]
    pub fn claim(&self) -> u64 {
        let made = derive(&self.0, b"penstock claim 1 ", &[]);
        u64::from_le_bytes(made[..8].try_into().expect("eight bytes"))
    }

    fn role_key(&self, role: Role) -> [u8; KEY_BYTES] {
        derive(&self.0, b"penstock role 1 ", &[role as u8])
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

pub(super) fn derive(key: &[u8; KEY_BYTES], label: &[u8], about: &[u8]) -> [u8; KEY_BYTES] {
    let mut mac = <Hmac<Sha256> as Mac>::new_from_slice(key).expect("any key length is allowed");
    mac.update(label);
    mac.update(about);
    mac.finalize().into_bytes().into()
}

fn scoped(role_key: &[u8; KEY_BYTES], scope: &str) -> [u8; KEY_BYTES] {
    derive(role_key, b"penstock scope 1 ", scope.as_bytes())
}

/// The key of a role, or of one scope of it.
#[derive(Clone, Serialize, Deserialize)]
struct Grant {
    role: Role,
    /// None: the key of the role, which lets every scope of it in.
    scope: Option<String>,
    key: [u8; KEY_BYTES],
}

fn own_grant(secret: &Secret, role: Role, scope: &str) -> Grant {
    let key = scoped(&secret.role_key(role), scope);
    Grant { role, scope: Some(scope.to_owned()), key }
}

/// The keys of one process. Never printed; as bytes they go to the task that uses them, and nowhere else.
#[derive(Clone, Serialize, Deserialize)]
pub struct Keys {
    grants: Vec<Grant>,
    /// Of the driver: the number of its engine's claims.
    claim: Option<u64>,
    identity: Identity,
}

impl Keys {
    /// All keys of a secret: the driver's, and those of processes that are one party anyway.
    #[must_use]
    pub fn all(secret: &Secret) -> Keys {
        let grant = |role| Grant { role, scope: None, key: secret.role_key(role) };
        let own = Own::Authority(Authority::of(&secret.0));
        let claim = Some(secret.claim());
        Keys { claim, ..Keys::made(secret, Role::ALL.into_iter().map(grant).collect(), own) }
    }

    /// Those of a resident: to join in its slot, to let feeds, drains and other members in, and to reach those.
    #[must_use]
    pub fn member(secret: &Secret, slot: &str) -> Keys {
        let serves = [Role::Feed, Role::Drain, Role::Mesh];
        let mut grants = vec![own_grant(secret, Role::Member, slot)];
        grants.extend(serves.map(|role| Grant { role, scope: None, key: secret.role_key(role) }));
        Keys::made(secret, grants, Own::Leaf(Authority::of(&secret.0).member(slot)))
    }

    /// The one of a task: speaks in a role under a scope.
    #[must_use]
    pub fn of(secret: &Secret, role: Role, scope: &str) -> Keys {
        let own = Own::Leaf(Authority::of(&secret.0).dialler(role, scope));
        Keys::made(secret, vec![own_grant(secret, role, scope)], own)
    }

    fn made(secret: &Secret, grants: Vec<Grant>, own: Own) -> Keys {
        let authority = Authority::of(&secret.0).certificate();
        Keys { grants, claim: None, identity: Identity { authority, own, always: false } }
    }

    /// The same, for connections that are encrypted also where they do not leave the host.
    #[must_use]
    pub fn always_encrypted(mut self) -> Keys {
        self.identity.always = true;
        self
    }

    /// The number of the engine's claims, where these are the driver's.
    pub(super) fn claim(&self) -> Option<u64> {
        self.claim
    }

    pub(super) fn identity(&self) -> &Identity {
        &self.identity
    }

    /// For the process that is to have them.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![VERSION];
        bytes.extend(postcard::to_stdvec(self).expect("names and bytes become bytes"));
        bytes
    }

    /// Reads what [`Keys::to_bytes`] made, or a secret: its 32 bytes are all keys.
    ///
    /// # Errors
    /// [`ClusterError::BadKey`], [`ClusterError::WeakSecret`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Keys, ClusterError> {
        if let Ok(secret) = <[u8; KEY_BYTES]>::try_from(bytes) {
            return Ok(Keys::all(&Secret::new(secret)?));
        }
        let bad = || ClusterError::BadKey { bytes: bytes.len() };
        match bytes.split_first() {
            Some((&VERSION, rest)) => postcard::from_bytes(rest).map_err(|_| bad()),
            _ => Err(bad()),
        }
    }

    /// Those of a process of a run whose secret is for that alone.
    #[must_use]
    pub fn mesh(secret: &Secret) -> Keys {
        let grant = Grant { role: Role::Mesh, scope: None, key: secret.role_key(Role::Mesh) };
        Keys::made(secret, vec![grant], Own::Leaf(Authority::of(&secret.0).dialler(Role::Mesh, "")))
    }

    /// The key with which to let a peer of this role and scope in; None when it is not among these. What is ours only to show
    /// lets nobody in.
    pub(super) fn admits(&self, role: Role, scope: &str) -> Option<[u8; KEY_BYTES]> {
        let whole = self.grants.iter().find(|grant| grant.role == role && grant.scope.is_none());
        whole.map(|grant| scoped(&grant.key, scope))
    }

    /// The key of a role under a scope, to show; None when it is not among these.
    pub(super) fn find(&self, role: Role, scope: &str) -> Option<[u8; KEY_BYTES]> {
        self.grants.iter().filter(|grant| grant.role == role).find_map(|grant| match &grant.scope {
            None => Some(scoped(&grant.key, scope)),
            Some(only) => (only == scope).then_some(grant.key),
        })
    }
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let roles = self.grants.iter().map(|grant| (grant.role, grant.scope.as_deref().unwrap_or("*")));
        f.debug_map().entries(roles).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret() -> Secret {
        Secret::new(std::array::from_fn(|at| at as u8)).unwrap()
    }

    #[test]
    fn a_key_is_of_one_role_and_scope() {
        let (all, feed) = (Keys::all(&secret()), Keys::of(&secret(), Role::Feed, "q 7"));
        assert_eq!(feed.find(Role::Feed, "q 7"), all.find(Role::Feed, "q 7"));
        for (role, scope) in [(Role::Feed, "q 8"), (Role::Feed, ""), (Role::Drain, "q 7"), (Role::Member, "q 7")] {
            assert!(feed.find(role, scope).is_none());
            assert_ne!(all.find(role, scope), all.find(Role::Feed, "q 7"));
        }
    }

    #[test]
    fn a_member_lets_tasks_in_and_is_of_one_slot() {
        let (all, member) = (Keys::all(&secret()), Keys::member(&secret(), "3"));
        for role in [Role::Feed, Role::Drain, Role::Mesh] {
            assert_eq!(member.find(role, "any"), all.find(role, "any"));
        }
        assert_eq!(member.find(Role::Member, "3"), all.find(Role::Member, "3"));
        assert!(member.find(Role::Member, "4").is_none() && member.admits(Role::Member, "3").is_none());
        assert!(Keys::of(&secret(), Role::Feed, "q 7").admits(Role::Feed, "q 7").is_none());
        assert!(Keys::mesh(&secret()).admits(Role::Mesh, "").is_some());
    }

    #[test]
    fn the_number_of_claims_is_the_drivers_and_tells_nothing() {
        let all = Keys::all(&secret());
        assert_eq!(all.claim(), Some(secret().claim()));
        assert_ne!(
            secret().claim(),
            Secret::new([7; 31].iter().chain(&[8]).copied().collect::<Vec<_>>().try_into().unwrap()).unwrap().claim()
        );
        assert_eq!(Keys::member(&secret(), "3").claim(), None);
        assert_eq!(Keys::of(&secret(), Role::Feed, "q 7").claim(), None);
    }

    #[test]
    fn keys_survive_their_bytes_and_show_themselves_to_nobody() {
        let member = Keys::member(&secret(), "3");
        let bytes = member.to_bytes();
        assert_eq!(Keys::from_bytes(&bytes).unwrap().find(Role::Feed, "x"), member.find(Role::Feed, "x"));
        assert!(!bytes.windows(KEY_BYTES).any(|part| part == secret().0), "the secret stays where it is");
        assert_eq!(format!("{member:?}"), r#"{Member: "3", Feed: "*", Drain: "*", Mesh: "*"}"#);
        assert!(Keys::from_bytes(&secret().0).unwrap().find(Role::Member, "9").is_some());
        for bad in [&[][..], &bytes[..bytes.len() - 1], &[9; 50]] {
            assert!(matches!(Keys::from_bytes(bad), Err(ClusterError::BadKey { bytes }) if bytes == bad.len()));
        }
        assert!(matches!(Keys::from_bytes(&[0; 32]), Err(ClusterError::WeakSecret)));
    }
}
