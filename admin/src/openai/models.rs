//! `/v1/models`: the models that requests may name, in OpenAI's shape, or in Anthropic's for clients that name a version of its API.

use axum::{
    Json,
    extract::{Path, State},
    http::HeaderMap,
};
use serde::Serialize;
use serde_json::{Value, json};
use tritmill_queue::{Timestamp, store::classes::RegisteredQueue};
use utoipa::ToSchema;

use crate::{
    ApiError, App, JsonResult,
    anthropic::{batches::rfc_3339, shape::is_asked},
    models::find,
};

/// A served model.
#[derive(Serialize, ToSchema)]
pub(crate) struct Model {
    id: String,
    object: &'static str,
    /// When a worker first served it.
    created: i64,
    owned_by: &'static str,
}

impl Model {
    fn new(name: String, registered_at: Timestamp) -> Self {
        let created = registered_at.seconds();
        Self { id: name, object: "model", created, owned_by: "tritmill" }
    }

    /// Returns the model in the shape that the headers of a request ask for.
    fn shown(self, headers: &HeaderMap) -> Value {
        match is_asked(headers) {
            true => json!({
                "type": "model",
                "id": self.id,
                "display_name": self.id,
                "created_at": rfc_3339(Timestamp(self.created * 1000)),
            }),
            false => json!(self),
        }
    }
}

/// Served models.
#[derive(ToSchema)]
#[expect(dead_code, reason = "it describes what is answered")]
pub(crate) struct ModelList {
    object: &'static str,
    data: Vec<Model>,
}

/// Lists the served models: first the names without a format, then each name with its format. With the header
/// `anthropic-version` the answer has the shape of Anthropic's API.
#[utoipa::path(get, path = "/v1/models", tag = "models",
    responses((status = 200, description = "Served models", body = ModelList)))]
pub(crate) async fn list(State(app): State<App>, headers: HeaderMap) -> JsonResult<Value> {
    let known = app.models.all().await?;
    let mut data: Vec<Model> = Vec::new();
    for RegisteredQueue { queue, at } in &known {
        if !data.iter().any(|model| model.id == queue.model) {
            data.push(Model::new(queue.model.clone(), *at));
        }
    }
    data.extend(known.iter().map(|known| Model::new(known.queue.to_string(), known.at)));
    let data: Vec<Value> = data.into_iter().map(|model| model.shown(&headers)).collect();
    if !is_asked(&headers) {
        return Ok(Json(json!({ "object": "list", "data": data })));
    }
    let id = |model: Option<&Value>| model.map(|model| model["id"].clone());
    let (first, last) = (id(data.first()), id(data.last()));
    Ok(Json(json!({ "data": data, "has_more": false, "first_id": first, "last_id": last })))
}

/// Returns a model. With the header `anthropic-version` the answer has the shape of Anthropic's API.
#[utoipa::path(get, path = "/v1/models/{model}", tag = "models",
    params(("model" = String, Path, description = "`NAME` or `NAME@FORMAT`")),
    responses((status = 200, description = "The model", body = Model)))]
pub(crate) async fn one(
    State(app): State<App>,
    headers: HeaderMap,
    Path(name): Path<String>,
) -> JsonResult<Value> {
    match find(app.models.all().await?, &name) {
        Some(found) => Ok(Json(Model::new(name, found.at).shown(&headers))),
        None => Err(ApiError::model_not_found(&name)),
    }
}
