//! Native dialect: bytes of an announcement of 512 blocks, and of short messages; and the hash of a
//! prompt, which goes with one of them.

use criterion::{Criterion, criterion_group, criterion_main};
use kvferry_engine::core::dialect::native::{ConnectionHeader, VERSION, decode, encode_data};
use kvferry_engine::core::ids::{Attempt, Incarnation, TransferKey};
use kvferry_engine::core::layout::BlockList;
use kvferry_engine::core::message::{AttemptTag, Message};
use kvferry_engine::core::prompt_hash::PromptHash;
use std::hint::black_box;

fn tag() -> AttemptTag {
    let key = TransferKey { id: "tx-0123456789abcdef0123456789abcdef".into(), prompt: 0 };
    AttemptTag { key, sibling: 0, attempt: Attempt(1) }
}

fn codec(criterion: &mut Criterion) {
    let envelope =
        ConnectionHeader { version: VERSION, from: Incarnation(1), to: Incarnation(2), session: 3 };
    let blocks = vec![BlockList::new((0..512).map(|n| n * 7 % 4096).collect())];
    let announce = Message::Announce { tag: tag(), tokens: 8192, from: 0, blocks, verify: None };
    let prompt_hash = PromptHash([u64::MAX, u64::MAX]);
    let pull = Message::Pull { tag: tag(), tokens: 128_000, prompt_hash, verify: None };
    let cancel = Message::Cancel { tag: tag() };
    for (name, message) in [("announce 512", announce), ("pull", pull), ("cancel", cancel)] {
        let bytes = encode_data(&envelope, 9, &message);
        decode(&bytes).expect("what is encoded decodes");
        criterion.bench_function(&format!("codec/{name}/encode"), |bench| {
            bench.iter(|| encode_data(black_box(&envelope), 9, black_box(&message)));
        });
        criterion.bench_function(&format!("codec/{name}/decode"), |bench| {
            bench.iter(|| decode(black_box(&bytes)));
        });
    }
}

fn prompt_hash(criterion: &mut Criterion) {
    for tokens in [2_500, 128_000] {
        let ids: Vec<u32> = (0..tokens).collect();
        criterion.bench_function(&format!("prompt-hash/{tokens}"), |bench| {
            bench.iter(|| PromptHash::of_tokens(black_box(&ids)));
        });
    }
}

criterion_group!(benches, codec, prompt_hash);
criterion_main!(benches);
