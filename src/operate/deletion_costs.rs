//! `tritmill workers deletion-costs`: tells Kubernetes which pods to delete first when it scales workers
//! down.
//!
//! A ReplicaSet deletes the pods with the lowest cost first; the cost is an annotation of the pod. Only
//! something with rights to the Kubernetes API can write it. So that workers need no such rights, this
//! command does it for all of them: a CronJob runs it (`docker/kubernetes/deletion-cost.yaml`). The name
//! of a pod is the host name that its worker reports.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use reqwest::{Method, StatusCode, header::CONTENT_TYPE};
use serde_json::json;
use tritmill_client::http::{AddressPolicy, HttpClient};
use tritmill_queue::store::{Workers as _, workers::Worker};

use super::with_store;
use crate::{output, servers::Servers};

/// The annotation that a ReplicaSet sorts its pods by.
const ANNOTATION: &str = "controller.kubernetes.io/pod-deletion-cost";
/// Longest wait for an answer of the API.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// Longest name of a pod.
const NAME_LENGTH_MAX: usize = 253;

/// Tell Kubernetes how many jobs each worker's pod runs, so that it deletes idle ones first.
///
/// Sets the annotation controller.kubernetes.io/pod-deletion-cost of each pod to the number of running
/// jobs in the worker's latest heartbeat. Workers outside the namespace's pods are left out.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tritmill workers deletion-costs        # in a pod, see docker/kubernetes/deletion-cost.yaml
  kubectl proxy &
  tritmill workers deletion-costs --kubernetes http://127.0.0.1:8001 --account ./account")]
pub struct DeletionCostArguments {
    /// URL of the Kubernetes API
    #[arg(long, value_name = "URL", default_value = "https://kubernetes.default.svc")]
    kubernetes: String,
    /// Folder with `namespace`, `token` and `ca.crt` of a service account that may patch pods
    #[arg(
        long,
        value_name = "FOLDER",
        default_value = "/var/run/secrets/kubernetes.io/serviceaccount"
    )]
    account: PathBuf,
    #[command(flatten)]
    servers: Servers,
}

/// Runs the command.
pub fn run(arguments: &DeletionCostArguments) -> anyhow::Result<ExitCode> {
    let pods = Pods::from_account(&arguments.kubernetes, &arguments.account)?;
    with_store(&arguments.servers, async |store| {
        let costs = costs(&store.workers().await?);
        let (all, mut failed) = (costs.len(), 0);
        for (host, running) in costs {
            match pods.set_cost(&host, running).await {
                Ok(Answer::Set) => output::line(format_args!("{host} {running}"))?,
                Ok(Answer::NoPod) => {}
                Ok(Answer::Refused(status)) => bail!(
                    "cannot set the cost of pod {host}: {status}: the service account may not patch pods"
                ),
                Err(error) => {
                    note!("cannot set the cost of pod {host}: {}", output::one_line(&error));
                    failed += 1;
                }
            }
        }
        ensure!(failed == 0, "{failed} of {all} pods have no new cost");
        Ok(ExitCode::SUCCESS)
    })
}

/// Returns the running jobs of each host with a live worker.
fn costs(workers: &[Worker]) -> BTreeMap<String, u32> {
    let mut costs = BTreeMap::new();
    for worker in workers.iter().filter(|worker| worker.is_alive()) {
        let beat = &worker.heartbeat;
        if is_pod_name(&beat.host) {
            let cost: &mut u32 = costs.entry(beat.host.clone()).or_default();
            *cost = cost.saturating_add(beat.running);
        }
    }
    costs
}

/// Returns whether a host name can be the name of a pod; others would change the URL.
fn is_pod_name(host: &str) -> bool {
    let allowed = |c: u8| matches!(c, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.');
    let is_bounded = !host.is_empty() && host.len() <= NAME_LENGTH_MAX;
    is_bounded && host.bytes().all(allowed) && !host.starts_with('.')
}

/// What the API says of a new cost.
enum Answer {
    Set,
    NoPod,
    /// The service account may not set it, that of any pod.
    Refused(StatusCode),
}

/// The pods of a namespace.
struct Pods {
    client: HttpClient,
    /// URL that the name of a pod is appended to.
    url: String,
    token: String,
}

impl Pods {
    /// Reads a service account, as Kubernetes mounts it.
    fn from_account(api: &str, account: &Path) -> anyhow::Result<Self> {
        let read = |name: &str| {
            let path = account.join(name);
            let text = fs::read_to_string(&path)
                .with_context(|| format!("cannot read {} (--account)", path.display()))?;
            anyhow::Ok(text.trim().to_owned())
        };
        let (namespace, token) = (read("namespace")?, read("token")?);
        let authority = account.join("ca.crt");
        let authority = authority.exists().then_some(authority.as_path());
        let client = HttpClient::new(AddressPolicy::Any, authority)?;
        let api = api.trim_end_matches('/');
        Ok(Self { client, url: format!("{api}/api/v1/namespaces/{namespace}/pods/"), token })
    }

    /// Sets the cost of a pod.
    async fn set_cost(&self, pod: &str, cost: u32) -> anyhow::Result<Answer> {
        let patch = json!({ "metadata": { "annotations": { ANNOTATION: cost.to_string() } } });
        let request = self.client.request(Method::PATCH, &format!("{}{pod}", self.url))?;
        let request = request
            .bearer_auth(&self.token)
            .header(CONTENT_TYPE, "application/merge-patch+json")
            .body(patch.to_string());
        match self.client.send(request, ANSWER_WITHIN).await?.status() {
            StatusCode::NOT_FOUND => Ok(Answer::NoPod),
            status if status.is_success() => Ok(Answer::Set),
            status @ (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => {
                Ok(Answer::Refused(status))
            }
            status => bail!("the API answered {status}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_pods_become_parts_of_a_url() {
        assert!(is_pod_name("tritmill-worker-5c9d8b7f4-x2x7k"));
        let long = "a".repeat(NAME_LENGTH_MAX + 1);
        for name in ["", "..", "a/b", "a?b", "A", "a%2e", "..%2f", "a b", &long] {
            assert!(!is_pod_name(name), "{name}");
        }
    }
}
