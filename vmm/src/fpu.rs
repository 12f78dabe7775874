//! The extended state (x87, SSE, AVX …) of guest threads. Owns where each thread's state is: in memory, or still in the vCPU
//! that ran it last. Moves it only when it must.
//!
//! Lock order: a vCPU before a state. Whoever holds a state and needs the vCPU it is in only tries that lock: the holder of
//! the vCPU either runs the state's own thread, or is about to move the state to memory.
mod packed;

use core::any::Any;
use std::sync::{Arc, Weak};

use guest_abi::Errno;
use kvm_bindings::kvm_xsave;
use parking_lot::Mutex;
use sentry::platform::Fpu;
use zerocopy::IntoBytes;

use crate::kvm::cpuid::GuestCpuid;
use crate::kvm::{PlatformError, Vcpu};
use crate::vcpu_pool::Pool;
use packed::Packed;

/// MXCSR of a fresh process.
const MXCSR_INIT: u32 = 0x1f80;
/// x87 control word of a fresh process.
const FCW_INIT: u16 = 0x37f;
/// Where the XSAVE header begins; the legacy area before it has x87 and SSE.
const HEADER: usize = 512;
/// Bytes of legacy area and header.
const LEGACY_LEN: usize = 576;

/// What the images look like on this machine.
pub struct Format {
    xcr0: u64,
    len: usize,
    mxcsr_mask: u32,
    components: Vec<(u32, usize, usize)>,
    /// KVM keeps PKRU as it is unless an image names it. Where a program can write PKRU, though no CPUID offers it, every image
    /// must clear it: one program's keys must not lock the next one out of its own memory.
    clear_pkru: bool,
}

/// XCR0 bit of PKRU.
const PKRU: u64 = 1 << 9;

impl Format {
    /// From the guest's CPUID and `vcpu`, whose extended state it resets.
    pub fn new(cpuid: &GuestCpuid, vcpu: &Vcpu) -> Result<Format, PlatformError> {
        let refused = |e| PlatformError::Kvm("exchange the extended state of a virtual CPU", e);
        let sample = vcpu.read_xsave().map_err(refused)?;
        let mask = match sample.region[7] {
            0 => 0xffbf, // Intel SDM volume 1, 11.6.6
            mask => mask,
        };
        let mut format = Format {
            xcr0: cpuid.xcr0,
            len: cpuid.xsave_len,
            mxcsr_mask: mask,
            components: cpuid.components.clone(),
            clear_pkru: cpuid.pkru_offset.is_some(),
        };
        if vcpu.write_xsave(&format.to_xsave(&format.initial())).is_err() {
            // The usual case: what CPUID does not offer KVM does not take.
            format.clear_pkru = false;
            vcpu.write_xsave(&format.to_xsave(&format.initial())).map_err(refused)?;
        }
        Ok(format)
    }

    /// Bytes of an image.
    pub fn image_len(&self) -> usize {
        self.len
    }

    /// The state of a fresh process.
    fn initial(&self) -> Vec<u8> {
        let mut image = vec![0; self.len];
        image[..2].copy_from_slice(&FCW_INIT.to_le_bytes());
        image[24..28].copy_from_slice(&MXCSR_INIT.to_le_bytes());
        image[28..32].copy_from_slice(&self.mxcsr_mask.to_le_bytes());
        image[HEADER..HEADER + 8].copy_from_slice(&3u64.to_le_bytes());
        image
    }

    /// Bytes of an image that hold anything but initial state.
    fn used_len(&self, image: &[u8]) -> usize {
        let present = word(image, HEADER);
        let used = self.components.iter().filter(|(i, ..)| present & (1 << i) != 0);
        used.map(|&(_, offset, len)| offset + len).max().unwrap_or(0).clamp(LEGACY_LEN, self.len)
    }

    /// Whether XRSTOR would take the image (Intel SDM volume 1, 13.8).
    fn valid(&self, image: &[u8]) -> bool {
        let Some(mxcsr) = image.get(24..28).and_then(|b| b.try_into().ok()).map(u32::from_le_bytes) else {
            return false;
        };
        image.len() == self.len
            && mxcsr & !self.mxcsr_mask == 0
            && word(image, HEADER) & !self.xcr0 == 0
            && image[HEADER + 8..HEADER + 64].iter().all(|&b| b == 0)
    }

    fn to_xsave(&self, image: &[u8]) -> Box<kvm_xsave> {
        let mut xsave = Box::<kvm_xsave>::default();
        // x86 is little-endian: the words are the bytes.
        let region = xsave.region.as_mut_bytes();
        let len = image.len().min(region.len());
        region[..len].copy_from_slice(&image[..len]);
        if self.clear_pkru {
            xsave.region[HEADER / 4] |= PKRU as u32;
        }
        xsave
    }

    fn to_image(&self, xsave: &kvm_xsave) -> Vec<u8> {
        let region = xsave.region.as_bytes();
        let mut image = region[..self.len.min(region.len())].to_vec();
        // The software-reserved area is the signal frame's business, and the host's XSTATE_BV may name more than the guest has.
        image[464..HEADER].fill(0);
        let present = word(&image, HEADER) & self.xcr0;
        image[HEADER..HEADER + 8].copy_from_slice(&present.to_le_bytes());
        image[HEADER + 8..LEGACY_LEN].fill(0);
        image
    }
}

fn word(image: &[u8], at: usize) -> u64 {
    image.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes)
}

enum Place {
    /// Here; None is the state of a fresh process.
    Memory(Option<Packed>),
    /// In this CPU's vCPU.
    Vcpu(usize),
}

/// The state of one thread.
pub struct State {
    place: Mutex<Place>,
}

/// The handle the sentry holds.
pub struct KvmFpu {
    pool: Weak<Pool>,
    format: Arc<Format>,
    pub(crate) state: Arc<State>,
}

impl KvmFpu {
    /// A fresh state.
    pub fn new(pool: &Arc<Pool>, format: &Arc<Format>) -> KvmFpu {
        let state = Arc::new(State { place: Mutex::new(Place::Memory(None)) });
        KvmFpu { pool: Arc::downgrade(pool), format: format.clone(), state }
    }

    /// A fresh state that belongs to no pool, for a vCPU outside of one.
    pub fn detached(format: &Arc<Format>) -> KvmFpu {
        let state = Arc::new(State { place: Mutex::new(Place::Memory(None)) });
        KvmFpu { pool: Weak::new(), format: format.clone(), state }
    }

    /// Calls `act` with the place locked and, if the state is in a vCPU, that vCPU and its record of whose state it holds.
    fn with_place<R>(&self, act: impl FnOnce(&mut Place, Option<(&Vcpu, &mut Resident)>) -> R) -> R {
        loop {
            let mut place = self.state.place.lock();
            let Place::Vcpu(cpu) = *place else { return act(&mut place, None) };
            let Some(pool) = self.pool.upgrade() else {
                *place = Place::Memory(None);
                continue;
            };
            let Some(mut slot) = pool.try_lock_vcpu(cpu) else {
                drop(place);
                std::thread::yield_now();
                continue;
            };
            let Some((vcpu, resident)) = slot.parts() else {
                *place = Place::Memory(None);
                continue;
            };
            return act(&mut place, Some((vcpu, resident)));
        }
    }

    fn replace(&self, image: Option<Packed>) {
        self.with_place(|place, holder| {
            if let Some((_, resident)) = holder {
                resident.0 = None;
            }
            *place = Place::Memory(image);
        });
    }
}

impl Fpu for KvmFpu {
    fn read(&self) -> Vec<u8> {
        self.with_place(|place, holder| {
            let mut image = match (&place, holder) {
                (Place::Memory(Some(image)), _) => image.image(self.format.len),
                (Place::Memory(None), _) => self.format.initial(),
                (Place::Vcpu(_), Some((vcpu, _))) => {
                    vcpu.read_xsave().map_or_else(|_| self.format.initial(), |x| self.format.to_image(&x))
                }
                (Place::Vcpu(_), None) => self.format.initial(),
            };
            image.resize(self.format.len, 0);
            image
        })
    }

    fn write(&self, image: &[u8]) -> Result<(), Errno> {
        if !self.format.valid(image) {
            return Err(Errno::EINVAL);
        }
        self.replace(Some(Packed::new(&image[..self.format.used_len(image)])));
        Ok(())
    }

    fn reset(&self) {
        self.replace(None);
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Whose state a vCPU holds.
#[derive(Default)]
pub struct Resident(Option<Arc<State>>);

impl Resident {
    /// Moves the state that `vcpu` holds to memory, unless its thread is gone.
    pub fn save(&mut self, vcpu: &Vcpu, format: &Format) {
        let Some(state) = self.0.take() else { return };
        // The count can only fall to one: handles are never made from the vCPU's own.
        if Arc::strong_count(&state) == 1 {
            return;
        }
        let image = vcpu.read_xsave().ok().map(|x| {
            let image = format.to_image(&x);
            Packed::new(&image[..format.used_len(&image)])
        });
        *state.place.lock() = Place::Memory(image);
    }

    /// Makes `vcpu`, that of `cpu`, hold the state of `fpu`. False if KVM refused.
    pub fn load(&mut self, vcpu: &Vcpu, cpu: usize, fpu: &KvmFpu, format: &Format) -> bool {
        if self.0.as_ref().is_some_and(|s| Arc::ptr_eq(s, &fpu.state)) {
            return true;
        }
        self.save(vcpu, format);
        // The state may be in another vCPU.
        fpu.with_place(|place, holder| {
            let xsave = match (&place, holder) {
                (Place::Vcpu(_), Some((other, resident))) => {
                    resident.0 = None;
                    let image = other.read_xsave().map_or_else(|_| format.initial(), |x| format.to_image(&x));
                    format.to_xsave(&image)
                }
                (Place::Memory(Some(image)), _) => format.to_xsave(&image.image(format.len)),
                _ => format.to_xsave(&format.initial()),
            };
            let done = vcpu.write_xsave(&xsave).is_ok();
            if done {
                *place = Place::Vcpu(cpu);
                self.0 = Some(fpu.state.clone());
            }
            done
        })
    }
}
