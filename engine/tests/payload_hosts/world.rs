//! Clients on several hosts, and what has to hold.

use crate::cluster::{Cluster, PAGE, WayFaults, decode_name, prefill_name};
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::ids::{EngineId, Incarnation};
use kvferry_engine::core::payload::*;
use kvferry_engine::core::{Machine, Nanos};
use std::collections::{BTreeMap, BTreeSet};

/// One thing that happens. Clients are numbered within their host, keys are request and chunk; the
/// last chunk stands for none.
#[derive(Clone, Debug)]
pub(crate) enum HostStep {
    Put {
        host: usize,
        client: usize,
        key: (u8, u8),
        bytes: u64,
        receivers: u32,
    },
    /// From a host that is named, or from any.
    Want {
        host: usize,
        client: usize,
        key: (u8, u8),
        from: Option<usize>,
    },
    Abandon {
        host: usize,
        client: usize,
        key: (u8, u8),
    },
    Take {
        host: usize,
        client: usize,
    },
    Release {
        host: usize,
        client: usize,
    },
    End {
        host: usize,
        client: usize,
        request: u8,
        fails: bool,
    },
    CleanUp {
        host: usize,
        client: usize,
        request: u8,
    },
    Replace {
        host: usize,
        client: usize,
    },
    /// All of a host is gone, and begins anew.
    Crash {
        host: usize,
        is_told: bool,
        down_ms: u64,
    },
    /// Two hosts do not hear each other for a while.
    Cut {
        hosts: (usize, usize),
        ms: u64,
    },
    Faults(WayFaults),
    /// The liar says what it may not, or somebody does whom nobody knows.
    Lie {
        host: usize,
        what: u8,
        number: u64,
        key: (u8, u8),
    },
    Wait {
        ms: u64,
    },
}

/// What was put.
#[derive(Debug)]
struct HostPut {
    key: PayloadKey,
    deployment: usize,
    host: usize,
    bytes: u64,
    receivers: u32,
    /// Receivers that have it, or for whom it is there.
    out: u32,
    /// Cleaned up, replaced, expired or gone with its host.
    is_over: bool,
    until: Option<Nanos>,
}

#[derive(Debug)]
struct HostClaim {
    claim: ClaimId,
    key: PayloadKey,
    pages: (u64, u64),
    stamp: u64,
    is_taken: bool,
}

#[derive(Debug)]
struct HostClient {
    id: PayloadClient,
    deployment: usize,
    stage: u8,
    wants: BTreeMap<PayloadKey, Option<usize>>,
    claims: Vec<HostClaim>,
}

pub(crate) struct HostWorld {
    pub(crate) cluster: Cluster,
    config: PayloadConfig,
    clients: Vec<Vec<HostClient>>,
    puts: BTreeMap<u64, HostPut>,
    /// The latest put of each key on each host.
    latest: BTreeMap<(usize, usize, PayloadKey), u64>,
    ended: BTreeSet<(usize, PayloadStream)>,
    next: u64,
    /// A host without clients, for which somebody else speaks.
    liar: Option<usize>,
    lies: u32,
}

/// Deployment and stage of the clients of a host.
const CLIENTS: [(usize, u8); 5] = [(0, 0), (0, 1), (0, 1), (1, 0), (1, 1)];

fn stream(request: u8) -> PayloadStream {
    PayloadStream::new("0", "1", &format!("request-{request}"))
}

fn key((request, chunk): (u8, u8)) -> PayloadKey {
    match chunk {
        2 => stream(request).whole(),
        chunk => stream(request).chunk(chunk.into()),
    }
}

impl HostWorld {
    /// With a liar, the last host is it.
    pub(crate) fn new(hosts: usize, lies: bool, config: PayloadConfig, seed: u64) -> HostWorld {
        let cluster = Cluster::new(hosts, config.clone(), seed, |config| {
            config.settings.lease = Nanos::from_secs(2);
            config.settings.orphan = Nanos::from_secs(2);
        });
        let mut world = HostWorld {
            cluster,
            config,
            clients: Vec::new(),
            puts: BTreeMap::new(),
            latest: BTreeMap::new(),
            ended: BTreeSet::new(),
            next: 0,
            liar: lies.then(|| hosts - 1),
            lies: 0,
        };
        for host in 0..hosts {
            let clients = world.begin_all(host);
            world.clients.push(clients);
        }
        world
    }

    fn fresh(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn begin_all(&mut self, host: usize) -> Vec<HostClient> {
        let clients = if self.liar == Some(host) { 0 } else { CLIENTS.len() };
        (0..clients).map(|client| self.begin(host, client)).collect()
    }

    fn begin(&mut self, host: usize, client: usize) -> HostClient {
        let (deployment, stage) = CLIENTS[client];
        let id = PayloadClient(self.fresh() as u32);
        let joined = PayloadHook::Joined {
            deployment: deployment.to_string().into(),
            stage: stage.to_string().into(),
        };
        self.tell(host, id, joined);
        HostClient { id, deployment, stage, wants: BTreeMap::new(), claims: Vec::new() }
    }

    fn tell(&mut self, host: usize, client: PayloadClient, hook: PayloadHook) {
        self.cluster.payload(host, PayloadInput::Hook { client, hook });
        self.answers();
    }

    fn answers(&mut self) {
        for (host, client, answer) in std::mem::take(&mut self.cluster.answers) {
            let of_host = &self.clients[host];
            let at = of_host.iter().position(|state| state.id == client).expect("it is there");
            match answer {
                PayloadAnswer::Arrived { key, claim, offset, bytes, .. } => {
                    self.arrived((host, at), key, claim, (offset, bytes));
                }
                PayloadAnswer::Missing { key, failure } => self.missing((host, at), &key, &failure),
                PayloadAnswer::Abandoned { .. } => {}
                answer => panic!("nobody waits for {answer:?}"),
            }
        }
    }

    fn check(&self, host: usize, pages: (u64, u64), stamp: u64) {
        let memory = &self.cluster.hosts[host].memory;
        let found = &memory[pages.0 as usize..(pages.0 + pages.1) as usize];
        assert!(
            found.iter().all(|page| *page == stamp),
            "{stamp} at {pages:?} of {host}: {found:?}"
        );
    }

    fn arrived(
        &mut self,
        (host, at): (usize, usize),
        key: PayloadKey,
        claim: ClaimId,
        place: (u64, u64),
    ) {
        let pages = (place.0 / PAGE, place.1.div_ceil(PAGE));
        let stamp = match pages.1 {
            0 => 0,
            _ => self.cluster.hosts[host].memory[pages.0 as usize],
        };
        let client = &mut self.clients[host][at];
        assert!(client.wants.remove(&key).is_some(), "{key} was wanted");
        if let Some(put) = self.puts.get_mut(&stamp) {
            let said = (client.deployment, &key, place.1);
            assert_eq!((put.deployment, &put.key, put.bytes), said, "{stamp} is another payload");
            put.out += 1;
            assert!(put.out <= put.receivers, "{key} goes to {} at once: {put:?}", put.out);
        } else {
            assert_eq!((stamp, place.1), (0, 0), "{key} was never put");
        }
        client.claims.push(HostClaim { claim, key, pages, stamp, is_taken: false });
        self.check(host, pages, stamp);
    }

    fn missing(&mut self, (host, at): (usize, usize), key: &PayloadKey, failure: &PayloadFailure) {
        let client = &mut self.clients[host][at];
        let deployment = client.deployment;
        assert!(client.wants.remove(key).is_some(), "{key} was wanted");
        // Of what nobody has begun a liar is believed.
        if *failure == PayloadFailure::Ended && self.liar.is_none() {
            assert!(self.ended.contains(&(deployment, key.stream.clone())), "{key}");
        }
    }

    /// The clients of a host, if it is up.
    fn client(&self, host: usize, client: usize) -> Option<&HostClient> {
        self.clients[host].get(client)
    }

    pub(crate) fn step(&mut self, step: HostStep) {
        match step {
            HostStep::Put { host, client, key: named, bytes, receivers } => {
                self.put((host, client), key(named), bytes, receivers);
            }
            HostStep::Want { host, client, key: named, from } => {
                self.want((host, client), key(named), from);
            }
            HostStep::Abandon { host, client, key: named } => {
                self.abandon((host, client), key(named));
            }
            HostStep::Take { host, client } => self.take(host, client),
            HostStep::Release { host, client } => self.release(host, client),
            HostStep::End { host, client, request, fails } => {
                self.end((host, client), stream(request), fails);
            }
            HostStep::CleanUp { host, client, request } => {
                self.clean_up((host, client), stream(request));
            }
            HostStep::Replace { host, client } => self.replace(host, client),
            HostStep::Crash { host, is_told, down_ms } => self.crash(host, is_told, down_ms),
            HostStep::Cut { hosts, ms } => {
                self.cluster.cut = Some(hosts);
                self.wait(ms);
                self.cluster.cut = None;
            }
            HostStep::Faults(faults) => self.cluster.faults = faults,
            HostStep::Lie { host, what, number, key: named } => {
                self.lie(host, what, number, key(named));
            }
            HostStep::Wait { ms } => self.wait(ms),
        }
        self.holds();
    }

    fn put(&mut self, (host, client): (usize, usize), key: PayloadKey, bytes: u64, receivers: u32) {
        let Some(HostClient { id, deployment, .. }) = self.client(host, client) else { return };
        let (id, deployment) = (*id, *deployment);
        let reserve = PayloadHook::Reserve { ticket: 1, bytes, wait: Nanos::ZERO };
        let input = PayloadInput::Hook { client: id, hook: reserve };
        self.cluster.payload(host, input);
        let reserved = |(_, _, answer): &(usize, PayloadClient, PayloadAnswer)| {
            matches!(answer, PayloadAnswer::Reserved { .. } | PayloadAnswer::NotReserved { .. })
        };
        let at = self.cluster.answers.iter().position(reserved).expect("it is answered at once");
        let (_, _, answer) = self.cluster.answers.remove(at);
        self.answers();
        let PayloadAnswer::Reserved { slot, offset, .. } = answer else { return };
        let stamp = self.fresh();
        let pages = (offset / PAGE) as usize..(offset / PAGE + bytes.div_ceil(PAGE)) as usize;
        self.cluster.hosts[host].memory[pages].fill(stamp);
        let until = (self.config.hold != Nanos::ZERO).then(|| self.cluster.now + self.config.hold);
        let record = HostPut {
            key: key.clone(),
            deployment,
            host,
            bytes,
            receivers,
            out: 0,
            is_over: false,
            until,
        };
        self.puts.insert(stamp, record);
        if let Some(old) = self.latest.insert((host, deployment, key.clone()), stamp) {
            self.puts.get_mut(&old).expect("it was put").is_over = true;
        }
        self.tell(host, id, PayloadHook::Put { slot, key, receivers });
    }

    fn want(&mut self, (host, client): (usize, usize), key: PayloadKey, from: Option<usize>) {
        // Nobody of the stage is ever there.
        let from = from.filter(|from| self.liar != Some(*from));
        let Some(state) = self.clients[host].get_mut(client) else { return };
        if !state.claims.iter().any(|claim| claim.key == key && !claim.is_taken) {
            state.wants.entry(key.clone()).or_insert(from);
        }
        let id = state.id;
        let hook = match from {
            Some(from) => PayloadHook::WantFrom { key, host: prefill_name(from) },
            None => PayloadHook::Want { key, producer: None },
        };
        self.tell(host, id, hook);
    }

    fn abandon(&mut self, (host, client): (usize, usize), key: PayloadKey) {
        let Some(state) = self.clients[host].get_mut(client) else { return };
        state.wants.remove(&key);
        let place = state.claims.iter().position(|claim| claim.key == key && !claim.is_taken);
        let id = state.id;
        let given_up = place.map(|place| state.claims.remove(place));
        self.given_back(given_up.into_iter().collect());
        self.tell(host, id, PayloadHook::Abandon { key });
    }

    fn given_back(&mut self, claims: Vec<HostClaim>) {
        for claim in claims.into_iter().filter(|claim| !claim.is_taken) {
            if let Some(put) = self.puts.get_mut(&claim.stamp) {
                put.out -= 1;
            }
        }
    }

    fn take(&mut self, host: usize, client: usize) {
        let Some(state) = self.clients[host].get_mut(client) else { return };
        let Some(claim) = state.claims.iter_mut().find(|claim| !claim.is_taken) else { return };
        claim.is_taken = true;
        let (id, claim) = (state.id, claim.claim);
        self.tell(host, id, PayloadHook::Take { claim });
    }

    fn release(&mut self, host: usize, client: usize) {
        let Some(state) = self.clients[host].get_mut(client) else { return };
        let Some(HostClaim { claim, pages, stamp, .. }) = state.claims.pop() else { return };
        let id = state.id;
        self.check(host, pages, stamp);
        self.tell(host, id, PayloadHook::Release { claim });
    }

    fn end(&mut self, (host, client): (usize, usize), stream: PayloadStream, fails: bool) {
        let Some(state) = self.client(host, client) else { return };
        let (id, deployment) = (state.id, state.deployment);
        if !fails {
            self.ended.insert((deployment, stream.clone()));
        }
        let failure = fails.then(|| "no more".into());
        self.tell(host, id, PayloadHook::End { stream, failure });
    }

    fn clean_up(&mut self, (host, client): (usize, usize), stream: PayloadStream) {
        let Some(state) = self.client(host, client) else { return };
        let (id, deployment) = (state.id, state.deployment);
        for put in self.puts.values_mut() {
            let its = put.host == host && put.deployment == deployment;
            put.is_over |= its && put.key.stream == stream;
        }
        self.tell(host, id, PayloadHook::CleanUp { stream });
    }

    fn replace(&mut self, host: usize, client: usize) {
        if self.client(host, client).is_none() {
            return;
        }
        let new = self.begin(host, client);
        let old = std::mem::replace(&mut self.clients[host][client], new);
        self.given_back(old.claims);
        self.tell(host, old.id, PayloadHook::Left);
    }

    /// What its clients had stays theirs: nobody knows what they made of it.
    fn crash(&mut self, host: usize, is_told: bool, down_ms: u64) {
        self.cluster.crash(host, is_told);
        self.clients[host].clear();
        self.puts.values_mut().filter(|put| put.host == host).for_each(|put| put.is_over = true);
        self.wait(down_ms);
        self.cluster.restart(host);
        self.clients[host] = self.begin_all(host);
    }

    /// The liar has a connection, and says to this host what it likes; or somebody does whom
    /// nobody knows.
    fn lie(&mut self, host: usize, what: u8, number: u64, key: PayloadKey) {
        if !self.cluster.hosts[host].is_up {
            return;
        }
        let deployment = (what / 64 % 2).to_string();
        let place = ScopedKey { deployment: deployment.as_str().into(), key };
        let (to_source, is_known) = (what & 8 == 0, what & 32 == 0);
        let note = match what % 8 {
            0 => PayloadNote::Done { number, got: true },
            1 => PayloadNote::Done { number, got: false },
            2 => PayloadNote::Unwant { place },
            3 => PayloadNote::Missing { place, failure: PayloadFailure::CleanedUp },
            4 if to_source => PayloadNote::Want { place },
            // One that says that somebody may put it is waited for.
            4 => PayloadNote::Absent { place, has_stage: false },
            5 => PayloadNote::Offer { place, number, bytes: number * 999, generation: number },
            6 => PayloadNote::Settled { number },
            _ => PayloadNote::Missing { place, failure: PayloadFailure::Ended },
        };
        let wrap = if to_source { PayloadInput::PrefillPeer } else { PayloadInput::DecodePeer };
        self.lies += 1;
        if let Some(liar) = self.liar.filter(|liar| is_known && *liar != host) {
            let peer = if to_source { decode_name(liar) } else { prefill_name(liar) };
            let incarnation = Incarnation(self.cluster.hosts[liar].life.into());
            self.cluster.payload(host, wrap(DirectoryNews::Told { peer, incarnation, note }));
            return self.answers();
        }
        let (peer, incarnation): (EngineId, _) = ("stranger".into(), Incarnation(number));
        let failure = Failure::PeerSilent;
        let known = Some(incarnation);
        for news in [
            DirectoryNews::Met { peer: peer.clone(), incarnation },
            DirectoryNews::Told { peer: peer.clone(), incarnation, note },
            DirectoryNews::Parted { peer, incarnation: known, failure },
        ] {
            self.cluster.payload(host, wrap(news));
        }
        self.answers();
    }

    fn wait(&mut self, ms: u64) {
        let until = self.cluster.now + Nanos::from_ms(ms);
        let mut steps = 0;
        while self.cluster.step(until) {
            steps += 1;
            assert!(steps < 200_000, "somebody has no rest");
            self.expire();
            self.answers();
        }
        self.cluster.now = self.cluster.now.max(until);
        self.expire();
    }

    fn expire(&mut self) {
        let now = self.cluster.now;
        let expired = |put: &&mut HostPut| put.until.is_some_and(|until| until <= now);
        self.puts.values_mut().filter(expired).for_each(|put| put.is_over = true);
    }

    /// Nobody writes what somebody reads, and no table is beyond its limit.
    fn holds(&self) {
        for (host, clients) in self.clients.iter().enumerate() {
            for claim in clients.iter().flat_map(|client| &client.claims) {
                self.check(host, claim.pages, claim.stamp);
            }
            let gauges = self.cluster.hosts[host].payload.gauges();
            let limits = self.config.limits();
            for (what, is, most) in [
                ("payloads", gauges.transfers, limits.transfers),
                ("slots", gauges.held, limits.held),
                ("reservations", gauges.queued, limits.queued),
                ("tombstones", gauges.tombstones, limits.tombstones),
                ("entries", gauges.entries, limits.entries),
                ("remembered", gauges.remembered, limits.remembered),
            ] {
                assert!(is <= most, "{is} {what} of host {host}, {most} at most");
            }
        }
    }

    /// Who waits, waits for what is not there.
    fn nobody_waits_for_what_is_there(&self) {
        for (host, clients) in self.clients.iter().enumerate() {
            // One that holds what nobody wants may have no room in its share.
            if self.cluster.hosts[host].payload.gauges().held > 0 {
                continue;
            }
            for client in clients {
                for (key, from) in &client.wants {
                    let of_key =
                        |((of, deployment, named), stamp): (&(usize, usize, PayloadKey), &u64)| {
                            let put = &self.puts[stamp];
                            let its = *deployment == client.deployment && named == key;
                            let is_there = !put.is_over && put.out < put.receivers;
                            (its && from.is_none_or(|from| from == *of) && is_there)
                                .then(|| format!("{put:?}"))
                        };
                    let there: Vec<_> = self.latest.iter().filter_map(of_key).collect();
                    assert!(there.is_empty(), "host {host} waits for {key}: {there:?}");
                }
            }
        }
    }

    fn somebody_who_reads(&self) -> Option<(usize, usize)> {
        let clients = |host: usize| self.clients[host].iter().enumerate();
        let reads = |(at, client): (usize, &HostClient)| (!client.claims.is_empty()).then_some(at);
        (0..self.clients.len()).find_map(|host| Some((host, clients(host).find_map(reads)?)))
    }

    /// When all is well again, what is there is had; when all who put are gone, nobody waits; and
    /// when all are gone, nothing is left.
    pub(crate) fn finish(&mut self) {
        (self.cluster.faults, self.cluster.cut) = (WayFaults::default(), None);
        self.wait(60_000);
        while let Some((host, client)) = self.somebody_who_reads() {
            self.release(host, client);
            self.wait(1_000);
        }
        self.wait(10_000);
        self.holds();
        self.nobody_waits_for_what_is_there();
        for stage in [0, 1] {
            for host in 0..self.clients.len() {
                let of_stage = |client: &HostClient| client.stage == stage;
                while let Some(at) = self.clients[host].iter().position(of_stage) {
                    let HostClient { id, claims, .. } = self.clients[host].remove(at);
                    self.given_back(claims);
                    self.tell(host, id, PayloadHook::Left);
                }
                self.wait(10_000);
            }
            for (host, client) in self
                .clients
                .iter()
                .enumerate()
                .flat_map(|(host, all)| all.iter().map(move |client| (host, client)))
            {
                let waits = client.wants.keys().find(|key| {
                    let is_copy = |put: &HostPut| put.key == **key && put.out < put.receivers;
                    !self.puts.values().any(is_copy)
                });
                assert!(waits.is_none(), "host {host} waits for {waits:?}, which nobody puts");
            }
        }
        self.nothing_is_left();
    }

    fn nothing_is_left(&mut self) {
        for host in 0..self.clients.len() {
            for deployment in ["0", "1"] {
                let last = PayloadClient(self.fresh() as u32);
                let joined =
                    PayloadHook::Joined { deployment: deployment.into(), stage: "9".into() };
                self.tell(host, last, joined);
                for request in 0..3 {
                    self.tell(host, last, PayloadHook::CleanUp { stream: stream(request) });
                }
                self.tell(host, last, PayloadHook::Left);
            }
        }
        self.wait(30_000);
        for host in 0..self.clients.len() {
            let core = &self.cluster.hosts[host].payload;
            let gauges = core.gauges();
            let left = [gauges.transfers, gauges.held, gauges.queued, gauges.peers, gauges.entries];
            assert_eq!(left, [0; 5], "host {host}: {gauges:?}");
            assert_eq!(core.free_bytes(), self.config.pool);
            assert_eq!(self.cluster.at_work(host), [0; 4], "host {host}");
        }
        assert!(self.cluster.misuses <= self.lies, "nobody else broke a rule");
    }
}
