//! `/v1/models`: what requests may name.

use axum::{
    Json,
    extract::{Path, State},
};
use serde_json::{Value, json};
use tritmill_queue::{Timestamp, store::operations::RegisteredQueue};

use crate::{
    app::App,
    error::ApiError,
    models::find,
    openapi::{Model, ModelList, Refused},
};

/// The bare names, then each with its format.
#[utoipa::path(get, path = "/v1/models", tag = "models",
    responses((status = 200, description = "What is served", body = ModelList),
        (status = "4XX", description = "Refused", body = Refused),
        (status = "5XX", description = "Try again", body = Refused),))]
pub(crate) async fn list(State(app): State<App>) -> Result<Json<Value>, ApiError> {
    let known = app.models().all().await?;
    let mut named: Vec<(String, Timestamp)> = Vec::new();
    for RegisteredQueue { queue, at } in &known {
        if !named.iter().any(|(name, _)| *name == queue.model) {
            named.push((queue.model.clone(), *at));
        }
    }
    named.extend(known.iter().map(|known| (known.queue.to_string(), known.at)));
    let data: Vec<Value> = named.iter().map(|(name, at)| model(name, *at)).collect();
    Ok(Json(json!({ "object": "list", "data": data })))
}

/// One of them.
#[utoipa::path(get, path = "/v1/models/{model}", tag = "models",
    params(("model" = String, Path, description = "`NAME` or `NAME@FORMAT`")),
    responses((status = 200, description = "It is served", body = Model),
        (status = "4XX", description = "Refused", body = Refused),
        (status = "5XX", description = "Try again", body = Refused),))]
pub(crate) async fn one(
    State(app): State<App>,
    Path(name): Path<String>,
) -> Result<Json<Value>, ApiError> {
    match find(app.models().all().await?, &name) {
        Some(found) => Ok(Json(model(&name, found.at))),
        None => Err(ApiError::no_model(&name)),
    }
}

/// A model was made when a worker first served it: when it was trained is not known here.
fn model(name: &str, at: Timestamp) -> Value {
    json!({ "id": name, "object": "model", "created": at.seconds(), "owned_by": "tritmill" })
}
