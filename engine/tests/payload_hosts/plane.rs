//! The data planes of the hosts.

use crate::cluster::{Cluster, ClusterInput, HostPart, PAGE};
use kvferry_engine::core::command::DataCommand;
use kvferry_engine::core::instance::InstanceInput;
use kvferry_engine::core::layout::Slices;
use kvferry_engine::fabric::*;
use std::collections::BTreeMap;

/// A read of the decode's plane.
#[derive(Debug)]
pub(crate) struct FlyingRead {
    session: SessionId,
    slices: Slices,
    has_moved: bool,
    has_completed: bool,
}

/// What a plane knows of a session: the other host, in one life.
pub(crate) type OpenedSession = (usize, u32);

impl Cluster {
    fn event(&mut self, us: u64, host: usize, part: HostPart, event: DataEvent) {
        let input = InstanceInput::Data { rank: 0, event };
        self.post(us, host, part, ClusterInput::Instance(input));
    }

    pub(crate) fn data(&mut self, host: usize, part: HostPart, command: DataCommand) {
        match command {
            DataCommand::Register { region, .. } => {
                let here = vec![host as u8, self.hosts[host].life as u8];
                let result = Ok(RegionDesc(here.into()));
                self.event(10, host, part, DataEvent::Registered { region, result });
            }
            DataCommand::Connect { peer, address, .. } => {
                self.hosts[host].peers.insert(peer, address.0[0].into());
            }
            DataCommand::Disconnect { .. } => {}
            DataCommand::Digest(_) => panic!("nothing of payloads is verified"),
            DataCommand::Open { session, remote, .. } => {
                let there = (usize::from(remote.0[0]), u32::from(remote.0[1]));
                self.hosts[host].sessions.insert(session, there);
                let us = 50 + self.delay();
                self.event(us, host, part, DataEvent::Opened { session, result: Ok(()) });
            }
            DataCommand::Submit { op, session, slices, direction } => {
                assert_eq!((part, direction), (HostPart::Decode, Direction::Read));
                self.submit(host, op, session, slices);
            }
            DataCommand::Close { session } => {
                let its = self.hosts[host].reads.iter();
                let its = its.filter(|(_, read)| read.session == session && !read.has_completed);
                for op in its.map(|(op, _)| *op).collect::<Vec<_>>() {
                    self.complete(5, host, op, Some(FabricError::Closed));
                }
            }
            DataCommand::Quiesce { session, ticket } => {
                self.hosts[host].tickets.push((session, ticket));
                self.quiet(host);
            }
            DataCommand::Fence { peer } => {
                if part == HostPart::Decode {
                    self.hosts[host].fences.push(peer);
                    self.quiet(host);
                } else {
                    self.event(20, host, part, DataEvent::Fenced { peer });
                }
            }
        }
    }

    /// A read that takes its time, or fails, and whose pages may move after it was said to have
    /// failed.
    fn submit(&mut self, host: usize, op: OpId, session: SessionId, slices: Slices) {
        let (moves, fails) = (self.delay() + 20, self.chance(self.faults.failed));
        let is_next = self.reads_to_fail > 0;
        self.reads_to_fail -= u32::from(is_next);
        let read = FlyingRead { session, slices, has_moved: false, has_completed: false };
        self.hosts[host].reads.insert(op, read);
        self.post(moves, host, HostPart::Decode, ClusterInput::Move(op));
        if fails || is_next {
            let us = self.delay();
            self.complete(us, host, op, Some(FabricError::AckTimeout));
        }
    }

    fn complete(&mut self, us: u64, host: usize, op: OpId, cause: Option<FabricError>) {
        let Some(read) = self.hosts[host].reads.get_mut(&op) else { return };
        if std::mem::replace(&mut read.has_completed, true) {
            return;
        }
        let outcome = match cause {
            None => Completion::Done,
            Some(cause) => Completion::Failed { cause, landed: Landed::Unknown },
        };
        self.event(us, host, HostPart::Decode, DataEvent::Completed { op, outcome });
    }

    pub(crate) fn moves(&mut self, host: usize, op: OpId) {
        let Some(read) = self.hosts[host].reads.get_mut(&op) else { return };
        read.has_moved = true;
        let session = read.session;
        let (there, life) = self.hosts[host].sessions[&session];
        let other = &self.hosts[there];
        let reaches = other.is_up && other.life == life && !self.is_cut(host, there);
        if reaches {
            let slices = self.hosts[host].reads[&op].slices.clone();
            for index in 0..slices.count() {
                let [local, remote, len] =
                    [slices.local[index], slices.remote[index], slices.len[index]];
                assert_eq!([local % PAGE, remote % PAGE, len % PAGE], [0; 3]);
                self.moved += len;
                for page in 0..len / PAGE {
                    let from = self.hosts[there].memory[(remote / PAGE + page) as usize];
                    self.hosts[host].memory[(local / PAGE + page) as usize] = from;
                }
            }
        }
        self.complete(1, host, op, (!reaches).then_some(FabricError::PeerGone));
        self.quiet(host);
    }

    /// Says what is quiet, and who is fenced.
    fn quiet(&mut self, host: usize) {
        let of = &mut self.hosts[host];
        of.reads.retain(|_, read| !read.has_moved || !read.has_completed);
        let moving: Vec<SessionId> = of.reads.values().map(|read| read.session).collect();
        let sessions = &of.sessions;
        let is_busy = |peer: &PeerId, of: &BTreeMap<PeerId, usize>| {
            moving.iter().any(|session| sessions.get(session).map(|at| &at.0) == of.get(peer))
        };
        let fenced: Vec<PeerId> =
            of.fences.iter().filter(|peer| !is_busy(peer, &of.peers)).copied().collect();
        of.fences.retain(|peer| !fenced.contains(peer));
        let (waits, quiet): (Vec<_>, Vec<_>) =
            of.tickets.drain(..).partition(|(session, _)| moving.contains(session));
        of.tickets = waits;
        for peer in fenced {
            self.event(20, host, HostPart::Decode, DataEvent::Fenced { peer });
        }
        for (session, ticket) in quiet {
            self.event(5, host, HostPart::Decode, DataEvent::Quiet { session, ticket });
        }
    }
}
