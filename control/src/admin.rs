//! The admin socket: HTTP/1.1 with JSON on a Unix socket that only its owner may open.

use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Json, Response};
use axum::routing::{get, post};
use hyper_util::rt::TokioIo;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::api;
use crate::handover::{self, Offer, Wish};
use crate::view::View;

/// A bound admin socket; its file goes when this is dropped.
#[derive(Debug)]
pub struct AdminSocket {
    listener: Option<UnixListener>,
    path: PathBuf,
}

/// The socket could not be made.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Another daemon answers on it.
    #[error("{} is served by another running feltd; give this one another --admin-socket", .0.display())]
    InUse(PathBuf),
    /// The file system or the kernel refused.
    #[error("listen on {}: {source}", path.display())]
    Io {
        /// The socket's path.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
}

impl AdminSocket {
    /// Binds `path`, in place of a socket that nobody serves any more.
    ///
    /// The socket is made under another name, closed to others and then renamed, so that at no time a stranger can
    /// connect.
    ///
    /// # Errors
    /// See [`BindError`].
    pub async fn bind(path: &Path) -> Result<Self, BindError> {
        if UnixStream::connect(path).await.is_ok() {
            return Err(BindError::InUse(path.to_owned()));
        }
        Self::replace(path)
    }

    /// Binds `path`, in place of a socket that a predecessor serves.
    ///
    /// # Errors
    /// [`BindError::Io`].
    pub fn replace(path: &Path) -> Result<Self, BindError> {
        let fail = |source| BindError::Io { path: path.to_owned(), source };
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).map_err(fail)?;
        }
        let hidden = path.with_extension(format!("new{}", std::process::id()));
        let _ = std::fs::remove_file(&hidden);
        let listener = UnixListener::bind(&hidden).map_err(fail)?;
        let placed = std::fs::set_permissions(&hidden, std::fs::Permissions::from_mode(0o600))
            .and_then(|()| std::fs::rename(&hidden, path));
        if let Err(source) = placed {
            let _ = std::fs::remove_file(&hidden);
            return Err(fail(source));
        }
        Ok(Self { listener: Some(listener), path: path.to_owned() })
    }

    /// Answers requests until `cancel` fires, then removes the socket's file, unless a successor has it.
    pub async fn serve(mut self, view: Arc<View>, cancel: CancellationToken) {
        let Some(listener) = self.listener.take() else { return };
        let server = axum::serve(listener, router(Arc::clone(&view)));
        tokio::select! {
            result = async { server.await } => {
                if let Err(error) = result {
                    tracing::error!("admin socket {}: {error}", self.path.display());
                }
            }
            () = cancel.cancelled() => {}
        }
        if view.lock().handed_over {
            self.path = PathBuf::new();
        }
    }
}

impl Drop for AdminSocket {
    fn drop(&mut self) {
        // Fails for the empty path of a socket that a successor has.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// What is served, in the order of `docs/api.md`.
pub const PATHS: [&str; 5] = ["/v1/status", "/v1/peers", "/v1/counters", "/v1/config", "/v1/handover"];

fn router(view: Arc<View>) -> Router {
    let [status, peers, counters, config, handover] = PATHS;
    Router::new()
        .route(status, get(|State(view): State<Arc<View>>| async move { Json(view.status()) }))
        .route(peers, get(|State(view): State<Arc<View>>| async move { Json(view.peers()) }))
        .route(counters, get(|State(view): State<Arc<View>>| async move { Json(view.counters()) }))
        .route(config, get(|State(view): State<Arc<View>>| async move { Json(view.config()) }))
        .route(handover, post(hand_over))
        .fallback(|| async { failure(StatusCode::NOT_FOUND, "no such resource") })
        .method_not_allowed_fallback(|| async {
            failure(StatusCode::METHOD_NOT_ALLOWED, "only GET is served here")
        })
        .with_state(view)
}

/// Longest body of a request in bytes.
const BODY_LIMIT: usize = 64 << 10;

/// `POST /v1/handover`: brings a successor to the thread that owns the backend.
async fn hand_over(State(view): State<Arc<View>>, mut request: Request) -> Response {
    let upgrade = hyper::upgrade::on(&mut request);
    let body = axum::body::to_bytes(request.into_body(), BODY_LIMIT).await.unwrap_or_default();
    let wish: Wish = match serde_json::from_slice(&body) {
        Ok(wish) => wish,
        Err(error) => return failure(StatusCode::BAD_REQUEST, &format!("no handover request: {error}")),
    };
    let refuse = |reason: &str| failure(StatusCode::CONFLICT, reason);
    let offers = view.lock().handover.clone();
    let Some(offers) = offers else { return refuse("this feltd hands nothing over") };
    let (verdict, decided) = oneshot::channel();
    let (give, stream) = oneshot::channel();
    if offers.try_send(Offer { wish, verdict, stream }).is_err() {
        return refuse("this feltd is leaving or hands over to another one already");
    }
    match decided.await {
        Ok(Ok(())) => {}
        Ok(Err(reason)) => return refuse(&reason),
        Err(_) => return refuse("this feltd is leaving"),
    }
    tokio::spawn(async move {
        let Ok(upgraded) = upgrade.await else { return };
        // The other end waits for our answer before it sends more, so nothing was read ahead.
        let stream = hyper_util::server::conn::auto::upgrade::downcast::<TokioIo<UnixStream>>(upgraded)
            .map(|parts| parts.io.into_inner().into_std());
        if let Ok(Ok(stream)) = stream {
            let _ = give.send(stream);
        }
    });
    let headers = [(header::CONNECTION, "upgrade"), (header::UPGRADE, handover::PROTOCOL)];
    (StatusCode::SWITCHING_PROTOCOLS, headers).into_response()
}

fn failure(status: StatusCode, error: &str) -> Response {
    (status, Json(api::Failure { version: api::VERSION, error: error.to_owned() })).into_response()
}
