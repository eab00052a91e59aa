//! Nobody is proven who does not know the secret, and nothing that was said can be said again.

use kvferry_trust::{
    FleetSecret, ProofError, SecretAnswer, SecretConfirmation, SecretOffer, SessionSeal,
};
use proptest::prelude::*;
use serde::Serialize;
use serde::de::DeserializeOwned;

const SECRETS: [&str; 3] = [
    "0123456789abcdef0123456789abcdef",
    "fedcba9876543210fedcba9876543210",
    "a secret of words is one if it is long enough",
];
const HELLO: &[u8] = b"d0 says hello to p0";
const ABOUT: (&str, &[u8]) = ("test", HELLO);

fn secret(lines: &[usize]) -> FleetSecret {
    let lines: Vec<&str> = lines.iter().map(|line| SECRETS[*line]).collect();
    FleetSecret::parse(&lines.join("\n")).expect("these are secrets")
}

/// Whether each of the two is proven to the other.
fn meet(dialler: &FleetSecret, acceptor: &FleetSecret) -> bool {
    let offer = dialler.offer().expect("random bytes");
    let Ok((answer, expected)) = acceptor.answer(ABOUT, &offer) else { return false };
    let Ok((confirmation, ours)) = dialler.confirm(ABOUT, &offer, &answer) else { return false };
    let Ok(theirs) = expected.check(&confirmation) else { return false };
    theirs.check(&[b"welcome"], &ours.seal(&[b"welcome"])).is_ok()
}

/// The message with one byte changed, if it is one of its kind still.
fn changed<T: Serialize + DeserializeOwned>(message: &T, at: usize, by: u8) -> Option<T> {
    let mut bytes = rmp_serde::to_vec(message).expect("it encodes");
    let at = at % bytes.len();
    bytes[at] ^= by;
    rmp_serde::from_slice(&bytes).ok()
}

#[test]
fn a_secret_is_changed_without_a_moment_in_which_two_do_not_meet() {
    let steps = [secret(&[0]), secret(&[0, 1]), secret(&[1, 0]), secret(&[1])];
    for pair in steps.windows(2) {
        for (one, other) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            assert!(meet(&pair[one], &pair[other]), "{:?} and {:?}", pair[one], pair[other]);
        }
    }
    assert!(!meet(&steps[0], &steps[3]), "what is over is not accepted");
    assert!(!meet(&steps[3], &steps[0]), "what is over is not accepted");
}

#[test]
fn what_was_said_to_one_is_nothing_to_another() {
    let fleet = secret(&[0]);
    let offer = fleet.offer().expect("random bytes");
    let (answer, expected) = fleet.answer(ABOUT, &offer).expect("they share it");
    let (confirmation, _) = fleet.confirm(ABOUT, &offer, &answer).expect("it is proven");
    // The same offer again: the acceptor draws another nonce.
    let (_, again) = fleet.answer(ABOUT, &offer).expect("they share it");
    assert_eq!(again.check(&confirmation).err(), Some(ProofError::Wrong), "repeated");
    // The answer to another offer.
    let other = fleet.offer().expect("random bytes");
    assert_eq!(fleet.confirm(ABOUT, &other, &answer).err(), Some(ProofError::Wrong), "repeated");
    for about in [("other", HELLO), ("test", b"d1 says hello to p0" as &[u8])] {
        assert_eq!(fleet.confirm(about, &offer, &answer).err(), Some(ProofError::Wrong));
    }
    // Who does not know the secret sends the acceptor's own proof back.
    let bytes = rmp_serde::to_vec(&answer).expect("it encodes");
    let (_, _, mac): (Vec<u8>, Vec<u8>, [u8; 32]) =
        rmp_serde::from_slice(&bytes).expect("it has three parts");
    let echo = rmp_serde::to_vec(&mac).expect("it encodes");
    let echo: SecretConfirmation = rmp_serde::from_slice(&echo).expect("it is a MAC");
    assert_eq!(expected.check(&echo).err(), Some(ProofError::Wrong), "reflected");
}

#[test]
fn what_is_no_secret_is_refused_with_the_remedy() {
    let three = SECRETS.join("\n");
    for (text, said) in [
        ("", "there is no secret in it"),
        ("# only a comment\n\n", "there is no secret in it"),
        ("hunter2", "a secret of 7 characters can be guessed"),
        // 34 bytes.
        (&"ü".repeat(17), "a secret of 17 characters can be guessed"),
        (&"a".repeat(32), "a secret of 1 different characters can be guessed"),
        (&"0123456".repeat(9), "a secret of 7 different characters can be guessed"),
        (&*three, "there are 3 secrets in it"),
    ] {
        let why = FleetSecret::parse(text).expect_err(text);
        assert!(why.contains(said) && why.contains("`kvferry secret FILE`"), "{text:?}: {why}");
    }
    let shown = format!("{:?}", secret(&[0, 1]));
    assert!(!shown.contains(SECRETS[0]) && !shown.contains(SECRETS[1]), "{shown}");
}

#[test]
fn secret_that_is_made_here_is_accepted_and_no_other_one_equals_it() {
    let made = [(); 2].map(|()| FleetSecret::random().expect("random bytes"));
    assert!(made[0] != made[1] && made[0].len() == 64, "{made:?}");
    for text in made {
        FleetSecret::parse(&text).expect("a secret");
    }
}

proptest! {
    #[test]
    fn a_changed_byte_proves_nothing(which in 0..4_u8, at in any::<usize>(), by in 1..=u8::MAX) {
        let fleet = secret(&[0, 1]);
        let offer = fleet.offer().expect("random bytes");
        let heard: SecretOffer = match which {
            0 => match changed(&offer, at, by) {
                Some(changed) => changed,
                None => return Ok(()),
            },
            _ => offer.clone(),
        };
        let Ok((answer, expected)) = fleet.answer(ABOUT, &heard) else { return Ok(()) };
        let told: Option<SecretAnswer> =
            if which == 1 { changed(&answer, at, by) } else { Some(answer) };
        let Some(told) = told else { return Ok(()) };
        let confirmed = fleet.confirm(ABOUT, &offer, &told);
        if which < 2 {
            prop_assert!(confirmed.is_err());
            return Ok(());
        }
        let (confirmation, session) = confirmed.expect("nothing was changed");
        let confirmation =
            if which == 2 { changed(&confirmation, at, by) } else { Some(confirmation) };
        let Some(confirmation) = confirmation else { return Ok(()) };
        let proven = expected.check(&confirmation);
        if which == 2 {
            prop_assert!(proven.is_err());
            return Ok(());
        }
        let seal: Option<SessionSeal> = changed(&session.seal(&[b"welcome"]), at, by);
        let proven = proven.expect("nothing was changed");
        prop_assert!(seal.is_none_or(|seal| proven.check(&[b"welcome"], &seal).is_err()));
        prop_assert!(proven.check(&[b"refused"], &session.seal(&[b"welcome"])).is_err());
    }
}

proptest! {
    #[test]
    fn what_is_carried_was_sealed_by_who_is_named(
        parts in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..8), 0..4),
        other in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..8), 0..4),
        (at, by) in (0..80_usize, 1..16_u8),
    ) {
        fn slices(parts: &[Vec<u8>]) -> Vec<&[u8]> {
            parts.iter().map(Vec::as_slice).collect()
        }
        let (own, members) = (secret(&[0]), [secret(&[0]), secret(&[0, 1]), secret(&[1, 0])]);
        let name: &[&[u8]] = &[b"prefill", b"p0"];
        let seal = own.carrier_key(name).seal(&slices(&parts));
        for member in &members {
            prop_assert_eq!(member.check_carried(name, &slices(&parts), &seal), Ok(()));
            for wrong in [&[b"prefill" as &[u8], b"p1"] as &[&[u8]], &[b"prefillp0"], &[]] {
                let said = member.check_carried(wrong, &slices(&parts), &seal);
                prop_assert_eq!(said, Err(ProofError::Wrong));
            }
            if parts != other {
                let said = member.check_carried(name, &slices(&other), &seal);
                prop_assert_eq!(said, Err(ProofError::Wrong));
            }
            let mut digits = seal.clone().into_bytes();
            let digit = u8::from_str_radix(&seal[at..=at], 16).expect("hex") ^ by;
            digits[at] = format!("{digit:x}").as_bytes()[0];
            let changed = String::from_utf8(digits).expect("hex");
            prop_assert!(member.check_carried(name, &slices(&parts), &changed).is_err());
        }
        let stranger = secret(&[2]).check_carried(name, &slices(&parts), &seal);
        prop_assert_eq!(stranger, Err(ProofError::NoCommonSecret));
    }
}

#[test]
fn what_is_no_seal_is_wrong() {
    for seal in ["", "00", &"0".repeat(79), &"0".repeat(82), &"é".repeat(40), &"+f".repeat(40)] {
        let said = secret(&[0]).check_carried(&[], &[], seal);
        assert_eq!(said, Err(ProofError::Wrong), "{seal}");
    }
}
