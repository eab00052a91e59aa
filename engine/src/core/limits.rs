//! What the gauges of the machines stay within, by their settings. This is the only list of limits:
//! whoever checks gauges or raises alarms takes them from here.

use super::channel::WINDOW;
use super::ids::TP_MAX;
use super::machine::Gauges;
use super::message::Role;
use super::router::{NAMED_MAX, RouterConfig};
use super::station::CoreConfig;
use super::transfer::TransferConfig;

/// A product or sum of limits that no `u32` can exceed.
fn total(limit: u64) -> u32 {
    u32::try_from(limit).unwrap_or(u32::MAX)
}

/// A count of things that happened; it grows for ever.
const COUNT: u32 = u32::MAX;

impl CoreConfig {
    /// Transfers that may be moved at one time. A receiver that is pushed to has one flow at most,
    /// and so has a request that reads.
    fn flows_max(&self) -> u32 {
        match self.role {
            Role::Prefill => self.settings.receivers_max,
            Role::Decode => self.settings.requests_max,
        }
    }

    /// Limits of a prefill or decode core whose engine has this many blocks, all groups together.
    pub fn limits(&self, blocks: u32) -> Gauges {
        let (settings, channel) = (&self.settings, &self.channel);
        let [requests, early, flows, peers, queue, blocks] = [
            settings.requests_max,
            settings.early_max,
            self.flows_max(),
            channel.peers_max,
            channel.queue_max,
            blocks,
        ]
        .map(u64::from);
        let (transfers, held, quarantined) = match self.role {
            // Keys with and without a request. Requests share the blocks of equal prefixes.
            Role::Prefill => (requests + early + flows, requests * blocks, 0),
            Role::Decode => (requests, 0, blocks),
        };
        // Messages, and fences; of a decode also what prefills are still to be told.
        let messages = match self.role {
            Role::Prefill => peers * queue,
            Role::Decode => peers * (2 * queue + requests),
        };
        let moriio = self.moriio.as_ref().map(|moriio| &moriio.settings);
        let [moriio_peers, lines, notices] = moriio.map_or([0; 3], |settings| {
            [settings.peers_max, settings.links_max, settings.notices_max].map(u64::from)
        });
        let links = u64::from(channel.links_max);
        let keys = requests + early;
        let about = match self.role {
            // Each request and each receiver, served ones included; deadlines of keys and leases.
            Role::Prefill => requests + 3 * keys + 4 * flows + early,
            // Names twice, claims and flows, two deadlines each, and one per prefill out of reach.
            Role::Decode => 6 * requests + peers,
        };
        Gauges {
            transfers: total(transfers),
            operations: 0,
            held: total(held),
            quarantined: total(quarantined),
            queued: total(messages + peers + moriio_peers + lines * notices),
            tombstones: settings.tombstones_max,
            peers: total(peers + moriio_peers),
            // A handshake with each peer, and notices both ways.
            links: total(links + moriio_peers + 2 * lines),
            // Uses and pauses of peers.
            entries: total(about + 2 * peers),
            // What came early, too.
            remembered: total(8 * peers + 2 * links + peers * WINDOW),
            delivered: COUNT,
            violations: COUNT,
        }
    }
}

impl TransferConfig {
    /// Limits of the transfer actor of one rank of an engine with this core.
    pub fn limits(&self, core: &CoreConfig) -> Gauges {
        let [requests, flows, peers] =
            [core.settings.requests_max, core.flows_max(), core.channel.peers_max].map(u64::from);
        // The ways from a layer to the ranks of a peer. A post moves a block at least, and what it
        // touched is quiesced at its end; each session is reopened or fenced once at a time.
        let lanes = self.layers.len() as u64 * u64::from(TP_MAX);
        let blocks = self.layers.iter().map(|layer| u64::from(layer.shape[0])).max().unwrap_or(0);
        let posts = flows.saturating_mul(lanes * (blocks + 2)).saturating_add(peers * lanes * 2);
        Gauges {
            transfers: total(flows),
            operations: self.operations_max(),
            held: match core.role {
                // A source that was given up stays until its flows are quiet.
                Role::Prefill => total(requests + flows),
                Role::Decode => 0,
            },
            quarantined: 0,
            queued: total(posts),
            tombstones: 0,
            peers: core.channel.peers_max,
            links: 0,
            // Steps that are not computed yet, each with a block at least.
            entries: total(posts + requests * blocks + peers * u64::from(TP_MAX)),
            // Sessions, four deadlines each, and one per quiesce.
            remembered: total(5 * peers * lanes + posts),
            delivered: 0,
            violations: COUNT,
        }
    }
}

impl RouterConfig {
    /// Limits of a router. A request that was sent may have to wait again, whatever the queue.
    pub fn limits(&self) -> Gauges {
        let requests = u64::from(self.requests_max) + u64::from(self.waiting_max);
        Gauges {
            transfers: total(requests),
            queued: total(requests),
            peers: self.instances_max,
            entries: total(requests.saturating_mul(u64::from(self.legs_max))),
            remembered: NAMED_MAX as u32,
            violations: COUNT,
            ..Gauges::default()
        }
    }
}
