//! File systems and anonymous files. Each owns its contents; none resolves paths.
pub mod anon;
pub mod epoll;
pub mod eventfd;
pub mod pipe;
pub mod signalfd;
pub mod stdio;
