//! Tests of this module.
use std::sync::Arc;

use super::data::{FileData, seal};
use super::*;
use crate::Errno;
use crate::mm::backing::MappedPage;
use crate::mm::{IoDest, IoSource, Mappable};
use crate::platform::host::AttrChange;
use crate::platform::sim::SimPlatform;

fn fs() -> (Arc<SimPlatform>, Arc<TmpFs>) {
    let platform = SimPlatform::new(1);
    let options = TmpfsOptions { size: Some(1 << 20), inodes: Some(64), ..TmpfsOptions::default() };
    (platform.clone(), TmpFs::new(platform, options, "tmpfs").unwrap())
}

fn write(data: &FileData, pos: u64, bytes: &[u8]) -> crate::Result<usize> {
    data.write(&mut IoSource::kernel(bytes), pos, false).map(|r| r.0)
}

fn read(data: &FileData, pos: u64, len: usize) -> Vec<u8> {
    let mut buf = vec![0xee; len];
    let n = data.read(&mut IoDest::kernel(&mut buf), pos).unwrap();
    buf.truncate(n);
    buf
}

fn regular(fs: &TmpFs) -> Arc<FileData> {
    let inode = TmpInode::new(fs.shared(), Create::Regular, 0o644, 0, 0).unwrap();
    inode.data().unwrap().clone()
}

#[test]
fn sparse_contents() {
    let (_, fs) = fs();
    let data = regular(&fs);
    assert_eq!(write(&data, 10_000, b"hello"), Ok(5));
    assert_eq!(data.length(), 10_005);
    assert_eq!(data.allocated(), 4096);
    assert_eq!(read(&data, 9_998, 100), b"\0\0hello");
    assert_eq!(data.seek_data(0, true), Ok(8192));
    assert_eq!(data.seek_data(9000, true), Ok(9000));
    assert_eq!(data.seek_data(0, false), Ok(0));
    assert_eq!(data.seek_data(8192, false), Ok(10_005));
    assert_eq!(data.seek_data(10_005, true), Err(Errno::ENXIO));
    data.truncate(10_002).unwrap();
    data.truncate(10_010).unwrap();
    assert_eq!(read(&data, 10_000, 100), b"he\0\0\0\0\0\0\0\0");
    assert_eq!(data.write(&mut IoSource::kernel(b"end"), 0, true), Ok((3, 10_013)));
}

#[test]
fn quota_and_release() {
    let (platform, fs) = fs();
    let before = platform.memory().used();
    let data = regular(&fs);
    let big = vec![7u8; 2 << 20];
    assert_eq!(write(&data, 0, &big), Ok(1 << 20));
    assert_eq!(write(&data, 1 << 20, b"x"), Err(Errno::ENOSPC));
    assert_eq!(data.allocate(0, 0, 2 << 20), Err(Errno::ENOSPC));
    // Punching a hole gives pages back; its edges are zeroed.
    data.allocate(3, 100, 8192).unwrap();
    assert_eq!(data.allocated(), (1 << 20) - 4096);
    assert_eq!(read(&data, 99, 3), [7, 0, 0]);
    assert_eq!(read(&data, 8291, 2), [0, 7]);
    drop(data);
    assert_eq!(platform.memory().used(), before);
    assert_eq!(fs.shared().quota.pages.used(), 0);
}

#[test]
fn mapped_pages_are_the_file() {
    let (platform, fs) = fs();
    let data = regular(&fs);
    data.truncate(5000).unwrap();
    let Ok(MappedPage::Frame(frame)) = data.page(4096, true) else { panic!("no frame") };
    platform.memory().write(frame, b"mapped").unwrap();
    assert_eq!(read(&data, 4096, 6), b"mapped");
    assert!(data.page(8192, false).is_err());
    // Truncation in the page zeroes its tail, seen by mapping and read alike.
    data.truncate(4098).unwrap();
    data.truncate(4102).unwrap();
    assert_eq!(read(&data, 4096, 6), b"ma\0\0\0\0");
    platform.memory().release(&[frame]);
}

#[test]
fn seals() {
    let (_, fs) = fs();
    let data = regular(&fs);
    assert_eq!(data.add_seals(seal::WRITE), Err(Errno::EPERM));
    data.init_seals(0);
    write(&data, 0, b"abc").unwrap();
    data.add_seals(seal::SHRINK | seal::GROW).unwrap();
    assert_eq!(data.truncate(1), Err(Errno::EPERM));
    assert_eq!(write(&data, 2, b"xy"), Err(Errno::EPERM));
    assert_eq!(write(&data, 2, b"x"), Ok(1));
    data.add_seals(seal::WRITE | seal::SEAL).unwrap();
    assert_eq!(write(&data, 0, b"x"), Err(Errno::EPERM));
    assert_eq!(data.add_seals(seal::EXEC), Err(Errno::EPERM));
}

#[test]
fn names_and_links() {
    let (_, fs) = fs();
    let root = fs.root();
    let a = root.create(b"a", Create::Regular, 0o644, 1, 2).unwrap();
    let dir = root.create(b"d", Create::Directory, 0o755, 0, 0).unwrap();
    assert_eq!(root.stat().unwrap().nlink, 3);
    dir.link(b"b", &a).unwrap();
    assert_eq!(a.stat().unwrap().nlink, 2);
    assert_eq!(root.rmdir(b"d"), Err(Errno::ENOTEMPTY));
    assert_eq!(root.rename(b"a", &dir, b"b", 0), Ok(()));
    // Two names of one file: rename(2) does nothing.
    assert!(root.lookup(b"a").is_ok());
    root.create(b"e", Create::Directory, 0o755, 0, 0).unwrap();
    assert_eq!(root.rename(b"e", &dir, b"b", 0), Err(Errno::ENOTDIR));
    root.rename(b"e", &root, b"a", 2).unwrap();
    assert!(root.lookup(b"e").unwrap().stat().unwrap().mode & 0o170000 == 0o100000);
    root.rename(b"a", &dir, b"sub", 0).unwrap();
    assert_eq!((root.stat().unwrap().nlink, dir.stat().unwrap().nlink), (3, 3));
    dir.unlink(b"b").unwrap();
    root.unlink(b"e").unwrap();
    assert_eq!(a.stat().unwrap().nlink, 0);
    a.set_attr(&AttrChange { size: Some(5), ..AttrChange::default() }).unwrap();
}

#[test]
fn deep_trees_are_dropped_without_recursion() {
    let platform = SimPlatform::new(1);
    let options = TmpfsOptions { inodes: Some(100_000), ..TmpfsOptions::default() };
    let fs = TmpFs::new(platform, options, "tmpfs").unwrap();
    let mut at = fs.root();
    for _ in 0..60_000 {
        at = at.create(b"d", Create::Directory, 0o755, 0, 0).unwrap();
    }
    drop(at);
    let shared = fs.shared().clone();
    drop(fs);
    assert_eq!(shared.quota.inodes.used(), 0);
}

#[test]
fn inodes_are_bounded() {
    let (_, fs) = fs();
    let made =
        (0..100).take_while(|i| fs.root().create(format!("f{i}").as_bytes(), Create::Regular, 0o644, 0, 0).is_ok());
    assert_eq!(made.count(), 63);
}
