//! Certificates of a test, in files, and clients that speak TLS.

use crate::rig::{PATIENCE, TestResponse, TestRouter};
use bytes::Bytes;
use http_body_util::Full;
use hyper::Request;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// An authority of the tests, with the servers that it has signed.
pub(crate) struct TestAuthority {
    /// Its certificate, in PEM.
    pub(crate) pem: &'static str,
    /// Certificate and key of a server at 127.0.0.1.
    pub(crate) local: SignedKey,
}

/// A certificate and its key, in PEM.
pub(crate) struct SignedKey {
    pub(crate) cert: &'static str,
    pub(crate) key: &'static str,
}

/// The file of `host/tests/certificates`, which `make` in it makes.
macro_rules! file {
    ($name:literal) => {
        include_str!(concat!("../certificates/", $name))
    };
}

/// Certificate of a server named `decode.example`, signed by [`TestAuthority::OURS`].
pub(crate) const OTHER_NAME: SignedKey =
    SignedKey { cert: file!("ours/decode.example.pem"), key: file!("ours/decode.example.key") };

/// Certificate of a server at 127.0.0.1 that is signed by [`TestAuthority::OURS`] and has expired.
pub(crate) const EXPIRED: SignedKey =
    SignedKey { cert: file!("ours/expired.pem"), key: file!("ours/expired.key") };

impl SignedKey {
    /// Returns an acceptor of TLS connections that shows the certificate.
    pub(crate) fn acceptor(&self) -> TlsAcceptor {
        let chain = vec![CertificateDer::from_pem_slice(self.cert.as_bytes()).unwrap()];
        let key = PrivateKeyDer::from_pem_slice(self.key.as_bytes()).unwrap();
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(chain, key);
        Arc::new(config.unwrap()).into()
    }
}

impl TestAuthority {
    pub(crate) const OURS: TestAuthority = TestAuthority {
        pem: file!("ours/authority.pem"),
        local: SignedKey { cert: file!("ours/127.0.0.1.pem"), key: file!("ours/127.0.0.1.key") },
    };

    pub(crate) const OTHER: TestAuthority = TestAuthority {
        pem: file!("other/authority.pem"),
        local: SignedKey { cert: file!("other/127.0.0.1.pem"), key: file!("other/127.0.0.1.key") },
    };

    /// A TLS connection to a router whose certificate is to be signed by this authority.
    pub(crate) async fn connect(&self, router: &TestRouter) -> io::Result<TlsStream<TcpStream>> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(self.pem.as_bytes()).unwrap()).unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let stream = timeout(PATIENCE, TcpStream::connect(&router.http)).await.unwrap()?;
        let connector = TlsConnector::from(Arc::new(config));
        let name = ServerName::try_from("127.0.0.1").unwrap();
        timeout(PATIENCE, connector.connect(name, stream)).await.expect("a handshake")
    }

    /// A client with one connection to a router.
    pub(crate) async fn client(&self, router: &TestRouter) -> TlsTestClient {
        let stream = self.connect(router).await.unwrap();
        let (sender, connection) = handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        TlsTestClient(sender)
    }
}

/// A client that speaks TLS over one connection.
pub(crate) struct TlsTestClient(SendRequest<Full<Bytes>>);

impl TlsTestClient {
    pub(crate) async fn post(&mut self, path: &str, body: String) -> TestResponse {
        let request = Request::post(path).header("content-type", "application/json");
        self.send(request.body(Full::new(body.into())).unwrap()).await
    }

    pub(crate) async fn get(&mut self, path: &str) -> TestResponse {
        self.send(Request::get(path).body(Full::default()).unwrap()).await
    }

    async fn send(&mut self, mut request: Request<Full<Bytes>>) -> TestResponse {
        request.headers_mut().insert("host", "router".parse().unwrap());
        timeout(PATIENCE, self.0.ready()).await.expect("a connection").unwrap();
        let answer = timeout(PATIENCE, self.0.send_request(request)).await;
        TestRouter::read(answer.expect("an answer").unwrap()).await
    }
}

/// A folder of PEM files, gone afterwards.
pub(crate) struct PemFolder(PathBuf);

impl PemFolder {
    /// `name` is the test's own.
    pub(crate) fn new(name: &str) -> PemFolder {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("pem-{name}"));
        // It is there if the test ran before.
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        PemFolder(folder)
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }

    /// Puts a file in its place, as a whole and for its owner alone.
    pub(crate) fn write(&self, name: &str, text: &str) -> String {
        let (path, new) = (self.0.join(name), self.0.join("new"));
        fs::write(&new, text).unwrap();
        fs::set_permissions(&new, Permissions::from_mode(0o600)).unwrap();
        fs::rename(&new, &path).unwrap();
        self.path(name)
    }

    /// The flags of a router with this certificate, which is put in its place.
    pub(crate) fn show(&self, shown: &SignedKey) -> [String; 4] {
        // The key first: until the certificate is there, too, the two do not fit.
        let key = self.write("key.pem", shown.key);
        let cert = self.write("cert.pem", shown.cert);
        ["--tls-cert".into(), cert, "--tls-key".into(), key]
    }
}

impl Drop for PemFolder {
    fn drop(&mut self) {
        let _gone = fs::remove_dir_all(&self.0);
    }
}
