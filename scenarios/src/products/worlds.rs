//! The worlds in which events happen.

use super::{PlacedEvent, ProductEvent};
use kvferry_engine::core::Nanos;
use kvferry_engine::core::message::Mode;
use std::fmt;

/// What there is beside the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Company {
    Alone,
    /// Two samples of its prompt, which one prefill computes for two decodes.
    Samples,
    /// Another request, whose prompt begins like its own.
    Prefix,
    /// Two samples of its prompt, and requests for which there is no room before it lets blocks go: they
    /// take each block as soon as it is free. All instances have served before.
    Full,
}

/// A small fleet that serves one request, alone or with a sibling.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProductWorld {
    pub mode: Mode,
    pub company: Company,
}

const fn world(mode: Mode, company: Company) -> ProductWorld {
    ProductWorld { mode, company }
}

/// Arrival of the requests that open all sessions.
const WARM_UP: Nanos = Nanos::from_ms(20);

impl ProductWorld {
    pub const ALL: [ProductWorld; 8] = [
        world(Mode::Push, Company::Alone),
        world(Mode::Push, Company::Samples),
        world(Mode::Push, Company::Prefix),
        world(Mode::Push, Company::Full),
        world(Mode::Pull, Company::Alone),
        world(Mode::Pull, Company::Samples),
        world(Mode::Pull, Company::Prefix),
        world(Mode::Pull, Company::Full),
    ];

    /// When its first request arrives; its instances know each other by then.
    pub const START: Nanos = Nanos::from_ms(100);

    /// A name for commands and files.
    pub fn slug(self) -> String {
        self.to_string().replace(" = ", "").replace(", ", "-").replace(' ', "-")
    }

    /// Text of a scenario in which these events happen, the earlier one first.
    pub fn scenario(self, about: &str, events: &[PlacedEvent]) -> String {
        let mut singles = self.requests();
        let arrivals = events.iter().filter(|placed| placed.event == ProductEvent::Announce);
        singles.extend(arrivals.map(|placed| single(placed.place.at, false, 0)));
        let table = |(n, placed): (usize, &PlacedEvent)| placed.table(self.mode, n);
        let faults: String = events.iter().enumerate().map(table).collect();
        let (fleet, singles) = (self.fleet(), singles.concat());
        let rest = match self.company {
            Company::Full => format!("{REUSE}{}", slow_links()),
            _ => String::new(),
        };
        format!("about = {about:?}\n{fleet}single = [\n{singles}]\n{rest}{faults}")
    }

    /// The request, and those beside it.
    fn requests(self) -> Vec<String> {
        let has_siblings = matches!(self.company, Company::Samples | Company::Full);
        let request = single(Self::START, has_siblings, 0);
        match self.company {
            Company::Alone | Company::Samples => vec![request],
            Company::Prefix => vec![request, single(Self::START, false, 1)],
            Company::Full => {
                let before = (2..4).map(|number| single(WARM_UP, true, number));
                let beside = (4..7).map(|number| single(Self::START, false, number));
                before.chain([request]).chain(beside).collect()
            }
        }
    }

    /// All but what happens and who asks.
    fn fleet(self) -> String {
        // What of an instance is one process depends on the seed.
        let seed = 1 + self.company as u32;
        let (tp, blocks, prefix) = match self.company {
            Company::Alone => (2, 32, ALIKE),
            Company::Samples | Company::Prefix => (1, 32, ALIKE),
            Company::Full => (2, 8, ""),
        };
        let instance = |name| format!("{{ name = \"{name}\", tp = {tp}, blocks = {blocks} }}");
        let [p0, p1, d0, d1] = ["p0", "p1", "d0", "d1"].map(instance);
        let mode = match self.mode {
            Mode::Push => "push",
            Mode::Pull => "pull",
        };
        format!(
            "seed = {seed}\n{MODEL}[topology]\nprefill = [{p0}, {p1}]\ndecode = [{d0}, {d1}]\n\
             {LINK}{ENGINE}[workload]\nmode = \"{mode}\"\nrequests = 0\n{prefix}"
        )
    }
}

impl fmt::Display for ProductWorld {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.mode {
            Mode::Push => "push, ",
            Mode::Pull => "pull, ",
        })?;
        f.write_str(match self.company {
            Company::Alone => "alone",
            Company::Samples => "n = 2",
            Company::Prefix => "shared prefix",
            Company::Full => "full pools",
        })
    }
}

/// Line of a request; requests of one number have equal prompts.
fn single(at: Nanos, has_sibling: bool, decisions: u32) -> String {
    let samples = if has_sibling { ", samples = 2" } else { "" };
    let lengths = "prompt_tokens = 40, output_tokens = 4";
    let at = at.0;
    format!("    {{ at = \"{at}ns\", {lengths}{samples}, decisions = \"{decisions}\" }},\n")
}

const MODEL: &str = "[model]\nlayers = 2\nkv_heads = 2\nhead_dim = 4\nblock_tokens = 8\n";

/// A layer of a prompt takes as long to be moved as to be computed.
const LINK: &str =
    "link = { latency = \"5us\", bandwidth = \"4MB/s\", control_latency = \"40us\" }\n";

/// A prompt is computed in two steps.
const ENGINE: &str = "[engine]\nchunk = 24\nstep = \"600us\"\n";

/// All prompts begin alike.
const ALIKE: &str = "prefix = { chance = 1, tokens = 24, run = 8 }\n";

/// A block that was freed is the next one that is taken.
const REUSE: &str = "[[fault]]\nkind = \"memory.immediate_reuse\"\n";

/// Tables of slow links: the second of two decodes gets what a prefill moves later than the first one.
fn slow_links() -> String {
    let slow = |from| {
        format!(
            "[[fault]]\nkind = \"fabric.slow_link\"\nat = \"0s\"\nlasts = \"1s\"\nfactor = 4\n\
             from = \"{from}\"\nto = \"d1\"\n"
        )
    };
    ["p0", "p1"].map(slow).concat()
}
