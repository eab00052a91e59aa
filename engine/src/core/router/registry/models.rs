//! The models that instances serve.

use super::{RegisteredInstance, Registry};
use crate::core::registration::ServedModels;
use crate::core::router::io::NAMED_MODELS_MAX;
use crate::core::time::Nanos;
use std::collections::BTreeSet;
use std::sync::Arc;

impl RegisteredInstance {
    /// The models that it serves, as far as known.
    pub(in crate::core::router) fn models(&self) -> Option<&Arc<ServedModels>> {
        self.registration.models.as_ref().or(self.listed_models.as_ref())
    }

    /// True if it serves the model, or may.
    pub(in crate::core::router) fn serves(&self, model: Option<&str>) -> bool {
        let (Some(model), Some(own)) = (model, self.models()) else { return true };
        own.has(model) || planted!("models-are-not-looked-at")
    }
}

impl Registry {
    /// True if an instance says that it serves the model.
    pub(in crate::core::router) fn lists(&self, model: &str) -> bool {
        self.instances.values().filter_map(|it| it.models()).any(|own| own.has(model))
    }

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
