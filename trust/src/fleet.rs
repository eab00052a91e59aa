//! What a plane has of a secret, and what its acceptor and its diallers say where there is none.

use crate::file::SecretFile;
use crate::proof::{ExpectedConfirmation, FleetSecret, SecretAnswer, SecretOffer};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Why a dialler that proves nothing is refused.
pub const NO_OFFER: &str = "a proof of the fleet's secret is demanded here, and the hello has none: \
    give its sender the same secret_file";

/// Why there is no proof for who demands one.
pub const NO_SECRET: &str = "a proof of the fleet's secret is demanded, and there is no secret_file \
    where it has to come from: give both sides the same";

/// What an acceptor answers to an offer, and what it then expects.
pub type ProofAnswer = (SecretAnswer, ExpectedConfirmation);

/// What a plane can prove and has others prove; nothing if there is no secret. Clones have one file
/// and count as one.
#[derive(Clone, Debug)]
pub struct FleetProof {
    file: Option<Arc<SecretFile>>,
    /// Connections of who could not be proven.
    unproven: Arc<AtomicU64>,
}

impl FleetProof {
    /// With the secret of a file, if there is to be one.
    ///
    /// # Errors
    /// A file that is none, with the remedy.
    pub fn open(file: Option<&Path>) -> Result<FleetProof, String> {
        let file = file.map(SecretFile::open).transpose()?.map(Arc::new);
        Ok(FleetProof { file, unproven: Arc::default() })
    }

    /// True if there is a secret, which peers have to prove.
    pub fn is_demanded(&self) -> bool {
        self.file.is_some()
    }

    /// The secret as its file has it now.
    pub fn secret(&self) -> Option<Arc<FleetSecret>> {
        let warn = |why: &str| tracing::warn!(why, "the secret before it stays in use");
        self.file.as_ref().map(|file| file.secret(warn))
    }

    /// What to say to who greets this plane with or without an offer; nothing if neither side has a
    /// secret. See [`FleetSecret::answer`] for `about`.
    ///
    /// # Errors
    /// Why it is refused.
    pub fn answer(
        &self,
        about: (&str, &[u8]),
        offer: Option<&SecretOffer>,
    ) -> Result<Option<ProofAnswer>, String> {
        match (self.secret(), offer) {
            (None, None) => Ok(None),
            (None, Some(_)) => Err(NO_SECRET.into()),
            (Some(_), None) => Err(NO_OFFER.into()),
            (Some(secret), Some(offer)) => {
                secret.answer(about, offer).map(Some).map_err(|why| why.to_string())
            }
        }
    }

    /// Says that somebody was refused: at the first time, the second, the fourth and so on, so that
    /// strangers do not fill the log.
    pub fn warn_of_refusal(&self, plane: &str, why: &str) {
        let times = self.unproven.fetch_add(1, Ordering::Relaxed) + 1;
        if times.is_power_of_two() {
            tracing::warn!(plane, times, why, "a connection was refused");
        }
    }
}
