//! The id map behaves like a plain list of pairs.

use kvferry_engine::core::error::Failure;
use kvferry_engine::core::idmap::IdMap;
use kvferry_engine::core::ids::{RequestId, TransferKey};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum IdMapStep {
    Insert(u8, u8, u8, u8),
    RemoveRequest(u8),
    RemoveTransfer(u8, u8, u8),
}

fn step() -> impl Strategy<Value = IdMapStep> {
    prop_oneof![
        (0..8u8, 0..3u8, 0..2u8, 0..2u8).prop_map(|(r, t, p, s)| IdMapStep::Insert(r, t, p, s)),
        (0..8u8).prop_map(IdMapStep::RemoveRequest),
        (0..3u8, 0..2u8, 0..2u8).prop_map(|(t, p, s)| IdMapStep::RemoveTransfer(t, p, s)),
    ]
}

fn request(number: u8) -> RequestId {
    format!("r{number}").into()
}

fn transfer(id: u8, prompt: u8, sibling: u8) -> (TransferKey, u32) {
    let key = TransferKey { id: format!("t{id}").into(), prompt: prompt.into() };
    (key, sibling.into())
}

proptest! {
    #[test]
    fn agrees_with_a_list_of_pairs(steps in prop::collection::vec(step(), 0..60)) {
        let mut map = IdMap::default();
        let mut pairs: Vec<(RequestId, (TransferKey, u32))> = Vec::new();
        for step in steps {
            match step {
                IdMapStep::Insert(r, t, p, s) => {
                    let (request, transfer) = (request(r), transfer(t, p, s));
                    let free = pairs.iter().all(|(a, b)| *a != request && *b != transfer);
                    let got = map.insert(request.clone(), transfer.0.clone(), transfer.1);
                    prop_assert_eq!(got, if free { Ok(()) } else { Err(Failure::DuplicateKey) });
                    if free {
                        pairs.push((request, transfer));
                    }
                }
                IdMapStep::RemoveRequest(r) => {
                    let at = pairs.iter().position(|(a, _)| *a == request(r));
                    let expected = at.map(|at| pairs.remove(at).1);
                    prop_assert_eq!(map.remove_request(&request(r)), expected);
                }
                IdMapStep::RemoveTransfer(t, p, s) => {
                    let at = pairs.iter().position(|(_, b)| *b == transfer(t, p, s));
                    let expected = at.map(|at| pairs.remove(at).0);
                    prop_assert_eq!(map.remove_transfer(&transfer(t, p, s)), expected);
                }
            }
            prop_assert_eq!(map.len(), pairs.len());
            for (request, transfer) in &pairs {
                prop_assert_eq!(map.transfer(request), Some(transfer));
                prop_assert_eq!(map.request(transfer), Some(request));
            }
        }
    }
}
