//! The proof of the fleet's secret ahead of what native peers say to each other, and a seal on each
//! frame after it. ZMTP has neither here: stock vLLM speaks its NULL mechanism.
//!
//! ```text
//! dialler                                   acceptor
//!    hello, with an offer     ----------->
//!                             <-----------  answer
//!    confirmation             ----------->  the core gets the hello
//!    frames, each sealed      <---------->
//! ```
//!
//! Messages of MoRIIO peers pass unchanged: they have no secret. Messages of a link on which nothing was
//! proven are short ([`UNPROVEN_MAX`], and [`NOTIFY_MAX`](crate::zmtp::NOTIFY_MAX) for notifications): what
//! strangers say costs little.

use crate::seal::{ProofFrame, SealedLink};
use crate::zmtp::UNPROVEN_MAX;
use kvferry_engine::core::Nanos;
use kvferry_engine::core::dialect::native::{self, ConnectionHeader, Frame};
use kvferry_engine::core::ids::Incarnation;
use kvferry_engine::core::message::Hello;
use kvferry_engine::fabric::{
    ControlEvent, ControlPlane, Endpoint, LinkId, LinkKind, NextPoll, Refused,
};
use kvferry_trust::{
    ExpectedConfirmation, FleetProof, NO_OFFER, NO_SECRET, SecretAnswer, SecretConfirmation,
    SecretOffer, SessionSeal,
};
use std::collections::BTreeMap;
use std::task::Waker;

/// What the proof is for.
const PURPOSE: &str = "native hello";

/// Who asked, and said no hello.
const NO_MORIIO: &str = "a peer that speaks MoRIIO only asked where the KV lies, and there are no such \
    peers here: moriio_peers true lets them in, who can prove nothing";

/// Most bytes that a proof adds to its hello.
pub(crate) const PROOF_BYTES: usize = 1_024;

/// Most frames that wait for a proof.
const WAITING_MAX: usize = 64;

/// How far a link of handshakes is.
enum LinkProof {
    Unproven,
    /// The other side asked as MoRIIO peers do, which are not dealt with; who speaks the native
    /// dialect, too, goes on to say hello.
    Asked,
    /// This side said hello with an offer; what it says since waits.
    Offered {
        offer: SecretOffer,
        hello: Vec<u8>,
        waiting: Vec<Vec<u8>>,
    },
    /// The other side said hello, and has to confirm.
    Answered {
        expected: Box<ExpectedConfirmation>,
        hello: Vec<u8>,
    },
    Proven(SealedLink),
}

/// A control plane on which only who has proven to know the fleet's secret speaks the native
/// dialect, if there is one.
pub struct ProvenPlane<P> {
    plane: P,
    proof: FleetProof,
    /// Name of this engine, for the log.
    name: String,
    /// Whether there are peers that speak MoRIIO.
    has_moriio_peers: bool,
    /// Those of handshakes; native peers stay on them.
    links: BTreeMap<LinkId, LinkProof>,
}

fn is_native(frame: &[u8]) -> bool {
    frame.starts_with(&native::MAGIC)
}

fn hello_in(frame: &[u8]) -> Option<Box<Hello>> {
    match native::decode(frame) {
        Ok(Frame::Hello(hello)) => Some(hello),
        _ => None,
    }
}

/// The negative answer to a hello.
fn refusal(hello: &[u8], why: &str) -> Option<Vec<u8>> {
    let hello = hello_in(hello)?;
    let envelope = ConnectionHeader {
        version: native::agree(native::VERSION, &hello).unwrap_or(native::VERSION_MIN),
        from: Incarnation(0),
        to: hello.incarnation,
        session: hello.session,
    };
    let frame = Frame::Refuse { envelope, engine: hello.expects, reason: why.into() };
    Some(native::encode(&frame))
}

impl<P: ControlPlane> ProvenPlane<P> {
    /// A plane of an engine with this name.
    pub fn new(plane: P, proof: FleetProof, name: String) -> ProvenPlane<P> {
        ProvenPlane { plane, proof, name, has_moriio_peers: true, links: BTreeMap::new() }
    }

    /// Has peers that speak MoRIIO only noted as refused: the core does not deal with them.
    pub fn without_moriio_peers(self) -> ProvenPlane<P> {
        ProvenPlane { has_moriio_peers: false, ..self }
    }

    fn note(&mut self, link: LinkId, channel: LinkKind) {
        if channel == LinkKind::Handshake {
            self.links.entry(link).or_insert(LinkProof::Unproven);
        }
    }

    fn forget(&mut self, link: LinkId) {
        if matches!(self.links.remove(&link), Some(LinkProof::Asked)) {
            self.proof.warn_of_refusal(&self.name, NO_MORIIO);
        }
    }

    /// Says hello with an offer, and keeps what is said before the proof.
    fn offer(&mut self, link: LinkId, hello: &[u8]) -> Result<(), Refused> {
        let Some(secret) = self.proof.secret() else {
            self.plane.admit(link);
            return self.plane.send(link, &[hello]);
        };
        if hello.len() > UNPROVEN_MAX - PROOF_BYTES {
            let why = format!(
                "the hello of this engine has {} bytes, and peers read at most {UNPROVEN_MAX} before a \
                 proof: give it fewer TP ranks or regions",
                hello.len()
            );
            self.proof.warn_of_refusal(&self.name, &why);
        }
        let offer = secret.offer().map_err(|why| Refused::Invalid(why.to_string().into()))?;
        self.plane.send(link, &[&ProofFrame::Offer(offer.clone()).encode(), hello])?;
        let (hello, waiting) = (hello.to_vec(), Vec::new());
        self.links.insert(link, LinkProof::Offered { offer, hello, waiting });
        Ok(())
    }

    fn send_sealed(&mut self, link: LinkId, frame: &[u8]) -> Result<(), Refused> {
        let Some(LinkProof::Proven(sealed)) = self.links.get_mut(&link) else {
            return Err(Refused::Gone);
        };
        self.plane.send(link, &[&sealed.seal(frame).encode(), frame])
    }

    /// Tells who said hello that it is not listened to, in words that its core understands.
    fn refuse(&mut self, link: LinkId, hello: &[u8], why: &str) {
        self.proof.warn_of_refusal(&self.name, why);
        if let Some(state @ LinkProof::Asked) = self.links.get_mut(&link) {
            // It was named for what it is.
            *state = LinkProof::Unproven;
        }
        if let Some(frame) = refusal(hello, why) {
            // Who does not read it learns nothing.
            let _full = self.plane.send(link, &[&frame]);
        }
    }

    /// Ends the own hello in words that the own core understands: who answered is not who it was
    /// said to.
    fn give_up(&mut self, link: LinkId, why: &str) -> Option<Vec<Vec<u8>>> {
        self.proof.warn_of_refusal(&self.name, why);
        match self.links.insert(link, LinkProof::Unproven) {
            Some(LinkProof::Offered { hello, .. }) => Some(vec![refusal(&hello, why)?]),
            _ => None,
        }
    }

    /// Takes a message of a link; what of it the core is told.
    fn received(&mut self, link: LinkId, mut parts: Vec<Vec<u8>>) -> Option<Vec<Vec<u8>>> {
        if !self.links.contains_key(&link) {
            return Some(parts);
        }
        match parts.first().map(|part| ProofFrame::decode(part)) {
            Some(Some(ProofFrame::Offer(offer))) => {
                self.on_offer(link, &offer, parts.pop()?);
                None
            }
            Some(Some(ProofFrame::Answer(answer))) => self.on_answer(link, &answer),
            Some(Some(ProofFrame::Confirmation(proof))) => self.on_confirmation(link, &proof),
            Some(Some(ProofFrame::Sealed { number, seal })) => {
                let frame = parts.pop()?;
                self.on_sealed(link, number, &frame, &seal).then(|| vec![frame])
            }
            // Nothing else is said once both are proven.
            _ if matches!(self.links.get(&link), Some(LinkProof::Proven(_))) => None,
            _ if !parts.iter().any(|part| is_native(part)) => {
                let state = self.links.get_mut(&link).filter(|_| link.is_inbound());
                if let Some(state @ LinkProof::Unproven) = state
                    && !self.has_moriio_peers
                {
                    *state = LinkProof::Asked;
                }
                Some(parts)
            }
            _ => self.on_unproven(link, parts),
        }
    }

    fn on_offer(&mut self, link: LinkId, offer: &SecretOffer, hello: Vec<u8>) {
        // Who was proven says hello again as a frame like others.
        if matches!(self.links.get(&link), Some(LinkProof::Proven(_))) {
            return;
        }
        match self.proof.answer((PURPOSE, &hello), Some(offer)) {
            Ok(Some((answer, expected))) => {
                if self.plane.send(link, &[&ProofFrame::Answer(answer).encode()]).is_ok() {
                    let expected = Box::new(expected);
                    self.links.insert(link, LinkProof::Answered { expected, hello });
                }
            }
            Ok(None) => {}
            Err(why) => self.refuse(link, &hello, &why),
        }
    }

    fn on_answer(&mut self, link: LinkId, answer: &SecretAnswer) -> Option<Vec<Vec<u8>>> {
        let Some(LinkProof::Offered { offer, hello, .. }) = self.links.get(&link) else {
            return None;
        };
        let secret = self.proof.secret()?;
        let (proof, session) = match secret.confirm((PURPOSE, hello), offer, answer) {
            Ok(confirmed) => confirmed,
            Err(why) => return self.give_up(link, &why.to_string()),
        };
        // Before the other side can send a longer message.
        self.plane.admit(link);
        if self.plane.send(link, &[&ProofFrame::Confirmation(proof).encode()]).is_err() {
            return None;
        }
        let proven = LinkProof::Proven(SealedLink::new(link, session));
        let Some(LinkProof::Offered { waiting, .. }) = self.links.insert(link, proven) else {
            return None;
        };
        for frame in waiting {
            // The channel says again what did not arrive.
            let _full = self.send_sealed(link, &frame);
        }
        None
    }

    fn on_confirmation(
        &mut self,
        link: LinkId,
        proof: &SecretConfirmation,
    ) -> Option<Vec<Vec<u8>>> {
        let answered = |state: &&mut LinkProof| matches!(state, LinkProof::Answered { .. });
        let state = self.links.get_mut(&link).filter(answered)?;
        let LinkProof::Answered { expected, hello } = std::mem::replace(state, LinkProof::Unproven)
        else {
            return None;
        };
        match expected.check(proof) {
            Ok(session) => {
                self.plane.admit(link);
                self.links.insert(link, LinkProof::Proven(SealedLink::new(link, session)));
                Some(vec![hello])
            }
            Err(why) => {
                self.refuse(link, &hello, &why.to_string());
                None
            }
        }
    }

    /// Whether a frame is what the other side of a proven link said last.
    fn on_sealed(&mut self, link: LinkId, number: u64, frame: &[u8], seal: &SessionSeal) -> bool {
        let Some(LinkProof::Proven(sealed)) = self.links.get_mut(&link) else { return false };
        let is_good = sealed.check(number, frame, seal);
        if !is_good {
            let why = "a frame on a proven link is not sealed by who was proven";
            self.proof.warn_of_refusal(&self.name, why);
        }
        is_good
    }

    /// Native frames of who has proven nothing. Without a secret they are as good as any; with one
    /// only a refusal counts, which the core takes for the end of its own hello and nothing else.
    fn on_unproven(&mut self, link: LinkId, parts: Vec<Vec<u8>>) -> Option<Vec<Vec<u8>>> {
        if !self.proof.is_demanded() {
            self.links.insert(link, LinkProof::Unproven);
            if link.is_inbound() && parts.iter().any(|part| native::is_hello(part)) {
                self.plane.admit(link);
            }
            return Some(parts);
        }
        let frame = parts.last()?;
        match native::decode(frame) {
            Ok(Frame::Hello(_)) => self.refuse(link, frame, NO_OFFER),
            Ok(Frame::Refuse { .. })
                if matches!(self.links.get(&link), Some(LinkProof::Offered { .. })) =>
            {
                return Some(parts);
            }
            Ok(Frame::Welcome(_)) => return self.give_up(link, NO_SECRET),
            _ => {}
        }
        None
    }
}

impl<P: ControlPlane> ControlPlane for ProvenPlane<P> {
    fn listen(&mut self, channel: LinkKind) -> Result<Endpoint, Refused> {
        self.plane.listen(channel)
    }

    fn dial(&mut self, link: LinkId, to: &Endpoint, channel: LinkKind) -> Result<(), Refused> {
        self.plane.dial(link, to, channel)?;
        self.note(link, channel);
        Ok(())
    }

    fn send(&mut self, link: LinkId, parts: &[&[u8]]) -> Result<(), Refused> {
        let [frame] = parts else { return self.plane.send(link, parts) };
        if !is_native(frame) {
            return self.plane.send(link, parts);
        }
        match self.links.get_mut(&link) {
            Some(LinkProof::Proven(_)) => self.send_sealed(link, frame),
            // The dialler repeats its hello until it is answered.
            Some(LinkProof::Offered { hello, .. }) if hello == frame => Ok(()),
            Some(LinkProof::Offered { waiting, .. }) if waiting.len() < WAITING_MAX => {
                waiting.push(frame.to_vec());
                Ok(())
            }
            Some(LinkProof::Offered { .. }) => Err(Refused::Busy),
            Some(LinkProof::Answered { .. }) => Ok(()),
            Some(LinkProof::Unproven) if hello_in(frame).is_some() => self.offer(link, frame),
            Some(LinkProof::Unproven | LinkProof::Asked) | None => self.plane.send(link, parts),
        }
    }

    fn hang_up(&mut self, link: LinkId) {
        self.forget(link);
        self.plane.hang_up(link);
    }

    fn set_waker(&mut self, waker: Waker) {
        self.plane.set_waker(waker);
    }

    fn poll(&mut self, now: Nanos, out: &mut Vec<ControlEvent>) -> NextPoll {
        let mut events = Vec::new();
        let next = self.plane.poll(now, &mut events);
        for event in events {
            match event {
                ControlEvent::Frame { link, parts } => {
                    if let Some(parts) = self.received(link, parts) {
                        out.push(ControlEvent::Frame { link, parts });
                    }
                }
                ControlEvent::LinkUp { link, channel, from } => {
                    self.note(link, channel);
                    out.push(ControlEvent::LinkUp { link, channel, from });
                }
                ControlEvent::LinkDown { link } => {
                    self.forget(link);
                    out.push(ControlEvent::LinkDown { link });
                }
                other => out.push(other),
            }
        }
        next
    }
}
