//! HTTP over the daemon's Unix socket.

use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt as _, Empty};
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;

use super::Failure;
use crate::api;

/// Longest wait for an answer.
const LIMIT: Duration = Duration::from_secs(10);

/// A daemon's admin socket.
#[derive(Debug)]
pub(crate) struct Client {
    socket: PathBuf,
}

impl Client {
    pub(crate) fn new(socket: &Path) -> Self {
        Self { socket: socket.to_owned() }
    }

    /// Fetches one document.
    pub(crate) async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, Failure> {
        let answer = tokio::time::timeout(LIMIT, self.fetch(path)).await;
        let silent = || Failure::Failed(format!("no answer on {} within {LIMIT:?}", self.socket.display()));
        let (status, body) = answer.map_err(|_| silent())??;
        if !status.is_success() {
            let reason = serde_json::from_slice::<api::Failure>(&body).map(|failure| failure.error);
            return Err(Failure::Failed(format!(
                "{path}: {}",
                reason.unwrap_or_else(|_| status.to_string())
            )));
        }
        serde_json::from_slice(&body)
            .map_err(|error| Failure::Failed(format!("{path}: unreadable answer: {error}")))
    }

    async fn fetch(&self, path: &str) -> Result<(hyper::StatusCode, Bytes), Failure> {
        let talk =
            |error: hyper::Error| Failure::Failed(format!("talk to {}: {error}", self.socket.display()));
        let stream = UnixStream::connect(&self.socket).await.map_err(|error| {
            Failure::Failed(format!("no feltd answers on {}: {error}; is it running?", self.socket.display()))
        })?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(talk)?;
        let driver = tokio::spawn(connection);
        let request = hyper::Request::get(path)
            .header(hyper::header::HOST, "feltd")
            .body(Empty::<Bytes>::new())
            .map_err(Failure::failed)?;
        let answer = sender.send_request(request).await.map_err(talk)?;
        let status = answer.status();
        let body = answer.into_body().collect().await.map_err(talk)?.to_bytes();
        driver.abort();
        Ok((status, body))
    }
}
