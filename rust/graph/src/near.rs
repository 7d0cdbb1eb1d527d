//! Cliques below one root, in the neighbourhood of that root as bits.
//!
//! Every later node of a clique is a neighbour of its root, so below a root nodes are places in the root's list, and the
//! neighbours of a node among them are a row of bits. A level's candidates are the bits that all rows so far share: one AND
//! of a few words instead of a merge of two lists. A row is made when a prefix first needs it, by looking up the node's list
//! among the marks of the root's. Cliques of three nodes need no rows: the second node's list, looked up, is the last level.
//!
//! Owns: the state of a root, suspended between any two rows of the result. Invariants: candidates are tried in
//! ascending order of their nodes, so matches come as from lists; memory is at most [`MOST_PLACES`]² bits, a bit and a half per
//! node of the graph, and what is left of one last level.
//!
//! Departure: cliques as bits. Lists of more than 4,096 neighbours, and patterns that are no cliques, are searched as
//! lists (`search`). No SIMD: words of 64 bits in safe code are two to four times faster than the hand-written loop;
//! what is left of an enumeration is half writing rows, a quarter making bit rows.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::csr::View;
use crate::intersect::{self, Marks};

/// The longest list of a root that becomes rows: 2 MiB of them.
pub(crate) const MOST_PLACES: usize = 4096;

/// Rows for which a batch makes room at once; beyond them it grows as it is filled.
const LARGEST_STEP: usize = 1 << 16;

/// Words of a row, or of candidates, that may have bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Span {
    low: u32,
    high: u32,
}

/// A row that was not made yet.
const UNMADE: Span = Span { low: u32::MAX, high: 0 };

impl Span {
    fn range(self) -> Range<usize> {
        self.low as usize..self.high as usize
    }

    fn both(self, other: Self) -> Self {
        let low = self.low.max(other.low);
        Self { low, high: self.high.min(other.high).max(low) }
    }
}

/// Candidates of a level, and which of them were not tried yet.
#[derive(Clone, Debug, Default)]
struct Level {
    bits: Vec<u64>,
    span: Span,
    /// Word of the candidate that is tried, and what is left of it.
    word: usize,
    left: u64,
}

impl Level {
    fn begin(&mut self, span: Span) {
        self.span = span;
        self.word = span.low as usize;
        self.left = if span.low < span.high { self.bits[self.word] } else { 0 };
    }

    /// The place of the next candidate.
    #[inline]
    fn next(&mut self) -> Option<usize> {
        while self.left == 0 {
            self.word += 1;
            if self.word >= self.span.high as usize {
                return None;
            }
            self.left = self.bits[self.word];
        }
        let place = self.word * 64 + self.left.trailing_zeros() as usize;
        self.left &= self.left - 1;
        Some(place)
    }
}

/// What becomes of the last level of a prefix.
pub(crate) trait Last {
    /// The node at `level` changes; until now it was `node`.
    fn turn(&mut self, level: usize, node: u32);
    /// The last nodes are those of `nodes` (64 per word) whose bits both have. Whether no more is wanted now.
    fn bits(&mut self, one: &[u64], other: &[u64], nodes: &[u32]) -> bool;
    /// The last nodes are the values of `list` that are marked. Whether no more is wanted now.
    fn marked(&mut self, list: &[u32], marks: &Marks) -> bool;
    /// The last nodes are the values that both lists have; one is far longer. Whether no more is wanted now.
    fn shared(&mut self, one: &[u32], other: &[u32]) -> bool;
}

/// How a walk ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// There is no more below this root.
    Done,
    /// No more is wanted now.
    Full,
    /// The flag was set.
    Stopped,
}

/// The neighbourhood of a root, and where the walk through it stands.
#[derive(Clone, Debug)]
pub(crate) struct Near {
    size: usize,
    marks: Marks,
    /// The root's list, filled up to whole words of places.
    nodes: Vec<u32>,
    len: usize,
    /// Words of a row.
    words: usize,
    rows: Vec<u64>,
    spans: Vec<Span>,
    hits: Vec<u32>,
    /// Level 2 and later, but for the last.
    levels: Vec<Level>,
    /// Places of the second node that were not tried yet.
    places: Range<usize>,
    depth: usize,
    /// The clique so far.
    pub(crate) prefix: Vec<u32>,
}

impl Near {
    /// For cliques of `size` nodes, at least 3, of a graph of so many.
    pub(crate) fn new(size: usize, nodes: usize) -> Self {
        Self {
            size,
            marks: Marks::new(nodes),
            nodes: Vec::new(),
            len: 0,
            words: 0,
            rows: Vec::new(),
            spans: Vec::new(),
            hits: Vec::new(),
            levels: vec![Level::default(); size - 3],
            places: 0..0,
            depth: 1,
            prefix: vec![0; size],
        }
    }

    /// Whether a root with such a list can be entered.
    pub(crate) fn fits(&self, list: &[u32]) -> bool {
        self.size == 3 || list.len() <= MOST_PLACES
    }

    /// Begins with a root, whose second nodes are those at `places` of its list.
    pub(crate) fn enter(&mut self, root: u32, list: &[u32], places: Range<usize>) {
        self.marks.clear(&self.nodes[..self.len]);
        self.marks.set(list);
        self.len = list.len();
        self.words = list.len().div_ceil(64);
        self.nodes.clear();
        self.nodes.extend_from_slice(list);
        self.nodes.resize(self.words * 64, 0);
        if self.size > 3 {
            self.spans.clear();
            self.spans.resize(self.len, UNMADE);
            self.rows.resize(self.rows.len().max(self.len * self.words), 0);
            self.levels.iter_mut().for_each(|level| level.bits.resize(self.words, 0));
        }
        (self.places, self.depth, self.prefix[0]) = (places, 1, root);
    }

    /// Goes on until `last` wants no more, or all below the root is done.
    pub(crate) fn walk(&mut self, graph: View<'_>, last: &mut impl Last, stop: &AtomicBool) -> End {
        loop {
            // In each turn: below two nodes there may be more than there is time for.
            if stop.load(Ordering::Relaxed) {
                return End::Stopped;
            }
            if self.depth == 1 {
                last.turn(1, self.prefix[1]);
                let Some(place) = self.places.next() else { return End::Done };
                self.prefix[1] = self.nodes[place];
                if self.size == 3 {
                    if self.third(graph, last) {
                        return End::Full;
                    }
                    continue;
                }
                let span = self.row(graph, place);
                let row = &self.rows[place * self.words..][..self.words];
                self.levels[0].bits[span.range()].copy_from_slice(&row[span.range()]);
                self.levels[0].begin(span);
                self.depth = 2;
            }
            let at = self.depth - 2;
            last.turn(self.depth, self.prefix[self.depth]);
            let Some(place) = self.levels[at].next() else {
                self.depth -= 1;
                continue;
            };
            self.prefix[self.depth] = self.nodes[place];
            let made = self.row(graph, place);
            let span = made.both(self.levels[at].span);
            let row = &self.rows[place * self.words..][span.range()];
            let (above, below) = self.levels.split_at_mut(at + 1);
            let bits = &above[at].bits[span.range()];
            if let Some(next) = below.first_mut() {
                let each = next.bits[span.range()].iter_mut().zip(bits).zip(row);
                each.for_each(|((both, bits), row)| *both = bits & row);
                next.begin(span);
                self.depth += 1;
            } else if last.bits(bits, row, &self.nodes[span.low as usize * 64..]) {
                return End::Full;
            }
        }
    }

    /// The last level of cliques of three.
    fn third(&mut self, graph: View<'_>, last: &mut impl Last) -> bool {
        let list = &self.nodes[..self.len];
        let other = graph.list(self.prefix[1]);
        if other.len() > list.len().saturating_mul(intersect::GALLOP) {
            return last.shared(list, other);
        }
        last.marked(intersect::within(other, list), &self.marks)
    }

    /// The row of a place, made if that was not done yet: the words that have its bits.
    #[inline]
    fn row(&mut self, graph: View<'_>, place: usize) -> Span {
        let span = self.spans[place];
        if span != UNMADE { span } else { self.make(graph, place) }
    }

    #[cold]
    fn make(&mut self, graph: View<'_>, place: usize) -> Span {
        let list = &self.nodes[..self.len];
        let other = graph.list(list[place]);
        self.hits.clear();
        if other.len() > list.len().saturating_mul(intersect::GALLOP) {
            intersect::gallop(list, other, |node| self.hits.push(node));
        } else {
            self.marks.keep(intersect::within(other, list), &mut self.hits);
        }
        let row = &mut self.rows[place * self.words..][..self.words];
        row.fill(0);
        let (mut low, mut high) = (0, 0);
        for &node in &self.hits {
            let at = self.marks.place(node);
            row[at >> 6] |= 1 << (at & 63);
            high = (at >> 6) as u32 + 1;
        }
        if let Some(&first) = self.hits.first() {
            low = (self.marks.place(first) >> 6) as u32;
        }
        self.spans[place] = Span { low, high };
        self.spans[place]
    }
}

/// Counts.
#[derive(Debug, Default)]
pub(crate) struct Count(pub(crate) u64);

impl Last for Count {
    fn turn(&mut self, _level: usize, _node: u32) {}

    #[inline]
    fn bits(&mut self, one: &[u64], other: &[u64], _nodes: &[u32]) -> bool {
        self.0 += one.iter().zip(other).map(|(one, other)| u64::from((one & other).count_ones())).sum::<u64>();
        false
    }

    #[inline]
    fn marked(&mut self, list: &[u32], marks: &Marks) -> bool {
        self.0 += marks.count(list) as u64;
        false
    }

    fn shared(&mut self, one: &[u32], other: &[u32]) -> bool {
        self.0 += intersect::count(one, other) as u64;
        false
    }
}

/// Writes rows by column until there are `most`. A column gets its node when the node changes, not row by row.
pub(crate) struct Write<'a> {
    columns: &'a mut [Vec<u32>],
    last: &'a mut Vec<u32>,
    /// Values of the last column; behind them it has room.
    filled: usize,
    most: usize,
}

impl<'a> Write<'a> {
    pub(crate) fn new(columns: &'a mut [Vec<u32>], most: usize) -> Self {
        let (last, columns) = columns.split_last_mut().expect("a match has columns");
        let filled = last.len();
        let more = most.saturating_sub(filled).min(LARGEST_STEP);
        columns.iter_mut().for_each(|column| column.reserve(more));
        Self { columns, last, filled, most }
    }

    /// Ends a turn: all columns have all rows but those beyond `most`, whose last nodes go to `rest`.
    pub(crate) fn end(self, prefix: &[u32], rest: &mut Vec<u32>) {
        self.last.truncate(self.filled);
        if self.filled > self.most {
            rest.extend_from_slice(&self.last[self.most..]);
            self.last.truncate(self.most);
        }
        for (column, node) in self.columns.iter_mut().zip(prefix) {
            column.resize(self.last.len(), *node);
        }
    }

    /// Room for so many more values.
    #[inline]
    fn room(&mut self, more: usize) -> &mut [u32] {
        let wanted = self.filled + more;
        if self.last.len() < wanted {
            // For a whole batch at once, and for what the last prefix may have beyond it.
            let whole = self.most.min(LARGEST_STEP).saturating_add(more);
            self.last.resize(wanted.max(whole).max(wanted.min(2 * self.last.len())), 0);
        }
        &mut self.last[self.filled..]
    }
}

impl Last for Write<'_> {
    #[inline]
    fn turn(&mut self, level: usize, node: u32) {
        let column = &mut self.columns[level];
        if column.len() < self.filled {
            column.resize(self.filled, node);
        }
    }

    #[inline]
    fn bits(&mut self, one: &[u64], other: &[u64], nodes: &[u32]) -> bool {
        let into = self.room(64 * one.len());
        let mut at = 0;
        for ((one, other), nodes) in one.iter().zip(other).zip(nodes.chunks_exact(64)) {
            let mut bits = one & other;
            while bits != 0 {
                into[at] = nodes[bits.trailing_zeros() as usize];
                at += 1;
                bits &= bits - 1;
            }
        }
        self.filled += at;
        self.filled >= self.most
    }

    #[inline]
    fn marked(&mut self, list: &[u32], marks: &Marks) -> bool {
        let into = self.room(list.len() + 1);
        let kept = marks.keep_in(list, into);
        self.filled += kept;
        self.filled >= self.most
    }

    fn shared(&mut self, one: &[u32], other: &[u32]) -> bool {
        let into = self.room(one.len().min(other.len()));
        let mut at = 0;
        let (short, long) = if one.len() <= other.len() { (one, other) } else { (other, one) };
        intersect::gallop(short, long, |node| {
            into[at] = node;
            at += 1;
        });
        self.filled += at;
        self.filled >= self.most
    }
}
