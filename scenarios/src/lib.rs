//! Scenario language, presets, trace workloads and the stand-in serving engine.
