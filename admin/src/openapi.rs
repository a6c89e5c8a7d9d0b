//! The API as a document, at `/openapi.json`: every route of the table, what it takes and what comes
//! back. The types here are read by nobody but the document's readers; tests hold them to the routes
//! and to the parameters that are understood.

use axum::Json;
use utoipa::{
    Modify, OpenApi,
    openapi::{
        self,
        security::{HttpAuthScheme, HttpBuilder, SecurityScheme},
    },
};

use crate::{
    health,
    openai::*,
    operator::{dead_letters, events, history, jobs, keys, log, queues, story, workers},
};

mod schemas;

pub(crate) use schemas::*;

/// The document.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "Tritmill",
        description = "Batch text generation on ternary language models. Parameters and answers are \
                       OpenAI's; what is not supported is refused by name.",
    ),
    paths(
        health::alive, health::ready, health::metrics, document,
        models::list, models::one,
        completions::chat, completions::text,
        files::list, files::upload, files::one, files::remove, files::content,
        batches::list, batches::create, batches::one, batches::cancel,
        jobs::list, jobs::count, jobs::cancel, story::one,
        dead_letters::list, dead_letters::replay, dead_letters::purge,
        queues::list, queues::pause, queues::resume, queues::limit,
        queues::allow_class, queues::withdraw_class,
        history::list, history::integrity,
        workers::list, workers::drain,
        keys::list, keys::create, keys::revoke, keys::erase, log::list,
        events::changes, events::of_job,
    ),
    components(schemas(Refused)),
    modifiers(&Keys),
    security(("key" = [])),
)]
struct Document;

/// Says how callers show their key.
struct Keys;

impl Modify for Keys {
    fn modify(&self, document: &mut openapi::OpenApi) {
        let key = HttpBuilder::new()
            .scheme(HttpAuthScheme::Bearer)
            .description(Some("An API key: tm- and 64 hexadecimal digits"))
            .build();
        let components = document.components.get_or_insert_default();
        components.add_security_scheme("key", SecurityScheme::Http(key));
    }
}

/// This document.
#[utoipa::path(get, path = "/openapi.json", tag = "service", security(()),
    responses((status = 200, description = "The API, described")))]
pub(crate) async fn document() -> Json<openapi::OpenApi> {
    Json(Document::openapi())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::{Map, Value, json};
    use tritmill_client::{Endpoint, parse_body};

    use super::*;
    use crate::{Access, ROUTES};

    fn described() -> Value {
        serde_json::to_value(Document::openapi()).expect("JSON")
    }

    #[test]
    fn every_route_is_described_and_nothing_else() {
        let document = described();
        let paths = document["paths"].as_object().expect("paths");
        let described: BTreeSet<(String, String)> = paths
            .iter()
            .flat_map(|(path, item)| {
                let methods = item.as_object().expect("a path's methods").keys();
                methods.map(move |method| (method.to_uppercase(), path.clone()))
            })
            .collect();
        let api = || ROUTES.iter().filter(|route| !route.is_of_pages());
        let routed: BTreeSet<(String, String)> =
            api().map(|route| (route.method.to_string(), route.path.replace("{*", "{"))).collect();
        assert_eq!(described, routed);
        for route in api() {
            let method = route.method.as_str().to_lowercase();
            let operation = &paths[&route.path.replace("{*", "{")][method];
            let is_open = operation["security"] == json!([{}]);
            assert_eq!(is_open, route.access == Access::Public, "{}", route.path);
        }
    }

    #[test]
    fn every_parameter_that_is_described_is_understood() {
        let document = described();
        for (name, endpoint) in
            [("ChatRequest", Endpoint::Chat), ("TextRequest", Endpoint::Completions)]
        {
            let schema = &document["components"]["schemas"][name];
            let properties = schema["properties"].as_object().expect("properties");
            assert!(properties.len() > 10, "{schema}");
            for property in properties.keys().filter(|name| !name.starts_with("stream")) {
                // Of no type that any parameter has: whoever knows it says so.
                let value = json!({ "of": ["no", "type"] });
                let body = Map::from_iter([(property.clone(), value)]);
                match parse_body(endpoint, body) {
                    Ok(_) => {}
                    Err(error) => assert_ne!(error.code, "unknown_parameter", "{property}"),
                }
            }
        }
    }
}
