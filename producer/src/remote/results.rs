//! Results of a batch as a stream, while the batch runs.
//!
//! The server sends a line as soon as it has ended, each with a cursor. When the connection breaks, the stream connects again
//! behind the last line that it gave: no line is missing, and none comes twice.

use std::{collections::VecDeque, time::Duration};

use futures_util::{Stream, stream};
use serde_json::{Map, Value};
use tokio::time::sleep;
use tritmill_queue::Backoff;
use url::form_urlencoded::Serializer;

use super::{
    answers::RemoteError,
    api::{Api, Content},
};

/// Shortest and longest pause before the next connection.
const RETRY_FIRST: Duration = Duration::from_millis(200);
const RETRY_LAST: Duration = Duration::from_secs(30);
/// Failed connections in a row after which the stream ends with the error.
const FAILURES_MAX: u32 = 20;
/// Longest line.
const LINE_BYTES_MAX: usize = 64 << 20;

/// Which results of a batch to read; the default is all, as they end.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ResultsQuery {
    /// Those behind this cursor, which is of the same batch and order.
    pub after: Option<String>,
    /// Those with one of these statuses, with commas between: `succeeded`, `failed`, `expired`, `cancelled`.
    pub status: Option<String>,
    /// Those with this text in their `custom_id`, answer or error.
    pub search: Option<String>,
    /// Whether they come in the order of the input: each line when all before it have ended.
    pub in_line_order: bool,
}

/// A result of a batch.
#[derive(Debug, Clone, PartialEq)]
pub struct BatchResult {
    /// Where to continue behind it, also in another process: see [`ResultsQuery::after`].
    pub cursor: String,
    /// The line, as in the files of the batch: `id`, `custom_id`, `response` and `error`.
    pub line: Map<String, Value>,
}

impl Api {
    /// Streams the results of a batch until it has ended. Broken connections are made again.
    ///
    /// # Errors
    /// An item is [`RemoteError`] if the server refuses the request, or if it cannot be reached for minutes. It is the last one.
    pub fn results(
        &self,
        batch: &str,
        query: ResultsQuery,
    ) -> impl Stream<Item = Result<BatchResult, RemoteError>> + Send + 'static {
        let reader = Reader {
            api: self.clone(),
            batch: batch.to_owned(),
            query,
            open: None,
            ready: VecDeque::new(),
            backoff: Backoff::new(RETRY_FIRST, RETRY_LAST),
            failures: 0,
        };
        stream::try_unfold(reader, async |mut reader| {
            Ok(reader.next().await?.map(|result| (result, reader)))
        })
    }
}

/// Reads results, connection after connection.
struct Reader {
    api: Api,
    batch: String,
    /// Continues behind the last result.
    query: ResultsQuery,
    /// The connection, and the begin of a line that has not come as a whole.
    open: Option<(Content, Vec<u8>)>,
    ready: VecDeque<BatchResult>,
    backoff: Backoff,
    failures: u32,
}

impl Reader {
    async fn next(&mut self) -> Result<Option<BatchResult>, RemoteError> {
        loop {
            if let Some(result) = self.ready.pop_front() {
                self.query.after = Some(result.cursor.clone());
                return Ok(Some(result));
            }
            let wait = match self.read().await {
                Ok(true) => continue,
                Ok(false) => return Ok(None),
                Err(error) if error.is_transient() && self.failures < FAILURES_MAX => {
                    let wait = self.backoff.record_failure();
                    match error {
                        RemoteError::Refused { retry_after: Some(asked), .. } => asked,
                        _ => wait,
                    }
                }
                Err(error) => return Err(error),
            };
            self.open = None;
            self.failures += 1;
            sleep(wait.min(RETRY_LAST)).await;
        }
    }

    /// Reads the next piece of the response, and connects before it if needed. Returns false at the end of the results.
    async fn read(&mut self) -> Result<bool, RemoteError> {
        let (content, rest) = match &mut self.open {
            Some(open) => open,
            closed => {
                closed.insert((self.api.open(&self.query.path(&self.batch)).await?, Vec::new()))
            }
        };
        let Some(piece) = content.next().await? else { return Ok(false) };
        let checked = rest.len();
        rest.extend_from_slice(&piece);
        let unexpected =
            |problem: String| self.api.unexpected(&self.query.path(&self.batch), problem);
        if let Some(end) = rest[checked..].iter().rposition(|byte| *byte == b'\n') {
            let behind = rest.split_off(checked + end + 1);
            let whole = std::mem::replace(rest, behind);
            // Empty lines say that the connection is alive.
            for line in whole.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
                let mut line: Map<String, Value> = serde_json::from_slice(line)
                    .map_err(|error| unexpected(format!("a result that is {error}")))?;
                match line.remove("cursor") {
                    Some(Value::String(cursor)) => {
                        self.ready.push_back(BatchResult { cursor, line })
                    }
                    _ => return Err(unexpected("a result without a cursor".to_owned())),
                }
            }
            self.failures = 0;
            self.backoff.reset();
        } else if rest.len() > LINE_BYTES_MAX {
            return Err(unexpected(format!("a result with more than {LINE_BYTES_MAX} bytes")));
        }
        Ok(true)
    }
}

impl ResultsQuery {
    fn path(&self, batch: &str) -> String {
        let mut pairs = Serializer::new(String::from("follow=true"));
        if self.in_line_order {
            pairs.append_pair("order", "lines");
        }
        for (name, value) in
            [("after", &self.after), ("status", &self.status), ("search", &self.search)]
        {
            if let Some(value) = value {
                pairs.append_pair(name, value);
            }
        }
        format!("/v1/batches/{batch}/results?{}", pairs.finish())
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read as _, Write as _},
        net::TcpListener,
        thread,
    };

    use futures_util::TryStreamExt as _;

    use super::*;
    use crate::http::HttpClient;

    /// A server that answers each connection with the next response and returns the paths that it was asked for.
    fn server(responses: Vec<String>) -> (String, thread::JoinHandle<Vec<String>>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("its address"));
        let paths = thread::spawn(move || {
            let answer = |response: &String| {
                let (mut stream, _) = listener.accept().expect("a connection");
                let mut head = [0; 2048];
                let read = stream.read(&mut head).expect("a request");
                stream.write_all(response.as_bytes()).expect("it is read");
                let head = String::from_utf8_lossy(&head[..read]).into_owned();
                head.split(' ').nth(1).expect("a path").to_owned()
            };
            responses.iter().map(answer).collect()
        });
        (url, paths)
    }

    fn line(name: &str) -> String {
        format!("{{\"custom_id\":\"{name}\",\"cursor\":\"b-c{name}\"}}\n")
    }

    fn chunk(text: &str) -> String {
        format!("{:x}\r\n{text}\r\n", text.len())
    }

    const HEAD: &str = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n";

    #[tokio::test]
    async fn stream_continues_behind_the_last_result_of_a_broken_connection() {
        let torn = line("2").split_at(9).0.to_owned();
        let (url, paths) = server(vec![
            format!("{HEAD}{}{}", chunk(&line("1")), chunk(&torn)),
            format!("{HEAD}{}{}0\r\n\r\n", chunk("\n"), chunk(&(line("2") + &line("3")))),
        ]);
        let client = HttpClient::of_trusted_server().expect("no file to read");
        let api = Api::new(client, &url, "tm-key").expect("a URL");
        let query = ResultsQuery { search: Some("a&b".to_owned()), ..ResultsQuery::default() };
        let results: Vec<BatchResult> =
            api.results("batch_7", query).try_collect().await.expect("results");
        let names: Vec<&str> =
            results.iter().filter_map(|result| result.line["custom_id"].as_str()).collect();
        assert_eq!(names, ["1", "2", "3"]);
        assert_eq!(results[2].cursor, "b-c3");
        let paths = paths.join().expect("it ended");
        assert_eq!(paths[0], "/v1/batches/batch_7/results?follow=true&search=a%26b");
        assert_eq!(paths[1], "/v1/batches/batch_7/results?follow=true&after=b-c1&search=a%26b");
    }

    #[tokio::test]
    async fn refusal_ends_the_stream() {
        let body = r#"{"error":{"message":"no such batch","code":"not_found"}}"#;
        let head = "HTTP/1.1 404 Not Found\r\nConnection: close\r\nContent-Length: ";
        let (url, paths) = server(vec![format!("{head}{}\r\n\r\n{body}", body.len())]);
        let client = HttpClient::of_trusted_server().expect("no file to read");
        let api = Api::new(client, &url, "tm-key").expect("a URL");
        let results: Result<Vec<BatchResult>, _> =
            api.results("batch_7", ResultsQuery::default()).try_collect().await;
        assert!(results.is_err_and(|error| error.is_not_found()));
        paths.join().expect("it ended");
    }
}
