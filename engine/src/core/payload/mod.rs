//! Payloads that one stage of a pipeline puts and another gets by a key.
//!
//! ```
//! use kvferry_engine::core::payload::pool::{PAGE, PayloadPool};
//!
//! let mut pool = PayloadPool::new(64 * PAGE);
//! let chunk = pool.allocate(3305)?;
//! assert_eq!((chunk.offset(), chunk.bytes()), (0, 3305));
//! # Ok::<(), kvferry_engine::core::payload::pool::AllocateError>(())
//! ```

mod holes;
pub mod pool;
