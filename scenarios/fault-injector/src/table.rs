//! `[[fault]]`.

use crate::decide::{self, DecisionKey, below, chance, mix, within};
use crate::doc::{FileName, FromKey, TomlField, TomlSection};
use crate::draw_log;
use crate::error::ScenarioError;
use crate::fault::{
    DrawnFault, FaultPlace, FaultTrigger, MemoryLayout, PartitionDirection, RaceOrder,
    RestartGeometry,
};
use crate::lists::{FaultKind, MessageName, TriggerEvent};
use crate::schema::Opportunity;
use crate::value::{Distribution, InstanceName, Probability, or};
use crate::{named_values, section};
use kvferry_engine::core::Nanos;
use kvferry_engine::core::ids::TP_MAX;
use kvferry_engine::core::message::Role;
use kvferry_engine::text::nearest;
use std::collections::BTreeMap;
use std::ops::Range;

named_values! {
    PartitionDirection: "symmetric" = PartitionDirection::Symmetric, "one-way" = PartitionDirection::OneWay, "node" = PartitionDirection::Node;
    MemoryLayout: "block" = MemoryLayout::Block, "layer" = MemoryLayout::Layer,
        "head-split" = MemoryLayout::HeadSplit, "token" = MemoryLayout::Token;
    RaceOrder: "early" = RaceOrder::Early, "late" = RaceOrder::Late, "either" = RaceOrder::Either;
}

/// Most tables that `every` and `times` can make of one.
const REPEATS_MAX: u32 = 10_000;

section! {
    /// A `[[fault]]` table as written.
    #[derive(Debug)]
    pub struct FaultSpec(section) checked by FaultSpec::check {
        pub kind: FaultKind, else ("a fault has no `kind`", "see `kvferry list faults`");
        /// When it fires: at one of these three.
        pub at: Option<Distribution<Nanos>>;
        pub chance: Option<Distribution<Probability>>;
        on: Option<EventTriggerSpec>;
        pub samples: Distribution<u32> = (2, 4), in (1, 64);
        decisions: Option<u64>;
        enabled: Distribution<Probability> = Probability(1_000_000);
        target: Option<Distribution<InstanceName>>;
        from: Option<Distribution<InstanceName>>;
        to: Option<Distribution<InstanceName>>;
        r#match: FrameMatch;
        lasts: Option<Distribution<Nanos>>;
        delay: Option<Distribution<Nanos>>;
        factor: Option<Distribution<u32>>, in (1, 1_000_000);
        rank: Option<Distribution<u16>>, in (0, TP_MAX - 1);
        direction: Distribution<PartitionDirection> = PartitionDirection::Symmetric;
        first: Distribution<RaceOrder> = RaceOrder::Either;
        times: Option<Distribution<u32>>, in (1, REPEATS_MAX);
        every: Option<Distribution<Nanos>>;
        tp: Option<Distribution<u16>>, in (1, TP_MAX);
        blocks: Option<Distribution<u32>>, in (1, 1 << 28);
        block_tokens: Option<Distribution<u32>>, in (1, 1 << 20);
        layout: Option<Distribution<MemoryLayout>>;
    } with {
        pub line: u32 = section.line_of("kind");
        /// Names its decisions: by what stands in its table, so that adding or removing another
        /// fault changes none of them, or as the table says.
        key: u64 = decisions.unwrap_or_else(|| decide::kind(&section.canonical()));
        /// The bytes of the file that hold its kind.
        pub kind_bytes: Range<usize> = section.bytes_of("kind");
    }
}

section! {
    #[derive(Debug)]
    struct EventTriggerSpec checked by EventTriggerSpec::check {
        /// One of them is drawn.
        event: TriggerChoice, else ("`on` has no `event`", "see `kvferry list events`");
        from: Option<Distribution<InstanceName>>;
        to: Option<Distribution<InstanceName>>;
        message: Option<MessageName>;
        nth: Distribution<u32> = 1, in (1, 1 << 30);
    }
}

section! {
    #[derive(Debug)]
    struct FrameMatch {
        message: Option<MessageName>;
    }
}

/// Events behind each other with `|`.
#[derive(Debug)]
struct TriggerChoice(Vec<TriggerEvent>);

impl FromKey for TriggerChoice {
    fn from_field(field: &TomlField<'_>) -> Result<TriggerChoice, ScenarioError> {
        let parts = field.text()?.split('|').map(str::trim);
        parts.map(|text| field.entry(text)).collect::<Result<_, _>>().map(TriggerChoice)
    }
}

/// Finds the instance for an optional name of a part: `None` if it does not exist in this seed.
type InstanceResolver<'a> =
    dyn Fn(&Option<Distribution<InstanceName>>, &str) -> Option<Option<String>> + 'a;

/// The keys that every kind takes.
const COMMON: [&str; 8] = ["kind", "enabled", "on", "at", "chance", "times", "every", "decisions"];

impl FaultSpec {
    fn check(&self, section: &TomlSection<'_>) -> Result<(), ScenarioError> {
        let triggers = [self.at.is_some(), self.chance.is_some(), self.on.is_some()];
        if triggers.iter().filter(|is_there| **is_there).count() > 1 {
            let what = "a fault has more than one of `on`, `at` and `chance`";
            return Err(section.error(what, "keep one, or write two faults"));
        }
        self.check_keys(section)?;
        match self.wrong_trigger() {
            Some((what, remedy)) => Err(section.error_at(self.line, what, remedy)),
            None => Ok(()),
        }
    }

    fn check_keys(&self, section: &TomlSection<'_>) -> Result<(), ScenarioError> {
        let form = self.kind.schema();
        let present: Vec<&str> = section.keys().collect();
        let unfit = present.iter().find(|key| !COMMON.contains(key) && !form.keys.contains(key));
        if let Some(key) = unfit {
            let what = format!("`{key}` has no meaning for {}", self.kind);
            let remedy = match form.keys {
                [] => "remove it".into(),
                keys => format!("remove it; this kind takes {}", keys.join(", ")),
            };
            return Err(section.error_at(section.line_of(key), what, remedy));
        }
        if let Some(key) = form.required.iter().find(|key| !present.contains(key)) {
            let what = format!("{} has no `{key}`", self.kind);
            return Err(section.error_at(self.line, what, "name an instance"));
        }
        let cut = self.direction.literal() == Some(&PartitionDirection::Node);
        if self.kind == FaultKind::Partition && cut && self.target.is_none() {
            let what = "a partition of a node has no `target`";
            return Err(section.error_at(self.line, what, "name an instance"));
        }
        Ok(())
    }

    /// What is wrong with when it fires, and what to do.
    fn wrong_trigger(&self) -> Option<(String, &'static str)> {
        let (kind, at, fixed) = (self.kind, self.at.is_some(), self.kind.is_static());
        let no_meaning = |key| format!("`{key}` has no meaning for {kind}");
        let whole_run = "remove it; it holds for the whole run";
        let fires = at || self.chance.is_some() || self.on.is_some();
        let (repeats, counts) = (self.every.is_some(), self.times.is_some());
        if !fires && !fixed {
            Some((format!("{kind} never fires"), "add one of `on`, `at` and `chance`"))
        } else if !fires && kind == FaultKind::Burst {
            Some(("client.burst has no time".into(), "add `at`"))
        } else if self.chance.is_some() && kind.schema().opportunity == Opportunity::Run {
            Some((no_meaning("chance"), "use `enabled` for a probability per seed"))
        } else if self.on.is_some() && fixed {
            Some((no_meaning("on"), whole_run))
        } else if at && fixed && kind != FaultKind::Burst {
            Some((no_meaning("at"), whole_run))
        } else if repeats && !(at && counts) {
            let what = "`every` needs `at` for the first time and `times` for how often";
            Some((what.into(), "add them"))
        } else if at && counts && !repeats {
            Some(("`times` with `at` needs `every`".into(), "add the time between"))
        } else {
            None
        }
    }

    /// Tells apart faults whose tables say the same.
    pub fn number_twins(faults: &mut [FaultSpec]) {
        let mut twins: BTreeMap<u64, u64> = BTreeMap::new();
        for fault in faults.iter_mut().filter(|fault| fault.decisions.is_none()) {
            let twin = twins.entry(fault.key).or_default();
            fault.key = mix(fault.key, *twin);
            *twin += 1;
        }
    }

    /// Every instance that it names.
    fn names(&self) -> impl Iterator<Item = &Distribution<InstanceName>> {
        let on = self.on.iter().flat_map(|on| [&on.from, &on.to]);
        [&self.target, &self.from, &self.to].into_iter().chain(on).flatten()
    }

    /// Checks that it names no instance, where there is no topology.
    pub fn check_nameless(&self, file: &FileName) -> Result<(), ScenarioError> {
        match self.names().next() {
            None => Ok(()),
            Some(draw) => {
                let what = format!("{} names an instance, and here is no topology", self.kind);
                let remedy = "remove `target`, `from` and `to`: the fault concerns this process";
                Err(file.error(draw.line, what, remedy))
            }
        }
    }

    /// Checks that every instance that is named can exist.
    pub fn check_names(&self, file: &FileName, known: &[String]) -> Result<(), ScenarioError> {
        for (draw, name) in self.names().flat_map(|draw| draw.ends().map(move |name| (draw, name)))
        {
            let is_role = ROLES.contains(&&*name.0);
            let is_router = &*name.0 == ROUTER;
            // A DP rank is the name of its host, a dot and a number.
            let host = name.0.rsplit_once('.').map_or(&*name.0, |(host, _)| host);
            let exists = known.iter().any(|known| known == host || **known == *name.0);
            if !is_role && !is_router && !exists {
                let mut names: Vec<&str> = known.iter().map(String::as_str).collect();
                names.extend(ROLES);
                let what = format!("no instance is named `{}`", name.0);
                let remedy = match nearest(&name.0, &names) {
                    Some(near) => format!("did you mean \"{near}\"?"),
                    None => format!("use one of {}", names.join(", ")),
                };
                return Err(file.error(draw.line, what, remedy));
            }
            let process = self.kind.name().starts_with("process.");
            if is_router
                && process
                && self.target.as_ref().is_some_and(|own| std::ptr::eq(own, draw))
            {
                let what = format!("{} cannot happen to the router", self.kind);
                return Err(file.error(draw.line, what, "name an instance"));
            }
        }
        Ok(())
    }

    /// The key of a part of the fault.
    pub fn part(&self, seed: u64, name: &str) -> DecisionKey {
        DecisionKey::new(seed, "fault").actor(self.key).part(name)
    }

    /// True if the seed has this fault at all.
    pub fn is_on(&self, seed: u64) -> bool {
        let ppm = self.enabled.draw(&self.part(seed, "enabled.rate")).0;
        let is_on = chance(self.part(seed, "enabled").get(), ppm);
        draw_log::resolve(&self.enabled.bytes, if is_on { "1" } else { "0" });
        is_on
    }

    /// What `decisions` has to say for the decisions to stay the same whatever else is changed in
    /// the table; none if it says it.
    pub fn decisions_to_add(&self) -> Option<u64> {
        self.decisions.is_none().then_some(self.key)
    }

    /// The faults that the simulator injects; none if a named instance does not exist in this
    /// seed.
    pub fn draw<I: FaultPlace>(&self, seed: u64, instances: &[I]) -> Vec<DrawnFault<I>> {
        let key = |name: &str| self.part(seed, name);
        let named = |draw: &Option<Distribution<InstanceName>>, part: &str| match draw {
            None => Some(None),
            Some(draw) => {
                let name = draw.draw(&key(part));
                let found = resolve(&name.0, instances, &key(&name.0))?;
                draw_log::resolve(&draw.bytes, &found);
                // DP ranks share the links of their machine.
                let host = self.is_of_links().then(|| find(instances, &found)).flatten();
                Some(Some(host.map_or(found, |one| one.host().into())))
            }
        };
        let (Some(target), Some(from), Some(to)) =
            (named(&self.target, "target"), named(&self.from, "from"), named(&self.to, "to"))
        else {
            return Vec::new();
        };
        let Some(first) = self.draw_trigger(seed, &named) else { return Vec::new() };
        let form = self.kind.schema();
        let hit = target.as_ref().and_then(|name| find(instances, name));
        let becomes = match (self.kind, hit) {
            (FaultKind::RestartOtherGeometry, Some(hit)) => Some(Box::new(self.becomes(seed, hit))),
            _ => None,
        };
        let (times, every) = self.repeats(seed, &first);
        let fault = DrawnFault {
            key: self.key,
            line: self.line,
            kind: self.kind,
            rank: self.rank(seed, hit.map(FaultPlace::tp)),
            target,
            from,
            to,
            message: self.r#match.message,
            lasts: self.lasts.as_ref().map(|draw| draw.span(&key("lasts"))).or(form.lasts),
            delay: self.delay.as_ref().map(|draw| draw.span(&key("delay"))).or(form.delay),
            factor: or(&self.factor, form.factor, &key("factor")),
            times: if every.is_empty() { times } else { 1 },
            direction: self.direction.draw(&key("direction")),
            first: self.first.draw(&key("first")),
            becomes,
            trigger: first,
        };
        let mut faults = vec![fault];
        for (n, at) in every.into_iter().enumerate() {
            let key = mix(self.key, n as u64 + 1);
            faults.push(DrawnFault { key, trigger: FaultTrigger::At(at), ..faults[0].clone() });
        }
        faults
    }

    /// True if it concerns the links of machines.
    fn is_of_links(&self) -> bool {
        matches!(self.kind, FaultKind::Partition | FaultKind::SlowLink)
    }

    fn draw_trigger(&self, seed: u64, named: &InstanceResolver<'_>) -> Option<FaultTrigger> {
        if let Some(at) = &self.at {
            return Some(FaultTrigger::At(at.draw(&self.part(seed, "at"))));
        }
        if let Some(rate) = &self.chance {
            return Some(FaultTrigger::Chance(rate.draw(&self.part(seed, "chance")).0));
        }
        let on = self.on.as_ref()?;
        Some(FaultTrigger::On {
            event: on.event(&self.part(seed, "on.event")),
            from: named(&on.from, "on.from")?,
            to: named(&on.to, "on.to")?,
            message: on.message,
            nth: on.nth.draw(&self.part(seed, "on.nth")),
        })
    }

    /// How often it fires, and the times after the first if they are set.
    fn repeats(&self, seed: u64, first: &FaultTrigger) -> (u32, Vec<Nanos>) {
        let default = if matches!(first, FaultTrigger::Chance(_)) { u32::MAX } else { 1 };
        let times = or(&self.times, default, &self.part(seed, "times"));
        let (Some(every), FaultTrigger::At(first)) = (&self.every, first) else {
            return (times, Vec::new());
        };
        let mut at = *first;
        let later = (1..times).map(|n| {
            at = at + every.draw(&self.part(seed, "every").nth(n.into()));
            at
        });
        (times, later.collect())
    }

    /// The rank that is hit, if the kind hits one.
    fn rank(&self, seed: u64, tp: Option<u16>) -> Option<u16> {
        let key = self.part(seed, "rank");
        let tp = tp.unwrap_or(TP_MAX);
        match (&self.rank, self.kind) {
            (Some(rank), _) => Some(rank.draw(&key) % tp),
            (None, FaultKind::RankLag | FaultKind::RankCrash) => {
                Some(within(key.get(), 0, u64::from(tp) - 1) as u16)
            }
            _ => None,
        }
    }

    /// What an instance is after a restart.
    fn becomes<I: FaultPlace>(&self, seed: u64, hit: &I) -> I {
        let key = |name: &str| self.part(seed, "becomes").part(name);
        hit.restarted(RestartGeometry {
            tp: self.tp.as_ref().map(|draw| draw.draw(&key("tp"))),
            blocks: self.blocks.as_ref().map(|draw| draw.draw(&key("blocks"))),
            block_tokens: self.block_tokens.as_ref().map(|draw| draw.draw(&key("block_tokens"))),
            layout: self.layout.as_ref().map(|draw| draw.draw(&key("layout"))),
        })
    }

    /// The TP sizes that the instance can have after its restart.
    pub fn restart_tp(&self) -> Option<&Distribution<u16>> {
        self.tp.as_ref()
    }

    /// True if this fault concerns an instance, as far as `target` says.
    pub fn hits(&self, seed: u64, instance: &impl FaultPlace) -> bool {
        let Some(target) = &self.target else { return true };
        let name = target.draw(&self.part(seed, "target"));
        match &*name.0 {
            "any" => true,
            "prefill" => instance.role() == Role::Prefill,
            "decode" => instance.role() == Role::Decode,
            name => instance.name() == name || instance.host() == name,
        }
    }

    /// True if `target` is set.
    pub fn has_target(&self) -> bool {
        self.target.is_some()
    }

    /// True if this fault shapes request `n`.
    pub fn is_hit(&self, seed: u64, n: usize) -> bool {
        let Some(rate) = &self.chance else { return true };
        let rate = rate.draw(&self.part(seed, "chance")).0;
        chance(self.part(seed, "hit").nth(n as u64).get(), rate)
    }

    /// `lasts`, drawn once.
    pub fn lasts(&self, seed: u64) -> Nanos {
        let key = self.part(seed, "lasts");
        let default = self.kind.schema().lasts.map_or(Nanos::MAX, |span| span.max);
        or(&self.lasts, default, &key)
    }

    pub fn factor(&self, seed: u64) -> u32 {
        or(&self.factor, self.kind.schema().factor, &self.part(seed, "factor"))
    }
}

/// Words that stand for an instance drawn per seed.
const ROLES: [&str; 3] = ["prefill", "decode", "any"];
const ROUTER: &str = "router";

/// The instance, or its host, of this name.
fn find<'a, I: FaultPlace>(instances: &'a [I], name: &str) -> Option<&'a I> {
    instances.iter().find(|instance| instance.name() == name || instance.host() == name)
}

/// The instance that a name stands for; the same word in one fault is always the same instance.
fn resolve(name: &str, instances: &[impl FaultPlace], key: &DecisionKey) -> Option<String> {
    let role = match name {
        ROUTER => return Some(ROUTER.into()),
        "prefill" => Some(Role::Prefill),
        "decode" => Some(Role::Decode),
        "any" => None,
        name => return find(instances, name).map(|_| name.into()),
    };
    let fits = |one: &&_| role.is_none_or(|role| FaultPlace::role(*one) == role);
    let fitting: Vec<_> = instances.iter().filter(fits).collect();
    let last = fitting.len().checked_sub(1)?;
    Some(fitting[within(key.get(), 0, last as u64) as usize].name().into())
}

impl EventTriggerSpec {
    fn check(&self, section: &TomlSection<'_>) -> Result<(), ScenarioError> {
        let frame = |event: &&TriggerEvent| {
            matches!(event, TriggerEvent::FrameSent | TriggerEvent::FrameDelivered)
        };
        match self.event.0.iter().find(|event| !frame(event)) {
            Some(other) if self.message.is_some() => {
                let what = format!("`message` has no meaning for {other}");
                Err(section.error(what, "remove it, or wait for frame.sent"))
            }
            _ => Ok(()),
        }
    }

    fn event(&self, key: &DecisionKey) -> TriggerEvent {
        let events = &self.event.0;
        events[below(key.get(), events.len() as u64) as usize]
    }
}
