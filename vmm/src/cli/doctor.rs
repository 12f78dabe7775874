//! `bartizan doctor`: what this host's KVM can do, and what to do about what is missing, in plain words.
use serde::Serialize;

use super::Failure;
use super::options::DoctorOptions;
use crate::entry::TrapMode;
use crate::jail;
use crate::platform::{Config, KvmPlatform, Service};
use crate::self_test;

/// Memory of the machine that is tried: enough for the self-test.
const TRIAL_MEMORY: u64 = 64 << 20;

#[derive(Serialize)]
struct Finding {
    subject: &'static str,
    value: String,
    ok: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    advice: Option<&'static str>,
}

impl Finding {
    fn good(subject: &'static str, value: impl ToString) -> Finding {
        Finding { subject, value: value.to_string(), ok: true, advice: None }
    }

    fn judged(subject: &'static str, ok: bool, value: impl ToString, advice: &'static str) -> Finding {
        Finding { subject, value: value.to_string(), ok, advice: (!ok).then_some(advice) }
    }
}

/// Prints the findings; status 0, or 125 where no sandbox can run.
pub fn doctor(options: &DoctorOptions) -> Result<u8, Failure> {
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let trial = KvmPlatform::new(Config { cpus, memory_limit: TRIAL_MEMORY, service: Service::Off, rewrite: true });
    let platform = match trial {
        Ok(platform) => platform,
        Err(why) if options.json => {
            let why = Finding { subject: "kvm", value: why.to_string(), ok: false, advice: None };
            print_json(&[why]);
            return Ok(super::status::FAILED);
        }
        Err(why) => return Err(Failure::internal(why)),
    };
    let test = platform.self_test();
    let mode = match test.trap_mode {
        TrapMode::Ring0 => "ring0: SYSCALL arrives in ring 0, as the processor manuals say",
        TrapMode::Ring3 => "ring3: SYSCALL arrives in ring 3",
    };
    let paging = if test.nested_paging { "nested page tables" } else { "shadow page tables" };
    let mut findings = vec![
        Finding::good("kvm interface", test.caps.api_version),
        Finding::good("trap mode", mode),
        Finding::good("paging", paging),
        Finding::judged(
            "clock",
            test.tsc_usable,
            if test.tsc_usable { "the guest reads the time stamp counter" } else { "by system call" },
            "the host's time stamp counter is not constant: reading clocks costs a system call each",
        ),
        Finding::judged(
            "FSGSBASE",
            test.fsgsbase,
            if test.fsgsbase { "available" } else { "missing" },
            "programs set thread pointers by system call",
        ),
        Finding::judged(
            "debug registers",
            test.debug_registers,
            if test.debug_registers { "available" } else { "missing" },
            "hardware watchpoints of debuggers in the sandbox are served by single steps",
        ),
        Finding::good("vector state", format!("XCR0 {:#x}, {} bytes a thread", test.xcr0, test.xsave_len)),
        Finding::good("vCPUs at most", test.caps.max_vcpus),
        Finding::good("memory slots at most", test.caps.max_memslots),
        Finding::good("CPUs used by default", cpus),
        Finding::judged(
            "memory fault information",
            test.caps.memory_fault_info,
            if test.caps.memory_fault_info { "available" } else { "missing" },
            "si_addr of a SIGBUS from a truncated host file is not exact; Linux 6.9 has it",
        ),
    ];
    let coherence = self_test::coherence(&platform);
    findings.push(Finding::judged(
        "page-table coherence",
        coherence.is_ok(),
        coherence.err().unwrap_or_else(|| "changes reach the guest".to_owned()),
        "this KVM keeps translations that were taken away: no sandbox is safe on it",
    ));
    let landlock = jail::landlock_abi();
    findings.push(Finding::judged(
        "Landlock",
        landlock.is_some(),
        landlock.map_or("missing".to_owned(), |abi| format!("ABI {abi}")),
        "enable it with lsm=landlock,… on the kernel command line; without it the jail has one layer less",
    ));
    let sane = findings.iter().all(|f| f.ok || f.subject != "page-table coherence");
    if options.json {
        print_json(&findings);
    } else {
        for f in &findings {
            println!("{} {:<26} {}", if f.ok { "ok  " } else { "note" }, f.subject, f.value);
            if let Some(advice) = f.advice {
                println!("     {:<26} → {advice}", "");
            }
        }
        println!("{}", if sane { "Sandboxes can run here." } else { "Sandboxes cannot run here." });
    }
    Ok(if sane { 0 } else { super::status::FAILED })
}

fn print_json(findings: &[Finding]) {
    println!("{}", serde_json::to_string(findings).unwrap_or_default());
}
