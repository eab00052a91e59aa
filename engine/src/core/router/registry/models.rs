//! The models that instances serve.

use super::Registry;
use crate::core::router::io::NAMED_MODELS_MAX;
use crate::core::time::Nanos;
use std::collections::BTreeSet;
use std::sync::Arc;

impl Registry {
    /// The models that are served, if this one is by no instance that is there.
    pub(in crate::core::router) fn without_model(
        &self,
        now: Nanos,
        model: Option<&str>,
    ) -> Option<Arc<[Arc<str>]>> {
        let there = || self.instances.values().filter(|it| it.is_there(now));
        if there().next().is_none() || there().any(|it| it.serves(model)) {
            return None;
        }
        let served = there().filter_map(|it| it.models()).flat_map(|models| models.iter());
        let served: BTreeSet<&Arc<str>> = served.collect();
        Some(served.into_iter().take(NAMED_MODELS_MAX).cloned().collect())
    }
}
