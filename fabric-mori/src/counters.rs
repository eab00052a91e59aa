//! What planes count.

/// What a plane did so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MoriCounters {
    /// Operations that succeeded.
    pub operations: u64,
    /// Bytes that they moved.
    pub bytes: u64,
    /// Operations that were reported as failed.
    pub failed: u64,
    /// Backends that were made anew.
    pub rebuilds: u64,
    /// Operations that were posted anew after that, with other peers than the one it was for.
    pub retried: u64,
    /// Rebuilds that peers had to be told of.
    pub resets: u64,
    /// 1 while there is no backend because MoRI cannot be started, 0 otherwise.
    pub without: u64,
    /// How often queue pairs of peers have ended in this backend, which keeps them.
    pub dead_pairs: u64,
}
