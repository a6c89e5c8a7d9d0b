//! A buffer that the tasks of one parallel region write in parts.

use std::{marker::PhantomData, ops::Range};

use crate::kernels::float::{Columns, Stored};

/// A mutable slice that may be handed out in disjoint parts to several threads.
#[derive(Clone, Copy)]
pub struct Disjoint<'a, T> {
    data: *mut T,
    len: usize,
    buffer: PhantomData<&'a mut [T]>,
}

// SAFETY: it is a `&mut [T]` whose parts go to different threads; `T: Send` is what that takes.
unsafe impl<T: Send> Send for Disjoint<'_, T> {}
// SAFETY: as for `Send`: shared access gives out disjoint `&mut` parts only.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    /// Borrows `buffer` for a parallel region.
    pub fn new(buffer: &'a mut [T]) -> Self {
        Self { data: buffer.as_mut_ptr(), len: buffer.len(), buffer: PhantomData }
    }

    /// The part `range`. Panics when it is outside the buffer.
    ///
    /// # Safety
    /// While the returned slice lives, no other part that overlaps it may be taken.
    #[expect(clippy::mut_from_ref, reason = "the point of the type; see Safety")]
    pub unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: in bounds by the assertion; not aliased by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(range.start), range.len()) }
    }

    /// All of it, to read what nobody writes meanwhile.
    ///
    /// # Safety
    /// No part that is written while the returned value lives is read by way of it.
    pub unsafe fn stored(&self) -> Stored<'a, T> {
        // SAFETY: the buffer is borrowed for 'a; the rest is the caller's promise.
        unsafe { Stored::shared(self.data, self.len) }
    }
}

impl<'a> Disjoint<'a, f32> {
    /// Columns of every row of `width`. Panics when they are outside the rows.
    ///
    /// # Safety
    /// While they live, no part that overlaps them may be taken.
    pub unsafe fn columns(&self, width: usize, columns: Range<usize>) -> Columns<'a> {
        // SAFETY: the buffer is borrowed for 'a; not aliased by the caller's promise.
        unsafe { Columns::shared(self.data, self.len, width, columns) }
    }
}
