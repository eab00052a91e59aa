//! The block ledger behaves like a plain list of claims.

use kvferry_engine::core::block_ledger::{BlockLedger, BlockOwner, BlockState};
use kvferry_engine::core::layout::BlockList;
use proptest::collection::vec;
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum LedgerStep {
    Claim(u64, usize, Vec<u32>),
    Quarantine(u64),
    Release(u64),
}

/// Block ids of one page and of far apart ones.
fn block() -> impl Strategy<Value = u32> {
    prop_oneof![0..12u32, prop::sample::select(vec![1023, 1024, 70_000])]
}

fn step() -> impl Strategy<Value = LedgerStep> {
    prop_oneof![
        2 => (0..4u64, 0..2usize, vec(block(), 0..4)).prop_map(|(o, g, b)| LedgerStep::Claim(o, g, b)),
        1 => (0..4u64).prop_map(LedgerStep::Quarantine),
        1 => (0..4u64).prop_map(LedgerStep::Release),
    ]
}

#[derive(Clone, Debug, PartialEq)]
struct TestClaim {
    owner: u64,
    group: usize,
    block: u32,
}

#[derive(Default)]
struct LedgerModel {
    claims: Vec<TestClaim>,
    quarantined: Vec<u64>,
}

impl LedgerModel {
    fn on(&self, group: usize, block: u32) -> Option<&TestClaim> {
        self.claims.iter().find(|claim| (claim.group, claim.block) == (group, block))
    }

    fn state(&self, group: usize, block: u32) -> BlockState {
        match self.on(group, block) {
            None => BlockState::Free,
            Some(claim) if self.quarantined.contains(&claim.owner) => {
                BlockState::Quarantined(BlockOwner(claim.owner))
            }
            Some(claim) => BlockState::Destination(BlockOwner(claim.owner)),
        }
    }

    /// Claims unless a rule is broken; names the blocks that break one.
    fn claim(&mut self, owner: u64, group: usize, blocks: &[u32]) -> Vec<u32> {
        let mut bad = Vec::new();
        for (at, block) in blocks.iter().enumerate() {
            if blocks[..at].contains(block) || self.on(group, *block).is_some() {
                bad.push(*block);
            }
        }
        if bad.is_empty() {
            let claim = |block: &u32| TestClaim { owner, group, block: *block };
            self.claims.extend(blocks.iter().map(claim));
        }
        bad
    }

    fn count(&self, test: impl Fn(BlockState) -> bool) -> u32 {
        self.claims.iter().filter(|claim| test(self.state(claim.group, claim.block))).count() as u32
    }
}

fn apply(
    step: LedgerStep,
    ledger: &mut BlockLedger,
    model: &mut LedgerModel,
) -> Result<(), TestCaseError> {
    let (owner, group, ids) = match step {
        LedgerStep::Claim(owner, group, ids) => (owner, group, ids),
        LedgerStep::Quarantine(owner) => {
            let mine = model.claims.iter().filter(|claim| claim.owner == owner).count();
            prop_assert_eq!(ledger.quarantine(BlockOwner(owner)), mine as u32);
            if mine > 0 {
                model.quarantined.push(owner);
            }
            return Ok(());
        }
        LedgerStep::Release(owner) => {
            let before = model.claims.len();
            model.claims.retain(|claim| claim.owner != owner);
            model.quarantined.retain(|other| *other != owner);
            let count = (before - model.claims.len()) as u32;
            prop_assert_eq!(ledger.release(BlockOwner(owner)), count);
            return Ok(());
        }
    };
    if !ids.is_empty() && model.quarantined.contains(&owner) {
        return Ok(());
    }
    let list = BlockList::new(ids.clone());
    let got = ledger.claim_destination(BlockOwner(owner), group, &list);
    let bad = model.claim(owner, group, &ids);
    match got {
        Ok(()) => prop_assert!(bad.is_empty(), "the ledger allowed {bad:?}"),
        Err(conflict) => {
            prop_assert!(bad.contains(&conflict.block), "{conflict}");
            prop_assert_eq!(conflict.group, group);
            let holder = model.on(group, conflict.block).map_or(owner, |claim| claim.owner);
            prop_assert_eq!(conflict.owner.0, holder);
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn agrees_with_a_list_of_claims(steps in vec(step(), 0..50)) {
        let (mut ledger, mut model) = (BlockLedger::default(), LedgerModel::default());
        for step in steps {
            apply(step, &mut ledger, &mut model)?;
            for claim in &model.claims {
                let (group, block) = (claim.group, claim.block);
                prop_assert_eq!(ledger.state(group, block), model.state(group, block));
            }
            let writes = model.count(|state| matches!(state, BlockState::Destination(_)));
            let quarantined = model.count(|state| matches!(state, BlockState::Quarantined(_)));
            prop_assert_eq!((ledger.receiving(), ledger.quarantined()), (writes, quarantined));
            prop_assert_eq!(ledger.is_empty(), model.claims.is_empty());
        }
        for owner in 0..4 {
            ledger.release(BlockOwner(owner));
        }
        prop_assert!(ledger.is_empty());
        for block in (0..12).chain([1023, 1024, 70_000]) {
            prop_assert_eq!(ledger.state(0, block), BlockState::Free);
        }
    }
}
