//! From a number to its handler: what the run loop calls. Owns counting and tracing of calls; never a result.
use std::sync::Arc;

use super::table::{self, Call, Handler};
use crate::Errno;
use crate::sched::current_cpu;
use crate::task::Task;
use crate::task::run::{Served, SystemCalls};

/// The system call table as the run loop sees it.
pub struct Dispatch;

impl SystemCalls for Dispatch {
    fn serve<'a>(&self, task: &'a Arc<Task>, nr: u64, args: [u64; 6]) -> Served<'a> {
        let kernel = task.kernel();
        kernel.stats.syscall(current_cpu().unwrap_or(0), nr);
        let call = Call { task, nr, args };
        let Some(trace) = kernel.trace.get() else { return begin(&call) };
        let Some(text) = trace.enter(&call) else { return begin(&call) };
        match begin(&call) {
            Served::Done(result) => {
                trace.exit(text, result);
                Served::Done(result)
            }
            Served::Blocks(rest) => Served::Blocks(Box::pin(async move {
                let result = rest.await;
                trace.exit(text, result);
                result
            })),
        }
    }
}

fn begin<'a>(call: &Call<'a>) -> Served<'a> {
    match table::row(call.nr).map(|r| r.handler) {
        None => Served::Done(Err(Errno::ENOSYS)),
        Some(Handler::Fast(f)) => Served::Done(f(call)),
        Some(Handler::Slow(f)) => Served::Blocks(f(call)),
        Some(Handler::Both { fast, slow }) => match fast(call) {
            Ok(Some(value)) => Served::Done(Ok(value)),
            Ok(None) => Served::Blocks(slow(call)),
            Err(e) => Served::Done(Err(e)),
        },
    }
}
