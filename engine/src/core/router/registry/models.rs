//! The models that instances serve.

use super::{InstanceId, RegisteredInstance, Registry};
use crate::core::message::Role;
use crate::core::registration::ServedModels;
use crate::core::router::io::{Dialects, NAMED_MODELS_MAX, Unavailable};
use crate::core::time::Nanos;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Most models of both roles that are remembered as served before.
pub(in crate::core::router) const SERVED_MAX: usize = 1_024;

/// Models that instances of a role have served, whether or not one still does. Names beyond
/// [`SERVED_MAX`] are not remembered.
#[derive(Debug, Default)]
pub(super) struct ServedBefore(BTreeSet<(Role, Arc<str>)>);

impl ServedBefore {
    /// Remembers the models of an instance.
    fn note(&mut self, role: Role, models: &ServedModels) {
        for model in models.iter() {
            if self.0.len() >= SERVED_MAX {
                return;
            }
            self.0.insert((role, model.clone()));
        }
    }

    /// True if an instance of the role served the model.
    fn has(&self, role: Role, model: &str) -> bool {
        self.0.contains(&(role, model.into()))
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

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
        Some(named(there()))
    }

    /// Remembers the models that an instance serves.
    pub(in crate::core::router) fn note_models(&mut self, instance_id: InstanceId) {
        let Some(instance) = self.instances.get(&instance_id) else { return };
        if let Some(models) = instance.models() {
            self.served.note(instance.registration.role, models);
        }
    }

    /// The role of which there are instances and none serves the model or ever did, though one of the
    /// other role does, with the models that the former serve. An instance that served it may be
    /// restarting: requests wait for it.
    pub(in crate::core::router) fn without_role(
        &self,
        now: Nanos,
        model: Option<&str>,
    ) -> Option<(Role, Arc<[Arc<str>]>)> {
        let of = |role| self.of_role(role).map(|(_, it)| it).filter(move |it| it.is_there(now));
        let lacks = |role| of(role).next().is_some() && !of(role).any(|it| it.serves(model));
        let served = |role| model.is_some_and(|model| self.served.has(role, model));
        let mut roles = [Role::Prefill, Role::Decode].into_iter();
        let missing = roles.find(|role| lacks(*role) && !served(*role))?;
        Some((missing, named(of(missing))))
    }

    /// Returns the reason why no pair for the model takes requests.
    pub(in crate::core::router) fn unavailable(
        &self,
        now: Nanos,
        model: Option<&str>,
    ) -> Unavailable {
        let of = |role| {
            let of_role = self.of_role(role).map(|(_, it)| it);
            of_role.filter(move |it| it.is_there(now) && it.serves(model))
        };
        let [prefills, decodes] = [Role::Prefill, Role::Decode].map(|role| of(role).count());
        match (prefills, decodes) {
            (0, 0) => Unavailable::Nobody,
            (0, _) => Unavailable::NoRole(Role::Prefill),
            (_, 0) => Unavailable::NoRole(Role::Decode),
            _ => {
                let forms = |role| {
                    of(role).map(|it| {
                        let Dialects { native, moriio } = it.dialects();
                        (it.registration.mode as usize, native, moriio)
                    })
                };
                let prefills: BTreeSet<_> = forms(Role::Prefill).collect();
                let decodes: BTreeSet<_> = forms(Role::Decode).collect();
                let meets = |(mode, native, moriio), (other, its_native, its_moriio)| {
                    let [own, its] = [(native, moriio), (its_native, its_moriio)]
                        .map(|(native, moriio)| Dialects { native, moriio });
                    mode == other && own.meet(its)
                };
                let mut pairs = prefills.iter().flat_map(|p| decodes.iter().map(move |d| (*p, *d)));
                match pairs.any(|(prefill, decode)| meets(prefill, decode)) {
                    true => match self.hostless_role(now, model, &[Role::Prefill, Role::Decode]) {
                        Some((role, _)) => Unavailable::NoHost(role),
                        None => Unavailable::NotReady,
                    },
                    false => Unavailable::NoCommonMode,
                }
            }
        }
    }
}

/// The models that these instances serve, sorted, at most [`NAMED_MODELS_MAX`].
fn named<'a>(instances: impl Iterator<Item = &'a RegisteredInstance>) -> Arc<[Arc<str>]> {
    let served = instances.filter_map(|it| it.models()).flat_map(|models| models.iter());
    let served: BTreeSet<&Arc<str>> = served.collect();
    served.into_iter().take(NAMED_MODELS_MAX).cloned().collect()
}
