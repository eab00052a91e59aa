//! Instances that are known to have no host that serves them, though their servers may go on.
//!
//! A host is a process of its own beside most servers: it can end, or stand still, and begin anew while
//! the server computes. The router learns this from the connection that the instance registered by, and
//! from registrations that do not come.

use super::{InstanceId, RegisteredInstance, Registry};
use crate::core::message::Role;
use crate::core::time::Nanos;
use crate::fabric::LinkId;

/// Evidence that an instance has no host that serves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::core::router) enum HostLoss {
    /// The connection that it registered by has ended.
    LinkEnded,
    /// It has not registered within [`RouterConfig::expiry`](crate::core::router::RouterConfig::expiry).
    Silent,
}

impl RegisteredInstance {
    /// True if legs that fail here say nothing of their requests: what they needed is gone.
    fn lacks_host(&self) -> bool {
        self.lost || self.hostless.is_some()
    }

    /// True if nothing shows that its server goes on but what it answers.
    pub(in crate::core::router) fn is_doubted(&self) -> bool {
        self.lacks_host() && !self.replaced
    }
}

impl Registry {
    /// Returns the instances that registered by a link, which is down.
    pub(in crate::core::router) fn unlink(&mut self, link: LinkId) -> Vec<InstanceId> {
        let mut unlinked = Vec::new();
        for (instance_id, instance) in &mut self.instances {
            if instance.link.take_if(|own| *own == link).is_some() {
                unlinked.push(*instance_id);
            }
            instance.abandoned.unlink(link);
        }
        unlinked
    }

    /// True if an instance has left, or has no host.
    pub(in crate::core::router) fn lacks_host(&self, instance_id: InstanceId) -> bool {
        self.get(instance_id).is_none_or(RegisteredInstance::lacks_host)
    }

    /// The instances of a role that are there for the model, whether or not they take legs.
    fn serving<'a>(
        &'a self,
        now: Nanos,
        model: Option<&'a str>,
        role: Role,
    ) -> impl Iterator<Item = &'a RegisteredInstance> {
        let there = self.of_role(role).map(|(_, instance)| instance);
        there.filter(move |it| it.is_there(now) && it.serves(model))
    }

    /// Returns a role whose instances for the model have all lost their hosts, and the time until
    /// which the router waits for one of them.
    pub(in crate::core::router) fn hostless_role(
        &self,
        now: Nanos,
        model: Option<&str>,
        roles: &[Role],
    ) -> Option<(Role, Nanos)> {
        let until = |role| {
            let mut there = self.serving(now, model, role).peekable();
            there.peek()?;
            let until = |it: &RegisteredInstance| it.hostless.map(|_| it.expires);
            there.map(until).try_fold(Nanos::ZERO, |last, until| Some(last.max(until?)))
        };
        roles.iter().find_map(|role| Some((*role, until(*role)?)))
    }

    /// True if there are instances of a role for the model, and all of them have no host or have not
    /// answered a probe.
    pub(in crate::core::router) fn returns(
        &self,
        now: Nanos,
        model: Option<&str>,
        roles: &[Role],
    ) -> bool {
        roles.iter().any(|role| {
            let mut there = self.serving(now, model, *role).peekable();
            there.peek().is_some() && there.all(|it| it.hostless.is_some() || it.unproven)
        })
    }
}
