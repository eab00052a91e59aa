//! `[[fault]]`.

use super::fault_schema::{FaultSchema, Opportunity};
use super::topology::or;
use super::workload::probability;
use crate::decide::{DecisionKey, below, chance, kind, mix, within};
use crate::doc::{FileName, TomlSection};
use crate::error::ScenarioError;
use crate::lists::{FaultKind, MessageName, TriggerEvent};
use crate::run::{
    FaultTrigger, InjectedFault, InstanceSettings, MemoryLayout, PartitionDirection, RaceOrder,
};
use crate::value::{Distribution, InstanceName, Probability, named_values};
use kvferry_engine::core::Nanos;
use kvferry_engine::core::ids::TP_MAX;
use kvferry_engine::core::message::Role;
use kvferry_engine::text::nearest;

named_values! {
    PartitionDirection: "symmetric" = PartitionDirection::Symmetric, "one-way" = PartitionDirection::OneWay, "node" = PartitionDirection::Node;
    RaceOrder: "early" = RaceOrder::Early, "late" = RaceOrder::Late, "either" = RaceOrder::Either;
}

/// Most tables that `every` and `times` can make of one.
const REPEATS_MAX: u32 = 10_000;

/// A `[[fault]]` table as written.
#[derive(Debug)]
pub(super) struct FaultSpec {
    pub(super) kind: FaultKind,
    pub(super) trigger: Option<TriggerSpec>,
    pub(super) samples: Distribution<u32>,
    enabled: Distribution<Probability>,
    /// Names its decisions.
    key: u64,
    target: Option<Distribution<InstanceName>>,
    from: Option<Distribution<InstanceName>>,
    to: Option<Distribution<InstanceName>>,
    message: Option<MessageName>,
    lasts: Option<Distribution<Nanos>>,
    delay: Option<Distribution<Nanos>>,
    factor: Option<Distribution<u32>>,
    rank: Option<Distribution<u16>>,
    direction: Distribution<PartitionDirection>,
    first: Distribution<RaceOrder>,
    times: Option<Distribution<u32>>,
    every: Option<Distribution<Nanos>>,
    tp: Option<Distribution<u16>>,
    blocks: Option<Distribution<u32>>,
    block_tokens: Option<Distribution<u32>>,
    layout: Option<Distribution<MemoryLayout>>,
    pub(super) line: u32,
}

/// When it fires, as written.
#[derive(Debug)]
pub(super) enum TriggerSpec {
    At(Distribution<Nanos>),
    On(EventTriggerSpec),
    Chance(Distribution<Probability>),
}

#[derive(Debug)]
pub(super) struct EventTriggerSpec {
    /// One of them is drawn.
    events: Vec<TriggerEvent>,
    from: Option<Distribution<InstanceName>>,
    to: Option<Distribution<InstanceName>>,
    message: Option<MessageName>,
    nth: Distribution<u32>,
}

/// Finds the instance for an optional name of a part: `None` if it does not exist in this seed.
type InstanceResolver<'a> =
    dyn Fn(&Option<Distribution<InstanceName>>, &str) -> Option<Option<String>> + 'a;

/// The keys that some kind takes.
const KEYS: &[&str] = &[
    "target",
    "from",
    "to",
    "match",
    "lasts",
    "delay",
    "factor",
    "rank",
    "direction",
    "first",
    "samples",
    "tp",
    "blocks",
    "block_tokens",
    "layout",
];

impl FaultSpec {
    /// Reads a table whose decisions are named by `key`.
    pub(super) fn read(section: &TomlSection<'_>, key: u64) -> Result<FaultSpec, ScenarioError> {
        let names: Vec<&str> = FaultKind::ALL.iter().map(|kind| kind.name()).collect();
        let Some(field) = section.get("kind") else {
            return Err(section.error("a fault has no `kind`", "see `kvferry list faults`"));
        };
        let kind = field.entry(&names, FaultKind::from_name)?;
        let form = kind.schema();
        let message = section.section("match")?;
        let spec = FaultSpec {
            kind,
            trigger: trigger(section)?,
            samples: section
                .limited("samples", 1, 64)?
                .unwrap_or_else(|| Distribution::range(2, 4)),
            enabled: probability(section, "enabled")?
                .unwrap_or(Distribution::fixed(Probability(1_000_000))),
            key,
            target: section.draw("target")?,
            from: section.draw("from")?,
            to: section.draw("to")?,
            message: message_name(&message)?,
            lasts: section.draw("lasts")?,
            delay: section.draw("delay")?,
            factor: section.limited("factor", 1, 1_000_000)?,
            rank: section.limited("rank", 0, TP_MAX - 1)?,
            direction: section.draw_or("direction", PartitionDirection::Symmetric)?,
            first: section.draw_or("first", RaceOrder::Either)?,
            times: section.limited("times", 1, REPEATS_MAX)?,
            every: section.draw("every")?,
            tp: section.limited("tp", 1, TP_MAX)?,
            blocks: section.limited("blocks", 1, 1 << 28)?,
            block_tokens: section.limited("block_tokens", 1, 1 << 20)?,
            layout: section.draw("layout")?,
            line: field.line,
        };
        message.finish()?;
        section.finish()?;
        spec.check_keys(section, &form)?;
        spec.check_trigger(section, &form)?;
        Ok(spec)
    }

    fn check_keys(
        &self,
        section: &TomlSection<'_>,
        form: &FaultSchema,
    ) -> Result<(), ScenarioError> {
        let present: Vec<&str> = section.keys().collect();
        let unfit = present.iter().find(|key| KEYS.contains(key) && !form.keys.contains(key));
        if let Some(key) = unfit {
            let what = format!("`{key}` has no meaning for {}", self.kind);
            let remedy = match form.keys {
                [] => "remove it".into(),
                keys => format!("remove it; this kind takes {}", keys.join(", ")),
            };
            return Err(section.doc.file.error(section.line_of(key), what, remedy));
        }
        if let Some(key) = form.required.iter().find(|key| !present.contains(key)) {
            let what = format!("{} has no `{key}`", self.kind);
            return Err(section.doc.file.error(self.line, what, "name an instance"));
        }
        let cut = self.direction.literal() == Some(&PartitionDirection::Node);
        if self.kind == FaultKind::Partition && cut && self.target.is_none() {
            let what = "a partition of a node has no `target`";
            return Err(section.doc.file.error(self.line, what, "name an instance"));
        }
        Ok(())
    }

    fn check_trigger(
        &self,
        section: &TomlSection<'_>,
        form: &FaultSchema,
    ) -> Result<(), ScenarioError> {
        let error =
            |what: String, remedy: &str| Err(section.doc.file.error(self.line, what, remedy));
        let at = matches!(self.trigger, Some(TriggerSpec::At(_)));
        match &self.trigger {
            None if !self.kind.is_static() => {
                error(format!("{} never fires", self.kind), "add one of `on`, `at` and `chance`")
            }
            None if self.kind == FaultKind::Burst => {
                error("client.burst has no time".into(), "add `at`")
            }
            Some(TriggerSpec::Chance(_)) if form.opportunity == Opportunity::Run => error(
                format!("`chance` has no meaning for {}", self.kind),
                "use `enabled` for a probability per seed",
            ),
            Some(TriggerSpec::On(_)) if self.kind.is_static() => error(
                format!("`on` has no meaning for {}", self.kind),
                "remove it; it holds for the whole run",
            ),
            Some(TriggerSpec::At(_)) if self.kind.is_static() && self.kind != FaultKind::Burst => {
                error(
                    format!("`at` has no meaning for {}", self.kind),
                    "remove it; it holds for the whole run",
                )
            }
            _ if self.every.is_some() && !(at && self.times.is_some()) => error(
                "`every` needs `at` for the first time and `times` for how often".into(),
                "add them",
            ),
            _ if at && self.times.is_some() && self.every.is_none() => {
                error("`times` with `at` needs `every`".into(), "add the time between")
            }
            _ => Ok(()),
        }
    }

    /// Every instance that it names.
    fn names(&self) -> impl Iterator<Item = &Distribution<InstanceName>> {
        let on = match &self.trigger {
            Some(TriggerSpec::On(on)) => [on.from.as_ref(), on.to.as_ref()],
            _ => [None, None],
        };
        let own = [self.target.as_ref(), self.from.as_ref(), self.to.as_ref()];
        own.into_iter().chain(on).flatten()
    }

    /// Checks that it names no instance, where there is no topology.
    pub(super) fn check_nameless(&self, file: &FileName) -> Result<(), ScenarioError> {
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
    pub(super) fn check_names(
        &self,
        file: &FileName,
        known: &[String],
    ) -> Result<(), ScenarioError> {
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
    pub(super) fn part(&self, seed: u64, name: &str) -> DecisionKey {
        DecisionKey::new(seed, "fault").actor(self.key).part(name)
    }

    /// True if the seed has this fault at all.
    pub(super) fn is_on(&self, seed: u64) -> bool {
        let ppm = self.enabled.draw(&self.part(seed, "enabled.rate")).0;
        chance(self.part(seed, "enabled").get(), ppm)
    }

    /// The faults that the simulator injects; none if a named instance does not exist in this
    /// seed.
    pub(super) fn draw(&self, seed: u64, instances: &[InstanceSettings]) -> Vec<InjectedFault> {
        let key = |name: &str| self.part(seed, name);
        let named = |draw: &Option<Distribution<InstanceName>>, part: &str| match draw {
            None => Some(None),
            Some(draw) => {
                let name = draw.draw(&key(part));
                let found = resolve(&name.0, instances, &key(&name.0))?;
                // DP ranks share the links of their machine.
                let host = self.is_of_links().then(|| find(instances, &found)).flatten();
                Some(Some(host.map_or(found, |one| one.host.clone())))
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
        let fault = InjectedFault {
            key: self.key,
            line: self.line,
            kind: self.kind,
            rank: self.rank(seed, hit),
            target,
            from,
            to,
            message: self.message,
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
            faults.push(InjectedFault { key, trigger: FaultTrigger::At(at), ..faults[0].clone() });
        }
        faults
    }

    /// True if it concerns the links of machines.
    fn is_of_links(&self) -> bool {
        matches!(self.kind, FaultKind::Partition | FaultKind::SlowLink)
    }

    fn draw_trigger(&self, seed: u64, named: &InstanceResolver<'_>) -> Option<FaultTrigger> {
        match self.trigger.as_ref()? {
            TriggerSpec::At(at) => Some(FaultTrigger::At(at.draw(&self.part(seed, "at")))),
            TriggerSpec::Chance(rate) => {
                Some(FaultTrigger::Chance(rate.draw(&self.part(seed, "chance")).0))
            }
            TriggerSpec::On(on) => Some(FaultTrigger::On {
                event: on.event(&self.part(seed, "on.event")),
                from: named(&on.from, "on.from")?,
                to: named(&on.to, "on.to")?,
                message: on.message,
                nth: on.nth.draw(&self.part(seed, "on.nth")),
            }),
        }
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
    fn rank(&self, seed: u64, hit: Option<&InstanceSettings>) -> Option<u16> {
        let key = self.part(seed, "rank");
        let tp = hit.map_or(TP_MAX, |hit| hit.tp);
        match (&self.rank, self.kind) {
            (Some(rank), _) => Some(rank.draw(&key) % tp),
            (None, FaultKind::RankLag | FaultKind::RankCrash) => {
                Some(within(key.get(), 0, u64::from(tp) - 1) as u16)
            }
            _ => None,
        }
    }

    /// What an instance is after a restart.
    fn becomes(&self, seed: u64, hit: &InstanceSettings) -> InstanceSettings {
        let key = |name: &str| self.part(seed, "becomes").part(name);
        InstanceSettings {
            tp: or(&self.tp, hit.tp, &key("tp")),
            blocks: or(&self.blocks, hit.blocks, &key("blocks")),
            block_tokens: or(&self.block_tokens, hit.block_tokens, &key("block_tokens")),
            layout: or(&self.layout, hit.layout, &key("layout")),
            ..hit.clone()
        }
    }

    /// The TP sizes that the instance can have after its restart.
    pub(super) fn restart_tp(&self) -> Option<&Distribution<u16>> {
        self.tp.as_ref()
    }

    /// True if this fault concerns an instance, as far as `target` says.
    pub(super) fn hits(&self, seed: u64, instance: &InstanceSettings) -> bool {
        let Some(target) = &self.target else { return true };
        let name = target.draw(&self.part(seed, "target"));
        match &*name.0 {
            "any" => true,
            "prefill" => instance.role == Role::Prefill,
            "decode" => instance.role == Role::Decode,
            name => instance.name == name || instance.host == name,
        }
    }

    /// True if `target` is set.
    pub(super) fn has_target(&self) -> bool {
        self.target.is_some()
    }

    /// True if this fault shapes request `n`.
    pub(super) fn is_hit(&self, seed: u64, n: usize) -> bool {
        let Some(TriggerSpec::Chance(rate)) = &self.trigger else { return true };
        let rate = rate.draw(&self.part(seed, "chance")).0;
        chance(self.part(seed, "hit").nth(n as u64).get(), rate)
    }

    /// `lasts`, drawn once.
    pub(super) fn lasts(&self, seed: u64) -> Nanos {
        let key = self.part(seed, "lasts");
        let default = self.kind.schema().lasts.map_or(Nanos::MAX, |span| span.max);
        or(&self.lasts, default, &key)
    }

    pub(super) fn factor(&self, seed: u64) -> u32 {
        or(&self.factor, self.kind.schema().factor, &self.part(seed, "factor"))
    }
}

/// Words that stand for an instance drawn per seed.
const ROLES: [&str; 3] = ["prefill", "decode", "any"];
/// The router's name.
const ROUTER: &str = "router";

/// The instance, or its host, of this name.
fn find<'a>(instances: &'a [InstanceSettings], name: &str) -> Option<&'a InstanceSettings> {
    instances.iter().find(|instance| instance.name == name || instance.host == name)
}

/// The instance that a name stands for; the same word in one fault is always the same instance.
fn resolve(name: &str, instances: &[InstanceSettings], key: &DecisionKey) -> Option<String> {
    let role = match name {
        ROUTER => return Some(ROUTER.into()),
        "prefill" => Some(Role::Prefill),
        "decode" => Some(Role::Decode),
        "any" => None,
        name => return find(instances, name).map(|_| name.into()),
    };
    let fitting: Vec<&InstanceSettings> =
        instances.iter().filter(|one| role.is_none_or(|role| one.role == role)).collect();
    let last = fitting.len().checked_sub(1)?;
    Some(fitting[within(key.get(), 0, last as u64) as usize].name.clone())
}

/// The number that names a fault's decisions: its table without comments and order of keys.
pub(super) fn table_key(canonical: &str, twin: u64) -> u64 {
    mix(kind(canonical), twin)
}

fn trigger(section: &TomlSection<'_>) -> Result<Option<TriggerSpec>, ScenarioError> {
    let at = section.draw("at")?.map(TriggerSpec::At);
    let rate = probability(section, "chance")?.map(TriggerSpec::Chance);
    let on = section.section("on")?;
    let on = if on.is_there() { Some(TriggerSpec::On(EventTriggerSpec::read(&on)?)) } else { None };
    let mut found: Vec<TriggerSpec> = [at, rate, on].into_iter().flatten().collect();
    if found.len() > 1 {
        let what = "a fault has more than one of `on`, `at` and `chance`";
        return Err(section.error(what, "keep one, or write two faults"));
    }
    Ok(found.pop())
}

impl EventTriggerSpec {
    fn read(section: &TomlSection<'_>) -> Result<EventTriggerSpec, ScenarioError> {
        let names: Vec<&str> = TriggerEvent::ALL.iter().map(|event| event.name()).collect();
        let Some(field) = section.get("event") else {
            return Err(section.error("`on` has no `event`", "see `kvferry list events`"));
        };
        let events = field.choice(&names, TriggerEvent::from_name)?;
        let message = message_name(section)?;
        let frame = |event: &&TriggerEvent| {
            matches!(event, TriggerEvent::FrameSent | TriggerEvent::FrameDelivered)
        };
        if let (Some(_), Some(other)) = (message, events.iter().find(|event| !frame(event))) {
            let what = format!("`message` has no meaning for {other}");
            return Err(section.error(what, "remove it, or wait for frame.sent"));
        }
        let spec = EventTriggerSpec {
            events,
            from: section.draw("from")?,
            to: section.draw("to")?,
            message,
            nth: section.limited_or("nth", 1, (1, 1 << 30))?,
        };
        section.finish()?;
        Ok(spec)
    }

    fn event(&self, key: &DecisionKey) -> TriggerEvent {
        self.events[below(key.get(), self.events.len() as u64) as usize]
    }
}

fn message_name(section: &TomlSection<'_>) -> Result<Option<MessageName>, ScenarioError> {
    let names: Vec<&str> = MessageName::ALL.iter().map(|name| name.name()).collect();
    section.get("message").map(|field| field.entry(&names, MessageName::lookup)).transpose()
}
