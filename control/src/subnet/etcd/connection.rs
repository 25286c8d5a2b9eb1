//! One working connection to one of several servers.
//!
//! All servers are tried side by side, a little staggered, and the first that answers a read wins: it is up, speaks
//! etcd, knows us, and its cluster has a leader. A request that fails for a reason of the connection drops it, and
//! the next one connects anew, certificate files read again. Everything has a time limit.

use std::fmt::Write as _;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{Client, ConnectOptions, Error};
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use tokio::sync::Mutex;
use tokio::time::timeout;

use super::config::{Endpoint, EtcdConfig, EtcdConfigError, shown};
use crate::subnet::SubnetError;

/// Limit for one request.
pub(super) const REQUEST: Duration = Duration::from_secs(5);
/// Limit for connecting to one server, authentication and first read included.
const CONNECT: Duration = Duration::from_secs(4);
/// Head start of a server over the next one in the list.
const STAGGER: Duration = Duration::from_millis(150);
/// A silent peer is asked for a sign of life after this time, and given up after the second. etcd refuses clients
/// that ask more often than every 5 s.
const KEEP_ALIVE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(5));

/// Connects when needed.
#[derive(Debug)]
pub(super) struct Connection {
    config: EtcdConfig,
    endpoints: Vec<Endpoint>,
    /// Read once to see that a server works.
    probe: String,
    current: Mutex<Option<Arc<Live>>>,
}

/// A connection that worked when it was made.
pub(super) struct Live {
    pub(super) client: Client,
}

impl std::fmt::Debug for Live {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Live")
    }
}

impl Connection {
    pub(super) fn new(config: EtcdConfig, probe: String) -> Result<Self, EtcdConfigError> {
        let endpoints = config.endpoints()?;
        Ok(Connection { config, endpoints, probe, current: Mutex::new(None) })
    }

    /// The servers, for messages.
    pub(super) fn name(&self) -> String {
        let urls: Vec<String> = self
            .endpoints
            .iter()
            .map(|endpoint| shown(&endpoint.url).trim_end_matches('/').to_owned())
            .collect();
        format!("etcd v3 at {}", urls.join(", "))
    }

    /// The connection in use, or a new one.
    pub(super) async fn live(&self) -> Result<Arc<Live>, SubnetError> {
        // Held while connecting, so that all who wait share one attempt.
        let mut current = self.current.lock().await;
        if let Some(live) = &*current {
            return Ok(Arc::clone(live));
        }
        let live = Arc::new(self.connect().await?);
        *current = Some(Arc::clone(&live));
        Ok(live)
    }

    /// Gives a broken connection up, unless that has been done already.
    pub(super) async fn discard(&self, broken: &Arc<Live>) {
        let mut current = self.current.lock().await;
        if current.as_ref().is_some_and(|live| Arc::ptr_eq(live, broken)) {
            *current = None;
        }
    }

    /// Makes a request; once again on a new connection when the first broke.
    ///
    /// `request` must be one that may be carried out twice.
    pub(super) async fn call<T, F>(
        &self,
        what: &str,
        request: impl Fn(Client) -> F + Send,
    ) -> Result<T, SubnetError>
    where
        F: Future<Output = Result<T, Error>> + Send,
    {
        let mut again = true;
        loop {
            let live = self.live().await?;
            let error = match timeout(REQUEST, request(live.client.clone())).await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(error)) if is_answer(&error) => return Err(failed(what, error)),
                Ok(Err(error)) => failed(what, error),
                Err(_) => {
                    SubnetError::TimedOut { what: what.to_owned(), registry: self.name(), after: REQUEST }
                }
            };
            self.discard(&live).await;
            if !std::mem::take(&mut again) {
                return Err(error);
            }
        }
    }

    async fn connect(&self) -> Result<Live, SubnetError> {
        let start = rand::random_range(0..self.endpoints.len());
        let order = self.endpoints[start..].iter().chain(&self.endpoints[..start]);
        let mut attempts: FuturesUnordered<_> = order
            .zip(0u32..)
            .map(|(endpoint, position)| async move {
                tokio::time::sleep(STAGGER * position).await;
                let attempt = timeout(CONNECT, self.connect_to(endpoint)).await;
                let result = attempt.unwrap_or_else(|_| Err(format!("no answer within {CONNECT:?}")));
                result.map_err(|reason| format!("{}: {reason}", shown(&endpoint.url).trim_end_matches('/')))
            })
            .collect();
        let mut reasons = String::new();
        while let Some(result) = attempts.next().await {
            match result {
                Ok(client) => return Ok(Live { client }),
                Err(reason) if reasons.is_empty() => reasons = reason,
                Err(reason) => drop(write!(reasons, "; {reason}")),
            }
        }
        Err(SubnetError::Failed { what: "connect to etcd".to_owned(), source: reasons.into() })
    }

    async fn connect_to(&self, endpoint: &Endpoint) -> Result<Client, String> {
        let mut options = ConnectOptions::new()
            .with_connect_timeout(CONNECT)
            .with_keep_alive(KEEP_ALIVE.0, KEEP_ALIVE.1)
            // etcd ends connections that ask for signs of life without an open request.
            .with_keep_alive_while_idle(false)
            .with_require_leader(true)
            .with_auto_token_refresh(true);
        if let Some(name) = &endpoint.tls_name {
            options = options.with_tls(self.config.tls(name)?);
        }
        if let Some((name, password)) = &self.config.user {
            options = options.with_user(name, password);
        }
        let mut client =
            Client::connect([endpoint.url.as_str()], Some(options)).await.map_err(|e| describe(&e))?;
        match client.get(self.probe.as_str(), None).await {
            Ok(_) => Ok(client),
            // What may not be read is no fault of the server.
            Err(Error::GRpcStatus(status)) if status.code() as i32 == PERMISSION_DENIED => Ok(client),
            Err(error) => Err(describe(&error)),
        }
    }
}

/// gRPC status codes (grpc/grpc doc/statuscodes.md), which etcd-client does not name.
const INVALID_ARGUMENT: i32 = 3;
const NOT_FOUND: i32 = 5;
const PERMISSION_DENIED: i32 = 7;
const RESOURCE_EXHAUSTED: i32 = 8;
const FAILED_PRECONDITION: i32 = 9;
const OUT_OF_RANGE: i32 = 11;

/// Whether a working server said so, and would say so again.
fn is_answer(error: &Error) -> bool {
    match error {
        Error::GRpcStatus(status) => matches!(
            status.code() as i32,
            INVALID_ARGUMENT
                | NOT_FOUND
                | PERMISSION_DENIED
                | RESOURCE_EXHAUSTED
                | FAILED_PRECONDITION
                | OUT_OF_RANGE
        ),
        Error::LeaseKeepAliveError(_) => true,
        _ => false,
    }
}

/// Whether what was asked for (a lease) is not there.
pub(super) fn is_not_found(error: &Error) -> bool {
    match error {
        Error::GRpcStatus(status) => status.code() as i32 == NOT_FOUND,
        // So etcd-client calls an answer that the lease has no time left.
        Error::LeaseKeepAliveError(_) => true,
        _ => false,
    }
}

/// Whether the revision asked for has been compacted.
pub(super) fn is_compacted(error: &Error) -> bool {
    matches!(error, Error::GRpcStatus(status) if status.code() as i32 == OUT_OF_RANGE)
}

pub(super) fn failed(what: &str, error: Error) -> SubnetError {
    SubnetError::Failed { what: what.to_owned(), source: Box::new(Described(error)) }
}

/// An error of the client whose text tells the whole story.
#[derive(Debug)]
pub(super) struct Described(pub(super) Error);

impl std::fmt::Display for Described {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&describe(&self.0))
    }
}

impl std::error::Error for Described {}

/// The client's own texts hide the cause ("transport error") or bury it in debug output.
fn describe(error: &Error) -> String {
    let (mut text, mut source): (String, Option<&dyn std::error::Error>) = match error {
        Error::GRpcStatus(status) => (status.message().to_owned(), std::error::Error::source(status)),
        Error::TransportError(error) => (error.to_string(), std::error::Error::source(error)),
        error => (error.to_string(), None),
    };
    if text.is_empty() {
        text = error.to_string();
    }
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
