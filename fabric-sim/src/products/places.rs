//! Where events can happen in a run.

use crate::world::InputPlace;
use kvferry_engine::core::message::Role;
use kvferry_engine::core::time::Nanos;
use kvferry_scenarios::products::{EventPlace, ProductWorld};

/// Names of the instances of a [`ProductWorld`], in their order.
const NAMES: [&str; 4] = ["p0", "p1", "d0", "d1"];

/// The inputs of a run from the arrival of its first request on.
pub(super) struct InputPlaces {
    inputs: Vec<InputPlace>,
    lead: Nanos,
}

impl InputPlaces {
    /// `lead` is how long after its arrival a request announces itself; by what the inputs say if it
    /// is not given.
    pub(super) fn new(inputs: &[InputPlace], lead: Option<Nanos>) -> InputPlaces {
        let inputs: Vec<InputPlace> =
            inputs.iter().filter(|input| input.at >= ProductWorld::START).cloned().collect();
        let announces = |input: &&InputPlace| {
            [": Announce", ": Pull"].iter().any(|name| input.what.contains(name))
        };
        let announced = inputs.iter().find(announces).map(|input| input.at - ProductWorld::START);
        let lead = lead.or(announced).expect("a request announces itself");
        InputPlaces { inputs, lead }
    }

    /// From the arrival of a request to its announcement.
    pub(super) fn lead(&self) -> Nanos {
        self.lead
    }

    /// Before each input.
    pub(super) fn before(&self) -> Vec<EventPlace> {
        let place = |at: usize| self.place(at, self.inputs[at].due, false);
        (0..self.inputs.len()).map(place).collect()
    }

    /// After each input.
    pub(super) fn after(&self) -> Vec<EventPlace> {
        let place = |at: usize| Some(self.place(at, self.inputs[at].handled?, true));
        (0..self.inputs.len()).filter_map(place).collect()
    }

    fn place(&self, at: usize, nth: u32, is_after: bool) -> EventPlace {
        let input = &self.inputs[at];
        EventPlace {
            nth,
            is_after,
            at: input.at - self.lead,
            what: input.what.clone(),
            role: match NAMES.get(usize::from(input.instance)) {
                Some(name) if name.starts_with('p') => Some(Role::Prefill),
                Some(_) => Some(Role::Decode),
                None => None,
            },
            prefill: self.serving(at, 'p'),
            decode: self.serving(at, 'd'),
        }
    }

    /// The instance whose name begins so that had the last input up to this one, else the next one.
    fn serving(&self, at: usize, initial: char) -> String {
        let name = |input: &InputPlace| {
            NAMES.get(usize::from(input.instance)).filter(|name| name.starts_with(initial))
        };
        let (until, from) = self.inputs.split_at(at + 1);
        let name = until.iter().rev().find_map(name).or_else(|| from.iter().find_map(name));
        name.map_or_else(|| format!("{initial}0"), |name| name.to_string())
    }
}
