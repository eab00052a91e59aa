//! Certificates of a test, in files, and clients that speak TLS.

use crate::rig::{PATIENCE, TestResponse, TestRouter};
use bytes::Bytes;
use http_body_util::Full;
use hyper::Request;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, date_time_ymd,
};
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

/// An authority of the test.
pub(crate) struct TestAuthority(CertifiedIssuer<'static, KeyPair>);

/// A certificate and its key, in PEM.
pub(crate) struct SignedKey {
    pub(crate) cert: String,
    pub(crate) key: String,
}

impl SignedKey {
    fn acceptor(&self) -> TlsAcceptor {
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
    pub(crate) fn new(name: &str) -> TestAuthority {
        let mut params = CertificateParams::new([]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let own = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap());
        TestAuthority(own.unwrap())
    }

    pub(crate) fn pem(&self) -> String {
        self.0.pem()
    }

    /// A certificate for a name or address.
    pub(crate) fn sign(&self, name: &str) -> SignedKey {
        self.sign_params(CertificateParams::new([name.to_owned()]).unwrap())
    }

    fn sign_params(&self, params: CertificateParams) -> SignedKey {
        let key = KeyPair::generate().unwrap();
        let cert = params.signed_by(&key, &self.0).unwrap();
        SignedKey { cert: cert.pem(), key: key.serialize_pem() }
    }

    /// What has a server show a certificate for a name or address.
    pub(crate) fn acceptor(&self, name: &str) -> TlsAcceptor {
        self.sign(name).acceptor()
    }

    /// The same with one that has expired.
    pub(crate) fn late_acceptor(&self, name: &str) -> TlsAcceptor {
        let mut params = CertificateParams::new([name.to_owned()]).unwrap();
        params.not_after = date_time_ymd(2001, 9, 9);
        self.sign_params(params).acceptor()
    }

    /// A TLS connection to a router whose certificate is to be signed by this authority.
    pub(crate) async fn connect(&self, router: &TestRouter) -> io::Result<TlsStream<TcpStream>> {
        let mut roots = RootCertStore::empty();
        roots.add(self.0.der().clone()).unwrap();
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
        let key = self.write("key.pem", &shown.key);
        let cert = self.write("cert.pem", &shown.cert);
        ["--tls-cert".into(), cert, "--tls-key".into(), key]
    }
}

impl Drop for PemFolder {
    fn drop(&mut self) {
        let _gone = fs::remove_dir_all(&self.0);
    }
}
