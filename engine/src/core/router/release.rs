//! A router that is about to end lets its instances go: it hangs up, so that they register with who
//! takes its place, and serves on with what they said last.

use super::dispatcher::RouterTimer;
use super::registry::InstanceId;
use super::{Router, RouterTurn};
use crate::core::command::ControlCommand;
use crate::fabric::{ControlEvent, LinkId};
use std::collections::BTreeSet;

impl Router {
    /// Hangs up on all instances. Those that are there are kept for
    /// [`super::RouterConfig::release_max`], whatever becomes of their registrations; legs tell if
    /// one is gone.
    pub(super) fn release(&mut self, turn: &mut RouterTurn<'_>) {
        if std::mem::replace(&mut self.released, true) {
            return;
        }
        let expires = turn.now + self.dispatcher.config.release_max;
        let mut links = BTreeSet::new();
        let mut kept = Vec::new();
        for (instance_id, instance) in self.dispatcher.registry.iter() {
            links.extend(instance.link);
            if instance.is_there(turn.now) && !planted!("let-go-instances-expire") {
                kept.push(instance_id);
            }
        }
        for instance_id in kept {
            self.dispatcher.registry.instance_mut(instance_id).expires = expires;
            self.dispatcher.timers.arm(RouterTimer::Expiry(instance_id), expires);
        }
        links.into_iter().for_each(|link| self.hang_up(link, turn));
    }

    /// After that nobody is listened to: who speaks, or comes, is sent to another router.
    pub(super) fn turn_away(&mut self, event: &ControlEvent, turn: &mut RouterTurn<'_>) {
        match event {
            ControlEvent::LinkUp { link, .. } | ControlEvent::Frame { link, .. } => {
                self.hang_up(*link, turn);
            }
            ControlEvent::LinkDown { link } => _ = self.forget(*link),
        }
    }

    fn hang_up(&mut self, link: LinkId, turn: &mut RouterTurn<'_>) {
        turn.push(ControlCommand::HangUp { link });
        // They did not hang up: they are served on.
        let _kept = self.forget(link);
    }

    /// Forgets a link that is down, or of which nothing more is to be heard; returns the instances
    /// that registered by it.
    pub(super) fn forget(&mut self, link: LinkId) -> Vec<InstanceId> {
        self.from.remove(&link);
        self.signed.remove(&link);
        self.dispatcher.registry.unlink(link)
    }
}
