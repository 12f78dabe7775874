//! Sockets (socket(7)). Owns families inside the sandbox; the outside network is the platform's choice.
