//! Keys, nonces and MACs; reads and writes nothing but random bytes.

use hmac::digest::KeyInit;
use hmac::{Hmac, Mac};
use rustix::rand::{GetRandomFlags, getrandom};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::fmt;

/// Fewest characters of a secret: 32 hexadecimal digits are 128 bits.
const SECRET_MIN: usize = 32;

/// Fewest different characters of a secret. 32 random hexadecimal digits practically never have
/// fewer; text that is typed by hand may.
const SECRET_VARIETY: usize = 8;

/// Random bytes of a generated secret.
const SECRET_BYTES: usize = 32;

/// Most secrets that are accepted at a time: the one in use, and the one before or after it.
const SECRETS_MAX: usize = 2;

/// Bytes of a nonce, so that none is drawn twice.
const NONCE: usize = 32;

type MacBytes = [u8; 32];

/// Names a key without telling it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct KeyId([u8; 8]);

/// What a dialler says ahead of its proof.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SecretOffer {
    nonce: [u8; NONCE],
    keys: Vec<KeyId>,
}

/// What an acceptor says of an offer: its proof.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SecretAnswer {
    nonce: [u8; NONCE],
    key: KeyId,
    mac: MacBytes,
}

/// What a dialler says of an answer: its proof.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SecretConfirmation(MacBytes);

/// A MAC over something that is said after both sides were proven.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionSeal(MacBytes);

/// Why there is no proof, or none that counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProofError {
    /// The two sides have no secret in common.
    NoCommonSecret,
    /// A MAC is not what it has to be: the other side does not know the secret, or somebody between
    /// the two changed what was said.
    Wrong,
    /// The kernel gave no random bytes.
    NoRandomness,
}

impl fmt::Display for ProofError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ProofError::NoCommonSecret => {
                "the two sides have different secrets: give both the same file as secret_file"
            }
            ProofError::Wrong => {
                "the proof of the fleet's secret is wrong: the other side does not know it, or what \
                 was said was changed on the way"
            }
            ProofError::NoRandomness => "the kernel gives no random bytes",
        })
    }
}

impl std::error::Error for ProofError {}

/// A MAC over parts, each with its length ahead: no two lists of parts are the same bytes.
fn mac(key: &MacBytes, parts: &[&[u8]]) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes a key of any length");
    for part in parts {
        mac.update(&(part.len() as u64).to_le_bytes());
        mac.update(part);
    }
    mac
}

fn finish(mac: Hmac<Sha256>) -> MacBytes {
    mac.finalize().into_bytes().into()
}

/// Compares in constant time.
fn verify(mac: Hmac<Sha256>, said: &MacBytes) -> Result<(), ProofError> {
    mac.verify_slice(said).map_err(|_| ProofError::Wrong)
}

fn random<const N: usize>() -> Result<[u8; N], ProofError> {
    let mut bytes = [0; N];
    match getrandom(&mut bytes, GetRandomFlags::empty()) {
        Ok(count) if count == N => Ok(bytes),
        _ => Err(ProofError::NoRandomness),
    }
}

#[derive(Clone, PartialEq, Eq)]
struct FleetKey {
    key: MacBytes,
    id: KeyId,
}

impl FleetKey {
    fn new(secret: &str) -> FleetKey {
        let key = finish(mac(b"kvferry fleet secret, version 1\0", &[secret.as_bytes()]));
        let mut id = [0; 8];
        id.copy_from_slice(&finish(mac(&key, &[b"id"]))[..8]);
        FleetKey { key, id: KeyId(id) }
    }

    fn carrier_key(&self, name: &[&[u8]]) -> CarrierKey {
        let parts: Vec<&[u8]> =
            [b"carrier".as_slice()].into_iter().chain(name.iter().copied()).collect();
        CarrierKey { id: self.id, key: finish(mac(&self.key, &parts)) }
    }

    /// The two MACs and the key of the session, over everything that both sides sent.
    fn proofs(
        &self,
        (purpose, said): (&str, &[u8]),
        offer: &SecretOffer,
        nonce: &[u8; NONCE],
    ) -> FleetProofs {
        let ids: Vec<u8> = offer.keys.iter().flat_map(|id| id.0).collect();
        // It may be long, and is hashed once.
        let said = Sha256::digest(said);
        let over = |label: &[u8]| {
            mac(&self.key, &[label, purpose.as_bytes(), &offer.nonce, &ids, nonce, &said])
        };
        FleetProofs {
            acceptor: over(b"acceptor"),
            dialler: over(b"dialler"),
            session: ProvenSession(finish(over(b"session"))),
        }
    }
}

/// MACs and session key of one exchange.
struct FleetProofs {
    acceptor: Hmac<Sha256>,
    dialler: Hmac<Sha256>,
    session: ProvenSession,
}

/// What a fleet knows and nobody else: one secret, or two while they are changed.
#[derive(Clone, PartialEq, Eq)]
pub struct FleetSecret(Vec<FleetKey>);

impl fmt::Debug for FleetSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|key| key.id)).finish()
    }
}

impl FleetSecret {
    /// Reads secrets, a line each; empty lines and those that begin with `#` are passed over.
    ///
    /// # Errors
    /// The text has no secret, more than two, or one that could be guessed; with the remedy.
    pub fn parse(text: &str) -> Result<FleetSecret, String> {
        let wrong = |why: String| {
            Err(format!(
                "{why}; `kvferry secret FILE` makes one, which stands in a line of its own"
            ))
        };
        let lines = text.lines().map(str::trim);
        let secrets: Vec<&str> =
            lines.filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
        if secrets.is_empty() {
            return wrong("there is no secret in it".into());
        }
        if secrets.len() > SECRETS_MAX {
            return wrong(format!(
                "there are {} secrets in it, and at most {SECRETS_MAX} are accepted at a time",
                secrets.len()
            ));
        }
        for secret in &secrets {
            let length = secret.chars().count();
            if length < SECRET_MIN {
                return wrong(format!(
                    "a secret of {length} characters can be guessed: it has to have {SECRET_MIN} or more"
                ));
            }
            let different = secret.chars().collect::<BTreeSet<char>>().len();
            if different < SECRET_VARIETY {
                return wrong(format!(
                    "a secret of {different} different characters can be guessed: it has to have \
                     {SECRET_VARIETY} or more"
                ));
            }
        }
        Ok(FleetSecret(secrets.into_iter().map(FleetKey::new).collect()))
    }

    /// Makes a new secret from random bytes, in the form that [`FleetSecret::parse`] reads.
    ///
    /// # Errors
    /// There are no random bytes.
    pub fn random() -> Result<String, ProofError> {
        Ok(random::<SECRET_BYTES>()?.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// What a dialler says with its hello; to be drawn for each anew.
    ///
    /// # Errors
    /// No random bytes.
    pub fn offer(&self) -> Result<SecretOffer, ProofError> {
        Ok(SecretOffer { nonce: random()?, keys: self.0.iter().map(|key| key.id).collect() })
    }

    /// Proves knowledge of a secret that both have, the first of ours that is offered. `said` is
    /// all that the offer came with, under a purpose that no other exchange has.
    ///
    /// # Errors
    /// No secret in common, or no random bytes.
    pub fn answer(
        &self,
        about: (&str, &[u8]),
        offer: &SecretOffer,
    ) -> Result<(SecretAnswer, ExpectedConfirmation), ProofError> {
        let key = self.0.iter().find(|key| offer.keys.contains(&key.id));
        let key = key.ok_or(ProofError::NoCommonSecret)?;
        let nonce = random()?;
        let FleetProofs { acceptor, dialler, session } = key.proofs(about, offer, &nonce);
        let answer = SecretAnswer { nonce, key: key.id, mac: finish(acceptor) };
        Ok((answer, ExpectedConfirmation { mac: dialler, session }))
    }

    /// Checks the proof of who answered the own offer, and proves the same in return.
    ///
    /// # Errors
    /// Another secret, or a wrong MAC.
    pub fn confirm(
        &self,
        about: (&str, &[u8]),
        offer: &SecretOffer,
        answer: &SecretAnswer,
    ) -> Result<(SecretConfirmation, ProvenSession), ProofError> {
        let key = self.0.iter().find(|key| key.id == answer.key);
        let key = key.ok_or(ProofError::NoCommonSecret)?;
        let FleetProofs { acceptor, dialler, session } = key.proofs(about, offer, &answer.nonce);
        verify(acceptor, &answer.mac)?;
        Ok((SecretConfirmation(finish(dialler)), session))
    }
}

/// What a dialler has to say to be proven.
pub struct ExpectedConfirmation {
    mac: Hmac<Sha256>,
    session: ProvenSession,
}

impl ExpectedConfirmation {
    /// # Errors
    /// The dialler does not know the secret.
    pub fn check(self, said: &SecretConfirmation) -> Result<ProvenSession, ProofError> {
        verify(self.mac, &said.0)?;
        Ok(self.session)
    }
}

/// A key by which a member seals what others carry to another member. It is derived of the secret
/// for one name, so that who has it can seal in no other.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CarrierKey {
    id: KeyId,
    key: MacBytes,
}

impl fmt::Debug for CarrierKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CarrierKey").field(&self.id).finish_non_exhaustive()
    }
}

impl CarrierKey {
    /// Seals what is said, in parts, as a text: the id of the secret's key and the MAC, in
    /// hexadecimal digits.
    pub fn seal(&self, said: &[&[u8]]) -> String {
        let mac = finish(mac(&self.key, said));
        self.id.0.iter().chain(&mac).map(|byte| format!("{byte:02x}")).collect()
    }
}

impl FleetSecret {
    /// The key by which `name` seals, of the first secret.
    pub fn carrier_key(&self, name: &[&[u8]]) -> CarrierKey {
        self.0[0].carrier_key(name)
    }

    /// Checks what [`CarrierKey::seal`] made, in this name.
    ///
    /// # Errors
    /// No seal, one of another secret, or one over something else or in another name.
    pub fn check_carried(
        &self,
        name: &[&[u8]],
        said: &[&[u8]],
        seal: &str,
    ) -> Result<(), ProofError> {
        let bytes = hex(seal).ok_or(ProofError::Wrong)?;
        let (id, mac_said) = bytes.split_at(8);
        let key = self.0.iter().find(|key| key.id.0 == id).ok_or(ProofError::NoCommonSecret)?;
        let mac_of = mac(&key.carrier_key(name).key, said);
        mac_of.verify_slice(mac_said).map_err(|_| ProofError::Wrong)
    }
}

/// The bytes of an id and a MAC in hexadecimal digits.
fn hex(text: &str) -> Option<[u8; 40]> {
    let mut bytes = [0; 40];
    let is_hex = text.len() == 2 * bytes.len() && text.bytes().all(|c| c.is_ascii_hexdigit());
    if !is_hex {
        return None;
    }
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(bytes)
}

/// A key that only the two sides of one exchange have.
pub struct ProvenSession(MacBytes);

impl ProvenSession {
    /// A MAC over what is said, in parts; they have to differ from all else that is sealed in the
    /// session.
    pub fn seal(&self, said: &[&[u8]]) -> SessionSeal {
        SessionSeal(finish(mac(&self.0, said)))
    }

    /// # Errors
    /// It was not sealed by the other side, or was changed since.
    pub fn check(&self, said: &[&[u8]], seal: &SessionSeal) -> Result<(), ProofError> {
        verify(mac(&self.0, said), &seal.0)
    }
}
