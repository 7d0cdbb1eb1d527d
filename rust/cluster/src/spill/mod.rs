//! Blocks of rows in memory up to a budget, and beyond it in files of the local directories.
//!
//! Owns the budget of one member. [`Store::keep`] takes a block: while there is room it stays as it is; else it is cut into
//! pieces of a slice, each an Arrow IPC stream of its own with a CRC-32, written before `keep` returns. Reading decodes one
//! piece and keeps nothing of it, so a reader needs memory for what it is reading. Dropping the rows frees their
//! place.
//!
//! Directories are used in turn; one that fails is passed over. Only when none takes a block is that an error, which names them
//! all and the settings to change.
//!
//! Pieces are not compressed. Measured on rows of 53 bytes (two integers, a float, a word) with a CRC, into a warm page cache: 63 ns
//! to write and 29 ns to read a row; with LZ4 579 ns and 736 ns, for 31 bytes. A disk would have to be slower than 50 MB/s for that.
//!
//! Departures: no compression, see above; one nameless file, see `volume`.

mod extents;
mod volume;

use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arrow_array::RecordBatch;
use arrow_ipc::writer::StreamWriter;
use penstock_dataflow::BoxError;
use penstock_plan::host::{Rows, Stored};
use penstock_plan::read_batch;
use serde::Serialize;
use thiserror::Error;

use self::volume::Volume;
use crate::error::Failure;

/// Rows cannot be kept, or not be had back.
#[derive(Clone, Debug, Error)]
pub enum SpillError {
    /// No local directory takes more.
    #[error(
        "no local directory takes rows beyond the {budget_bytes} bytes of staging_memory: {}. Give spark.local.dir \
         (SPARK_LOCAL_DIRS) directories with room, or raise staging_memory",
        said(folders)
    )]
    Full {
        /// Every directory and what the system said of it.
        folders: Vec<(PathBuf, String)>,
        /// The budget.
        budget_bytes: u64,
    },
    /// A file cannot be read.
    #[error("rows spilled to {folder:?} cannot be read: {reason}. Check that disk (spark.local.dir)")]
    Lost {
        /// Where the file is.
        folder: PathBuf,
        /// What the system said.
        reason: String,
    },
    /// What was read is not what was written.
    #[error(
        "rows spilled to {folder:?} are damaged at byte {at}: their CRC-32 is {found:08x}, not {expected:08x}. Check that disk \
         (spark.local.dir)"
    )]
    Damaged {
        /// Where the file is.
        folder: PathBuf,
        /// Where in it.
        at: u64,
        /// As written.
        expected: u32,
        /// As read.
        found: u32,
    },
    /// Arrow cannot write or read the block.
    #[error("rows cannot be spilled: {reason}")]
    Arrow {
        /// What Arrow said.
        reason: String,
    },
}

fn said(folders: &[(PathBuf, String)]) -> String {
    let each = folders.iter().map(|(folder, reason)| format!("{}: {reason}", folder.display()));
    each.collect::<Vec<_>>().join("; ")
}

impl SpillError {
    /// In the form in which it travels: kind `storage`.
    pub fn to_failure(&self) -> Failure {
        let failure = Failure::new("storage", self.to_string());
        match self {
            SpillError::Full { folders, budget_bytes } => {
                let paths: Vec<_> = folders.iter().map(|(folder, _)| folder.display().to_string()).collect();
                failure.with("paths", paths).with("setting", "spark.local.dir").with("budget_bytes", *budget_bytes)
            }
            SpillError::Lost { folder, .. } | SpillError::Damaged { folder, .. } => {
                failure.with("paths", vec![folder.display().to_string()]).with("setting", "spark.local.dir")
            }
            SpillError::Arrow { .. } => failure,
        }
    }
}

impl From<arrow_schema::ArrowError> for SpillError {
    fn from(error: arrow_schema::ArrowError) -> Self {
        SpillError::Arrow { reason: error.to_string() }
    }
}

/// What a store holds and has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SpillFigures {
    /// Bytes that may stay in memory.
    pub budget_bytes: u64,
    /// Bytes in memory now.
    pub memory_bytes: u64,
    /// The most there ever were.
    pub memory_peak_bytes: u64,
    /// Bytes in files now.
    pub disk_bytes: u64,
    /// Bytes written to files so far.
    pub spilled_bytes: u64,
    /// Bytes read back so far.
    pub read_bytes: u64,
}

#[derive(Default)]
struct Counters {
    memory: AtomicU64,
    memory_peak: AtomicU64,
    disk: AtomicU64,
    spilled: AtomicU64,
    read: AtomicU64,
}

struct Place {
    folder: PathBuf,
    volume: Option<Arc<Volume>>,
}

/// See the module.
pub(crate) struct Store {
    budget: u64,
    counters: Arc<Counters>,
    places: Mutex<Vec<Place>>,
    turn: AtomicUsize,
}

impl Store {
    /// A store that keeps up to `budget` bytes in memory, and files in `folders` (the system's temporary directory when there
    /// are none). Makes nothing yet.
    pub(crate) fn new(budget: u64, folders: &[PathBuf]) -> Self {
        let mut folders = folders.to_vec();
        if folders.is_empty() {
            folders.push(std::env::temp_dir());
        }
        let places = folders.into_iter().map(|folder| Place { folder, volume: None }).collect();
        Store { budget, counters: Arc::default(), places: Mutex::new(places), turn: AtomicUsize::new(0) }
    }

    fn places(&self) -> MutexGuard<'_, Vec<Place>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn figures(&self) -> SpillFigures {
        let counters = &self.counters;
        SpillFigures {
            budget_bytes: self.budget,
            memory_bytes: counters.memory.load(Relaxed),
            memory_peak_bytes: counters.memory_peak.load(Relaxed),
            disk_bytes: counters.disk.load(Relaxed),
            spilled_bytes: counters.spilled.load(Relaxed),
            read_bytes: counters.read.load(Relaxed),
        }
    }

    /// Keeps a block until what is returned is dropped; one that goes to a file comes back in pieces of at most `piece_rows`.
    ///
    /// # Errors
    /// [`SpillError::Full`], [`SpillError::Arrow`]; nothing is kept then.
    pub(crate) fn keep(&self, batch: RecordBatch, piece_rows: usize) -> Result<Vec<Rows>, SpillError> {
        let bytes = size(&batch);
        if let Some(room) = self.reserve(bytes) {
            return Ok(vec![Rows::Stored(Arc::new(Held { batch, _room: room }))]);
        }
        let rows = batch.num_rows();
        let step = piece_rows.max(1);
        (0..rows).step_by(step).map(|at| self.spill(&batch.slice(at, step.min(rows - at)))).collect()
    }

    fn reserve(&self, bytes: u64) -> Option<Room> {
        let counters = &self.counters;
        let more = |used: u64| used.checked_add(bytes).filter(|total| *total <= self.budget);
        let before = counters.memory.fetch_update(Relaxed, Relaxed, more).ok()?;
        counters.memory_peak.fetch_max(before + bytes, Relaxed);
        Some(Room { bytes, counters: Arc::clone(counters) })
    }

    fn spill(&self, batch: &RecordBatch) -> Result<Rows, SpillError> {
        let bytes = encoded(batch)?;
        let len = bytes.len() as u64;
        let count = self.places().len();
        let first = self.turn.fetch_add(1, Relaxed);
        let mut folders = Vec::new();
        for index in (0..count).map(|i| (first + i) % count) {
            match self.volume(index).and_then(|volume| Ok((volume.write(&bytes)?, volume))) {
                Ok((at, volume)) => {
                    self.counters.disk.fetch_add(len, Relaxed);
                    self.counters.spilled.fetch_add(len, Relaxed);
                    let (rows, crc) = (batch.num_rows(), crc32fast::hash(&bytes));
                    let counters = Arc::clone(&self.counters);
                    return Ok(Rows::Stored(Arc::new(Spilled { volume, at, len, crc, rows, counters })));
                }
                Err(error) => folders.push((self.places()[index].folder.clone(), error.to_string())),
            }
        }
        Err(SpillError::Full { folders, budget_bytes: self.budget })
    }

    fn volume(&self, index: usize) -> std::io::Result<Arc<Volume>> {
        let place = &mut self.places()[index];
        if let Some(volume) = &place.volume {
            return Ok(Arc::clone(volume));
        }
        let made = Arc::new(Volume::create(&place.folder)?);
        Ok(Arc::clone(place.volume.insert(made)))
    }
}

/// Bytes of the rows themselves. The batches of a feed share the frame they came in, so the sizes of their buffers would count it
/// once for each column.
pub(crate) fn size(batch: &RecordBatch) -> u64 {
    let of = |column: &arrow_array::ArrayRef| column.to_data().get_slice_memory_size();
    batch.columns().iter().map(|column| of(column).unwrap_or_else(|_| column.get_array_memory_size()) as u64).sum()
}

/// A piece as it is written: uncompressed.
fn encoded(batch: &RecordBatch) -> Result<Vec<u8>, SpillError> {
    let mut writer = StreamWriter::try_new(Vec::with_capacity(size(batch) as usize + 1024), &batch.schema())?;
    writer.write(batch)?;
    Ok(writer.into_inner()?)
}

fn decoded(bytes: Vec<u8>) -> Result<RecordBatch, SpillError> {
    read_batch(bytes)?.ok_or_else(|| SpillError::Arrow { reason: "a piece without rows".into() })
}

/// Reads a piece, and what it wrote of it again; its rows. For fuzzing.
///
/// # Errors
/// What is wrong with it.
#[doc(hidden)]
pub fn fuzz_piece(bytes: &[u8]) -> Result<usize, SpillError> {
    let batch = decoded(bytes.to_vec())?;
    let again = decoded(encoded(&batch)?)?;
    assert_eq!((batch.num_rows(), batch.num_columns()), (again.num_rows(), again.num_columns()));
    Ok(batch.num_rows())
}

/// Part of the budget, given back when dropped.
struct Room {
    bytes: u64,
    counters: Arc<Counters>,
}

impl Drop for Room {
    fn drop(&mut self) {
        self.counters.memory.fetch_sub(self.bytes, Relaxed);
    }
}

/// A block in memory.
struct Held {
    batch: RecordBatch,
    _room: Room,
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} rows in memory", self.batch.num_rows())
    }
}

impl Stored for Held {
    fn num_rows(&self) -> usize {
        self.batch.num_rows()
    }

    fn read(&self) -> Result<RecordBatch, BoxError> {
        Ok(self.batch.clone())
    }
}

/// A piece in a file.
struct Spilled {
    volume: Arc<Volume>,
    at: u64,
    len: u64,
    crc: u32,
    rows: usize,
    counters: Arc<Counters>,
}

impl Spilled {
    fn load(&self) -> Result<RecordBatch, SpillError> {
        let folder = || self.volume.folder().to_owned();
        let bytes = self
            .volume
            .read(self.at, self.len)
            .map_err(|error| SpillError::Lost { folder: folder(), reason: error.to_string() })?;
        let found = crc32fast::hash(&bytes);
        if found != self.crc {
            return Err(SpillError::Damaged { folder: folder(), at: self.at, expected: self.crc, found });
        }
        self.counters.read.fetch_add(self.len, Relaxed);
        decoded(bytes)
    }
}

impl Drop for Spilled {
    fn drop(&mut self) {
        self.volume.free(self.at, self.len);
        self.counters.disk.fetch_sub(self.len, Relaxed);
    }
}

impl fmt::Debug for Spilled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} rows in {:?} at {}", self.rows, self.volume.folder(), self.at)
    }
}

impl Stored for Spilled {
    fn num_rows(&self) -> usize {
        self.rows
    }

    fn read(&self) -> Result<RecordBatch, BoxError> {
        Ok(self.load()?)
    }
}

#[cfg(test)]
mod tests;
