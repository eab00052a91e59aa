//! Which backend moves bytes between this plane and a peer, where there are both.

use crate::MoriBackend;
use crate::address::of_xgmi;
use kvferry_engine::core::dialect::moriio::descriptor::MoriEngineDesc;
use kvferry_engine::fabric::Address;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Names of peers that are remembered, so that each is logged once.
const NAMES_MAX: usize = 4_096;

/// What was chosen, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MoriPeerChoice {
    pub(crate) backend: MoriBackend,
    pub(crate) why: &'static str,
}

/// As MoRI decides whether xGMI can do it: by the ids of the nodes, which are those of the kernel's
/// boot or what `MORI_NODE_ID` says, and by the names of the hosts only where one has no id. Two
/// containers of a node have one id and two names.
fn is_same_node(ours: &MoriEngineDesc, theirs: &MoriEngineDesc) -> bool {
    match ours.node_id.is_empty() || theirs.node_id.is_empty() {
        true => ours.hostname == theirs.hostname,
        false => ours.node_id == theirs.node_id,
    }
}

impl MoriPeerChoice {
    /// What moves bytes to and from who has an address; `xgmi` is that of our xGMI. The peer comes
    /// to the same by ours, as it has to: it lets us in nowhere else.
    pub(crate) fn of(xgmi: &Address, peer: &Address) -> MoriPeerChoice {
        let rdma = |why| MoriPeerChoice { backend: MoriBackend::Rdma, why };
        let Some(theirs) = of_xgmi(&peer.0) else { return rdma("it has RDMA alone") };
        match (MoriEngineDesc::decode(&xgmi.0), MoriEngineDesc::decode(theirs)) {
            (Ok(ours), Ok(theirs)) if is_same_node(&ours, &theirs) => {
                MoriPeerChoice { backend: MoriBackend::Xgmi, why: "it is of this node" }
            }
            _ => rdma("it is of another node"),
        }
    }
}

/// What was chosen for whom, and whether it was said that it does not work, so that either is logged
/// once.
#[derive(Debug, Default)]
pub(crate) struct MoriChoiceLog(BTreeMap<Arc<str>, (MoriBackend, bool)>);

impl MoriChoiceLog {
    /// True if it was not said yet of this peer.
    pub(crate) fn is_news(&mut self, peer: Arc<str>, backend: MoriBackend) -> bool {
        if self.0.len() >= NAMES_MAX && !self.0.contains_key(&peer) {
            self.0.clear();
        }
        let is_news = self.0.get(&peer).is_none_or(|(said, _)| *said != backend);
        if is_news {
            self.0.insert(peer, (backend, false));
        }
        is_news
    }

    /// True if it was not said yet that what was chosen does not work.
    pub(crate) fn is_first_failure(&mut self, peer: &str) -> bool {
        self.0.get_mut(peer).is_some_and(|(_, failed)| !std::mem::replace(failed, true))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address::{MoriAcceptorInfo, MoriPlaneAddress, with_xgmi};
    use kvferry_engine::core::dialect::moriio::descriptor::DescLayout;
    use kvferry_fabric_common::PlaneIdentity;

    fn address(key: &str, node: &str, hostname: &str) -> Address {
        let desc = MoriEngineDesc {
            key: key.into(),
            node_id: node.into(),
            hostname: hostname.into(),
            host: "127.0.0.1".into(),
            port: 9,
            pid: 3,
        };
        let who = PlaneIdentity { key: "k".into(), incarnation: 7 };
        let acceptor = MoriAcceptorInfo { who, port: 4_711, layout: 15 };
        MoriPlaneAddress::encode(&desc.encode(DescLayout::V1_2_2), &acceptor).expect("an array")
    }

    #[test]
    fn a_node_is_known_by_its_id_and_by_its_name_only_without() {
        let chosen = |ours: [&str; 2], theirs: [&str; 2]| {
            let [rdma, xgmi] = ["r", "x"].map(|key| address(key, theirs[0], theirs[1]));
            let peer = with_xgmi(&rdma, &xgmi).expect("an address of both");
            MoriPeerChoice::of(&address("o", ours[0], ours[1]), &peer).backend
        };
        for (ours, theirs, expected) in [
            (["n", "pod-1"], ["n", "pod-2"], MoriBackend::Xgmi),
            (["n", "h"], ["m", "h"], MoriBackend::Rdma),
            (["", "h"], ["m", "h"], MoriBackend::Xgmi),
            (["n", "h"], ["", "h"], MoriBackend::Xgmi),
            (["", "h"], ["", "g"], MoriBackend::Rdma),
        ] {
            assert_eq!(chosen(ours, theirs), expected, "{ours:?} {theirs:?}");
        }
        let [ours, rdma] = ["o", "r"].map(|key| address(key, "n", "h"));
        let choice = MoriPeerChoice::of(&ours, &rdma);
        assert_eq!((choice.backend, choice.why), (MoriBackend::Rdma, "it has RDMA alone"));
    }

    #[test]
    fn a_choice_is_said_once_and_again_when_it_is_another() {
        let mut log = MoriChoiceLog::default();
        let mut say = |backend| log.is_news("p".into(), backend);
        let said = [MoriBackend::Xgmi, MoriBackend::Xgmi, MoriBackend::Rdma].map(&mut say);
        assert_eq!(said, [true, false, true]);
        assert_eq!([(); 2].map(|()| log.is_first_failure("p")), [true, false]);
        assert!(log.is_news("p".into(), MoriBackend::Xgmi) && log.is_first_failure("p"));
        for peer in 0..3 * NAMES_MAX {
            assert!(log.is_news(peer.to_string().into(), MoriBackend::Rdma));
        }
        assert!(log.0.len() <= NAMES_MAX);
    }
}
