//! Futexes (futex(2)): wait queues keyed by the identity of a word. Owns the waiters; never the word.

/// Everybody who waits for a futex in this sandbox.
#[derive(Default)]
pub struct Futexes {}
