//! Files of durable state in a store: records become one file, many files become one, or few that are large, and are opened to be read.
//!
//! Owns the names of files, which are never used twice, and what goes wrong with them in the words of the protocol: a store that fails
//! is asked again ([`Kind::Store`](penstock_engine::Kind::Store)), a file that is not what its manifest says is refused by name
//! ([`Kind::Damaged`](penstock_engine::Kind::Damaged)). Bytes are those of [`penstock_files`]; where they lie is the [`Store`]'s.
//!
//! Invariants: of what is read as much is in memory as [`penstock_files`] reads ahead, beside the records that are kept to be written again; a file
//! is opened once for all that is wanted of it, several at a time; whatever is under way ends at the next piece once its generation has ended.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use penstock_engine::{Claim, DataFile, encode};
pub use penstock_files::Segment;
use penstock_files::{Damage, File, FileError, ReadAt, merge, write};

use crate::error::Failure;
use crate::host::Host;

/// The folder of a checkpoint. Calls may take long; any thread makes them.
pub trait Store: Send + Sync {
    /// `length` bytes of a file from `offset` on; fewer where it ends before.
    ///
    /// # Errors
    /// `NotFound` where there is no such file, else what may pass.
    fn read_at(&self, name: &str, offset: u64, length: usize) -> io::Result<Vec<u8>>;

    /// Writes a file, of which nobody sees a part; returns its bytes.
    ///
    /// # Errors
    /// What may pass, or that of a piece: there is no file then.
    fn write(&self, name: &str, pieces: &mut dyn Iterator<Item = io::Result<Vec<u8>>>) -> io::Result<u64>;
}

/// A file of a manifest in its store.
pub struct Source {
    store: Arc<dyn Store>,
    name: String,
    length: u64,
}

impl ReadAt for Source {
    fn length(&self) -> io::Result<u64> {
        Ok(self.length)
    }

    fn read_at(&self, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        // At the end one more is asked for: a file that goes on is not the one that was written.
        let last = offset + length as u64 == self.length;
        self.store.read_at(&self.name, offset, length + usize::from(last))
    }
}

/// Whether what is under way is still of use: until its generation ends.
#[derive(Clone, Debug, Default)]
pub struct Use(Arc<AtomicBool>);

impl Use {
    pub(crate) fn end(&self) {
        self.0.store(true, Relaxed);
    }

    /// Goes on only where somebody waits for it.
    ///
    /// # Errors
    /// The generation has ended.
    pub fn check(&self) -> Result<(), Failure> {
        match self.0.load(Relaxed) {
            true => Err(Failure::new("stale_generation", "the generation has ended")),
            false => Ok(()),
        }
    }
}

/// A checkpoint, opened when it is first needed.
#[derive(Default)]
pub(crate) struct Checkpoint {
    pub(crate) url: String,
    store: Mutex<Option<Arc<dyn Store>>>,
}

impl Checkpoint {
    pub(crate) fn new(url: String) -> Self {
        Checkpoint { url, store: Mutex::default() }
    }

    pub(crate) fn store<H: Host>(&self, host: &H) -> Result<Arc<dyn Store>, Failure> {
        let mut store = self.store.lock().unwrap_or_else(PoisonError::into_inner);
        match &*store {
            Some(store) => Ok(Arc::clone(store)),
            None => Ok(Arc::clone(store.insert(host.store(&self.url)?))),
        }
    }
}

/// Sees that a claim is there as the driver has made it: only then do both mean one folder.
pub(crate) fn check_claim(store: &dyn Store, claim: &Claim, member: u64) -> Result<(), Failure> {
    let (name, expected) = (Claim::name(claim.number), encode(claim));
    match store.read_at(&name, 0, expected.len() + 1) {
        Ok(found) if found == expected => Ok(()),
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Failure::new("store", format!("file {name} cannot be read: {error}")))
        }
        read => {
            let found = if read.is_ok() { "sees another one" } else { "does not see it" };
            let message = format!(
                "the driver has made {name} and member {member} {found}: the checkpoint is not one folder for both (a \
                 disk that only one host has?), or another engine has taken it over; give one that all hosts share"
            );
            Err(Failure::new("not_shared", message))
        }
    }
}

/// A file that could not be read, as a failure that names it first.
pub fn unreadable(error: FileError) -> Failure {
    match error {
        FileError::Damage { name, damage } => damaged(&name, damage),
        FileError::Read { name, source } if source.kind() == io::ErrorKind::NotFound => {
            damaged(&name, "is not in the checkpoint, of which it is a part")
        }
        error @ FileError::Read { .. } => Failure::new("store", error.to_string()),
    }
}

/// The engine takes the name up to the first space.
pub(crate) fn damaged(name: &str, reason: impl std::fmt::Display) -> Failure {
    Failure::new("damaged", format!("{name} {reason}"))
}

/// How many files are opened at a time: a far store takes its time for each request.
const OPENING: usize = 8;

/// Opens files of a manifest, in their order.
pub(crate) fn open(store: &Arc<dyn Store>, files: &[DataFile], wanted: &Use) -> Result<Vec<File<Source>>, Failure> {
    let open = |file: &DataFile| {
        wanted.check()?;
        let DataFile { name, length, checksum: expected, .. } = file;
        let stored = Source { store: Arc::clone(store), name: name.clone(), length: *length };
        let opened = File::open(name, stored).map_err(unreadable)?;
        match opened.checksum() {
            found if found == *expected => Ok(opened),
            found => Err(damaged(name, Damage::Checksum { what: "the file", found, expected: *expected })),
        }
    };
    if files.len() < OPENING {
        return files.iter().map(open).collect();
    }
    thread::scope(|scope| {
        let mut opening = Vec::new();
        for share in files.chunks(files.len().div_ceil(OPENING)) {
            let open = move || share.iter().map(open).collect::<Result<Vec<_>, _>>();
            let thread = thread::Builder::new().name("penstock-open".into()).spawn_scoped(scope, open);
            opening.push(thread.map_err(|error| Failure::new("store", format!("no thread to open files: {error}")))?);
        }
        let mut opened = Vec::with_capacity(files.len());
        for thread in opening {
            opened.extend(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
        }
        Ok(opened)
    })
}

/// Who writes a file, and what of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Author {
    pub(crate) member: u64,
    pub(crate) generation: u64,
    pub(crate) epoch: u64,
}

impl Author {
    /// A name that was never used and never will be.
    fn name(&self) -> Result<String, Failure> {
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(|error| Failure::new("internal", format!("no random name: {error}")))?;
        let Author { member, generation, epoch } = self;
        Ok(format!("data-{generation:020}-{epoch:020}-{member:016x}{:016x}", u64::from_le_bytes(random)))
    }
}

/// Writes the records of an epoch; nothing where nothing has changed.
pub(crate) fn write_records(
    store: &dyn Store,
    author: Author,
    records: &[Segment],
    wanted: &Use,
) -> Result<Vec<DataFile>, Failure> {
    if records.is_empty() {
        return Ok(Vec::new());
    }
    write_file(store, author, records.iter().cloned().map(Ok), wanted).map(|file| vec![file])
}

/// What is merged goes on in another file from the end of the segment on that comes to so many bytes: no store takes files of any size. S3 has ten
/// thousand parts of one, which are of 10 MiB as Arrow writes them.
const FILE_BYTES: u64 = 4 << 30;

/// Writes one file for many, or several where there is much, also where nothing is left of them: it stands for them.
pub(crate) fn merge_files(
    store: &Arc<dyn Store>,
    author: Author,
    files: &[DataFile],
    wanted: &Use,
) -> Result<Vec<DataFile>, Failure> {
    merge_into(store, author, files, wanted, FILE_BYTES)
}

/// Into files of about so many bytes.
fn merge_into(
    store: &Arc<dyn Store>,
    author: Author,
    files: &[DataFile],
    wanted: &Use,
    most: u64,
) -> Result<Vec<DataFile>, Failure> {
    let opened = open(store, files, wanted)?;
    let epoch = files.iter().map(|file| file.epoch).max().unwrap_or(author.epoch);
    let author = Author { epoch, ..author };
    let mut segments = merge(&opened).peekable();
    let mut written = Vec::new();
    loop {
        let mut length = 0;
        let part = std::iter::from_fn(|| {
            let segment = segments.next_if(|_| length < most)?;
            let chunks = segment.iter().flat_map(|segment| &segment.chunks);
            length += chunks.map(|chunk| chunk.len() as u64).sum::<u64>();
            Some(segment)
        });
        written.push(write_file(&**store, author, part, wanted)?);
        if segments.peek().is_none() {
            return Ok(written);
        }
    }
}

fn write_file(
    store: &dyn Store,
    author: Author,
    segments: impl Iterator<Item = Result<Segment, FileError>>,
    wanted: &Use,
) -> Result<DataFile, Failure> {
    let name = author.name()?;
    let mut writing = write(segments);
    // What ends a file early, in our words: the store only hears that there is no more.
    let mut broken = None;
    let mut pieces = std::iter::from_fn(|| {
        let piece = match wanted.check() {
            Ok(()) => writing.next()?.map_err(unreadable),
            Err(failure) => Err(failure),
        };
        Some(piece.map_err(|failure| {
            let told = io::Error::other(failure.message.clone());
            broken = Some(failure);
            told
        }))
    });
    let wrote = store.write(&name, &mut pieces);
    if let Some(failure) = broken {
        return Err(failure);
    }
    let failed = |what: String| Failure::new("store", format!("file {name} cannot be written: {what}"));
    let length = wrote.map_err(|error| failed(error.to_string()))?;
    match writing.summary() {
        Some(summary) if summary.length == length => {
            let (checksum, epoch, generation) = (summary.checksum, author.epoch, author.generation);
            Ok(DataFile { name, length, checksum, epoch, generation })
        }
        Some(summary) => Err(failed(format!("the store has taken {length} of {} bytes", summary.length))),
        None => Err(failed("the store has not asked for all of it".into())),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use penstock_files::{Chunk, ChunkWriter, Entry, Index, Range};

    use super::*;

    #[derive(Default)]
    struct Memory {
        files: Mutex<BTreeMap<String, Vec<u8>>>,
        /// Longer ones it does not take.
        most: Option<usize>,
    }

    impl Store for Memory {
        fn read_at(&self, name: &str, offset: u64, length: usize) -> io::Result<Vec<u8>> {
            let files = self.files.lock().unwrap();
            let file = files.get(name).ok_or(io::ErrorKind::NotFound)?;
            Ok(file.iter().skip(offset as usize).take(length).copied().collect())
        }

        fn write(&self, name: &str, pieces: &mut dyn Iterator<Item = io::Result<Vec<u8>>>) -> io::Result<u64> {
            let bytes: Vec<u8> = pieces.collect::<io::Result<Vec<_>>>()?.concat();
            if self.most.is_some_and(|most| bytes.len() > most) {
                return Err(io::Error::other("it has ten thousand parts"));
            }
            let length = bytes.len() as u64;
            self.files.lock().unwrap().insert(name.into(), bytes);
            Ok(length)
        }
    }

    /// A state of 64 ranges, each of about `bytes`; every key of it has the value of the epoch.
    fn records(epoch: u64, bytes: usize) -> Vec<Segment> {
        let record = |prefix: u32| {
            let mut chunk = ChunkWriter::new(b"of a test");
            for key in 0..16_u64 {
                let (hash, value) = (u64::from(prefix) << 58 | key, vec![epoch as u8; bytes / 16]);
                chunk.push(Entry::Put { hash, key: &key.to_le_bytes(), value: &value });
            }
            let range = Range::new(prefix, 6).unwrap();
            Segment { operator: "op".into(), range, base: false, chunks: vec![chunk.finish()] }
        };
        (0..64).map(record).collect()
    }

    /// By hash, the values of all keys.
    fn state(store: &Arc<dyn Store>, files: &[DataFile]) -> BTreeMap<u64, Vec<u8>> {
        let opened = open(store, files, &Use::default()).unwrap();
        let mut state = BTreeMap::new();
        for chunk in Index::of(&opened).select(&opened, "op", Range::ALL) {
            for entry in Chunk::parse(&chunk.unwrap()).unwrap().entries() {
                if let Entry::Put { hash, value, .. } = entry.unwrap() {
                    state.insert(hash, value.to_vec());
                }
            }
        }
        state
    }

    #[test]
    fn what_is_merged_is_written_in_several_files_where_there_is_much() {
        let author = |epoch| Author { member: 1, generation: 7, epoch };
        let store: Arc<dyn Store> = Arc::new(Memory { most: Some(2 << 20), ..Memory::default() });
        let wanted = Use::default();
        let mut chain = Vec::new();
        for epoch in 0..2 {
            for part in records(epoch, 80 << 10).chunks(16) {
                chain.extend(write_records(&*store, author(epoch), part, &wanted).unwrap());
            }
        }
        let merged = merge_into(&store, author(0), &chain, &wanted, 1 << 20).unwrap();
        assert_eq!(merged.len(), 5, "{merged:?}");
        assert!(merged.iter().all(|file| file.length < 2 << 20 && (file.epoch, file.generation) == (1, 7)));
        let one = merge_files(&store, author(0), &chain, &wanted).unwrap_err();
        assert!(one.message.contains("it has ten thousand parts"), "{one:?}");
        let delta = write_records(&*store, author(2), &records(2, 160)[..9], &wanted).unwrap();
        let (before, after) = ([chain, delta.clone()].concat(), [merged, delta].concat());
        assert_eq!(state(&store, &after), state(&store, &before));
        assert_eq!(state(&store, &after).len(), 64 * 16);
        // What was merged is merged again, and where nothing is left one stands for all.
        let again = merge_into(&store, author(0), &after, &wanted, 1 << 20).unwrap();
        assert_eq!(state(&store, &again), state(&store, &before));
        assert_eq!(merge_into(&store, author(0), &[], &wanted, 1 << 20).unwrap().len(), 1);
    }

    #[test]
    fn names_tell_who_wrote_what_and_come_once() {
        let author = Author { member: 10, generation: 7, epoch: 3 };
        let (one, other) = (author.name().unwrap(), author.name().unwrap());
        assert_ne!(one, other);
        let parts: Vec<&str> = one.split('-').collect();
        assert_eq!(parts[..3], ["data", "00000000000000000007", "00000000000000000003"]);
        assert!(parts.len() == 4 && parts[3].starts_with("000000000000000a"), "{one}");
    }
}
