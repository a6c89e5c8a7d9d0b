//! `/v1/batches/{id}/results`: the lines of a batch that ended, while it runs and after.
//!
//! A page has its cursor in headers, and each line has its own. With `follow` the response goes on as lines end, as NDJSON or as
//! server-sent events, until the batch has ended; a response that ends earlier breaks off, so that a reader knows.

use std::{convert::Infallible, time::Duration};

use axum::{
    body::Body,
    extract::Path,
    http::{HeaderMap, HeaderName, HeaderValue, header},
    response::{IntoResponse as _, Response, sse::Event},
};
use bytes::Bytes;
use futures_util::{Stream, StreamExt as _, stream};
use serde::Deserialize;
use serde_json::json;
use tokio::{
    sync::OwnedSemaphorePermit,
    time::{Instant, sleep},
};
use tritmill_client::json_line;
use tritmill_queue::{JobState, StoreError, Tenant};

use super::find;
use crate::{
    ApiError, App, Call, QueryParams,
    results::{self, Cursor, ResultFilter, ResultPage},
    sse,
    store::{Batch, BatchId, BatchState, batch_ends::EndOrder},
};

/// Lines of a page by default, and at most.
const LINES_DEFAULT: usize = 1000;
const LINES_MAX: usize = 10_000;
/// Longest text to search.
const SEARCH_BYTES_MAX: usize = 512;
/// Longest time that a response follows a batch; reconnecting checks the key again.
const OPEN_MAX: Duration = Duration::from_secs(3600);
/// Pause between two reads while no line ends, and what each open stream adds to it.
const POLL: Duration = Duration::from_millis(300);
const POLL_EACH: Duration = Duration::from_micros(500);
/// Pause after which an empty line says that the connection is alive.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

const NDJSON: HeaderValue = HeaderValue::from_static("application/x-ndjson");
const INCOMPLETE: HeaderName = HeaderName::from_static("x-incomplete");
const NEXT_AFTER: HeaderName = HeaderName::from_static("x-next-after");
const HAS_MORE: HeaderName = HeaderName::from_static("x-has-more");

/// Which results to return.
#[derive(Debug, Default, Deserialize, utoipa::IntoParams)]
#[serde(default, deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ResultsQuery {
    /// A cursor: `X-Next-After` of the page before, or `cursor` of a line. The results behind it are returned.
    #[param(nullable = false)]
    after: Option<String>,
    /// Most lines to return; with `follow` it has no effect.
    #[param(nullable = false, value_type = Option<u64>, minimum = 1, maximum = 10_000)]
    limit: Option<String>,
    /// `succeeded`, `failed`, `expired` or `cancelled`, or several of them with commas between.
    #[param(nullable = false)]
    status: Option<String>,
    /// A text that occurs in the `custom_id`, the answer or the error, whatever the case of its letters.
    #[param(nullable = false)]
    search: Option<String>,
    /// `completion` (the default): as they ended. `lines`: as in the input; a line waits for those before it.
    #[param(nullable = false)]
    order: Option<String>,
    /// Whether the response goes on until the batch has ended.
    #[param(nullable = false, value_type = Option<bool>)]
    follow: Option<String>,
}

/// What a request asks for.
struct Asked {
    filter: ResultFilter,
    after: u64,
    limit: usize,
    is_followed: bool,
}

impl ResultsQuery {
    fn parse(self, batch: BatchId, headers: &HeaderMap) -> Result<Asked, ApiError> {
        let invalid = |param: &str, message: &str| {
            Err(ApiError::invalid_value(param, format!("{param} must be {message}")))
        };
        let order = match self.order.as_deref() {
            None | Some("completion") => EndOrder::Completion,
            Some("lines") => EndOrder::Lines,
            Some(_) => return invalid("order", "'completion' or 'lines'"),
        };
        let limit = match self.limit.as_deref().map(str::parse::<usize>) {
            None => LINES_DEFAULT,
            Some(Ok(limit)) if (1..=LINES_MAX).contains(&limit) => limit,
            Some(_) => return invalid("limit", &format!("between 1 and {LINES_MAX}")),
        };
        let is_followed = match self.follow.as_deref() {
            None | Some("false") => false,
            Some("true") => true,
            Some(_) => return invalid("follow", "'true' or 'false'"),
        };
        let search = self.search.filter(|text| !text.is_empty());
        if search.as_ref().is_some_and(|text| text.len() > SEARCH_BYTES_MAX) {
            return invalid("search", &format!("at most {SEARCH_BYTES_MAX} bytes"));
        }
        let words = self.status.as_deref().filter(|words| !words.is_empty());
        let states: Option<Vec<JobState>> =
            words.into_iter().flat_map(|words| words.split(',')).map(state_of).collect();
        let Some(states) = states else {
            let words = "'succeeded', 'failed', 'expired', 'cancelled' or several of them";
            return invalid("status", words);
        };
        // What an event stream continues after, when its reader connects again.
        let last = headers.get("last-event-id").and_then(|id| id.to_str().ok());
        let (param, after) = match (last, self.after.as_deref()) {
            (Some(id), _) => ("Last-Event-ID", Some(id)),
            (None, after) => ("after", after.filter(|text| !text.is_empty())),
        };
        let after = match after.map(str::parse::<Cursor>) {
            None => 0,
            Some(Err(_)) => return invalid(param, "a cursor of this batch"),
            Some(Ok(cursor)) if cursor.batch != batch => {
                return invalid(param, "a cursor of this batch, not of another one");
            }
            Some(Ok(cursor)) if cursor.order != order => {
                return invalid(param, "a cursor of the same order");
            }
            Some(Ok(cursor)) => cursor.position,
        };
        Ok(Asked { filter: ResultFilter { order, states, search }, after, limit, is_followed })
    }
}

/// Returns the state with a status.
fn state_of(status: &str) -> Option<JobState> {
    match status {
        "succeeded" => Some(JobState::Completed),
        "failed" => Some(JobState::Failed),
        "expired" => Some(JobState::Expired),
        "cancelled" => Some(JobState::Cancelled),
        _ => None,
    }
}

/// Returns the results of a batch, also while it runs: one line of JSON each, as in its files, with `cursor` as one more field.
///
/// The header `X-Incomplete: true` says that more lines may end; `X-Next-After` is the cursor of the next page, and
/// `X-Has-More: true` says that it has lines now. A page with `search` may be empty although there are more. With `follow` the
/// response goes on until the batch has ended: as NDJSON, or as server-sent events for `Accept: text/event-stream`, which end with an
/// event `end`. A line that ends again after a retry comes again.
#[utoipa::path(get, path = "/v1/batches/{id}/results", tag = "batches",
    params(("id" = String, Path), ResultsQuery,
        ("Last-Event-ID" = Option<String>, Header, nullable = false)),
    responses((status = 200, description = "The results",
        content((String = "application/x-ndjson"), (String = "text/event-stream")),
        headers(("X-Incomplete" = bool, description = "Present while more lines may end"),
            ("X-Next-After" = String, description = "Cursor of the next page"),
            ("X-Has-More" = bool, description = "Whether the next page has lines now")))))]
pub(crate) async fn read(
    Call { app, caller }: Call,
    Path(id): Path<String>,
    QueryParams(query): QueryParams<ResultsQuery>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let batch = find(&app, &caller, &id).await?;
    let asked = query.parse(batch.id, &headers)?;
    if !results::are_numbered(&batch) {
        return Err(not_kept());
    }
    if asked.is_followed {
        return follow(app, batch, asked, &headers);
    }
    let page = results::read(&*app.store, &batch, &asked.filter, asked.after, asked.limit).await?;
    let mut response = ndjson(&page).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, NDJSON);
    if !batch.state.is_terminal() {
        headers.insert(INCOMPLETE, HeaderValue::from_static("true"));
    }
    let cursor = page.next.to_string();
    let cursor = HeaderValue::try_from(cursor).expect("cursors are visible ASCII");
    headers.insert(NEXT_AFTER, cursor);
    let has_more = if page.has_more { "true" } else { "false" };
    headers.insert(HAS_MORE, HeaderValue::from_static(has_more));
    Ok(response)
}

fn ndjson(page: &ResultPage) -> String {
    page.lines.iter().map(|line| line.with_cursor() + "\n").collect()
}

/// Returns all results that a batch has now, in the order of completion, page by page.
pub(crate) fn so_far(app: &App, batch: Batch) -> Result<Response, ApiError> {
    if !results::are_numbered(&batch) {
        return Err(not_kept());
    }
    let filter = ResultFilter { order: EndOrder::Completion, states: Vec::new(), search: None };
    let start = (app.store.clone(), batch, filter, Some(0));
    let pages = stream::try_unfold(start, async |(store, batch, filter, next)| {
        let Some(after) = next else { return Ok::<_, StoreError>(None) };
        let page = results::read(&*store, &batch, &filter, after, LINES_DEFAULT).await?;
        let next = page.has_more.then_some(page.next.position);
        Ok(Some((Bytes::from(ndjson(&page)), (store, batch, filter, next))))
    });
    let mut response = Body::from_stream(pages).into_response();
    response.headers_mut().insert(header::CONTENT_TYPE, NDJSON);
    Ok(response)
}

fn not_kept() -> ApiError {
    let message = "an earlier release ended this batch: download its files";
    ApiError::conflict("results_not_kept", message)
}

/// Returns the response that goes on until the batch has ended.
fn follow(app: App, batch: Batch, asked: Asked, headers: &HeaderMap) -> Result<Response, ApiError> {
    let accepted = headers.get(header::ACCEPT).and_then(|accepted| accepted.to_str().ok());
    let are_events = accepted.is_some_and(|accepted| accepted.contains("text/event-stream"));
    let follower = Follower {
        _permit: app.stream_permit()?,
        tenant: batch.tenant,
        id: batch.id,
        filter: asked.filter,
        position: asked.after,
        until: Instant::now() + OPEN_MAX,
        has_ended: false,
        app: app.clone(),
    };
    if are_events {
        let events = follower.news().take_while(|news| std::future::ready(news.is_ok()));
        return Ok(sse::until_stopped(app, events.flat_map(|news| stream::iter(events_of(news)))));
    }
    let stopped = Box::pin(async move { app.stopped().await });
    let broken = stream::once(stopped).map(|()| Err(FollowError::Stopped));
    // At the stop of the service the response breaks off.
    let news = stream::select(follower.news(), broken);
    let news = news.take_while(|news| std::future::ready(!matches!(news, Ok(News::End(_)))));
    let bytes = news.map(|news| news.map(bytes_of));
    let mut response = Body::from_stream(bytes).into_response();
    response.headers_mut().insert(header::CONTENT_TYPE, NDJSON);
    Ok(response)
}

/// A response ended before its batch did.
#[derive(Debug, thiserror::Error)]
enum FollowError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the batch was deleted")]
    Deleted,
    #[error("the response was open for {} s", OPEN_MAX.as_secs())]
    TimeIsUp,
    #[error("the service stops")]
    Stopped,
}

/// News of a batch.
enum News {
    Results(ResultPage),
    /// Nothing for a while.
    Idle,
    /// The batch has ended in this state, and all results were there.
    End(BatchState),
}

fn bytes_of(news: News) -> Bytes {
    match news {
        News::Results(page) => Bytes::from(ndjson(&page)),
        News::Idle | News::End(_) => Bytes::from_static(b"\n"),
    }
}

fn events_of(news: Result<News, FollowError>) -> Vec<Result<Event, Infallible>> {
    let result = |line: &results::ResultLine| {
        Ok(Event::default().id(line.cursor.to_string()).event("result").data(line.with_cursor()))
    };
    match news {
        Ok(News::Results(page)) => page.lines.iter().map(result).collect(),
        Ok(News::End(state)) => {
            let data = json_line(&json!({ "status": state.as_str() }));
            vec![Ok(Event::default().event("end").data(data))]
        }
        // Event streams are kept alive by themselves.
        Ok(News::Idle) | Err(_) => Vec::new(),
    }
}

/// A response that follows a batch.
struct Follower {
    app: App,
    tenant: Tenant,
    id: BatchId,
    filter: ResultFilter,
    position: u64,
    until: Instant,
    has_ended: bool,
    _permit: OwnedSemaphorePermit,
}

impl Follower {
    fn news(self) -> impl Stream<Item = Result<News, FollowError>> + Send + 'static {
        stream::try_unfold(self, async |mut follower| match follower.has_ended {
            true => Ok(None),
            false => Ok(Some((follower.next().await?, follower))),
        })
    }

    async fn next(&mut self) -> Result<News, FollowError> {
        let since = Instant::now();
        loop {
            if Instant::now() >= self.until {
                return Err(FollowError::TimeIsUp);
            }
            // The batch is read before its results: what it counts is there.
            let store = &*self.app.store;
            let batch = store.batch(&self.tenant, self.id).await?.ok_or(FollowError::Deleted)?;
            let page =
                results::read(store, &batch, &self.filter, self.position, LINES_DEFAULT).await?;
            self.position = page.next.position;
            if !page.lines.is_empty() {
                return Ok(News::Results(page));
            }
            if page.has_more {
                continue;
            }
            if batch.state.is_terminal() {
                self.has_ended = true;
                return Ok(News::End(batch.state));
            }
            if since.elapsed() >= KEEP_ALIVE {
                return Ok(News::Idle);
            }
            let streams = u32::try_from(self.app.metrics.streams.get()).unwrap_or_default();
            sleep(POLL.max(POLL_EACH * streams)).await;
        }
    }
}
