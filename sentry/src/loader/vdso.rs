//! The vDSO (vdso(7)): a shared object that every program finds mapped, whose functions tell the time without a system call.
//! Made once a sandbox. Owns its image and the page of clock parameters (vvar); never a clock.
//!
//! In every address space the vvar page lies directly before the image, which reads it relative to its own address.
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use guest_abi::UserAddr;
use guest_abi::layout::PAGE_SIZE;

use super::vdso_elf;
use super::vvar::{self, TEXT};
use crate::lock::{Mutex, Rank};
use crate::mm::{AddressSpace, MapFlags, MapRequest, MapSource, Prot};
use crate::ns::time::Offsets;
use crate::platform::{PhysAddr, Platform, TscClock};
use crate::time::Nanos;
use crate::{Errno, Result};

/// How old the parameters may get while the guest runs.
const REFRESH: Nanos = 1_000_000_000;

struct State {
    seq: u32,
    clock: Option<TscClock>,
}

/// The vDSO of a sandbox.
pub struct Vdso {
    code: Arc<[PhysAddr]>,
    vvar: Arc<[PhysAddr]>,
    /// Parameters that say that there is no clock: for time namespaces, whose clocks only system calls know.
    without: Arc<[PhysAddr]>,
    state: Mutex<State>,
    refreshed: AtomicU64,
}

impl Vdso {
    /// Makes the image and publishes the platform's present clock.
    pub fn new(platform: &dyn Platform) -> Result<Vdso> {
        let image = image(platform.mailbox_readable()).ok_or(Errno::ENOEXEC)?;
        let memory = platform.memory();
        let mut code = Vec::new();
        for chunk in image.chunks(PAGE_SIZE as usize) {
            let frame = memory.alloc()?;
            memory.write(frame, chunk)?;
            code.push(frame);
        }
        let vdso = Vdso {
            code: code.into(),
            vvar: vec![memory.alloc()?].into(),
            without: vec![memory.alloc()?].into(),
            state: Mutex::new(Rank::PageCache, State { seq: 0, clock: None }),
            refreshed: AtomicU64::new(0),
        };
        vdso.refresh(platform, platform.monotonic());
        Ok(vdso)
    }

    /// The image, to be mapped readable and executable right after [`Vdso::vvar_source`].
    pub fn code_source(&self) -> MapSource {
        MapSource::Special { name: "[vdso]", frames: self.code.clone() }
    }

    /// The clock parameters, to be mapped readable.
    pub fn vvar_source(&self) -> MapSource {
        MapSource::Special { name: "[vvar]", frames: self.vvar.clone() }
    }

    /// Shows the programs of `space` parameters that are true with these offsets: the machine's own, or none. A program that has moved or
    /// unmapped them keeps what it has.
    pub fn follow(&self, space: &Arc<AddressSpace>, offsets: Offsets) {
        let Some(at) = space.image().vdso.checked_sub(self.vvar_len()).filter(|&at| at != 0) else { return };
        let frames = if offsets == Offsets::default() { &self.vvar } else { &self.without };
        let there = space.special_at(UserAddr(at));
        if !there.is_some_and(|there| !Arc::ptr_eq(&there, frames) && self.is_parameters(&there)) {
            return;
        }
        let source = MapSource::Special { name: "[vvar]", frames: frames.clone() };
        let (addr, len) = (UserAddr(at), self.vvar_len());
        // What fails for want of memory leaves the other clock's parameters, which nothing can mend.
        let _ = space.map(MapRequest { addr, len, prot: Prot::READ, flags: MapFlags::FIXED, source });
    }

    fn is_parameters(&self, frames: &Arc<[PhysAddr]>) -> bool {
        Arc::ptr_eq(frames, &self.vvar) || Arc::ptr_eq(frames, &self.without)
    }

    /// Bytes of the image, whole pages.
    pub fn code_len(&self) -> u64 {
        self.code.len() as u64 * PAGE_SIZE
    }

    /// Bytes of the parameters, whole pages.
    pub fn vvar_len(&self) -> u64 {
        self.vvar.len() as u64 * PAGE_SIZE
    }

    /// Publishes the platform's parameters if those in the page are old; called on the way into the guest. `now` is monotonic.
    pub fn refresh_if_due(&self, platform: &dyn Platform, now: Nanos) {
        if now.saturating_sub(self.refreshed.load(Ordering::Relaxed)) >= REFRESH {
            self.refresh(platform, now);
        }
    }

    /// Publishes the platform's parameters. `now` is monotonic.
    pub fn refresh(&self, platform: &dyn Platform, now: Nanos) {
        self.refreshed.store(now, Ordering::Relaxed);
        self.publish(platform, platform.tsc_clock());
    }

    /// Publishes clock parameters; None: the functions make system calls.
    pub fn publish(&self, platform: &dyn Platform, clock: Option<TscClock>) {
        let Some(&page) = self.vvar.first() else { return };
        let mut state = self.state.lock();
        if state.seq != 0 && state.clock == clock {
            return;
        }
        let memory = platform.memory();
        let c = clock.unwrap_or_default();
        let mut body = [0; (vvar::END - vvar::VALID) as usize];
        let mut put = |offset: i32, bytes: &[u8]| {
            let at = (offset - vvar::VALID) as usize;
            if let Some(field) = body.get_mut(at..at + bytes.len()) {
                field.copy_from_slice(bytes);
            }
        };
        // A shift the code cannot perform would make every answer wrong.
        let valid = clock.is_some_and(|c| c.shift < 64);
        put(vvar::VALID, &u32::from(valid).to_le_bytes());
        put(vvar::BASE_TSC, &c.base_tsc.to_le_bytes());
        put(vvar::MULT, &c.mult.to_le_bytes());
        put(vvar::SHIFT, &c.shift.to_le_bytes());
        put(vvar::BASE_MONO, &c.base_mono.to_le_bytes());
        put(vvar::REAL_OFFSET, &c.real_offset.to_le_bytes());
        let seq = state.seq.wrapping_add(2) & !1;
        let at = |offset: i32| PhysAddr(page.0 + offset as u64);
        // The frame is the sandbox's own; a write to it fails only when the machine is going away.
        let written = memory
            .write(at(vvar::SEQ), &(seq.wrapping_sub(1)).to_le_bytes())
            .and_then(|()| memory.write(at(vvar::VALID), &body))
            .and_then(|()| memory.write(at(vvar::SEQ), &seq.to_le_bytes()));
        if written.is_ok() {
            *state = State { seq, clock };
        }
    }
}

/// What the build script made of `sentry/build/vdso.rs`.
mod assembled {
    include!(concat!(env!("OUT_DIR"), "/vdso.rs"));
}

fn image(mailbox_readable: bool) -> Option<Vec<u8>> {
    let (text, functions) = if mailbox_readable { assembled::WITH_MAILBOX } else { assembled::WITHOUT_MAILBOX };
    vdso_elf::build(TEXT, text, functions)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_is_made_and_fits() {
        for readable in [false, true] {
            let image = image(readable).expect("image");
            assert_eq!(&image[..4], b"\x7fELF");
            assert!(image.len() <= 2 * PAGE_SIZE as usize);
            if let Ok(path) = std::env::var("VDSO_OUT") {
                std::fs::write(format!("{path}.{readable}"), &image).expect("write");
            }
        }
    }
}
