//! What clients that announce much take of memory. One test, since the allocator counts for the whole process.

use coord_cluster::fuzzing;
use coord_fuzz::Meter;
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

const CONNECTIONS: usize = 1_000;
/// Of one connection: the buffers of its two directions, its task, the client's end, and twice what it has sent.
const CONNECTION_MAX: usize = 64 * 1024;

/// The places of a thousand announced frames of 4 MiB were 4 GiB.
#[test]
fn an_announced_frame_takes_no_memory() {
    let meter = Meter::new(
        || ALLOCATOR.current_usage(),
        || ALLOCATOR.peak_usage(),
        || ALLOCATOR.reset_peak_usage(),
    );
    let (served, taken) = meter.measure(|| fuzzing::announced(CONNECTIONS));
    served.expect("all are served");
    println!("{} bytes for each of {CONNECTIONS} connections", taken / CONNECTIONS);
    assert!(taken < CONNECTIONS * CONNECTION_MAX, "{taken} bytes");
}
