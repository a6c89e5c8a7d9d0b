//! `/admin/v1`: the API for operators, one module per noun.
//!
//! Response types are defined beside their handlers, so that the OpenAPI document describes what is sent.
//! Every action is recorded in the audit log, with the API key, before it is done.

use axum::Json;
use serde::Serialize;
use utoipa::ToSchema;

pub(crate) mod audit;
pub(crate) mod batches;
pub(crate) mod dead_letters;
pub(crate) mod events;
pub(crate) mod history;
pub(crate) mod job;
pub(crate) mod jobs;
pub(crate) mod keys;
pub(crate) mod metadata;
pub(crate) mod params;
pub(crate) mod prices;
pub(crate) mod queues;
pub(crate) mod tenants;
pub(crate) mod workers;

/// Result of an action.
#[derive(Serialize, ToSchema)]
pub(crate) struct Done {
    done: bool,
}

/// The response to a successful action.
const DONE: Json<Done> = Json(Done { done: true });
