//! What is durable besides the data files: manifests and claims, their form on disk, and which manifest serves.
//!
//! A manifest says what the state at the end of a batch consists of: a list of data files. A claim says which engine writes to a
//! checkpoint from now on; claims are numbered and created only where there is none of that number. A note says what rows the sink of a batch has been
//! called with: who computes the batch again, after the death of its driver, sees whether they are the same.
//!
//! On disk all are `MAGIC version body length checksum`: the body is JSON, its length (8 bytes) and CRC-32 (4 bytes) stand at the end, little-endian,
//! so that a file that was torn, cut or changed is recognised whatever its beginning says. A file is never changed once written. One that has the
//! content of another, since somebody renamed or copied it, is not read: what it is said to be and what it would do are two things then.
//!
//! Invariants: state, output and manifest of a batch are of one attempt, which the generation names; generations ascend over
//! all claims of a checkpoint. Of several manifests of a batch the one of the newest claim, and of that the newest generation, serves.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};

use crate::error::EngineError;
use crate::range::Range;

const MAGIC: &[u8; 8] = b"penstock";
/// What this release writes; it reads this and all before.
pub const VERSION: u16 = 1;
/// Generations of a claim begin at its number, shifted by so many bits.
pub(crate) const CLAIM_BITS: u32 = 32;
/// Claims are below that: the upper half of a generation holds one, and one more than the greatest is the next.
const CLAIMS: u64 = u32::MAX as u64;
const HEAD: usize = MAGIC.len() + 2;
const TAIL: usize = 8 + 4;

/// One data file of a member.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DataFile {
    /// Its name in the checkpoint.
    pub name: String,
    /// Bytes.
    pub length: u64,
    /// CRC-32 of them.
    pub checksum: u32,
    /// The epoch whose changes it holds; of a merged file the newest.
    pub epoch: u64,
    /// The generation that wrote it.
    pub generation: u64,
}

/// A named operator that keeps state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Operator {
    /// Stable over changes of the flow.
    pub name: String,
    /// What it computes.
    pub kind: String,
    /// Types of key and value.
    pub types: String,
    /// Version of its state's form.
    pub version: u32,
    /// Names and types of its columns, in the operator's own words: who reads state without a flow needs them. They may change.
    #[serde(default)]
    pub columns: String,
    /// Names of the columns that make its state, where the user does not say what that is called: then they may not change, since
    /// another count by page would go on from that by user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reads: Option<String>,
}

impl Operator {
    /// Whether another one can go on from its state.
    fn fits(&self, newer: &Operator) -> bool {
        let told = |one: &Operator| (one.name.clone(), one.kind.clone(), one.version);
        told(self) == told(newer) && self.has_types_of(newer) && !self.is_renamed(newer)
    }

    /// Which windows state is in is told behind the types. What was written before that was told may be of any.
    fn has_types_of(&self, newer: &Operator) -> bool {
        let more = newer.types.strip_prefix(&self.types);
        more.is_some_and(|more| more.is_empty() || more.starts_with("; windows "))
    }

    /// Whether both are unnamed and made of other columns.
    fn is_renamed(&self, newer: &Operator) -> bool {
        matches!((&self.reads, &newer.reads), (Some(then), Some(now)) if then != now)
    }
}

/// The flow as state sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// Those with state, in the order of the flow.
    pub operators: Vec<Operator>,
    /// Names of the sources, in order.
    pub sources: Vec<String>,
}

/// What a flow cannot take over of another one's state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changed {
    /// What the state is of.
    pub before: String,
    /// What there is instead.
    pub after: String,
    /// The step's name where only its columns have other names: they may be the same ones.
    pub renamed: Option<String>,
}

impl Changed {
    pub(crate) fn new(before: String, after: String) -> Self {
        Self { before, after, renamed: None }
    }
}

impl From<Changed> for EngineError {
    fn from(Changed { before, after, renamed }: Changed) -> Self {
        EngineError::OtherPlan { before, after, renamed }
    }
}

impl Plan {
    /// Says what of this plan's state `newer` cannot take over.
    ///
    /// # Errors
    /// The two sides that do not fit.
    pub fn check(&self, newer: &Plan) -> Result<(), Changed> {
        if self.sources != newer.sources {
            let told = |plan: &Plan| format!("sources {}, in this order", plan.sources.join(", "));
            return Err(Changed::new(told(self), told(newer)));
        }
        let told = |one: &Operator| format!("{} ({} of {}, version {})", one.name, one.kind, one.types, one.version);
        for old in &self.operators {
            match newer.operators.iter().find(|one| one.name == old.name) {
                Some(new) if old.fits(new) => {}
                Some(new) if told(old) == told(new) => {
                    let made =
                        |one: &Operator| format!("{} of columns {}", told(one), one.reads.as_deref().unwrap_or(""));
                    return Err(Changed { before: made(old), after: made(new), renamed: Some(new.name.clone()) });
                }
                Some(new) => return Err(Changed::new(told(old), told(new))),
                None => {
                    let names: Vec<&str> = newer.operators.iter().map(|one| &*one.name).collect();
                    return Err(Changed::new(told(old), format!("nothing of that name, only: {}", names.join(", "))));
                }
            }
        }
        Ok(())
    }
}

/// The state at the end of a batch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Spark's id of the query.
    pub query: String,
    /// The batch.
    pub batch: u64,
    /// Whether the final epoch of the query follows the batch here.
    pub finished: bool,
    /// Number of the claim under which it was written.
    pub claim: u64,
    /// The attempt that computed state and output.
    pub generation: u64,
    /// Tells manifests of equal batch and generation apart.
    pub nonce: u64,
    /// What computed it.
    pub plan: Plan,
    /// Watermark reached, by source; microseconds. None of a source without event time, or without rows so far.
    pub watermarks: Vec<Option<i64>>,
    /// The watermark of the flow, if there is one, which need not be the least of them: a source may be idle, or have had no event time before.
    /// Where older releases leave it out it is.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "known")]
    pub watermark: Option<Option<i64>>,
    /// Where sources may be idle: when each was first waited for or last had rows, milliseconds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub heard_ms: Vec<Option<i64>>,
    /// Processing time of the batch, milliseconds.
    pub clock_ms: i64,
    /// Rows that came too late, over all batches.
    pub late_rows: u64,
    /// The manifest it follows.
    pub parent: Option<String>,
    /// Files, newest last; newest per key counts.
    pub files: Vec<DataFile>,
    /// What bins were split into: whoever begins with it has these ranges again, where its own are not shorter.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<Range>,
}

/// What is there is known, null too.
fn known<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Option<i64>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

impl Manifest {
    /// Its name in the checkpoint; names sort by batch.
    #[must_use]
    pub fn name(&self) -> String {
        let finished = if self.finished { "-finished" } else { "" };
        format!("manifest-{:020}{finished}-{:020}-{:016x}", self.batch, self.generation, self.nonce)
    }

    /// Refuses numbers that nothing counts to: who adds them up, or shows them as a table does, has 63 bits.
    fn check(&self) -> Result<(), FormatError> {
        let files = self.files.iter().flat_map(|file| [file.length, file.epoch, file.generation]);
        let mut all = files.chain([self.claim, self.late_rows]);
        match all.find(|number| i64::try_from(*number).is_err()) {
            Some(number) => Err(FormatError::Body { message: format!("nothing counts to {number}") }),
            None => Ok(()),
        }
    }
}

/// Who writes to a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// Greater than that of the claim before, and of all that its engine has made.
    pub number: u64,
    /// Tells engines apart.
    pub nonce: u64,
    /// Address of the engine's registry: whoever wants the checkpoint asks there first.
    pub registry: String,
    /// The manifest that it starts from.
    pub from: Option<String>,
}

impl Claim {
    /// Its name in the checkpoint.
    #[must_use]
    pub fn name(number: u64) -> String {
        format!("claim-{number:020}")
    }
}

/// What the sink of a batch has been called with. It is written beside the sink, which does not wait for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shown {
    /// Spark's id of the query.
    pub query: String,
    /// The batch.
    pub batch: u64,
    /// The attempt that it was.
    pub generation: u64,
    /// Tells engines apart.
    pub nonce: u64,
    /// How many rows.
    pub rows: u64,
    /// What they say, in any order.
    pub hash: u64,
    /// Names and types of their columns: only of equal ones can hashes be compared.
    pub columns: String,
}

impl Shown {
    /// Its name in the checkpoint.
    #[must_use]
    pub fn name(&self) -> String {
        format!("shown-{:020}-{:020}-{:016x}", self.batch, self.generation, self.nonce)
    }
}

/// A file that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum FormatError {
    /// It does not begin as our files do.
    #[error("is no file of penstock")]
    Foreign,
    /// A newer release wrote it.
    #[error("has version {found}; this release reads up to {VERSION}: use the release that wrote it, or a later one")]
    Newer {
        /// Its version.
        found: u16,
    },
    /// It is shorter or longer than it says.
    #[error("has {found} bytes where it says {expected}")]
    Length {
        /// Bytes of the body that are there.
        found: u64,
        /// Bytes that its end announces.
        expected: u64,
    },
    /// Its bytes have changed.
    #[error("has checksum {found:08x} where it says {expected:08x}")]
    Checksum {
        /// Of the bytes that are there.
        found: u32,
        /// As announced.
        expected: u32,
    },
    /// Its content is none that this version writes.
    #[error("has unknown content: {message}")]
    Body {
        /// What is wrong.
        message: String,
    },
    /// It is whole, and another file.
    #[error("has the content of {found}: it was renamed, or written over")]
    Other {
        /// The name that its content belongs to.
        found: String,
    },
}

impl FormatError {
    /// Whether there is nothing: the file was opened, on a store that shows it from then on, and never written.
    fn is_unwritten(&self) -> bool {
        *self == FormatError::Length { found: 0, expected: (HEAD + TAIL) as u64 }
    }
}

/// The form on disk.
///
/// # Panics
/// Never: what is written has no map with keys that are no strings.
#[must_use]
pub fn encode<T: Serialize>(content: &T) -> Vec<u8> {
    let body = serde_json::to_vec(content).expect("plain data becomes JSON");
    let mut out = Vec::with_capacity(HEAD + body.len() + TAIL);
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&VERSION.to_le_bytes());
    out.extend_from_slice(&body);
    out.extend_from_slice(&(body.len() as u64).to_le_bytes());
    let checksum = crc32fast::hash(&out);
    out.extend_from_slice(&checksum.to_le_bytes());
    out
}

/// Reads what [`encode`] wrote.
///
/// # Errors
/// What is wrong with it.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, FormatError> {
    let torn = |found: usize| FormatError::Length { found: found as u64, expected: (HEAD + TAIL) as u64 };
    let head = bytes.get(..HEAD).ok_or_else(|| torn(bytes.len()))?;
    if &head[..MAGIC.len()] != MAGIC {
        return Err(FormatError::Foreign);
    }
    let found = u16::from_le_bytes([head[8], head[9]]);
    if found > VERSION {
        return Err(FormatError::Newer { found });
    }
    let (rest, tail) = bytes.split_last_chunk::<4>().ok_or_else(|| torn(bytes.len()))?;
    let (rest, announced) = rest.split_last_chunk::<8>().ok_or_else(|| torn(bytes.len()))?;
    let body = rest.get(HEAD..).ok_or_else(|| torn(bytes.len()))?;
    let (found, expected) = (body.len() as u64, u64::from_le_bytes(*announced));
    if found != expected {
        return Err(FormatError::Length { found, expected });
    }
    let (found, expected) = (crc32fast::hash(&bytes[..bytes.len() - 4]), u32::from_le_bytes(*tail));
    if found != expected {
        return Err(FormatError::Checksum { found, expected });
    }
    serde_json::from_slice(body).map_err(|error| FormatError::Body { message: error.to_string() })
}

/// Reads a file of which its content tells the name.
fn read<T: DeserializeOwned>(name: &str, bytes: &[u8], own: impl Fn(&T) -> String) -> Result<T, FormatError> {
    let content = decode(bytes)?;
    match own(&content) {
        found if found == name => Ok(content),
        found => Err(FormatError::Other { found }),
    }
}

/// What a file of a checkpoint is, by its name. What is not named just as we name files is none of ours, whatever it begins with: a copy that
/// somebody has made by hand, say. Parts that a writer has left begin with a dot and are data that no manifest names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Named {
    /// A claim.
    Claim {
        /// Its number.
        number: u64,
    },
    /// A manifest.
    Manifest {
        /// Its batch.
        batch: u64,
    },
    /// What a sink was called with.
    Shown {
        /// Its batch.
        batch: u64,
    },
    /// A data file, `data-GENERATION-EPOCH-UNIQUE`, of which the last is 1 to 32 hexadecimal digits.
    Data {
        /// Who wrote it.
        generation: u64,
        /// The newest epoch in it.
        epoch: u64,
    },
}

impl Named {
    /// Reads a name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Named> {
        if let Some(whole) = name.strip_prefix('.') {
            let (whole, _) = whole.split_once('.')?;
            return Named::parse(whole).map(|part| part.left(whole));
        }
        let (kind, rest) = name.split_once('-')?;
        let of_batch = |rest: &str| {
            let (batch, rest) = rest.split_once('-')?;
            let rest = rest.strip_prefix("finished-").filter(|_| kind == "manifest").unwrap_or(rest);
            let (generation, nonce) = rest.split_once('-')?;
            written(generation).filter(|generation| is_reached(*generation))?;
            (nonce.len() == 16 && is_hex(nonce)).then_some(())?;
            written(batch).filter(|batch| i64::try_from(*batch).is_ok())
        };
        match kind {
            "claim" => written(rest).filter(|number| *number < CLAIMS).map(|number| Named::Claim { number }),
            "manifest" => of_batch(rest).map(|batch| Named::Manifest { batch }),
            "shown" => of_batch(rest).map(|batch| Named::Shown { batch }),
            "data" => {
                let (generation, rest) = rest.split_once('-')?;
                let (epoch, unique) = rest.split_once('-')?;
                let (generation, epoch) = (written(generation)?, written(epoch)?);
                let is_unique = (1..=32).contains(&unique.len()) && is_hex(unique);
                (is_unique && is_reached(generation)).then_some(Named::Data { generation, epoch })
            }
            _ => None,
        }
    }

    /// A part of such a file, which goes with its generation.
    fn left(self, name: &str) -> Named {
        match self {
            Named::Claim { number } => Named::Data { generation: number << CLAIM_BITS, epoch: 0 },
            Named::Manifest { batch } | Named::Shown { batch } => {
                let mut numbers = name.split('-').skip(2).filter_map(|part| part.parse().ok());
                Named::Data { generation: numbers.next().unwrap_or(0), epoch: batch }
            }
            data @ Named::Data { .. } => data,
        }
    }

    /// Whether a listing needs its content.
    #[must_use]
    pub fn is_read(self) -> bool {
        !matches!(self, Named::Data { .. })
    }
}

fn is_hex(word: &str) -> bool {
    word.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// A number as names have it.
fn written(word: &str) -> Option<u64> {
    let number = word.parse().ok()?;
    (format!("{number:020}") == word).then_some(number)
}

/// Whether there is a claim for a generation.
fn is_reached(generation: u64) -> bool {
    generation >> CLAIM_BITS < CLAIMS
}

/// What a checkpoint holds; what cannot be read is there by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Contents {
    /// Claims by number, each as read.
    pub claims: Vec<(u64, Result<Claim, FormatError>)>,
    /// Manifests by name, each as read.
    pub manifests: Vec<(String, Result<Manifest, FormatError>)>,
    /// What sinks were called with, by name, each as read.
    #[serde(default)]
    pub shown: Vec<(String, Result<Shown, FormatError>)>,
    /// Names of manifests and notes that were not read, since what they say is not needed.
    #[serde(default)]
    pub unread: Vec<String>,
    /// Names of data files with their generation and epoch.
    pub files: Vec<DataFile>,
    /// Whether the registry of the newest claim answers.
    pub held: bool,
}

impl Contents {
    /// Adds a file of a listing; `bytes` are those of a claim or manifest.
    pub fn add(&mut self, name: &str, length: u64, bytes: &[u8]) {
        match Named::parse(name) {
            Some(Named::Claim { number }) => {
                self.claims.push((number, read(name, bytes, |claim: &Claim| Claim::name(claim.number))));
            }
            Some(Named::Manifest { .. }) => {
                let manifest = read(name, bytes, Manifest::name);
                self.manifests.push((name.to_owned(), manifest.and_then(|one| one.check().map(|()| one))));
            }
            Some(Named::Shown { .. }) => self.shown.push((name.to_owned(), read(name, bytes, Shown::name))),
            Some(Named::Data { generation, epoch }) => {
                self.files.push(DataFile { name: name.to_owned(), length, checksum: 0, epoch, generation });
            }
            None => {}
        }
    }

    /// Adds a file of a listing that was not read; nobody knows what a claim says then.
    pub fn list(&mut self, name: &str, length: u64) {
        match Named::parse(name) {
            Some(Named::Manifest { .. } | Named::Shown { .. }) => self.unread.push(name.to_owned()),
            _ => self.add(name, length, &[]),
        }
    }

    /// Number of the newest claim, 0 where there is none. One whose file is gone is known by what was written under it: were its
    /// number given again, older attempts at a batch would pass for newer ones.
    #[must_use]
    pub fn newest_claim(&self) -> u64 {
        self.newest(|_| true)
    }

    /// The same without claims that never came to be: a part of one does not say that anybody serves.
    #[must_use]
    pub fn newest_made(&self) -> u64 {
        self.newest(|file| !file.name.starts_with(".claim-"))
    }

    fn newest(&self, counts: impl Fn(&DataFile) -> bool) -> u64 {
        let claims = self.claims.iter().map(|(number, _)| *number);
        let manifests = self.manifests.iter().map(|(name, _)| name).chain(&self.unread);
        let manifests = manifests.filter_map(|name| match Named::parse(&format!(".{name}.")) {
            Some(Named::Data { generation, .. }) => Some(generation >> CLAIM_BITS),
            _ => None,
        });
        let files = self.files.iter().filter(|file| counts(file)).map(|file| file.generation >> CLAIM_BITS);
        claims.chain(manifests).chain(files).max().unwrap_or(0)
    }

    /// The newest claim where a newer release made it: nothing here can tell whether its engine lives, nor what else it has written.
    #[must_use]
    pub fn newer_claim(&self) -> Option<(String, FormatError)> {
        let (number, read) = self.claims.iter().max_by_key(|(number, _)| *number)?;
        let newer = read.as_ref().err().filter(|error| matches!(error, FormatError::Newer { .. }));
        newer.map(|error| (Claim::name(*number), error.clone()))
    }

    /// The manifest that serves who asks for the batch after `batch`, with the final epoch where that has run.
    ///
    /// # Errors
    /// The name of one of that batch that cannot be read, unless it is of an older generation than one that can: taking an older attempt
    /// instead could take one that was not committed. Nor does one matter that is of the generation that serves, and no more final than that: it
    /// is what a try left behind to write the same, or what came before the end. Nor an end that is empty: whoever made it died before it was
    /// written, and nobody was told of it, while the batch before it was committed.
    pub fn serving(&self, batch: u64) -> Result<Option<&Manifest>, (String, FormatError)> {
        self.best(batch, true)
    }

    /// The same as if the final epoch had not run.
    ///
    /// # Errors
    /// As above.
    pub fn unfinished(&self, batch: u64) -> Result<Option<&Manifest>, (String, FormatError)> {
        self.best(batch, false)
    }

    fn best(&self, batch: u64, ended: bool) -> Result<Option<&Manifest>, (String, FormatError)> {
        let mut best: Option<&Manifest> = None;
        let mut unreadable: Vec<(u64, bool, &String, &FormatError)> = Vec::new();
        let prefix = format!("manifest-{batch:020}-");
        for (name, read) in &self.manifests {
            match read {
                Ok(manifest) if manifest.batch == batch && (ended || !manifest.finished) => {
                    let rank = |one: &Manifest| (one.claim, one.generation, one.finished);
                    if best.is_none_or(|best| rank(best) < rank(manifest)) {
                        best = Some(manifest);
                    }
                }
                Err(error) if name.starts_with(&prefix) => {
                    // `...-GENERATION-NONCE`; of what nobody writes so, it may be the newest.
                    let generation = name.rsplit('-').nth(1).and_then(|word| word.parse().ok()).unwrap_or(u64::MAX);
                    let finished = name[prefix.len()..].starts_with("finished-");
                    if ended || !finished {
                        unreadable.push((generation, finished, name, error));
                    }
                }
                _ => {}
            }
        }
        let serves = best.map(|best| (best.generation, best.finished));
        let hides = |(generation, finished): (u64, bool), error: &FormatError| {
            serves.is_none_or(|serves| {
                let newer = serves.0 < generation || (serves.0 == generation && finished && !serves.1);
                newer && !(finished && error.is_unwritten())
            })
        };
        let hiding = unreadable.into_iter().filter(|one| hides((one.0, one.1), one.3)).max_by_key(|one| one.0);
        match hiding {
            Some((_, _, name, error)) => Err((name.clone(), error.clone())),
            None => Ok(best),
        }
    }

    /// What the sink of a batch has last been called with, as far as it can be read: it is a note, nothing depends on it.
    #[must_use]
    pub fn shown(&self, batch: u64) -> Option<&Shown> {
        let read = self.shown.iter().filter_map(|(_, read)| read.as_ref().ok());
        read.filter(|shown| shown.batch == batch).max_by_key(|shown| (shown.generation, shown.nonce))
    }

    /// The newest batch of which a manifest can be read, as far as it was tried.
    #[must_use]
    pub fn newest_batch(&self) -> Option<u64> {
        let unread = self.unread.iter().filter_map(|name| match Named::parse(name) {
            Some(Named::Manifest { batch }) => Some(batch),
            _ => None,
        });
        let read = self.manifests.iter().filter_map(|(_, read)| read.as_ref().ok()).map(|manifest| manifest.batch);
        read.chain(unread).max()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest(batch: u64, claim: u64, generation: u64) -> Manifest {
        Manifest {
            query: "q".into(),
            batch,
            finished: false,
            claim,
            generation,
            nonce: 7,
            plan: Plan::default(),
            watermarks: vec![Some(-5), None],
            watermark: Some(Some(-4)),
            heard_ms: vec![Some(9), None],
            clock_ms: 1_700_000_000_000,
            late_rows: 3,
            parent: None,
            files: vec![DataFile { name: "f".into(), length: 9, checksum: 1, epoch: batch, generation }],
            parts: Range::new(5, 4).into_iter().collect(),
        }
    }

    fn shown(batch: u64, generation: u64) -> Shown {
        Shown { query: "q".into(), batch, generation, nonce: 7, rows: 3, hash: u64::MAX, columns: "k int64".into() }
    }

    #[test]
    fn the_newest_note_of_a_batch_counts_and_a_torn_one_does_not() {
        let mut contents = Contents::default();
        for (batch, generation) in [(4, 2), (4, 9), (4, 3), (5, 1)] {
            let one = shown(batch, generation);
            contents.add(&one.name(), 0, &encode(&one));
        }
        contents.add(&shown(4, 11).name(), 0, b"torn");
        contents.add(&shown(6, 11).name(), 0, b"torn");
        assert_eq!(contents.shown(4), Some(&shown(4, 9)));
        assert_eq!((contents.shown(6), contents.shown(7)), (None, None));
        // Those that were read by an engine that knows none.
        let read = r#"{"claims":[],"manifests":[],"files":[],"held":false}"#;
        assert_eq!(serde_json::from_str::<Contents>(read).unwrap(), Contents::default());
    }

    #[test]
    fn every_cut_and_every_changed_byte_is_noticed() {
        let original = manifest(4, 1, 2);
        let bytes = encode(&original);
        assert_eq!(decode::<Manifest>(&bytes), Ok(original));
        for cut in 0..bytes.len() {
            assert!(decode::<Manifest>(&bytes[..cut]).is_err(), "cut at {cut}");
        }
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 0x10;
            assert!(decode::<Manifest>(&changed).is_err(), "changed at {at}");
        }
        let mut longer = bytes.clone();
        longer.push(0);
        assert!(decode::<Manifest>(&longer).is_err());
        assert!(matches!(decode::<Claim>(&bytes), Err(FormatError::Body { .. })));
    }

    #[test]
    fn names_tell_what_files_are() {
        let name = manifest(4, 1, 2).name();
        assert_eq!(Named::parse(&name), Some(Named::Manifest { batch: 4 }));
        assert_eq!(Named::parse(&Claim::name(3)), Some(Named::Claim { number: 3 }));
        let data = format!("data-{:020}-{:020}-{:032x}", 7, 5, 10);
        assert_eq!(Named::parse(&data), Some(Named::Data { generation: 7, epoch: 5 }));
        let finished = Manifest { finished: true, ..manifest(4, 1, 2) }.name();
        for (part, generation, epoch) in [
            (format!(".{name}.0f"), 2, 4),
            (format!(".{finished}.0f"), 2, 4),
            (format!(".{data}.0f"), 7, 5),
            (format!(".{}.0f", Claim::name(3)), 3 << 32, 0),
        ] {
            assert_eq!(Named::parse(&part), Some(Named::Data { generation, epoch }), "{part}");
        }
        let shown = shown(4, 2);
        assert_eq!(Named::parse(&shown.name()), Some(Named::Shown { batch: 4 }));
        let part = Named::parse(&format!(".{}.0f", shown.name()));
        assert_eq!(part, Some(Named::Data { generation: 2, epoch: 4 }));
        let foreign = ["", ".", ".crc", "data", "data-x-1-0", "claim-", "metadata", ".metadata.crc"];
        let dated =
            ["data-2024-10", "data-2024-10-31", "data-2024-10-31.csv", "data-7-1-0a", "data-20241031120000-1-a"];
        for foreign in foreign.into_iter().chain(dated) {
            assert_eq!(Named::parse(foreign), None, "{foreign}");
        }
        // What people and programs make beside them.
        for one in [name, finished, Claim::name(3), self::shown(4, 2).name(), data] {
            for stray in [format!("{one}.bak"), format!("{one}-copy"), format!("{one} (1)"), one.replacen('0', "", 1)] {
                assert_eq!(Named::parse(&stray), None, "{stray}");
            }
            let part = format!(".{one}-copy.0f");
            assert_eq!(Named::parse(&part), None, "{part}");
        }
    }

    /// The number of a claim is the upper half of a generation, and the next engine counts on from the greatest.
    #[test]
    fn names_with_numbers_that_nobody_reaches_are_foreign() {
        let most = u64::from(u32::MAX) - 1;
        let named = |claim: u64| {
            let generation = claim << CLAIM_BITS | 5;
            [
                Claim::name(claim),
                format!(".{}.0f", Claim::name(claim)),
                manifest(4, 1, generation).name(),
                format!(".{}.0f", manifest(4, 1, generation).name()),
                shown(4, generation).name(),
                format!("data-{generation:020}-{:020}-0a", 4),
            ]
        };
        let mut contents = Contents::default();
        for name in named(most) {
            assert!(Named::parse(&name).is_some(), "{name}");
        }
        let mut beyond: Vec<String> = named(most + 1).into();
        for number in [1 << 32, 1 << 33, u64::MAX] {
            beyond.extend([Claim::name(number), format!(".{}.0f", Claim::name(number))]);
        }
        let batch = u64::MAX;
        beyond.extend([
            manifest(batch, 1, 2).name(),
            shown(batch, 2).name(),
            format!("manifest-{}-{:020}-0a", "9".repeat(20), 1),
        ]);
        for name in beyond {
            assert_eq!(Named::parse(&name), None, "{name}");
            contents.add(&name, 0, b"");
        }
        assert_eq!((contents.newest_claim(), contents.newest_made()), (0, 0));
    }

    #[test]
    fn what_is_under_the_name_of_another_file_is_not_taken_for_it() {
        let (one, claim, note) =
            (manifest(4, 1, 2), Claim { number: 3, nonce: 5, registry: String::new(), from: None }, shown(4, 2));
        let mut contents = Contents::default();
        let renamed = manifest(7, 1, 2).name();
        contents.add(&renamed, 0, &encode(&one));
        contents.add(&Claim::name(9), 0, &encode(&claim));
        contents.add(&shown(7, 2).name(), 0, &encode(&note));
        let found = |found: String| FormatError::Other { found };
        assert_eq!(contents.manifests, [(renamed.clone(), Err(found(one.name())))]);
        assert_eq!(contents.claims, [(9, Err(found(Claim::name(3))))]);
        assert_eq!(contents.shown, [(shown(7, 2).name(), Err(found(note.name())))]);
        assert_eq!(contents.serving(7), Err((renamed, found(one.name()))));
        assert_eq!(contents.serving(4), Ok(None));
        contents.add(&one.name(), 0, &encode(&one));
        assert_eq!(contents.serving(4), Ok(Some(&one)));
    }

    #[test]
    fn numbers_that_no_file_has_are_refused() {
        let most = i64::MAX as u64;
        let of = |file: DataFile| Manifest { files: vec![file], ..manifest(4, 1, 2) };
        let file = DataFile { name: "f".into(), length: most, checksum: 1, epoch: most, generation: most };
        let whole = Manifest { late_rows: most, claim: most, ..of(file.clone()) };
        let read = |one: &Manifest| {
            let mut contents = Contents::default();
            contents.add(&one.name(), 0, &encode(one));
            contents.manifests.remove(0).1
        };
        assert_eq!(read(&whole), Ok(whole.clone()));
        for one in [
            of(DataFile { length: most + 1, ..file.clone() }),
            of(DataFile { epoch: most + 1, ..file.clone() }),
            of(DataFile { generation: u64::MAX, ..file }),
            Manifest { late_rows: most + 1, ..manifest(4, 1, 2) },
            Manifest { claim: most + 1, ..manifest(4, 1, 2) },
        ] {
            assert!(matches!(read(&one), Err(FormatError::Body { .. })), "{one:?}");
        }
    }

    /// Stores that show a file from when it is opened: a driver that died then has written nothing.
    #[test]
    fn an_end_that_was_never_written_does_not_hide_the_batch_before_it() {
        for generation in [2, 3] {
            let mut contents = Contents::default();
            let one = manifest(4, 1, 2);
            contents.add(&one.name(), 0, &encode(&one));
            let end = Manifest { finished: true, ..manifest(4, 1, generation) };
            contents.add(&end.name(), 0, b"");
            assert_eq!(contents.serving(4), Ok(Some(&one)), "of generation {generation}");
            let bytes = encode(&end);
            contents.manifests.pop();
            contents.add(&end.name(), 0, &bytes[..bytes.len() / 2]);
            assert!(contents.serving(4).is_err(), "what has bytes was whole once, or may have been");
        }
        // A batch that was never written may have been computed by a newer attempt than the one that is there.
        let mut contents = Contents::default();
        let end = Manifest { finished: true, ..manifest(4, 1, 2) }.name();
        contents.add(&end, 0, b"");
        assert!(contents.serving(4).is_err(), "there is no other");
        contents.add(&manifest(4, 1, 1).name(), 0, &encode(&manifest(4, 1, 1)));
        contents.add(&manifest(4, 1, 2).name(), 0, b"");
        assert!(contents.serving(4).is_err(), "of a newer attempt");
    }

    #[test]
    fn a_newer_version_and_a_foreign_file_are_named() {
        let mut newer = encode(&manifest(4, 1, 2));
        newer[8] = 9;
        assert_eq!(decode::<Manifest>(&newer), Err(FormatError::Newer { found: 9 }));
        assert_eq!(decode::<Manifest>(b"a parquet file, surely"), Err(FormatError::Foreign));
        assert_eq!(decode::<Manifest>(b""), Err(FormatError::Length { found: 0, expected: 22 }));
    }

    /// The first version's bytes, written down: they stay readable.
    #[test]
    fn version_1_stays_readable() {
        let claim = Claim { number: 3, nonce: 5, registry: "h:1".into(), from: Some("m".into()) };
        let body = br#"{"number":3,"nonce":5,"registry":"h:1","from":"m"}"#;
        let mut bytes = b"penstock\x01\x00".to_vec();
        bytes.extend_from_slice(body);
        bytes.extend_from_slice(&[body.len() as u8, 0, 0, 0, 0, 0, 0, 0]);
        bytes.extend_from_slice(&[0x7c, 0xe2, 0x18, 0xc1]);
        assert_eq!(decode::<Claim>(&bytes), Ok(claim.clone()));
        assert_eq!(encode(&claim), bytes);
    }

    /// What columns an operator has came later.
    #[test]
    fn an_operator_without_columns_is_read() {
        let read: Operator = serde_json::from_str(r#"{"name":"a","kind":"b","types":"c","version":1}"#).unwrap();
        assert_eq!((&*read.name, &*read.columns), ("a", ""));
    }

    #[test]
    fn the_newest_claim_serves_and_then_the_newest_generation() {
        let all = [manifest(4, 1, 9), manifest(4, 2, 11), manifest(4, 2, 12), manifest(5, 1, 10)];
        let named = |one: &Manifest| (one.name(), Ok(one.clone()));
        let mut contents = Contents { manifests: all.iter().map(named).collect(), ..Contents::default() };
        assert_eq!(contents.serving(4), Ok(Some(&all[2])));
        assert_eq!(contents.serving(5), Ok(Some(&all[3])));
        assert_eq!(contents.serving(6), Ok(None));
        let older = (manifest(4, 1, 3).name(), Err(FormatError::Length { found: 0, expected: 22 }));
        contents.manifests.push(older);
        assert_eq!(contents.serving(4), Ok(Some(&all[2])), "an attempt before it came to nothing");
        let tried = Manifest { nonce: 8, ..manifest(4, 2, 12) }.name();
        contents.manifests.push((tried, Err(FormatError::Foreign)));
        assert_eq!(contents.serving(4), Ok(Some(&all[2])), "a try of the same attempt");
        let end = Manifest { finished: true, ..manifest(4, 2, 12) }.name();
        contents.manifests.push((end.clone(), Err(FormatError::Foreign)));
        assert_eq!(contents.serving(4), Err((end, FormatError::Foreign)), "the input may have ended");
        contents.manifests.pop();
        let ended = Manifest { finished: true, ..manifest(4, 2, 12) };
        contents.manifests.push(named(&ended));
        assert_eq!(contents.serving(4), Ok(Some(&ended)), "that of the batch before the end was tried twice");
        contents.manifests.pop();
        let damaged = manifest(4, 2, 13).name();
        contents.manifests.push((damaged.clone(), Err(FormatError::Foreign)));
        assert_eq!(contents.serving(4), Err((damaged, FormatError::Foreign)));
        assert!(contents.serving(5).is_ok(), "of another batch");
    }

    #[test]
    fn a_claim_whose_file_is_gone_is_not_given_again() {
        assert_eq!(Contents::default().newest_claim(), 0);
        let mut contents = Contents::default();
        contents.add(&Claim::name(3), 0, b"torn");
        assert_eq!(contents.newest_claim(), 3);
        for finished in [false, true] {
            let name = Manifest { finished, ..manifest(4, 5, 5 << CLAIM_BITS | 2) }.name();
            let mut without = Contents::default();
            without.add(&name, 0, b"torn");
            assert_eq!(without.newest_claim(), 5, "{name}");
        }
        contents.add(&format!("data-{:020}-{:020}-0a", 7_u64 << CLAIM_BITS, 4), 9, b"");
        assert_eq!(contents.newest_claim(), 7);
    }

    #[test]
    fn the_newest_claim_is_named_where_a_newer_release_made_it() {
        let claim = |number| Claim { number, nonce: 5, registry: "h:1".into(), from: None };
        let mut newer = encode(&claim(2));
        newer[8] = 9;
        let mut contents = Contents::default();
        assert_eq!(contents.newer_claim(), None);
        contents.add(&Claim::name(2), 0, &newer);
        contents.add(&Claim::name(1), 0, &encode(&claim(1)));
        assert_eq!(contents.newer_claim(), Some((Claim::name(2), FormatError::Newer { found: 9 })));
        // One that was torn, or is not the newest, is of nobody who lives.
        contents.add(&Claim::name(3), 0, b"torn");
        assert_eq!(contents.newer_claim(), None);
    }

    #[test]
    fn a_changed_flow_is_named_on_both_sides() {
        let operator = |name: &str, version| Operator {
            name: name.into(),
            kind: "sum".into(),
            types: "long".into(),
            version,
            columns: String::new(),
            reads: None,
        };
        let plan = |operators| Plan { operators, sources: vec!["bids".into()] };
        let old = plan(vec![operator("a", 1), operator("b", 1)]);
        assert_eq!(old.check(&plan(vec![operator("new", 1), operator("b", 1), operator("a", 1)])), Ok(()));
        let Changed { before, after, .. } = old.check(&plan(vec![operator("a", 2), operator("b", 1)])).unwrap_err();
        assert_eq!((&*before, &*after), ("a (sum of long, version 1)", "a (sum of long, version 2)"));
        let Changed { after, .. } = old.check(&plan(vec![operator("a", 1)])).unwrap_err();
        assert_eq!(after, "nothing of that name, only: a");
        let renamed = Operator { columns: "other names".into(), ..operator("a", 1) };
        assert_eq!(plan(vec![operator("a", 1)]).check(&plan(vec![renamed])), Ok(()));
        let other = Operator { types: "long -> min(long)".into(), ..operator("a", 1) };
        let Changed { before, after, .. } = plan(vec![operator("a", 1)]).check(&plan(vec![other])).unwrap_err();
        assert_eq!((&*before, &*after), ("a (sum of long, version 1)", "a (sum of long -> min(long), version 1)"));
        // Unnamed, it says which columns are its own; what was written before says nothing.
        let by = |columns: &str| plan(vec![Operator { reads: Some(columns.into()), ..operator("a", 1) }]);
        let named = plan(vec![operator("a", 1)]);
        for (then, now) in [(by("user; v"), by("user; v")), (by("user; v"), named.clone()), (named, by("user; v"))] {
            assert_eq!(then.check(&now), Ok(()));
        }
        let changed = by("user; v").check(&by("page; v")).unwrap_err();
        assert_eq!(
            EngineError::from(changed).to_string(),
            "the state is of a (sum of long, version 1) of columns user; v, the flow has a (sum of long, version 1) of columns page; v: \
             it cannot be taken over. If these are the same columns under other names, say name=\"a\" in that step, and in others of its kind \
             without a name the names that they have now. Else put the step or source back as it was (a new step beside it has a name= of its \
             own), or start a new query from batch 0 (a new checkpoint)"
        );
        assert!(old.check(&Plan { sources: vec!["asks".into()], ..old.clone() }).is_err());
    }
}
