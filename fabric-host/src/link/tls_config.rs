//! What both sides of an encrypted connection bring to TLS: a key that nobody is expected to know.

use ring::rand::SystemRandom;
use ring::signature::Ed25519KeyPair;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{ClientConfig, ClientConnection, Resumption};
use rustls::crypto::ring::{cipher_suite, default_provider, sign::any_eddsa_type};
use rustls::crypto::{CryptoProvider, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{
    CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime,
};
use rustls::server::{
    AlwaysResolvesServerRawPublicKeys, NoServerSessionStorage, ServerConfig, ServerConnection,
};
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{Connection, DigitallySignedStruct, Error, SignatureScheme};
use std::sync::Arc;

/// TLS of one plane. The raw public key is drawn when the plane is made: it says nothing of who has
/// it. Who is at the other end is proven by the fleet's secret, over what is
/// [bound](channel_binding) to this very connection.
#[derive(Debug)]
pub(crate) struct LinkTls {
    server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
}

impl LinkTls {
    /// # Errors
    /// The kernel gives no random bytes.
    pub(crate) fn new() -> Result<LinkTls, String> {
        let wrong = |why: &dyn std::fmt::Display| format!("TLS: {why}");
        let provider = Arc::new(CryptoProvider {
            cipher_suites: vec![cipher_suite::TLS13_AES_128_GCM_SHA256],
            ..default_provider()
        });
        let key = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new());
        let key = key.map_err(|why| wrong(&why))?;
        let key = PrivatePkcs8KeyDer::from(key.as_ref());
        let key = any_eddsa_type(&key).map_err(|why| wrong(&why))?;
        let public = key.public_key().ok_or("TLS: a key without its public half")?;
        let public = vec![CertificateDer::from(public.to_vec())];
        let raw = AlwaysResolvesServerRawPublicKeys::new(Arc::new(CertifiedKey::new(public, key)));
        let mut server = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&TLS13])
            .map_err(|why| wrong(&why))?
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(raw));
        server.send_tls13_tickets = 0;
        server.session_storage = Arc::new(NoServerSessionStorage {});
        let mut client = ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&TLS13])
            .map_err(|why| wrong(&why))?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(AnyRawKey(provider)))
            .with_no_client_auth();
        client.resumption = Resumption::disabled();
        client.enable_sni = false;
        Ok(LinkTls { server: Arc::new(server), client: Arc::new(client) })
    }

    /// Of who was dialled.
    pub(super) fn accept(&self) -> Result<Connection, Error> {
        Ok(ServerConnection::new(self.server.clone())?.into())
    }

    /// Of who dials.
    pub(super) fn dial(&self) -> Result<Connection, Error> {
        // A name that is neither sent nor looked at.
        let name = ServerName::try_from("kvferry").expect("a DNS name");
        Ok(ClientConnection::new(self.client.clone(), name)?.into())
    }
}

/// What only the two ends of a connection have in common (RFC 9266). Somebody between the two has
/// a connection with each, and other bytes.
pub(super) fn channel_binding(tls: &Connection) -> Result<[u8; 32], Error> {
    tls.export_keying_material([0; 32], b"EXPORTER-Channel-Binding", Some(b""))
}

/// Takes any key whose half is proven to be there.
#[derive(Debug)]
struct AnyRawKey(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyRawKey {
    fn verify_server_cert(
        &self,
        _key: &CertificateDer<'_>,
        _chain: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _key: &CertificateDer<'_>,
        _signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("TLS 1.2 is not spoken".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let key = SubjectPublicKeyInfoDer::from(key.as_ref());
        let schemes = &self.0.signature_verification_algorithms;
        verify_tls13_signature_with_raw_key(message, &key, signed, schemes)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}
