//! Lists in pages: `limit`, `after`, `order`.

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tritmill_queue::store::Page;
use utoipa::{IntoParams, ToSchema};

use crate::ApiError;

/// Parameters of a list.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ListQuery {
    /// Most items to return.
    #[param(value_type = Option<u32>)]
    limit: Option<String>,
    /// Id of the last item of the previous page.
    after: Option<String>,
    /// Order by time: `desc` (the default) or `asc`.
    order: Option<String>,
}

/// Parameters of a list of files.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct FileListQuery {
    /// Most items to return.
    #[param(value_type = Option<u32>)]
    limit: Option<String>,
    /// Id of the last item of the previous page.
    after: Option<String>,
    /// Order by time: `desc` (the default) or `asc`.
    order: Option<String>,
    /// `batch` or `batch_output`.
    purpose: Option<String>,
}

impl FileListQuery {
    /// Returns the parameters of every list, and the purpose.
    pub(super) fn split(self) -> (ListQuery, Option<String>) {
        let Self { limit, after, order, purpose } = self;
        (ListQuery { limit, after, order }, purpose)
    }
}

impl ListQuery {
    /// Returns the page to read: one item more than requested, which tells whether there are more.
    pub(super) fn page<Id: FromStr>(&self, default: u32, max: u32) -> Result<Page<Id>, ApiError> {
        let limit = match self.limit.as_deref().map(str::parse::<u32>) {
            None => default,
            Some(Ok(limit)) if (1..=max).contains(&limit) => limit,
            Some(_) => {
                let message = format!("limit must be between 1 and {max}");
                return Err(ApiError::invalid_value("limit", message));
            }
        };
        let after = match self.after.as_deref() {
            None | Some("") => None,
            Some(text) => Some(text.parse().map_err(|_| {
                ApiError::invalid_value("after", "after must be the id of an item")
            })?),
        };
        let ascending = match self.order.as_deref() {
            None | Some("desc") => false,
            Some("asc") => true,
            Some(_) => {
                return Err(ApiError::invalid_value("order", "order must be 'asc' or 'desc'"));
            }
        };
        Ok(Page { after, limit: limit + 1, ascending })
    }
}

/// A page of items.
#[derive(Serialize, ToSchema)]
pub(crate) struct List<T> {
    /// `list`
    object: &'static str,
    data: Vec<T>,
    first_id: Option<String>,
    last_id: Option<String>,
    has_more: bool,
}

impl<T> List<T> {
    /// Builds the response from the items of [`ListQuery::page`]; `id` returns an item's id.
    pub(super) fn new<Id>(page: &Page<Id>, mut data: Vec<T>, id: impl Fn(&T) -> &String) -> Self {
        let limit = page.limit as usize - 1;
        let has_more = data.len() > limit;
        data.truncate(limit);
        let (first_id, last_id) = (data.first().map(&id).cloned(), data.last().map(&id).cloned());
        Self { object: "list", data, first_id, last_id, has_more }
    }
}

#[cfg(test)]
mod tests {
    use crate::store::FileId;

    use super::*;

    #[test]
    fn page_is_bounded_and_tells_whether_there_are_more() {
        let query = |limit: &str| ListQuery { limit: Some(limit.to_owned()), ..Default::default() };
        for wrong in ["0", "101", "-1", "x", "1e3"] {
            assert!(query(wrong).page::<FileId>(20, 100).is_err(), "{wrong}");
        }
        let page = query("2").page::<FileId>(20, 100).expect("a page");
        let items = |count: usize| (0..count).map(|id| id.to_string()).collect();
        let three = List::new(&page, items(3), |id: &String| id);
        assert_eq!((three.has_more, three.last_id.as_deref()), (true, Some("1")));
        let none = List::new(&page, items(0), |id: &String| id);
        assert_eq!((none.has_more, none.last_id), (false, None));
    }
}
