//! What can happen to a request, and where.

use kvferry_engine::core::Nanos;
use kvferry_engine::core::message::{Mode, Role};
use kvferry_faults::closed_list;

closed_list! {
    /// What happens in a cell.
    ProductEvent {
        Abort "" "abort" "the client that came last goes away"
        CutPrefill "" "cut-prefill" "the connection of the leg that the prefill got last breaks, and the router notices later"
        CutDecode "" "cut-decode" "the connection of the leg that the decode got last breaks, and the router notices later"
        PreemptPrefill "" "preempt-prefill" "the prefill preempts what it computes"
        PreemptDecode "" "preempt-decode" "the decode preempts what it computes"
        Announce "" "announce" "another client asks for the same prompt, so that a receiver announces itself there"
        RestartPrefill "" "restart-prefill" "the prefill dies and starts anew"
        RestartDecode "" "restart-decode" "the decode dies and starts anew"
        QueueFull "" "queue-full" "the plane that moves the bytes is full for a while"
        LoseToDecode "" "lose-to-decode" "the next frame from the prefill to the decode is lost"
        LoseToPrefill "" "lose-to-prefill" "the next frame from the decode to the prefill is lost"
        LateToDecode "" "late-to-decode" "the next frame from the prefill to the decode is late, and others overtake it"
        LateToPrefill "" "late-to-prefill" "the next frame from the decode to the prefill is late, and others overtake it"
        PortPrefill "" "port-down-prefill" "the port of the prefill is down for a while"
        PortDecode "" "port-down-decode" "the port of the decode is down for a while"
        ExpiryPrefill "" "expiry-prefill" "the prefill stands still until every deadline is over"
        ExpiryDecode "" "expiry-decode" "the decode stands still until every deadline is over"
        SwitchPrefill "" "switch-prefill" "the prefill changes its role"
        SwitchDecode "" "switch-decode" "the decode changes its role"
        RouterDies "" "router-dies" "the router dies, and another one starts"
    }
}

/// Where an event happens, and who serves the request there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventPlace {
    /// The how many-th input that is due, or was handled.
    pub nth: u32,
    /// After an input was handled; else before it is.
    pub is_after: bool,
    /// When the client of [`ProductEvent::Announce`] asks.
    pub at: Nanos,
    /// The input, for people.
    pub what: String,
    /// The role of the instance that has it; none for the router.
    pub role: Option<Role>,
    pub prefill: String,
    pub decode: String,
}

impl EventPlace {
    /// Before the `nth` input, of a request that the first instances serve.
    pub fn before(nth: u32) -> EventPlace {
        let [prefill, decode] = ["p0", "d0"].map(String::from);
        let (at, what) = (super::ProductWorld::START, String::new());
        EventPlace { nth, is_after: false, at, what, role: None, prefill, decode }
    }
}

impl ProductEvent {
    /// The role of the instance that it happens to; none if it is a client or the router.
    pub const fn role(self, mode: Mode) -> Option<Role> {
        use ProductEvent::*;
        Some(match self {
            Abort | Announce | RouterDies => return None,
            QueueFull => match mode {
                Mode::Push => Role::Prefill,
                Mode::Pull => Role::Decode,
            },
            CutPrefill | PreemptPrefill | RestartPrefill | LoseToDecode | LateToDecode
            | PortPrefill | ExpiryPrefill | SwitchPrefill => Role::Prefill,
            CutDecode | PreemptDecode | RestartDecode | LoseToPrefill | LateToPrefill
            | PortDecode | ExpiryDecode | SwitchDecode => Role::Decode,
        })
    }
}

/// An event at its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedEvent {
    pub event: ProductEvent,
    pub place: EventPlace,
}

impl PlacedEvent {
    /// True unless it happens to an instance that does nothing there: between two inputs of an instance
    /// it is all one where among the inputs of others something happens to it, but for when others
    /// notice.
    pub fn is_where_it_acts(&self, mode: Mode) -> bool {
        self.event.role(mode).is_none_or(|role| self.place.role == Some(role))
    }

    /// The table of its fault; empty for what is no fault.
    pub(super) fn table(&self, mode: Mode, decisions: usize) -> String {
        let EventPlace { nth, is_after, prefill, decode, .. } = &self.place;
        let when = if *is_after { "input.handled" } else { "input.due" };
        let target = |name: &String, rest: &str| format!("target = \"{name}\"\n{rest}");
        let frame = |from: &String, to: &String, rest: &str| {
            format!("from = \"{from}\"\nto = \"{to}\"\n{rest}")
        };
        let (kind, keys) = match self.event {
            // Without a fault there are no requests of the simulator's own.
            ProductEvent::Announce => return NEVER.into(),
            ProductEvent::Abort => ("client.abort", "delay = \"0us\"\n".into()),
            ProductEvent::CutPrefill => ("router.leg_cut", target(prefill, LATE)),
            ProductEvent::CutDecode => ("router.leg_cut", target(decode, LATE)),
            ProductEvent::RouterDies => ("router.restart", BRIEF.into()),
            ProductEvent::PreemptPrefill => ("memory.preempt", target(prefill, "")),
            ProductEvent::PreemptDecode => ("memory.preempt", target(decode, "")),
            ProductEvent::RestartPrefill => ("process.restart", target(prefill, BRIEF)),
            ProductEvent::RestartDecode => ("process.restart", target(decode, BRIEF)),
            ProductEvent::QueueFull => {
                let initiator = if mode == Mode::Push { prefill } else { decode };
                ("fabric.queue_full", format!("from = \"{initiator}\"\n{BRIEF}"))
            }
            ProductEvent::LoseToDecode => ("wire.loss", frame(prefill, decode, "")),
            ProductEvent::LoseToPrefill => ("wire.loss", frame(decode, prefill, "")),
            ProductEvent::LateToDecode => ("wire.reorder", frame(prefill, decode, LATE)),
            ProductEvent::LateToPrefill => ("wire.reorder", frame(decode, prefill, LATE)),
            ProductEvent::PortPrefill => ("fabric.port_down", target(prefill, BRIEF)),
            ProductEvent::PortDecode => ("fabric.port_down", target(decode, BRIEF)),
            ProductEvent::ExpiryPrefill => ("process.pause", target(prefill, LONG)),
            ProductEvent::ExpiryDecode => ("process.pause", target(decode, LONG)),
            ProductEvent::SwitchPrefill => ("process.role_switch", target(prefill, SWITCH)),
            ProductEvent::SwitchDecode => ("process.role_switch", target(decode, SWITCH)),
        };
        format!(
            "[[fault]]\nkind = \"{kind}\"\ndecisions = \"{decisions}\"\n\
             on = {{ event = \"{when}\", nth = {nth} }}\n{keys}"
        )
    }
}

/// A fault that never fires.
const NEVER: &str = "[[fault]]\nkind = \"client.abort\"\n\
    on = { event = \"input.due\", nth = 1000000000 }\n";

/// A while that is over before anyone notices.
const BRIEF: &str = "lasts = \"5ms\"\n";

/// As long as a request takes.
const LATE: &str = "delay = \"1ms\"\n";

/// Longer than leases and the waits of every machine.
const LONG: &str = "lasts = \"45s\"\n";

/// It registers in its other role first.
const SWITCH: &str = "first = \"early\"\nlasts = \"100ms\"\n";
