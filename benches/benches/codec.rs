//! Native dialect: bytes of an announcement of 512 blocks, and of a short message.

use criterion::{Criterion, criterion_group, criterion_main};
use kvferry_engine::core::dialect::native::{ConnectionHeader, VERSION, decode, encode_data};
use kvferry_engine::core::ids::{Attempt, Incarnation, TransferKey};
use kvferry_engine::core::layout::BlockList;
use kvferry_engine::core::message::{AttemptTag, Message};
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
    for (name, message) in [("announce 512", announce), ("cancel", Message::Cancel { tag: tag() })]
    {
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

criterion_group!(benches, codec);
criterion_main!(benches);
