//! The half of the control network that a process owns.

use super::call::{ControlPlaneIx, NetCall, NetCalls, NetMessage};
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{
    ControlEvent, ControlPlane, Endpoint, LinkId, LinkKind, NextPoll, Refused,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::task::Waker;

const SCHEME: &str = "sim://";

/// A control plane whose calls are checked here and performed by [`super::ControlNetwork`].
///
/// It listens at `sim://<name>`, the same for all channels and all incarnations of a process.
#[derive(Debug)]
pub struct SimControlPlane {
    ix: ControlPlaneIx,
    name: Arc<str>,
    queue_max: u32,
    listening: BTreeSet<LinkKind>,
    links: BTreeMap<LinkId, SimLinkState>,
    calls: NetCalls,
    inbox: VecDeque<ControlEvent>,
    waker: Option<Waker>,
}

#[derive(Debug, Default)]
struct SimLinkState {
    up: bool,
    queued: u32,
}

impl SimControlPlane {
    pub(super) fn new(ix: ControlPlaneIx, name: Arc<str>, queue_max: u32) -> SimControlPlane {
        SimControlPlane {
            ix,
            name,
            queue_max,
            listening: BTreeSet::new(),
            links: BTreeMap::new(),
            calls: NetCalls::default(),
            inbox: VecDeque::new(),
            waker: None,
        }
    }

    /// Which plane this is.
    pub fn ix(&self) -> ControlPlaneIx {
        self.ix
    }

    /// Moves the calls made since the last time into `into`, whose memory is reused.
    pub fn take_calls(&mut self, into: &mut NetCalls) {
        into.list.clear();
        std::mem::swap(&mut self.calls, into);
    }

    /// True if there are calls to take.
    pub fn has_calls(&self) -> bool {
        !self.calls.is_empty()
    }

    /// Takes in what the network tells.
    pub fn deliver(&mut self, news: NetMessage) {
        match news {
            NetMessage::Sent { link, frames } => {
                if let Some(link) = self.links.get_mut(&link) {
                    link.queued = link.queued.saturating_sub(frames);
                }
            }
            NetMessage::Event(event) => {
                if self.note(&event) {
                    self.inbox.push_back(event);
                    if let Some(waker) = &self.waker {
                        waker.wake_by_ref();
                    }
                }
            }
        }
    }

    /// False for news of a link that was hung up.
    fn note(&mut self, event: &ControlEvent) -> bool {
        match event {
            ControlEvent::LinkUp { link, .. } if link.is_inbound() => {
                self.links.insert(*link, SimLinkState { up: true, queued: 0 });
                true
            }
            ControlEvent::LinkUp { link, .. } => match self.links.get_mut(link) {
                Some(state) => {
                    state.up = true;
                    true
                }
                None => false,
            },
            ControlEvent::Frame { link, .. } => self.links.contains_key(link),
            ControlEvent::LinkDown { link } => self.links.remove(link).is_some(),
            _ => true,
        }
    }
}

impl ControlPlane for SimControlPlane {
    fn listen(&mut self, channel: LinkKind) -> Result<Endpoint, Refused> {
        let endpoint = format!("{SCHEME}{}", self.name);
        if !self.listening.insert(channel) {
            return Err(Refused::Invalid(format!("{endpoint}: {channel:?} is taken").into()));
        }
        self.calls.list.push(NetCall::Listen { channel });
        Ok(Endpoint(endpoint.into()))
    }

    fn dial(&mut self, link: LinkId, to: &Endpoint, channel: LinkKind) -> Result<(), Refused> {
        let Some(name) = to.0.strip_prefix(SCHEME).filter(|name| !name.is_empty()) else {
            return Err(Refused::Invalid(format!("{to}: expected {SCHEME}<name>").into()));
        };
        if link.is_inbound() || self.links.contains_key(&link) {
            return Err(Refused::Invalid(format!("link id {link} in use").into()));
        }
        self.links.insert(link, SimLinkState::default());
        self.calls.list.push(NetCall::Dial { link, name: name.into(), channel });
        Ok(())
    }

    fn send(&mut self, link: LinkId, parts: &[&[u8]]) -> Result<(), Refused> {
        let Some(state) = self.links.get_mut(&link).filter(|state| state.up) else {
            return Err(Refused::Gone);
        };
        if state.queued >= self.queue_max {
            return Err(Refused::Busy);
        }
        state.queued += 1;
        let parts = parts.iter().map(|part| part.to_vec()).collect();
        self.calls.list.push(NetCall::Send { link, parts });
        Ok(())
    }

    fn hang_up(&mut self, link: LinkId) {
        if self.links.remove(&link).is_some() {
            self.inbox.retain(|event| link_of(event) != Some(link));
            self.calls.list.push(NetCall::HangUp { link });
        }
    }

    fn set_waker(&mut self, waker: Waker) {
        self.waker = Some(waker);
    }

    fn poll(&mut self, _now: Nanos, out: &mut Vec<ControlEvent>) -> NextPoll {
        out.extend(self.inbox.drain(..));
        NextPoll::External
    }
}

fn link_of(event: &ControlEvent) -> Option<LinkId> {
    match event {
        ControlEvent::LinkUp { link, .. }
        | ControlEvent::Frame { link, .. }
        | ControlEvent::LinkDown { link } => Some(*link),
        _ => None,
    }
}
