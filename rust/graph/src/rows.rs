//! Matches by column, as a search writes them.
//!
//! Invariant: all columns are of one length whenever nobody writes.

use crate::query::Query;

/// Matches by column: one column per attribute, in the order in which they are bound.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rows {
    /// Nodes by level.
    pub columns: Vec<Vec<u32>>,
}

impl Rows {
    /// No match yet.
    #[must_use]
    pub fn new(query: &Query) -> Self {
        Self { columns: vec![Vec::new(); query.levels().len()] }
    }

    /// How many matches there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.columns.first().map_or(0, Vec::len)
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Places in the domain by column of the result.
    ///
    /// With `sorted` the places of every row ascend: for undirected cliques, whose nodes have no order of their own.
    #[must_use]
    pub fn places(&self, query: &Query, sorted: bool) -> Vec<Vec<u32>> {
        let labels = query.index().labels.as_ref().map(|labels| labels.get());
        let place = |&node: &u32| labels.map_or(node, |labels| labels[node as usize]);
        let column = |level: &usize| self.columns[*level].iter().map(place).collect::<Vec<_>>();
        let mut columns = query.head().iter().map(column).collect::<Vec<_>>();
        if sorted {
            sort_rows(&mut columns);
        }
        columns
    }
}

/// Sorts every row, by a network: neighbouring columns exchange what is out of order, as many rounds as there are columns.
/// An exchange is a pass over two columns without a branch.
fn sort_rows(columns: &mut [Vec<u32>]) {
    for round in 0..columns.len() {
        for pair in columns[round % 2..].chunks_exact_mut(2) {
            let [low, high] = pair else { unreachable!("chunks of two") };
            for (low, high) in low.iter_mut().zip(high) {
                (*low, *high) = ((*low).min(*high), (*low).max(*high));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_network_sorts_rows(rows in (0_usize..8).prop_flat_map(|width| proptest::collection::vec(proptest::collection::vec(any::<u32>(), width), 0..20))) {
            let width = rows.first().map_or(0, Vec::len);
            let mut columns = (0..width).map(|at| rows.iter().map(|row| row[at]).collect::<Vec<_>>()).collect::<Vec<_>>();
            sort_rows(&mut columns);
            for (at, mut row) in rows.into_iter().enumerate() {
                row.sort_unstable();
                prop_assert_eq!(columns.iter().map(|column| column[at]).collect::<Vec<_>>(), row);
            }
        }
    }
}
