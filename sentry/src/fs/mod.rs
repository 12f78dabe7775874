//! File systems and anonymous files. Each owns its contents; none resolves paths.
