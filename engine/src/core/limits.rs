//! What the gauges of the machines stay within, by their settings. This is the only list of limits:
//! whoever checks gauges or raises alarms takes them from here.

use super::channel::{ANSWERS_MAX, WINDOW};
use super::config::CoreConfig;
use super::heartbeat::BACKLOG_MAX;
use super::ids::TP_MAX;
use super::machine::Gauges;
use super::message::{Role, TROUBLES_MAX};
use super::moriio::{EARLY_RELEASES_MAX, MoriioSettings, PENDING_MAX};
use super::payload::PayloadConfig;
use super::router::{ABANDONED_MAX, KEPT_MAX, RouterConfig};
use super::transfer::TransferConfig;

/// A product or sum of limits that no `u32` can exceed.
fn total(limit: u64) -> u32 {
    u32::try_from(limit).unwrap_or(u32::MAX)
}

/// A count of things that happened; it grows for ever.
const COUNT: u32 = u32::MAX;

/// Limits of what has to do with peers that speak MoRIIO: peers, links, what is queued, entries and
/// what is remembered.
fn of_moriio(settings: &MoriioSettings, requests: u64) -> [u64; 5] {
    let MoriioSettings { peers_max, links_max, notices_max, early_max, .. } = settings;
    let [peers, lines, notices, early] =
        [peers_max, links_max, notices_max, early_max].map(|max| u64::from(*max));
    [
        peers,
        // A handshake with each peer, and notices both ways.
        peers + 2 * lines,
        lines * notices + peers * PENDING_MAX as u64,
        // Uses of peers, with one for all who read. Transfers with a leg, and those without with
        // their releases.
        peers + 1 + requests + early * (1 + EARLY_RELEASES_MAX as u64),
        // Each peer by its address, with the deadline of its handshake, and known to the ranks.
        // Receivers with a deadline each, callers that came before the memory was there, and a
        // deadline per transfer.
        3 * peers + 3 * lines + requests + early,
    ]
}

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
        let unacked = queue + u64::from(ANSWERS_MAX);
        let (transfers, held, quarantined) = match self.role {
            // Keys with and without a request. Requests share the blocks of equal prefixes.
            Role::Prefill => (requests + early + flows, requests * blocks, 0),
            Role::Decode => (requests, 0, blocks),
        };
        // Messages, and fences; of a decode also what prefills are still to be told.
        let messages = match self.role {
            Role::Prefill => peers * unacked,
            Role::Decode => peers * (unacked + queue + requests),
        };
        let moriio = self.moriio.as_ref();
        let moriio = moriio.map_or([0; 5], |moriio| of_moriio(&moriio.settings, requests));
        let [moriio_peers, moriio_links, moriio_queued, moriio_entries, moriio_kept] = moriio;
        let links = u64::from(channel.links_max);
        let keys = requests + early;
        let about = match self.role {
            // Each request and each receiver, served ones included; deadlines of keys and leases.
            // Flows that leave a source which was given up, too.
            Role::Prefill => requests + 3 * keys + 5 * flows + early,
            // Names twice, claims and flows, two deadlines each, blocks to be written, and one
            // deadline per prefill out of reach.
            Role::Decode => 6 * requests + blocks + 2 * peers,
        };
        let ended = match self.role {
            Role::Prefill => u64::from(settings.tombstones_max),
            // Places for claims.
            Role::Decode => requests,
        };
        // What is told of prefills and of legs.
        let told = (TROUBLES_MAX + BACKLOG_MAX) as u64;
        let of_peers = 9 * peers + 2 * links + peers * WINDOW + told;
        Gauges {
            transfers: total(transfers),
            operations: 0,
            held: total(held),
            quarantined: total(quarantined),
            queued: total(messages + peers + moriio_peers + moriio_queued),
            tombstones: settings.tombstones_max,
            peers: total(peers + moriio_peers),
            links: total(links + moriio_links),
            // Uses and pauses of peers.
            entries: total(about + 2 * peers + moriio_entries),
            // What came early, too.
            remembered: total(of_peers + moriio_kept + ended),
            // Pauses, connections without links, and ranks that are connected anew.
            failures: total(3 * peers + told),
            delivered: COUNT,
            violations: COUNT,
        }
    }
}

impl TransferConfig {
    /// Limits of the transfer actor of one rank of an engine with this core.
    pub fn limits(&self, core: &CoreConfig) -> Gauges {
        let moriio_peers = core.moriio.as_ref().map_or(0, |moriio| moriio.settings.peers_max);
        let peers = u64::from(core.channel.peers_max) + u64::from(moriio_peers);
        let [requests, flows] = [core.settings.requests_max, core.flows_max()].map(u64::from);
        // The ways from a layer to the ranks of a peer. A post moves a block at least, and what it
        // touched is quiesced at its end; each session is reopened or fenced once at a time.
        let lanes = self.layers.len() as u64 * u64::from(TP_MAX);
        let blocks = self.layers.iter().map(|layer| u64::from(layer.shape[0])).max().unwrap_or(0);
        let posts = flows.saturating_mul(lanes * (blocks + 2)).saturating_add(peers * lanes * 2);
        // Sessions that took a try of a post, and those on which it failed.
        let tried = posts.saturating_mul(2 * (u64::from(self.settings.retries_max) + 1));
        Gauges {
            transfers: total(flows),
            operations: self.operations_max(),
            held: match core.role {
                // A source that was given up stays until its flows are quiet.
                Role::Prefill => total(requests + flows),
                Role::Decode => 0,
            },
            quarantined: 0,
            // What is digested of each flow, too, a layer of a rank and some blocks at a time.
            queued: total(posts.saturating_mul(2)),
            tombstones: 0,
            peers: total(peers),
            links: 0,
            // Steps that are not computed yet with their sources, and these with their steps, each
            // with a block at least. Flows with their units, in the lists of links and of sources.
            // Peers being fenced by their ranks, and in turns.
            entries: total(
                tried
                    .saturating_add(flows * (lanes + 2))
                    .saturating_add(3 * requests * blocks)
                    .saturating_add(peers * (u64::from(TP_MAX) + 1)),
            ),
            // Sessions by their names, four deadlines each, one per quiesce and one per peer. Of a
            // peer the ways to its ranks and the sessions on them; its ranks, each with a route and
            // what is in flight.
            remembered: total(
                posts.saturating_add(peers * (7 * lanes + 3 * u64::from(TP_MAX) + 1)),
            ),
            failures: total(peers * (lanes + 1)),
            delivered: 0,
            violations: COUNT,
        }
    }
}

impl RouterConfig {
    /// Limits of a router. A request that was sent may have to wait again, whatever the queue.
    pub fn limits(&self) -> Gauges {
        let requests = u64::from(self.requests_max) + u64::from(self.waiting_max);
        let [instances, legs, tries, prefixes] =
            [self.instances_max, self.legs_max, self.retries_max, self.prefixes_max].map(u64::from);
        // Legs twice, prompts with their samples. Each try of a prompt, which has two legs at
        // least, may end with three notes about who failed it.
        let of_request = (3 * legs).saturating_add((legs / 2 * 3).saturating_mul(tries + 1));
        // Its name twice, the name of one that left, four deadlines, prefixes, and bounded notes.
        let of_instance = 7 + prefixes + (ABANDONED_MAX + TROUBLES_MAX) as u64;
        // Four tables of pairs; n instances make n / 2 times n / 2 of them at most.
        let pairs = instances * instances;
        let of_instances = instances.saturating_mul(of_instance).saturating_add(pairs);
        // Requests wait for an instance, and before they are sent again.
        let kept = KEPT_MAX as u64 + 2 * requests + u64::from(self.load_period.is_some());
        Gauges {
            transfers: total(requests),
            queued: total(requests),
            peers: self.instances_max,
            entries: total(requests.saturating_mul(of_request)),
            remembered: total(of_instances.saturating_add(kept)),
            // Four notes about an instance itself; troubles that it said and that are kept.
            failures: total(instances * (4 + 2 * TROUBLES_MAX as u64) + pairs),
            violations: COUNT,
            ..Gauges::default()
        }
    }
}

impl PayloadConfig {
    /// Limits of the payloads of a host.
    pub fn limits(&self) -> Gauges {
        let [slots, clients, payloads, reservations, hosts, lent] = [
            self.slots_max,
            self.clients_max,
            self.payloads_max,
            self.reservations_max,
            self.hosts_max,
            self.host_payloads_max,
        ]
        .map(u64::from);
        // What its wants are asked of, when again, and what comes for them.
        let wants = clients.saturating_mul(payloads);
        // Reservations and what is wanted are named by who has them, too; what arrived once more by
        // its key. Deadlines of reservations and of payloads.
        let of_client = 2 * reservations + 4 * payloads;
        Gauges {
            transfers: self.slots_max,
            held: self.slots_max,
            queued: total((clients * reservations).saturating_add(wants)),
            tombstones: total(2 * u64::from(self.tombstones_max)),
            peers: self.clients_max,
            // Stages that have a part of the pool or wait for one.
            entries: total(
                (4 * slots + clients.saturating_mul(of_client + 1))
                    .saturating_add(wants.saturating_mul(2 * hosts + 5))
                    .saturating_add(hosts.saturating_mul(12 * lent + 4)),
            ),
            remembered: total(2 * u64::from(self.streams_max) + clients + 5 * hosts),
            violations: COUNT,
            ..Gauges::default()
        }
    }
}
