//! Performs the effects of machines on planes.
