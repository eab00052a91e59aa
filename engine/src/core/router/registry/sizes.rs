//! How much the registry holds, for the gauges.

use super::{RegisteredInstance, Registry};

impl RegisteredInstance {
    /// What is kept of it while it is there, whether it has legs or not.
    fn remembered(&self) -> usize {
        let pairs =
            [self.paired.len(), self.failing.len(), self.misfits.len(), self.troubles.len()];
        let told = self.registration.troubles.len() + self.abandoned.len();
        pairs.iter().sum::<usize>() + told + self.prefixes.len()
    }
}

impl Registry {
    /// Legs in flight, as the instances count them.
    pub(in crate::core::router) fn legs(&self) -> usize {
        self.instances.values().map(|instance| instance.legs.len()).sum()
    }

    /// Names of instances, also of those that left, and what is kept of each. Takes time in
    /// proportion to the number of instances.
    pub(in crate::core::router) fn remembered(&self) -> usize {
        let kept = self.instances.values().map(RegisteredInstance::remembered);
        self.known.len() + self.left.len() + kept.sum::<usize>()
    }
}
