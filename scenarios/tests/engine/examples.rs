//! Examples of what the engine tells the cores.
