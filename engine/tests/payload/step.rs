//! What the clients do.

/// One thing that one of the clients does. Keys are request and chunk; the last chunk stands for
/// none.
#[derive(Clone, Debug)]
pub(crate) enum PayloadStep {
    Reserve {
        client: usize,
        key: (u8, u8),
        bytes: u64,
        receivers: u32,
        wait: u64,
    },
    /// What was reserved first is put, perhaps as a chunk of its stream, or returned.
    Written {
        client: usize,
        put: bool,
        is_chunk: bool,
    },
    GiveUp {
        client: usize,
        key: (u8, u8),
        is_chunk: bool,
    },
    Drop {
        client: usize,
        key: (u8, u8),
    },
    Want {
        client: usize,
        key: (u8, u8),
    },
    Abandon {
        client: usize,
        key: (u8, u8),
    },
    Take {
        client: usize,
    },
    Release {
        client: usize,
    },
    End {
        client: usize,
        request: u8,
        fails: bool,
        is_own: bool,
    },
    CleanUp {
        client: usize,
        request: u8,
        is_own: bool,
    },
    /// The process dies, and another one takes its place.
    Replace {
        client: usize,
    },
    /// A client says what it may not.
    Lie {
        id: u64,
        what: u8,
    },
    Wait {
        ms: u64,
    },
}
