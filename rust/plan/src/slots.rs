//! A set of positions that remembers insertion order and empties in the time of its size.

/// See the module.
#[derive(Clone, Debug, Default)]
pub(crate) struct Slots {
    bits: Vec<u64>,
    list: Vec<u32>,
}

impl Slots {
    /// Whether `slot` was not yet in the set.
    #[inline]
    pub(crate) fn insert(&mut self, slot: u32) -> bool {
        let (word, bit) = (slot as usize / 64, 1u64 << (slot % 64));
        if word >= self.bits.len() {
            self.bits.resize(word + 1, 0);
        }
        let fresh = self.bits[word] & bit == 0;
        if fresh {
            self.bits[word] |= bit;
            self.list.push(slot);
        }
        fresh
    }

    /// Takes a slot out again. Cost: the size of the set, where it is in it.
    pub(crate) fn remove(&mut self, slot: u32) {
        if self.contains(slot) {
            self.bits[slot as usize / 64] &= !(1 << (slot % 64));
            self.list.retain(|member| *member != slot);
        }
    }

    #[inline]
    pub(crate) fn contains(&self, slot: u32) -> bool {
        self.bits.get(slot as usize / 64).is_some_and(|word| word >> (slot % 64) & 1 == 1)
    }

    /// The members in the order in which they came.
    pub(crate) fn list(&self) -> &[u32] {
        &self.list
    }

    pub(crate) fn clear(&mut self) {
        for &slot in &self.list {
            self.bits[slot as usize / 64] = 0;
        }
        self.list.clear();
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.bits.capacity() * 8 + self.list.capacity() * 4
    }
}
