//! Writing index files (their layout is in `file`): section after section, so that no more than a buffer is in memory.
//!
//! Invariants: a file has its name only when it is whole. Until then it has another one beside it, which no other writer has,
//! and is removed when writing ends early. Whoever is told to stop gives up at the next piece, and names no file any more.
//! What no reader would take is not written: more relations than there may be in one.

use std::fs::{self, File};
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::domain::Domain;
use crate::error::GraphError;
use crate::file::{
    BACK_OFFSETS, BACK_TARGETS, ENDS, HEAD, LABELS, LOOPS, MAGIC, MOST_RELATIONS, NAME, NUMBERS, OFFSETS, SIGNED,
    TARGETS, TEXTS, VERSION,
};
use crate::index::Index;
use crate::scratch;

/// Writes an index: under another name first, then moved to `path` in one step.
///
/// # Errors
/// [`GraphError::Io`]; [`GraphError::TooMany`] relations for a file. Nothing is at `path` then that was not there before.
pub fn save(index: &Index, path: &Path) -> Result<(), GraphError> {
    save_unless(index, path, &Arc::default())
}

/// The same, which gives up with an error once `stop` is set: as [`save`] does when the disk is full, and before the file has
/// its name.
///
/// # Errors
/// As [`save`].
pub fn save_unless(index: &Index, path: &Path, stop: &Arc<AtomicBool>) -> Result<(), GraphError> {
    fits(index.relations.len())?;
    write(index, path, stop).map_err(|source| GraphError::Io { path: path.to_owned(), source })
}

/// Refuses more relations than a file is read of.
pub(crate) fn fits(relations: usize) -> Result<(), GraphError> {
    let (count, most) = (relations as u64, MOST_RELATIONS as u64);
    if count > most { Err(GraphError::TooMany { what: "relations for one index file", count, most }) } else { Ok(()) }
}

fn write(index: &Index, path: &Path, stop: &Arc<AtomicBool>) -> io::Result<()> {
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
    let mut file = IndexFile::create(path, sections.len(), stop)?;
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
    stop: Arc<AtomicBool>,
}

/// Bytes that are written between two looks at `stop`.
const PIECE: usize = 1 << 20;

impl IndexFile {
    /// A file of so many sections.
    pub(crate) fn create(path: &Path, planned: usize, stop: &Arc<AtomicBool>) -> io::Result<Self> {
        if cfg!(target_endian = "big") {
            return Err(io::Error::other("index files are written on little-endian machines only"));
        }
        let (file, part) = scratch::fresh(|random| path.with_extension(format!("part{random:016x}")))?;
        let at = HEAD as u64 + 8 + planned as u64 * 32;
        let mut made = Self {
            file: BufWriter::with_capacity(1 << 16, file),
            path: path.to_owned(),
            part,
            crc: crc32fast::Hasher::new(),
            at,
            sections: Vec::new(),
            planned,
            whole: false,
            stop: stop.clone(),
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
        for piece in bytes.chunks(PIECE) {
            self.go_on()?;
            self.crc.update(piece);
            self.at += piece.len() as u64;
            self.file.write_all(piece)?;
        }
        Ok(())
    }

    fn go_on(&self) -> io::Result<()> {
        scratch::go_on(&self.stop)
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
        self.go_on()?;
        self.file.get_ref().sync_all()?;
        self.go_on()?;
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
