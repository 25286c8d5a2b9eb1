//! A real kube-apiserver on a real etcd, with the rights flannel's manifest grants and no more.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use hyper::{Method, Request};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::certs::Certs;
use super::etcd::EtcdServer;

/// A running API server; ends with the value.
pub(crate) struct ApiServer {
    program: PathBuf,
    dir: TempDir,
    etcd: EtcdServer,
    port: u16,
    child: Option<Child>,
}

impl ApiServer {
    /// Starts the program that the variable `KUBE_APISERVER` names and grants `felt` its rights.
    pub(crate) async fn start() -> ApiServer {
        let program = std::env::var_os("KUBE_APISERVER")
            .expect("KUBE_APISERVER names no program: run these tests with `make test-kube`");
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let dir = TempDir::new().unwrap();
        std::fs::write(dir.path().join("tokens.csv"), "admin,admin,1,system:masters\nfelt,felt,2,\n")
            .unwrap();
        let mut server =
            ApiServer { program: program.into(), dir, etcd: EtcdServer::start(), port, child: None };
        for user in ["admin", "felt"] {
            server.write_kubeconfig(user);
        }
        server.run();
        server.wait().await;
        server.grant().await;
        server
    }

    /// A kubeconfig of a user, `admin` or `felt`.
    pub(crate) fn kubeconfig(&self, user: &str) -> PathBuf {
        self.dir.path().join(format!("{user}.kubeconfig"))
    }

    pub(crate) fn stop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    pub(crate) async fn start_again(&mut self) {
        self.run();
        self.wait().await;
    }

    /// A request of the administrator.
    pub(crate) async fn admin(&self, method: Method, path: &str, body: &Value) -> Value {
        self.try_admin(method.clone(), path, body).await.unwrap_or_else(|e| panic!("{method} {path}: {e}"))
    }

    async fn try_admin(&self, method: Method, path: &str, body: &Value) -> Result<Value, kube::Error> {
        let file = Kubeconfig::read_from(self.kubeconfig("admin")).unwrap();
        let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await.unwrap();
        let kind = if method == Method::PATCH { "application/merge-patch+json" } else { "application/json" };
        let body = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
        let request =
            Request::builder().method(method).uri(path).header("Content-Type", kind).body(body).unwrap();
        Client::try_from(config).unwrap().request(request).await
    }

    pub(crate) async fn add_node(&self, name: &str, spec: Value, annotations: Value) {
        let node = json!({"kind": "Node", "apiVersion": "v1",
            "metadata": {"name": name, "annotations": annotations}, "spec": spec});
        self.admin(Method::POST, "/api/v1/nodes", &node).await;
    }

    pub(crate) async fn edit_node(&self, name: &str, patch: Value) {
        self.admin(Method::PATCH, &format!("/api/v1/nodes/{name}"), &patch).await;
    }

    pub(crate) async fn delete_node(&self, name: &str) {
        self.admin(Method::DELETE, &format!("/api/v1/nodes/{name}"), &Value::Null).await;
    }

    pub(crate) async fn node(&self, name: &str) -> Value {
        self.admin(Method::GET, &format!("/api/v1/nodes/{name}"), &Value::Null).await
    }

    fn run(&mut self) {
        let certs = Certs::get();
        let path = |name: &str| self.dir.path().join(name).display().to_string();
        let cert = |name: &str| certs.path(name).display().to_string();
        // With the first process dies the second: no server outlives a killed test.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]).arg(&self.program);
        for (flag, value) in [
            ("etcd-servers", self.etcd.endpoint()),
            ("bind-address", "127.0.0.1".to_owned()),
            ("secure-port", self.port.to_string()),
            ("tls-cert-file", cert("server.pem")),
            ("tls-private-key-file", cert("server.key")),
            ("cert-dir", path("certs")),
            ("token-auth-file", path("tokens.csv")),
            ("authorization-mode", "RBAC".to_owned()),
            ("service-account-issuer", "https://felt.test".to_owned()),
            ("service-account-key-file", cert("server.pem")),
            ("service-account-signing-key-file", cert("server.key")),
            ("service-cluster-ip-range", "10.96.0.0/16".to_owned()),
            ("disable-admission-plugins", "ServiceAccount,TaintNodesByCondition".to_owned()),
        ] {
            command.arg(format!("--{flag}={value}"));
        }
        let log = std::fs::File::create(self.dir.path().join("log")).unwrap();
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        self.child = Some(command.spawn().expect("kube-apiserver starts"));
    }

    async fn wait(&mut self) {
        let begin = Instant::now();
        while let Err(error) = self.try_admin(Method::GET, "/api/v1/nodes", &Value::Null).await {
            let ended = self.child.as_mut().unwrap().try_wait().unwrap();
            if ended.is_some() || begin.elapsed() > Duration::from_secs(120) {
                let log = std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
                let tail: Vec<&str> = log.lines().rev().take(20).collect();
                panic!("kube-apiserver does not come up ({ended:?}): {error}\n{}", tail.join("\n"));
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    async fn grant(&self) {
        let role = json!({"kind": "ClusterRole", "apiVersion": "rbac.authorization.k8s.io/v1",
        "metadata": {"name": "flannel"},
        "rules": [
            {"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]},
            {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "watch"]},
            {"apiGroups": [""], "resources": ["nodes/status"], "verbs": ["patch"]},
        ]});
        let binding = json!({"kind": "ClusterRoleBinding", "apiVersion": "rbac.authorization.k8s.io/v1",
            "metadata": {"name": "flannel"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "flannel"},
            "subjects": [{"kind": "User", "name": "felt", "apiGroup": "rbac.authorization.k8s.io"}]});
        let group = "/apis/rbac.authorization.k8s.io/v1";
        self.admin(Method::POST, &format!("{group}/clusterroles"), &role).await;
        self.admin(Method::POST, &format!("{group}/clusterrolebindings"), &binding).await;
    }

    fn write_kubeconfig(&self, user: &str) {
        let ca: &Path = &Certs::get().path("ca.pem");
        let server = format!("https://127.0.0.1:{}", self.port);
        let text = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": server, "certificate-authority": ca}}],
            "users": [{"name": "u", "user": {"token": user}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        });
        std::fs::write(self.kubeconfig(user), text.to_string()).unwrap();
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.stop();
    }
}
