//! Checks of the Kubernetes manifests without a cluster. The types are generated from the schemas that
//! Kubernetes and KEDA publish. A manifest that is read into its type and written again is the same
//! manifest: otherwise it has a field that the schema does not have, or lacks one that it requires.

use std::{collections::BTreeMap, fs, path::PathBuf};

use k8s_openapi::api::{
    apps::v1::Deployment,
    batch::v1::{CronJob, Job},
    core::v1::{Secret, Service, ServiceAccount},
    policy::v1::PodDisruptionBudget,
    rbac::v1::{Role, RoleBinding},
};
use kcr_keda_sh::v1alpha1::{
    scaledobjects::ScaledObject, triggerauthentications::TriggerAuthentication,
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

/// Seconds from the end of a drain to the end of a worker, if no step is slow: the hand-back, and closing
/// its connections.
const AFTER_DRAIN_S: i64 = 12;

fn folder() -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "..", "docker", "kubernetes"].iter().collect()
}

fn objects(file: &str) -> Vec<Value> {
    let text = fs::read_to_string(folder().join(file)).expect("a manifest");
    serde_saphyr::from_multiple(&text).unwrap_or_else(|error| panic!("{file}: {error}"))
}

/// Returns the objects of all manifests, each with the name of its file.
fn manifests() -> Vec<(String, Value)> {
    let entries = fs::read_dir(folder()).expect("the folder of manifests");
    let names = entries.map(|entry| entry.expect("an entry").file_name());
    // secret.yaml is made by operators from the example.
    let names = names.map(|name| name.to_string_lossy().into_owned());
    let names = names.filter(|name| name != "secret.yaml");
    names.flat_map(|name| objects(&name).into_iter().map(move |one| (name.clone(), one))).collect()
}

/// Compares a manifest with what its type keeps of it.
fn check_as<T: Serialize + DeserializeOwned>(manifest: &Value) -> Result<(), String> {
    let typed: T = serde_json::from_value(manifest.clone()).map_err(|error| error.to_string())?;
    let kept = serde_json::to_value(typed).map_err(|error| error.to_string())?;
    compare(manifest, &kept, "")
}

/// Names the first field that only one of both has.
fn compare(manifest: &Value, kept: &Value, path: &str) -> Result<(), String> {
    match (manifest, kept) {
        (Value::Object(manifest), Value::Object(kept)) => {
            if let Some(name) = manifest.keys().find(|name| !kept.contains_key(*name)) {
                return Err(format!("unknown field {path}.{name}"));
            }
            if let Some(name) = kept.keys().find(|name| !manifest.contains_key(*name)) {
                return Err(format!("no field {path}.{name}"));
            }
            manifest.iter().try_for_each(|(name, value)| {
                compare(value, &kept[name], &format!("{path}.{name}"))
            })
        }
        (Value::Array(manifest), Value::Array(kept)) if manifest.len() == kept.len() => {
            let pairs = manifest.iter().zip(kept).enumerate();
            pairs.into_iter().try_for_each(|(index, (manifest, kept))| {
                compare(manifest, kept, &format!("{path}[{index}]"))
            })
        }
        _ if manifest == kept => Ok(()),
        _ => Err(format!("{path} is read as {kept}")),
    }
}

fn check(manifest: &Value) -> Result<(), String> {
    let text = |name: &str| manifest[name].as_str().unwrap_or_default();
    match (text("apiVersion"), text("kind")) {
        ("apps/v1", "Deployment") => check_as::<Deployment>(manifest),
        ("batch/v1", "Job") => check_as::<Job>(manifest),
        ("batch/v1", "CronJob") => check_as::<CronJob>(manifest),
        ("v1", "Secret") => check_as::<Secret>(manifest),
        ("v1", "Service") => check_as::<Service>(manifest),
        ("v1", "ServiceAccount") => check_as::<ServiceAccount>(manifest),
        ("policy/v1", "PodDisruptionBudget") => check_as::<PodDisruptionBudget>(manifest),
        ("rbac.authorization.k8s.io/v1", "Role") => check_as::<Role>(manifest),
        ("rbac.authorization.k8s.io/v1", "RoleBinding") => check_as::<RoleBinding>(manifest),
        ("keda.sh/v1alpha1", "ScaledObject") => check_as::<ScaledObject>(manifest),
        ("keda.sh/v1alpha1", "TriggerAuthentication") => {
            check_as::<TriggerAuthentication>(manifest)
        }
        (version, kind) => Err(format!("no schema for {kind} of {version}")),
    }
}

#[test]
fn manifests_follow_the_published_schemas() {
    let manifests = manifests();
    assert!(manifests.len() >= 12, "{} objects", manifests.len());
    for (file, manifest) in &manifests {
        check(manifest).unwrap_or_else(|problem| panic!("{file}, {}: {problem}", manifest["kind"]));
    }
}

/// Returns a manifest with another value at a place.
fn with(file: &str, place: &str, value: Value) -> Value {
    let is_there = |manifest: &Value| manifest.pointer(place).is_some();
    let mut manifest = objects(file).into_iter().find(is_there).expect("the place is there");
    *manifest.pointer_mut(place).expect("found above") = value;
    manifest
}

#[test]
fn misspelled_missing_and_mistyped_fields_are_found() {
    let container = "/spec/template/spec/containers/0";
    let scaled = "/spec/scaleTargetRef";
    for (file, place, value, problem) in [
        (
            "worker.yaml",
            "/spec/strategy",
            serde_json::json!({ "rollingUpdat": {} }),
            "rollingUpdat",
        ),
        ("worker.yaml", "/spec/selector", serde_json::json!({ "matchLabel": {} }), "matchLabel"),
        ("worker.yaml", container, serde_json::json!({ "image": "tritmill:0.1.0" }), ".name"),
        ("worker.yaml", "/spec/template/spec/terminationGracePeriodSeconds", "60".into(), "60"),
        ("admin.yaml", "/spec/replicas", "2".into(), "2"),
        ("scale.yaml", scaled, serde_json::json!({ "nam": "tritmill-worker" }), "name"),
        (
            "scale.yaml",
            "/spec/advanced",
            serde_json::json!({ "horizontalPodAutoscaler": {} }),
            "horizontalPodAutoscaler",
        ),
        (
            "deletion-cost.yaml",
            "/rules/0",
            serde_json::json!({ "verbs": ["patch"], "resource": [] }),
            "resource",
        ),
    ] {
        let found = check(&with(file, place, value)).expect_err(place);
        assert!(found.contains(problem), "{file}, {place}: {found}");
    }
}

/// Returns the pod templates of all manifests, each with the name of its object.
fn pods() -> Vec<(String, Value)> {
    let manifests = manifests().into_iter().filter_map(|(_, manifest)| {
        let name = manifest["metadata"]["name"].as_str()?.to_owned();
        let places = ["/spec/template", "/spec/jobTemplate/spec/template"];
        let template = places.iter().find_map(|place| manifest.pointer(place))?.clone();
        Some((name, template))
    });
    manifests.collect()
}

#[test]
fn pods_run_without_rights() {
    for (name, pod) in pods() {
        let spec = &pod["spec"];
        assert_eq!(spec["securityContext"]["runAsNonRoot"], true, "{name}");
        // Only the account that sets deletion costs has a token.
        let has_token = spec["automountServiceAccountToken"] != false;
        assert_eq!(has_token, name == "tritmill-deletion-cost", "{name}");
        for container in spec["containers"].as_array().expect("containers") {
            let context = &container["securityContext"];
            assert_eq!(context["readOnlyRootFilesystem"], true, "{name}");
            assert_eq!(context["allowPrivilegeEscalation"], false, "{name}");
            assert_eq!(context["capabilities"]["drop"], serde_json::json!(["ALL"]), "{name}");
            let image = container["image"].as_str().expect("an image");
            assert!(image.split_once(':').is_some_and(|(_, tag)| tag != "latest"), "{image}");
        }
    }
    let role = objects("deletion-cost.yaml").into_iter().find(|object| object["kind"] == "Role");
    let rules =
        serde_json::json!([{ "apiGroups": [""], "resources": ["pods"], "verbs": ["patch"] }]);
    assert_eq!(role.expect("a role")["rules"], rules);
}

#[test]
fn selectors_and_names_lead_to_objects() {
    let manifests = manifests();
    let mut names: BTreeMap<&str, Vec<&Value>> = BTreeMap::new();
    for (_, manifest) in &manifests {
        let kind = manifest["kind"].as_str().unwrap_or_default();
        names.entry(kind).or_default().push(&manifest["metadata"]["name"]);
    }
    let exists = |kind: &str, name: &Value| names.get(kind).is_some_and(|all| all.contains(&name));
    for (file, manifest) in &manifests {
        let spec = &manifest["spec"];
        match manifest["kind"].as_str() {
            Some("Deployment") => {
                let labels = &spec["template"]["metadata"]["labels"];
                assert_eq!(&spec["selector"]["matchLabels"], labels, "{file}");
            }
            Some("ScaledObject") => {
                assert!(exists("Deployment", &spec["scaleTargetRef"]["name"]), "{file}");
                let login = &spec["triggers"][0]["authenticationRef"]["name"];
                assert!(exists("TriggerAuthentication", login), "{file}");
            }
            Some("RoleBinding") => {
                assert!(exists("Role", &manifest["roleRef"]["name"]), "{file}");
                assert!(exists("ServiceAccount", &manifest["subjects"][0]["name"]), "{file}");
            }
            _ => {}
        }
    }
    for (name, pod) in pods() {
        let account = &pod["spec"]["serviceAccountName"];
        assert!(account.is_null() || exists("ServiceAccount", account), "{name}");
    }
}

/// Returns the keys of secrets that a manifest names.
fn secret_keys(manifest: &Value) -> Vec<&Value> {
    let of_secret = |name: &str| ["secretKeyRef", "secretTargetRef"].contains(&name);
    match manifest {
        Value::Object(fields) => {
            let found = fields.iter().filter(|(name, _)| of_secret(name)).flat_map(|(_, named)| {
                named.as_array().map_or_else(|| vec![named], |all| all.iter().collect())
            });
            found.map(|named| &named["key"]).chain(fields.values().flat_map(secret_keys)).collect()
        }
        Value::Array(values) => values.iter().flat_map(secret_keys).collect(),
        _ => Vec::new(),
    }
}

#[test]
fn secret_has_the_keys_that_manifests_name() {
    let secret = objects("secret.example.yaml").remove(0);
    let manifests = manifests();
    let named = |file: &str| {
        let of_file = manifests.iter().filter(|(name, _)| name == file);
        of_file.flat_map(|(_, manifest)| secret_keys(manifest)).cloned().collect::<Vec<_>>()
    };
    // Their drivers and locks need a connection without a pooler.
    assert_eq!(named("scale.yaml"), ["DATABASE_URL_DIRECT"]);
    assert_eq!(named("migrate.yaml"), ["DATABASE_URL_DIRECT"]);
    for key in manifests.iter().flat_map(|(_, manifest)| secret_keys(manifest)) {
        let key = key.as_str().expect("a key");
        assert!(secret["stringData"][key].is_string(), "the secret has no {key}");
    }
}

#[test]
fn workers_are_not_killed_before_they_are_drained() {
    let mut checked = Vec::new();
    for (name, pod) in pods() {
        let arguments = pod["spec"]["containers"][0]["args"].as_array().expect("arguments");
        let words: Vec<&str> = arguments.iter().filter_map(Value::as_str).collect();
        if words[0] != "worker" {
            continue;
        }
        let line = words.join(" ").replace('=', " ");
        let (_, drain) = line.split_once("--drain ").expect("each manifest states it");
        let drain: i64 = drain.split(' ').next().unwrap_or_default().parse().expect("seconds");
        let grace = pod["spec"]["terminationGracePeriodSeconds"].as_i64().expect("a period");
        assert!(grace >= drain + AFTER_DRAIN_S, "{name}: {grace} s for a drain of {drain} s");
        checked.push(name);
    }
    assert_eq!(checked.len(), 3, "{checked:?}");
}

#[test]
fn spot_workers_tolerate_the_nodes_that_they_select() {
    let spot = pods().into_iter().find(|(name, _)| name == "tritmill-worker-spot");
    let (_, spot) = spot.expect("a Deployment of spot workers");
    // Some clouds give a pod on a spot node no more time.
    assert!(spot["spec"]["terminationGracePeriodSeconds"].as_i64() <= Some(15));
    let selected = "/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms";
    let selected = spot.pointer(selected).and_then(Value::as_array).expect("terms");
    let tolerations = spot["spec"]["tolerations"].as_array().expect("tolerations");
    for toleration in tolerations {
        let fits = |term: &Value| {
            let one = &term["matchExpressions"][0];
            one["key"] == toleration["key"] && one["values"][0] == toleration["value"]
        };
        assert!(selected.iter().any(fits), "no node label for {toleration}");
    }
}

#[test]
fn gpu_workers_request_a_gpu() {
    let gpu = pods().into_iter().find(|(name, _)| name == "tritmill-worker-gpu");
    let (_, gpu) = gpu.expect("a Deployment of GPU workers");
    let container = &gpu["spec"]["containers"][0];
    assert_eq!(container["resources"]["limits"]["nvidia.com/gpu"], "1");
    assert!(
        container["args"].as_array().is_some_and(|words| words.contains(&"--device=cuda:0".into()))
    );
}
