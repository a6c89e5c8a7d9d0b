//! `/openapi.json`: the OpenAPI document of every API route. Tests hold it to the routes and to the
//! parameters that requests may have.

use axum::{Json, extract::State};
use utoipa::{
    Modify, OpenApi,
    openapi::{
        self, ContentBuilder, Ref, ResponseBuilder, Server,
        security::{HttpAuthScheme, HttpBuilder, SecurityScheme},
    },
};

use crate::{
    App,
    anthropic::{self, batches as messages, schemas::MessagesErrorResponse},
    costs,
    error::ErrorResponse,
    health,
    openai::{
        batches, completions, files, models, notices, responses, schedules, tokenize, webhook,
    },
    operator::{
        audit, batches as all_batches, dead_letters, events, history, job, jobs, keys, prices,
        queues, tenants, workers,
    },
};

/// The document.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "Tritmill",
        description = "Batch text generation on ternary language models. Requests and responses follow \
                       OpenAI's API; unsupported parameters are rejected by name.",
    ),
    paths(
        health::alive, health::ready, health::metrics, document,
        models::list, models::one,
        completions::chat, completions::text, completions::embeddings, tokenize::tokenize, tokenize::detokenize,
        responses::create, responses::input_tokens, responses::one, responses::remove, responses::cancel,
        responses::input_items,
        anthropic::create, anthropic::count_tokens,
        messages::list, messages::create, messages::one, messages::remove, messages::cancel, messages::results,
        files::list, files::upload, files::one, files::remove, files::content,
        batches::list, batches::create, batches::one, batches::cancel, batches::remove,
        batches::pause, batches::resume, batches::retry, batches::add_lines, batches::seal,
        batches::archive, batches::unarchive, batches::results::read, batches::estimate::estimate,
        webhook::show, webhook::set, webhook::remove, notices::list, notices::redeliver,
        schedules::list, schedules::create, schedules::one, schedules::remove, schedules::pause, schedules::resume,
        costs::list, prices::list, prices::budgets, prices::set, prices::remove, prices::set_budget,
        all_batches::list, all_batches::cancel,
        all_batches::pause, all_batches::resume, all_batches::retry,
        jobs::list, jobs::count, jobs::cancel, job::one, job::run_now, job::priority,
        dead_letters::list, dead_letters::replay, dead_letters::purge,
        queues::list, queues::pause, queues::resume, queues::limit,
        queues::max_wait, queues::allow_class, queues::withdraw_class,
        history::list, history::integrity,
        workers::list, workers::drain,
        keys::list, keys::create, keys::revoke, keys::erase, tenants::list, tenants::limit,
        audit::list,
        events::changes, events::of_job,
    ),
    components(schemas(ErrorResponse, MessagesErrorResponse)),
    modifiers(&Common),
    security(("key" = [])),
)]
struct Document;

/// Adds what all routes have in common: the API key and the error responses.
struct Common;

impl Modify for Common {
    fn modify(&self, document: &mut openapi::OpenApi) {
        let key = HttpBuilder::new()
            .scheme(HttpAuthScheme::Bearer)
            .description(Some("An API key: tm- and 64 hexadecimal digits"))
            .build();
        let components = document.components.get_or_insert_default();
        components.add_security_scheme("key", SecurityScheme::Http(key));
        let operations = document.paths.paths.iter_mut().flat_map(|(path, item)| {
            let operations =
                [&mut item.get, &mut item.post, &mut item.delete].into_iter().flatten();
            operations.map(|operation| (error_schema(path), operation))
        });
        // Public routes set `security`; they have no error responses in common.
        for (schema, operation) in operations.filter(|(_, it)| it.security.is_none()) {
            for (status, description) in
                [("4XX", "The request was rejected"), ("5XX", "The server failed: try again")]
            {
                let schema = Ref::from_schema_name(schema);
                let content = ContentBuilder::new().schema(Some(schema)).build();
                let response = ResponseBuilder::new().description(description);
                let response = response.content("application/json", content).build();
                operation.responses.responses.insert(status.to_owned(), response.into());
            }
        }
    }
}

/// Returns the schema of the errors of a path.
fn error_schema(path: &str) -> &'static str {
    if path.starts_with(anthropic::PATH) { "MessagesErrorResponse" } else { "ErrorResponse" }
}

/// Returns this document, with the public URL of the service if it is known.
#[utoipa::path(get, path = "/openapi.json", tag = "service", security(()),
    responses((status = 200, description = "OpenAPI document")))]
pub(crate) async fn document(State(app): State<App>) -> Json<openapi::OpenApi> {
    let mut document = Document::openapi();
    document.servers = app.public_url().map(|url| vec![Server::new(url)]);
    Json(document)
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
    fn document_describes_exactly_the_routes() {
        let document = described();
        let paths = document["paths"].as_object().expect("paths");
        let described: BTreeSet<(String, String)> = paths
            .iter()
            .flat_map(|(path, item)| {
                let methods = item.as_object().expect("a path's methods").keys();
                methods.map(move |method| (method.to_uppercase(), path.clone()))
            })
            .collect();
        let api = || ROUTES.iter().filter(|route| !route.is_page());
        let routed: BTreeSet<(String, String)> =
            api().map(|route| (route.method.to_string(), route.path.replace("{*", "{"))).collect();
        assert_eq!(described, routed);
        for route in api() {
            let method = route.method.as_str().to_lowercase();
            let operation = &paths[&route.path.replace("{*", "{")][method];
            let is_open = operation["security"] == json!([{}]);
            assert_eq!(is_open, route.access == Access::Public, "{}", route.path);
            for status in ["4XX", "5XX"] {
                let schema =
                    &operation["responses"][status]["content"]["application/json"]["schema"];
                let reference = error_schema(route.path);
                let reference = json!({ "$ref": format!("#/components/schemas/{reference}") });
                assert_eq!(*schema == reference, !is_open, "{status} of {}", route.path);
            }
        }
    }

    #[test]
    fn every_described_parameter_is_known_to_the_parser() {
        let document = described();
        let documented = [
            ("ChatRequest", Endpoint::Chat),
            ("TextRequest", Endpoint::Completions),
            ("EmbeddingsRequest", Endpoint::Embeddings),
            ("MessagesRequest", Endpoint::Messages),
        ];
        for (name, endpoint) in documented {
            let schema = &document["components"]["schemas"][name];
            let properties = schema["properties"].as_object().expect("properties");
            if endpoint != Endpoint::Embeddings {
                assert!(properties.len() > 10, "{schema}");
                let seed = properties["seed"]["description"].as_str().expect("a text");
                assert!(seed.starts_with("The same seed gives the same answer."), "{seed}");
            }
            assert!(!schema["required"].as_array().expect("a list").contains(&json!("logprobs")));
            for property in properties.keys().filter(|name| !name.starts_with("stream")) {
                // A wrong type for every parameter: the error tells whether the parser knows it.
                let value = json!({ "of": ["no", "type"] });
                let body = Map::from_iter([(property.clone(), value)]);
                match parse_body(endpoint, body) {
                    Ok(_) => {}
                    // A parameter that is an object may not know the field in it.
                    Err(error) => assert_ne!(
                        (error.code, &error.path),
                        ("unknown_parameter", property),
                        "{property}"
                    ),
                }
            }
        }
    }
}
