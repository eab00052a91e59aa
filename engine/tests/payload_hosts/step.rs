//! What happens to hosts.

use crate::cluster::WayFaults;

/// One thing that happens. Clients are numbered within their host, keys are request and chunk; the
/// last chunk stands for none.
#[derive(Clone, Debug)]
pub(crate) enum HostStep {
    Put {
        host: usize,
        client: usize,
        key: (u8, u8),
        bytes: u64,
        receivers: u32,
        /// Whether it is a chunk of its stream.
        is_chunk: bool,
    },
    /// From a host that is named, or from any.
    Want {
        host: usize,
        client: usize,
        key: (u8, u8),
        from: Option<usize>,
    },
    Abandon {
        host: usize,
        client: usize,
        key: (u8, u8),
    },
    Take {
        host: usize,
        client: usize,
    },
    Release {
        host: usize,
        client: usize,
    },
    End {
        host: usize,
        client: usize,
        request: u8,
        fails: bool,
    },
    CleanUp {
        host: usize,
        client: usize,
        request: u8,
    },
    Replace {
        host: usize,
        client: usize,
    },
    /// All of a host is gone, and begins anew.
    Crash {
        host: usize,
        is_told: bool,
        down_ms: u64,
    },
    /// Two hosts do not hear each other for a while.
    Cut {
        hosts: (usize, usize),
        ms: u64,
    },
    /// The process of a host stands still, and what is sent to it waits.
    Stand {
        host: usize,
        ms: u64,
    },
    /// A host is told of one other host less, for a while.
    Unname {
        host: usize,
        other: usize,
        ms: u64,
    },
    Faults(WayFaults),
    /// The liar says what it may not, or somebody does whom nobody knows.
    Lie {
        host: usize,
        what: u8,
        number: u64,
        key: (u8, u8),
    },
    Wait {
        ms: u64,
    },
}

impl HostStep {
    /// True if not all is well any more.
    pub(crate) fn is_bad(&self) -> bool {
        let is_well = |faults: &WayFaults| faults.lost + faults.damaged + faults.failed == 0;
        match self {
            HostStep::Faults(faults) => !is_well(faults),
            HostStep::Crash { .. } | HostStep::Cut { .. } | HostStep::Unname { .. } => true,
            HostStep::Stand { ms, .. } => *ms > 100,
            _ => false,
        }
    }

    /// The host whose clients do it, or that hears it.
    pub(crate) fn of_clients(&mut self) -> Option<&mut usize> {
        match self {
            HostStep::Put { host, .. }
            | HostStep::Want { host, .. }
            | HostStep::Abandon { host, .. }
            | HostStep::Take { host, .. }
            | HostStep::Release { host, .. }
            | HostStep::End { host, .. }
            | HostStep::CleanUp { host, .. }
            | HostStep::Replace { host, .. }
            | HostStep::Lie { host, .. } => Some(host),
            _ => None,
        }
    }
}
