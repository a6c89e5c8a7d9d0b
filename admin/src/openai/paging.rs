//! Lists in pages: `limit`, `after`, `order`.

use std::str::FromStr;

use axum::extract::rejection::QueryRejection;
use serde::Deserialize;
use serde_json::{Value, json};
use tritmill_queue::store::Page;
use utoipa::IntoParams;

use crate::error::ApiError;

/// What a caller asks of a list.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Query {
    /// Items at most.
    #[param(value_type = Option<u32>)]
    limit: Option<String>,
    /// The item before the first.
    after: Option<String>,
    /// `desc` or `asc`.
    order: Option<String>,
    /// Of files alone.
    pub(super) purpose: Option<String>,
}

/// What a caller asks, or which parameter cannot be understood.
pub(super) fn read(
    query: Result<axum::extract::Query<Query>, QueryRejection>,
) -> Result<Query, ApiError> {
    query
        .map(|query| query.0)
        .map_err(|rejection| ApiError::invalid("invalid_query", rejection.body_text()))
}

impl Query {
    /// The page, with one item more than asked for: whether there is more.
    pub(super) fn page<Id: FromStr>(&self, default: u32, most: u32) -> Result<Page<Id>, ApiError> {
        let limit = match self.limit.as_deref().map(str::parse::<u32>) {
            None => default,
            Some(Ok(limit)) if (1..=most).contains(&limit) => limit,
            Some(_) => {
                let message = format!("limit must be between 1 and {most}");
                return Err(ApiError::invalid("invalid_value", message).at("limit"));
            }
        };
        let after = match self.after.as_deref() {
            None | Some("") => None,
            Some(text) => Some(text.parse().map_err(|_| {
                ApiError::invalid("invalid_value", "after must be the id of an item").at("after")
            })?),
        };
        let ascending = match self.order.as_deref() {
            None | Some("desc") => false,
            Some("asc") => true,
            Some(_) => {
                let message = "order must be 'asc' or 'desc'";
                return Err(ApiError::invalid("invalid_value", message).at("order"));
            }
        };
        Ok(Page { after, limit: limit + 1, ascending })
    }
}

/// A page of items, of which there is one too many if there are more.
pub(super) fn list<Id>(page: &Page<Id>, mut items: Vec<Value>) -> Value {
    let limit = page.limit as usize - 1;
    let has_more = items.len() > limit;
    items.truncate(limit);
    let id = |item: Option<&Value>| item.map(|item| item["id"].clone());
    let (first_id, last_id) = (id(items.first()), id(items.last()));
    json!({
        "object": "list",
        "data": items,
        "first_id": first_id,
        "last_id": last_id,
        "has_more": has_more,
    })
}

#[cfg(test)]
mod tests {
    use tritmill_queue::store::FileId;

    use super::*;

    #[test]
    fn a_page_is_within_bounds_and_says_whether_there_is_more() {
        let query = |limit: &str| Query { limit: Some(limit.to_owned()), ..Query::default() };
        for wrong in ["0", "101", "-1", "x", "1e3"] {
            assert!(query(wrong).page::<FileId>(20, 100).is_err(), "{wrong}");
        }
        let page = query("2").page::<FileId>(20, 100).expect("a page");
        let items = |count: usize| (0..count).map(|id| json!({ "id": id })).collect();
        let three = list(&page, items(3));
        assert_eq!((&three["has_more"], &three["last_id"]), (&json!(true), &json!(1)));
        let none = list(&page, items(0));
        assert_eq!((&none["has_more"], &none["last_id"]), (&json!(false), &Value::Null));
    }
}
