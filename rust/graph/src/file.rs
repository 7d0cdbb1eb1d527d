//! An index as a file that any number of processes map.
//!
//! Layout, little endian: magic (8 bytes), version (u32), CRC-32 of the body (u32), length of the body (u64); the body is a
//! header of sections (u64 count, then per section kind, relation, first byte, bytes, each u64) and the sections,
//! each at a multiple of 8. Invariants: lengths are compared with the size of the file before anything is made of them;
//! after [`open`] the lists of a file obey what `csr` promises, so damage is an error, never a panic or a wrong list.

use std::fs::{self, File};
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use bytemuck::Pod;

use crate::csr::{Csr, Section};
use crate::domain::Domain;
use crate::error::GraphError;
use crate::index::{Index, Relation};
use crate::map::Map;

const MAGIC: [u8; 8] = *b"PENSTKGR";
const VERSION: u32 = 1;
const HEAD: usize = 24;
/// Most relations of a file.
const MOST_RELATIONS: usize = 4096;

const NUMBERS: u64 = 1;
const ENDS: u64 = 2;
const TEXTS: u64 = 3;
const LABELS: u64 = 4;
const NAME: u64 = 5;
const OFFSETS: u64 = 6;
const TARGETS: u64 = 7;
const BACK_OFFSETS: u64 = 8;
const BACK_TARGETS: u64 = 9;
const LOOPS: u64 = 10;
const SIGNED: u64 = 11;

/// Writes an index: under another name first, then moved to `path` in one step.
///
/// # Errors
/// [`GraphError::Io`]; nothing is at `path` then that was not there before.
pub fn save(index: &Index, path: &Path) -> Result<(), GraphError> {
    let part = path.with_extension(format!("part{}", std::process::id()));
    let io = |source| GraphError::Io { path: path.to_owned(), source };
    let written = write(index, &part).and_then(|()| fs::rename(&part, path));
    if written.is_err() {
        let _ = fs::remove_file(&part); // it may not be there
    }
    written.map_err(io)
}

fn write(index: &Index, path: &Path) -> std::io::Result<()> {
    if cfg!(target_endian = "big") {
        return Err(std::io::Error::other("index files are written on little-endian machines only"));
    }
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
    let mut header = vec![sections.len() as u64];
    let mut at = HEAD + 8 + sections.len() * 32;
    for (kind, relation, bytes) in &sections {
        header.extend([*kind, *relation, at as u64, bytes.len() as u64]);
        at = (at + bytes.len()).next_multiple_of(8);
    }
    let mut file = BufWriter::new(File::create(path)?);
    let mut crc = crc32fast::Hasher::new();
    file.write_all(&[0; HEAD])?;
    let mut put = |file: &mut BufWriter<File>, bytes: &[u8]| {
        let blank = &[0; 8][..bytes.len().next_multiple_of(8) - bytes.len()];
        crc.update(bytes);
        crc.update(blank);
        file.write_all(bytes).and_then(|()| file.write_all(blank))
    };
    put(&mut file, bytemuck::cast_slice(&header))?;
    for (_, _, bytes) in &sections {
        put(&mut file, bytes)?;
    }
    let mut head = MAGIC.to_vec();
    head.extend(VERSION.to_le_bytes());
    head.extend(crc.finalize().to_le_bytes());
    head.extend(((at - HEAD) as u64).to_le_bytes());
    file.seek(SeekFrom::Start(0))?;
    file.write_all(&head)?;
    file.into_inner().map_err(std::io::IntoInnerError::into_error)?.sync_all()
}

/// Maps an index file. Its pages are shared with every process of this host that maps it.
///
/// The file must not change as long as the index lives; [`save`] never changes one.
///
/// # Errors
/// [`GraphError::Io`], or [`GraphError::File`] when it is no index of this release, or damaged.
pub fn open(path: &Path) -> Result<Index, GraphError> {
    let io = |source| GraphError::Io { path: path.to_owned(), source };
    let refuse = |problem: &str| GraphError::File { path: path.to_owned(), problem: problem.to_owned() };
    let file = File::open(path).map_err(io)?;
    if file.metadata().map_err(io)?.len() < HEAD as u64 + 8 {
        return Err(refuse("it is too short for an index"));
    }
    let map = Arc::new(Map::open(&file).map_err(io)?);
    read(&map).map_err(refuse)
}

fn read(map: &Arc<Map>) -> Result<Index, &'static str> {
    let bytes = map.bytes();
    let number = |at: usize| -> Option<u64> { Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?)) };
    if bytes[..8] != MAGIC {
        return Err("it is no index of penstock");
    }
    let half = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
    if half(8) != VERSION {
        return Err("it was written by another release");
    }
    if number(16) != Some((bytes.len() - HEAD) as u64) {
        return Err("its length is not what it says: part of it is missing");
    }
    if crc32fast::hash(&bytes[HEAD..]) != half(12) {
        return Err("its checksum is wrong");
    }
    let count = number(HEAD).ok_or("it has no sections")? as usize;
    if count > MOST_RELATIONS * 6 + 4 || HEAD + 8 + count * 32 > bytes.len() {
        return Err("it has more sections than fit");
    }
    let mut sections = Vec::new();
    for section in 0..count {
        let field = |at: usize| number(HEAD + 8 + section * 32 + at * 8).ok_or("a section is cut off");
        let (first, length) = (field(2)?, field(3)?);
        let end = first.checked_add(length).filter(|end| *end <= bytes.len() as u64);
        let end = end.ok_or("a section is longer than the file")?;
        sections.push((field(0)?, field(1)?, first as usize..end as usize));
    }
    let find = |kind: u64, relation: u64| {
        sections.iter().find(|section| (section.0, section.1) == (kind, relation)).map(|section| section.2.clone())
    };
    let domain = match (find(NUMBERS, 0), find(SIGNED, 0)) {
        (Some(range), _) => Domain::Numbers(ascending(section(map, range)?)?),
        (None, Some(range)) => Domain::Signed(ascending(section(map, range)?)?),
        (None, None) => {
            let ends = section::<u64>(map, find(ENDS, 0).ok_or("it has no nodes")?)?;
            let texts = section::<u8>(map, find(TEXTS, 0).ok_or("it has no texts")?)?;
            check_ends(ends.get(), texts.get().len())?;
            Domain::Texts { ends, bytes: texts }
        }
    };
    let nodes = domain.len();
    if nodes as u64 > crate::domain::MOST_NODES {
        return Err("it has more nodes than an index can number");
    }
    let labels = find(LABELS, 0).map(|range| section::<u32>(map, range)).transpose()?;
    if let Some(labels) = &labels
        && (labels.get().len() != nodes || labels.get().iter().any(|&label| label as usize >= nodes))
    {
        return Err("its labels are no nodes");
    }
    let mut relations = Vec::new();
    for at in 0..MOST_RELATIONS as u64 {
        let Some(name) = find(NAME, at) else { break };
        let name = std::str::from_utf8(&bytes[name]).map_err(|_| "a name is no text")?.to_owned();
        let forward = lists(map, nodes, find(OFFSETS, at), find(TARGETS, at))?.ok_or("a relation has no lists")?;
        let reverse = lists(map, nodes, find(BACK_OFFSETS, at), find(BACK_TARGETS, at))?;
        let loops = section::<u32>(map, find(LOOPS, at).ok_or("a relation does not say its self-loops")?)?;
        if !strictly(loops.get()) || loops.get().iter().any(|&node| node as usize >= nodes) {
            return Err("its self-loops are no nodes");
        }
        relations.push(Relation { name, forward, reverse, loops });
    }
    Ok(Index { domain, labels, relations })
}

fn section<T: Pod>(map: &Arc<Map>, range: Range<usize>) -> Result<Section<T>, &'static str> {
    Section::mapped(map, range).ok_or("a section does not lie as its type needs")
}

fn strictly<T: Ord>(values: &[T]) -> bool {
    values.windows(2).all(|pair| pair[0] < pair[1])
}

fn ascending(numbers: Section<u64>) -> Result<Section<u64>, &'static str> {
    if strictly(numbers.get()) { Ok(numbers) } else { Err("its nodes are not in order") }
}

fn check_ends(ends: &[u64], bytes: usize) -> Result<(), &'static str> {
    let right = ends.first() == Some(&0) && ends.last() == Some(&(bytes as u64)) && ends.is_sorted();
    if right { Ok(()) } else { Err("its texts do not end where they should") }
}

/// The lists of one direction, where there is one.
fn lists(
    map: &Arc<Map>,
    nodes: usize,
    offsets: Option<Range<usize>>,
    targets: Option<Range<usize>>,
) -> Result<Option<Csr>, &'static str> {
    let (Some(offsets), Some(targets)) = (offsets, targets) else { return Ok(None) };
    let csr = Csr { offsets: section(map, offsets)?, targets: section(map, targets)? };
    let view = csr.view();
    if view.offsets.len() != nodes + 1 {
        return Err("a relation has not one list per node");
    }
    check_ends(view.offsets, view.targets.len()).map_err(|_| "lists do not end where they should")?;
    let right = |node: u32| {
        let list = view.list(node);
        strictly(list) && list.last().is_none_or(|&last| (last as usize) < nodes)
    };
    if (0..nodes as u32).all(right) { Ok(Some(csr)) } else { Err("a list is not in order") }
}
