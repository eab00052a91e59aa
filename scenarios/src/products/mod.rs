//! Products of events: scenarios in which an event happens right before or after one input of a request, or two
//! events do, each at its own.
//!
//! The table is generated and not drawn: every event of [`ProductEvent::ALL`] at every place of the run that
//! a [`ProductWorld`] makes without events. Who runs the cells finds the places.
//!
//! ```
//! use kvferry_scenarios::products::{EventPlace, PlacedEvent, ProductEvent, ProductWorld};
//!
//! let place = EventPlace::before(17);
//! let event = PlacedEvent { event: ProductEvent::Abort, place };
//! let text = ProductWorld::ALL[0].scenario("a client goes away", &[event]);
//! let run = kvferry_scenarios::parse("cell.toml", &text, ".".as_ref(), None)?.draw(1)?;
//! assert_eq!(run.faults.len(), 1);
//! # Ok::<(), kvferry_scenarios::ScenarioError>(())
//! ```

mod events;
mod worlds;

pub use events::{EventPlace, PlacedEvent, ProductEvent};
pub use worlds::{Company, ProductWorld};
