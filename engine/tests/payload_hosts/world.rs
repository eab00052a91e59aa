//! Clients on several hosts, and what has to hold.

use crate::cluster::{Cluster, HostSettings, PAGE, WayFaults, decode_name, prefill_name};
use crate::names::{key, stream};
use crate::step::HostStep;
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::ids::{EngineId, Incarnation};
use kvferry_engine::core::payload::*;
use kvferry_engine::core::{Machine, Nanos};
use std::collections::{BTreeMap, BTreeSet};

/// What was put.
#[derive(Debug)]
pub(crate) struct HostPut {
    pub(crate) key: PayloadKey,
    pub(crate) deployment: usize,
    pub(crate) host: usize,
    /// It is a chunk of its stream.
    is_chunk: bool,
    pub(crate) bytes: u64,
    pub(crate) receivers: u32,
    /// Receivers that have it, or for whom it is there.
    pub(crate) out: u32,
    /// Given back on other hosts, at most; of these, with what was on its way, lost with a host.
    pub(crate) away: u32,
    pub(crate) lost: u32,
    /// Cleaned up, replaced, expired or gone with its host.
    pub(crate) is_over: bool,
    pub(crate) until: Option<Nanos>,
}

#[derive(Debug)]
pub(crate) struct HostClaim {
    pub(crate) claim: ClaimId,
    pub(crate) key: PayloadKey,
    pub(crate) pages: (u64, u64),
    pub(crate) stamp: u64,
    pub(crate) is_taken: bool,
}

#[derive(Debug)]
pub(crate) struct HostClient {
    pub(crate) id: PayloadClient,
    pub(crate) deployment: usize,
    pub(crate) stage: u8,
    pub(crate) wants: BTreeMap<PayloadKey, Option<usize>>,
    pub(crate) claims: Vec<HostClaim>,
}

pub(crate) struct HostWorld {
    pub(crate) cluster: Cluster,
    pub(crate) config: PayloadConfig,
    pub(crate) clients: Vec<Vec<HostClient>>,
    pub(crate) puts: BTreeMap<u64, HostPut>,
    /// The latest put of each key on each host.
    pub(crate) latest: BTreeMap<(usize, usize, PayloadKey), u64>,
    pub(crate) ended: BTreeSet<(usize, PayloadStream)>,
    /// What clients of each host wanted since it began.
    wanted: Vec<BTreeSet<(usize, PayloadKey)>>,
    /// Something was bad.
    faulty: bool,
    pub(crate) next: u64,
    /// A host without clients, for which somebody else speaks.
    pub(crate) liar: Option<usize>,
    pub(crate) lies: u32,
    /// What was put last is for nobody.
    is_refused: bool,
    /// What ends at these times.
    pub(crate) due: BTreeMap<(Nanos, u64), FaultEnd>,
}

/// The end of something that was bad.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FaultEnd {
    Begin(usize),
    Mend((usize, usize)),
    Name(usize),
}

/// Deployment and stage of the clients of a host.
const CLIENTS: [(usize, u8); 5] = [(0, 0), (0, 1), (0, 1), (1, 0), (1, 1)];

impl HostWorld {
    /// With a liar, the last host is it.
    pub(crate) fn new(hosts: usize, lies: bool, settings: HostSettings, seed: u64) -> HostWorld {
        let config = settings.payload.clone();
        let cluster = Cluster::new(hosts, settings, seed);
        let mut world = HostWorld {
            cluster,
            config,
            clients: Vec::new(),
            puts: BTreeMap::new(),
            latest: BTreeMap::new(),
            ended: BTreeSet::new(),
            wanted: vec![BTreeSet::new(); hosts],
            faulty: lies,
            next: 0,
            liar: lies.then(|| hosts - 1),
            lies: 0,
            is_refused: false,
            due: BTreeMap::new(),
        };
        for host in 0..hosts {
            let clients = world.begin_all(host);
            world.clients.push(clients);
        }
        world
    }

    pub(crate) fn fresh(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn begin_all(&mut self, host: usize) -> Vec<HostClient> {
        let clients = if self.liar == Some(host) { 0 } else { CLIENTS.len() };
        (0..clients).map(|client| self.begin(host, client)).collect()
    }

    fn begin(&mut self, host: usize, client: usize) -> HostClient {
        self.begin_of(host, CLIENTS[client])
    }

    pub(crate) fn begin_of(&mut self, host: usize, (deployment, stage): (usize, u8)) -> HostClient {
        let id = PayloadClient(self.fresh() as u32);
        let joined = PayloadHook::Joined {
            deployment: deployment.to_string().into(),
            stage: stage.to_string().into(),
        };
        self.tell(host, id, joined);
        HostClient { id, deployment, stage, wants: BTreeMap::new(), claims: Vec::new() }
    }

    pub(crate) fn tell(&mut self, host: usize, client: PayloadClient, hook: PayloadHook) {
        self.cluster.payload(host, PayloadInput::Hook { client, hook });
        self.answers();
    }

    pub(crate) fn answers(&mut self) {
        for (host, client, answer) in std::mem::take(&mut self.cluster.answers) {
            let of_host = &self.clients[host];
            let at = of_host.iter().position(|state| state.id == client).expect("it is there");
            match answer {
                PayloadAnswer::Arrived { key, claim, offset, bytes, .. } => {
                    self.arrived((host, at), key, claim, (offset, bytes));
                }
                PayloadAnswer::Missing { key, failure, .. } => {
                    self.missing((host, at), &key, &failure)
                }
                PayloadAnswer::Abandoned { .. } => {}
                PayloadAnswer::Stored { failure, .. } => {
                    assert_eq!(failure, Some(PayloadFailure::CleanedUp));
                    self.is_refused = true;
                }
                answer => panic!("nobody waits for {answer:?}"),
            }
        }
    }

    pub(crate) fn check(&self, host: usize, pages: (u64, u64), stamp: u64) {
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
        let deployment = client.deployment;
        assert!(client.wants.remove(&key).is_some(), "{key} was wanted");
        client.claims.push(HostClaim { claim, key: key.clone(), pages, stamp, is_taken: false });
        if let Some(put) = self.puts.get_mut(&stamp) {
            let said = (deployment, &key, place.1);
            assert_eq!((put.deployment, &put.key, put.bytes), said, "{stamp} is another payload");
            put.out += 1;
            assert!(put.out <= put.receivers, "{key} goes to {} at once: {put:?}", put.out);
            if put.is_chunk && put.host != host && key.chunk == Some(0) {
                self.begins_anew((host, deployment), &key.stream, false);
            }
        } else {
            assert_eq!((stamp, place.1), (0, 0), "{key} was never put");
        }
        self.check(host, pages, stamp);
    }

    fn missing(&mut self, (host, at): (usize, usize), key: &PayloadKey, failure: &PayloadFailure) {
        let client = &mut self.clients[host][at];
        let deployment = client.deployment;
        assert!(client.wants.remove(key).is_some(), "{key} was wanted");
        let is_of_hosts =
            matches!(failure, PayloadFailure::NotMoved(_) | PayloadFailure::PeerGone(_));
        assert!(self.faulty || !is_of_hosts, "all is well, and {key} does not come: {failure}");
        let is_full = self.faulty || self.cluster.hosts[host].payload.gauges().held > 0;
        assert!(is_full || !matches!(failure, PayloadFailure::PoolFull { .. }), "{key}: {failure}");
        // Of what nobody has begun a liar is believed.
        if *failure == PayloadFailure::Ended && self.liar.is_none() {
            assert!(self.ended.contains(&(deployment, key.stream.clone())), "{key}");
        }
    }

    /// The clients of a host, if it is up.
    fn client(&self, host: usize, client: usize) -> Option<&HostClient> {
        self.clients[host].get(client)
    }

    /// Whether a host is up, and its process goes on.
    fn goes_on(&self, host: usize) -> bool {
        let host = &self.cluster.hosts[host];
        host.is_up && host.stands <= self.cluster.now
    }

    /// Hosts are counted around.
    pub(crate) fn step(&mut self, mut step: HostStep) {
        let hosts = self.clients.len();
        if let Some(host) = step.of_clients() {
            *host %= hosts;
            if !self.goes_on(*host) {
                return;
            }
        }
        self.faulty |= step.is_bad();
        match step {
            HostStep::Put { host, client, key: named, bytes, receivers, is_chunk } => {
                self.put((host, client), (key(named), is_chunk), bytes, receivers);
            }
            HostStep::Want { host, client, key: named, from } => {
                self.want((host, client), key(named), from.map(|from| from % hosts));
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
            HostStep::Lie { host, what, number, key: named } => {
                self.lie(host, what, number, key(named));
            }
            HostStep::Crash { host, is_told, down_ms } => {
                self.crash(host % hosts, is_told, down_ms)
            }
            HostStep::Cut { hosts: (one, other), ms } => {
                let cut = (one % hosts, other % hosts);
                self.cluster.cut.push(cut);
                self.ends_in(ms, FaultEnd::Mend(cut));
            }
            HostStep::Stand { host, ms } => {
                let host = &mut self.cluster.hosts[host % hosts];
                host.stands = host.stands.max(self.cluster.now + Nanos::from_ms(ms));
            }
            HostStep::Unname { host, other, ms } if self.goes_on(host % hosts) => {
                let (host, other) = (host % hosts, other % hosts);
                let others = (0..hosts).filter(|named| *named != other).collect();
                self.cluster.name_others(host, others);
                self.answers();
                self.ends_in(ms, FaultEnd::Name(host));
            }
            HostStep::Unname { .. } => {}
            HostStep::Faults(faults) => self.cluster.faults = faults,
            HostStep::Wait { ms } => self.wait(ms),
        }
        self.holds();
    }

    fn ends_in(&mut self, ms: u64, end: FaultEnd) {
        let at = (self.cluster.now + Nanos::from_ms(ms), self.fresh());
        self.due.insert(at, end);
    }

    /// Something bad is over.
    fn fault_ends(&mut self, end: FaultEnd) {
        match end {
            FaultEnd::Begin(host) => {
                self.cluster.restart(host);
                self.clients[host] = self.begin_all(host);
            }
            FaultEnd::Mend(cut) => {
                let place = self.cluster.cut.iter().position(|of| *of == cut);
                place.map(|place| self.cluster.cut.swap_remove(place));
            }
            FaultEnd::Name(host) if self.goes_on(host) => {
                self.cluster.name_others(host, (0..self.clients.len()).collect());
                self.answers();
            }
            FaultEnd::Name(host) if self.cluster.hosts[host].is_up => {
                let at = (self.cluster.hosts[host].stands, self.fresh());
                self.due.insert(at, FaultEnd::Name(host));
            }
            // It hears of all when it begins.
            FaultEnd::Name(_) => {}
        }
    }

    /// All is well from now on.
    pub(crate) fn mend(&mut self) {
        self.cluster.faults = WayFaults::default();
        let stand = self.cluster.hosts.iter().map(|host| host.stands);
        let until = stand.max().unwrap_or_default();
        self.wait(until.0.saturating_sub(self.cluster.now.0).div_ceil(1_000_000));
        for end in std::mem::take(&mut self.due).into_values() {
            self.fault_ends(end);
        }
        let Some(liar) = self.liar else { return };
        for host in (0..self.clients.len()).filter(|host| *host != liar) {
            let incarnation = Some(Incarnation(self.cluster.hosts[liar].life.into()));
            let (peer, failure) = (decode_name(liar), Failure::PeerSilent);
            let parted = DirectoryNews::Parted { peer, incarnation, failure };
            self.cluster.payload(host, PayloadInput::PrefillPeer(parted));
        }
        self.answers();
    }

    fn put(
        &mut self,
        (host, client): (usize, usize),
        (key, is_chunk): (PayloadKey, bool),
        bytes: u64,
        receivers: u32,
    ) {
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
            is_chunk: is_chunk && key.chunk.is_some(),
            bytes,
            receivers,
            out: 0,
            away: 0,
            lost: 0,
            is_over: false,
            until,
        };
        let is_chunk = record.is_chunk;
        self.puts.insert(stamp, record);
        let at = (host, deployment, key.clone());
        let old = self.latest.insert(at.clone(), stamp).map(|old| (old, self.puts[&old].is_over));
        if let Some((old, _)) = old {
            self.puts.get_mut(&old).expect("it was put").is_over = true;
        }
        if is_chunk && key.chunk == Some(0) {
            self.begins_anew((host, deployment), &key.stream, true);
        }
        self.lose_copies(host, |put| (put.deployment, &put.key) == (deployment, &key));
        self.tell(host, id, PayloadHook::Put { slot, key, receivers, is_chunk });
        if std::mem::take(&mut self.is_refused) {
            // Its stream was cleaned up, and what has its key is as it was.
            self.puts.get_mut(&stamp).expect("it was put").is_over = true;
            self.latest.remove(&at);
            if let Some((old, is_over)) = old {
                self.puts.get_mut(&old).expect("it was put").is_over = is_over;
                self.latest.insert(at, old);
            }
        }
    }

    /// A stream begins anew, here or elsewhere: nobody gets its later chunks that were put here, nor
    /// knows what became of what was.
    fn begins_anew(&mut self, of: (usize, usize), stream: &PayloadStream, is_here: bool) {
        let puts = &mut self.puts;
        self.latest.retain(|(host, deployment, key), stamp| {
            let put = puts.get_mut(stamp).expect("it was put");
            let is_later = !is_here || key.chunk > Some(0);
            let is_its = (*host, *deployment) == of && key.stream == *stream && is_later;
            put.is_over |= is_its && is_here && put.is_chunk;
            !is_its || !put.is_over && put.out < put.receivers
        });
    }

    pub(crate) fn want(
        &mut self,
        (host, client): (usize, usize),
        key: PayloadKey,
        from: Option<usize>,
    ) {
        // Nobody of the stage is ever there.
        let from = from.filter(|from| self.liar != Some(*from));
        let Some(state) = self.clients[host].get_mut(client) else { return };
        if !state.claims.iter().any(|claim| claim.key == key && !claim.is_taken) {
            state.wants.entry(key.clone()).or_insert(from);
        }
        let (id, deployment) = (state.id, state.deployment);
        self.wanted[host].insert((deployment, key.clone()));
        let hook = match from {
            Some(from) => PayloadHook::WantFrom { key, host: prefill_name(from) },
            None => PayloadHook::Want { key, producer: None },
        };
        self.tell(host, id, hook);
    }

    pub(crate) fn abandon(&mut self, (host, client): (usize, usize), key: PayloadKey) {
        let Some(state) = self.clients[host].get_mut(client) else { return };
        state.wants.remove(&key);
        let place = state.claims.iter().position(|claim| claim.key == key && !claim.is_taken);
        let id = state.id;
        let given_up = place.map(|place| state.claims.remove(place));
        self.given_back(host, given_up.into_iter().collect());
        self.tell(host, id, PayloadHook::Abandon { key });
    }

    pub(crate) fn given_back(&mut self, host: usize, claims: Vec<HostClaim>) {
        for claim in claims.into_iter().filter(|claim| !claim.is_taken) {
            if let Some(put) = self.puts.get_mut(&claim.stamp) {
                put.out -= 1;
                put.away += u32::from(put.host != host);
            }
        }
    }

    /// A host has nothing any more of what it got of these puts, and perhaps got one more.
    fn lose_copies(&mut self, host: usize, of: impl Fn(&HostPut) -> bool) {
        for put in self.puts.values_mut().filter(|put| put.host != host && of(put)) {
            put.lost += put.away + 1;
        }
    }

    fn take(&mut self, host: usize, client: usize) {
        let Some(state) = self.clients[host].get_mut(client) else { return };
        let Some(claim) = state.claims.iter_mut().find(|claim| !claim.is_taken) else { return };
        claim.is_taken = true;
        let (id, claim) = (state.id, claim.claim);
        self.tell(host, id, PayloadHook::Take { claim });
    }

    pub(crate) fn release(&mut self, host: usize, client: usize) {
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
        self.tell(host, id, PayloadHook::End { stream, failure, is_own: false });
    }

    fn clean_up(&mut self, (host, client): (usize, usize), stream: PayloadStream) {
        let Some(state) = self.client(host, client) else { return };
        let (id, deployment) = (state.id, state.deployment);
        for put in self.puts.values_mut() {
            let its = put.host == host && put.deployment == deployment;
            let is_chunk = put.is_chunk || put.key.chunk.is_none();
            put.is_over |= its && is_chunk && put.key.stream == stream;
        }
        self.lose_copies(host, |put| put.deployment == deployment && put.key.stream == stream);
        self.tell(host, id, PayloadHook::CleanUp { stream, is_own: false });
    }

    fn replace(&mut self, host: usize, client: usize) {
        if self.client(host, client).is_none() {
            return;
        }
        let new = self.begin(host, client);
        let old = std::mem::replace(&mut self.clients[host][client], new);
        self.given_back(host, old.claims);
        self.tell(host, old.id, PayloadHook::Left);
    }

    /// What its clients had stays theirs: nobody knows what they made of it.
    fn crash(&mut self, host: usize, is_told: bool, down_ms: u64) {
        if !self.cluster.hosts[host].is_up {
            return;
        }
        self.cluster.crash(host, is_told);
        self.clients[host].clear();
        self.puts.values_mut().filter(|put| put.host == host).for_each(|put| put.is_over = true);
        let wanted = std::mem::take(&mut self.wanted[host]);
        self.lose_copies(host, |put| wanted.contains(&(put.deployment, put.key.clone())));
        self.latest.retain(|(of, ..), _| *of != host);
        self.ends_in(down_ms, FaultEnd::Begin(host));
    }

    /// The liar has a connection, and says to this host what it likes; or somebody does whom
    /// nobody knows.
    fn lie(&mut self, host: usize, what: u8, number: u64, key: PayloadKey) {
        let deployment = (what / 64 % 2).to_string();
        let place = ScopedKey { deployment: deployment.as_str().into(), key };
        let (to_source, is_known) = (what & 8 == 0, what & 32 == 0);
        if let (true, Some(stamp)) =
            (to_source, self.latest.get(&(host, (what / 64 % 2).into(), place.key.clone())))
        {
            // Whoever says that it wants it may get it.
            let put = self.puts.get_mut(stamp).expect("it was put");
            put.lost += u32::from(what % 8 == 4);
        }
        let told = self.liar.and_then(|liar| self.cluster.last_wants.get(&prefill_name(liar)));
        let want = told.copied().unwrap_or(number);
        let note = match what % 8 {
            0 => PayloadNote::Done { number, got: true },
            1 => PayloadNote::Done { number, got: false },
            2 => PayloadNote::Unwant { place },
            3 => PayloadNote::Missing { place, failure: PayloadFailure::CleanedUp, want },
            4 if to_source => PayloadNote::Want { place, want },
            // One that says that somebody may put it is waited for.
            4 => PayloadNote::Absent { place, has_stage: false, want },
            5 => PayloadNote::Offer {
                place,
                number,
                bytes: number * 999,
                generation: number,
                is_chunk: what & 16 == 0,
                want,
            },
            6 => PayloadNote::Settled { number },
            _ => PayloadNote::Missing { place, failure: PayloadFailure::Ended, want },
        };
        let wrap = if to_source { PayloadInput::PrefillPeer } else { PayloadInput::DecodePeer };
        self.lies += 1;
        if let Some(liar) = self.liar.filter(|liar| is_known && *liar != host) {
            let peer = if to_source { decode_name(liar) } else { prefill_name(liar) };
            let incarnation = Incarnation(self.cluster.hosts[liar].life.into());
            if to_source {
                let met = DirectoryNews::Met { peer: peer.clone(), incarnation };
                self.cluster.payload(host, PayloadInput::PrefillPeer(met));
            }
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

    pub(crate) fn wait(&mut self, ms: u64) {
        let until = self.cluster.now + Nanos::from_ms(ms);
        while let Some((&at, _)) = self.due.first_key_value().filter(|((at, _), _)| *at <= until) {
            self.wait_until(at.0);
            let end = self.due.remove(&at).expect("it was there");
            self.fault_ends(end);
        }
        self.wait_until(until);
    }

    fn wait_until(&mut self, until: Nanos) {
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

    pub(crate) fn expire(&mut self) {
        let now = self.cluster.now;
        let expired = |put: &&mut HostPut| put.until.is_some_and(|until| until <= now);
        self.puts.values_mut().filter(expired).for_each(|put| put.is_over = true);
    }
}
