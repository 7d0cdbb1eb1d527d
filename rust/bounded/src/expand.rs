//! From an input to its items, lazily.
//!
//! An expansion is asked for as many items as there is room for and keeps its place in between; nothing is drawn ahead.

use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::vec::IntoIter;

use penstock_dataflow::BoxError;

/// Why an expansion ended early: the input, how many items it had given, the cause.
pub(crate) type Broken = (String, u64, String);

/// How inputs become items. `Live` is an input that has begun and may have more.
pub(crate) trait Expand<X> {
    type Item;
    type Live;

    /// Appends up to `room` items of `live`, then of `inputs`. On return with fewer, both are exhausted.
    fn fill(
        &mut self,
        inputs: &mut IntoIter<X>,
        live: &mut Option<Self::Live>,
        room: usize,
        items: &mut Vec<Self::Item>,
    ) -> Result<(), Broken>;
}

/// Every input is its own item.
pub(crate) struct Itself;

impl<X> Expand<X> for Itself {
    type Item = X;
    type Live = ();

    fn fill(
        &mut self,
        inputs: &mut IntoIter<X>,
        _: &mut Option<()>,
        room: usize,
        items: &mut Vec<X>,
    ) -> Result<(), Broken> {
        items.extend(inputs.take(room));
        Ok(())
    }
}

/// An iterator per input. A panic in it is the operator's.
pub(crate) struct Each<F>(pub(crate) F);

impl<X, F, L> Expand<X> for Each<F>
where
    F: FnMut(X) -> L,
    L: Iterator,
{
    type Item = L::Item;
    type Live = L;

    fn fill(
        &mut self,
        inputs: &mut IntoIter<X>,
        live: &mut Option<L>,
        room: usize,
        items: &mut Vec<L::Item>,
    ) -> Result<(), Broken> {
        let goal = items.len() + room;
        while items.len() < goal {
            let Some(current) = live else {
                let Some(input) = inputs.next() else { break };
                *live = Some((self.0)(input));
                continue;
            };
            items.extend(current.take(goal - items.len()));
            // Full: there may be more, unless the iterator knows that there is not.
            if items.len() < goal || current.size_hint().1 == Some(0) {
                *live = None;
            }
        }
        Ok(())
    }
}

/// As [`Each`] where an item may be an error; remembers the input to name it. A panic in the iterator is a failure as well.
pub(crate) struct EachOr<F>(pub(crate) F);

/// An input that has begun: what it was, how much it gave, and the rest.
pub(crate) struct Begun<X, L> {
    input: X,
    drawn: u64,
    rest: L,
}

impl<X, F, L, Y, E> Expand<X> for EachOr<F>
where
    X: Clone + Debug,
    F: FnMut(X) -> L,
    L: Iterator<Item = Result<Y, E>>,
    E: Into<BoxError>,
{
    type Item = Y;
    type Live = Begun<X, L>;

    fn fill(
        &mut self,
        inputs: &mut IntoIter<X>,
        live: &mut Option<Begun<X, L>>,
        room: usize,
        items: &mut Vec<Y>,
    ) -> Result<(), Broken> {
        let goal = items.len() + room;
        while items.len() < goal {
            let Some(current) = live else {
                let Some(input) = inputs.next() else { break };
                let kept = input.clone();
                match catch_unwind(AssertUnwindSafe(|| (self.0)(input))) {
                    Ok(rest) => *live = Some(Begun { input: kept, drawn: 0, rest }),
                    Err(panic) => return Err((format!("{kept:?}"), 0, message(&*panic))),
                }
                continue;
            };
            let before = items.len();
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                while items.len() < goal {
                    match current.rest.next() {
                        Some(Ok(item)) => items.push(item),
                        Some(Err(error)) => return Err(error.into().to_string()),
                        None => return Ok(true),
                    }
                }
                Ok(current.rest.size_hint().1 == Some(0))
            }));
            current.drawn += (items.len() - before) as u64;
            let cause = match outcome {
                Ok(Ok(false)) => continue,
                Ok(Ok(true)) => {
                    *live = None;
                    continue;
                }
                Ok(Err(cause)) => cause,
                Err(panic) => message(&*panic),
            };
            let broken = (format!("{:?}", current.input), current.drawn, cause);
            *live = None;
            return Err(broken);
        }
        Ok(())
    }
}

fn message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic without a message".to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::rc::Rc;

    #[test]
    fn nothing_is_drawn_ahead() {
        let drawn = Rc::new(Cell::new(0));
        let count = drawn.clone();
        let mut expand = Each(move |input: u64| {
            let count = count.clone();
            (0..input).inspect(move |_| count.set(count.get() + 1))
        });
        let (mut inputs, mut live, mut items) = (vec![3u64, 0, 4, 1_000_000_000_000].into_iter(), None, Vec::new());
        for (room, total) in [(2, 2), (3, 5), (5, 10)] {
            expand.fill(&mut inputs, &mut live, room, &mut items).unwrap();
            assert_eq!((items.len(), drawn.get()), (total, total));
        }
        assert_eq!(items, [0, 1, 2, 0, 1, 2, 3, 0, 1, 2]);
    }

    #[test]
    fn an_end_that_the_iterator_knows_is_seen_at_once() {
        let (mut inputs, mut live, mut items) = (vec![2u64].into_iter(), None, Vec::new());
        Each(|input: u64| 0..input).fill(&mut inputs, &mut live, 2, &mut items).unwrap();
        assert!(live.is_none() && inputs.as_slice().is_empty());
    }

    #[test]
    fn a_failure_names_its_input_and_the_next_one_goes_on() {
        let expand = |input: u64| (0..input).map(move |at| if (input, at) == (3, 2) { Err("two") } else { Ok(at) });
        let (mut inputs, mut live, mut items) = (vec![1u64, 3, 2].into_iter(), None, Vec::new());
        let mut expand = EachOr(expand);
        let broken = expand.fill(&mut inputs, &mut live, 10, &mut items).unwrap_err();
        assert_eq!(broken, ("3".to_string(), 2, "two".to_string()));
        expand.fill(&mut inputs, &mut live, 10, &mut items).unwrap();
        assert_eq!(items, [0, 0, 1, 0, 1]);
    }

    #[test]
    fn a_panic_is_a_failure_too() {
        let expand = |input: u64| {
            assert!(input != 7, "seven is refused");
            std::iter::from_fn(move || -> Option<Result<u64, String>> { panic!("no item of {input}") })
        };
        let (mut inputs, mut live, mut items) = (vec![7u64, 8].into_iter(), None, Vec::<u64>::new());
        let mut expand = EachOr(expand);
        let first = expand.fill(&mut inputs, &mut live, 1, &mut items).unwrap_err();
        let second = expand.fill(&mut inputs, &mut live, 1, &mut items).unwrap_err();
        assert_eq!(first, ("7".to_string(), 0, "seven is refused".to_string()));
        assert_eq!(second, ("8".to_string(), 0, "no item of 8".to_string()));
        assert!(live.is_none());
    }
}
