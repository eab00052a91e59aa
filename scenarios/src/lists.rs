//! The closed lists of the language: fault kinds, trigger events, message names, invariants.

use kvferry_faults::closed_list;
pub use kvferry_faults::lists::{FaultKind, MessageName, TriggerEvent};

closed_list! {
    /// What must hold; checked by the simulator.
    InvariantId {
        NoForeignBytes "I1" "I1-no-foreign-bytes" "every block a decode uses has the bytes of its (request, layer, rank, position)"
        NoEarlyReuse "I2" "I2-no-early-reuse" "no operation touches a block whose owner changed after it was accepted"
        NoLeak "I3" "I3-no-leak" "at rest free + cached + quarantined = total, nothing quarantined, no transfer, session, timer or lease left"
        StableSource "I4" "I4-stable-source" "a source block is neither freed nor rewritten while a transfer that may be used reads it"
        OneOutcome "I5" "I5-one-outcome" "each request, operation and block list ends exactly once"
        NoSilentSuccess "I6" "I6-no-silent-success" "finished means that all ranks and layers are right; a slower path is reported and counted"
        RightRecipient "I7" "I7-right-recipient" "nothing changes a transfer of another request, peer, rank or incarnation; legs go to who serves their model, in one role at a time"
        Bounded "I8" "I8-bounded" "queues, tables, operations and retries stay within their declared limits"
        Credit "I9" "I9-credit" "what is in flight stays within the credits, in all and for each peer; Busy is never a failure"
        Legal "I10" "I10-legal" "only listed transitions; progress never goes back; acknowledgements are sets of ranks"
        Deterministic "I11" "I11-deterministic" "the same scenario and seed give the same trace"
        NoPanic "I12" "I12-no-panic" "remote input never panics; a core counts no violation by a peer that keeps to the protocol"
        NoWallClock "I13" "I13-no-wall-clock" "shifting wall clocks changes no effect"
        NoGrowth "I14" "I14-no-growth" "at rest every table is empty but those that are declared to remember"
        InOrder "I15" "I15-in-order" "messages are delivered once and in order, and only what was delivered is acknowledged"
        RealTries "I16" "I16-real-tries" "a flow fails on its operations only after all their tries; Busy is no try"
        Caused "I17" "I17-caused" "what fails has a cause that some fault of the run, or a setting, can have"
        BoundedWork "I18" "I18-bounded-work" "without a fault no operation is refused for want of room and no message is repeated; few deadlines of a machine are due for nothing"
        Fair "I19" "I19-fair" "until the first fault, flows from a rank to a peer that all have work get equal shares"
        PayloadsArrive "I20" "I20-payloads-arrive" "a payload arrives as it was put, and one that does not come has a cause"
        LegChoices "I21" "I21-leg-choices" "until the first fault no leg passes by an idle instance, nor among idle ones who was given more of its prompt"
        PrefixEstimates "I22" "I22-prefix-estimates" "what the router expects to hit was given to the instance in its present life, and until the first fault it hits"
        EveryRequestEnds "L1" "L1-every-request-ends" "every request ends within the bound after the last fault, and who waits for a payload in vain is told so"
        Heals "L2" "L2-heals" "after the faults new requests take the fast path again, and payloads arrive"
        NoLivelock "L3" "L3-no-livelock" "retries and reconnects stay within their limits while nothing progresses; where a \
                 fault of a message, a process or the router hit, as many tries again may be excused, at instances without a host"
        Isolation "L4" "L4-isolation" "a fault on one pair fails no request of another pair"
        ReclaimBound "L5" "L5-reclaim-bound" "blocks held for a dead peer return within the lease or fence bound"
        Forgets "L6" "L6-forgets" "who has served a request with every peer after the faults remembers no failure"
    }
}
