//! What memory remembers, in bytes and in cells alike.

use kvferry_engine::core::layout::{Geometry, HeadSlots, KvGroup, LayerLayout};
use kvferry_engine::fabric::{
    Caps, Credits, DataEvent, DataPlane, Direction, FenceScope, OpId, PeerId, Placement,
    PlaneTimeouts, RegionId, SessionId, Submit,
};
use kvferry_sim::dma::{
    DataPlaneIx, Dma, DmaCalls, DmaConfig, DmaEvent, DmaHooks, DmaOutput, PlaneSpec, SimDataPlane,
};
use kvferry_sim::memory::{
    BlockTokens, MemoryFidelity, MemoryShape, MismatchKind, PieceSize, RankStore,
};
use kvferry_sim::queue::{EventQueue, StepContext};
use proptest::prelude::*;
use std::sync::Arc;

struct NoOpFaults;

impl DmaHooks for NoOpFaults {}

const LAYERS: u16 = 3;
const BLOCKS: u32 = 6;
const TOKENS: u32 = 8;
const ROW: u64 = 32;

/// How the tensor of a layer lies in memory.
#[derive(Clone, Copy, Debug)]
enum SliceOrder {
    /// `[B][H][N][C]`, layer after layer.
    SlotMajor,
    /// `[B][N][H][C]`, layer after layer.
    TokenMajor,
    /// `[B][layer][H][N][C]`.
    Interleaved,
}

fn geometry(tp: u16) -> Geometry {
    let group = KvGroup::full(TOKENS, 0..LAYERS);
    let groups = vec![group];
    Geometry { tp, ..Geometry::new("m", 4, groups) }
}

fn layout(order: SliceOrder, slots: u32, layer: u16) -> LayerLayout {
    let (n, h, c) = (u64::from(TOKENS), u64::from(slots), ROW / 2);
    let block = n * h * c;
    let (stride, base) = match order {
        SliceOrder::SlotMajor => ([block, n * c, c, 1], block * u64::from(BLOCKS)),
        SliceOrder::TokenMajor => ([block, c, h * c, 1], block * u64::from(BLOCKS)),
        SliceOrder::Interleaved => ([block * u64::from(LAYERS), n * c, c, 1], block),
    };
    LayerLayout {
        region: 0,
        base: base * 2 * u64::from(layer),
        shape: [BLOCKS, slots, TOKENS, ROW as u32 / 2],
        stride,
        element: 2,
        slots: HeadSlots::Split,
    }
}

/// Bytes from the start of a segment to a row.
fn row_at(order: SliceOrder, slots: u32, layer: u16, (block, slot, token): (u32, u32, u32)) -> u64 {
    let layout = layout(order, slots, layer);
    let [b, h, n] = [block, slot, token].map(u64::from);
    layout.base + 2 * (layout.stride[0] * b + layout.stride[1] * h + layout.stride[2] * n)
}

fn store(
    order: SliceOrder,
    tp: u16,
    rank: u16,
    unit: PieceSize,
    fidelity: MemoryFidelity,
) -> RankStore {
    let slots = 2 * 4 / u32::from(tp);
    let layers: Vec<_> = (0..LAYERS).map(|layer| layout(order, slots, layer)).collect();
    let len = ROW * u64::from(BLOCKS * slots * TOKENS) * u64::from(LAYERS);
    let shape = MemoryShape::new(&geometry(tp), rank, &layers, &[len], unit).expect("a good shape");
    RankStore::new(Arc::new(shape), fidelity).expect("a good store")
}

fn at(block: u32, from: u32, to: u32) -> BlockTokens {
    BlockTokens { group: 0, block, first: 16, tokens: from..to }
}

/// Two planes with a session from 0 to 1, and what drives them.
struct StorePair {
    dma: Dma,
    planes: Vec<SimDataPlane>,
    queue: EventQueue<DmaEvent>,
    events: Vec<DataEvent>,
    ops: u64,
}

impl StorePair {
    fn new(fidelity: MemoryFidelity, stores: [RankStore; 2]) -> StorePair {
        StorePair::with_bandwidth(fidelity, stores, 50_000_000_000)
    }

    fn with_bandwidth(
        fidelity: MemoryFidelity,
        stores: [RankStore; 2],
        bytes_per_sec: u64,
    ) -> StorePair {
        let mut dma = Dma::new(DmaConfig { fidelity, ..DmaConfig::default() });
        let caps = Caps {
            read: true,
            write: true,
            slices_max: 4_096,
            per_peer: Credits::UNLIMITED,
            in_all: Credits::of_operations(64),
            placement: Placement::OnCompletion,
            fence: FenceScope::Peer,
            patience: PlaneTimeouts::default(),
        };
        let memory = stores.each_ref().map(|store| store.memory(0, 0));
        let mut planes = Vec::new();
        for (node, store) in (0..).zip(stores) {
            let nic = dma.add_nic(bytes_per_sec);
            planes.push(dma.add_plane(PlaneSpec { node, nic, nic_local: nic, caps, store }));
        }
        let addresses = [planes[0].address(), planes[1].address()];
        for (index, plane) in planes.iter_mut().enumerate() {
            plane.register(RegionId(0), memory[index]).expect("memory registers");
            plane.connect(PeerId(0), &addresses[1 - index], 1).expect("a peer connects");
        }
        let (queue, events) = (EventQueue::new(), Vec::new());
        let mut pair = StorePair { dma, planes, queue, events, ops: 0 };
        pair.run();
        let poll = |plane: &mut SimDataPlane| {
            let mut events = Vec::new();
            plane.poll(Default::default(), &mut events);
            events
        };
        let Some(DataEvent::Registered { result: Ok(desc), .. }) = poll(&mut pair.planes[1]).pop()
        else {
            panic!("the region was not registered")
        };
        pair.planes[0].open(SessionId(0), RegionId(0), PeerId(0), &desc).expect("it opens");
        pair.run();
        pair
    }

    /// Runs until nothing is left to do.
    fn run(&mut self) {
        let (mut calls, mut out) = (DmaCalls::default(), Vec::new());
        loop {
            let now = self.queue.now();
            for plane in &mut self.planes {
                plane.take_calls(&mut calls);
                let cx = &mut StepContext::new(now, &mut self.queue, &mut out);
                self.dma.perform(plane.ix(), &mut calls, &mut NoOpFaults, cx);
            }
            let Some((now, event)) = self.queue.pop() else { return };
            self.dma.step(event, &mut StepContext::new(now, &mut self.queue, &mut out));
            for output in out.drain(..) {
                if let DmaOutput::Deliver { plane, message: news } = output {
                    self.planes[plane.0 as usize].deliver(news);
                }
            }
        }
    }

    /// Moves `(local, remote, len)` in one operation and waits for its end.
    fn transfer(&mut self, direction: Direction, slices: &[(u64, u64, u64)]) {
        self.submit(direction, slices);
        self.run();
        self.planes[0].poll(Default::default(), &mut self.events);
    }

    fn submit(&mut self, direction: Direction, slices: &[(u64, u64, u64)]) {
        let local: Vec<_> = slices.iter().map(|slice| slice.0).collect();
        let remote: Vec<_> = slices.iter().map(|slice| slice.1).collect();
        let len: Vec<_> = slices.iter().map(|slice| slice.2).collect();
        self.ops += 1;
        let (op, session) = (OpId(self.ops), SessionId(0));
        let (local, remote, len) = (&local, &remote, &len);
        let batch = Submit { op, session, direction, local, remote, len };
        self.planes[0].submit(batch).expect("it is taken");
    }

    fn store(&mut self, index: u32) -> &mut RankStore {
        self.dma.store_mut(DataPlaneIx(index)).expect("the plane lives")
    }
}

const ORDERS: [SliceOrder; 3] =
    [SliceOrder::SlotMajor, SliceOrder::TokenMajor, SliceOrder::Interleaved];

/// Rows of some layers of a block of rank 0 of `tp` engines, as slices between two engines with
/// different TP: the heads that both ranks 0 have, K and V, in the order `order` on both sides.
fn rows(order: SliceOrder, tp: [u16; 2], blocks: [u32; 2], layers: u16) -> Vec<(u64, u64, u64)> {
    let slots = tp.map(|tp| 8 / u32::from(tp));
    let heads = slots[0].min(slots[1]) / 2;
    let mut rows = Vec::new();
    for layer in 0..layers {
        for kv in 0..2 {
            for head in 0..heads {
                for token in 0..TOKENS {
                    let row = |side: usize| {
                        let slot = kv * slots[side] / 2 + head;
                        row_at(order, slots[side], layer, (blocks[side], slot, token))
                    };
                    rows.push((row(0), row(1), ROW));
                }
            }
        }
    }
    rows
}

fn merged(rows: &[(u64, u64, u64)]) -> Vec<(u64, u64, u64)> {
    let mut merged: Vec<(u64, u64, u64)> = Vec::new();
    for (local, remote, len) in rows {
        match merged.last_mut() {
            Some((l, r, n)) if *l + *n == *local && *r + *n == *remote => *n += len,
            _ => merged.push((*local, *remote, *len)),
        }
    }
    merged
}

#[test]
fn what_was_filled_is_there() {
    for (order, fidelity) in
        ORDERS.iter().flat_map(|o| [(*o, MemoryFidelity::Bytes), (*o, MemoryFidelity::Cells)])
    {
        let mut store = store(order, 1, 0, PieceSize { tokens: 4, slots: 8 }, fidelity);
        store.fill(&at(2, 0, 8), 0..LAYERS, 77);
        assert_eq!(store.check(&at(2, 0, 8), 77), Ok(()));
        assert_eq!(store.check(&at(2, 0, 8), 78).unwrap_err().found, MismatchKind::Foreign);
        assert!(store.check(&BlockTokens { first: 24, ..at(2, 0, 8) }, 77).is_err());
        assert!(store.check(&at(3, 0, 8), 77).is_err(), "{order:?} {fidelity:?}");
        store.fill(&at(2, 0, 8), 1..2, 79);
        let wrong = store.check(&at(2, 0, 8), 77).unwrap_err();
        assert!(fidelity == MemoryFidelity::Cells || wrong.layer == 1);
        assert_eq!(wrong.position, 16);
    }
}

#[test]
fn a_layer_that_did_not_land_is_missing() {
    for (order, fidelity) in
        ORDERS.iter().flat_map(|o| [(*o, MemoryFidelity::Bytes), (*o, MemoryFidelity::Cells)])
    {
        let unit = PieceSize { tokens: 8, slots: 8 };
        let stores = [0, 1].map(|_| store(order, 1, 0, unit, fidelity));
        let mut pair = StorePair::new(fidelity, stores);
        pair.store(0).fill(&at(1, 0, 8), 0..LAYERS, 5);
        pair.transfer(Direction::Write, &merged(&rows(order, [1, 1], [1, 4], LAYERS - 1)));
        let wrong = pair.store(1).check(&at(4, 0, 8), 5).unwrap_err();
        assert_eq!(wrong.layer, LAYERS - 1, "{order:?} {fidelity:?}");
        pair.transfer(Direction::Write, &merged(&rows(order, [1, 1], [1, 4], LAYERS)));
        assert_eq!(pair.store(1).check(&at(4, 0, 8), 5), Ok(()));
        // A source that is not computed in all layers spoils what was there.
        pair.store(1).fill(&at(4, 0, 8), 0..LAYERS, 6);
        pair.store(0).fill(&at(2, 0, 8), 0..1, 6);
        pair.transfer(Direction::Write, &merged(&rows(order, [1, 1], [2, 4], LAYERS)));
        assert_eq!(pair.store(1).check(&at(4, 0, 8), 6).unwrap_err().layer, 1);
    }
}

/// An operation may end in the middle of a piece; the next one brings the rest.
#[test]
fn a_piece_that_comes_with_several_operations_is_there_after_the_last() {
    for (order, fidelity) in
        ORDERS.iter().flat_map(|o| [(*o, MemoryFidelity::Bytes), (*o, MemoryFidelity::Cells)])
    {
        let stores =
            [0, 1].map(|_| store(order, 1, 0, PieceSize { tokens: 8, slots: 8 }, fidelity));
        let mut pair = StorePair::new(fidelity, stores);
        pair.store(0).fill(&at(1, 0, 8), 0..LAYERS, 5);
        let rows = rows(order, [1, 1], [1, 4], LAYERS);
        let mut parts: Vec<_> = rows.chunks(rows.len() / 3 + 1).collect();
        let last = parts.pop().expect("there are rows");
        parts.iter().for_each(|part| pair.transfer(Direction::Write, part));
        assert!(pair.store(1).check(&at(4, 0, 8), 5).is_err(), "{order:?} {fidelity:?}");
        // Some come again, as after a failure.
        pair.transfer(Direction::Write, parts[0]);
        pair.transfer(Direction::Write, last);
        assert_eq!(pair.store(1).check(&at(4, 0, 8), 5), Ok(()), "{order:?} {fidelity:?}");
        pair.transfer(Direction::Write, parts[0]);
        assert_eq!(pair.store(1).check(&at(4, 0, 8), 5), Ok(()), "{order:?} {fidelity:?}");
        // What was overwritten in between is not there, though every row has come.
        pair.store(1).fill(&at(4, 0, 8), 0..LAYERS, 6);
        parts.iter().for_each(|part| pair.transfer(Direction::Write, part));
        pair.store(1).fill(&at(4, 0, 8), 0..LAYERS, 6);
        pair.transfer(Direction::Write, last);
        assert!(pair.store(1).check(&at(4, 0, 8), 5).is_err(), "{order:?} {fidelity:?}");
    }
}

#[test]
fn keys_in_the_place_of_values_are_seen() {
    for fidelity in [MemoryFidelity::Bytes, MemoryFidelity::Cells] {
        let stores = [0, 1].map(|_| {
            store(SliceOrder::SlotMajor, 4, 0, PieceSize { tokens: 8, slots: 1 }, fidelity)
        });
        let mut pair = StorePair::new(fidelity, stores);
        pair.store(0).fill(&at(1, 0, 8), 0..LAYERS, 5);
        let rows = rows(SliceOrder::SlotMajor, [4, 4], [1, 4], LAYERS);
        let half = TOKENS as usize;
        let mut swapped = rows.clone();
        for start in (0..rows.len()).step_by(2 * half) {
            for n in start..start + half {
                (swapped[n].0, swapped[n + half].0) = (rows[n + half].0, rows[n].0);
            }
        }
        pair.transfer(Direction::Write, &swapped);
        assert!(pair.store(1).check(&at(4, 0, 8), 5).is_err(), "{fidelity:?}");
        pair.transfer(Direction::Write, &rows);
        assert_eq!(pair.store(1).check(&at(4, 0, 8), 5), Ok(()));
    }
}

#[test]
fn a_piece_sent_before_its_last_token_is_seen() {
    for fidelity in [MemoryFidelity::Bytes, MemoryFidelity::Cells] {
        let unit = PieceSize { tokens: 8, slots: 8 };
        let stores = [0, 1].map(|_| store(SliceOrder::SlotMajor, 1, 0, unit, fidelity));
        let mut pair = StorePair::new(fidelity, stores);
        pair.store(0).fill(&at(1, 0, 5), 0..LAYERS, 5);
        pair.transfer(Direction::Write, &rows(SliceOrder::SlotMajor, [1, 1], [1, 4], LAYERS));
        assert_eq!(pair.store(1).check(&at(4, 0, 5), 5), Ok(()));
        pair.store(0).fill(&at(1, 5, 8), 0..LAYERS, 5);
        assert_eq!(pair.store(0).check(&at(1, 0, 8), 5), Ok(()));
        assert!(pair.store(1).check(&at(4, 0, 8), 5).is_err(), "{fidelity:?}");
    }
}

/// Time of `count` operations that are submitted together, each of one block.
fn together(fidelity: MemoryFidelity, count: u32) -> u64 {
    let unit = PieceSize { tokens: 8, slots: 8 };
    let stores = [0, 1].map(|_| store(SliceOrder::SlotMajor, 1, 0, unit, fidelity));
    // So slow that latencies do not count.
    let mut pair = StorePair::with_bandwidth(fidelity, stores, 100_000);
    let start = pair.queue.now();
    for block in 0..count {
        pair.store(0).fill(&at(block, 0, 8), 0..LAYERS, 5);
        let rows = rows(SliceOrder::SlotMajor, [1, 1], [block, block], LAYERS);
        pair.submit(Direction::Write, &rows);
    }
    pair.run();
    for block in 0..count {
        assert_eq!(pair.store(1).check(&at(block, 0, 8), 5), Ok(()));
    }
    (pair.queue.now() - start).0
}

#[test]
fn a_port_is_shared_in_cells_as_in_bytes() {
    let near = |a: u64, b: u64| a.abs_diff(b) * 50 <= a.max(b);
    let alone = together(MemoryFidelity::Bytes, 1);
    for count in 1..=3 {
        for fidelity in [MemoryFidelity::Bytes, MemoryFidelity::Cells] {
            let time = together(fidelity, count);
            assert!(near(time, alone * u64::from(count)), "{count} {fidelity:?}: {time} {alone}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Moving the common heads between engines of different TP makes the smaller rank whole, in
    /// bytes and in cells, however the rows are cut; leaving out or moving one row spoils it.
    #[test]
    fn bytes_and_cells_agree(
        order in prop::sample::select(&ORDERS[..]),
        tp in prop::sample::select(&[[1u16, 2], [1, 4], [2, 2], [2, 4]][..]),
        blocks in [0..BLOCKS, 0..BLOCKS],
        read in any::<bool>(),
        cut in any::<bool>(),
        spoil in prop::option::of((any::<prop::sample::Index>(), any::<bool>())),
        tokens in prop::sample::select(&[4u32, 8][..]),
    ) {
        let mut rows = rows(order, tp, blocks, LAYERS);
        if let Some((index, shift)) = spoil {
            let index = index.index(rows.len());
            let other = rows[(index + 1) % rows.len()].0;
            if shift { rows[index].0 = other } else { rows.remove(index); }
        }
        let slices = if cut { rows } else { merged(&rows) };
        for fidelity in [MemoryFidelity::Bytes, MemoryFidelity::Cells] {
            // Rank 0 of the larger TP holds the fewest heads: it is what the cells tell apart.
            let unit = PieceSize { tokens, slots: 4 / u32::from(tp[1]) };
            let (big, small) = (tp[0], tp[1]);
            let mut pair = StorePair::new(fidelity, [
                store(order, if read { small } else { big }, 0, unit, fidelity),
                store(order, if read { big } else { small }, 0, unit, fidelity),
            ]);
            let (source, target, direction) =
                if read { (1, 0, Direction::Read) } else { (0, 1, Direction::Write) };
            let slices: Vec<_> = if read {
                slices.iter().map(|(from, to, len)| (*to, *from, *len)).collect()
            } else {
                slices.clone()
            };
            pair.store(source).fill(&at(blocks[0], 0, 8), 0..LAYERS, 9);
            pair.transfer(direction, &slices);
            let whole = pair.store(target).check(&at(blocks[1], 0, 8), 9).is_ok();
            prop_assert_eq!(whole, spoil.is_none(), "{:?}", fidelity);
        }
    }
}
