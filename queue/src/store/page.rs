//! Pages of lists.

/// A page of a list, the newest first unless `ascending`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Page<Id> {
    /// The last item of the previous page.
    pub after: Option<Id>,
    /// Maximum number of items on the page.
    pub limit: u32,
    /// Whether the order is oldest first.
    pub ascending: bool,
}
