//! The table of system calls: one row a call. Dispatch, trace, statistics and `docs/SYSCALLS.md` derive from it.
use core::future::Future;
use core::pin::Pin;
use std::fmt::Write;
use std::sync::{Arc, OnceLock};

use super::args::ArgKind;
use crate::Result;
use crate::task::Task;

/// A call being served.
pub struct Call<'a> {
    /// Who calls.
    pub task: &'a Arc<Task>,
    /// The number.
    pub nr: u64,
    /// rdi, rsi, rdx, r10, r8, r9.
    pub args: [u64; 6],
}

/// The future of a call that blocks.
pub type SlowCall<'a> = Pin<Box<dyn Future<Output = Result<u64>> + Send + 'a>>;

/// How a call is served.
#[derive(Clone, Copy)]
pub enum Handler {
    /// Never blocks.
    Fast(fn(&Call<'_>) -> Result<u64>),
    /// May block.
    Slow(for<'a> fn(&Call<'a>) -> SlowCall<'a>),
    /// `fast` answers, or gives None where it would block; then `slow` serves the call from its beginning.
    Both {
        /// The first attempt.
        fast: fn(&Call<'_>) -> Result<Option<u64>>,
        /// The blocking form.
        slow: for<'a> fn(&Call<'a>) -> SlowCall<'a>,
    },
}

/// How complete a call is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// As in Linux, as far as the sandbox has the objects.
    Full,
    /// The note says what is missing; what is missing gives Linux's error.
    Partial,
}

/// An argument's name and print form.
#[derive(Clone, Copy, Debug)]
pub struct ArgSpec {
    /// Name as in the man page.
    pub name: &'static str,
    /// Print form.
    pub kind: ArgKind,
}

/// A row.
pub struct Row {
    /// The number on x86-64.
    pub nr: u32,
    /// The name as in the man page.
    pub name: &'static str,
    /// Arguments.
    pub args: &'static [ArgSpec],
    /// Code.
    pub handler: Handler,
    /// Completeness.
    pub level: Level,
    /// What is missing or particular.
    pub note: &'static str,
}

/// Makes a [`Row`]: `row!(39, getpid(), fast ids::getpid, Full)`, or `slow f` for an `async fn`, or `both f, g`; the handler
/// takes `&Arc<Task>` and the typed arguments. A note may follow the level: `row!(…, Partial, "no MAP_HUGETLB")`.
#[macro_export]
macro_rules! row {
    ($nr:expr, $name:ident ( $($arg:ident : $ty:ty),* $(,)? ), fast $f:path, $level:ident $(, $note:expr)?) => {
        $crate::row!(@row $nr, $name ($($arg: $ty),*), $crate::row!(@fast $f, ($($arg: $ty),*)), $level $(, $note)?)
    };
    ($nr:expr, $name:ident ( $($arg:ident : $ty:ty),* $(,)? ), slow $f:path, $level:ident $(, $note:expr)?) => {
        $crate::row!(@row $nr, $name ($($arg: $ty),*), $crate::row!(@slow $f, ($($arg: $ty),*)), $level $(, $note)?)
    };
    ($nr:expr, $name:ident ( $($arg:ident : $ty:ty),* $(,)? ), both $f:path, $g:path, $level:ident $(, $note:expr)?) => {
        $crate::row!(@row $nr, $name ($($arg: $ty),*), $crate::row!(@both $f, $g, ($($arg: $ty),*)), $level $(, $note)?)
    };
    (@fast $f:path, ($($arg:ident : $ty:ty),*)) => {
        $crate::syscalls::table::Handler::Fast(|call| {
            let mut _args = call.args.into_iter();
            $(let $arg = <$ty as $crate::syscalls::args::FromArg>::from_arg(_args.next().unwrap_or(0));)*
            $f(call.task, $($arg),*)
        })
    };
    (@slow $f:path, ($($arg:ident : $ty:ty),*)) => {
        $crate::syscalls::table::Handler::Slow(|call| {
            let mut _args = call.args.into_iter();
            $(let $arg = <$ty as $crate::syscalls::args::FromArg>::from_arg(_args.next().unwrap_or(0));)*
            Box::pin($f(call.task, $($arg),*))
        })
    };
    (@both $f:path, $g:path, ($($arg:ident : $ty:ty),*)) => {
        $crate::syscalls::table::Handler::Both {
            fast: |call| {
                let mut _args = call.args.into_iter();
                $(let $arg = <$ty as $crate::syscalls::args::FromArg>::from_arg(_args.next().unwrap_or(0));)*
                $f(call.task, $($arg),*)
            },
            slow: |call| {
                let mut _args = call.args.into_iter();
                $(let $arg = <$ty as $crate::syscalls::args::FromArg>::from_arg(_args.next().unwrap_or(0));)*
                Box::pin($g(call.task, $($arg),*))
            },
        }
    };
    (@row $nr:expr, $name:ident ($($arg:ident : $ty:ty),*), $handler:expr, $level:ident $(, $note:expr)?) => {
        $crate::syscalls::table::Row {
            nr: $nr,
            name: stringify!($name),
            args: &[$($crate::syscalls::table::ArgSpec {
                name: stringify!($arg),
                kind: <$ty as $crate::syscalls::args::FromArg>::KIND,
            }),*],
            handler: $handler,
            level: $crate::syscalls::table::Level::$level,
            note: concat!("" $(, $note)?),
        }
    };
}

/// The areas, each with its rows.
pub const TABLE_AREAS: &[&[Row]] = &[
    super::system::ROWS,
    super::epoll::ROWS,
    super::ioprio::ROWS,
    super::memfd::ROWS,
    super::shm::ROWS,
    super::sysv::ROWS,
    super::mqueue::ROWS,
    super::pipe::ROWS,
    super::poll::ROWS,
    super::signal::ROWS,
    super::directory::ROWS,
    super::file::ROWS,
    super::inotify::ROWS,
    super::io::ROWS,
    super::mount::ROWS,
    super::sync::ROWS,
    super::transfer::ROWS,
    super::attr::ROWS,
    super::fcntl::ROWS,
    super::stat::ROWS,
    super::xattr::ROWS,
    super::memory::ROWS,
    super::futex::ROWS,
    super::time::ROWS,
    super::message::ROWS,
    super::socket::ROWS,
    super::ids::ROWS,
    super::limits::ROWS,
    super::prctl::ROWS,
    super::pidfd::ROWS,
    super::process::ROWS,
    super::ptrace::ROWS,
    super::seccomp::ROWS,
    super::sched::ROWS,
];

/// One more than the largest number served.
pub const TABLE_LEN: usize = 512;

/// The row of a number.
pub fn row(nr: u64) -> Option<&'static Row> {
    static TABLE: OnceLock<Vec<Option<&'static Row>>> = OnceLock::new();
    let table = TABLE.get_or_init(|| {
        let mut table = vec![None; TABLE_LEN];
        for row in TABLE_AREAS.iter().copied().flatten() {
            if let Some(slot) = table.get_mut(row.nr as usize) {
                *slot = Some(row);
            }
        }
        table
    });
    usize::try_from(nr).ok().and_then(|n| table.get(n).copied().flatten())
}

/// The row of a name.
pub fn by_name(name: &str) -> Option<&'static Row> {
    TABLE_AREAS.iter().copied().flatten().find(|row| row.name == name)
}

/// The name of a number, served or not; empty for a number Linux does not use.
pub fn name(nr: u64) -> &'static str {
    match row(nr) {
        Some(row) => row.name,
        None => super::names::NAMES.iter().find(|&&(n, _)| u64::from(n) == nr).map_or("", |&(_, name)| name),
    }
}

/// Names of the calls Linux has and the table has not.
pub fn absent_names() -> impl Iterator<Item = &'static str> {
    super::names::NAMES.iter().filter(|&&(nr, _)| row(u64::from(nr)).is_none()).map(|&(_, name)| name)
}

/// The table as a page of documentation.
pub fn document() -> String {
    let mut rows: Vec<&Row> = TABLE_AREAS.iter().copied().flatten().collect();
    rows.sort_by_key(|r| r.nr);
    let partial = rows.iter().filter(|r| r.level == Level::Partial).count();
    let mut text = format!(
        "# System calls\n\nGenerated from the table in `sentry/src/syscalls/`; a test keeps it true. {} calls are served, {partial} of \
         them in part; what a partial call lacks gives Linux's error. A call that is missing returns ENOSYS and is counted \
         (`--stats`).\n\n| number | call | level | note |\n|---|---|---|---|\n",
        rows.len()
    );
    for row in rows {
        let args: Vec<&str> = row.args.iter().map(|a| a.name).collect();
        let level = if row.level == Level::Full { "full" } else { "partial" };
        let _ = writeln!(text, "| {} | {}({}) | {level} | {} |", row.nr, row.name, args.join(", "), row.note);
    }
    let absent: Vec<&str> = absent_names().collect();
    text + &format!("\n## Missing\n\n{}.\n", absent.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documentation_is_true() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/SYSCALLS.md");
        if std::env::var_os("BARTIZAN_BLESS").is_some() {
            std::fs::write(path, document()).unwrap();
        }
        let written = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            written == document(),
            "docs/SYSCALLS.md is stale: run BARTIZAN_BLESS=1 cargo test -p sentry documentation"
        );
    }

    #[test]
    fn numbers_are_served_once() {
        let mut seen = std::collections::BTreeSet::new();
        for row in TABLE_AREAS.iter().copied().flatten() {
            assert!(seen.insert(row.nr), "number {} has two rows", row.nr);
            let known = super::super::names::NAMES.iter().find(|&&(nr, _)| nr == row.nr);
            assert_eq!(known.map(|&(_, name)| name), Some(row.name), "number {}", row.nr);
        }
    }
}
