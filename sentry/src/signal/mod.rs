//! Signals: actions, queues, choice of target, delivery, frames. Owns what a signal does; never who may send it across
//! namespaces (task) nor terminal generation (fs::pts).
