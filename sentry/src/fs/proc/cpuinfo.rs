//! /proc/cpuinfo, from what the platform says of the guest's CPUs.
use core::fmt::Write;

use super::Cx;
use crate::Result;

pub(super) fn cpuinfo(cx: &Cx) -> Result<Vec<u8>> {
    let platform = &cx.kernel().platform;
    let cpus = platform.cpus();
    let m = platform.cpu_model();
    let mut out = String::new();
    let yes = |on: bool| if on { "yes" } else { "no" };
    for cpu in 0..cpus {
        let _ = write!(
            out,
            "processor\t: {cpu}\nvendor_id\t: {}\ncpu family\t: {}\nmodel\t\t: {}\nmodel name\t: {}\nstepping\t: {}\n",
            m.vendor, m.family, m.model, m.name, m.stepping
        );
        let _ = write!(
            out,
            "cpu MHz\t\t: {}.{:03}\ncache size\t: {} KB\nphysical id\t: 0\nsiblings\t: {cpus}\ncore id\t\t: {cpu}\n\
             cpu cores\t: {cpus}\napicid\t\t: {cpu}\ninitial apicid\t: {cpu}\nfpu\t\t: {}\nfpu_exception\t: {}\n\
             cpuid level\t: {}\nwp\t\t: yes\nflags\t\t: {}\nbugs\t\t:\nbogomips\t: {}.{:02}\nclflush size\t: {}\n\
             cache_alignment\t: {}\naddress sizes\t: {} bits physical, {} bits virtual\npower management:\n\n",
            m.khz / 1000,
            m.khz % 1000,
            m.cache_kib,
            yes(true),
            yes(true),
            m.cpuid_level,
            m.flags,
            m.khz * 2 / 1000,
            m.khz * 2 / 10 % 100,
            m.cache_line,
            m.cache_line,
            m.physical_bits,
            m.virtual_bits,
        );
    }
    Ok(out.into_bytes())
}
