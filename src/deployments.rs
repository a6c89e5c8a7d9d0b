//! Checks that the container files of `docker/` fit this command line: every argument is accepted, and
//! every environment variable is one that the command reads.

use std::{collections::BTreeSet, fs, path::PathBuf};

use clap::CommandFactory as _;
use serde_json::Value;

use crate::{Cli, settings};

/// Variables that the program or its libraries read besides those of options, and those of NVIDIA's
/// container runtime.
const OTHER_VARIABLES: [&str; 8] = [
    "RUST_LOG",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "SSL_CERT_FILE",
    "TRITMILL_CONFIG",
    "CUDA_CACHE_PATH",
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
    "NVIDIA_REQUIRE_CUDA",
];

/// The key of the Secret that manifests give to other variables.
const DIRECT_URL: &str = "DATABASE_URL_DIRECT";

/// A container that runs this program.
struct Container {
    /// Where it is defined.
    place: String,
    arguments: Vec<String>,
    variables: Vec<String>,
}

fn docker() -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "docker"].iter().collect()
}

fn documents(name: &str) -> Vec<Value> {
    let text = fs::read_to_string(docker().join(name)).expect("a file of docker/");
    serde_saphyr::from_multiple(&text).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn manifests() -> Vec<(String, Value)> {
    let entries = fs::read_dir(docker().join("kubernetes")).expect("the folder of manifests");
    let names = entries.map(|entry| entry.expect("an entry").file_name());
    let names = names.map(|name| format!("kubernetes/{}", name.to_string_lossy()));
    // Made by operators from the example.
    let names = names.filter(|name| !name.ends_with("/secret.yaml"));
    names
        .flat_map(|name| documents(&name).into_iter().map(move |one| (name.clone(), one)))
        .collect()
}

fn words(value: &Value) -> Vec<String> {
    let words = value.as_array().map(Vec::as_slice).unwrap_or_default();
    words.iter().map(|word| word.as_str().expect("arguments are strings").to_owned()).collect()
}

/// Returns every container in a Kubernetes object, at any depth.
fn containers(place: &str, value: &Value, found: &mut Vec<Container>) {
    let names = |list: &Value| -> Vec<String> {
        let list = list.as_array().map(Vec::as_slice).unwrap_or_default();
        list.iter().filter_map(|one| one["name"].as_str().map(str::to_owned)).collect()
    };
    match value {
        Value::Object(fields) => {
            for key in ["initContainers", "containers"] {
                for container in fields.get(key).and_then(Value::as_array).into_iter().flatten() {
                    found.push(Container {
                        place: place.to_owned(),
                        arguments: words(&container["args"]),
                        variables: names(&container["env"]),
                    });
                }
            }
            fields.values().for_each(|value| containers(place, value, found));
        }
        Value::Array(values) => values.iter().for_each(|value| containers(place, value, found)),
        _ => {}
    }
}

/// Returns the containers of `compose.yaml` that run this program, with the defaults of its settings.
fn services() -> Vec<Container> {
    let compose = documents("compose.yaml").remove(0);
    let services = compose["services"].as_object().expect("services");
    let own = services.iter().filter(|(_, service)| {
        service["image"].as_str().is_some_and(|image| image.starts_with("${TRITMILL_IMAGE"))
    });
    own.map(|(name, service)| Container {
        place: format!("compose.yaml, {name}"),
        arguments: words(&service["command"]).iter().map(|word| with_defaults(word)).collect(),
        variables: service["environment"].as_object().expect("variables").keys().cloned().collect(),
    })
    .collect()
}

/// Replaces `${NAME:-DEFAULT}` by the default.
fn with_defaults(word: &str) -> String {
    let inner = word.strip_prefix("${").and_then(|rest| rest.strip_suffix('}'));
    let default = inner.and_then(|inner| inner.split_once(":-"));
    default.map_or(word, |(_, default)| default).to_owned()
}

/// Returns the variables that the options of a command read.
fn variables_of(command: &clap::Command, arguments: &[String]) -> BTreeSet<String> {
    let options = command.get_arguments().filter_map(|option| option.get_env());
    let own = options.map(|name| name.to_string_lossy().into_owned());
    let sub = arguments.first().and_then(|name| command.find_subcommand(name));
    let below = sub.map(|sub| variables_of(sub, &arguments[1..])).unwrap_or_default();
    own.chain(below).collect()
}

fn command() -> clap::Command {
    settings::apply(Cli::command()).expect("no settings file is here")
}

fn check(container: &Container) {
    let Container { place, arguments, variables } = container;
    let line = [&["tritmill".to_owned()][..], arguments].concat();
    let parsed = command().try_get_matches_from(line);
    assert!(parsed.is_ok(), "{place}: {}", parsed.expect_err("not accepted"));
    let known = variables_of(&command(), arguments);
    for name in variables {
        let is_read = known.contains(name) || OTHER_VARIABLES.contains(&name.as_str());
        assert!(is_read, "{place}: tritmill {} does not read {name}", arguments.join(" "));
    }
}

#[test]
fn kubernetes_arguments_and_variables_are_known() {
    let mut found = Vec::new();
    for (name, object) in manifests() {
        containers(&name, &object, &mut found);
    }
    assert!(found.len() >= 5, "{} containers", found.len());
    found.iter().for_each(check);
}

#[test]
fn compose_arguments_and_variables_are_known() {
    let services = services();
    let names: Vec<&str> = services.iter().map(|service| service.place.as_str()).collect();
    assert!(names.len() >= 5, "{names:?}");
    for service in &services {
        // Every service has the URLs of both servers.
        let both = ["REDIS_URL".to_owned(), "DATABASE_URL".to_owned()];
        let variables = service.variables.iter().filter(|name| !both.contains(name));
        let (place, arguments) = (service.place.clone(), service.arguments.clone());
        check(&Container { place, arguments, variables: variables.cloned().collect() });
    }
}

#[test]
fn variables_of_secrets_and_of_the_image_are_known() {
    let worker = variables_of(&command(), &["worker".to_owned()]);
    let secret = documents("kubernetes/secret.example.yaml").remove(0);
    let keys = secret["stringData"].as_object().expect("variables").keys().cloned();
    let keys = keys.filter(|key| key != DIRECT_URL);
    let dockerfile = fs::read_to_string(docker().join("Dockerfile")).expect("the Dockerfile");
    let (_, runtime) = dockerfile.split_once("AS runtime").expect("the stage of the image");
    let words = runtime.split_whitespace().filter_map(|word| word.split_once('='));
    let is_variable = |name: &&str| name.chars().all(|c| c.is_ascii_uppercase() || c == '_');
    let set = words.map(|(name, _)| name).filter(is_variable).map(str::to_owned);
    let names: Vec<String> = keys.chain(set).collect();
    assert!(names.iter().any(|name| name == "TRITMILL_DEVICE"), "{names:?}");
    for name in names {
        let is_read = worker.contains(&name) || OTHER_VARIABLES.contains(&name.as_str());
        assert!(is_read, "a worker does not read {name}");
    }
}

#[test]
fn unknown_arguments_and_variables_are_found() {
    let container = |arguments: &[&str], variable: &str| Container {
        place: "here".to_owned(),
        arguments: arguments.iter().map(|&word| word.to_owned()).collect(),
        variables: vec![variable.to_owned()],
    };
    check(&container(&["worker", "--drain", "2"], "TRITMILL_LEASE"));
    for wrong in [
        container(&["worker", "--drian", "2"], "REDIS_URL"),
        container(&["worker", "--drain", "soon"], "REDIS_URL"),
        container(&["worker", "--drain", "2"], "TRITMILL_LAESE"),
        container(&["migrate"], "TRITMILL_LEASE"),
    ] {
        let checked = std::panic::catch_unwind(|| check(&wrong));
        assert!(checked.is_err(), "{:?} {:?}", wrong.arguments, wrong.variables);
    }
}
