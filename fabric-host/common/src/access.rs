//! Who may come in, and under which fence keys.

use kvferry_engine::fabric::PeerId;
use rustix::rand::{GetRandomFlags, getrandom};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Once};

/// Who a plane is, from its start or its last reset on.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PlaneIdentity {
    /// Name of its engine.
    pub key: Arc<str>,
    /// Drawn anew each time.
    pub incarnation: u64,
}

/// Draws an incarnation.
///
/// # Errors
/// The system gives no random bytes.
pub fn draw_incarnation() -> Result<u64, String> {
    let mut bytes = [0; 8];
    match getrandom(&mut bytes, GetRandomFlags::empty()) {
        Ok(8) => Ok(u64::from_le_bytes(bytes)),
        other => Err(format!("no random bytes: {other:?}")),
    }
}

/// The fence keys under which peers may come in, and those under which none may any more.
#[derive(Debug, Default)]
pub struct GuestList {
    invited: BTreeMap<PlaneIdentity, BTreeMap<PeerId, u64>>,
    fenced: BTreeSet<(PlaneIdentity, u64)>,
    /// Key 0 is anybody's until it is fenced.
    open_door: bool,
}

impl GuestList {
    /// A list of nobody. With `open_door` who is not on it is let in, too, under the key 0, which is
    /// logged once in a process.
    pub fn new(open_door: bool) -> GuestList {
        static ONCE: Once = Once::new();
        if open_door {
            ONCE.call_once(|| {
                tracing::info!(
                    "peers that speak MoRIIO may connect to the data plane without being invited; \
                     moriio_peers = false refuses them"
                );
            });
        }
        GuestList { open_door, ..GuestList::default() }
    }

    /// Lets a peer in under a key.
    pub fn invite(&mut self, who: &PlaneIdentity, peer: PeerId, fence_key: u64) {
        self.invited.entry(who.clone()).or_default().insert(peer, fence_key);
    }

    /// Forgets a peer. Its key, if it was invited under that and no other peer is; what was fenced
    /// stays so.
    pub fn disinvite(&mut self, who: &PlaneIdentity, peer: PeerId) -> Option<u64> {
        let keys = self.invited.get_mut(who)?;
        let fence_key = keys.remove(&peer)?;
        let still = keys.values().any(|other| *other == fence_key);
        if keys.is_empty() {
            self.invited.remove(who);
        }
        (!still).then_some(fence_key)
    }

    /// Forgets all peers. What was fenced stays so.
    pub fn disinvite_all(&mut self) {
        self.invited.clear();
    }

    /// Voids a key for good.
    pub fn fence(&mut self, who: &PlaneIdentity, fence_key: u64) {
        self.fenced.insert((who.clone(), fence_key));
    }

    /// True if a key was voided.
    pub fn is_fenced(&self, who: &PlaneIdentity, fence_key: u64) -> bool {
        self.fenced.contains(&(who.clone(), fence_key))
    }

    /// True if who comes with this key is let in, as far as it was not fenced.
    pub fn is_invited(&self, who: &PlaneIdentity, fence_key: u64) -> bool {
        let keys = self.invited.get(who);
        keys.is_some_and(|keys| keys.values().any(|key| *key == fence_key))
            || self.open_door && fence_key == 0
    }
}
