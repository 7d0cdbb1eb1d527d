//! From inputs to items, lazily.
//!
//! An expansion is asked for as many items as there is room for and keeps its place in between; nothing is drawn ahead. What it
//! is asked for by the batcher is the trait [`Expand`], for blocks of any kind; for lists there are three: the inputs
//! themselves, an iterator for each, and one that may fail.

use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::vec::IntoIter;

use penstock_dataflow::BoxError;

/// The expansion of one input ended early.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broken {
    /// The input, as people read it.
    pub input: String,
    /// Items that it had given before.
    pub drawn: u64,
    /// The error or the message of the panic.
    pub cause: String,
}

/// How blocks `D` of inputs become blocks of items.
pub trait Expand<D> {
    /// What is left of a block of inputs.
    type Inputs: 'static;
    /// Items that are collected for one block.
    type Gathered: Default;
    /// A block of items.
    type Block: Clone + 'static;

    /// Begins a block of inputs.
    ///
    /// # Errors
    /// Stop all workers.
    fn load(&mut self, block: D) -> Result<Self::Inputs, BoxError>;

    /// Inputs that are left, one that has begun included.
    fn left(&self, inputs: &Self::Inputs) -> u64;

    /// Collects up to `room` more items; says how many. Fewer while inputs are left means that what is collected must be
    /// handed out first.
    ///
    /// # Errors
    /// [`Broken`] for one input, which counts as done; the items collected so far stay.
    fn fill(
        &mut self,
        inputs: &mut Self::Inputs,
        room: usize,
        gathered: &mut Self::Gathered,
    ) -> (usize, Result<(), Fault>);

    /// Gives the block of what was collected, which is not nothing, or several where they are of different kinds.
    ///
    /// # Errors
    /// Stop all workers.
    fn seal(&mut self, gathered: Self::Gathered, give: &mut dyn FnMut(Self::Block)) -> Result<(), BoxError>;
}

/// Why an expansion stops.
#[derive(Debug)]
pub enum Fault {
    /// One input failed: what then happens is an option.
    Input(Broken),
    /// All workers stop.
    Fatal(BoxError),
}

/// The inputs of a list that are left, and the one that has begun.
#[doc(hidden)]
pub struct List<X, L> {
    inputs: IntoIter<X>,
    live: Option<L>,
}

impl<X, L> List<X, L> {
    fn of(block: Vec<X>) -> Self {
        List { inputs: block.into_iter(), live: None }
    }

    fn left(&self) -> u64 {
        self.inputs.len() as u64 + u64::from(self.live.is_some())
    }
}

/// Every input is its own item.
#[derive(Debug)]
pub struct Itself;

impl<X: Clone + 'static> Expand<Vec<X>> for Itself {
    type Inputs = List<X, ()>;
    type Gathered = Vec<X>;
    type Block = Vec<X>;

    fn load(&mut self, block: Vec<X>) -> Result<List<X, ()>, BoxError> {
        Ok(List::of(block))
    }

    fn left(&self, inputs: &List<X, ()>) -> u64 {
        inputs.left()
    }

    fn fill(&mut self, list: &mut List<X, ()>, room: usize, items: &mut Vec<X>) -> (usize, Result<(), Fault>) {
        let before = items.len();
        items.extend(list.inputs.by_ref().take(room));
        (items.len() - before, Ok(()))
    }

    fn seal(&mut self, items: Vec<X>, give: &mut dyn FnMut(Vec<X>)) -> Result<(), BoxError> {
        give(items);
        Ok(())
    }
}

/// An iterator per input. A panic in it is the operator's.
pub(crate) struct Each<F>(pub(crate) F);

impl<X, F, L> Expand<Vec<X>> for Each<F>
where
    X: 'static,
    F: FnMut(X) -> L,
    L: Iterator + 'static,
    L::Item: Clone + 'static,
{
    type Inputs = List<X, L>;
    type Gathered = Vec<L::Item>;
    type Block = Vec<L::Item>;

    fn load(&mut self, block: Vec<X>) -> Result<List<X, L>, BoxError> {
        Ok(List::of(block))
    }

    fn left(&self, inputs: &List<X, L>) -> u64 {
        inputs.left()
    }

    fn fill(&mut self, list: &mut List<X, L>, room: usize, items: &mut Vec<L::Item>) -> (usize, Result<(), Fault>) {
        let before = items.len();
        let goal = before + room;
        while items.len() < goal {
            let Some(current) = &mut list.live else {
                let Some(input) = list.inputs.next() else { break };
                list.live = Some((self.0)(input));
                continue;
            };
            items.extend(current.take(goal - items.len()));
            // Full: there may be more, unless the iterator knows that there is not.
            if items.len() < goal || current.size_hint().1 == Some(0) {
                list.live = None;
            }
        }
        (items.len() - before, Ok(()))
    }

    fn seal(&mut self, items: Vec<L::Item>, give: &mut dyn FnMut(Vec<L::Item>)) -> Result<(), BoxError> {
        give(items);
        Ok(())
    }
}

/// As [`Each`] where an item may be an error; remembers the input to name it. A panic in the iterator is a failure as well.
pub(crate) struct EachOr<F>(pub(crate) F);

/// An input that has begun: what it was, how much it gave, and the rest.
#[doc(hidden)]
pub struct Begun<X, L> {
    input: X,
    drawn: u64,
    rest: L,
}

impl<X, F, L, Y, E> Expand<Vec<X>> for EachOr<F>
where
    X: Clone + Debug + 'static,
    F: FnMut(X) -> L,
    L: Iterator<Item = Result<Y, E>> + 'static,
    Y: Clone + 'static,
    E: Into<BoxError>,
{
    type Inputs = List<X, Begun<X, L>>;
    type Gathered = Vec<Y>;
    type Block = Vec<Y>;

    fn load(&mut self, block: Vec<X>) -> Result<Self::Inputs, BoxError> {
        Ok(List::of(block))
    }

    fn left(&self, inputs: &Self::Inputs) -> u64 {
        inputs.left()
    }

    fn fill(&mut self, list: &mut Self::Inputs, room: usize, items: &mut Vec<Y>) -> (usize, Result<(), Fault>) {
        let before = items.len();
        let outcome = self.until(list, before + room, items);
        (items.len() - before, outcome.map_err(Fault::Input))
    }

    fn seal(&mut self, items: Vec<Y>, give: &mut dyn FnMut(Vec<Y>)) -> Result<(), BoxError> {
        give(items);
        Ok(())
    }
}

impl<F> EachOr<F> {
    fn until<X, L, Y, E>(
        &mut self,
        list: &mut List<X, Begun<X, L>>,
        goal: usize,
        items: &mut Vec<Y>,
    ) -> Result<(), Broken>
    where
        X: Clone + Debug,
        F: FnMut(X) -> L,
        L: Iterator<Item = Result<Y, E>>,
        E: Into<BoxError>,
    {
        while items.len() < goal {
            let Some(current) = &mut list.live else {
                let Some(input) = list.inputs.next() else { break };
                let kept = input.clone();
                match catch_unwind(AssertUnwindSafe(|| (self.0)(input))) {
                    Ok(rest) => list.live = Some(Begun { input: kept, drawn: 0, rest }),
                    Err(panic) => {
                        return Err(Broken { input: format!("{kept:?}"), drawn: 0, cause: message(&*panic) });
                    }
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
                    list.live = None;
                    continue;
                }
                Ok(Err(cause)) => cause,
                Err(panic) => message(&*panic),
            };
            let broken = Broken { input: format!("{:?}", current.input), drawn: current.drawn, cause };
            list.live = None;
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

    fn broken(outcome: (usize, Result<(), Fault>)) -> (String, u64, String) {
        match outcome.1 {
            Err(Fault::Input(broken)) => (broken.input, broken.drawn, broken.cause),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn nothing_is_drawn_ahead() {
        let drawn = Rc::new(Cell::new(0));
        let count = drawn.clone();
        let mut expand = Each(move |input: u64| {
            let count = count.clone();
            (0..input).inspect(move |_| count.set(count.get() + 1))
        });
        let mut list = expand.load(vec![3u64, 0, 4, 1_000_000_000_000]).unwrap();
        let mut items = Vec::new();
        for (room, total) in [(2, 2), (3, 5), (5, 10)] {
            assert_eq!(expand.fill(&mut list, room, &mut items).0, room);
            assert_eq!((items.len(), drawn.get()), (total, total));
        }
        assert_eq!(items, [0, 1, 2, 0, 1, 2, 3, 0, 1, 2]);
        assert_eq!(expand.left(&list), 1);
    }

    #[test]
    fn an_end_that_the_iterator_knows_is_seen_at_once() {
        let mut expand = Each(|input: u64| 0..input);
        let mut list = expand.load(vec![2u64]).unwrap();
        assert_eq!(expand.fill(&mut list, 2, &mut Vec::new()).0, 2);
        assert_eq!(expand.left(&list), 0);
    }

    #[test]
    fn a_failure_names_its_input_and_the_next_one_goes_on() {
        let expand = |input: u64| (0..input).map(move |at| if (input, at) == (3, 2) { Err("two") } else { Ok(at) });
        let mut expand = EachOr(expand);
        let (mut list, mut items) = (expand.load(vec![1u64, 3, 2]).unwrap(), Vec::new());
        let first = broken(expand.fill(&mut list, 10, &mut items));
        assert_eq!((first, expand.left(&list)), (("3".to_string(), 2, "two".to_string()), 1));
        assert!(expand.fill(&mut list, 10, &mut items).1.is_ok());
        assert_eq!(items, [0, 0, 1, 0, 1]);
    }

    #[test]
    fn a_panic_is_a_failure_too() {
        let expand = |input: u64| {
            assert!(input != 7, "seven is refused");
            std::iter::from_fn(move || -> Option<Result<u64, String>> { panic!("no item of {input}") })
        };
        let mut expand = EachOr(expand);
        let (mut list, mut items) = (expand.load(vec![7u64, 8]).unwrap(), Vec::<u64>::new());
        let first = broken(expand.fill(&mut list, 1, &mut items));
        let second = broken(expand.fill(&mut list, 1, &mut items));
        assert_eq!(first, ("7".to_string(), 0, "seven is refused".to_string()));
        assert_eq!(second, ("8".to_string(), 0, "no item of 8".to_string()));
        assert_eq!(expand.left(&list), 0);
    }
}
