//! Writing index files (their layout is in `file`): section after section, so that no more than a buffer is in memory.
//!
//! Invariant: a file has its name only when it is whole. Until then it has another one beside it, and is removed when
//! writing ends early.

use std::fs::{self, File};
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::domain::Domain;
use crate::error::GraphError;
use crate::file::{
    BACK_OFFSETS, BACK_TARGETS, ENDS, HEAD, LABELS, LOOPS, MAGIC, NAME, NUMBERS, OFFSETS, SIGNED, TARGETS, TEXTS,
    VERSION,
};
use crate::index::Index;

/// Writes an index: under another name first, then moved to `path` in one step.
///
/// # Errors
/// [`GraphError::Io`]; nothing is at `path` then that was not there before.
pub fn save(index: &Index, path: &Path) -> Result<(), GraphError> {
    write(index, path).map_err(|source| GraphError::Io { path: path.to_owned(), source })
}

fn write(index: &Index, path: &Path) -> io::Result<()> {
    let mut sections: Vec<(u64, u64, &[u8])> = Vec::new();
    match &index.domain {
        Domain::Signed(numbers) => sections.push((SIGNED, 0, bytemuck::cast_slice(numbers.get()))),
        Domain::Numbers(numbers) => sections.push((NUMBERS, 0, bytemuck::cast_slice(numbers.get()))),
        Domain::Texts { ends, bytes } => {
            sections.push((ENDS, 0, bytemuck::cast_slice(ends.get())));
            sections.push((TEXTS, 0, bytes.get()));
        }
    }
    if let Some(labels) = &index.labels {
        sections.push((LABELS, 0, bytemuck::cast_slice(labels.get())));
    }
    for (at, relation) in index.relations.iter().enumerate() {
        let at = at as u64;
        sections.push((NAME, at, relation.name.as_bytes()));
        sections.push((OFFSETS, at, bytemuck::cast_slice(relation.forward.offsets.get())));
        sections.push((TARGETS, at, bytemuck::cast_slice(relation.forward.targets.get())));
        if let Some(reverse) = &relation.reverse {
            sections.push((BACK_OFFSETS, at, bytemuck::cast_slice(reverse.offsets.get())));
            sections.push((BACK_TARGETS, at, bytemuck::cast_slice(reverse.targets.get())));
        }
        sections.push((LOOPS, at, bytemuck::cast_slice(relation.loops.get())));
    }
    let mut file = IndexFile::create(path, sections.len())?;
    for (kind, relation, bytes) in sections {
        file.begin(kind, relation)?;
        file.put(bytes)?;
    }
    file.finish()
}

/// An index file that is being written.
pub(crate) struct IndexFile {
    file: BufWriter<File>,
    path: PathBuf,
    part: PathBuf,
    /// Of everything behind the header.
    crc: crc32fast::Hasher,
    at: u64,
    /// Kind, relation, first byte, bytes.
    sections: Vec<[u64; 4]>,
    planned: usize,
    whole: bool,
}

impl IndexFile {
    /// A file of so many sections.
    pub(crate) fn create(path: &Path, planned: usize) -> io::Result<Self> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        if cfg!(target_endian = "big") {
            return Err(io::Error::other("index files are written on little-endian machines only"));
        }
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let part = path.with_extension(format!("part{}-{number}", std::process::id()));
        let at = HEAD as u64 + 8 + planned as u64 * 32;
        let file = BufWriter::with_capacity(1 << 16, File::create(&part)?);
        let mut made = Self {
            file,
            path: path.to_owned(),
            part,
            crc: crc32fast::Hasher::new(),
            at,
            sections: Vec::new(),
            planned,
            whole: false,
        };
        made.file.write_all(&vec![0; at as usize])?;
        Ok(made)
    }

    /// Ends the section under way; what is put from here on is of another.
    pub(crate) fn begin(&mut self, kind: u64, relation: u64) -> io::Result<()> {
        self.fill()?;
        self.sections.push([kind, relation, self.at, 0]);
        Ok(())
    }

    /// Adds to the section under way.
    pub(crate) fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.raw(bytes)?;
        self.sections.last_mut().expect("a section has begun")[3] += bytes.len() as u64;
        Ok(())
    }

    fn raw(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.crc.update(bytes);
        self.at += bytes.len() as u64;
        self.file.write_all(bytes)
    }

    /// Up to a multiple of 8.
    fn fill(&mut self) -> io::Result<()> {
        let blank = self.at.next_multiple_of(8) - self.at;
        self.raw(&[0; 8][..blank as usize])
    }

    /// Gives the file its name.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        self.fill()?;
        assert_eq!(self.sections.len(), self.planned, "an index file has as many sections as it was made for");
        let mut header = vec![self.sections.len() as u64];
        self.sections.iter().for_each(|section| header.extend(section));
        let header: &[u8] = bytemuck::cast_slice(&header);
        let mut crc = crc32fast::Hasher::new();
        crc.update(header);
        crc.combine(&self.crc);
        let mut head = MAGIC.to_vec();
        head.extend(VERSION.to_le_bytes());
        head.extend(crc.finalize().to_le_bytes());
        head.extend((self.at - HEAD as u64).to_le_bytes());
        self.file.seek(SeekFrom::Start(0))?;
        self.file.write_all(&head)?;
        self.file.write_all(header)?;
        self.file.flush()?;
        self.file.get_ref().sync_all()?;
        fs::rename(&self.part, &self.path)?;
        self.whole = true;
        Ok(())
    }
}

impl Drop for IndexFile {
    fn drop(&mut self) {
        if !self.whole {
            let _ = fs::remove_file(&self.part); // it may not be there
        }
    }
}
