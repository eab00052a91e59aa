//! A control plane that a test carries by hand, and secrets.

use kvferry_engine::core::Nanos;
use kvferry_engine::fabric::{
    ControlEvent, ControlPlane, Endpoint, LinkId, LinkKind, NextPoll, Refused,
};
use kvferry_trust::FleetProof;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Waker;

pub(crate) const OURS: &str = "0123456789abcdef0123456789abcdef";
pub(crate) const THEIRS: &str = "fedcba9876543210fedcba9876543210";

pub(crate) type Parts = Vec<Vec<u8>>;

/// Frames that one side has sent and will receive, and how often its link was admitted.
#[derive(Clone, Default)]
pub(crate) struct Cable(
    pub(crate) Arc<Mutex<(Vec<Parts>, Vec<ControlEvent>)>>,
    pub(crate) Arc<AtomicU32>,
);

impl ControlPlane for Cable {
    fn listen(&mut self, _: LinkKind) -> Result<Endpoint, Refused> {
        Ok(Endpoint::from("tcp://here:1"))
    }

    fn dial(&mut self, _: LinkId, _: &Endpoint, _: LinkKind) -> Result<(), Refused> {
        Ok(())
    }

    fn send(&mut self, _: LinkId, parts: &[&[u8]]) -> Result<(), Refused> {
        let parts = parts.iter().map(|part| part.to_vec()).collect();
        self.0.lock().unwrap().0.push(parts);
        Ok(())
    }

    fn admit(&mut self, _: LinkId) {
        self.1.fetch_add(1, Ordering::Relaxed);
    }

    fn hang_up(&mut self, _: LinkId) {}

    fn set_waker(&mut self, _: Waker) {}

    fn poll(&mut self, _: Nanos, out: &mut Vec<ControlEvent>) -> NextPoll {
        out.append(&mut self.0.lock().unwrap().1);
        NextPoll::External
    }
}

/// A side of a link, with its plane over a cable.
pub(crate) struct CableSide<P> {
    pub(crate) plane: P,
    pub(crate) cable: Cable,
    pub(crate) link: LinkId,
}

impl<P: ControlPlane> CableSide<P> {
    /// A side whose plane hears next that the link is up, which it has dialled unless it is inbound.
    pub(crate) fn over(link: LinkId, channel: LinkKind, plane: impl FnOnce(Cable) -> P) -> Self {
        let cable = Cable::default();
        let mut side = CableSide { plane: plane(cable.clone()), cable, link };
        if !link.is_inbound() {
            side.plane.dial(link, &Endpoint::from("tcp://there:1"), channel).unwrap();
        }
        side.put(ControlEvent::LinkUp { link, channel, from: None });
        side
    }

    pub(crate) fn say(&mut self, frame: &[u8]) {
        self.plane.send(self.link, &[frame]).unwrap();
    }

    /// What it has sent since.
    pub(crate) fn sent(&self) -> Vec<Parts> {
        std::mem::take(&mut self.cable.0.lock().unwrap().0)
    }

    /// What its plane hears next.
    pub(crate) fn put(&self, event: ControlEvent) {
        self.cable.0.lock().unwrap().1.push(event);
    }
}

/// Carries what both sides say until they say nothing more; what each is told.
pub(crate) fn carry<P: ControlPlane, T>(
    [near, far]: [&mut CableSide<P>; 2],
    hear: fn(&mut CableSide<P>, Parts) -> Vec<T>,
) -> [Vec<T>; 2] {
    let mut told = [Vec::new(), Vec::new()];
    loop {
        let (out, back) = (near.sent(), far.sent());
        if out.is_empty() && back.is_empty() {
            return told;
        }
        told[1].extend(out.into_iter().flat_map(|parts| hear(far, parts)));
        told[0].extend(back.into_iter().flat_map(|parts| hear(near, parts)));
    }
}

/// What a side has of a secret.
pub(crate) fn proof(secret: Option<&str>) -> FleetProof {
    static FILES: AtomicU32 = AtomicU32::new(0);
    let Some(secret) = secret else { return FleetProof::open(None).unwrap() };
    let number = FILES.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("kvferry-{}-wire-{number}", std::process::id()));
    fs::write(&path, secret).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o400)).unwrap();
    let proof = FleetProof::open(Some(&path)).unwrap();
    fs::remove_file(path).unwrap();
    proof
}
