//! Requests to the Kubernetes API: nodes and one pod, with time limits.
//!
//! The client is built anew after a failure that may come of stale credentials or a broken connection, so that
//! rotated tokens and authorities count at once.

use std::fmt;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures::io::AsyncBufReadExt;
use futures::{Stream, StreamExt};
use hyper::{Method, Request, Uri};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::Status;
use kube::{Client, Config, Error};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use tokio::time::timeout;

use super::annotations::Annotations;
use super::node::{Node, NodeList};
use crate::gojson::push_compact;
use crate::subnet::SubnetError;

/// Nodes per page: their JSON is up to 20 kB each, and only one page is in memory at a time.
const PAGE: u32 = 200;

/// How long the API may keep us waiting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Limit for one request that is no watch.
    pub request: Duration,
    /// A watch without any event, bookmarks included, is dead after this time. The API server sends a bookmark a
    /// minute, so a connection that died without a sign is noticed.
    pub silence: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { request: Duration::from_secs(15), silence: Duration::from_secs(150) }
    }
}

/// Where the API is and who we are there.
#[derive(Debug, Clone)]
pub(super) struct Source {
    /// Wins over the server in the file; without a file it means no credentials.
    pub(super) url: Option<String>,
    pub(super) kubeconfig: Option<PathBuf>,
}

/// Why a request failed.
#[derive(Debug)]
pub(super) enum ApiError {
    /// The server said no.
    Status { code: u16, reason: String, message: String },
    /// There was no usable answer.
    Broken(String),
    /// None in this time.
    TimedOut(Duration),
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ApiError::Status { code, reason, message } => {
                let text = if message.is_empty() { reason } else { message };
                write!(f, "{text} (HTTP status {code})")
            }
            ApiError::Broken(text) => f.write_str(text),
            ApiError::TimedOut(limit) => write!(f, "no answer within {limit:?}"),
        }
    }
}

impl std::error::Error for ApiError {}

impl From<Status> for ApiError {
    fn from(status: Status) -> Self {
        ApiError::Status { code: status.code, reason: status.reason, message: status.message }
    }
}

impl ApiError {
    pub(super) fn code(&self) -> u16 {
        match self {
            ApiError::Status { code, .. } => *code,
            _ => 0,
        }
    }

    /// Whether the history asked for is gone and everything must be listed again.
    pub(super) fn is_gone(&self) -> bool {
        matches!(self, ApiError::Status { code: 410, .. })
            || matches!(self, ApiError::Status { reason, .. } if reason == "Expired")
    }

    /// With what was being done. A refusal names the right that is missing.
    pub(super) fn during(self, verb: &str, resource: &str) -> SubnetError {
        let what = match self.code() {
            403 => format!("not allowed to {verb} {resource} (RBAC of the service account)"),
            _ => format!("{verb} {resource}"),
        };
        SubnetError::Failed { what, source: Box::new(self) }
    }
}

/// The API.
#[derive(Debug)]
pub(super) struct Api {
    source: Source,
    limits: Limits,
    client: Mutex<Option<KeptClient>>,
}

#[derive(Clone)]
struct KeptClient(Client);

impl fmt::Debug for KeptClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Client")
    }
}

/// What a watch delivers.
#[derive(Debug)]
pub(super) enum NodeEvent {
    /// A node that is new or changed.
    Put(Node),
    /// A node that is gone, as it was last.
    Deleted(Node),
    /// Nothing happened up to this resource version.
    Bookmark(String),
}

/// One line of a watch.
#[derive(Deserialize)]
struct Line {
    #[serde(rename = "type")]
    kind: String,
    object: Box<RawValue>,
}

impl NodeEvent {
    fn parse(line: &str) -> Result<Result<NodeEvent, ApiError>, serde_json::Error> {
        let Line { kind, object } = serde_json::from_str(line)?;
        if kind == "ERROR" {
            let status: Status = serde_json::from_str(object.get())?;
            return Ok(Err(status.into()));
        }
        let node: Node = serde_json::from_str(object.get())?;
        Ok(Ok(match kind.as_str() {
            "DELETED" => NodeEvent::Deleted(node),
            "BOOKMARK" => NodeEvent::Bookmark(node.metadata.resource_version),
            _ => NodeEvent::Put(node),
        }))
    }
}

impl Api {
    pub(super) fn new(source: Source, limits: Limits) -> Self {
        Api { source, limits, client: Mutex::new(None) }
    }

    /// Where it is, for messages.
    pub(super) fn name(&self) -> String {
        match (&self.source.url, &self.source.kubeconfig) {
            (Some(url), _) => format!("Kubernetes API at {url}"),
            (None, Some(path)) => format!("Kubernetes API of {}", path.display()),
            (None, None) => "Kubernetes API of this cluster".to_owned(),
        }
    }

    /// All nodes in pages; `each` sees every node once. Returns the resource version to watch from.
    pub(super) async fn list_nodes(
        &self,
        selector: Option<&str>,
        mut each: impl FnMut(Node),
    ) -> Result<String, ApiError> {
        let mut next: Option<String> = None;
        loop {
            let mut query = format!("limit={PAGE}");
            if let Some(selector) = selector {
                query += &format!("&fieldSelector={}", escape(selector));
            }
            if let Some(token) = &next {
                query += &format!("&continue={}", escape(token));
            }
            let page: NodeList = self.get(&format!("/api/v1/nodes?{query}")).await?;
            page.items.into_iter().for_each(&mut each);
            next = page.metadata.next.filter(|token| !token.is_empty());
            if next.is_none() {
                return Ok(page.metadata.resource_version);
            }
        }
    }

    /// Follows the nodes from a resource version on. The stream ends when the server ends the watch, and with an
    /// error when it breaks or falls silent.
    pub(super) async fn watch_nodes(
        &self,
        selector: Option<&str>,
        version: &str,
    ) -> Result<impl Stream<Item = Result<NodeEvent, ApiError>> + Send + use<>, ApiError> {
        // The server ends the watch after this time; spread, so that not all nodes come back at once.
        let seconds = rand::random_range(300..600);
        let selector =
            selector.map(|selector| format!("&fieldSelector={}", escape(selector))).unwrap_or_default();
        let path = format!(
            "/api/v1/nodes?allowWatchBookmarks=true&resourceVersion={}&timeoutSeconds={seconds}&watch=true{selector}",
            escape(version)
        );
        let request = request(Method::GET, &path, None, Vec::new())?;
        let client = self.client().await?;
        let stream = self.limited(client.request_stream(request)).await?;
        let lines = Box::pin(stream.lines());
        let silence = self.limits.silence;
        Ok(futures::stream::unfold(Some(lines), move |lines| async move {
            let mut lines = lines?;
            loop {
                let broken = |text: String| Some((Err(ApiError::Broken(text)), None));
                return match timeout(silence, lines.next()).await {
                    Ok(None) => None,
                    Ok(Some(Ok(line))) if line.is_empty() => continue,
                    Ok(Some(Ok(line))) => match NodeEvent::parse(&line) {
                        Ok(Ok(event)) => Some((Ok(event), Some(lines))),
                        Ok(Err(error)) => Some((Err(error), None)),
                        // One node that does not decode is its own problem.
                        Err(error) => {
                            tracing::warn!("ignoring a node event that cannot be read: {error}");
                            continue;
                        }
                    },
                    Ok(Some(Err(error))) => broken(chain(&error)),
                    Err(_) => broken(format!("the watch was silent for {silence:?}")),
                };
            }
        }))
    }

    pub(super) async fn node(&self, name: &str) -> Result<Node, ApiError> {
        self.get(&format!("/api/v1/nodes/{}", escape(name))).await
    }

    /// The node a pod runs on.
    pub(super) async fn node_of_pod(&self, namespace: &str, name: &str) -> Result<String, ApiError> {
        #[derive(Deserialize)]
        struct Pod {
            spec: PodSpec,
        }
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct PodSpec {
            #[serde(default)]
            node_name: String,
        }
        let path = format!("/api/v1/namespaces/{}/pods/{}", escape(namespace), escape(name));
        let pod: Pod = self.get(&path).await?;
        Ok(pod.spec.node_name)
    }

    /// Changes annotations of a node, through its status as flannel does, since that is what its role allows.
    pub(super) async fn patch_annotations(
        &self,
        node: &str,
        annotations: &Annotations,
    ) -> Result<(), ApiError> {
        let mut body = String::new();
        push_compact(
            &mut body,
            &serde_json::json!({ "metadata": { "annotations": annotations } }).to_string(),
        );
        self.patch_status(node, body).await
    }

    /// Tells Kubernetes that the node's network is there.
    pub(super) async fn patch_network_available(&self, node: &str, now: &str) -> Result<(), ApiError> {
        // The members in flannel's order, byte for byte.
        let body = format!(
            r#"{{"status":{{"conditions":[{{"type":"NetworkUnavailable","status":"False","lastHeartbeatTime":"{now}","lastTransitionTime":"{now}","reason":"FlannelIsUp","message":"Flannel is running on this node"}}]}}}}"#
        );
        self.patch_status(node, body).await
    }

    async fn patch_status(&self, node: &str, body: String) -> Result<(), ApiError> {
        let path = format!("/api/v1/nodes/{}/status", escape(node));
        let kind = "application/strategic-merge-patch+json";
        let request = request(Method::PATCH, &path, Some(kind), body.into_bytes())?;
        let client = self.client().await?;
        self.limited(client.request_text(request)).await.map(drop)
    }

    async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ApiError> {
        let request = request(Method::GET, path, None, Vec::new())?;
        let client = self.client().await?;
        self.limited(client.request::<T>(request)).await
    }

    /// Waits for an answer, and forgets the client when another one might fare better.
    async fn limited<T>(&self, answer: impl Future<Output = Result<T, Error>>) -> Result<T, ApiError> {
        let error = match timeout(self.limits.request, answer).await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) => api_error(error),
            Err(_) => ApiError::TimedOut(self.limits.request),
        };
        if matches!(error.code(), 0 | 401) {
            *self.client.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
        Err(error)
    }

    async fn client(&self) -> Result<Client, ApiError> {
        let kept = self.client.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(KeptClient(client)) = kept {
            return Ok(client);
        }
        let mut config = self.config().await?;
        config.connect_timeout = Some(Duration::from_secs(5));
        config.default_retry = false;
        let client = Client::try_from(config).map_err(api_error)?;
        let mut kept = self.client.lock().unwrap_or_else(PoisonError::into_inner);
        *kept = Some(KeptClient(client.clone()));
        Ok(client)
    }

    async fn config(&self) -> Result<Config, ApiError> {
        let broken = |error: &dyn std::error::Error| ApiError::Broken(chain(error));
        let url: Option<Uri> = match &self.source.url {
            Some(text) => {
                let url = text.parse();
                Some(url.map_err(|e| ApiError::Broken(format!("--kube-api-url {text:?}: {e}")))?)
            }
            None => None,
        };
        match (&self.source.kubeconfig, url) {
            (Some(path), url) => {
                let file = Kubeconfig::read_from(path).map_err(|e| broken(&e))?;
                let options = KubeConfigOptions::default();
                let mut config =
                    Config::from_custom_kubeconfig(file, &options).await.map_err(|e| broken(&e))?;
                config.cluster_url = url.unwrap_or(config.cluster_url);
                Ok(config)
            }
            (None, Some(url)) => Ok(Config::new(url)),
            (None, None) => Config::incluster().map_err(|e| broken(&e)),
        }
    }
}

fn request(
    method: Method,
    path: &str,
    content_type: Option<&str>,
    body: Vec<u8>,
) -> Result<Request<Vec<u8>>, ApiError> {
    let mut builder = Request::builder().method(method).uri(path).header("Accept", "application/json");
    if let Some(content_type) = content_type {
        builder = builder.header("Content-Type", content_type);
    }
    builder.body(body).map_err(|e| ApiError::Broken(e.to_string()))
}

fn api_error(error: Error) -> ApiError {
    match error {
        Error::Api(status) => (*status).into(),
        error => ApiError::Broken(chain(&error)),
    }
}

/// An error's text with all its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}

/// Percent-encodes what may not stand in a path segment or query value.
fn escape(text: &str) -> String {
    use std::fmt::Write as _;
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => out.push(byte.into()),
            _ => drop(write!(out, "%{byte:02X}")),
        }
    }
    out
}
