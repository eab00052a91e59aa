//! Every target survives its seeds, and what the fuzzer would make of them first.

use kvferry_fuzz::TARGETS;

#[test]
fn seeds_are_survived() {
    for target in TARGETS {
        let seeds = (target.seeds)();
        assert!(seeds.len() >= 12, "{}: {} seeds", target.name, seeds.len());
        seeds.iter().for_each(|seed| (target.run)(seed));
    }
}

#[test]
fn cut_and_hit_seeds_are_survived() {
    for target in TARGETS {
        for seed in (target.seeds)() {
            let step = seed.len() / target.places + 1;
            for at in (0..seed.len()).step_by(step) {
                (target.run)(&seed[..at]);
                let mut hit = seed.clone();
                hit[at] ^= 0x81;
                (target.run)(&hit);
            }
        }
    }
}
