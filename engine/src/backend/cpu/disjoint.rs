//! A buffer that the tasks of a parallel region write in disjoint parts.

use std::{marker::PhantomData, ops::Range};

use crate::kernels::float::{Columns, Stored};

/// A mutable slice that may be handed out in disjoint parts to several threads.
#[derive(Clone, Copy)]
pub struct Disjoint<'a, T> {
    data: *mut T,
    len: usize,
    buffer: PhantomData<&'a mut [T]>,
}

// SAFETY: it represents a `&mut [T]` with parts on different threads, which requires `T: Send`.
unsafe impl<T: Send> Send for Disjoint<'_, T> {}
// SAFETY: as for `Send`: shared access gives out disjoint `&mut` parts only.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    /// Borrows `buffer` for a parallel region.
    pub fn new(buffer: &'a mut [T]) -> Self {
        Self { data: buffer.as_mut_ptr(), len: buffer.len(), buffer: PhantomData }
    }

    /// Returns the part `range`. Panics when it is outside the buffer.
    ///
    /// # Safety
    /// While the returned slice lives, no overlapping part may be taken.
    #[expect(clippy::mut_from_ref, reason = "the point of the type; see Safety")]
    pub unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: in bounds by the assertion; the caller guarantees that the part is not aliased.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(range.start), range.len()) }
    }

    /// Returns the part `range` for reading. Panics when it is outside the buffer.
    ///
    /// # Safety
    /// While the returned slice lives, no overlapping part may be taken for writing.
    pub unsafe fn read(&self, range: Range<usize>) -> &[T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: in bounds by the assertion; the caller guarantees that nothing writes the part.
        unsafe { std::slice::from_raw_parts(self.data.add(range.start), range.len()) }
    }

    /// Returns the buffer without its first elements. Panics when it has fewer.
    pub fn after(&self, start: usize) -> Self {
        assert!(start <= self.len);
        // SAFETY: in bounds by the assertion.
        Self { data: unsafe { self.data.add(start) }, len: self.len - start, ..*self }
    }

    /// Returns a part of the buffer, which may be handed out in disjoint parts. Panics when it is outside the buffer.
    pub fn within(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len);
        Self { len: range.len(), ..self.after(range.start) }
    }

    /// Returns the whole buffer for reading.
    ///
    /// # Safety
    /// No part that is read through the returned value is written while that value exists.
    pub unsafe fn stored(&self) -> Stored<'a, T> {
        // SAFETY: the buffer is borrowed for 'a; the rest is guaranteed by the caller.
        unsafe { Stored::shared(self.data, self.len) }
    }
}

impl<'a> Disjoint<'a, u8> {
    /// Returns the buffer as elements of another type, as many as are whole. Panics when it is not aligned for them.
    pub fn of_type<T: bytemuck::Pod>(&self) -> Disjoint<'a, T> {
        let data = self.data.cast::<T>();
        assert!(data.is_aligned());
        Disjoint { data, len: self.len / size_of::<T>(), buffer: PhantomData }
    }
}

impl<'a> Disjoint<'a, f32> {
    /// Returns `columns` of every row of `width` elements. Panics when they are outside the rows.
    ///
    /// # Safety
    /// While the returned value lives, no overlapping part may be taken.
    pub unsafe fn columns(&self, width: usize, columns: Range<usize>) -> Columns<'a> {
        // SAFETY: the buffer is borrowed for 'a; the caller guarantees that the columns are not
        // aliased.
        unsafe { Columns::shared(self.data, self.len, width, columns) }
    }
}
