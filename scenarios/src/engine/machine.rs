//! The engine core.

use super::config::{EngineConfig, EngineConfigError};
use super::io::{EngineEffect, EngineInput, PoolGauges};
use engine::core::ids::{LegId, RequestId};
use engine::core::machine::{Gauges, Machine, Outbox};
use engine::core::time::Nanos;

/// One engine core. A restarted engine is a new one.
#[derive(Debug)]
pub struct Engine {
    config: EngineConfig,
}

impl Engine {
    /// An engine without requests.
    ///
    /// # Errors
    /// Settings with which no request could run.
    pub fn new(config: EngineConfig) -> Result<Engine, EngineConfigError> {
        config.check()?;
        Ok(Engine { config })
    }

    /// Its settings.
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// How the blocks of a group's pool are used.
    pub fn pool(&self, group: usize) -> PoolGauges {
        PoolGauges { total: self.config.groups[group].blocks - 1, ..PoolGauges::default() }
    }

    /// The engine's own id of the request behind a leg, until the leg ended.
    pub fn request_of(&self, _leg: LegId) -> Option<&RequestId> {
        None
    }
}

impl Machine for Engine {
    type Input = EngineInput;
    type Effect = EngineEffect;

    fn handle(&mut self, _now: Nanos, _input: EngineInput, _out: &mut Outbox<EngineEffect>) {}

    fn deadline(&self) -> Option<Nanos> {
        None
    }

    fn gauges(&self) -> Gauges {
        Gauges::default()
    }
}
