//! `/v1/models`: the models that requests may name.

use axum::{
    Json,
    extract::{Path, State},
};
use serde::Serialize;
use tritmill_queue::{Timestamp, store::classes::RegisteredQueue};
use utoipa::ToSchema;

use crate::{ApiError, App, JsonResult, models::find};

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
}

/// Served models.
#[derive(Serialize, ToSchema)]
pub(crate) struct ModelList {
    object: &'static str,
    data: Vec<Model>,
}

/// Lists the served models: first the names without a format, then each name with its format.
#[utoipa::path(get, path = "/v1/models", tag = "models",
    responses((status = 200, description = "Served models", body = ModelList)))]
pub(crate) async fn list(State(app): State<App>) -> JsonResult<ModelList> {
    let known = app.models.all().await?;
    let mut data: Vec<Model> = Vec::new();
    for RegisteredQueue { queue, at } in &known {
        if !data.iter().any(|model| model.id == queue.model) {
            data.push(Model::new(queue.model.clone(), *at));
        }
    }
    data.extend(known.iter().map(|known| Model::new(known.queue.to_string(), known.at)));
    Ok(Json(ModelList { object: "list", data }))
}

/// Returns a model.
#[utoipa::path(get, path = "/v1/models/{model}", tag = "models",
    params(("model" = String, Path, description = "`NAME` or `NAME@FORMAT`")),
    responses((status = 200, description = "The model", body = Model)))]
pub(crate) async fn one(State(app): State<App>, Path(name): Path<String>) -> JsonResult<Model> {
    match find(app.models.all().await?, &name) {
        Some(found) => Ok(Json(Model::new(name, found.at))),
        None => Err(ApiError::model_not_found(&name)),
    }
}
