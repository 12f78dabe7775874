//! Harness for guest programs and repository checks.
