//! How to reach etcd.

use std::fmt;
use std::path::PathBuf;

use etcd_client::{Certificate, Identity, TlsOptions};
use thiserror::Error;

/// What the `--etcd-*` flags say.
#[derive(Clone)]
pub struct EtcdConfig {
    /// `http://HOST:PORT`, `https://HOST:PORT` or `HOST:PORT` each.
    pub endpoints: Vec<String>,
    /// What all keys start with.
    pub prefix: String,
    /// Certificates (PEM) of the authorities that may sign the servers'; the system's when `None`.
    pub cafile: Option<PathBuf>,
    /// Own certificate (PEM) with the chain behind it.
    pub certfile: Option<PathBuf>,
    /// Key (PEM) of the own certificate.
    pub keyfile: Option<PathBuf>,
    /// Name and password of etcd's own authentication.
    pub user: Option<(String, String)>,
}

/// Leaves the password out.
impl fmt::Debug for EtcdConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let endpoints: Vec<String> = self.endpoints.iter().map(|text| shown(text)).collect();
        f.debug_struct("EtcdConfig")
            .field("endpoints", &endpoints)
            .field("prefix", &self.prefix)
            .field("cafile", &self.cafile)
            .field("certfile", &self.certfile)
            .field("keyfile", &self.keyfile)
            .field("user", &self.user.as_ref().map(|(name, _)| name))
            .finish_non_exhaustive()
    }
}

/// The flags contradict each other.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum EtcdConfigError {
    /// No endpoint is left after blanks and empty words are taken away.
    #[error("no etcd endpoint is given (--etcd-endpoints)")]
    NoEndpoint,
    /// An endpoint that cannot be connected to.
    #[error("etcd endpoint {0:?} is neither http://HOST:PORT nor https://HOST:PORT")]
    Endpoint(String),
    /// A certificate is useless without its key, and the other way round.
    #[error("a client certificate needs both --etcd-certfile and --etcd-keyfile")]
    HalfIdentity,
}

/// One server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Endpoint {
    pub(super) url: String,
    /// Host name or address a TLS certificate must be for; `None` without TLS.
    pub(super) tls_name: Option<String>,
}

impl EtcdConfig {
    pub(super) fn endpoints(&self) -> Result<Vec<Endpoint>, EtcdConfigError> {
        if self.certfile.is_some() != self.keyfile.is_some() {
            return Err(EtcdConfigError::HalfIdentity);
        }
        let words = self.endpoints.iter().flat_map(|text| text.split(','));
        let endpoints: Vec<Endpoint> = words
            .map(str::trim)
            .filter(|word| !word.is_empty())
            .map(|word| self.endpoint(word))
            .collect::<Result<_, _>>()?;
        if endpoints.is_empty() {
            return Err(EtcdConfigError::NoEndpoint);
        }
        Ok(endpoints)
    }

    fn endpoint(&self, word: &str) -> Result<Endpoint, EtcdConfigError> {
        let error = || EtcdConfigError::Endpoint(shown(word));
        let tls_by_files = self.cafile.is_some() || self.certfile.is_some();
        let (tls, authority) = match word.split_once("://") {
            Some(("http", rest)) => (false, rest),
            Some(("https", rest)) => (true, rest),
            Some(_) => return Err(error()),
            None => (tls_by_files, word),
        };
        let authority = authority.strip_suffix('/').unwrap_or(authority);
        let uri: hyper::Uri =
            format!("{}://{authority}", if tls { "https" } else { "http" }).parse().map_err(|_| error())?;
        let host = uri.host().filter(|host| !host.is_empty()).ok_or_else(error)?;
        // A port that is no number in range is not an error of the parser.
        let after_host = authority.rsplit(['@', ']']).next().unwrap_or_default();
        if after_host.contains(':') && uri.port_u16().is_none() {
            return Err(error());
        }
        let tls_name = tls.then(|| host.trim_matches(['[', ']']).to_owned());
        Ok(Endpoint { url: uri.to_string(), tls_name })
    }

    /// Reads the certificate files, so that renewed ones count at the next connection.
    pub(super) fn tls(&self, name: &str) -> Result<TlsOptions, String> {
        let read =
            |path: &PathBuf| std::fs::read(path).map_err(|e| format!("cannot read {}: {e}", path.display()));
        let mut tls = TlsOptions::new().domain_name(name);
        tls = match &self.cafile {
            Some(path) => tls.ca_certificate(Certificate::from_pem(read(path)?)),
            None => tls.with_native_roots(),
        };
        if let (Some(cert), Some(key)) = (&self.certfile, &self.keyfile) {
            tls = tls.identity(Identity::from_pem(read(cert)?, read(key)?));
        }
        Ok(tls)
    }
}

/// An endpoint without what may be secret in it.
pub(super) fn shown(endpoint: &str) -> String {
    match endpoint.split_once("://") {
        Some((scheme, rest)) => {
            format!("{scheme}://{}", rest.rsplit_once('@').map_or(rest, |(_, host)| host))
        }
        None => endpoint.rsplit_once('@').map_or(endpoint, |(_, host)| host).to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(endpoints: &str) -> EtcdConfig {
        EtcdConfig {
            endpoints: vec![endpoints.to_owned()],
            prefix: "/n".to_owned(),
            cafile: None,
            certfile: None,
            keyfile: None,
            user: None,
        }
    }

    #[test]
    fn endpoints_may_have_blanks_trailing_commas_and_no_scheme() {
        let found =
            config(" http://127.0.0.1:4001 , https://[fd00::1]:2379/,, etcd:2379,").endpoints().unwrap();
        let urls: Vec<_> = found.iter().map(|endpoint| endpoint.url.as_str()).collect();
        assert_eq!(urls, ["http://127.0.0.1:4001/", "https://[fd00::1]:2379/", "http://etcd:2379/"]);
        assert_eq!(found[1].tls_name.as_deref(), Some("fd00::1"));
        assert_eq!(found[2].tls_name, None);
        let tls = EtcdConfig { cafile: Some("/ca".into()), ..config("etcd:2379") };
        assert_eq!(tls.endpoints().unwrap()[0].url, "https://etcd:2379/");
    }

    #[test]
    fn impossible_flags_are_refused() {
        assert_eq!(config(" , ").endpoints(), Err(EtcdConfigError::NoEndpoint));
        for bad in ["ftp://x:1", "http://", "http://a b:1", "http://x:99999999"] {
            assert!(matches!(config(bad).endpoints(), Err(EtcdConfigError::Endpoint(_))), "{bad}");
        }
        let half = EtcdConfig { keyfile: Some("/key".into()), ..config("etcd:2379") };
        assert_eq!(half.endpoints(), Err(EtcdConfigError::HalfIdentity));
    }

    #[test]
    fn secrets_are_not_shown() {
        let mut config = config("http://root:hunter2@h:1");
        config.user = Some(("root".to_owned(), "hunter2".to_owned()));
        let text = format!("{config:?}");
        assert!(text.contains("root") && !text.contains("hunter2"), "{text}");
        let error = EtcdConfig { endpoints: vec!["ftp://u:hunter2@x".to_owned()], ..config }.endpoints();
        assert!(!format!("{error:?}").contains("hunter2"));
    }
}
