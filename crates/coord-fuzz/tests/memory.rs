//! What decoding takes of memory. One test, since the allocator counts for the whole process.

use coord_core::wire::CHUNK_HEADER_BYTES;
use coord_fuzz::Meter;
use coord_fuzz::sealed::{Stored, maps};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

const MEBIBYTE: usize = 1 << 20;

/// A map whose chunk of that section holds this instead, and whose manifest says so many slots.
fn bomb(section: &str, raw: &[u8], slots: &str) -> Stored {
    let mut map = maps().swap_remove(0).opened();
    let manifest = String::from_utf8(map.manifest.clone()).expect("text");
    assert!(manifest.contains("\"slots\":5"), "{manifest}");
    map.manifest = manifest.replace("\"slots\":5", slots).into_bytes();
    let number =
        ["owners", "nodes", "epochs", "motions", "annex"].iter().position(|s| *s == section);
    let is_it = |chunk: &&mut Vec<u8>| Some(usize::from(chunk[5])) == number;
    let chunk = map.chunks.iter_mut().find(is_it).expect("the map has such a section");
    chunk.truncate(CHUNK_HEADER_BYTES);
    // Compressed.
    chunk[6] = 1;
    chunk.extend_from_slice(raw);
    map.sealed()
}

/// 8 KB in the store made every reader take 1.6 GB for 4 s.
#[test]
fn little_that_is_stored_takes_little_memory() {
    let meter = Meter::new(
        || ALLOCATOR.current_usage(),
        || ALLOCATOR.peak_usage(),
        || ALLOCATOR.reset_peak_usage(),
    );
    let slots = "\"slots\":65534";
    let nulls = || b"[".iter().chain(b"null,".repeat(12 * MEBIBYTE).iter()).copied().collect();
    let bombs: [(&str, Vec<u8>, &str); 4] = [
        ("nodes", nulls(), slots),
        ("nodes", b"[\"".iter().copied().chain(vec![b'a'; 60 * MEBIBYTE]).collect(), slots),
        ("nodes", vec![b' '; 60 * MEBIBYTE], slots),
        ("annex", vec![b'a'; 60 * MEBIBYTE], "\"slots\":5"),
    ];
    for (section, raw, slots) in bombs {
        let stored = bomb(section, &raw, slots);
        assert!(stored.len() < 32 * 1024, "{} bytes are stored", stored.len());
        drop(raw);
        let (read, taken) = meter.measure(|| stored.read().map(drop));
        let error = read.expect_err("no map");
        assert!(taken < 16 * MEBIBYTE, "{section}: {taken} bytes, {error}");
    }
}
