//! Mutual proof that two processes know the secret of a fleet, without saying it.
//!
//! ```text
//! dialler                                         acceptor
//!    offer: nonce, ids of its keys  ----------->     answer(): picks a key that both have
//!    confirm(): checks the answer   <-----------     answer: nonce, id, MAC
//!    confirmation: MAC              ----------->     check()
//! ```
//!
//! Every MAC is HMAC-SHA256 over the purpose, both nonces and the SHA-256 of everything sent with
//! the offer. So no message can be replayed to another process, at another time, in the other
//! direction or for another purpose. Afterwards both sides have a [`ProvenSession`], which seals
//! later messages. The proof is one of membership in the fleet: a process that knows the secret can
//! speak for each engine of the fleet. Nothing here is encrypted.
//!
//! What a member tells another one by way of others, who cannot know the secret, it seals with a
//! [`CarrierKey`]. That proves who said it and not when: what is sealed has to name its use.
//!
//! A file has one secret, or two while they are changed ([`SecretFile`]): the first is offered
//! first, both are accepted.
//!
//! ```
//! use kvferry_trust::FleetSecret;
//!
//! let secret = FleetSecret::parse("c5b1f2d0a7e94836b1c2d3e4f5a6b7c8\n").unwrap();
//! let hello: &[u8] = b"here is engine d0, for engine p0";
//! let offer = secret.offer().unwrap();
//! let (answer, expected) = secret.answer(("example", hello), &offer).unwrap();
//! let (confirmation, dialler) = secret.confirm(("example", hello), &offer, &answer).unwrap();
//! let acceptor = expected.check(&confirmation).unwrap();
//! assert_eq!(dialler.seal(&[b"welcome"]), acceptor.seal(&[b"welcome"]));
//!
//! let stranger = FleetSecret::parse("0f1e2d3c4b5a69788796a5b4c3d2e1f0").unwrap();
//! assert!(secret.answer(("example", hello), &stranger.offer().unwrap()).is_err());
//! ```
#![warn(missing_docs)]

mod file;
mod fleet;
mod network;
mod proof;
mod reload;

pub use self::file::{SecretFile, VARIABLE};
pub use self::fleet::{FleetProof, NO_OFFER, NO_SECRET, ProofAnswer};
pub use self::network::{
    INSECURE_VARIABLE, NetworkRefusal, NetworkTrust, are_loopback, insecure_of_environment,
    is_insecure,
};
pub use self::proof::{
    CarrierKey, ExpectedConfirmation, FleetSecret, ProofError, ProvenSession, SecretAnswer,
    SecretConfirmation, SecretOffer, SessionSeal,
};
pub use self::reload::{ReloadedFiles, read_private};
