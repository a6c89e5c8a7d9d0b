//! Links to other pages of a list: `pager.html`, which the templates of lists include.

/// The links of a page.
pub(super) struct Pager {
    /// What the list has, in the plural.
    pub what: &'static str,
    pub first_name: &'static str,
    pub next_name: &'static str,
    /// URL of the first page; `None` on it.
    pub first: Option<String>,
    /// URL of the next page; `None` on the last.
    pub next: Option<String>,
}

impl Pager {
    /// Links of a list with the latest items first.
    pub fn latest_first(what: &'static str, first: Option<String>, next: Option<String>) -> Self {
        Self { what, first_name: "Latest", next_name: "Older", first, next }
    }

    /// Whether this is the first page.
    pub fn is_first(&self) -> bool {
        self.first.is_none()
    }
}
