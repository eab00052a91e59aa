//! Registrations that are proven to be of who knows the fleet's secret, over a channel on which
//! routers that know nothing of it are told the same.
//!
//! ```text
//! instance                                        router
//!    heartbeat, with an offer     ----------->
//!                                 <-----------    answer, if it has a secret
//!    confirmation, heartbeat, sealed ---------->  the core is told that the link is proven
//!    heartbeats, each sealed      ----------->
//! ```
//!
//! An offer and a seal are the value of a last key of the heartbeat, which others pass over; a seal
//! is over all bytes of it without that key. Other frames, which only routers of ours get, are sealed
//! by a part ahead of them.

use crate::plane::ZmqPlane;
use crate::seal::{ProofFrame, SealedLink};
use kvferry_engine::core::Nanos;
use kvferry_engine::core::dialect::native;
use kvferry_engine::fabric::{
    ControlEvent, ControlPlane, Endpoint, LinkId, LinkKind, NextPoll, Refused,
};
use kvferry_engine::text::printable;
use kvferry_trust::{
    ExpectedConfirmation, FleetProof, NO_OFFER, SecretAnswer, SecretConfirmation, SecretOffer,
};
use std::collections::BTreeMap;
use std::task::Waker;

/// What the proof is for.
const PURPOSE: (&str, &[u8]) = ("registration", b"");

/// The last key of a heartbeat, with its length ahead as MessagePack has it.
const KEY: &[u8] = b"\xadkvferry_proof";

/// Longest proof that a heartbeat carries, in bytes.
const PROOF_MAX: usize = u8::MAX as usize;

/// The key by which instances of ours say more than others.
const OURS: &[u8] = b"\xa7kvferry";

/// Characters that are kept of why somebody else refuses.
const WHY_MAX: usize = 256;

/// A control event, or what a proof says of what comes after it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SignedEvent {
    /// As the plane reports it. On a proven link it was said by who was proven.
    Control(ControlEvent),
    /// Who speaks on this link knows the secret.
    Proven(LinkId),
    /// A registration with a proof that is none, which is dropped; why.
    Wrong(LinkId, String),
}

/// How far a link of registrations is.
enum SignedLink {
    /// Nothing is proven, and who has nothing to prove was told so or not.
    Plain {
        is_told: bool,
    },
    /// This side registers, and offered a proof with its last heartbeat.
    Offered {
        offer: SecretOffer,
        heartbeat: Vec<u8>,
    },
    /// The other side registers, and has to confirm.
    Answered(Box<AnsweredOffer>),
    Proven(SealedLink),
}

/// An offer, what was answered, and what confirms that.
struct AnsweredOffer {
    offer: SecretOffer,
    answer: SecretAnswer,
    expected: ExpectedConfirmation,
}

/// A control plane whose registrations are signed where there is a secret.
pub struct SignedPlane<P> {
    plane: P,
    proof: FleetProof,
    /// Whether who registers here is to be told that it has to sign.
    is_demanded: bool,
    links: BTreeMap<LinkId, SignedLink>,
}

/// A heartbeat with a proof as its last key; none if it is no map with room for it.
pub(crate) fn attach(heartbeat: &[u8], proof: &ProofFrame) -> Option<Vec<u8>> {
    let (head, rest) = heartbeat.split_first().filter(|(head, _)| (0x80..=0x8e).contains(*head))?;
    let proof = proof.encode();
    let len = u8::try_from(proof.len()).ok()?;
    Some([&[head + 1], rest, KEY, &[0xc4, len], &proof].concat())
}

/// The heartbeat without the proof that is its last key, and the proof; none if there is none.
fn detach(frame: &[u8]) -> Option<(Vec<u8>, ProofFrame)> {
    let head = frame.first().filter(|head| (0x81..=0x8f).contains(*head))?;
    let from = frame.len().saturating_sub(KEY.len() + 2 + PROOF_MAX);
    let mut places = (from..frame.len()).rev().filter(|at| frame[*at..].starts_with(KEY));
    places.find_map(|at| {
        let [0xc4, len, proof @ ..] = &frame[at + KEY.len()..] else { return None };
        let proof = (proof.len() == usize::from(*len)).then(|| ProofFrame::decode(proof))??;
        let mut heartbeat = frame[..at].to_vec();
        heartbeat[0] = head - 1;
        Some((heartbeat, proof))
    })
}

impl<P: ControlPlane> SignedPlane<P> {
    /// A plane that signs, and has signatures checked, by the secret of this proof if it has one.
    pub fn new(plane: P, proof: FleetProof) -> SignedPlane<P> {
        SignedPlane { plane, proof, is_demanded: false, links: BTreeMap::new() }
    }

    /// Has who registers without a proof told that it needs one; who is taken is the core's matter.
    pub fn demanding(self) -> SignedPlane<P> {
        SignedPlane { is_demanded: true, ..self }
    }

    fn note(&mut self, link: LinkId, channel: LinkKind) {
        if channel == LinkKind::Discovery {
            self.links.entry(link).or_insert(SignedLink::Plain { is_told: false });
        }
    }

    fn send_sealed(&mut self, link: LinkId, frame: &[u8]) -> Result<(), Refused> {
        let Some(SignedLink::Proven(sealed)) = self.links.get_mut(&link) else {
            return Err(Refused::Gone);
        };
        let seal = sealed.seal(frame);
        match attach(frame, &seal) {
            Some(signed) => self.plane.send(link, &[&signed]),
            None => self.plane.send(link, &[&seal.encode(), frame]),
        }
    }

    /// Sends a heartbeat with an offer, if there is a secret.
    fn offer(&mut self, link: LinkId, heartbeat: &[u8]) -> Result<(), Refused> {
        let Some(secret) = self.proof.secret() else { return self.plane.send(link, &[heartbeat]) };
        let offer = match self.links.get(&link) {
            Some(SignedLink::Offered { offer, .. }) => offer.clone(),
            _ => secret.offer().map_err(|why| Refused::Invalid(why.to_string().into()))?,
        };
        let Some(signed) = attach(heartbeat, &ProofFrame::Offer(offer.clone())) else {
            return self.plane.send(link, &[heartbeat]);
        };
        self.plane.send(link, &[&signed])?;
        let heartbeat = heartbeat.to_vec();
        self.links.insert(link, SignedLink::Offered { offer, heartbeat });
        Ok(())
    }

    /// The router knows a secret, too: it is proven to it, and told the last heartbeat again.
    fn on_answer(&mut self, link: LinkId, answer: &SecretAnswer) {
        let Some(SignedLink::Offered { offer, .. }) = self.links.get(&link) else { return };
        let Some(secret) = self.proof.secret() else { return };
        match secret.confirm(PURPOSE, offer, answer) {
            Ok((confirmation, session)) => {
                let frame = ProofFrame::Confirmation(confirmation).encode();
                if self.plane.send(link, &[&frame]).is_err() {
                    return;
                }
                let proven = SignedLink::Proven(SealedLink::new(link, session));
                if let Some(SignedLink::Offered { heartbeat, .. }) = self.links.insert(link, proven)
                {
                    // The next heartbeat says what did not get out.
                    let _full = self.send_sealed(link, &heartbeat);
                }
            }
            Err(why) => self.proof.warn_of_refusal("registration", &why.to_string()),
        }
    }

    /// Tells who registers, in the log of that process, why it is not taken.
    fn refuse(&mut self, link: LinkId, why: &str) {
        // Who does not read it learns nothing.
        let _full = self.plane.send(link, &[&ProofFrame::Refusal(why.into()).encode()]);
    }

    fn wrong(&mut self, link: LinkId, why: &str, out: &mut Vec<SignedEvent>) {
        self.refuse(link, why);
        out.push(SignedEvent::Wrong(link, why.into()));
    }

    /// An offer is repeated until its answer is there, and has the same one each time: a proof of another
    /// one would be wrong.
    fn on_offer(&mut self, link: LinkId, offer: &SecretOffer, out: &mut Vec<SignedEvent>) {
        if let Some(SignedLink::Answered(known)) = self.links.get(&link)
            && known.offer == *offer
        {
            // If it does not get out the offer comes again.
            let _full =
                self.plane.send(link, &[&ProofFrame::Answer(known.answer.clone()).encode()]);
            return;
        }
        match self.proof.answer(PURPOSE, Some(offer)) {
            Ok(Some((answer, expected))) => {
                if self.plane.send(link, &[&ProofFrame::Answer(answer.clone()).encode()]).is_ok() {
                    let offer = offer.clone();
                    let answered = AnsweredOffer { offer, answer, expected };
                    self.links.insert(link, SignedLink::Answered(Box::new(answered)));
                }
            }
            Ok(None) => {}
            Err(why) => self.wrong(link, &why, out),
        }
    }

    fn on_sealed(
        &mut self,
        link: LinkId,
        (proof, frame): (ProofFrame, Vec<u8>),
        out: &mut Vec<SignedEvent>,
    ) {
        let ProofFrame::Sealed { number, seal } = proof else { return };
        let Some(SignedLink::Proven(sealed)) = self.links.get_mut(&link) else { return };
        match sealed.check(number, &frame, &seal) {
            true => {
                let parts = vec![frame];
                out.push(SignedEvent::Control(ControlEvent::Frame { link, parts }));
            }
            false => self.wrong(link, "it is not sealed by who was proven on its link", out),
        }
    }

    fn on_confirmation(
        &mut self,
        link: LinkId,
        said: &SecretConfirmation,
        out: &mut Vec<SignedEvent>,
    ) {
        let Some(state @ SignedLink::Answered(_)) = self.links.get_mut(&link) else { return };
        let plain = SignedLink::Plain { is_told: true };
        let SignedLink::Answered(answered) = std::mem::replace(state, plain) else { return };
        match answered.expected.check(said) {
            Ok(session) => {
                *state = SignedLink::Proven(SealedLink::new(link, session));
                out.push(SignedEvent::Proven(link));
            }
            Err(why) => self.wrong(link, &why.to_string(), out),
        }
    }

    /// Takes a message of a link of registrations.
    fn received(&mut self, link: LinkId, mut parts: Vec<Vec<u8>>, out: &mut Vec<SignedEvent>) {
        match parts.first().and_then(|first| ProofFrame::decode(first)) {
            None => self.on_heartbeat(link, parts, out),
            Some(ProofFrame::Answer(answer)) => self.on_answer(link, &answer),
            Some(ProofFrame::Confirmation(said)) => self.on_confirmation(link, &said, out),
            Some(sealed @ ProofFrame::Sealed { .. }) => {
                let Some(frame) = parts.pop() else { return };
                self.on_sealed(link, (sealed, frame), out);
            }
            Some(ProofFrame::Refusal(why)) if !link.is_inbound() => {
                let why = printable(&why, WHY_MAX);
                self.proof.warn_of_refusal("registration", &format!("the router says: {why}"));
            }
            Some(ProofFrame::Offer(_) | ProofFrame::Refusal(_)) => {}
        }
    }

    fn on_heartbeat(&mut self, link: LinkId, parts: Vec<Vec<u8>>, out: &mut Vec<SignedEvent>) {
        let is_proven = matches!(self.links.get(&link), Some(SignedLink::Proven(_)));
        let first = parts.first().map_or(&[][..], |part| part);
        match detach(first) {
            Some((_, ProofFrame::Offer(offer)))
                if link.is_inbound() && self.proof.is_demanded() =>
            {
                // Who was proven offers nothing more.
                if !is_proven {
                    self.on_offer(link, &offer, out);
                }
            }
            Some((frame, sealed @ ProofFrame::Sealed { .. })) => {
                self.on_sealed(link, (sealed, frame), out);
            }
            _ if is_proven => {
                self.wrong(link, "it is not signed, on a link of who was proven", out);
            }
            _ => {
                self.on_unsigned(link, first);
                out.push(SignedEvent::Control(ControlEvent::Frame { link, parts }));
            }
        }
    }

    /// Says once that a proof is needed to who could give one: the log of stock vLLM has no place
    /// for it.
    fn on_unsigned(&mut self, link: LinkId, frame: &[u8]) {
        if let Some(SignedLink::Plain { is_told: is_told @ false }) = self.links.get_mut(&link)
            && self.is_demanded
            && link.is_inbound()
            && frame.windows(OURS.len()).any(|text| text == OURS)
        {
            *is_told = true;
            self.refuse(link, NO_OFFER);
        }
    }

    /// As [`ControlPlane::poll`], with what proofs say between the events.
    pub fn poll_signed(&mut self, now: Nanos, out: &mut Vec<SignedEvent>) -> NextPoll {
        let mut events = Vec::new();
        let next = self.plane.poll(now, &mut events);
        for event in events {
            match event {
                ControlEvent::Frame { link, parts } if self.links.contains_key(&link) => {
                    self.received(link, parts, out);
                }
                event => {
                    match &event {
                        ControlEvent::LinkUp { link, channel, .. } => self.note(*link, *channel),
                        ControlEvent::LinkDown { link } => _ = self.links.remove(link),
                        _ => {}
                    }
                    out.push(SignedEvent::Control(event));
                }
            }
        }
        next
    }
}

impl SignedPlane<ZmqPlane> {
    /// As [`ZmqPlane::stop_listening`].
    pub fn stop_listening(&mut self) {
        self.plane.stop_listening();
    }
}

impl<P: ControlPlane> ControlPlane for SignedPlane<P> {
    fn listen(&mut self, channel: LinkKind) -> Result<Endpoint, Refused> {
        self.plane.listen(channel)
    }

    fn dial(&mut self, link: LinkId, to: &Endpoint, channel: LinkKind) -> Result<(), Refused> {
        self.plane.dial(link, to, channel)?;
        self.note(link, channel);
        Ok(())
    }

    fn send(&mut self, link: LinkId, parts: &[&[u8]]) -> Result<(), Refused> {
        match (self.links.get(&link), parts) {
            (Some(SignedLink::Proven(_)), [frame]) => self.send_sealed(link, frame),
            (Some(_), [frame]) if !link.is_inbound() && !frame.starts_with(&native::MAGIC) => {
                self.offer(link, frame)
            }
            _ => self.plane.send(link, parts),
        }
    }

    fn admit(&mut self, link: LinkId) {
        self.plane.admit(link);
    }

    fn hang_up(&mut self, link: LinkId) {
        self.links.remove(&link);
        self.plane.hang_up(link);
    }

    fn set_waker(&mut self, waker: Waker) {
        self.plane.set_waker(waker);
    }

    /// What proofs say is for who listens for registrations.
    fn poll(&mut self, now: Nanos, out: &mut Vec<ControlEvent>) -> NextPoll {
        let mut events = Vec::new();
        let next = self.poll_signed(now, &mut events);
        out.extend(events.into_iter().filter_map(|event| match event {
            SignedEvent::Control(event) => Some(event),
            SignedEvent::Proven(_) | SignedEvent::Wrong(..) => None,
        }));
        next
    }
}
