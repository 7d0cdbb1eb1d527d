//! Items in order, of which there is mostly one.
//!
//! One lies in the list itself, a few lie side by side, and more than `MOST` in chunks of at most as many: so one that comes in the middle or goes
//! from there moves `MOST` others at most, and now and then the places of the chunks. Those that come behind all others fill chunks to the brim.
//!
//! A place is a number, `MOST` times that of its chunk and where it is in it: places ascend as their items do, and between two chunks there may be
//! some without an item. Without chunks they are what they are in a slice. When items come or go, any place may be another's.
//!
//! Invariants: chunks are two or more, none is empty or has more than `MOST` items, and two neighbours have more than `MOST / 2`. In which order
//! items are is up to who puts them there.

#[cfg(test)]
use std::cell::Cell;
use std::cmp::Ordering;
use std::mem::take;
use std::ops::{Index, IndexMut, Range};

/// See the module.
#[derive(Default)]
pub(crate) enum Sorted<T, const MOST: usize> {
    #[default]
    None,
    One(T),
    Many(Vec<T>),
    Chunks(Vec<Vec<T>>),
}

#[cfg(test)]
thread_local! {
    /// Items that others have moved, and chunks.
    pub(crate) static MOVED: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

/// Some work that grows with the items that are there.
#[inline]
fn moved(items: usize, chunks: usize) {
    #[cfg(test)]
    MOVED.with(|moved| moved.set((moved.get().0 + items, moved.get().1 + chunks)));
    _ = (items, chunks);
}

fn insert<T>(items: &mut Vec<T>, at: usize, item: T) {
    moved(items.len() - at, 0);
    items.insert(at, item);
}

impl<T, const MOST: usize> Sorted<T, MOST> {
    /// For how many there is room as soon as there are two.
    const ROOM: usize = if size_of::<T>() > 64 { 2 } else { 4 };

    /// All of them as slices: one that is without chunks, and chunks.
    #[inline]
    fn parts(&self) -> (&[T], &[Vec<T>]) {
        match self {
            Self::None => (&[], &[]),
            Self::One(item) => (std::slice::from_ref(item), &[]),
            Self::Many(items) => (items, &[]),
            Self::Chunks(chunks) => (&[], chunks),
        }
    }

    #[inline]
    fn parts_mut(&mut self) -> (&mut [T], &mut [Vec<T>]) {
        match self {
            Self::None => (&mut [], &mut []),
            Self::One(item) => (std::slice::from_mut(item), &mut []),
            Self::Many(items) => (items, &mut []),
            Self::Chunks(chunks) => (&mut [], chunks),
        }
    }

    /// Cost: that of a look at each chunk.
    pub(crate) fn len(&self) -> usize {
        let (few, chunks) = self.parts();
        few.len() + chunks.iter().map(Vec::len).sum::<usize>()
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        matches!(self, Self::None)
    }

    #[inline]
    pub(crate) fn first(&self) -> Option<&T> {
        match self {
            Self::None => None,
            Self::One(item) => Some(item),
            Self::Many(items) => items.first(),
            Self::Chunks(chunks) => chunks.first()?.first(),
        }
    }

    #[inline]
    pub(crate) fn last(&self) -> Option<&T> {
        match self {
            Self::None => None,
            Self::One(item) => Some(item),
            Self::Many(items) => items.last(),
            Self::Chunks(chunks) => chunks.last()?.last(),
        }
    }

    /// The item where there is just one.
    #[inline]
    pub(crate) fn only(&self) -> Option<&T> {
        match self {
            Self::One(only) => Some(only),
            Self::Many(items) if items.len() == 1 => items.first(),
            _ => None,
        }
    }

    /// The place behind all items.
    #[inline]
    pub(crate) fn end(&self) -> usize {
        match self {
            Self::None => 0,
            Self::One(_) => 1,
            Self::Many(items) => items.len(),
            Self::Chunks(chunks) => chunks.len() * MOST,
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        let (few, chunks) = self.parts();
        few.iter().chain(chunks.iter().flatten())
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        let (few, chunks) = self.parts_mut();
        few.iter_mut().chain(chunks.iter_mut().flatten())
    }

    /// The items of a place and behind, with their places.
    pub(crate) fn iter_from(&self, place: usize) -> impl Iterator<Item = (usize, &T)> {
        let mut rest = place..self.end();
        let runs = std::iter::from_fn(move || self.run(&mut rest));
        runs.flat_map(move |run| run.clone().zip(self.slice(run)))
    }

    /// Takes off a range what of it is in one chunk, where each place has an item; none where there are no more.
    #[inline]
    pub(crate) fn run(&self, range: &mut Range<usize>) -> Option<Range<usize>> {
        if range.start >= range.end {
            return None;
        }
        let Self::Chunks(chunks) = self else {
            let run = range.clone();
            range.start = range.end;
            return Some(run);
        };
        let chunk = range.start / MOST;
        let end = (chunk * MOST + chunks[chunk].len()).min(range.end);
        let run = range.start..end;
        range.start = if end < range.end { (chunk + 1) * MOST } else { end };
        Some(run)
    }

    /// The items of a run.
    #[inline]
    fn slice(&self, run: Range<usize>) -> &[T] {
        match self {
            Self::Chunks(chunks) => {
                let (chunk, at) = (run.start / MOST, run.start % MOST);
                &chunks[chunk][at..at + run.len()]
            }
            few => &few.parts().0[run],
        }
    }

    /// The place behind that of an item.
    #[inline]
    pub(crate) fn behind(&self, place: usize) -> usize {
        match self {
            Self::Chunks(chunks) if place % MOST + 1 == chunks[place / MOST].len() => (place / MOST + 1) * MOST,
            _ => place + 1,
        }
    }

    /// The item before a place.
    #[inline]
    pub(crate) fn before(&self, place: usize) -> Option<&T> {
        match self {
            Self::Chunks(chunks) => match (place / MOST, place % MOST) {
                (chunk, 0) => chunks.get(chunk.checked_sub(1)?)?.last(),
                (chunk, at) => chunks.get(chunk)?.get(at - 1),
            },
            few => few.parts().0.get(place.checked_sub(1)?),
        }
    }

    /// The place of the last item of a range of which something holds. Cost: that of a look at those behind it.
    #[inline]
    pub(crate) fn rfind(&self, mut range: Range<usize>, is: impl Fn(&T) -> bool) -> Option<usize> {
        while !range.is_empty() {
            let run = match self {
                Self::Chunks(chunks) => {
                    let begin = (range.end - 1) / MOST * MOST;
                    begin.max(range.start)..range.end.min(begin + chunks[begin / MOST].len())
                }
                _ => range.clone(),
            };
            range.end = run.start;
            let found = self.slice(run.clone()).iter().rposition(&is);
            if let Some(at) = found {
                return Some(run.start + at);
            }
        }
        None
    }

    /// The place of the first item of which something does not hold that holds of those before it alone.
    #[inline]
    pub(crate) fn partition_point(&self, is: impl Fn(&T) -> bool) -> usize {
        self.partition_point_from(0, is)
    }

    /// As [`partition_point`](Self::partition_point), of the items of a place and behind.
    #[inline]
    pub(crate) fn partition_point_from(&self, begin: usize, is: impl Fn(&T) -> bool) -> usize {
        match self {
            Self::Chunks(chunks) => {
                let ends_before = |chunk: &Vec<T>| chunk.last().is_some_and(&is);
                let mut chunk = begin / MOST;
                // What is asked for is mostly near.
                if chunks.get(chunk).is_some_and(ends_before) {
                    chunk += 1 + chunks[chunk + 1..].partition_point(ends_before);
                }
                let Some(items) = chunks.get(chunk) else { return chunks.len() * MOST };
                let at = begin.saturating_sub(chunk * MOST);
                chunk * MOST + at + items[at..].partition_point(is)
            }
            few => begin + few.parts().0[begin..].partition_point(is),
        }
    }

    /// Where an item is, or where it belongs.
    #[inline]
    pub(crate) fn search(&self, order: impl Fn(&T) -> Ordering) -> Result<usize, usize> {
        if !matches!(self, Self::Chunks(_)) {
            return self.parts().0.binary_search_by(order);
        }
        let place = self.partition_point(|item| order(item).is_lt());
        let is_there = place < self.end() && order(&self[place]).is_eq();
        if is_there { Ok(place) } else { Err(place) }
    }

    #[inline]
    pub(crate) fn insert(&mut self, place: usize, item: T) {
        match self {
            Self::None => *self = Self::One(item),
            // Most come behind all others.
            Self::Many(items) if place == items.len() && place < MOST => items.push(item),
            _ => self.insert_there(place, item),
        }
    }

    fn insert_there(&mut self, place: usize, item: T) {
        match self {
            Self::None => *self = Self::One(item),
            Self::One(_) => {
                let mut items = Vec::with_capacity(Self::ROOM);
                if let Self::One(first) = take(self) {
                    items.push(first);
                }
                items.insert(place, item);
                *self = Self::Many(items);
            }
            Self::Many(items) if items.len() < MOST => insert(items, place, item),
            Self::Many(items) => {
                let mut chunks = vec![take(items)];
                Self::insert_among(&mut chunks, place, item);
                *self = Self::Chunks(chunks);
            }
            Self::Chunks(chunks) => Self::insert_among(chunks, place, item),
        }
    }

    fn insert_among(chunks: &mut Vec<Vec<T>>, place: usize, item: T) {
        let (mut chunk, mut at) = (place / MOST, place % MOST);
        if at == 0 && chunk > 0 && (chunk == chunks.len() || chunks[chunk - 1].len() < MOST) {
            (chunk, at) = (chunk - 1, chunks[chunk - 1].len());
        }
        if chunks[chunk].len() == MOST {
            moved(0, chunks.len() - chunk);
            // At an end of a full one another begins, so that items that come in order fill it.
            let split = if at == 0 || at == MOST { at } else { MOST / 2 };
            let mut rest = Vec::with_capacity(MOST / 4);
            if split == 0 {
                chunks.insert(chunk, rest);
            } else {
                moved(MOST - split, 0);
                rest.extend(chunks[chunk].drain(split..));
                chunks.insert(chunk + 1, rest);
                if at > MOST / 2 {
                    (chunk, at) = (chunk + 1, at - split);
                }
            }
        }
        insert(&mut chunks[chunk], at, item);
    }

    pub(crate) fn remove(&mut self, place: usize) -> T {
        let mut gone = None;
        self.cut(place..place + 1, |item| gone = Some(item));
        gone.expect("a place with an item")
    }

    /// Takes all items of a range away, in order.
    pub(crate) fn cut(&mut self, range: Range<usize>, each: impl FnMut(T)) {
        if range.is_empty() {
            return;
        }
        match self {
            Self::None => {}
            Self::One(_) => {
                if let Self::One(item) = take(self) {
                    Some(item).into_iter().for_each(each);
                }
            }
            Self::Many(items) => {
                moved(items.len() - range.end, 0);
                items.drain(range).for_each(each);
                if items.is_empty() {
                    *self = Self::None;
                }
            }
            Self::Chunks(chunks) => {
                let touched = Self::touched(&range);
                let parts = touched.clone().zip(&mut chunks[touched.clone()]).flat_map(|(chunk, items)| {
                    let part = Self::part(&range, chunk, items.len());
                    moved(items.len() - part.end, 0);
                    items.drain(part)
                });
                parts.for_each(each);
                self.mend(touched);
            }
        }
    }

    /// Takes those of a range away of which something holds, in order. Cost: that of a look at all of the range.
    pub(crate) fn cut_those(&mut self, range: Range<usize>, goes: impl Fn(&T) -> bool, mut each: impl FnMut(T)) {
        if range.is_empty() {
            return;
        }
        match self {
            Self::None => {}
            Self::One(item) => {
                if goes(item) {
                    self.cut(range, each);
                }
            }
            Self::Many(items) => {
                moved(items.len(), 0);
                items.extract_if(range, |item| goes(item)).for_each(each);
                if items.is_empty() {
                    *self = Self::None;
                }
            }
            Self::Chunks(chunks) => {
                let (touched, mut any) = (Self::touched(&range), false);
                for (chunk, items) in touched.clone().zip(&mut chunks[touched.clone()]) {
                    let part = Self::part(&range, chunk, items.len());
                    let before = items.len();
                    items.extract_if(part, |item| goes(item)).for_each(&mut each);
                    any |= items.len() < before;
                    moved(before, 0);
                }
                if any {
                    self.mend(touched);
                }
            }
        }
    }

    /// The chunks that have places of a range.
    fn touched(range: &Range<usize>) -> Range<usize> {
        range.start / MOST..range.end.div_ceil(MOST)
    }

    /// What of a range is in a chunk with so many items.
    fn part(range: &Range<usize>, chunk: usize, len: usize) -> Range<usize> {
        let within = |place: usize| place.saturating_sub(chunk * MOST).min(len);
        within(range.start)..within(range.end)
    }

    /// Items of some chunks are gone: empty ones go, and small ones become one with a neighbour.
    fn mend(&mut self, touched: Range<usize>) {
        let Self::Chunks(chunks) = self else { return };
        let (begin, end) = (touched.start.saturating_sub(1), (touched.end + 1).min(chunks.len()));
        let mut last = begin;
        for chunk in begin + 1..end {
            let len = chunks[last].len();
            if len == 0 {
                chunks.swap(last, chunk);
            } else if len + chunks[chunk].len() <= MOST / 2 || chunks[chunk].is_empty() {
                let mut items = take(&mut chunks[chunk]);
                moved(items.len(), 0);
                chunks[last].append(&mut items);
            } else {
                last += 1;
                chunks.swap(last, chunk);
            }
        }
        let kept = last + usize::from(!chunks[last].is_empty());
        if kept < end {
            moved(0, chunks.len() - end);
            chunks.drain(kept..end);
        }
        match &mut chunks[..] {
            [] => *self = Self::None,
            [items] => *self = Self::Many(take(items)),
            _ => {}
        }
    }
}

impl<T, const MOST: usize> Index<usize> for Sorted<T, MOST> {
    type Output = T;

    #[inline]
    fn index(&self, place: usize) -> &T {
        match self {
            Self::Chunks(chunks) => &chunks[place / MOST][place % MOST],
            few => &few.parts().0[place],
        }
    }
}

impl<T, const MOST: usize> IndexMut<usize> for Sorted<T, MOST> {
    #[inline]
    fn index_mut(&mut self, place: usize) -> &mut T {
        match self {
            Self::Chunks(chunks) => &mut chunks[place / MOST][place % MOST],
            few => &mut few.parts_mut().0[place],
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What has been moved by something.
    fn moves(does: impl FnOnce()) -> (usize, usize) {
        let before = MOVED.get();
        does();
        (MOVED.get().0 - before.0, MOVED.get().1 - before.1)
    }

    fn check<const MOST: usize>(sorted: &Sorted<u32, MOST>) {
        match sorted {
            Sorted::None | Sorted::One(_) => {}
            Sorted::Many(items) => assert!((1..=MOST).contains(&items.len())),
            Sorted::Chunks(chunks) => {
                assert!(chunks.len() > 1);
                assert!(chunks.iter().all(|chunk| (1..=MOST).contains(&chunk.len())));
                assert!(chunks.windows(2).all(|two| two[0].len() + two[1].len() > MOST / 2));
            }
        }
    }

    /// Puts a number behind those that are not greater.
    fn put<const MOST: usize>(sorted: &mut Sorted<u32, MOST>, number: u32) {
        sorted.insert(sorted.partition_point(|one| *one <= number), number);
    }

    fn is_what_a_slice_is<const MOST: usize>(deeds: Vec<(u8, u32, u32)>) {
        let (mut sorted, mut twin) = (Sorted::<u32, MOST>::default(), Vec::<u32>::new());
        for (deed, number, more) in deeds {
            let at = |number: u32| twin.partition_point(|one| *one < number);
            let (range, wanted) = (at(number)..at(number + more), number..number + more);
            let begin = sorted.partition_point(|one| *one < wanted.start);
            let end = sorted.partition_point_from(begin, |one| *one < wanted.end);
            assert_eq!(end, sorted.partition_point(|one| *one < wanted.end));
            let mut gone = Vec::new();
            match deed {
                0 => {
                    sorted.cut(begin..end, |one| gone.push(one));
                    assert_eq!(gone, twin.drain(range).collect::<Vec<_>>());
                }
                1 | 2 => {
                    let goes = |one: &u32| !one.is_multiple_of(u32::from(deed) + 1);
                    sorted.cut_those(begin..end, goes, |one| gone.push(one));
                    assert_eq!(gone, twin.extract_if(range, |one| goes(one)).collect::<Vec<_>>());
                }
                3..6 => {
                    let found = sorted.search(|one| one.cmp(&number));
                    assert_eq!(found.is_ok(), twin.binary_search(&number).is_ok());
                    if let Ok(place) = found {
                        assert_eq!(sorted.remove(place), twin.remove(at(number)));
                    }
                }
                6 if !range.is_empty() => {
                    // Those of an order may be others without a change of it.
                    sorted[begin] = number;
                    twin[range.start] = number;
                }
                _ => {
                    put(&mut sorted, number);
                    twin.insert(twin.partition_point(|one| *one <= number), number);
                }
            }
            check(&sorted);
            assert_eq!(sorted.iter().copied().collect::<Vec<_>>(), twin);
            assert_eq!(sorted.iter_mut().map(|one| *one).collect::<Vec<_>>(), twin);
            assert_eq!((sorted.len(), sorted.is_empty()), (twin.len(), twin.is_empty()));
            assert_eq!((sorted.first(), sorted.last()), (twin.first(), twin.last()));
            assert_eq!(sorted.only(), twin.first().filter(|_| twin.len() == 1));
            let at = |number: u32| twin.partition_point(|one| *one < number);
            let (begin, end) = (at(number), at(number + more));
            let place = sorted.partition_point(|one| *one < number);
            assert_eq!(sorted.before(place), begin.checked_sub(1).map(|last| &twin[last]));
            assert_eq!(sorted.before(sorted.end()), twin.last());
            let rest: Vec<(usize, &u32)> = sorted.iter_from(place).collect();
            assert!(rest.iter().all(|(place, one)| sorted[*place] == **one) && rest.is_sorted());
            assert_eq!(rest.iter().map(|(_, one)| **one).collect::<Vec<_>>(), twin[begin..]);
            let last = sorted.partition_point(|one| *one < number + more);
            let (mut left, mut seen) = (place..last, Vec::new());
            while let Some(run) = sorted.run(&mut left) {
                seen.extend(run.map(|place| sorted[place]));
            }
            assert_eq!(seen, twin[begin..end]);
            let is = |one: &u32| one.is_multiple_of(5);
            let found = sorted.rfind(place..last, is).map(|place| sorted[place]);
            assert_eq!(found, twin[begin..end].iter().copied().rfind(is));
        }
    }

    proptest! {
        #[test]
        fn a_list_is_what_a_slice_is(deeds in prop::collection::vec((0u8..40, 0u32..300, 0u32..150), 1..400)) {
            is_what_a_slice_is::<2>(deeds.clone());
            is_what_a_slice_is::<5>(deeds.clone());
            is_what_a_slice_is::<8>(deeds);
        }
    }

    /// Numbers below one, each once, in no order.
    fn shuffled(count: u32) -> impl Iterator<Item = u32> {
        (0..count).map(move |number| (u64::from(number) * 1_000_003 % u64::from(count)) as u32)
    }

    #[test]
    fn what_comes_in_any_order_moves_few_others() {
        const COUNT: u32 = 200_000;
        let fill = |numbers: &mut dyn Iterator<Item = u32>| {
            let mut sorted = Sorted::<u32, 256>::default();
            let moved = moves(|| numbers.for_each(|number| put(&mut sorted, number)));
            check(&sorted);
            assert!(sorted.iter().copied().eq(0..COUNT));
            (moved, sorted)
        };
        let ((items, chunks), mut full) = fill(&mut (0..COUNT));
        assert!(items == 0 && chunks <= COUNT as usize / 256 + 1, "{items} items, {chunks} chunks");
        assert!(matches!(&full, Sorted::Chunks(chunks) if chunks.len() == COUNT.div_ceil(256) as usize));
        for numbers in [&mut (0..COUNT).rev() as &mut dyn Iterator<Item = u32>, &mut shuffled(COUNT)] {
            let ((items, chunks), mut sorted) = fill(numbers);
            assert!(items <= 160 * COUNT as usize, "{items} items");
            assert!(chunks <= 10 * COUNT as usize, "{chunks} chunks");
            let (items, chunks) = moves(|| {
                for number in shuffled(COUNT) {
                    let place = sorted.search(|one| one.cmp(&number)).unwrap();
                    assert_eq!(sorted.remove(place), number);
                }
            });
            assert!(sorted.is_empty());
            assert!(items <= 160 * COUNT as usize && chunks <= 10 * COUNT as usize, "{items} items, {chunks} chunks");
        }
        // From the front, as what is over goes.
        let (items, chunks) = moves(|| {
            for number in (0..COUNT).step_by(100) {
                full.cut(0..full.partition_point(|one| *one < number + 100), drop);
            }
        });
        assert!(full.is_empty());
        assert!(items <= 3 * COUNT as usize && chunks <= 3 * COUNT as usize, "{items} items, {chunks} chunks");
    }

    #[test]
    fn one_item_takes_no_more_than_itself_and_a_word() {
        assert_eq!(size_of::<Sorted<[u64; 4], 256>>(), 5 * size_of::<u64>());
        assert_eq!(size_of::<Sorted<Vec<u64>, 256>>(), 4 * size_of::<u64>());
    }
}
