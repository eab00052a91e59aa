//! Blocks and places that several requests use, together or one after the other.

use super::{allocate, arrive_decode, arrive_prefill, loaded, prefill_all, settle};
use crate::world::PairWorld;
use kvferry_engine::core::config::CoreSettings;
use kvferry_engine::core::decode::DecodeInput;
use kvferry_engine::core::layout::BlockList;
use kvferry_engine::core::message::{DecodeHook, Mode};

#[test]
fn receivers_that_have_ended_leave_room_for_others() {
    let settings = CoreSettings { receivers_max: 1, ..CoreSettings::default() };
    for mode in [Mode::Push, Mode::Pull] {
        let mut pair = PairWorld::with(mode, 1, 1, &settings);
        arrive_prefill(&mut pair, mode, 64, 2);
        prefill_all(&mut pair, 64);
        for sibling in 0..2 {
            let request = arrive_decode(&mut pair, mode, 64, sibling);
            allocate(&mut pair, &request, 0, 64, 10 + 10 * sibling);
            settle(&mut pair, 1);
            assert_eq!(pair.decode_said.last(), Some(&loaded(&request)), "{mode}");
        }
    }
}

/// What decode has cached is written by nobody, so that any number of requests may have it.
#[test]
fn a_cached_prefix_is_no_destination() {
    for mode in [Mode::Push, Mode::Pull] {
        let mut pair = PairWorld::new(mode, 1, 1);
        let requests = [0, 1].map(|sibling| arrive_decode(&mut pair, mode, 64, sibling));
        for (request, own) in requests.iter().zip([20, 30]) {
            let blocks = vec![BlockList::new(vec![10, 11, own, own + 1])];
            let (request, computed) = (request.clone(), 32);
            pair.decode(DecodeInput::Hook(DecodeHook::Allocated { request, computed, blocks }));
        }
        arrive_prefill(&mut pair, mode, 64, 2);
        prefill_all(&mut pair, 64);
        settle(&mut pair, 1);
        let both = requests.iter().all(|request| pair.decode_said.contains(&loaded(request)));
        assert!(both, "{mode}: {:?}", pair.decode_said);
        assert!(pair.at_rest());
    }
}
