//! An image of extended state without its zeroes: most of what a sleeping thread keeps is. Owns the form; knows nothing of components.

/// Bytes that are kept or left out together.
const BLOCK: usize = 64;

/// An image of at most 64 blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packed {
    /// Which blocks are kept, the first in bit 0.
    kept: u64,
    bytes: Box<[u8]>,
}

impl Packed {
    /// From an image; what lies beyond 4096 bytes is not kept.
    pub fn new(image: &[u8]) -> Packed {
        let mut kept = 0u64;
        let blocks = || image.chunks(BLOCK).take(u64::BITS as usize).enumerate();
        for (i, block) in blocks() {
            if block.iter().any(|&b| b != 0) {
                kept |= 1 << i;
            }
        }
        let mut bytes = Vec::with_capacity(kept.count_ones() as usize * BLOCK);
        for (_, block) in blocks().filter(|(i, _)| kept & (1 << i) != 0) {
            bytes.extend_from_slice(block);
        }
        Packed { kept, bytes: bytes.into_boxed_slice() }
    }

    /// The image, with zeroes up to `len` bytes, which is not less than it had.
    pub fn image(&self, len: usize) -> Vec<u8> {
        let mut image = vec![0; len];
        let mut rest = &*self.bytes;
        for (_, block) in image.chunks_mut(BLOCK).enumerate().filter(|(i, _)| *i < 64 && self.kept & (1 << i) != 0) {
            let n = block.len().min(rest.len());
            block[..n].copy_from_slice(&rest[..n]);
            rest = &rest[n..];
        }
        image
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gives_back_what_it_got() {
        for len in [0, 1, 63, 64, 65, 576, 2688, 2696, 4096] {
            let mut image = vec![0; len];
            for at in [0, 24, 25, 63, 64, 127, 512, 575, 1000, 2687, 2690, 4095] {
                assert_eq!(Packed::new(&image).image(len), image);
                if let Some(b) = image.get_mut(at) {
                    *b = at as u8 | 1;
                }
            }
            let packed = Packed::new(&image);
            assert_eq!(packed.image(len), image);
            assert_eq!(packed.image(len + 100)[..len], image);
            assert_eq!(packed.image(len + 100)[len..], vec![0; 100]);
        }
        let mut image = vec![0; 2688];
        image[24] = 1;
        image[2000] = 1;
        assert_eq!(Packed::new(&image).bytes.len(), 2 * BLOCK);
    }
}
