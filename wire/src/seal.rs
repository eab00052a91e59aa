//! What is said of proofs on a link, and the seals on what follows them.

use kvferry_engine::fabric::LinkId;
use kvferry_trust::{ProvenSession, SecretAnswer, SecretConfirmation, SecretOffer, SessionSeal};
use serde::{Deserialize, Serialize};

/// First bytes of what is said of proofs. No MessagePack value and no native frame starts with them.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proven::PROOF_BYTES;
    use crate::signed::attach;
    use kvferry_engine::core::dialect::native;
    use kvferry_trust::FleetProof;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    fn proof() -> FleetProof {
        let name = format!("kvferry-{}-seal", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::write(&path, "0123456789abcdef0123456789abcdef").expect("a file");
        fs::set_permissions(&path, Permissions::from_mode(0o400)).expect("its mode");
        let proof = FleetProof::open(Some(&path)).expect("a secret");
        fs::remove_file(path).expect("it is there");
        proof
    }

    #[test]
    fn native_frames_are_no_proofs() {
        let proof = ProofFrame::Refusal("why".into()).encode();
        assert!(ProofFrame::decode(&proof).is_some());
        // 0xc1 is the byte that no MessagePack value starts with.
        assert_eq!((proof[0], native::MAGIC[0]), (0xc1, 0xc1));
        let other = [&native::MAGIC[..], &proof[MAGIC.len()..]].concat();
        assert!(ProofFrame::decode(&other).is_none() && native::peek(&proof).is_none());
    }

    #[test]
    fn proofs_fit_into_what_is_set_aside_for_them() {
        let proof = proof();
        let secret = proof.secret().expect("it has one");
        let offer = secret.offer().expect("a random number");
        let subject = ("test", &b"hello"[..]);
        let (answer, _) =
            proof.answer(subject, Some(&offer)).expect("it is known").expect("a secret");
        let (confirmation, session) =
            secret.confirm(subject, &offer, &answer).expect("it is right");
        let mut sealed = SealedLink::new(LinkId(1), session);
        sealed.sent = u64::MAX;
        let seal = ProofFrame::Sealed { number: u64::MAX, seal: sealed.session.seal(&[b""]) };
        let [offer, seal] = [ProofFrame::Offer(offer), seal].map(|frame| {
            assert!(attach(b"\x80", &frame).is_some(), "a heartbeat has room for it");
            frame.encode()
        });
        let answer = ProofFrame::Answer(answer).encode();
        let confirmation = ProofFrame::Confirmation(confirmation).encode();
        for frame in [offer, answer, confirmation, seal] {
            // A part costs 64 bytes beside its own.
            assert!(frame.len() + 2 * 64 <= PROOF_BYTES, "{} bytes", frame.len());
        }
    }
}
