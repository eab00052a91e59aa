//! From the machines of an instance and their planes to the actor that runs them.

use super::{
    COUNT_INPUTS, Clock, Driver, EffectHandler, InputQueue, InstanceAdapter, LocalPlanes,
    monotonic_clock,
};
use crate::core::config::CoreConfig;
use crate::core::instance::{Instance, InstanceInput};
use crate::core::layout::LayerLayout;
use crate::core::transfer::{TransferConfig, TransferSettings};
use crate::fabric::{ControlPlane, DataPlane, Memory};
use actix::{Addr, Context};

/// The actor of an instance whose planes are in this process.
pub type InstanceDriver<H> = Driver<InstanceAdapter<LocalPlanes, H>>;

/// An instance, on the way to its actor: a core and a transfer machine for each TP rank, each with
/// its plane. Those that are not added are in other processes.
pub struct InstanceBuilder {
    config: CoreConfig,
    instance: Instance,
    planes: LocalPlanes,
    first: InputQueue<Instance>,
    clock: Option<Clock>,
}

impl InstanceBuilder {
    /// The instance of this core, without machines. What they take is counted, see
    /// [`input_counts`](super::input_counts).
    pub fn new(config: CoreConfig) -> InstanceBuilder {
        let (mut instance, planes) = (Instance::default(), LocalPlanes::default());
        instance.set_observer(COUNT_INPUTS);
        InstanceBuilder {
            config,
            instance,
            planes,
            first: InputQueue::<Instance>::new(),
            clock: None,
        }
    }

    /// Adds the core, over a control plane that listens where the core is said to be.
    pub fn with_core(mut self, plane: Box<dyn ControlPlane>) -> Self {
        self.instance.add_core(self.config.clone());
        self.planes.set_control(plane);
        self
    }

    /// Adds a TP rank over its data plane: the memory that it is to register, and where its layers
    /// lie in that.
    pub fn with_rank(
        mut self,
        rank: u16,
        plane: Box<dyn DataPlane>,
        (memory, layers): (Vec<Memory>, Vec<LayerLayout>),
        settings: TransferSettings,
    ) -> Self {
        let reached = (plane.address(), plane.caps());
        let transfer = TransferConfig::new(&self.config, rank, reached, memory, layers);
        self.instance.add_rank(TransferConfig { settings, ..transfer });
        self.planes.add_rank(rank, plane);
        self.first.push_back(InstanceInput::Start(rank));
        self
    }

    /// Has the machines take these inputs first.
    pub fn with_inputs(mut self, inputs: impl IntoIterator<Item = InstanceInput>) -> Self {
        self.first.extend(inputs);
        self
    }

    /// Takes the time from another clock than the [`monotonic_clock`].
    pub fn with_clock(mut self, clock: Clock) -> Self {
        self.clock = Some(clock);
        self
    }

    /// Starts the actor in the current arbiter; `handler` gets its address.
    pub fn start<H: EffectHandler>(
        self,
        handler: impl FnOnce(Addr<InstanceDriver<H>>) -> H,
    ) -> Addr<InstanceDriver<H>> {
        let InstanceBuilder { instance, planes: fabric, first, clock, .. } = self;
        let adapter = |own| InstanceAdapter { fabric, outlet: handler(own) };
        Driver::start(adapter, instance, first, clock.unwrap_or_else(monotonic_clock))
    }

    /// Gives machines and planes to an actor that runs already, in place of those that it has. It
    /// keeps its clock.
    pub fn install<H: EffectHandler>(
        self,
        driver: &mut InstanceDriver<H>,
        context: &mut Context<InstanceDriver<H>>,
    ) {
        driver.reconfigure(context, |adapter, machine, inputs| {
            (adapter.fabric, *machine) = (self.planes, self.instance);
            inputs.extend(self.first);
        });
    }
}
