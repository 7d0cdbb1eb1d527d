//! An index as a file that any number of processes map.
//!
//! Layout, little endian: magic (8 bytes), version (u32), CRC-32 of the body (u32), length of the body (u64); the body is a
//! header of sections (u64 count, then per section kind, relation, first byte, bytes, each u64) and the sections,
//! each at a multiple of 8. Invariants: lengths are compared with the size of the file before anything is made of them;
//! after [`open`] the lists of a file obey what `csr` promises, so damage is an error, never a panic or a wrong list.

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use bytemuck::Pod;

use crate::csr::{Csr, Section};
use crate::domain::Domain;
use crate::error::GraphError;
use crate::index::{Index, Relation};
use crate::map::Map;
pub use crate::write::{save, save_unless};

pub(crate) const MAGIC: [u8; 8] = *b"PENSTKGR";
pub(crate) const VERSION: u32 = 1;
pub(crate) const HEAD: usize = 24;
/// Bytes that are looked at before their pages are given back: whoever opens a large file stays small.
const RELEASE: usize = 8 << 20;
/// Most relations of a file.
pub(crate) const MOST_RELATIONS: usize = 4096;

pub(crate) const NUMBERS: u64 = 1;
pub(crate) const ENDS: u64 = 2;
pub(crate) const TEXTS: u64 = 3;
pub(crate) const LABELS: u64 = 4;
pub(crate) const NAME: u64 = 5;
pub(crate) const OFFSETS: u64 = 6;
pub(crate) const TARGETS: u64 = 7;
pub(crate) const BACK_OFFSETS: u64 = 8;
pub(crate) const BACK_TARGETS: u64 = 9;
pub(crate) const LOOPS: u64 = 10;
pub(crate) const SIGNED: u64 = 11;

/// Maps an index file. Its pages are shared with every process of this host that maps it.
///
/// The file must not change as long as the index lives; [`save`](crate::write::save) never changes one.
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
    let mut crc = crc32fast::Hasher::new();
    for piece in bytes[HEAD..].chunks(RELEASE) {
        crc.update(piece);
        map.release();
    }
    if crc.finalize() != half(12) {
        return Err("its checksum is wrong");
    }
    let count = number(HEAD).ok_or("it has no sections")? as usize;
    if count > MOST_RELATIONS * 6 + 4 || HEAD + 8 + count * 32 > bytes.len() {
        return Err("it has more sections than fit");
    }
    let mut sections = HashMap::new();
    for section in 0..count {
        let field = |at: usize| number(HEAD + 8 + section * 32 + at * 8).ok_or("a section is cut off");
        let (first, length) = (field(2)?, field(3)?);
        let end = first.checked_add(length).filter(|end| *end <= bytes.len() as u64);
        let end = end.ok_or("a section is longer than the file")?;
        sections.entry((field(0)?, field(1)?)).or_insert(first as usize..end as usize);
    }
    let find = |kind: u64, relation: u64| sections.get(&(kind, relation)).cloned();
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
    if find(NAME, MOST_RELATIONS as u64).is_some() {
        return Err("it has more relations than fit");
    }
    map.release();
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
    let mut seen = 0;
    let right = |node: u32| {
        let list = view.list(node);
        seen += size_of_val(list);
        if seen > RELEASE {
            map.release();
            seen = 0;
        }
        strictly(list) && list.last().is_none_or(|&last| (last as usize) < nodes)
    };
    if (0..nodes as u32).all(right) { Ok(Some(csr)) } else { Err("a list is not in order") }
}
