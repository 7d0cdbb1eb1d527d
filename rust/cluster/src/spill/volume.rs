//! One file in one directory that takes what does not fit in memory.
//!
//! The file is made with its first block, in a directory of its own that only this user can enter, and loses its name at
//! once: whatever ends the process, the system takes the space back. Where a name cannot be taken away while the file is
//! open, directory and file go when the volume does.
//!
//! Departure: one nameless file for each member and local directory, not one directory for each generation. What is staged outlives a
//! generation, and a file for each attempt would need more descriptors than a process may have.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::extents::Extents;

/// What a volume writes to.
pub(super) trait Medium: Send + Sync {
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()>;
    fn read_at(&self, bytes: &mut [u8], at: u64) -> io::Result<()>;
    fn cut(&self, len: u64) -> io::Result<()>;
}

impl Medium for File {
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.write_all_at(bytes, at)
    }

    fn read_at(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        self.read_exact_at(bytes, at)
    }

    fn cut(&self, len: u64) -> io::Result<()> {
        self.set_len(len)
    }
}

/// A new file in a new directory that nobody else can enter: the file, its path, its directory.
pub(super) fn private(folder: &Path) -> io::Result<(File, PathBuf, PathBuf)> {
    let mut nonce = [0; 8];
    getrandom::fill(&mut nonce).map_err(|error| io::Error::other(error.to_string()))?;
    let own = folder.join(format!("penstock-{}-{:016x}", std::process::id(), u64::from_le_bytes(nonce)));
    DirBuilder::new().mode(0o700).create(&own)?;
    let path = own.join("rows");
    match OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path) {
        Ok(file) => Ok((file, path, own)),
        Err(error) => {
            // Nothing more can be done about an empty directory than to try.
            let _ = std::fs::remove_dir(&own);
            Err(error)
        }
    }
}

/// A medium with its extents.
pub(super) struct Volume {
    /// For messages.
    folder: PathBuf,
    medium: Box<dyn Medium>,
    extents: Mutex<Extents>,
    /// What could not be removed while the file is open: the file, its directory.
    left: Option<(PathBuf, PathBuf)>,
}

impl Volume {
    /// Makes a file in `folder`.
    ///
    /// # Errors
    /// The directory is not there, or not ours to write.
    pub(super) fn create(folder: &Path) -> io::Result<Volume> {
        let (file, path, own) = private(folder)?;
        let gone = std::fs::remove_file(&path).and_then(|()| std::fs::remove_dir(&own)).is_ok();
        let left = (!gone).then_some((path, own));
        let mut volume = Volume::over(folder, Box::new(file));
        volume.left = left;
        Ok(volume)
    }

    pub(super) fn over(folder: &Path, medium: Box<dyn Medium>) -> Volume {
        Volume { folder: folder.to_owned(), medium, extents: Mutex::default(), left: None }
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    fn extents(&self) -> MutexGuard<'_, Extents> {
        // Every change is one step: the books are right even after a panic.
        self.extents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes a block; says where it is.
    ///
    /// # Errors
    /// The disk is full, for example; nothing of the block stays.
    pub(super) fn write(&self, bytes: &[u8]) -> io::Result<u64> {
        let len = bytes.len() as u64;
        let at = self.extents().take(len);
        match self.medium.write_at(bytes, at) {
            Ok(()) => Ok(at),
            Err(error) => {
                self.free(at, len);
                Err(error)
            }
        }
    }

    /// Reads a block.
    pub(super) fn read(&self, at: u64, len: u64) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(len).map_err(io::Error::other)?];
        self.medium.read_at(&mut bytes, at)?;
        Ok(bytes)
    }

    /// Gives a block's place back.
    pub(super) fn free(&self, at: u64, len: u64) {
        let mut extents = self.extents();
        if extents.give(at, len) {
            // Under the lock, so that nobody writes behind the new end. A file that stays long is no error.
            let _ = self.medium.cut(extents.end());
        }
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        if let Some((file, folder)) = self.left.take() {
            // Spark removes its local directories with all that is left in them.
            let _ = std::fs::remove_file(file);
            let _ = std::fs::remove_dir(folder);
        }
    }
}
