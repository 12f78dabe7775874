//! Futexes (futex(2)): wait queues keyed by the identity of a word. Owns the waiters; never the word.
