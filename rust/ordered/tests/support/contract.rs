// What loom.rs and shuttle.rs include, each over its own `Mutex`: the queue as its contract says it is, first in, first out, behind
// a lock; and the padding, as cache lines are nothing that models know.

use std::collections::VecDeque;
use std::ops::Deref;

#[derive(Debug)]
pub struct Queue<T>(Mutex<VecDeque<T>>);

impl<T> Queue<T> {
    pub fn new() -> Self {
        Self(Mutex::new(VecDeque::new()))
    }
    pub fn push(&self, item: T) {
        self.0.lock().unwrap().push_back(item);
    }
    pub fn pop(&self) -> Option<T> {
        self.0.lock().unwrap().pop_front()
    }
    pub fn is_empty(&self) -> bool {
        self.0.lock().unwrap().is_empty()
    }
}

#[derive(Debug)]
pub struct Padded<T>(T);

impl<T> Padded<T> {
    pub fn new(value: T) -> Self {
        Self(value)
    }
}

impl<T> Deref for Padded<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}
