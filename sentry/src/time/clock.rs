//! Clocks as the guest sees them.
