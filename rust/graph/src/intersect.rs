//! Intersections of ascending lists without repeats.
//!
//! Three ways: *merge* walks both lists, without a branch that depends on the data, *gallop* looks up each value of the
//! short list in the long one, doubling its step from where it stood, and [`Marks`] keep a list that many others meet as
//! bits, so that each of them is one probe per value. [`intersect`] and [`count`] choose between the first two by the
//! lengths: galloping from [`GALLOP`] times longer. All of it is safe code; the compiler needs no help with it.
//!
//! Departure: no SIMD.

/// How many times longer the other list is where looking up beats merging (measured: 16 to 64 differ by a few per cent).
pub const GALLOP: usize = 32;

/// Appends what both lists have to `out`.
#[inline]
pub fn intersect(a: &[u32], b: &[u32], out: &mut Vec<u32>) {
    let (short, long) = if a.len() <= b.len() { (a, b) } else { (b, a) };
    if short.len().saturating_mul(GALLOP) < long.len() {
        gallop(short, long, |value| out.push(value));
    } else {
        merge(short, long, out);
    }
}

/// How many values both lists have.
#[inline]
#[must_use]
pub fn count(a: &[u32], b: &[u32]) -> usize {
    let (short, long) = if a.len() <= b.len() { (a, b) } else { (b, a) };
    if short.len().saturating_mul(GALLOP) < long.len() {
        let mut found = 0;
        gallop(short, long, |_| found += 1);
        return found;
    }
    merge_count(short, long)
}

/// Keeps the values of `kept` that are in `other`, too.
pub fn retain(kept: &mut Vec<u32>, other: &[u32]) {
    let (mut at, mut filled) = (0, 0);
    for i in 0..kept.len() {
        let value = kept[i];
        at = seek(other, at, value);
        if at == other.len() {
            break;
        }
        kept[filled] = value;
        filled += usize::from(other[at] == value);
    }
    kept.truncate(filled);
}

/// Walks both lists; appends to `out` what both have.
pub fn merge(a: &[u32], b: &[u32], out: &mut Vec<u32>) {
    let begin = out.len();
    // One place more than can be kept: a value that is not kept is written, too.
    out.resize(begin + a.len().min(b.len()) + 1, 0);
    let into = &mut out[begin..];
    let (mut i, mut j, mut n) = (0, 0, 0);
    while i < a.len() && j < b.len() {
        let (x, y) = (a[i], b[j]);
        into[n] = x;
        n += usize::from(x == y);
        i += usize::from(x <= y);
        j += usize::from(y <= x);
    }
    out.truncate(begin + n);
}

/// Walks both lists and counts what both have.
#[must_use]
pub fn merge_count(a: &[u32], b: &[u32]) -> usize {
    let (mut i, mut j, mut n) = (0, 0, 0);
    while i < a.len() && j < b.len() {
        let (x, y) = (a[i], b[j]);
        n += usize::from(x == y);
        i += usize::from(x <= y);
        j += usize::from(y <= x);
    }
    n
}

/// Looks up each value of the short list in the long one, from where the last one stood.
pub fn gallop(short: &[u32], long: &[u32], mut found: impl FnMut(u32)) {
    let mut at = 0;
    for &value in short {
        at = seek(long, at, value);
        if at == long.len() {
            return;
        }
        if long[at] == value {
            found(value);
            at += 1;
        }
    }
}

/// The first place from `from` on whose value is at least `value`.
#[inline]
fn seek(list: &[u32], from: usize, value: u32) -> usize {
    let rest = &list[from..];
    if rest.first().is_none_or(|&first| first >= value) {
        return from;
    }
    let mut step = 1;
    while step < rest.len() && rest[step] < value {
        step *= 2;
    }
    // rest[step / 2] is below the value; what is at or after rest[step] is not.
    let (low, high) = (step / 2, step.min(rest.len()));
    from + low + rest[low..high].partition_point(|&other| other < value)
}

/// The part of a list that lies in the range of another.
pub(crate) fn within<'a>(list: &'a [u32], other: &[u32]) -> &'a [u32] {
    let (Some(&first), Some(&last)) = (other.first(), other.last()) else { return &[] };
    let begin = list.partition_point(|&node| node < first);
    let end = list.partition_point(|&node| node <= last);
    &list[begin..end.max(begin)]
}

/// A list as one bit per node, for lists that many others are met with.
#[derive(Clone, Debug, Default)]
pub struct Marks {
    words: Vec<u64>,
    /// For a word with bits: how many values of the list are in earlier ones.
    before: Vec<u32>,
}

impl Marks {
    /// No bit set, for nodes below `nodes`.
    #[must_use]
    pub fn new(nodes: usize) -> Self {
        Self { words: vec![0; nodes.div_ceil(64)], before: vec![0; nodes.div_ceil(64)] }
    }

    /// Makes room for nodes below `nodes`.
    pub fn reserve(&mut self, nodes: usize) {
        let words = self.words.len().max(nodes.div_ceil(64));
        self.words.resize(words, 0);
        self.before.resize(words, 0);
    }

    /// Sets the bits of a list, where none is set.
    pub fn set(&mut self, list: &[u32]) {
        for (at, &node) in list.iter().enumerate() {
            let word = (node >> 6) as usize;
            if self.words[word] == 0 {
                self.before[word] = at as u32;
            }
            self.words[word] |= 1 << (node & 63);
        }
    }

    /// Clears the words of a list, which leaves nothing when it was the one that was set.
    pub fn clear(&mut self, list: &[u32]) {
        list.iter().for_each(|&node| self.words[(node >> 6) as usize] = 0);
    }

    /// Whether the bit of a node is set.
    #[inline]
    #[must_use]
    pub fn has(&self, node: u32) -> bool {
        self.words[(node >> 6) as usize] >> (node & 63) & 1 == 1
    }

    /// Where a marked node stands in the list that was set.
    #[inline]
    #[must_use]
    pub fn place(&self, node: u32) -> usize {
        let word = (node >> 6) as usize;
        let below = self.words[word] & ((1 << (node & 63)) - 1);
        self.before[word] as usize + below.count_ones() as usize
    }

    /// How many of the list are marked.
    #[must_use]
    pub fn count(&self, list: &[u32]) -> usize {
        list.iter().map(|&node| (self.words[(node >> 6) as usize] >> (node & 63) & 1) as usize).sum()
    }

    /// Appends those of the list that are marked to `out`.
    pub fn keep(&self, list: &[u32], out: &mut Vec<u32>) {
        let begin = out.len();
        out.resize(begin + list.len() + 1, 0);
        let kept = self.keep_in(list, &mut out[begin..]);
        out.truncate(begin + kept);
    }

    /// Writes those of the list that are marked, and says how many. A value that is not kept is written, too, so `into`
    /// is longer than the list.
    #[inline]
    #[must_use]
    pub fn keep_in(&self, list: &[u32], into: &mut [u32]) -> usize {
        // No branch that depends on the data; one check of the length for all writes.
        let into = &mut into[..list.len() + 1];
        let mut kept = 0;
        for &node in list {
            into[kept] = node;
            kept += (self.words[(node >> 6) as usize] >> (node & 63) & 1) as usize;
        }
        kept
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sorted(most: usize, below: u32) -> impl Strategy<Value = Vec<u32>> {
        proptest::collection::btree_set(0..below, 0..most).prop_map(|set| set.into_iter().collect())
    }

    proptest! {
        #[test]
        fn all_ways_give_what_both_have(a in sorted(40, 90), b in sorted(400, 600)) {
            let wanted = a.iter().copied().filter(|value| b.contains(value)).collect::<Vec<_>>();
            for (x, y) in [(&a, &b), (&b, &a)] {
                let mut out = vec![7];
                intersect(x, y, &mut out);
                prop_assert_eq!(&out[1..], &wanted);
                let mut merged = Vec::new();
                merge(x, y, &mut merged);
                prop_assert_eq!(&merged, &wanted);
                let mut looked_up = Vec::new();
                gallop(x, y, |value| looked_up.push(value));
                prop_assert_eq!(&looked_up, &wanted);
                let mut kept = x.clone();
                retain(&mut kept, y);
                prop_assert_eq!(&kept, &wanted);
                prop_assert_eq!((count(x, y), merge_count(x, y)), (wanted.len(), wanted.len()));
                let mut marks = Marks::new(600);
                marks.set(x);
                prop_assert_eq!(marks.count(y), wanted.len());
                let mut kept = vec![7];
                marks.keep(y, &mut kept);
                prop_assert_eq!(&kept[1..], &wanted);
                for (at, &node) in x.iter().enumerate() {
                    prop_assert_eq!((marks.has(node), marks.place(node)), (true, at));
                }
                marks.clear(x);
                prop_assert_eq!(marks.count(x), 0);
            }
        }

        #[test]
        fn seek_finds_the_first_that_is_not_below(list in sorted(80, 200), from in 0_usize..80, value in 0_u32..210) {
            let from = from.min(list.len());
            let wanted = (from..list.len()).find(|&at| list[at] >= value).unwrap_or(list.len());
            prop_assert_eq!(seek(&list, from, value), wanted);
        }
    }
}
