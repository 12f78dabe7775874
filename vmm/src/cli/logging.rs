//! What bartizan says of itself: log lines, trace lines and reports, on standard error or in a file.
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use log::{LevelFilter, Log, Metadata, Record};
use parking_lot::Mutex;
use sentry::syscalls::strace;

use super::Failure;
use crate::sandbox::error::{describe, errno_of};

/// Where lines go. Cloning shares it.
#[derive(Clone)]
pub struct Output {
    file: Option<Arc<Mutex<File>>>,
}

impl Output {
    /// Standard error, or a file that is made or emptied.
    pub fn open(path: Option<&Path>) -> Result<Output, Failure> {
        let file = match path {
            None => None,
            Some(path) => {
                let file = File::create(path).map_err(|e| {
                    let why = describe(errno_of(&e));
                    Failure::internal(format!("the log file '{}' cannot be written: {why}", path.display()))
                })?;
                Some(Arc::new(Mutex::new(file)))
            }
        };
        Ok(Output { file })
    }

    /// Writes whole lines at once. A reader that has gone is no reason to stop the guest.
    pub fn text(&self, text: &str) {
        let _ = match &self.file {
            Some(file) => file.lock().write_all(text.as_bytes()),
            None => std::io::stderr().write_all(text.as_bytes()),
        };
    }

    /// Makes this the place of `log` lines up to `level`.
    pub fn install(&self, level: LevelFilter) {
        if log::set_boxed_logger(Box::new(self.clone())).is_ok() {
            log::set_max_level(level);
        }
    }
}

impl Log for Output {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }
    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            self.text(&format!("bartizan: {}: {}\n", record.level().as_str().to_lowercase(), record.args()));
        }
    }
    fn flush(&self) {}
}

impl strace::Sink for Output {
    fn line(&self, line: &str) {
        self.text(&format!("{line}\n"));
    }
}
