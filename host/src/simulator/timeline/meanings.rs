//! Explanations of the labels of events.

use kvferry_scenarios::{FaultKind, InvariantId, MessageName};

/// Labels other than messages, faults and invariants. `Hook` is a call of the serving engine, and
/// `Answer` is what its core answers. `Job` and `Report` pass between a core and the transfer actor
/// of a rank, `Data` between that actor and the data plane. `Control` goes to the control plane.
const MEANINGS: [(&str, &str); 81] = [
    ("Tick", "a deadline may be due"),
    ("Start", "the transfer actor of a rank starts"),
    ("Layers", "the engine computed some layers of a step"),
    ("Hook", "a client of the payload pool asks for something"),
    ("Hook Arrived", "the engine got a request with a leg of a transfer"),
    ("Hook Scheduled", "the prefill engine computes a part of prompts in this step"),
    ("Hook Finished", "the engine is done with the request"),
    ("Hook Preempted", "the engine takes the blocks of an unfinished request back"),
    ("Hook Allocated", "the decode engine allocated blocks for the KV to load"),
    ("Answer", "the client gets its answer"),
    ("Answer Allocate", "the decode engine is told to allocate blocks now"),
    ("Answer Loaded", "the KV is there: the decode engine may use it"),
    ("Answer LoadFailed", "the KV did not come; the blocks may be reused"),
    ("Answer Rejected", "the request cannot be served as a transfer"),
    ("Answer SourceFree", "the prefill engine may free the blocks of the prompt"),
    ("Answer PreemptionSafe", "the blocks of the preempted request may be reused"),
    ("Control Dial", "a control connection is opened"),
    ("Control HangUp", "a control connection is closed"),
    ("Control LinkUp", "a control connection is up"),
    ("Control LinkDown", "a control connection has ended"),
    ("Data Register", "the KV memory of a rank is registered with the data plane"),
    ("Data Registered", "the data plane registered the memory"),
    ("Data Connect", "the data plane connects to a rank of a peer"),
    ("Data Disconnect", "the data plane forgets a peer"),
    ("Data Open", "a session between two registered memories is opened"),
    ("Data Opened", "the session is open, or could not be opened"),
    ("Data Close", "a session is closed"),
    ("Data Submit", "an operation is posted: bytes are written or read"),
    ("Data Completed", "the data plane reports the end of an operation"),
    ("Data Digest", "digests of blocks are computed to verify them"),
    ("Data Digested", "the digests are there"),
    ("Data Quiesce", "the data plane is asked when no byte of a session can land any more"),
    ("Data Quiet", "no byte of the session can land any more"),
    ("Data Fence", "the access of a peer to the memory is revoked"),
    ("Data Fenced", "no byte of the peer can land any more"),
    ("Data PeerDown", "the data plane lost the peer"),
    ("Data Reset", "the data plane was rebuilt: all that it knew is void"),
    ("Refused Register", "the data plane refused to register memory"),
    ("Refused Connect", "the data plane refused to connect"),
    ("Refused Open", "the data plane refused to open a session"),
    ("Refused Submit", "the data plane refused an operation, mostly as it is busy"),
    ("Refused Digest", "the data plane refused to compute digests"),
    ("Job Peer", "the rank is to open sessions to a peer"),
    ("Job Fence", "the rank is to keep a peer out and forget it"),
    ("Job Source", "push: more of a prompt is computed and can be written"),
    ("Job Forget", "the rank is to forget a prompt that nobody needs any more"),
    ("Job Write", "push: the rank is to write a prompt into blocks of a peer"),
    ("Job Read", "pull: the rank is to read a prompt from blocks of a peer"),
    ("Job Digest", "the rank is to compute digests of blocks"),
    ("Job Stop", "the rank is to end a transfer and submit nothing more for it"),
    ("Report Ready", "the memory of the rank is registered: it can serve"),
    ("Report Unusable", "the rank cannot serve: its memory cannot be registered"),
    ("Report PeerReady", "all sessions to the peer are open"),
    ("Report PeerFailed", "the peer cannot be reached"),
    ("Report Fenced", "no byte of the peer lands here any more"),
    ("Report Flow", "the part of a transfer on this rank went on or ended"),
    ("Router Registered", "the instance sent its first registration to the router"),
    ("Router Silent", "the router does not answer the instance"),
    ("Request ClientRequest", "the router got the request of a client"),
    ("Gone", "the client went away"),
    ("Dispatch", "the router sends a leg of the request to an instance"),
    ("CancelLeg", "the router cancels a leg"),
    ("Leg FirstToken", "the decode produced the first token"),
    ("Leg Done", "the leg ended well; of a prefill: the prompt is computed"),
    ("Leg Prefilled", "the prefill's answer is what the decode needs"),
    ("Leg Failed", "the leg failed"),
    ("Probe", "the router asks an instance whether it answers"),
    ("Probed", "whether the instance answered"),
    ("AskLoad", "the router asks a server for its load"),
    ("Load", "the server told its load"),
    ("LegCauses", "a decode told the router why legs went without KV"),
    ("Drain", "no new requests are taken"),
    ("Release", "the router lets its instances register with another router"),
    ("Hosts", "the other hosts that put payloads"),
    ("Begins", "a stream of payloads begins"),
    ("Produced", "a payload was put"),
    ("Asked", "a receiver asked for a payload"),
    ("Got", "a receiver got a payload"),
    ("Ended", "a stream of payloads ended"),
    ("Misuse", "a client broke a rule"),
    ("Register", "the instance is registered without a message"),
];

/// Parts of payload cores, which contain prefill and decode cores and use them between hosts.
const PAYLOAD_PARTS: [(&str, &str); 5] = [
    ("PrefillPeer", "between the payload core and its prefill core: a peer"),
    ("DecodePeer", "between the payload core and its decode core: a peer"),
    ("Directory", "between a payload core and a core of its host: a peer"),
    ("Prefill", "between the payload core and its prefill core"),
    ("Decode", "between the payload core and its decode core"),
];

/// Explanation of a label, unless the label explains itself.
pub(crate) fn meaning(label: &str) -> Option<&'static str> {
    let first = |text: &str| text.split(' ').next().unwrap_or_default().to_owned();
    if let Some(message) = label.strip_prefix("sends ").or_else(|| label.strip_prefix("gets ")) {
        let name = first(message);
        return MessageName::ALL.iter().find(|it| it.name() == name).map(|it| it.about());
    }
    let fault = FaultKind::ALL.iter().find(|it| it.name() == label).map(|it| it.about());
    let invariant = InvariantId::ALL.iter().find(|it| it.name() == label).map(|it| it.about());
    let listed = |list: &[(&str, &'static str)], label: &str| {
        list.iter().find(|(known, _)| *known == label).map(|(_, meaning)| *meaning)
    };
    let part = || listed(&PAYLOAD_PARTS, &first(label));
    fault.or(invariant).or_else(|| listed(&MEANINGS, label)).or_else(part)
}
