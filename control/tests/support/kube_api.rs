//! A small Kubernetes API in this process: nodes with list, pages, watch, bookmarks, status patches, one pod; and
//! the faults a real one shows.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::server::TlsStream;

/// A request as it arrived.
#[derive(Debug, Clone)]
pub(crate) struct Recorded {
    pub(crate) method: String,
    /// With the query.
    pub(crate) path: String,
    pub(crate) content_type: String,
    pub(crate) body: String,
}

/// The server's certificate, which may be exchanged while it runs.
pub(crate) struct Tls(Mutex<TlsAcceptor>);

impl Tls {
    /// Certificate and key, PEM.
    pub(crate) fn new(cert: &Path, key: &Path) -> Arc<Tls> {
        Arc::new(Tls(Mutex::new(acceptor(cert, key))))
    }

    /// New connections get another certificate.
    pub(crate) fn exchange(&self, cert: &Path, key: &Path) {
        *self.0.lock().expect("acceptor") = acceptor(cert, key);
    }
}

fn acceptor(cert: &Path, key: &Path) -> TlsAcceptor {
    let cert = CertificateDer::from_pem_file(cert).expect("certificate");
    let key = PrivateKeyDer::from_pem_file(key).expect("key");
    let provider = Arc::new(tokio_rustls::rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.expect("protocol versions").with_no_client_auth().with_single_cert(vec![cert], key);
    TlsAcceptor::from(Arc::new(config.expect("a certificate with its key")))
}

struct TlsListener {
    listener: tokio::net::TcpListener,
    tls: Arc<Tls>,
}

impl axum::serve::Listener for TlsListener {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            let Ok((stream, from)) = self.listener.accept().await else { continue };
            let acceptor = self.tls.0.lock().expect("acceptor").clone();
            // A client that does not like the certificate is its own problem.
            let handshake = tokio::time::timeout(Duration::from_secs(5), acceptor.accept(stream));
            if let Ok(Ok(stream)) = handshake.await {
                return (stream, from);
            }
        }
    }

    fn local_addr(&self) -> std::io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}

/// The API; ends with the value.
pub(crate) struct KubeApi {
    state: Arc<Shared>,
    port: u16,
    task: tokio::task::JoinHandle<()>,
}

struct Shared {
    state: Mutex<State>,
    /// Tells watches that something happened.
    changed: watch::Sender<u64>,
}

#[derive(Default)]
struct State {
    nodes: BTreeMap<String, Value>,
    pods: BTreeMap<String, String>,
    version: u64,
    /// Watch events with their versions.
    history: Vec<(u64, Value)>,
    /// Watches from before this version are refused.
    oldest: u64,
    /// Whether such a refusal is an event of the stream instead of the answer's status.
    gone_as_event: bool,
    token: Option<String>,
    faults: Vec<Fault>,
    requests: Vec<Recorded>,
    /// Watches of an older generation end.
    generation: u64,
    /// Watches say nothing, as over a connection that died unnoticed.
    mute: bool,
    /// Nothing is answered at all.
    hangs: bool,
    uids: u64,
}

struct Fault {
    method: &'static str,
    path: &'static str,
    status: u16,
    times: usize,
}

impl KubeApi {
    /// On a free port of 127.0.0.1, without TLS.
    pub(crate) async fn start() -> KubeApi {
        Self::on(TcpListener::bind("127.0.0.1:0").expect("a free port"), None)
    }

    /// On a listening socket, which may belong to another network namespace; inside a runtime.
    pub(crate) fn on(listener: TcpListener, tls: Option<Arc<Tls>>) -> KubeApi {
        let state = Arc::new(Shared { state: Mutex::default(), changed: watch::channel(0).0 });
        let port = listener.local_addr().expect("its address").port();
        listener.set_nonblocking(true).expect("non-blocking");
        let listener = tokio::net::TcpListener::from_std(listener).expect("the runtime's listener");
        let shared = Arc::clone(&state);
        let router = Router::new().fallback(move |request| answer(Arc::clone(&shared), request));
        let task = tokio::spawn(async move {
            match tls {
                None => axum::serve(listener, router).await.expect("serve"),
                Some(tls) => axum::serve(TlsListener { listener, tls }, router).await.expect("serve"),
            }
        });
        KubeApi { state, port, task }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.state.lock().expect("state")
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.lock());
        self.state.changed.send_modify(|count| *count += 1);
    }

    /// Registers a node; `spec` as in the API.
    pub(crate) fn add_node(&self, name: &str, spec: Value, annotations: Value) {
        self.change(|state| {
            state.uids += 1;
            let node = json!({
                "kind": "Node", "apiVersion": "v1",
                "metadata": {"name": name, "uid": format!("uid-{}", state.uids), "annotations": annotations,
                             "labels": {"kubernetes.io/os": "linux"}},
                "spec": spec,
                "status": {"images": [{"names": ["x"], "sizeBytes": 1}],
                           "conditions": [{"type": "Ready", "status": "True"}]},
            });
            state.put("ADDED", name, node);
        });
    }

    /// Changes a node.
    pub(crate) fn edit_node(&self, name: &str, edit: impl FnOnce(&mut Value)) {
        self.change(|state| {
            let mut node = state.nodes[name].clone();
            edit(&mut node);
            state.put("MODIFIED", name, node);
        });
    }

    /// Makes a node other than it is without any event, before anybody watches.
    pub(crate) fn edit_node_quietly(&self, name: &str, edit: impl FnOnce(&mut Value)) {
        edit(self.lock().nodes.get_mut(name).expect("node"));
    }

    pub(crate) fn delete_node(&self, name: &str) {
        self.change(|state| {
            let mut node = state.nodes.remove(name).expect("node");
            state.version += 1;
            node["metadata"]["resourceVersion"] = state.version.to_string().into();
            state.history.push((state.version, json!({"type": "DELETED", "object": node})));
        });
    }

    pub(crate) fn add_pod(&self, namespace: &str, name: &str, node: &str) {
        self.lock().pods.insert(format!("{namespace}/{name}"), node.to_owned());
    }

    /// The node as it is.
    pub(crate) fn node(&self, name: &str) -> Value {
        self.lock().nodes[name].clone()
    }

    pub(crate) fn annotation(&self, node: &str, name: &str) -> Option<String> {
        let node = self.node(node);
        Some(node["metadata"]["annotations"].get(name)?.as_str()?.to_owned())
    }

    /// Status of the condition NetworkUnavailable.
    pub(crate) fn network_unavailable(&self, node: &str) -> Option<String> {
        let node = self.node(node);
        let conditions = node["status"]["conditions"].as_array()?;
        let found = conditions.iter().find(|condition| condition["type"] == "NetworkUnavailable")?;
        Some(found["status"].as_str()?.to_owned())
    }

    /// Tells all watches the current version, without any change.
    pub(crate) fn bookmark(&self) -> u64 {
        let mut version = 0;
        self.change(|state| {
            state.version += 1;
            version = state.version;
            let meta = json!({"resourceVersion": version.to_string(), "creationTimestamp": null});
            let object =
                json!({"kind": "Node", "apiVersion": "v1", "metadata": meta, "spec": {}, "status": {}});
            state.history.push((version, json!({"type": "BOOKMARK", "object": object})));
        });
        version
    }

    /// Forgets the history and ends all watches, so that they find their version gone.
    pub(crate) fn compact(&self, as_event: bool) {
        self.change(|state| {
            state.version += 1;
            state.oldest = state.version;
            state.gone_as_event = as_event;
            state.generation += 1;
        });
    }

    /// The state of a backup: no history, and resource versions that begin again.
    pub(crate) fn restore_backup(&self) {
        self.change(|state| {
            state.version = 1;
            state.oldest = 0;
            state.history.clear();
            state.generation += 1;
            for node in state.nodes.values_mut() {
                node["metadata"]["resourceVersion"] = "1".into();
            }
        });
    }

    /// Watches say nothing from now on, and do not end either; new ones are answered as before once `mute` is off.
    pub(crate) fn mute(&self, mute: bool) {
        self.change(|state| state.mute = mute);
    }

    /// Requests get no answer until this is off again.
    pub(crate) fn hang(&self, hangs: bool) {
        self.change(|state| state.hangs = hangs);
    }

    /// Ends all watches in order.
    pub(crate) fn end_watches(&self) {
        self.change(|state| state.generation += 1);
    }

    /// Sends a line to all watches that is no event.
    pub(crate) fn send_nonsense(&self) {
        self.change(|state| {
            state.version += 1;
            let object = json!({"metadata": {"name": ["no string"]}});
            state.history.push((state.version, json!({"type": "ADDED", "object": object})));
        });
    }

    /// Only this token is let in.
    pub(crate) fn require_token(&self, token: &str) {
        self.change(|state| {
            state.token = Some(token.to_owned());
            state.generation += 1;
        });
    }

    /// Answers the next requests of a kind with a status.
    pub(crate) fn fail(&self, method: &'static str, path: &'static str, status: u16, times: usize) {
        self.lock().faults.push(Fault { method, path, status, times });
    }

    /// No more faults.
    pub(crate) fn heal(&self) {
        self.lock().faults.clear();
    }

    pub(crate) fn requests(&self) -> Vec<Recorded> {
        self.lock().requests.clone()
    }

    pub(crate) fn forget_requests(&self) {
        self.lock().requests.clear();
    }

    /// Bodies of the patches so far.
    pub(crate) fn patches(&self) -> Vec<String> {
        let requests = self.requests();
        requests.into_iter().filter(|request| request.method == "PATCH").map(|request| request.body).collect()
    }
}

impl Drop for KubeApi {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl State {
    fn put(&mut self, kind: &str, name: &str, mut node: Value) {
        self.version += 1;
        node["metadata"]["resourceVersion"] = self.version.to_string().into();
        self.history.push((self.version, json!({"type": kind, "object": node})));
        self.nodes.insert(name.to_owned(), node);
    }

    fn fault(&mut self, method: &str, path: &str) -> Option<u16> {
        let fault = self
            .faults
            .iter_mut()
            .find(|fault| fault.times > 0 && fault.method == method && path.contains(fault.path))?;
        fault.times -= 1;
        Some(fault.status)
    }
}

fn status(code: u16, reason: &str, message: &str) -> Response {
    let body = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "code": code, "reason": reason, "message": message});
    respond(code, body.to_string())
}

fn respond(code: u16, body: String) -> Response {
    Response::builder()
        .status(StatusCode::from_u16(code).unwrap())
        .header("Content-Type", "application/json")
        .body(Body::from(body))
        .unwrap()
}

async fn answer(shared: Arc<Shared>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let body = String::from_utf8(to_bytes(body, 1 << 20).await.unwrap().to_vec()).unwrap();
    let header = |name: &str| {
        parts.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
    };
    let method = parts.method.to_string();
    let path = parts.uri.path().to_owned();
    let query: BTreeMap<String, String> = parts
        .uri
        .query()
        .unwrap_or_default()
        .split('&')
        .filter_map(|pair| pair.split_once('='))
        .map(|(key, value)| (key.to_owned(), value.replace("%3D", "=")))
        .collect();
    {
        let mut state = shared.state.lock().unwrap();
        state.requests.push(Recorded {
            method: method.clone(),
            path: parts.uri.to_string(),
            content_type: header("content-type"),
            body: body.clone(),
        });
        if state.token.as_ref().is_some_and(|token| header("authorization") != format!("Bearer {token}")) {
            return status(401, "Unauthorized", "Unauthorized");
        }
        if let Some(code) = state.fault(&method, &parts.uri.to_string()) {
            let reason = if code == 403 { "Forbidden" } else { "InternalError" };
            return status(code, reason, "as the test wants it");
        }
    }
    let mut changed = shared.changed.subscribe();
    while shared.state.lock().unwrap().hangs {
        let _ = changed.changed().await;
    }
    let segments: Vec<&str> = path.trim_matches('/').split('/').collect();
    match (method.as_str(), segments.as_slice()) {
        ("GET", ["api", "v1", "nodes"]) if query.contains_key("watch") => watch_nodes(shared, &query),
        ("GET", ["api", "v1", "nodes"]) => list_nodes(&shared, &query),
        ("GET", ["api", "v1", "nodes", name]) => match shared.state.lock().unwrap().nodes.get(*name) {
            Some(node) => respond(200, node.to_string()),
            None => status(404, "NotFound", &format!("nodes \"{name}\" not found")),
        },
        ("PATCH", ["api", "v1", "nodes", name, "status"]) => patch(&shared, name, &body),
        ("GET", ["api", "v1", "namespaces", namespace, "pods", name]) => {
            match shared.state.lock().unwrap().pods.get(&format!("{namespace}/{name}")) {
                Some(node) => respond(200, json!({"kind": "Pod", "spec": {"nodeName": node}}).to_string()),
                None => status(404, "NotFound", "no such pod"),
            }
        }
        _ => status(404, "NotFound", "no such path"),
    }
}

fn selects(query: &BTreeMap<String, String>, name: &str) -> bool {
    query.get("fieldSelector").is_none_or(|selector| *selector == format!("metadata.name={name}"))
}

fn list_nodes(shared: &Shared, query: &BTreeMap<String, String>) -> Response {
    let state = shared.state.lock().unwrap();
    let limit: usize = query.get("limit").map_or(usize::MAX, |limit| limit.parse().unwrap());
    let start: usize = query.get("continue").map_or(0, |token| token.parse().unwrap());
    let all: Vec<&Value> =
        state.nodes.iter().filter(|(name, _)| selects(query, name)).map(|(_, node)| node).collect();
    let page: Vec<&Value> = all.iter().skip(start).take(limit).copied().collect();
    let mut meta = json!({"resourceVersion": state.version.to_string()});
    if start + page.len() < all.len() {
        meta["continue"] = (start + page.len()).to_string().into();
    }
    respond(200, json!({"kind": "NodeList", "apiVersion": "v1", "metadata": meta, "items": page}).to_string())
}

fn watch_nodes(shared: Arc<Shared>, query: &BTreeMap<String, String>) -> Response {
    let from: u64 = query["resourceVersion"].parse().unwrap();
    let (generation, gone) = {
        let state = shared.state.lock().unwrap();
        if from < state.oldest && !state.gone_as_event {
            return status(410, "Expired", "too old resource version");
        }
        (state.generation, from < state.oldest)
    };
    if gone {
        let object = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "code": 410, "reason": "Expired", "message": "too old resource version"});
        return respond(200, json!({"type": "ERROR", "object": object}).to_string() + "\n");
    }
    let query = query.clone();
    let changed = shared.changed.subscribe();
    let begin = {
        let state = shared.state.lock().unwrap();
        state.history.iter().take_while(|(version, _)| *version <= from).count()
    };
    let stream = futures::stream::unfold((begin, changed), move |(mut next, mut changed)| {
        let (shared, query) = (Arc::clone(&shared), query.clone());
        async move {
            loop {
                changed.borrow_and_update();
                let mut lines = String::new();
                {
                    let state = shared.state.lock().unwrap();
                    if !state.mute && state.generation != generation {
                        return None;
                    }
                    if !state.mute {
                        for (version, event) in state.history.iter().skip(next) {
                            let name = event["object"]["metadata"]["name"].as_str().unwrap_or_default();
                            // Old changes are of no interest, but where the server stands is.
                            let bookmark = event["type"] == "BOOKMARK";
                            if bookmark || *version > from && selects(&query, name) {
                                lines += &event.to_string();
                                lines.push('\n');
                            }
                        }
                        next = state.history.len();
                    }
                }
                if !lines.is_empty() {
                    return Some((Ok::<String, Infallible>(lines), (next, changed)));
                }
                changed.changed().await.ok()?;
            }
        }
    });
    Response::builder().header("Content-Type", "application/json").body(Body::from_stream(stream)).unwrap()
}

/// The parts of a strategic merge that are used: annotations by key, conditions by type.
fn patch(shared: &Shared, name: &str, body: &str) -> Response {
    let patch: Value = serde_json::from_str(body).unwrap();
    let mut state = shared.state.lock().unwrap();
    let Some(mut node) = state.nodes.get(name).cloned() else {
        return status(404, "NotFound", &format!("nodes \"{name}\" not found"));
    };
    if let Some(annotations) = patch["metadata"]["annotations"].as_object() {
        if !node["metadata"]["annotations"].is_object() {
            node["metadata"]["annotations"] = json!({});
        }
        for (key, value) in annotations {
            node["metadata"]["annotations"][key] = value.clone();
        }
    }
    for condition in patch["status"]["conditions"].as_array().into_iter().flatten() {
        let conditions = node["status"]["conditions"].as_array_mut().unwrap();
        conditions.retain(|old| old["type"] != condition["type"]);
        conditions.push(condition.clone());
    }
    state.put("MODIFIED", name, node.clone());
    drop(state);
    shared.changed.send_modify(|count| *count += 1);
    respond(200, node.to_string())
}
