//! Building an index file of edges that do not fit in memory.
//!
//! Edges are collected in pieces; a piece that is full numbers its own nodes and goes to a scratch file: its sorted nodes, and
//! its edges as pairs of their ranks. At the end the pieces' nodes are merged into the domain, which tells each piece the
//! final number of each of its nodes; its edges are read back, renumbered, sorted by runs and merged into the file.
//!
//! Invariants: memory is about `memory` bytes whatever the number of edges, and 8 bytes per node where an undirected graph is
//! oriented (32 by degeneracy); the file is byte for byte what [`Builder`] and [`save`](crate::write::save) make of the
//! same edges, apart from the order of its sections; a file that cannot be finished is not there. Repeated edges are dropped.
//!
//! Departure: edges are sorted in one place, since a distributed sort would still end in one file.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::cliques::{self, Orientation};
use crate::csr::{Section, View};
use crate::domain::{Domain, MOST_NODES};
use crate::error::GraphError;
use crate::file::{BACK_OFFSETS, BACK_TARGETS, ENDS, LABELS, LOOPS, NAME, NUMBERS, OFFSETS, SIGNED, TARGETS, TEXTS};
use crate::index::{Builder, Loops, Pairs, Repeats};
use crate::map::Map;
use crate::scratch::{Scratch, Writer};
use crate::sorter::{Merge, Sorter};
use crate::write::{IndexFile, fits, save_unless};

/// What the file has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Both directions of every relation.
    Both,
    /// From sources to targets only.
    Forward,
    /// All relations as one undirected graph, each edge once.
    Oriented(Orientation),
}

/// Bytes of memory that an edge of a piece may take while its nodes are numbered, with those nodes.
const EDGE_BYTES: usize = 96;
/// The same for a node that is a text, beside its bytes.
const TEXT_BYTES: usize = 128;

/// Collects edges, in memory and on disk.
pub struct LargeBuilder {
    folder: PathBuf,
    scratch: Scratch,
    memory: usize,
    fresh: fn() -> Builder,
    names: Vec<(String, Loops)>,
    piece: Builder,
    pieces: Vec<StoredPiece>,
}

/// A piece on disk.
struct StoredPiece {
    nodes: Nodes,
    count: u64,
    /// Pairs of ranks by relation.
    edges: Vec<Range<u64>>,
    /// Final number by rank, once it is known.
    map: Range<u64>,
}

enum Nodes {
    Numbers(Range<u64>),
    Texts { lengths: Range<u64>, bytes: Range<u64> },
}

impl LargeBuilder {
    /// `fresh` says what nodes are: [`Builder::numbers`], [`Builder::signed`] or [`Builder::texts`]. Files without a name
    /// are made in `folder`; `stop` ends whatever is under way with an error.
    ///
    /// # Errors
    /// [`GraphError::Io`] when the folder cannot be written to.
    pub fn new(
        fresh: fn() -> Builder,
        folder: &Path,
        memory: usize,
        stop: Arc<AtomicBool>,
    ) -> Result<Self, GraphError> {
        let folder = folder.to_owned();
        let scratch = Scratch::new(&folder, stop).map_err(|source| io_error(&folder, source))?;
        Ok(Self { folder, scratch, memory, fresh, names: Vec::new(), piece: fresh(), pieces: Vec::new() })
    }

    /// Says what happens to self-loops of a relation, which then exists. Relations are named before edges are added.
    pub fn relation(&mut self, name: &str, loops: Loops) {
        self.names.retain(|(known, _)| known != name);
        self.names.push((name.to_owned(), loops));
        self.piece.relation(name, loops, Repeats::Drop);
    }

    /// Adds edges by way of `add`, a few at a time.
    ///
    /// # Errors
    /// As `add`, and [`GraphError::Io`].
    pub fn add(&mut self, add: impl FnOnce(&mut Builder) -> Result<(), GraphError>) -> Result<(), GraphError> {
        if self.hold(add)? { self.spill() } else { Ok(()) }
    }

    /// Adds edges by way of `add`, a few at a time. Whether they are so many now that [`LargeBuilder::spill`] is next.
    ///
    /// # Errors
    /// As `add`.
    pub fn hold(&mut self, add: impl FnOnce(&mut Builder) -> Result<(), GraphError>) -> Result<bool, GraphError> {
        add(&mut self.piece)?;
        let (edges, texts, bytes) = self.piece.held();
        Ok(edges * EDGE_BYTES + texts * TEXT_BYTES + bytes * 2 >= self.memory)
    }

    /// How many pieces went to disk.
    #[must_use]
    pub fn spilled(&self) -> usize {
        self.pieces.len()
    }

    fn io(&self, source: io::Error) -> GraphError {
        io_error(&self.folder, source)
    }

    /// Brings the edges that are in memory to disk.
    ///
    /// # Errors
    /// [`GraphError::TooMany`], a self-loop that is refused, [`GraphError::Io`].
    pub fn spill(&mut self) -> Result<(), GraphError> {
        let mut fresh = (self.fresh)();
        self.names.iter().for_each(|(name, loops)| fresh.relation(name, *loops, Repeats::Drop));
        let full = std::mem::replace(&mut self.piece, fresh);
        let (domain, edges) = full.checked()?;
        let piece = self.put(&domain, edges).map_err(|error| self.io(error))?;
        self.pieces.push(piece);
        Ok(())
    }

    fn put(&self, domain: &Domain, relations: Vec<Pairs>) -> io::Result<StoredPiece> {
        let nodes = match domain {
            Domain::Numbers(numbers) | Domain::Signed(numbers) => Nodes::Numbers(self.scratch.put(numbers.get())?),
            Domain::Texts { ends, bytes } => {
                let lengths = ends.get().windows(2).map(|pair| pair[1] - pair[0]).collect::<Vec<_>>();
                Nodes::Texts { lengths: self.scratch.put(&lengths)?, bytes: self.scratch.put(bytes.get())? }
            }
        };
        let mut edges = Vec::new();
        for pairs in relations {
            let range = self.scratch.reserve(size_of_val(&pairs[..]) as u64);
            let mut writer = self.scratch.writer(range, 8192);
            pairs.iter().try_for_each(|&(from, to)| writer.push(packed(from, to)))?;
            edges.push(writer.finish()?);
        }
        let count = domain.len() as u64;
        Ok(StoredPiece { nodes, count, edges, map: self.scratch.reserve(count * 4) })
    }

    /// Writes the index to `path`. What was never too much for memory is built there. Once `stop` is set nothing comes to
    /// `path` any more.
    ///
    /// # Errors
    /// [`GraphError::TooMany`], a self-loop that is refused, [`GraphError::Io`].
    pub fn finish(mut self, shape: Shape, path: &Path) -> Result<(), GraphError> {
        let relations = if let Shape::Oriented(_) = shape { 1 } else { self.names.len() };
        fits(relations)?;
        if self.pieces.is_empty() {
            let go_on = || self.scratch.go_on().map_err(|error| io_error(&self.folder, error));
            let index = self.piece.finish_while(shape, &go_on)?;
            return save_unless(&index, path, self.scratch.stop());
        }
        self.spill()?;
        let lists = if shape == Shape::Both { 6 } else { 4 };
        let texts = usize::from(matches!(self.pieces[0].nodes, Nodes::Texts { .. }));
        let labels = usize::from(matches!(shape, Shape::Oriented(_)));
        let sections = 1 + texts + labels + relations * lists;
        let outcome = (|| {
            let mut file = IndexFile::create(path, sections, self.scratch.stop())?;
            let Some(nodes) = self.domain(&mut file)? else { return Ok(None) };
            match shape {
                Shape::Oriented(orientation) => self.oriented(&mut file, nodes, orientation)?,
                _ => {
                    for relation in 0..relations {
                        self.straight(&mut file, nodes, relation, shape == Shape::Both)?;
                    }
                }
            }
            file.finish().map(Some)
        })();
        let too_many = || GraphError::TooMany { what: "nodes", count: MOST_NODES + 1, most: MOST_NODES };
        outcome.map_err(|error| self.io(error))?.ok_or_else(too_many)
    }

    /// Writes the nodes and tells every piece the numbers of its own. `None`: there are too many.
    fn domain(&self, file: &mut IndexFile) -> io::Result<Option<u64>> {
        let buffer = self.memory / 8 / self.pieces.len();
        let mut maps = Vec::new();
        for piece in &self.pieces {
            maps.push(self.scratch.writer::<u32>(piece.map.clone(), (buffer / 8).clamp(16, 4096)));
        }
        let signed = matches!((self.fresh)().finish().map(|index| index.domain), Ok(Domain::Signed(_)));
        match &self.pieces[0].nodes {
            Nodes::Numbers(_) => {
                let heads = self.pieces.iter().map(|piece| {
                    let Nodes::Numbers(range) = &piece.nodes else { unreachable!("pieces are of one kind") };
                    let mut reader = self.scratch.reader::<u64>(range.clone(), (buffer / 16).clamp(16, 8192));
                    move || reader.next()
                });
                file.begin(if signed { SIGNED } else { NUMBERS }, 0)?;
                merged(heads.collect(), maps, |number: &u64| file.put(&number.to_le_bytes()))
            }
            Nodes::Texts { .. } => {
                let heads = self.pieces.iter().map(|piece| {
                    let Nodes::Texts { lengths, bytes } = &piece.nodes else { unreachable!("pieces are of one kind") };
                    let mut lengths = self.scratch.reader::<u64>(lengths.clone(), (buffer / 32).clamp(16, 4096));
                    let mut bytes = self.scratch.reader::<u8>(bytes.clone(), (buffer / 4).clamp(64, 1 << 16));
                    move || {
                        let Some(length) = lengths.next()? else { return Ok(None) };
                        let mut text = Vec::with_capacity(length as usize);
                        while (text.len() as u64) < length {
                            text.extend(bytes.next()?);
                        }
                        Ok(Some(text))
                    }
                });
                let most = self.pieces.iter().map(|piece| piece.count).sum::<u64>() + 1;
                let mut ends = self.scratch.writer::<u64>(self.scratch.reserve(most * 8), 8192);
                let mut end = 0;
                ends.push(end)?;
                file.begin(TEXTS, 0)?;
                let nodes = merged(heads.collect(), maps, |text: &Vec<u8>| {
                    end += text.len() as u64;
                    ends.push(end)?;
                    file.put(text)
                })?;
                file.begin(ENDS, 0)?;
                self.copy::<u64>(file, ends.finish()?)?;
                Ok(nodes)
            }
        }
    }

    fn copy<T: bytemuck::Pod>(&self, file: &mut IndexFile, range: Range<u64>) -> io::Result<()> {
        let mut reader = self.scratch.reader::<T>(range, 8192);
        loop {
            let piece = reader.piece()?;
            if piece.is_empty() {
                return Ok(());
            }
            file.put(bytemuck::cast_slice(piece))?;
        }
    }

    /// How many numbers a sorter may have in memory.
    fn most(&self) -> usize {
        self.memory / 24
    }

    /// All edges of a relation, as final numbers.
    fn edges(&self, relation: usize, each: &mut dyn FnMut(u32, u32) -> io::Result<()>) -> io::Result<()> {
        for piece in &self.pieces {
            let mut map = Vec::with_capacity(piece.count as usize);
            let mut reader = self.scratch.reader::<u32>(piece.map.clone(), 8192);
            while let Some(number) = reader.next()? {
                map.push(number);
            }
            let mut reader = self.scratch.reader::<u64>(piece.edges[relation].clone(), 8192);
            while let Some(pair) = reader.next()? {
                let (from, to) = unpacked(pair);
                each(map[from as usize], map[to as usize])?;
            }
        }
        Ok(())
    }

    fn straight(&self, file: &mut IndexFile, nodes: u64, relation: usize, both: bool) -> io::Result<()> {
        let drop = self.names[relation].1 == Loops::Drop;
        let mut forward = Sorter::new(&self.scratch, self.most());
        self.edges(relation, &mut |from, to| if drop && from == to { Ok(()) } else { forward.push(packed(from, to)) })?;
        let mut reverse = both.then(|| Sorter::new(&self.scratch, self.most()));
        let mut loops = self.scratch.writer::<u32>(self.scratch.reserve(nodes * 4), 8192);
        file.begin(NAME, relation as u64)?;
        file.put(self.names[relation].0.as_bytes())?;
        let kinds = (OFFSETS, TARGETS);
        self.lists(file, nodes, relation, kinds, &mut forward.merge()?, &mut |from, to| {
            if from == to {
                loops.push(from)?;
            }
            reverse.as_mut().map_or(Ok(()), |reverse| reverse.push(packed(to, from)))
        })?;
        if let Some(reverse) = reverse {
            let kinds = (BACK_OFFSETS, BACK_TARGETS);
            self.lists(file, nodes, relation, kinds, &mut reverse.merge()?, &mut |_, _| Ok(()))?;
        }
        file.begin(LOOPS, relation as u64)?;
        self.copy::<u32>(file, loops.finish()?)
    }

    /// Writes sorted edges as lists.
    fn lists(
        &self,
        file: &mut IndexFile,
        nodes: u64,
        relation: usize,
        kinds: (u64, u64),
        edges: &mut Merge,
        each: &mut dyn FnMut(u32, u32) -> io::Result<()>,
    ) -> io::Result<()> {
        file.begin(kinds.1, relation as u64)?;
        let mut offsets = Offsets::new(&self.scratch, nodes)?;
        while let Some(pair) = edges.next()? {
            let (from, to) = unpacked(pair);
            offsets.edge(from)?;
            file.put(&to.to_le_bytes())?;
            each(from, to)?;
        }
        file.begin(kinds.0, relation as u64)?;
        self.copy::<u64>(file, offsets.finish()?)
    }

    fn oriented(&self, file: &mut IndexFile, nodes: u64, orientation: Orientation) -> io::Result<()> {
        let mut both = Sorter::new(&self.scratch, self.most());
        for relation in 0..self.names.len() {
            self.edges(relation, &mut |from, to| {
                if from == to {
                    return Ok(());
                }
                both.push(packed(from, to))?;
                both.push(packed(to, from))
            })?;
        }
        // The undirected graph in a file of its own, which is mapped: orientations look at it in any order.
        let graph = self.scratch.another(&self.folder)?;
        let mut edges = both.merge()?;
        let mut targets = graph.writer::<u32>(graph.reserve(edges.most() * 4), 1 << 16);
        let mut offsets = Offsets::new(&graph, nodes)?;
        while let Some(pair) = edges.next()? {
            let (from, to) = unpacked(pair);
            offsets.edge(from)?;
            targets.push(to)?;
        }
        drop(edges);
        let (targets, offsets) = (targets.finish()?, offsets.finish()?);
        let map = Arc::new(Map::open(&graph.file)?);
        let bytes = |range: Range<u64>| range.start as usize..range.end as usize;
        let lie = || io::Error::other("a scratch file does not lie as its type needs");
        let offsets = Section::<u64>::mapped(&map, bytes(offsets)).ok_or_else(lie)?;
        let targets = Section::<u32>::mapped(&map, bytes(targets)).ok_or_else(lie)?;
        let view = View { offsets: offsets.get(), targets: targets.get() };
        let labels = cliques::ranked_while(view, orientation, &|| self.scratch.go_on())?;
        file.begin(LABELS, 0)?;
        labels.chunks(8192).try_for_each(|piece| file.put(bytemuck::cast_slice(piece)))?;
        let mut ranks = vec![0_u32; labels.len()];
        labels.iter().enumerate().for_each(|(rank, &node)| ranks[node as usize] = rank as u32);
        drop(labels);
        let mut forward = Sorter::new(&self.scratch, self.most());
        for (at, (from, to)) in view.edges().enumerate() {
            if at % (1 << 20) == 0 {
                map.release();
            }
            let (from, to) = (ranks[from as usize], ranks[to as usize]);
            if from < to {
                forward.push(packed(from, to))?;
            }
        }
        drop(ranks);
        file.begin(NAME, 0)?;
        file.put(self.names[0].0.as_bytes())?;
        self.lists(file, nodes, 0, (OFFSETS, TARGETS), &mut forward.merge()?, &mut |_, _| Ok(()))?;
        file.begin(LOOPS, 0)
    }
}

fn io_error(folder: &Path, source: io::Error) -> GraphError {
    GraphError::Io { path: folder.to_owned(), source }
}

/// Where lists end, written as their edges come.
struct Offsets {
    writer: Writer<u64>,
    nodes: u64,
    /// Lists whose beginning is written.
    begun: u64,
    edges: u64,
}

impl Offsets {
    fn new(scratch: &Scratch, nodes: u64) -> io::Result<Self> {
        Ok(Self { writer: scratch.writer(scratch.reserve((nodes + 1) * 8), 8192), nodes, begun: 0, edges: 0 })
    }

    fn edge(&mut self, from: u32) -> io::Result<()> {
        self.begin(u64::from(from))?;
        self.edges += 1;
        Ok(())
    }

    fn begin(&mut self, list: u64) -> io::Result<()> {
        while self.begun <= list {
            self.writer.push(self.edges)?;
            self.begun += 1;
        }
        Ok(())
    }

    fn finish(mut self) -> io::Result<Range<u64>> {
        self.begin(self.nodes)?;
        self.writer.finish()
    }
}

/// Merges sorted nodes: each distinct one goes to `each` and has the next number, which the pieces that have it are told.
fn merged<K: Ord>(
    mut heads: Vec<impl FnMut() -> io::Result<Option<K>>>,
    mut maps: Vec<Writer<u32>>,
    mut each: impl FnMut(&K) -> io::Result<()>,
) -> io::Result<Option<u64>> {
    let mut first = BinaryHeap::new();
    for (at, head) in heads.iter_mut().enumerate() {
        first.extend(head()?.map(|node| Reverse((node, at))));
    }
    let mut nodes = 0_u64;
    while let Some(Reverse((node, at))) = first.pop() {
        if nodes == MOST_NODES {
            return Ok(None);
        }
        each(&node)?;
        let mut also = Some(at);
        while let Some(at) = also {
            maps[at].push(nodes as u32)?;
            first.extend(heads[at]()?.map(|node| Reverse((node, at))));
            let same = first.peek().is_some_and(|Reverse((other, _))| *other == node);
            also = if same { first.pop().map(|Reverse((_, at))| at) } else { None };
        }
        nodes += 1;
    }
    maps.into_iter().try_for_each(|map| map.finish().map(drop))?;
    Ok(Some(nodes))
}

fn packed(from: u32, to: u32) -> u64 {
    u64::from(from) << 32 | u64::from(to)
}

fn unpacked(pair: u64) -> (u32, u32) {
    ((pair >> 32) as u32, pair as u32)
}
