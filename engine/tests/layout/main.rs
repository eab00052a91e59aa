//! KV layout: planning against an oracle that moves single elements, and what `check` refuses.

mod case;
mod check;
mod plan;
