//! Who is drawn as a line of their own.

use kvferry_sim::world::MachineId;

/// An actor, in the order in which they stand beside each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Lane {
    Clients,
    Router,
    /// The core of an instance and then its ranks, from 1; cores are rank 0 here.
    Instance(u16, u16),
    /// Payloads of a host.
    Payload(u16),
}

/// Index of the router where instances are named.
const ROUTER: u16 = u16::MAX;

impl Lane {
    pub(crate) fn of_machine(machine: MachineId) -> Lane {
        match machine {
            MachineId::Router => Lane::Router,
            MachineId::Prefill(instance) | MachineId::Decode(instance) => Lane::core(instance),
            MachineId::Transfer(instance, rank) => Lane::rank((instance, rank)),
            MachineId::Payload(host) => Lane::Payload(host),
        }
    }

    /// Of the core of an instance, or of the router.
    pub(crate) fn core(instance: u16) -> Lane {
        if instance == ROUTER { Lane::Router } else { Lane::Instance(instance, 0) }
    }

    pub(crate) fn rank((instance, rank): (u16, u16)) -> Lane {
        Lane::Instance(instance, rank.saturating_add(1))
    }

    /// The first rank of its instance for a rank, itself for others.
    pub(crate) fn first_rank(self) -> Lane {
        match self {
            Lane::Instance(instance, 1..) => Lane::Instance(instance, 1),
            other => other,
        }
    }

    /// The instance that it is part of.
    pub(crate) fn instance(self) -> Option<u16> {
        match self {
            Lane::Instance(instance, _) => Some(instance),
            Lane::Router => Some(ROUTER),
            Lane::Clients | Lane::Payload(_) => None,
        }
    }

    /// In words, with the name of its instance if that is known.
    pub(crate) fn name(self, instance: Option<&str>) -> String {
        match (self, instance) {
            (Lane::Clients, _) => "clients".into(),
            (Lane::Router, _) => "router".into(),
            (Lane::Payload(host), _) => format!("payloads {host}"),
            (Lane::Instance(_, 0), Some(name)) => name.into(),
            (Lane::Instance(_, rank), Some(name)) => format!("{name} rank {}", rank - 1),
            (Lane::Instance(index, 0), None) => format!("instance {index}"),
            (Lane::Instance(index, rank), None) => format!("instance {index} rank {}", rank - 1),
        }
    }
}
