//! [`TimeLimit`]: how long the caller of a completion waits, from the header `x-request-timeout`.

use std::time::Duration;

use axum::{
    extract::FromRequestParts,
    http::{HeaderValue, request::Parts},
};

use crate::{ApiError, App};

/// Name of the header: seconds, as a decimal number.
const HEADER: &str = "x-request-timeout";
/// Shortest time limit, in seconds.
const SHORTEST: f64 = 0.001;

/// The time limit of a completion: the service's, or the caller's if that is shorter.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TimeLimit(pub Duration);

impl FromRequestParts<App> for TimeLimit {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, ApiError> {
        let longest = app.limits.answer_within;
        match parts.headers.get(HEADER) {
            Some(value) => Ok(Self(parse(value, longest)?)),
            None => Ok(Self(longest)),
        }
    }
}

fn parse(value: &HeaderValue, longest: Duration) -> Result<Duration, ApiError> {
    let seconds: Option<f64> = value.to_str().ok().and_then(|text| text.trim().parse().ok());
    let Some(seconds) = seconds.filter(|seconds| *seconds >= SHORTEST) else {
        let message = format!("{HEADER} must be a number of seconds, at least {SHORTEST}");
        return Err(ApiError::invalid_value(HEADER, message));
    };
    Ok(Duration::try_from_secs_f64(seconds).unwrap_or(longest).min(longest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_shortens_the_time_limit() {
        let longest = Duration::from_secs(600);
        let limit = |text: &str| parse(&HeaderValue::from_str(text).expect("a value"), longest);
        assert_eq!(limit(" 2.5"), Ok(Duration::from_millis(2500)));
        for long in ["600.1", "1e300", "inf"] {
            assert_eq!(limit(long), Ok(longest), "{long}");
        }
        for wrong in ["", "0", "-1", "NaN", "5s"] {
            assert_eq!(limit(wrong).expect_err(wrong).param(), Some(HEADER), "{wrong}");
        }
    }
}
