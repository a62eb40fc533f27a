//! Bit packing: numbers of the same width, one after the other, the least significant bit first.

/// The width of the numbers 0 to `max`.
pub(super) fn width(max: u32) -> u32 {
    u32::BITS - max.leading_zeros()
}

/// The bytes that `count` numbers of `width` bits take.
pub(super) fn packed_len(count: usize, width: u32) -> usize {
    (count * width as usize).div_ceil(8)
}

/// Packs numbers below `2^width`, where `width` is at most 32.
pub(super) fn pack(numbers: impl Iterator<Item = u32>, width: u32) -> Vec<u8> {
    let mut out = Vec::with_capacity(packed_len(numbers.size_hint().0, width));
    let (mut buffer, mut filled) = (0_u64, 0_u32);
    for number in numbers {
        buffer |= u64::from(number) << filled;
        filled += width;
        while filled >= 8 {
            out.push((buffer & 0xff) as u8);
            buffer >>= 8;
            filled -= 8;
        }
    }
    if filled > 0 {
        out.push((buffer & 0xff) as u8);
    }
    out
}

/// Unpacks `count` numbers; `None` unless there are exactly as many bytes as they take and the bits
/// left over are 0.
pub(super) fn unpack(bytes: &[u8], count: usize, width: u32) -> Option<Vec<u32>> {
    if bytes.len() != packed_len(count, width) {
        return None;
    }
    let mask = (1_u64 << width) - 1;
    let mut bytes = bytes.iter();
    let (mut buffer, mut filled) = (0_u64, 0_u32);
    let mut numbers = Vec::with_capacity(count);
    for _ in 0..count {
        while filled < width {
            buffer |= u64::from(*bytes.next()?) << filled;
            filled += 8;
        }
        numbers.push(u32::try_from(buffer & mask).ok()?);
        buffer >>= width;
        filled -= width;
    }
    (buffer == 0).then_some(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn widths() {
        let widths: Vec<_> = [0, 1, 2, 3, 4, 1000, 65_534].into_iter().map(width).collect();
        assert_eq!(widths, [0, 1, 2, 2, 3, 10, 16]);
    }

    proptest! {
        #[test]
        fn what_is_packed_unpacks(
            width in 0..=17_u32, numbers in prop::collection::vec(any::<u32>(), 0..99),
        ) {
            let numbers: Vec<u32> = numbers.into_iter().map(|n| n & ((1 << width) - 1)).collect();
            let packed = pack(numbers.iter().copied(), width);
            prop_assert_eq!(packed.len(), packed_len(numbers.len(), width));
            prop_assert_eq!(unpack(&packed, numbers.len(), width), Some(numbers.clone()));
            let longer = [packed, vec![0]].concat();
            prop_assert_eq!(unpack(&longer, numbers.len(), width), None);
        }
    }
}
