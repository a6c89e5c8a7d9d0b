//! `/v1/models`: what requests may name.

use axum::{
    Json,
    extract::{Path, State},
};
use serde_json::{Value, json};

use crate::{
    app::App,
    error::ApiError,
    openapi::{Model, ModelList, Refused},
};

/// The bare names, then each with its format.
#[utoipa::path(get, path = "/v1/models", tag = "models",
    responses((status = 200, description = "What is served", body = ModelList),
        (status = "4XX", description = "Refused", body = Refused),
        (status = "5XX", description = "Try again", body = Refused),))]
pub(crate) async fn list(State(app): State<App>) -> Result<Json<Value>, ApiError> {
    let queues = app.models().all().await?;
    let mut names: Vec<String> = Vec::new();
    for name in queues.iter().map(|queue| queue.model.clone()) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names.extend(queues.iter().map(ToString::to_string));
    let data: Vec<Value> = names.iter().map(|name| model(name)).collect();
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
    match app.models().find(&name).await? {
        Some(_) => Ok(Json(model(&name))),
        None => Err(ApiError::no_model(&name)),
    }
}

/// When a model was made is not known here.
fn model(name: &str) -> Value {
    json!({ "id": name, "object": "model", "created": 0, "owned_by": "tritmill" })
}
