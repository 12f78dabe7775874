//! The sandbox's clock: CLOCK_MONOTONIC by the formula that the guest's vDSO uses, from the TSC that host and guest share.
//! Owns the parameters; publishes nothing.
#![allow(unsafe_code)]
use core::arch::x86_64::{__cpuid, _rdtsc};

use parking_lot::{Mutex, RwLock};
use sentry::platform::TscClock;

const SECOND: u64 = 1_000_000_000;
/// How far a correction may bend the rate, parts per million.
const MAX_SLEW_PPM: i64 = 500;
/// An error beyond this is not slewed away: the host slept, or its TSC was stopped.
const STEP: i64 = 100_000_000;

/// The host's TSC.
pub fn tsc() -> u64 {
    // SAFETY: every x86-64 processor has RDTSC, and Linux lets programs use it.
    unsafe { _rdtsc() }
}

fn host_clock(id: rustix::time::ClockId) -> u64 {
    let t = rustix::time::clock_gettime(id);
    u64::try_from(t.tv_sec).unwrap_or(0) * SECOND + u64::try_from(t.tv_nsec).unwrap_or(0)
}

fn host_monotonic() -> u64 {
    host_clock(rustix::time::ClockId::Monotonic)
}

fn host_realtime() -> u64 {
    host_clock(rustix::time::ClockId::Realtime)
}

/// Whether the host's TSC counts at one rate, always: the processor says so, or the host kernel relies on it.
pub fn host_tsc_is_constant() -> bool {
    let invariant = {
        #[allow(unused_unsafe)]
        // SAFETY: every x86-64 processor has CPUID.
        let (max, leaf) = unsafe { (__cpuid(0x8000_0000).eax, __cpuid(0x8000_0007).edx) };
        max >= 0x8000_0007 && leaf & 1 << 8 != 0
    };
    invariant
        || std::fs::read_to_string("/sys/devices/system/clocksource/clocksource0/current_clocksource")
            .is_ok_and(|s| s.trim() == "tsc")
}

/// A simultaneous reading of TSC and CLOCK_MONOTONIC: of a few tries the one least disturbed.
fn sample() -> (u64, u64) {
    let mut best = (u64::MAX, 0, 0);
    for _ in 0..5 {
        let (before, mono, after) = (tsc(), host_monotonic(), tsc());
        let width = after.wrapping_sub(before);
        if width < best.0 {
            best = (width, before.wrapping_add(width / 2), mono);
        }
    }
    (best.1, best.2)
}

/// `base_mono` plus the time since `base_tsc`.
pub fn convert(clock: &TscClock, tsc: u64) -> u64 {
    let cycles = tsc.wrapping_sub(clock.base_tsc);
    // A reading of another CPU may be a few cycles before the base.
    if cycles.cast_signed() < 0 {
        return clock.base_mono;
    }
    let ns = (u128::from(cycles) * u128::from(clock.mult)) >> clock.shift;
    clock.base_mono.wrapping_add(ns as u64)
}

/// Multiplier and shift for a rate of `ns` nanoseconds in `cycles`.
fn rate(ns: u128, cycles: u128) -> (u32, u32) {
    let mut shift = 32;
    loop {
        let mult = (ns << shift) / cycles.max(1);
        match u32::try_from(mult) {
            Ok(mult) => return (mult, shift),
            Err(_) => shift -= 1,
        }
    }
}

struct Refinement {
    /// The first sample: the longer ago, the better the measured rate.
    first: (u64, u64),
    /// When to refine next, CLOCK_MONOTONIC of the host.
    next: u64,
    interval: u64,
}

/// The clock.
pub struct Clock {
    params: RwLock<TscClock>,
    usable: bool,
    refinement: Mutex<Refinement>,
}

impl Clock {
    /// A clock on a TSC of `khz` kHz, if that is known and the guest's TSC is the host's (`usable`).
    pub fn new(khz: Option<u64>, usable: bool) -> Clock {
        let first = sample();
        let (mult, shift) = match khz {
            Some(khz) if khz > 0 => rate(1_000_000, u128::from(khz)),
            _ => {
                std::thread::sleep(core::time::Duration::from_millis(if usable { 2 } else { 0 }));
                let now = sample();
                rate(u128::from(now.1 - first.1), u128::from(now.0.wrapping_sub(first.0)))
            }
        };
        let params = TscClock {
            base_tsc: first.0,
            base_mono: first.1,
            real_offset: host_realtime().wrapping_sub(host_monotonic()).cast_signed(),
            mult,
            shift,
        };
        let refinement = Refinement { first, next: first.1 + SECOND, interval: SECOND };
        Clock { params: RwLock::new(params), usable, refinement: Mutex::new(refinement) }
    }

    /// CLOCK_MONOTONIC, ns.
    pub fn monotonic(&self) -> u64 {
        if self.usable { convert(&self.params.read(), tsc()) } else { host_monotonic() }
    }

    /// CLOCK_REALTIME, ns since 1970.
    pub fn realtime(&self) -> u64 {
        if !self.usable {
            return host_realtime();
        }
        let params = *self.params.read();
        convert(&params, tsc()).wrapping_add_signed(params.real_offset)
    }

    /// The host's CLOCK_REALTIME was set.
    pub fn was_set(&self) {
        self.params.write().real_offset = host_realtime().wrapping_sub(host_monotonic()).cast_signed();
    }

    /// The host's CLOCK_MONOTONIC at which this clock will show `at`.
    pub fn host_deadline(&self, at: u64) -> u64 {
        if self.usable { host_monotonic().saturating_add(at.saturating_sub(self.monotonic())) } else { at }
    }

    /// The parameters, refined now and then. Whoever asks publishes them to the guest, and [`Clock::monotonic`] follows them from
    /// here on: time is continuous at the change, and only its rate bends towards the host's.
    pub fn params(&self) -> Option<TscClock> {
        if !self.usable {
            return None;
        }
        let mut r = self.refinement.lock();
        let host = host_monotonic();
        if host >= r.next {
            let (tsc, mono) = sample();
            let mut params = self.params.write();
            let shown = convert(&params, tsc);
            let error = mono.wrapping_sub(shown).cast_signed();
            let (measured, shift) = rate(u128::from(mono - r.first.1), u128::from(tsc.wrapping_sub(r.first.0)));
            let interval = (r.interval * 2).min(64 * SECOND);
            // Nanoseconds a second, a thousandth of a part per million each.
            let bend = (i128::from(error) * 1_000_000_000 / i128::from(interval))
                .clamp(-i128::from(MAX_SLEW_PPM) * 1000, i128::from(MAX_SLEW_PPM) * 1000);
            let mult = i128::from(measured) + i128::from(measured) * bend / 1_000_000_000;
            *params = TscClock {
                base_tsc: tsc,
                base_mono: if error > STEP { mono } else { shown },
                real_offset: host_realtime().wrapping_sub(host_monotonic()).cast_signed(),
                mult: u32::try_from(mult).unwrap_or(measured),
                shift,
            };
            r.interval = interval;
            r.next = host.saturating_add(interval);
        }
        let params = *self.params.read();
        Some(params)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_exact_to_a_part_in_a_billion() {
        for khz in [800_000u64, 1_000_000, 2_100_000, 5_200_000] {
            let (mult, shift) = rate(1_000_000, u128::from(khz));
            let clock = TscClock { base_tsc: 1000, base_mono: 5, real_offset: 0, mult, shift };
            let day = 86_400 * SECOND;
            let shown = convert(&clock, 1000 + khz * 86_400 * 1000) - 5;
            assert!(shown.abs_diff(day) < day / 1_000_000_000, "{khz} kHz: {shown}");
            assert_eq!(convert(&clock, 990), 5);
        }
    }

    #[test]
    fn follows_the_host() {
        let clock = Clock::new(None, host_tsc_is_constant());
        let (a, b, c) = (host_monotonic(), clock.monotonic(), host_monotonic());
        assert!(b + 1_000_000 > a && b < c + 1_000_000);
    }
}
