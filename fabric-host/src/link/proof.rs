//! The proof of the fleet's secret in a greeting: over all that the hello says, before anything that
//! it asks for is done or anything is told that only the fleet is to know.

use super::HostLinkKind;
use super::handshake::HandshakeSocket;
use crate::proto::HostControlMessage;
use crate::shared::{HostDialError, HostPlaneShared};
use kvferry_trust::{NO_SECRET, ProofError, ProvenSession};
use std::os::fd::{BorrowedFd, OwnedFd};

/// What both sides prove: by which connection it is said, and the fields that planes of every
/// version know.
pub(super) fn said(hello: &HostControlMessage, binding: Option<[u8; 32]>) -> Vec<u8> {
    let HostControlMessage::Hello {
        version, from, to, fence_key, link, ends, rules, newest, ..
    } = hello
    else {
        return Vec::new();
    };
    let mut said = rmp_serde::to_vec(&(version, from, to, fence_key, link, ends, rules, newest))
        .expect("plain data always encodes");
    said.extend(binding.iter().flatten());
    said
}

fn purpose(kind: HostLinkKind, is_encrypted: bool) -> &'static str {
    match kind {
        HostLinkKind::Local => "host data plane, local",
        HostLinkKind::Tcp if is_encrypted => "host data plane, TLS",
        HostLinkKind::Tcp => "host data plane, TCP",
    }
}

/// What both sides prove of a hello, for which purpose, and whether nobody else may be between them.
fn claim(
    peer: &HandshakeSocket,
    hello: &HostControlMessage,
) -> std::io::Result<((&'static str, Vec<u8>), bool)> {
    let binding = peer.binding()?;
    let is_bound = binding.is_some();
    Ok(((purpose(peer.kind(), is_bound), said(hello, binding)), is_bound))
}

/// Says hello to who is `at` an address, and gets the answer; if this plane has a secret, of who has
/// proven to know it.
pub(super) fn say_hello(
    hub: &HostPlaneShared,
    (peer, at): (&mut HandshakeSocket, &str),
    mut hello: HostControlMessage,
    along: &[BorrowedFd<'_>],
) -> Result<(HostControlMessage, Vec<OwnedFd>), HostDialError> {
    let secret = hub.proof.secret();
    let own = secret.map(|secret| Ok((secret.offer()?, secret))).transpose();
    let own = own.map_err(|why: ProofError| HostDialError::ours(why))?;
    if let (HostControlMessage::Hello { offer, .. }, Some((own, _))) = (&mut hello, &own) {
        *offer = Some(own.clone());
    }
    let silent = |why: std::io::Error| HostDialError::unreachable(format!("{at}{why}"), false);
    peer.send(&hello, along).map_err(silent)?;
    let (answer, fds) = peer.receive().map_err(silent)?;
    let Some((offer, secret)) = own else { return Ok((answer, fds)) };
    let answer = match answer {
        HostControlMessage::Prove(answer) => answer,
        // Of who has proven nothing it says nothing about what may still land.
        HostControlMessage::Refuse { why, .. } => {
            return Err(HostDialError::ours(format!("refused: {why}")));
        }
        _ => return Err(HostDialError::ours(format!("the peer proves nothing: {NO_SECRET}"))),
    };
    let ((purpose, said), is_bound) = claim(peer, &hello).map_err(silent)?;
    let confirmed = secret.confirm((purpose, &said), &offer, &answer);
    let (proof, session) = confirmed.map_err(|why| {
        let why = match why {
            ProofError::Wrong if is_bound => {
                format!("{why}, or somebody between the two has TLS with each of them")
            }
            why => why.to_string(),
        };
        // So that it is told there, too.
        let refusal = HostControlMessage::Refuse { why: why.clone(), over: false };
        let _whoever_it_is = peer.send(&refusal, &[]);
        HostDialError::ours(why)
    })?;
    peer.send(&HostControlMessage::Proven(proof), &[]).map_err(silent)?;
    match peer.receive().map_err(silent)? {
        (HostControlMessage::Sealed { message, seal }, fds) => {
            session.check(&[&message], &seal).map_err(HostDialError::ours)?;
            let message = HostControlMessage::decode(&message, true);
            Ok((message.unwrap_or(HostControlMessage::Unknown), fds))
        }
        // It checks the proof before it seals anything.
        (HostControlMessage::Refuse { why, .. }, _) => {
            Err(HostDialError::ours(format!("refused: {why}")))
        }
        _ => Err(HostDialError::ours(ProofError::Wrong)),
    }
}

/// What an acceptor says to a dialler once it knows who that is.
pub(super) struct SealedAnswers(Option<ProvenSession>);

impl SealedAnswers {
    /// To who said hello: as it is, or sealed for who was proven.
    pub(super) fn seal(&self, answer: HostControlMessage) -> HostControlMessage {
        match &self.0 {
            None => answer,
            Some(session) => {
                let message = answer.encode();
                let seal = session.seal(&[&message]);
                HostControlMessage::Sealed { message, seal }
            }
        }
    }
}

/// Proves to who said hello that this plane knows the secret, and has it do the same.
///
/// # Errors
/// What to answer; nothing where the connection ended or says what it may not.
pub(super) fn check_dialler(
    hub: &HostPlaneShared,
    peer: &mut HandshakeSocket,
    hello: &HostControlMessage,
) -> Result<SealedAnswers, Option<String>> {
    let offer = match hello {
        HostControlMessage::Hello { offer, .. } => offer.as_ref(),
        _ => None,
    };
    let ((purpose, said), _) = claim(peer, hello).map_err(|_| None)?;
    let answer = hub.proof.answer((purpose, &said), offer).map_err(Some)?;
    let Some((answer, expected)) = answer else {
        return Ok(SealedAnswers(None));
    };
    peer.send(&HostControlMessage::Prove(answer), &[]).map_err(|_| None)?;
    match peer.receive() {
        Ok((HostControlMessage::Proven(proof), _)) => expected
            .check(&proof)
            .map(|session| SealedAnswers(Some(session)))
            .map_err(|why| Some(why.to_string())),
        Ok((HostControlMessage::Refuse { why, .. }, _)) => {
            Err(Some(format!("who dials says: {why}")))
        }
        _ => Err(None),
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::super::hostile::{Victim, deadline, is_dropped, receive, secret_file, send};
    use super::*;
    use crate::{HostConfig, PeerTrust};
    use kvferry_trust::{FleetSecret, NO_OFFER, SecretAnswer, SecretOffer};
    use std::fs;
    use std::net::TcpStream;

    const OURS: &str = "0123456789abcdef0123456789abcdef";
    const PURPOSE: &str = "host data plane, TCP";

    fn victim(name: &str) -> Victim {
        let path = secret_file(name, OURS);
        let config = HostConfig {
            trust: PeerTrust { secret_file: Some(path.clone()), ..PeerTrust::default() },
            ..HostConfig::default()
        };
        let victim = Victim::of(HostConfig { connect_ms: 600_000, ..config });
        fs::remove_file(path).unwrap();
        victim
    }

    fn fleet() -> FleetSecret {
        FleetSecret::parse(OURS).unwrap()
    }

    fn with_offer(mut hello: HostControlMessage, said: SecretOffer) -> HostControlMessage {
        if let HostControlMessage::Hello { offer, .. } = &mut hello {
            *offer = Some(said);
        }
        hello
    }

    fn refusal(stream: &mut TcpStream) -> String {
        let why = match receive(stream, deadline()).unwrap() {
            HostControlMessage::Refuse { why, over: false } => why,
            other => panic!("{other:?}"),
        };
        assert!(is_dropped(stream), "{why}");
        why
    }

    /// Says hello and is asked for the proof.
    fn asked(victim: &Victim, hello: &HostControlMessage) -> (TcpStream, SecretAnswer) {
        let mut stream = victim.dial();
        send(&mut stream, hello, deadline()).unwrap();
        match receive(&mut stream, deadline()).unwrap() {
            HostControlMessage::Prove(answer) => (stream, answer),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_stranger_learns_nothing_and_reaches_nothing() {
        let victim = victim("stranger");
        let mut wrong = victim.hello();
        if let HostControlMessage::Hello { to, .. } = &mut wrong {
            to.0 = "guessed".into();
        }
        // Not even who is here, which a refusal of who is meant would tell.
        for hello in [victim.hello(), wrong] {
            let mut stream = victim.dial();
            send(&mut stream, &hello, deadline()).unwrap();
            assert_eq!(refusal(&mut stream), NO_OFFER);
        }
        let other = FleetSecret::parse("fedcba9876543210fedcba9876543210").unwrap();
        let mut stream = victim.dial();
        send(&mut stream, &with_offer(victim.hello(), other.offer().unwrap()), deadline()).unwrap();
        assert!(refusal(&mut stream).contains("different secrets"));
        victim.until("refused", |counters| counters.refused == 3);
        victim.assert_untouched();
    }

    #[test]
    fn what_a_peer_said_is_of_no_use_to_who_heard_it() {
        let victim = victim("replay");
        let offer = fleet().offer().unwrap();
        let hello = with_offer(victim.hello(), offer.clone());
        // A peer is let in, and somebody hears all of it.
        let (mut peer, answer) = asked(&victim, &hello);
        let about = (PURPOSE, &*said(&hello, None));
        let (proof, session) = fleet().confirm(about, &offer, &answer).unwrap();
        let proven = HostControlMessage::Proven(proof);
        send(&mut peer, &proven, deadline()).unwrap();
        let HostControlMessage::Sealed { message, seal } = receive(&mut peer, deadline()).unwrap()
        else {
            panic!("who is proven is answered")
        };
        session.check(&[&message], &seal).unwrap();
        let welcome = HostControlMessage::decode(&message, false);
        assert!(matches!(welcome, Some(HostControlMessage::Welcome { .. })), "{welcome:?}");
        // It says the same again.
        let (mut again, _) = asked(&victim, &hello);
        send(&mut again, &proven, deadline()).unwrap();
        assert!(refusal(&mut again).contains("is wrong"));
        victim.open(&mut peer);
        victim.assert_untouched();
    }

    #[test]
    fn a_hello_that_was_changed_on_the_way_is_not_what_was_proven() {
        let victim = victim("changed");
        let offer = fleet().offer().unwrap();
        let sent = with_offer(victim.hello(), offer.clone());
        for field in 0..5 {
            let mut arrived = sent.clone();
            let HostControlMessage::Hello { from, fence_key, link, ends, rules, .. } = &mut arrived
            else {
                panic!("it is a hello")
            };
            match field {
                0 => ends.push(0),
                1 => *fence_key ^= 1,
                2 => *link ^= 1,
                3 => from.push(0),
                _ => rules.slower = !rules.slower,
            }
            let (_, answer) = asked(&victim, &arrived);
            let confirmed = fleet().confirm((PURPOSE, &said(&sent, None)), &offer, &answer);
            assert!(confirmed.is_err(), "{arrived:?}");
        }
    }
}
