//! Closed lists of the language: fault kinds, trigger events, message names.

/// Makes a list of which every entry has a name, a short id or none, and a line about it.
#[macro_export]
macro_rules! closed_list {
    (
        $(#[$doc:meta])* $name:ident $(also $other:literal $of:ident)? {
            $($variant:ident $id:literal $text:literal $about:literal)*
        }
    ) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize,
            serde::Deserialize,
        )]
        pub enum $name {
            $(
                #[doc = concat!("`", $text, "`: ", $about, ".")]
                #[serde(rename = $text)]
                $variant,
            )*
        }

        impl $name {
            /// Every entry, in the order of the reference.
            pub const ALL: &'static [$name] = &[$($name::$variant),*];

            /// The name used in scenario files.
            pub const fn name(self) -> &'static str {
                match self { $($name::$variant => $text),* }
            }

            /// The short id; empty in lists without ids.
            pub const fn id(self) -> &'static str {
                match self { $($name::$variant => $id),* }
            }

            /// One line of explanation.
            pub const fn about(self) -> &'static str {
                match self { $($name::$variant => $about),* }
            }
        }

        impl $crate::doc::ClosedList for $name {
            fn named() -> Vec<(&'static str, $name)> {
                $name::ALL.iter().map(|entry| (entry.name(), *entry)).collect()
            }

            fn other() -> Option<(&'static str, $name)> {
                [$(($other, $name::$of))?].into_iter().next()
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

closed_list! {
    /// What a `[[fault]]` does.
    FaultKind {
        QpError "A1" "fabric.qp_error" "the queue pairs between two instances go to error: their operations fail with unknown landing"
        AckLost "A2" "fabric.ack_lost" "the bytes of an operation land whole, its completion is a failure"
        CompletionLost "A3" "fabric.completion_lost" "an accepted operation never completes"
        QueueFull "A5" "fabric.queue_full" "submits are answered Busy for a while"
        CompletionReorder "A10" "fabric.reorder" "a completion is held back and overtaken by later ones"
        NotifyOvertakes "A11" "fabric.notify_overtakes" "bytes land only after the completion and the frames that report them"
        Partial "A12" "fabric.partial" "the slices of an operation land one by one in random order, some time apart, then it fails or succeeds"
        LateLanding "A14" "fabric.late_landing" "an operation fails at once, its bytes land later, up to Quiet"
        SiblingFailure "A15" "fabric.sibling_failure" "one operation of a session fails while others of the same flow are in flight"
        SlowLink "A17" "fabric.slow_link" "bandwidth of one direction is divided by a factor"
        NoCopy "A18" "fabric.no_copy" "an operation is reported as done and moves no byte: what no protocol survives, to prove that a check looks at the bytes"
        RegisterFails "A19" "fabric.register_fails" "the memory of a rank cannot be registered, so that its instance moves nothing until it starts anew"
        PortDown "A20" "fabric.port_down" "the port of an instance or of one rank is down: the data plane has no backend until it is up, and what its peers knew of it is void then"
        Loss "B1" "wire.loss" "a control frame is lost"
        Duplicate "B2" "wire.duplicate" "a control frame is delivered again, perhaps much later"
        FrameReorder "B3" "wire.reorder" "a control frame is overtaken by later ones of its link"
        Delay "B4" "wire.delay" "a control frame and those behind it are late"
        Partition "B5" "wire.partition" "frames and operations between instances are cut, then heal"
        OneWayPermanent "B6" "wire.one_way_permanent" "frames in one direction are cut for good"
        HalfOpen "B7" "wire.half_open" "a link stays up on one side while its frames vanish"
        Damage "B9" "wire.damage" "a control frame arrives cut short, in two, or with bits flipped, so that it cannot be read"
        Foreign "B10" "wire.foreign" "before a control frame another arrives that does not belong there: garbage, another protocol, another version, or one recorded elsewhere"
        DoneOutOfOrder "B12" "wire.done_out_of_order" "the frame that reports completion comes before or long after the bytes"
        Crash "C1" "process.crash" "an instance loses its state and its memory and stays down"
        Restart "C2" "process.restart" "an instance crashes and starts again at the same address as a new incarnation"
        Pause "C3" "process.pause" "an instance makes no step while its memory can still be read and written"
        RankLag "C6" "process.rank_lag" "the worker of one TP rank is slower than the others"
        RankCrash "C6" "process.rank_crash" "one TP rank dies; its engine goes down with it and restarts"
        RestartOtherGeometry "C7" "process.restart_other_geometry" "an instance restarts with another TP size, block size, pool or layout"
        Drain "C8" "process.drain" "an instance tells the router that it takes no more legs, and starts anew after a while"
        RoleSwitch "C9" "process.role_switch" "an instance registers in the other role, ends the legs that it has and starts anew in that role, or is killed and comes back in it"
        ClockBack "D2" "clock.back" "an instance restarts after its clock stepped back: its new incarnation has a lower number than those before"
        ExpiryRace "D4" "clock.expiry_race" "a lease ends in the same instant as the last completion of its read"
        SmallPool "E1" "memory.small_pool" "a pool holds hardly more than the longest request"
        ImmediateReuse "E3" "memory.immediate_reuse" "the allocator hands out the block that was freed last"
        Preempt "E4" "memory.preempt" "the scheduler preempts a request while its KV is transferred"
        PrefixHitOneSide "E5" "memory.prefix_hit_one_side" "prompts share prefixes but only one side of the transfer caches them"
        StaleRegistration "F1" "router.stale_registration" "registrations of an instance stay at the router after it went down, or tell its former state"
        DispatchedTwice "F3" "router.dispatched_twice" "a leg is delivered to its instance twice"
        DecodeLegLost "F5" "router.decode_leg_lost" "a decode leg never reaches its instance"
        LegsReordered "F6" "router.legs_reordered" "one leg of a request comes late, so the other comes first"
        Siblings "F7" "router.siblings" "requests ask for several samples that share one transfer id"
        LegCut "F8" "router.leg_cut" "the connection of a leg breaks while an instance serves it; the router notices later"
        IdsDiffer "F9" "router.ids_differ" "engines rewrite request ids with a suffix of their own for every leg"
        RouterRestart "F10" "router.restart" "the router dies, and another one starts that knows nothing of before"
        Abort "G1" "client.abort" "a client goes away"
        BothAbort "G2" "client.both_abort" "both engines abort a request and their messages cross"
        Burst "G4" "client.burst" "requests arrive a factor faster for a while"
        DegeneratePrompts "G5" "client.degenerate_prompts" "prompts of 0, 1, block - 1, block, block + 1 and the most tokens"
        PromptsDiffer "G6" "client.prompts_differ" "decode engines render a prompt to other tokens than prefill engines, and to as many"
    }
}

closed_list! {
    /// What a fault can wait for with `on`. `from` is the instance where it happens, `to` its peer.
    TriggerEvent {
        OpPosted "" "op.posted" "the data plane accepted an operation; from its initiator to its peer"
        OpLanded "" "op.landed" "all bytes of an operation are in place"
        OpCompleted "" "op.completed" "an operation was reported complete, well or not"
        FrameSent "" "frame.sent" "a control frame was sent; `message` narrows it"
        FrameDelivered "" "frame.delivered" "a control frame arrived; `message` narrows it"
        TransferAnnounced "" "transfer.announced" "decode asked for a transfer (Announce or Pull sent)"
        TransferGranted "" "transfer.granted" "prefill granted a pull"
        TransferWriting "" "transfer.writing" "the first write of a transfer was posted"
        TransferReading "" "transfer.reading" "the first read of a transfer was posted"
        TransferDelivered "" "transfer.delivered" "prefill reported all ranks as delivered, or decode released its pull"
        TransferEnded "" "transfer.ended" "decode told its engine how a load ended"
        RequestArrived "" "request.arrived" "a client request reached the router"
        RequestScheduled "" "request.scheduled" "an engine scheduled the first chunk of a request"
        RequestPrefilled "" "request.prefilled" "prefill computed the last token of a prompt"
        RequestAllocated "" "request.allocated" "decode allocated blocks to load into"
        RequestFirstToken "" "request.first_token" "decode produced the first token of a sample"
        RequestPreempted "" "request.preempted" "an engine preempted a request"
        RequestFinished "" "request.finished" "a client got its answer"
        LegDispatched "" "leg.dispatched" "the router sent a leg; to the instance that serves it"
        LegEnded "" "leg.ended" "an instance ended a leg"
        InstanceRegistered "" "instance.registered" "the router took a registration"
        InstanceStarted "" "instance.started" "an instance started or restarted"
        PeerConnected "" "peer.connected" "two instances agreed on a hello"
        StepStarted "" "step.started" "an engine started a step"
        BlockFreed "" "block.freed" "an engine gave blocks back to its pool"
        InputDue "" "input.due" "a router, core, transfer actor or engine is about to handle a message, a leg, a completion or a hook; no deadline, registration, acknowledgement or sign of life counts"
        InputHandled "" "input.handled" "it has handled it"
    }
}

impl TriggerEvent {
    /// True if it is about one input of a machine or an engine.
    pub const fn is_input(self) -> bool {
        matches!(self, TriggerEvent::InputDue | TriggerEvent::InputHandled)
    }
}

closed_list! {
    /// A control message, for `match = { message = "..." }`.
    MessageName also "BlocksReady" Announce {
        Ask "" "Ask" "decode to prefill, push: this prompt is wanted"
        Begun "" "Begun" "prefill to decode: the prompt is being computed, get blocks"
        Announce "" "Announce" "decode to prefill, push: write into these blocks (also spelled BlocksReady)"
        Pull "" "Pull" "decode to prefill, pull: hold the blocks and tell me"
        Grant "" "Grant" "prefill to decode, pull: the blocks and the lease"
        Renew "" "Renew" "decode to prefill, pull: still reading"
        Renewed "" "Renewed" "prefill to decode, pull: the lease runs anew"
        Delivered "" "Delivered" "prefill to decode, push: ranks that have written everything"
        Release "" "Release" "decode to prefill: ranks that need the source no more"
        Cancel "" "Cancel" "decode to prefill: stop writing"
        Ended "" "Ended" "prefill to decode: the attempt ended without success"
        Payload "" "Payload" "between payload cores: a note"
        Hello "" "Hello" "first frame of who dialled"
        Welcome "" "Welcome" "answer to a hello that fits"
        Refuse "" "Refuse" "answer to a hello that does not fit"
        Ack "" "Ack" "acknowledges control messages"
        Probe "" "Probe" "asks a silent peer for a sign of life"
        Bye "" "Bye" "a peer ends the connection"
        Register "" "Register" "an instance tells the router that it lives"
        Abandon "" "Abandon" "the router tells a prefill that nobody fetches a transfer any more"
    }
}
