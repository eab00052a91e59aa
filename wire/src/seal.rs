//! What is said of proofs on a link, and the seals on what follows them.

use kvferry_engine::fabric::LinkId;
use kvferry_trust::{ProvenSession, SecretAnswer, SecretConfirmation, SecretOffer, SessionSeal};
use serde::{Deserialize, Serialize};

/// First bytes of what is said of proofs. As those of native frames they start nothing else.
const MAGIC: [u8; 2] = [0xc1, b'p'];

/// What is said of proofs.
#[derive(Serialize, Deserialize)]
pub(crate) enum ProofFrame {
    /// Comes with what it is about.
    Offer(SecretOffer),
    Answer(SecretAnswer),
    Confirmation(SecretConfirmation),
    /// Comes with what is sealed. Its number grows with each of one direction.
    Sealed {
        number: u64,
        seal: SessionSeal,
    },
    /// Why somebody is not listened to, for people.
    Refusal(String),
}

impl ProofFrame {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(rmp_serde::to_vec(self).expect("plain data always encodes"));
        bytes
    }

    pub(crate) fn decode(part: &[u8]) -> Option<ProofFrame> {
        rmp_serde::from_slice(part.strip_prefix(&MAGIC)?).ok()
    }
}

/// A link on which both sides were proven.
pub(crate) struct SealedLink {
    session: ProvenSession,
    /// Whether this side dialled.
    is_dialler: bool,
    sent: u64,
    received: u64,
}

/// Of a seal: whether the dialler said it. Its number and the frame follow.
const fn direction(by_dialler: bool) -> [u8; 1] {
    [by_dialler as u8]
}

impl SealedLink {
    pub(crate) fn new(link: LinkId, session: ProvenSession) -> SealedLink {
        SealedLink { session, is_dialler: !link.is_inbound(), sent: 0, received: 0 }
    }

    /// The seal of what is sent next. Of what is not sent the number is left out.
    pub(crate) fn seal(&mut self, frame: &[u8]) -> ProofFrame {
        let number = self.sent;
        self.sent += 1;
        let said = [&direction(self.is_dialler)[..], &number.to_le_bytes(), frame];
        ProofFrame::Sealed { number, seal: self.session.seal(&said) }
    }

    /// Whether a frame is what the other side said, and later than all that it was heard to say.
    pub(crate) fn check(&mut self, number: u64, frame: &[u8], seal: &SessionSeal) -> bool {
        let said = [&direction(!self.is_dialler)[..], &number.to_le_bytes(), frame];
        let is_good = number >= self.received && self.session.check(&said, seal).is_ok();
        if is_good {
            self.received = number.saturating_add(1);
        }
        is_good
    }
}
