//! Conditions on batches in lists: of a tenant, of operators and of the dashboard.

use serde_json::{Map, Value};
use tritmill_queue::{Tenant, Timestamp};

use crate::{
    ApiError,
    store::{
        BatchState,
        batches::{BatchFilter, BatchSearch},
    },
};

/// Longest text of a condition.
const TEXT_BYTES_MAX: usize = 512;

/// Conditions as they are written in URLs; an empty one is not set.
#[derive(Debug, Clone, Default)]
pub(crate) struct BatchConditions<'a> {
    pub tenant: Option<Tenant>,
    /// The name of the parameter of the state, and its value.
    pub state: (&'static str, Option<&'a str>),
    pub metadata: Vec<(String, String)>,
    pub model: Option<&'a str>,
    pub search: Option<&'a str>,
    pub archived: Option<&'a str>,
    pub from_ms: Option<&'a str>,
    pub to_ms: Option<&'a str>,
}

impl BatchConditions<'_> {
    /// Parses the conditions. Without `archived`, archived batches are left out.
    ///
    /// # Errors
    /// Names the first invalid parameter.
    pub fn filter(self) -> Result<BatchFilter, ApiError> {
        let (param, state) = self.state;
        let state = match set(state).map(str::parse::<BatchState>) {
            None => None,
            Some(Ok(state)) => Some(state),
            Some(Err(_)) => return Err(invalid(param, "the state of a batch, as 'in_progress'")),
        };
        let archived = match set(self.archived) {
            None | Some("false") => false,
            Some("true") => true,
            Some(_) => return Err(invalid("archived", "'true' or 'false'")),
        };
        let search = BatchSearch {
            metadata: self.metadata,
            model: text("model", self.model)?,
            endpoint: None,
            text: text("search", self.search)?,
        };
        let created = (ms("from_ms", self.from_ms)?, ms("to_ms", self.to_ms)?);
        Ok(BatchFilter { tenant: self.tenant, state, archived: Some(archived), created, search })
    }
}

fn invalid(param: &str, expected: &str) -> ApiError {
    ApiError::invalid_value(param, format!("{param} must be {expected}"))
}

fn set(text: Option<&str>) -> Option<&str> {
    text.map(str::trim).filter(|text| !text.is_empty())
}

fn text(param: &str, given: Option<&str>) -> Result<Option<String>, ApiError> {
    match set(given) {
        Some(text) if text.contains('\0') || text.len() > TEXT_BYTES_MAX => {
            let expected = format!("at most {TEXT_BYTES_MAX} bytes without NUL characters");
            Err(invalid(param, &expected))
        }
        text => Ok(text.map(str::to_owned)),
    }
}

fn ms(param: &str, given: Option<&str>) -> Result<Option<Timestamp>, ApiError> {
    let number = set(given).map(str::parse).transpose();
    let number = number.map_err(|_| invalid(param, "milliseconds since 1970"))?;
    Ok(number.map(Timestamp))
}

/// Names and values, as in the query of a URL.
type Pairs = Vec<(String, String)>;

/// Splits the parameters of a URL into pairs of metadata, `metadata[NAME]=VALUE`, and the others.
///
/// # Errors
/// Names a parameter that is repeated, or a pair with a NUL character.
pub(crate) fn split(params: Pairs) -> Result<(Pairs, Map<String, Value>), ApiError> {
    let (mut metadata, mut others) = (Vec::new(), Map::new());
    for (param, value) in params {
        let name = param.strip_prefix("metadata[").and_then(|name| name.strip_suffix(']'));
        match name {
            Some(name) if name.is_empty() || name.contains('\0') || value.contains('\0') => {
                return Err(invalid(
                    "metadata",
                    "pairs, metadata[NAME]=VALUE, without NUL characters",
                ));
            }
            Some(name) => metadata.push((name.to_owned(), value)),
            None if others.contains_key(&param) => {
                return Err(ApiError::invalid_value(&*param, format!("{param} is repeated")));
            }
            None => {
                others.insert(param, Value::String(value));
            }
        }
    }
    Ok((metadata, others))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_of_metadata_are_split_from_other_parameters() {
        let params = |pairs: &[(&str, &str)]| {
            split(pairs.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect())
        };
        let (metadata, others) =
            params(&[("metadata[run]", "7"), ("limit", "2"), ("metadata[a]b]", "x=y")])
                .expect("pairs");
        assert_eq!(metadata, [("run".into(), "7".into()), ("a]b".into(), "x=y".into())]);
        assert_eq!(others, Map::from_iter([("limit".into(), "2".into())]));
        for (wrong, param) in [
            (vec![("metadata[]", "7")], "metadata"),
            (vec![("metadata[a]", "\0")], "metadata"),
            (vec![("limit", "1"), ("limit", "2")], "limit"),
        ] {
            assert_eq!(params(&wrong).expect_err("it is wrong").param(), Some(param));
        }
    }

    #[test]
    fn wrong_conditions_are_named() {
        let check = |conditions: BatchConditions<'_>, param: &str| {
            assert_eq!(conditions.filter().expect_err("it is wrong").param(), Some(param));
        };
        let none = BatchConditions::default;
        check(BatchConditions { state: ("status", Some("done")), ..none() }, "status");
        check(BatchConditions { archived: Some("1"), ..none() }, "archived");
        check(BatchConditions { from_ms: Some("today"), ..none() }, "from_ms");
        check(BatchConditions { search: Some(&"x".repeat(513)), ..none() }, "search");
        let all = BatchConditions { model: Some(" "), to_ms: Some("7"), ..none() };
        let filter = all.filter().expect("conditions");
        assert_eq!((filter.search, filter.created.1), (BatchSearch::default(), Some(Timestamp(7))));
        assert_eq!(filter.archived, Some(false));
    }
}
