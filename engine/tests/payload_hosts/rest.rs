//! What has to hold meanwhile, and in the end.

use crate::names::{key, stream};
use crate::world::{HostClient, HostPut, HostWorld};
use kvferry_engine::core::Machine;
use kvferry_engine::core::payload::*;

/// Names of payloads, of both deployments.
const PLACES: u32 = 18;

impl HostWorld {
    /// Nobody writes what somebody reads, and no table is beyond its limit.
    pub(crate) fn holds(&self) {
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

    /// Of a put, so many are there for whoever comes; where it was put, if that is asked for.
    fn left(put: &HostPut, is_named: bool) -> u32 {
        let away = if is_named { put.away.max(put.lost) } else { put.lost };
        if put.is_over { 0 } else { (put.receivers - put.out).saturating_sub(away) }
    }

    /// Who waits, waits for what is not there.
    fn nobody_waits_for_what_is_there(&self) {
        for (host, clients) in self.clients.iter().enumerate() {
            for client in clients {
                for (key, from) in &client.wants {
                    let its =
                        |((of, deployment, named), _): &(&(usize, usize, PayloadKey), &u64)| {
                            *deployment == client.deployment
                                && named == key
                                && from.is_none_or(|from| from == *of)
                        };
                    let of_key = self.latest.iter().filter(its).map(|(_, stamp)| &self.puts[stamp]);
                    let there: Vec<_> = of_key
                        .clone()
                        .filter(|put| HostWorld::left(put, from.is_some()) > 0)
                        .collect();
                    assert!(there.is_empty(), "host {host} waits for {key}: {there:?}");
                    let is_over = from.is_some() && of_key.clone().next().is_some();
                    let is_known = self.config.tombstones_max > 1_000;
                    assert!(!is_over || !is_known, "host {host} waits for {key}, which is gone");
                }
            }
        }
    }

    fn somebody_who_reads(&self) -> Option<(usize, usize)> {
        let clients = |host: usize| self.clients[host].iter().enumerate();
        let reads = |(at, client): (usize, &HostClient)| (!client.claims.is_empty()).then_some(at);
        (0..self.clients.len()).find_map(|host| Some((host, clients(host).find_map(reads)?)))
    }

    /// Until nothing comes any more that somebody could read.
    fn all_is_read(&mut self) {
        while self.somebody_who_reads().is_some() {
            while let Some((host, client)) = self.somebody_who_reads() {
                self.release(host, client);
                self.wait(10);
            }
            self.wait(15_000);
        }
    }

    /// One more client of each host and deployment has what nobody else waits for, so that there is
    /// room for what somebody waits for.
    fn what_nobody_wants_is_had(&mut self) {
        for (host, deployment) in (0..self.clients.len()).flat_map(|host| [(host, 0), (host, 1)]) {
            if self.clients[host].is_empty() {
                continue;
            }
            let client = self.begin_of(host, (deployment, 1));
            self.clients[host].push(client);
            let at = self.clients[host].len() - 1;
            for named in (0..3).flat_map(|request| (0..3).map(move |chunk| (request, chunk))) {
                let key = key(named);
                let of_deployment = |client: &&HostClient| client.deployment == deployment;
                let mut clients = self.clients.iter().flatten().filter(of_deployment);
                if clients.any(|client| client.wants.contains_key(&key)) {
                    continue;
                }
                loop {
                    self.want((host, at), key.clone(), Some(host));
                    if self.clients[host][at].claims.is_empty() {
                        break;
                    }
                    self.release(host, at);
                }
                self.abandon((host, at), key);
            }
        }
        self.wait(30_000);
    }

    /// What is waited for in vain costs little.
    fn little_is_said(&mut self) {
        let wants = self.clients.iter().flatten().map(|client| client.wants.len()).sum::<usize>();
        let (notes, fetches) = (self.cluster.notes, self.cluster.fetches);
        self.wait(64_000);
        let (notes, fetches) = (self.cluster.notes - notes, self.cluster.fetches - fetches);
        // Each host is asked every 6.4 s and answers; or every 1.8 s, and what it has finds no room.
        let most = (wants * self.clients.len()) as u64;
        assert!(notes <= most * 4 * 40 && fetches <= most * 40, "{notes} notes for {wants} wants");
    }

    /// When all is well again, what is there is had; when all who put are gone, nobody waits; and
    /// when all are gone, nothing is left.
    pub(crate) fn finish(&mut self) {
        self.mend();
        self.wait(200_000);
        self.all_is_read();
        self.what_nobody_wants_is_had();
        self.all_is_read();
        self.little_is_said();
        self.holds();
        self.nobody_waits_for_what_is_there();
        for stage in [0, 1] {
            for host in 0..self.clients.len() {
                let of_stage = |client: &HostClient| client.stage == stage;
                while let Some(at) = self.clients[host].iter().position(of_stage) {
                    let HostClient { id, claims, .. } = self.clients[host].remove(at);
                    self.given_back(host, claims);
                    self.tell(host, id, PayloadHook::Left);
                }
                self.wait(10_000);
            }
            self.nobody_waits_for_what_nobody_puts();
        }
        self.nothing_is_left();
    }

    /// A want that a host had no room for is one that came after the stage had left.
    fn nobody_waits_for_what_nobody_puts(&self) {
        let PayloadConfig { host_payloads_max, hosts_max, .. } = self.config;
        if host_payloads_max < PLACES || (hosts_max as usize) < self.clients.len() {
            return;
        }
        for (host, clients) in self.clients.iter().enumerate() {
            for client in clients {
                let waits = client.wants.keys().find(|key| {
                    let is_copy = |put: &HostPut| put.key == **key && put.out < put.receivers;
                    !self.puts.values().any(is_copy)
                });
                assert!(waits.is_none(), "host {host} waits for {waits:?}, which nobody puts");
            }
        }
    }

    fn nothing_is_left(&mut self) {
        for host in 0..self.clients.len() {
            for deployment in ["0", "1"] {
                let last = PayloadClient(self.fresh() as u32);
                let joined =
                    PayloadHook::Joined { deployment: deployment.into(), stage: "9".into() };
                self.tell(host, last, joined);
                for request in 0..3 {
                    self.tell(
                        host,
                        last,
                        PayloadHook::CleanUp { stream: stream(request), is_own: false },
                    );
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
            assert_eq!(self.cluster.rest(host), [0; 4], "host {host}");
        }
        assert!(self.cluster.misuses <= self.lies, "nobody else broke a rule");
    }
}
