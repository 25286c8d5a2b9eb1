//! Certificates for one test binary: an authority, a server for 127.0.0.1, a client.

use std::path::PathBuf;
use std::sync::OnceLock;

use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
use tempfile::TempDir;

/// `ca.pem`, `server.pem`, `server.key`, `client.pem`, `client.key`; and of another authority `other-ca.pem`,
/// `other-server.pem`, `other-server.key`.
pub(crate) struct Certs {
    dir: TempDir,
}

impl Certs {
    /// Made once per process.
    pub(crate) fn get() -> &'static Certs {
        static CERTS: OnceLock<Certs> = OnceLock::new();
        CERTS.get_or_init(Certs::make)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn make() -> Certs {
        let certs = Certs { dir: TempDir::new().expect("directory for certificates") };
        for name in ["other-ca", "ca"] {
            let mut params = CertificateParams::new(Vec::new()).unwrap();
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            params.distinguished_name.push(rcgen::DnType::CommonName, name);
            let key = KeyPair::generate().unwrap();
            certs.write(&format!("{name}.pem"), &params.self_signed(&key).unwrap().pem());
            let issuer = Issuer::new(params, key);
            if name == "ca" {
                certs.issue("server", &issuer);
                certs.issue("client", &issuer);
            } else {
                certs.issue("other-server", &issuer);
            }
        }
        certs
    }

    fn issue(&self, name: &str, issuer: &Issuer<'_, KeyPair>) {
        let mut params =
            CertificateParams::new(vec!["127.0.0.1".to_owned(), "198.18.0.254".to_owned()]).unwrap();
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        // etcd's gateway shows the server's certificate to its own server.
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate().unwrap();
        self.write(&format!("{name}.pem"), &params.signed_by(&key, issuer).unwrap().pem());
        self.write(&format!("{name}.key"), &key.serialize_pem());
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).expect("write a certificate");
    }
}
