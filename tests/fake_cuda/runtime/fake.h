// What the files of the fake runtime share: counts, the error of a thread, and which addresses are the device's.
//
// The runtime takes the place of libcudart by LD_PRELOAD, under an unchanged CUDA build of torch, on a machine without
// a GPU. torch's own allocator, pools, streams, events and threads run on it. What is faked:
// * memory of the device is memory of the host up to a capacity, at addresses that the host cannot read;
// * copies and fills are done at once, on the calling thread, and refuse freed memory;
// * kernels, those of cuBLAS too, do nothing: results of operators are whatever their memory held;
// * work is complete as it is launched, but an event says so after a wait or several queries, as if late.
// So it shows calls, memory, waits and errors. It shows no numbers, and no missing order between streams.

#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>

#if CUDART_VERSION < 13000
#error "the fake runtime is written for the headers of CUDA 13"
#endif

#define EXPORT extern "C"

namespace fake {

#define FAKE_COUNTS(X)                                                                        \
    X(mallocs)              /* of device memory */                                            \
    X(frees)                                                                                  \
    X(used_nbytes)          /* of device memory, now */                                       \
    X(refused_mallocs)      /* beyond the capacity */                                         \
    X(kernels)                                                                                \
    X(h2d_copies)                                                                             \
    X(h2d_nbytes)                                                                             \
    X(d2h_copies)                                                                             \
    X(d2h_nbytes)                                                                             \
    X(d2d_copies)                                                                             \
    X(pageable_copies)      /* between device and host memory that is not pinned */           \
    X(events_created)                                                                         \
    X(events_recorded)                                                                        \
    X(event_waits)          /* of the host, for an event that was not known to be complete */ \
    X(spinning_event_waits) /* of those: the event was made without cudaEventBlockingSync */  \
    X(stream_waits)                                                                           \
    X(device_waits)                                                                           \
    X(streams_created)                                                                        \
    X(registrations)        /* of host memory, by cudaHostRegister */                         \
    X(unregistrations)                                                                        \
    X(registered_nbytes)    /* of whole pages, now */                                         \
    X(host_allocs)          /* by cudaHostAlloc */                                            \
    X(misuses)              /* calls that CUDA forbids; each is written to stderr */

struct Counts {
#define FAKE_COUNT(name) std::atomic<long> name{0};
    FAKE_COUNTS(FAKE_COUNT)
#undef FAKE_COUNT
};

extern Counts counts;

// Return `error`, and keep it for the calling thread's cudaGetLastError, as CUDA does.
cudaError_t result(cudaError_t error);

// Count and report a call that CUDA forbids, and return `error`.
cudaError_t misuse(cudaError_t error, const char *what, const void *address);

// Device memory. Both return the error of the call: cudaErrorMemoryAllocation where the capacity is too small.
cudaError_t allocate(void **address, size_t nbytes);
cudaError_t release(void *address);

// The same in two steps, for addresses that are reserved first (cuMem*): bytes count as they are taken, and can be
// copied to and from as they are mapped.
char *reserve_addresses(size_t nbytes);
bool take_bytes(size_t nbytes);
void give_back_bytes(size_t nbytes);
void map_bytes(char *address, size_t nbytes);
void unmap_bytes(char *address);

// Let the events of all streams be complete, as after a wait for the device.
void complete_all();

}  // namespace fake
