//! Sets of slots for states of recurrent layers: one for each engine that shares a backend.

use std::{
    collections::BTreeMap,
    mem,
    ops::{Deref, DerefMut},
};

/// The slots of several engines, of which those of one are in use: this dereferences to them.
pub struct SetsOf<T> {
    in_use: T,
    /// The number of the set in use; `None` if it was dropped.
    number: Option<u32>,
    others: BTreeMap<u32, T>,
    /// The number of the next set.
    next: u32,
}

impl<T> SetsOf<T> {
    /// Returns one set, number 0, in use.
    pub fn new(first: T) -> Self {
        Self { in_use: first, number: Some(0), others: BTreeMap::new(), next: 1 }
    }

    /// Adds a set and returns its number.
    pub fn add(&mut self, set: T) -> u32 {
        let number = self.next;
        self.next += 1;
        self.others.insert(number, set);
        number
    }

    /// Uses a set from now on.
    ///
    /// # Panics
    /// If it was dropped, or never added.
    pub fn select(&mut self, number: u32) {
        if self.number == Some(number) {
            return;
        }
        let next = self.others.remove(&number).expect("the set of an engine that exists");
        let before = mem::replace(&mut self.in_use, next);
        if let Some(before_number) = self.number.replace(number) {
            self.others.insert(before_number, before);
        }
    }

    /// Frees a set; the one in use when another one is used.
    pub fn remove(&mut self, number: u32) {
        match self.number == Some(number) {
            true => self.number = None,
            false => drop(self.others.remove(&number)),
        }
    }
}

impl<T> Deref for SetsOf<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.in_use
    }
}

impl<T> DerefMut for SetsOf<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.in_use
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_keep_their_slots_and_are_freed() {
        let mut sets = SetsOf::new(vec![1]);
        let second = sets.add(vec![2]);
        assert_eq!((second, &*sets), (1, &vec![1]));
        sets.select(second);
        sets.push(3);
        sets.select(0);
        assert_eq!(*sets, [1]);
        sets.remove(0);
        sets.select(second);
        assert_eq!((&*sets, sets.others.len()), (&vec![2, 3], 0), "the first one is freed");
        let third = sets.add(vec![4]);
        sets.remove(third);
        assert!(sets.others.is_empty() && sets.add(vec![]) > third);
    }
}
