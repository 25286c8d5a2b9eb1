//! `/healthz`, `/readyz` and `/metrics` on `--healthz-port`.
//!
//! Paths, bodies and codes of the first two are flannel's, so that probes written for it keep working. What they mean is
//! stricter: healthy is a daemon whose loops make progress, ready one whose packets flow.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{any, get};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::metrics;
use crate::view::View;

/// Binds the health server's address.
///
/// # Errors
/// When the address is malformed or taken.
pub async fn bind(ip: &str, port: u16) -> io::Result<TcpListener> {
    let ip = ip
        .parse()
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, format!("--healthz-ip {ip:?}")))?;
    TcpListener::bind(SocketAddr::new(ip, port)).await
}

/// Answers until `cancel` fires.
pub async fn serve(listener: TcpListener, view: Arc<View>, cancel: CancellationToken) {
    let app = Router::new()
        .route("/healthz", any(healthz))
        .route("/readyz", any(readyz))
        .route("/metrics", get(metrics))
        .fallback(|| async { text(StatusCode::NOT_FOUND, "404 page not found\n".to_owned()) })
        .with_state(view);
    tokio::select! {
        result = async { axum::serve(listener, app).await } => {
            if let Err(error) = result {
                tracing::error!("health server: {error}");
            }
        }
        () = cancel.cancelled() => {}
    }
}

async fn healthz(State(view): State<Arc<View>>) -> Response {
    match view.alive() {
        Ok(()) => text(StatusCode::OK, "flanneld is running".to_owned()),
        Err(reason) => text(StatusCode::SERVICE_UNAVAILABLE, format!("flanneld is not healthy: {reason}")),
    }
}

async fn readyz(State(view): State<Arc<View>>) -> Response {
    let reasons = view.not_ready();
    if reasons.is_empty() {
        return text(StatusCode::OK, "flanneld is ready".to_owned());
    }
    tracing::debug!("not ready: {}", reasons.join("; "));
    text(StatusCode::SERVICE_UNAVAILABLE, "flanneld is not ready yet".to_owned())
}

async fn metrics(State(view): State<Arc<View>>) -> Response {
    let body = metrics::render(&view);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], body).into_response()
}

fn text(status: StatusCode, body: String) -> Response {
    (status, [(header::CONTENT_TYPE, "text/plain; charset=utf-8")], body).into_response()
}
