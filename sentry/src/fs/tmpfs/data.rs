//! The contents of a regular file in memory: a sparse map of frames that serves read, write and mmap alike (a page cache
//! without a disk). Parts never written may come from a host file below (see `fs::overlay`).
//!
//! User memory is never copied under the map's lock: the source may be a mapping of this very file. Frames are taken with
//! a reference, the lock is dropped, then bytes move.
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use guest_abi::layout::PAGE_SIZE;

use super::quota::Quota;
use crate::fs::host::{Content, LazyContent};
use crate::lock::{Mutex, Rank};
use crate::mm::backing::MappedPage;
use crate::mm::space::MapFlags;
use crate::mm::{AddressSpace, IoDest, IoSource, Mappable, Mappers};
use crate::platform::{PhysAddr, PhysRange, Platform};
use crate::{Errno, Result};

/// Pages moved between two takings of the lock.
const BATCH: u64 = 64;

/// Pages of holes in the middle of a host file's bytes: each costs an entry of the map.
const MAX_EXPLICIT_HOLES: u64 = 1 << 16;

/// F_SEAL_* of fcntl(2).
pub mod seal {
    #![allow(missing_docs)]
    pub const SEAL: u32 = 1;
    pub const SHRINK: u32 = 2;
    pub const GROW: u32 = 4;
    pub const WRITE: u32 = 8;
    pub const FUTURE_WRITE: u32 = 16;
    pub const EXEC: u32 = 32;
    pub const ALL: u32 = 63;
}

/// The largest file, bytes.
pub const MAX_SIZE: u64 = i64::MAX as u64;

#[derive(Default)]
struct Pages {
    /// By page index. None: a hole although the host file below has bytes there.
    map: BTreeMap<u64, Option<PhysAddr>>,
    frames: u64,
    size: u64,
    /// Bytes of the host file below that still show where the map has nothing.
    lower_len: u64,
    seals: u32,
}

/// Contents of a regular file.
pub struct FileData {
    platform: Arc<dyn Platform>,
    quota: Arc<Quota>,
    key: (u64, u64),
    lower: Option<LazyContent>,
    pages: Mutex<Pages>,
    mappers: Mappers,
    /// A shared mapping has made a page writable since the flag was last taken.
    written: AtomicBool,
}

fn page_of(offset: u64) -> u64 {
    offset / PAGE_SIZE
}

fn page_end(len: u64) -> u64 {
    len.div_ceil(PAGE_SIZE)
}

/// A piece of a batch, without the lock.
#[derive(Clone, Copy)]
enum Piece {
    Frame(PhysAddr),
    Zero,
    Lower,
}

impl FileData {
    /// An empty file with the identity `key` = (device, inode).
    pub fn new(platform: Arc<dyn Platform>, quota: Arc<Quota>, key: (u64, u64)) -> Arc<FileData> {
        Self::over(platform, quota, key, None, 0)
    }

    /// A file that shows the first `size` bytes of `lower` until they are overwritten.
    pub fn over(
        platform: Arc<dyn Platform>,
        quota: Arc<Quota>,
        key: (u64, u64),
        lower: Option<LazyContent>,
        size: u64,
    ) -> Arc<FileData> {
        let lower_len = if lower.is_some() { size } else { 0 };
        let pages = Pages { size, lower_len, seals: seal::SEAL, ..Pages::default() };
        Arc::new(FileData {
            platform,
            quota,
            key,
            lower,
            pages: Mutex::new(Rank::PageCache, pages),
            mappers: Mappers::default(),
            written: AtomicBool::new(false),
        })
    }

    /// Length in bytes.
    pub fn length(&self) -> u64 {
        self.pages.lock().size
    }

    /// Bytes in frames.
    pub fn allocated(&self) -> u64 {
        self.pages.lock().frames * PAGE_SIZE
    }

    /// Whether a shared mapping may have written since the last call.
    pub fn take_written(&self) -> bool {
        self.written.swap(false, Ordering::Relaxed)
    }

    /// F_GET_SEALS.
    pub fn seals(&self) -> u32 {
        self.pages.lock().seals
    }

    /// A new memfd: may be sealed, or not.
    pub fn init_seals(&self, seals: u32) {
        self.pages.lock().seals = seals;
    }

    /// F_ADD_SEALS. EPERM once F_SEAL_SEAL is there; EBUSY for F_SEAL_WRITE while a writable shared mapping exists.
    pub fn add_seals(&self, seals: u32) -> Result<()> {
        if seals & !seal::ALL != 0 {
            return Err(Errno::EINVAL);
        }
        if self.pages.lock().seals & seal::SEAL != 0 {
            return Err(Errno::EPERM);
        }
        if seals & seal::WRITE != 0 && self.seals() & seal::WRITE == 0 && self.mapped_writable() {
            return Err(Errno::EBUSY);
        }
        let mut pages = self.pages.lock();
        if pages.seals & seal::SEAL != 0 {
            return Err(Errno::EPERM);
        }
        pages.seals |= seals;
        Ok(())
    }

    fn mapped_writable(&self) -> bool {
        self.mappers.all().iter().any(|space| {
            space.maps(false).iter().any(|vma| match &vma.source {
                crate::mm::MapSource::File { object, may_write, .. } => {
                    *may_write && vma.flags.contains(MapFlags::SHARED) && object.key() == self.key
                }
                _ => false,
            })
        })
    }

    fn unmap(&self, start: u64, end: u64) {
        for space in self.mappers.all() {
            space.unmap_object(self, start, end);
        }
    }

    /// Puts a frame at `index`, filled from the host file below. The caller holds the lock and knows the place to be empty.
    fn fill(&self, pages: &mut Pages, index: u64) -> Result<PhysAddr> {
        self.quota.pages.take(1)?;
        let frame = self.platform.memory().alloc().inspect_err(|_| self.quota.pages.give(1))?;
        let from_lower = !pages.map.contains_key(&index) && index * PAGE_SIZE < pages.lower_len;
        if let Some(lower) = self.lower.as_ref().filter(|_| from_lower) {
            let want = usize::try_from((pages.lower_len - index * PAGE_SIZE).min(PAGE_SIZE)).unwrap_or(0);
            let copied = lower.get().and_then(|l| read_exactly(&l, index * PAGE_SIZE, frame, want));
            if let Err(e) = copied {
                self.platform.memory().release(&[frame]);
                self.quota.pages.give(1);
                return Err(e);
            }
        }
        pages.map.insert(index, Some(frame));
        pages.frames += 1;
        Ok(frame)
    }

    /// The pieces of `first..last` pages, each frame with a reference of the caller's.
    fn gather(&self, pages: &Pages, first: u64, last: u64) -> Vec<Piece> {
        let mut out = Vec::with_capacity(usize::try_from(last - first).unwrap_or(0));
        let mut at = first;
        let absent = |index: u64| {
            if self.lower.is_some() && index * PAGE_SIZE < pages.lower_len { Piece::Lower } else { Piece::Zero }
        };
        for (&index, slot) in pages.map.range(first..last) {
            out.extend((at..index).map(absent));
            out.push(match slot {
                Some(frame) => {
                    self.platform.memory().share(*frame);
                    Piece::Frame(*frame)
                }
                None => Piece::Zero,
            });
            at = index + 1;
        }
        out.extend((at..last).map(absent));
        out
    }

    fn release(&self, pieces: &[Piece]) {
        let frames: Vec<PhysAddr> =
            pieces.iter().filter_map(|p| if let Piece::Frame(f) = p { Some(*f) } else { None }).collect();
        if !frames.is_empty() {
            self.platform.memory().release(&frames);
        }
    }

    /// read(2) at `pos`.
    pub fn read(&self, dst: &mut IoDest<'_>, mut pos: u64) -> Result<usize> {
        let mut total = 0;
        loop {
            let wanted = dst.remaining() as u64;
            let (pieces, mut left) = {
                let pages = self.pages.lock();
                let left = wanted.min(pages.size.saturating_sub(pos)).min(BATCH * PAGE_SIZE - pos % PAGE_SIZE);
                if left == 0 {
                    return Ok(total);
                }
                (self.gather(&pages, page_of(pos), page_end(pos + left)), left)
            };
            let mut result = Ok(());
            let mut i = 0;
            while i < pieces.len() && left > 0 {
                let in_page = pos % PAGE_SIZE;
                let mut n = (PAGE_SIZE - in_page).min(left);
                let done = match pieces[i] {
                    Piece::Frame(frame) => dst.put_phys(
                        self.platform.memory(),
                        PhysRange { addr: PhysAddr(frame.0 + in_page), len: n as usize },
                    ),
                    Piece::Zero => dst.put_zeroes(n as usize),
                    Piece::Lower => {
                        while matches!(pieces.get(i + 1), Some(Piece::Lower)) && n < left {
                            i += 1;
                            n = (n + PAGE_SIZE).min(left);
                        }
                        self.read_lower(dst, pos, n)
                    }
                };
                match done {
                    Ok(got) => {
                        total += got;
                        pos += got as u64;
                        left -= got as u64;
                        if (got as u64) < n {
                            result = Err(Errno::EFAULT);
                            break;
                        }
                    }
                    Err(e) => {
                        result = Err(e);
                        break;
                    }
                }
                i += 1;
            }
            self.release(&pieces);
            match result {
                Err(e) if total == 0 => return Err(e),
                Err(_) => return Ok(total),
                Ok(()) => {}
            }
        }
    }

    /// `n` bytes of the host file below; zeroes where it has become shorter or where it is no longer shown.
    fn read_lower(&self, dst: &mut IoDest<'_>, pos: u64, n: u64) -> Result<usize> {
        let shown = self.pages.lock().lower_len.saturating_sub(pos).min(n);
        let got = match &self.lower {
            Some(lower) if shown > 0 => lower.get()?.read(dst, pos, usize::try_from(shown).unwrap_or(usize::MAX))?,
            _ => 0,
        };
        let rest = usize::try_from(n).unwrap_or(usize::MAX) - got;
        if rest == 0 {
            return Ok(got);
        }
        match dst.put_zeroes(rest) {
            Ok(more) => Ok(got + more),
            Err(_) if got > 0 => Ok(got),
            Err(e) => Err(e),
        }
    }

    /// write(2) at `pos`, or at the end if `append`. Gives the count and the position after the last byte.
    pub fn write(&self, src: &mut IoSource<'_>, pos: u64, append: bool) -> Result<(usize, u64)> {
        let wanted = src.remaining() as u64;
        let mut at = pos;
        if wanted == 0 {
            return Ok((0, at));
        }
        let reserved = {
            let mut pages = self.pages.lock();
            if append {
                at = pages.size;
            }
            if pages.seals & (seal::WRITE | seal::FUTURE_WRITE) != 0 {
                return Err(Errno::EPERM);
            }
            if at >= MAX_SIZE {
                return Err(Errno::EFBIG);
            }
            let end = at.saturating_add(wanted).min(MAX_SIZE);
            if end > pages.size && pages.seals & seal::GROW != 0 {
                return Err(Errno::EPERM);
            }
            // An appending writer takes its place at the end before it copies, so that two never write to one place.
            if append {
                pages.size = end;
            }
            append.then_some((at, end))
        };
        let result = self.write_at(src, at, wanted);
        if let Some((start, end)) = reserved {
            let done = result.as_ref().map_or(0, |&n| n as u64);
            let mut pages = self.pages.lock();
            if start + done < end && pages.size == end {
                pages.size = start + done;
            }
        }
        let n = result?;
        Ok((n, at + n as u64))
    }

    fn write_at(&self, src: &mut IoSource<'_>, start: u64, wanted: u64) -> Result<usize> {
        let end = start.saturating_add(wanted).min(MAX_SIZE);
        let mut pos = start;
        let outcome = loop {
            if pos >= end {
                break Ok(());
            }
            let stop = end.min((page_of(pos) + BATCH) * PAGE_SIZE);
            let prepared = {
                let mut pages = self.pages.lock();
                self.prepare(&mut pages, pos, stop)
            };
            let (frames, fault) = match prepared {
                Ok(x) => x,
                Err(e) => break Err(e),
            };
            let mut result = fault.map_or(Ok(()), Err);
            for &frame in &frames {
                let in_page = pos % PAGE_SIZE;
                let n = (PAGE_SIZE - in_page).min(stop - pos);
                match src
                    .take_phys(self.platform.memory(), PhysRange { addr: PhysAddr(frame.0 + in_page), len: n as usize })
                {
                    Ok(got) => {
                        pos += got as u64;
                        if (got as u64) < n {
                            result = Err(Errno::EFAULT);
                            break;
                        }
                    }
                    Err(e) => {
                        result = Err(e);
                        break;
                    }
                }
            }
            let pieces: Vec<Piece> = frames.iter().map(|f| Piece::Frame(*f)).collect();
            {
                let mut pages = self.pages.lock();
                if pos > start && pos > pages.size {
                    pages.size = pos;
                }
            }
            self.release(&pieces);
            if result.is_err() {
                break result;
            }
        };
        let n = usize::try_from(pos - start).unwrap_or(usize::MAX);
        match outcome {
            Err(e) if n == 0 => Err(e),
            _ => Ok(n),
        }
    }

    /// Frames for `pos..stop`, each with a reference of the caller's. Stops early at a lack of space, telling the reason.
    fn prepare(&self, pages: &mut Pages, pos: u64, stop: u64) -> Result<(Vec<PhysAddr>, Option<Errno>)> {
        let mut out = Vec::new();
        for index in page_of(pos)..page_end(stop) {
            let have = pages.map.get(&index).copied().flatten();
            let frame = match have {
                Some(frame) => frame,
                None => match self.fill(pages, index) {
                    Ok(frame) => frame,
                    Err(e) if out.is_empty() => return Err(e),
                    Err(e) => return Ok((out, Some(e))),
                },
            };
            self.platform.memory().share(frame);
            out.push(frame);
        }
        Ok((out, None))
    }

    /// Takes all frames of `first..last` pages out of the map; the caller releases them after unmapping.
    fn take_range(pages: &mut Pages, first: u64, last: u64) -> Vec<PhysAddr> {
        let frames: Vec<PhysAddr> = if last == u64::MAX {
            pages.map.split_off(&first).into_values().flatten().collect()
        } else {
            let indices: Vec<u64> = pages.map.range(first..last).map(|(&i, _)| i).collect();
            indices.iter().filter_map(|i| pages.map.remove(i).flatten()).collect()
        };
        pages.frames -= frames.len() as u64;
        frames
    }

    fn drop_frames(&self, frames: &[PhysAddr]) {
        if !frames.is_empty() {
            self.platform.memory().release(frames);
            self.quota.pages.give(frames.len() as u64);
        }
    }

    /// Zeroes `start..end` inside one page, where it has a frame (or gets one because the host file below shows there).
    fn zero_within(&self, pages: &mut Pages, start: u64, end: u64) -> Result<()> {
        if start >= end {
            return Ok(());
        }
        let index = page_of(start);
        let frame = match pages.map.get(&index) {
            Some(Some(frame)) => *frame,
            Some(None) => return Ok(()),
            None if start < pages.lower_len => self.fill(pages, index)?,
            None => return Ok(()),
        };
        self.platform.memory().zero(PhysAddr(frame.0 + start % PAGE_SIZE), (end - start) as usize)
    }

    /// ftruncate(2).
    pub fn truncate(&self, len: u64) -> Result<()> {
        if len > MAX_SIZE {
            return Err(Errno::EFBIG);
        }
        let (old, frames) = {
            let mut pages = self.pages.lock();
            let old = pages.size;
            if (len < old && pages.seals & seal::SHRINK != 0) || (len > old && pages.seals & seal::GROW != 0) {
                return Err(Errno::EPERM);
            }
            let mut frames = Vec::new();
            if len < old {
                frames = Self::take_range(&mut pages, page_end(len), u64::MAX);
                if !len.is_multiple_of(PAGE_SIZE) && pages.map.get(&page_of(len)).is_some_and(Option::is_some) {
                    self.zero_within(&mut pages, len, page_end(len) * PAGE_SIZE)?;
                }
                pages.lower_len = pages.lower_len.min(len);
            }
            pages.size = len;
            (old, frames)
        };
        if len < old {
            self.unmap(page_end(len) * PAGE_SIZE, !(PAGE_SIZE - 1));
        }
        self.drop_frames(&frames);
        Ok(())
    }

    /// fallocate(2) as Linux's tmpfs has it.
    pub fn allocate(&self, mode: u32, offset: u64, len: u64) -> Result<()> {
        const KEEP_SIZE: u32 = 1;
        const PUNCH_HOLE: u32 = 2;
        if mode & !(KEEP_SIZE | PUNCH_HOLE) != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        let end = offset.checked_add(len).filter(|&e| e <= MAX_SIZE).ok_or(Errno::EFBIG)?;
        if mode & PUNCH_HOLE != 0 {
            return self.punch(offset, end);
        }
        let (first, last) = (page_of(offset), page_end(end));
        {
            let pages = self.pages.lock();
            if end > pages.size && mode & KEEP_SIZE == 0 && pages.seals & seal::GROW != 0 {
                return Err(Errno::EPERM);
            }
        }
        let memory = self.platform.memory();
        let room = memory.limit().saturating_sub(memory.used()) / PAGE_SIZE;
        if last - first > self.quota.pages.free().min(room).saturating_add(self.allocated() / PAGE_SIZE) {
            return Err(Errno::ENOSPC);
        }
        let mut added = Vec::new();
        let mut at = first;
        while at < last {
            let stop = last.min(at + BATCH);
            let mut pages = self.pages.lock();
            for index in at..stop {
                if pages.map.get(&index).copied().flatten().is_none() {
                    if let Err(e) = self.fill(&mut pages, index) {
                        let frames: Vec<PhysAddr> =
                            added.iter().flat_map(|&i| Self::take_range(&mut pages, i, i + 1)).collect();
                        drop(pages);
                        self.drop_frames(&frames);
                        return Err(if e == Errno::ENOMEM { Errno::ENOSPC } else { e });
                    }
                    // Pages that show the host file's bytes must not be taken back as if they were new zeroes.
                    if index * PAGE_SIZE >= pages.lower_len {
                        added.push(index);
                    }
                }
            }
            at = stop;
        }
        if mode & KEEP_SIZE == 0 {
            let mut pages = self.pages.lock();
            pages.size = pages.size.max(end);
        }
        Ok(())
    }

    fn punch(&self, start: u64, end: u64) -> Result<()> {
        let (first, last) = (page_end(start), page_of(end));
        let frames = {
            let mut pages = self.pages.lock();
            if pages.seals & (seal::WRITE | seal::FUTURE_WRITE) != 0 {
                return Err(Errno::EPERM);
            }
            if first > last {
                self.zero_within(&mut pages, start, end)?;
                return Ok(());
            }
            self.zero_within(&mut pages, start, first * PAGE_SIZE)?;
            if end > last * PAGE_SIZE {
                self.zero_within(&mut pages, last * PAGE_SIZE, end)?;
            }
            let shown = page_end(pages.lower_len);
            let holes = pages.map.len() as u64 - pages.frames;
            if last < shown && (last - first).saturating_add(holes) > MAX_EXPLICIT_HOLES {
                return Err(Errno::EOPNOTSUPP);
            }
            let frames = Self::take_range(&mut pages, first, last);
            if last >= shown {
                pages.lower_len = pages.lower_len.min(first * PAGE_SIZE);
            } else {
                pages.map.extend((first..last).map(|index| (index, None)));
            }
            frames
        };
        self.unmap(first * PAGE_SIZE, last * PAGE_SIZE);
        self.drop_frames(&frames);
        Ok(())
    }

    /// SEEK_DATA (`data`) or SEEK_HOLE from `pos`; ENXIO past the end.
    pub fn seek_data(&self, pos: u64, data: bool) -> Result<u64> {
        let pages = self.pages.lock();
        if pos >= pages.size {
            return Err(Errno::ENXIO);
        }
        let (mut index, last) = (page_of(pos), page_end(pages.size));
        let lower_end = page_end(pages.lower_len);
        let at = |i: u64| (i * PAGE_SIZE).max(pos).min(pages.size);
        if data {
            // Below `lower_end` all but explicit holes is data.
            while index < lower_end.min(last) {
                match pages.map.get(&index) {
                    Some(None) => index += 1,
                    _ => return Ok(at(index)),
                }
            }
            let next = pages.map.range(index..last).find(|(_, slot)| slot.is_some());
            return next.map(|(&i, _)| at(i)).ok_or(Errno::ENXIO);
        }
        let mut slots = pages.map.range(index..last).peekable();
        while index < last {
            match slots.peek() {
                Some(&(&i, slot)) if i == index => {
                    if slot.is_none() {
                        break;
                    }
                    index += 1;
                    slots.next();
                }
                _ if index >= lower_end => break,
                next => index = next.map_or(last, |&(&i, _)| i).min(lower_end),
            }
        }
        Ok(at(index))
    }
}

fn read_exactly(lower: &Content, offset: u64, frame: PhysAddr, want: usize) -> Result<()> {
    let mut got = 0;
    while got < want {
        let n = lower
            .read_phys(offset + got as u64, PhysRange { addr: PhysAddr(frame.0 + got as u64), len: want - got })?;
        if n == 0 {
            break;
        }
        got += n;
    }
    Ok(())
}

impl Drop for FileData {
    fn drop(&mut self) {
        let pages = core::mem::take(self.pages.get_mut());
        let frames: Vec<PhysAddr> = pages.map.into_values().flatten().collect();
        self.drop_frames(&frames);
    }
}

impl Mappable for FileData {
    fn key(&self) -> (u64, u64) {
        self.key
    }

    fn page(&self, offset: u64, write: bool) -> Result<MappedPage> {
        let mut pages = self.pages.lock();
        if offset >= pages.size {
            return Err(Errno::EFAULT);
        }
        let index = page_of(offset);
        let frame = match pages.map.get(&index).copied().flatten() {
            Some(frame) => frame,
            None => self.fill(&mut pages, index)?,
        };
        self.platform.memory().share(frame);
        if write {
            self.written.store(true, Ordering::Relaxed);
        }
        Ok(MappedPage::Frame(frame))
    }

    fn size(&self) -> u64 {
        self.length()
    }

    fn punch_hole(&self, start: u64, end: u64) -> Result<()> {
        /// FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE.
        const PUNCH: u32 = 3;
        self.allocate(PUNCH, start, end.saturating_sub(start))
    }

    fn is_resident(&self, offset: u64) -> bool {
        matches!(self.pages.lock().map.get(&page_of(offset)), Some(Some(_)))
    }

    fn add_mapper(&self, space: &Arc<AddressSpace>) {
        self.mappers.add(space);
    }
}
