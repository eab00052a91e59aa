//! TLS of HTTP, by rustls: the certificate that a listener shows, and the authorities by which
//! instances are verified. Files are read anew when they change, so that nothing is restarted for
//! it.

use clap::Args;
use kvferry_engine::fabric::unbracketed;
use kvferry_trust::{ReloadedFiles, read_private};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{CertificateError, ClientConfig, Error, OtherError, RootCertStore, ServerConfig};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector, client, server};

/// The only protocol that is spoken over TLS, as ALPN names it.
const HTTP: &[u8] = b"http/1.1";

/// The first byte of a connection that begins with a TLS handshake.
const HANDSHAKE: u8 = 0x16;

/// The certificate of a listener.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct TlsArgs {
    /// Serve clients over TLS, and not otherwise, with the certificate of this PEM file, followed by
    /// those of intermediate authorities. Read anew when it changes
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// The key of --tls-cert, in PEM, which nobody but its owner and its group may read
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
}

impl TlsArgs {
    /// What a listener is to show, if it is to speak TLS.
    ///
    /// # Errors
    /// A file that cannot be used: which, why and the remedy.
    pub(crate) fn certificate(&self) -> Result<Option<ServerCertificate>, String> {
        let (Some(cert), Some(key)) = (&self.tls_cert, &self.tls_key) else { return Ok(None) };
        let files = ReloadedFiles::open([cert.clone(), key.clone()], read_server)?;
        Ok(Some(ServerCertificate(files)))
    }
}

/// The certificate of a listener and its key, as their files have them.
#[derive(Debug)]
pub(crate) struct ServerCertificate(ReloadedFiles<TlsAcceptor, 2>);

impl ServerCertificate {
    /// Whether who connected begins to speak TLS; waits until something was said.
    ///
    /// # Errors
    /// The connection is broken, or was closed before.
    pub(crate) async fn is_spoken(stream: &TcpStream) -> io::Result<bool> {
        let mut first = [0];
        match stream.peek(&mut first).await? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(first[0] == HANDSHAKE),
        }
    }

    /// Shakes hands with a client.
    ///
    /// # Errors
    /// What it said, or that it said nothing more.
    pub(crate) async fn accept(
        &self,
        stream: TcpStream,
    ) -> io::Result<server::TlsStream<TcpStream>> {
        let acceptor = self.0.value(|why| {
            tracing::warn!(why, "the certificate before it stays in use");
        });
        acceptor.accept(stream).await
    }
}

/// The authorities that sign the certificates of instances.
#[derive(Debug)]
pub(crate) struct LegAuthorities(ReloadedFiles<TlsConnector, 1>);

impl LegAuthorities {
    /// Those of a PEM file.
    ///
    /// # Errors
    /// A file that cannot be used: which, why and the remedy.
    pub(crate) fn open(file: &Path) -> Result<LegAuthorities, String> {
        ReloadedFiles::open([file.into()], read_authorities).map(LegAuthorities)
    }

    /// Shakes hands with the instance at `to`, `HOST:PORT`, which has to prove that it is at HOST.
    ///
    /// # Errors
    /// Why it is not verified, with the remedy.
    pub(crate) async fn connect(
        &self,
        to: &str,
        stream: TcpStream,
    ) -> Result<client::TlsStream<TcpStream>, String> {
        let connector = self.0.value(|why| {
            tracing::warn!(why, "the authorities before it stay in use");
        });
        let host = to.rsplit_once(':').map_or(to, |(host, _)| host);
        let host = unbracketed(host);
        let name = ServerName::try_from(host.to_owned())
            .map_err(|_| format!("{host} is no name that a certificate can have"))?;
        connector.connect(name, stream).await.map_err(|why| refusal(&why, host))
    }
}

/// Why an instance is not verified, and what to do.
fn refusal(why: &io::Error, host: &str) -> String {
    let Some(tls) = why.get_ref().and_then(|it| it.downcast_ref::<Error>()) else {
        return format!("it broke off the TLS handshake ({why}); {SPEAK_TLS}");
    };
    let (said, remedy) = match tls {
        Error::InvalidMessage(_) => return format!("it does not speak TLS; {SPEAK_TLS}"),
        Error::InvalidCertificate(why) => {
            let (why, remedy) = of_certificate(why);
            (format!("its certificate is not taken for {host}: {why}"), remedy)
        }
        other => (
            format!("no TLS connection: {other}"),
            "give it a certificate, and TLS 1.2 or 1.3, that clients take",
        ),
    };
    format!("{said}; {remedy}")
}

/// What is wrong with a certificate, in words that do not change with time, and what to do.
fn of_certificate(why: &CertificateError) -> (String, &'static str) {
    use CertificateError as E;
    const RENEW: &str = "renew it, or set the clock of this machine right";
    let remedy = match why {
        E::ExpiredContext { not_after, .. } => {
            return (format!("it expired at Unix time {}", not_after.as_secs()), RENEW);
        }
        E::NotValidYetContext { not_before, .. } => {
            return (format!("it begins at Unix time {}", not_before.as_secs()), RENEW);
        }
        E::UnknownIssuer | E::BadSignature => {
            "--legs-ca has no authority that signed it: add that one to the file"
        }
        E::NotValidForName | E::NotValidForNameContext { .. } => {
            "it needs the host that the instance registers with as a subjectAltName"
        }
        E::Other(OtherError(why)) if why.to_string().contains("CaUsedAsEndEntity") => {
            "it is that of an authority: have it made with basicConstraints CA:FALSE"
        }
        _ => "give the instance another one",
    };
    (why.to_string(), remedy)
}

/// What to do about an instance without TLS.
pub(crate) const SPEAK_TLS: &str =
    "--legs-ca has all instances speak TLS: start vLLM with --ssl-certfile and --ssl-keyfile";

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn read_server([cert, key]: &[PathBuf; 2]) -> Result<TlsAcceptor, String> {
    let of_cert = |why: String| format!("--tls-cert {}: {why}", cert.display());
    let of_key = |why: String| format!("--tls-key {}: {why}", key.display());
    let chain = certificates(cert).map_err(of_cert)?;
    let text = read_private(key).map_err(of_key)?;
    let own = PrivateKeyDer::from_pem_slice(text.as_bytes()).map_err(|why| match why {
        pem::Error::NoItemsFound => of_key(
            "it has no private key in PEM; give one that is not encrypted, as `openssl pkey` \
             writes it"
                .into(),
        ),
        why => {
            of_key(format!("it is no PEM: {why}; give a private key as `openssl pkey` writes it"))
        }
    })?;
    let provider = provider();
    let own = provider.key_provider.load_private_key(own).map_err(|why| {
        of_key(format!(
            "it cannot be used: {why}; give a key of RSA, ECDSA with P-256 or P-384, or Ed25519"
        ))
    })?;
    let shown = rustls::sign::CertifiedKey::new(chain, own);
    match shown.keys_match() {
        // Not every kind of key tells which certificate it is for.
        Ok(()) | Err(Error::InconsistentKeys(rustls::InconsistentKeys::Unknown)) => {}
        Err(Error::InconsistentKeys(_)) => {
            let why = format!(
                "it is not the key of the certificate in --tls-cert {}; give the one that the \
                 certificate was made for",
                cert.display()
            );
            return Err(of_key(why));
        }
        Err(why) => {
            return Err(of_cert(format!(
                "its first certificate cannot be used: {why}; give an X.509 certificate of version \
                 3"
            )));
        }
    }
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|why| of_cert(why.to_string()))?
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(rustls::sign::SingleCertAndKey::from(shown)));
    config.alpn_protocols = vec![HTTP.into()];
    Ok(Arc::new(config).into())
}

fn read_authorities([path]: &[PathBuf; 1]) -> Result<TlsConnector, String> {
    let wrong = |why: String| format!("--legs-ca {}: {why}", path.display());
    let mut roots = RootCertStore::empty();
    for authority in certificates(path).map_err(wrong)? {
        roots.add(authority).map_err(|why| {
            wrong(format!("a certificate in it cannot be used: {why}; give those of authorities"))
        })?;
    }
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|why| wrong(why.to_string()))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![HTTP.into()];
    Ok(Arc::new(config).into())
}

/// The certificates of a PEM file, of which there has to be one.
fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let text = std::fs::read(path).map_err(|why| {
        format!("it cannot be read: {why}; give the path of a file that this user can read")
    })?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let found = found.map_err(|why| {
        format!("it is no PEM: {why}; give certificates as `openssl x509` writes them")
    })?;
    match found.is_empty() {
        true => Err("it has no certificate in PEM; give one as `openssl x509` writes it".into()),
        false => Ok(found),
    }
}
