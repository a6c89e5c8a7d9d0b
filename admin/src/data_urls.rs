//! Data of batches where it lies: [`InputUrl`], from which the driver reads the lines of a batch, and [`OutputUrl`], to which it writes
//! the answers.
//!
//! The service reads and writes with its own rights. So both are addresses of other machines below a prefix that the operator allows
//! ([`AllowedAddresses`](tritmill_data::AllowedAddresses)); that is checked when a batch is created, and again before an address is used.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tritmill_client::{FieldError, Fields, RawLine, json_line, parse_request};
use tritmill_data::{
    Address, AllowedAddresses, Columns, DataError, EndpointOfRows, Format, RemoteSource, Sink,
};
use tritmill_queue::{Tenant, Timestamp};

use crate::store::{Batch, files::FILE_CHUNK_BYTES};

/// Most bytes of an address.
const URL_BYTES_MAX: usize = 2048;
/// Most bytes of options: each step of their batch reads and writes them.
const OPTIONS_BYTES_MAX: usize = 64 << 10;
/// The names of the fields of a batch.
const INPUT: &str = "input_url";
const OPTIONS: &str = "input_options";
const OUTPUT: &str = "output_url";
const OUTPUT_FORMAT: &str = "output_format";

/// Where the lines of a batch are read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputUrl {
    /// Its address, which may have a signature.
    pub url: String,
    /// How it is read.
    #[serde(default)]
    pub options: InputOptions,
    /// Time at which the last line was read.
    #[serde(default)]
    pub fetched_at: Option<Timestamp>,
}

/// How a source is read. It is stored as one text, so that every store keeps all that its strings may have.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct InputOptions(Stored);

/// The options.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
struct Stored {
    #[serde(skip_serializing_if = "Option::is_none")]
    format: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    split: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_column: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id_column: Option<String>,
    #[serde(skip_serializing_if = "Map::is_empty")]
    body: Map<String, Value>,
}

impl TryFrom<String> for InputOptions {
    type Error = serde_json::Error;

    fn try_from(text: String) -> Result<Self, serde_json::Error> {
        serde_json::from_str(&text).map(Self)
    }
}

impl From<InputOptions> for String {
    fn from(options: InputOptions) -> Self {
        options.to_json().to_string()
    }
}

impl InputOptions {
    /// Returns them as a request has them.
    pub fn to_json(&self) -> Value {
        json!(self.0)
    }

    fn parse(options: Option<Value>) -> Result<Self, FieldError> {
        let map = match options {
            None => return Ok(Self::default()),
            Some(Value::Object(map)) => map,
            Some(other) => return Err(FieldError::wrong_type(OPTIONS, "an object", &other)),
        };
        let mut fields = Fields::new(map, format!("{OPTIONS}."));
        let mut name = |name: &str| match fields.text(name)? {
            Some(text) if text.is_empty() => {
                Err(FieldError::new(fields.path(name), "invalid_value", "is empty"))
            }
            text => Ok(text),
        };
        let stored = Stored {
            format: name("format")?,
            split: name("split")?,
            prompt_column: name("prompt_column")?,
            id_column: name("id_column")?,
            body: match fields.take("body") {
                None => Map::new(),
                Some(Value::Object(body)) => body,
                Some(other) => {
                    return Err(FieldError::wrong_type(fields.path("body"), "an object", &other));
                }
            },
        };
        fields.finish()?;
        parse_format(stored.format.as_deref(), &format!("{OPTIONS}.format"))?;
        match String::from(Self(stored.clone())).len() <= OPTIONS_BYTES_MAX {
            true => Ok(Self(stored)),
            false => {
                let problem = format!("has more than {OPTIONS_BYTES_MAX} bytes");
                Err(FieldError::new(OPTIONS, "invalid_value", problem))
            }
        }
    }
}

/// Parses the name of a form, which may be absent.
fn parse_format(name: Option<&str>, field: &str) -> Result<Option<Format>, FieldError> {
    let invalid = |error: tritmill_data::UnknownFormat| {
        FieldError::new(field, "invalid_value", error.to_string())
    };
    name.map(str::parse).transpose().map_err(invalid)
}

/// Parses an address of another machine.
fn parse_address(url: &str, field: &str) -> Result<Address, FieldError> {
    let invalid = |problem: String| FieldError::new(field, "invalid_value", problem);
    if url.len() > URL_BYTES_MAX {
        return Err(invalid(format!("is longer than {URL_BYTES_MAX} bytes")));
    }
    if url.chars().any(char::is_control) {
        return Err(invalid("has a control character".to_owned()));
    }
    let address =
        Address::parse(url).map_err(|error| invalid(format!("cannot be used: {error}")))?;
    match address.is_remote() {
        true => Ok(address),
        false => Err(invalid("must begin with s3://, gs://, az:// or https://".to_owned())),
    }
}

/// Checks that a tenant may use an address.
fn check_allowed(
    url: &str,
    field: &str,
    (allowed, tenant): (&AllowedAddresses, &Tenant),
) -> Result<(), FieldError> {
    allowed.check(&parse_address(url, field)?, &tenant.0).map_err(|error| {
        let code = match error {
            DataError::NotAllowed { .. } => "address_not_allowed",
            _ => "invalid_value",
        };
        FieldError::new(field, code, format!("cannot be used: {error}"))
    })
}

/// Returns an address for people: without its query, which may have a signature.
fn shown(url: &str) -> String {
    Address::parse(url).map_or_else(|_| String::new(), |address| address.to_string())
}

impl InputUrl {
    /// Parses the fields `input_url` and `input_options` of a batch with an endpoint.
    ///
    /// # Errors
    /// Names the first invalid field.
    pub fn parse(url: String, options: Option<Value>, endpoint: &str) -> Result<Self, FieldError> {
        parse_address(&url, INPUT)?;
        let new = Self { url, options: InputOptions::parse(options)?, fetched_at: None };
        new.check_rows(endpoint)?;
        Ok(new)
    }

    /// Checks that rows can become requests, as far as that is known before they are read.
    fn check_rows(&self, endpoint: &str) -> Result<(), FieldError> {
        let source = self.source(endpoint, u64::MAX)?;
        let name = source.address.name();
        let format = source.format.or_else(|| Format::of_name(name)).unwrap_or(Format::Lines);
        let is_table = format != Format::Lines;
        let Some(columns) = source.columns else {
            return match self.first_of_rows(is_table) {
                None => Ok(()),
                Some(field) => {
                    let problem = "is of rows, which need the endpoint /v1/chat/completions, /v1/completions or /v1/embeddings";
                    Err(FieldError::new(field, "invalid_value", problem))
                }
            };
        };
        if !is_table && !columns.are_told() {
            return Ok(());
        }
        if !columns.body.contains_key("model") {
            let field = format!("{OPTIONS}.body.model");
            return Err(FieldError::new(field, "missing_field", "is missing"));
        }
        let line = json_line(&columns.example()).into_bytes();
        match parse_request(&RawLine { number: 1, offset: 0, content: Ok(line) }) {
            Ok(_) => Ok(()),
            Err(refused) => {
                let field = refused.refusal.param.unwrap_or_default();
                let message = refused.refusal.message;
                let problem = message.split_once(&format!("body.{field} "));
                let problem = problem.map_or(message.as_str(), |(_, problem)| problem);
                let field = format!("{OPTIONS}.body.{field}");
                Err(FieldError::new(field, "invalid_value", problem))
            }
        }
    }

    /// Returns the first field that asks for rows.
    fn first_of_rows(&self, is_table: bool) -> Option<String> {
        let Stored { format, prompt_column, id_column, body, .. } = &self.options.0;
        let given = [
            ("prompt_column", prompt_column.is_some()),
            ("id_column", id_column.is_some()),
            ("body", !body.is_empty()),
            ("format", is_table && format.is_some()),
        ];
        let named = given.into_iter().find(|(_, is_given)| *is_given);
        let named = named.map(|(name, _)| format!("{OPTIONS}.{name}"));
        named.or_else(|| is_table.then(|| INPUT.to_owned()))
    }

    /// Checks that a tenant may read it.
    ///
    /// # Errors
    /// Names the field.
    pub fn check_allowed(
        &self,
        allowed: &AllowedAddresses,
        tenant: &Tenant,
    ) -> Result<(), FieldError> {
        check_allowed(&self.url, INPUT, (allowed, tenant))
    }

    /// Returns what is read for a batch with an endpoint.
    ///
    /// # Errors
    /// Names the field that cannot be used.
    pub fn source(&self, endpoint: &str, copy_bytes_max: u64) -> Result<RemoteSource, FieldError> {
        let Stored { format, split, prompt_column, id_column, body } = self.options.0.clone();
        let columns = |endpoint| Columns {
            prompt: prompt_column,
            id: id_column,
            endpoint,
            body,
            of_lines: false,
        };
        Ok(RemoteSource {
            address: parse_address(&self.url, INPUT)?,
            format: parse_format(format.as_deref(), &format!("{OPTIONS}.format"))?,
            split,
            columns: EndpointOfRows::of_path(endpoint).map(columns),
            page_bytes: FILE_CHUNK_BYTES,
            copy_bytes_max,
        })
    }

    /// Returns the address for people: without its query, which may have a signature.
    pub fn shown(&self) -> String {
        shown(&self.url)
    }
}

/// Where the answers of a batch are written when it ends, beside its files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputUrl {
    /// Its address.
    pub url: String,
    /// The form of the answers, if its name does not tell it.
    #[serde(default)]
    pub format: Option<String>,
    /// Why they could not be written when the batch ended last.
    #[serde(default)]
    pub error: Option<String>,
}

impl OutputUrl {
    /// Parses the fields `output_url` and `output_format` of a batch.
    ///
    /// # Errors
    /// Names the invalid field.
    pub fn parse(url: String, format: Option<String>) -> Result<Self, FieldError> {
        let new = Self { url, format, error: None };
        new.sink().map(|_| new)
    }

    /// Checks that a tenant may write it.
    ///
    /// # Errors
    /// Names the field.
    pub fn check_allowed(
        &self,
        allowed: &AllowedAddresses,
        tenant: &Tenant,
    ) -> Result<(), FieldError> {
        check_allowed(&self.url, OUTPUT, (allowed, tenant))
    }

    /// Returns what is written.
    ///
    /// # Errors
    /// Names the field that cannot be used.
    pub fn sink(&self) -> Result<Sink, FieldError> {
        let invalid = |problem: String| FieldError::new(OUTPUT, "invalid_value", problem);
        let address = parse_address(&self.url, OUTPUT)?;
        if !matches!(address, Address::Object { .. }) {
            return Err(invalid("must begin with s3://, gs:// or az://".to_owned()));
        }
        let format = parse_format(self.format.as_deref(), OUTPUT_FORMAT)?;
        Sink::of(address, format).map_err(|error| invalid(format!("cannot be used: {error}")))
    }

    /// Returns the address for people.
    pub fn shown(&self) -> String {
        shown(&self.url)
    }
}

/// Returns an error for people, without names of this machine.
pub(crate) fn said(error: &DataError) -> String {
    match error {
        DataError::Write { source, .. } => {
            format!("the service cannot write its temporary file: {}", source.kind())
        }
        error => error.to_string(),
    }
}

impl Batch {
    /// The field of the request that says where its lines are.
    pub(crate) fn input_field(&self) -> &'static str {
        if self.input_url.is_some() { INPUT } else { "input_file_id" }
    }
}
