//! One direction of a relation: for each node the sorted list of its neighbours, one after the other.
//!
//! Invariants of a [`Csr`]: offsets ascend from 0 to the number of edges; every list ascends without repeats; every
//! neighbour is a node. The memory is this process's own, or a range of a mapped file that its holders share.

use std::ops::Range;
use std::sync::Arc;

use bytemuck::Pod;

use crate::map::Map;

/// Values in memory of this process or in a mapped file.
#[derive(Clone, Debug)]
pub struct Section<T>(Memory<T>);

#[derive(Clone, Debug)]
enum Memory<T> {
    Own(Arc<Vec<T>>),
    Mapped(Arc<Map>, Range<usize>),
}

impl<T: Pod> Section<T> {
    /// A range of bytes of a mapped file; `None` when they do not lie or fit as the type needs.
    pub(crate) fn mapped(map: &Arc<Map>, range: Range<usize>) -> Option<Self> {
        bytemuck::try_cast_slice::<u8, T>(map.bytes().get(range.clone())?).ok()?;
        Some(Self(Memory::Mapped(map.clone(), range)))
    }

    /// Gives pages of a mapped file back to the system, where the values are in one; they come back when read.
    pub(crate) fn release(&self) {
        if let Memory::Mapped(map, _) = &self.0 {
            map.release();
        }
    }

    /// The values. Cheap, but not free: take it out of loops.
    #[must_use]
    pub fn get(&self) -> &[T] {
        match &self.0 {
            Memory::Own(values) => values,
            // Checked when it was made, and a map never moves.
            Memory::Mapped(map, range) => bytemuck::cast_slice(&map.bytes()[range.clone()]),
        }
    }
}

impl<T> From<Vec<T>> for Section<T> {
    fn from(values: Vec<T>) -> Self {
        Self(Memory::Own(Arc::new(values)))
    }
}

/// Sorted adjacency.
#[derive(Clone, Debug)]
pub struct Csr {
    pub(crate) offsets: Section<u64>,
    pub(crate) targets: Section<u32>,
}

impl Csr {
    /// Of edges given as often and in whatever order; `nodes` is one more than the greatest node.
    pub(crate) fn new(nodes: usize, edges: impl Iterator<Item = (u32, u32)> + Clone) -> Self {
        let mut offsets = vec![0_u64; nodes + 1];
        edges.clone().for_each(|(from, _)| offsets[from as usize + 1] += 1);
        for node in 0..nodes {
            offsets[node + 1] += offsets[node];
        }
        let mut targets = vec![0_u32; offsets[nodes] as usize];
        let mut next = offsets.clone();
        for (from, to) in edges {
            targets[next[from as usize] as usize] = to;
            next[from as usize] += 1;
        }
        let mut kept = 0;
        let mut start = 0;
        for node in 0..nodes {
            let end = offsets[node + 1] as usize;
            targets[start..end].sort_unstable();
            let begin = kept;
            for at in start..end {
                if kept == begin || targets[kept - 1] != targets[at] {
                    targets[kept] = targets[at];
                    kept += 1;
                }
            }
            start = end;
            offsets[node + 1] = kept as u64;
        }
        targets.truncate(kept);
        targets.shrink_to_fit();
        Self { offsets: offsets.into(), targets: targets.into() }
    }

    /// The same edges the other way round.
    pub(crate) fn reversed(&self) -> Self {
        let view = self.view();
        let nodes = view.nodes();
        let mut offsets = vec![0_u64; nodes + 1];
        view.targets.iter().for_each(|&to| offsets[to as usize + 1] += 1);
        for node in 0..nodes {
            offsets[node + 1] += offsets[node];
        }
        let (mut sources, mut next) = (vec![0_u32; view.targets.len()], offsets.clone());
        for (from, to) in view.edges() {
            sources[next[to as usize] as usize] = from;
            next[to as usize] += 1;
        }
        Self { offsets: offsets.into(), targets: sources.into() }
    }

    /// For reading.
    #[must_use]
    pub fn view(&self) -> View<'_> {
        View { offsets: self.offsets.get(), targets: self.targets.get() }
    }
}

/// A [`Csr`] for reading: plain slices.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// Where lists end; list `i` begins where list `i - 1` ends.
    pub offsets: &'a [u64],
    /// All lists.
    pub targets: &'a [u32],
}

impl<'a> View<'a> {
    /// How many nodes there are, with or without neighbours.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.offsets.len() - 1
    }

    /// The neighbours of a node, ascending.
    #[inline]
    #[must_use]
    pub fn list(&self, node: u32) -> &'a [u32] {
        &self.targets[self.offsets[node as usize] as usize..self.offsets[node as usize + 1] as usize]
    }

    /// How many neighbours a node has.
    #[inline]
    #[must_use]
    pub fn degree(&self, node: u32) -> usize {
        (self.offsets[node as usize + 1] - self.offsets[node as usize]) as usize
    }

    /// All edges, ascending.
    pub fn edges(self) -> impl Iterator<Item = (u32, u32)> + Clone {
        (0..self.nodes() as u32).flat_map(move |from| self.list(from).iter().map(move |&to| (from, to)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_sorted_and_without_repeats_in_both_directions() {
        let edges = [(2, 1), (0, 3), (2, 0), (2, 1), (0, 3), (3, 3), (0, 1)];
        let csr = Csr::new(5, edges.iter().copied());
        let wanted = vec![(0, 1), (0, 3), (2, 0), (2, 1), (3, 3)];
        assert_eq!(csr.view().edges().collect::<Vec<_>>(), wanted);
        let mut back = csr.reversed().view().edges().map(|(to, from)| (from, to)).collect::<Vec<_>>();
        back.sort_unstable();
        assert_eq!(back, wanted);
        assert_eq!((csr.view().degree(2), csr.view().list(4)), (2, &[][..]));
    }

    #[test]
    fn no_node_and_no_edge_are_fine() {
        assert_eq!(Csr::new(0, std::iter::empty()).view().edges().count(), 0);
        assert_eq!(Csr::new(3, std::iter::empty()).reversed().view().nodes(), 3);
    }
}
