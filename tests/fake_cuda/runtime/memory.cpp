// Memory of the device and pinned memory of the host.
//
// Two ranges of addresses are reserved, one at a fixed distance from the other. Device addresses are handed out of the
// first, which nobody can read or write, so that host code which touches device memory crashes, as beside a GPU. The
// bytes themselves are in the second. No address is handed out twice, so that freed memory is known as such.

#include "fake.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>

namespace {

constexpr size_t ARENA_NBYTES = size_t(8) << 40;
constexpr size_t PAGE_NBYTES = 4096;
constexpr size_t GRANULARITY = 512;  // of addresses, as cudaMalloc aligns them

size_t capacity_from_environment() {
    const char *text = std::getenv("FAKE_CUDA_CAPACITY");
    return text != nullptr ? std::strtoull(text, nullptr, 10) : size_t(16) << 30;
}

char *map_arena(int protection) {
    void *arena = mmap(nullptr, ARENA_NBYTES, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (arena == MAP_FAILED) {
        std::abort();
    }
    return static_cast<char *>(arena);
}

using Ranges = std::map<char *, size_t>;  // first address -> bytes

std::mutex mutex;
size_t capacity = capacity_from_environment();
size_t pinnable = SIZE_MAX;
char *const addresses = map_arena(PROT_NONE);
char *const bytes = map_arena(PROT_READ | PROT_WRITE);
size_t num_reserved = 0;  // of `addresses`
Ranges device_memory;     // allocated or mapped
Ranges pinned_memory;     // whole pages of the host

bool is_device(const void *address) {
    auto at = static_cast<const char *>(address);
    return at >= addresses && at < addresses + ARENA_NBYTES;
}

// Where the bytes of an address lie.
char *bytes_of(const void *address) {
    auto at = const_cast<char *>(static_cast<const char *>(address));
    return is_device(address) ? bytes + (at - addresses) : at;
}

// Whether all of a range is within `ranges`, which may have to be several in a row.
bool covers(const Ranges &ranges, const void *address, size_t nbytes) {
    auto at = const_cast<char *>(static_cast<const char *>(address));
    char *end = at + std::max(nbytes, size_t(1));
    while (at < end) {
        auto next = ranges.upper_bound(at);
        if (next == ranges.begin()) {
            return false;
        }
        auto found = std::prev(next);
        if (at >= found->first + found->second) {
            return false;
        }
        at = found->first + found->second;
    }
    return true;
}

bool overlaps(const Ranges &ranges, char *first, size_t nbytes) {
    auto next = ranges.lower_bound(first + nbytes);
    return next != ranges.begin() && std::prev(next)->first + std::prev(next)->second > first;
}

char *page_of(const void *address) {
    return reinterpret_cast<char *>(reinterpret_cast<uintptr_t>(address) / PAGE_NBYTES * PAGE_NBYTES);
}

size_t page_nbytes(const void *address, size_t nbytes) {
    char *end = page_of(static_cast<const char *>(address) + nbytes + PAGE_NBYTES - 1);
    return end - page_of(address);
}

// Copy, after what CUDA checks and what it would crash on.
cudaError_t copy(void *target, const void *source, size_t nbytes, cudaMemcpyKind kind) {
    if (nbytes == 0) {
        return cudaSuccess;
    }
    bool to_device = is_device(target);
    bool from_device = is_device(source);
    {
        std::lock_guard<std::mutex> lock(mutex);
        if (to_device && !covers(device_memory, target, nbytes)) {
            return fake::misuse(cudaErrorIllegalAddress, "a copy to device memory that was freed", target);
        }
        if (from_device && !covers(device_memory, source, nbytes)) {
            return fake::misuse(cudaErrorIllegalAddress, "a copy from device memory that was freed", source);
        }
        const void *host = to_device ? source : target;
        if (to_device != from_device && !covers(pinned_memory, host, nbytes)) {
            fake::counts.pageable_copies++;
        }
    }
    bool said_to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool said_from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (kind != cudaMemcpyDefault && (said_to_device != to_device || said_from_device != from_device)) {
        return fake::misuse(cudaErrorInvalidValue, "a copy in another direction than it says", target);
    }
    if (to_device && from_device) {
        fake::counts.d2d_copies++;
    } else if (to_device) {
        fake::counts.h2d_copies++;
        fake::counts.h2d_nbytes += nbytes;
    } else if (from_device) {
        fake::counts.d2h_copies++;
        fake::counts.d2h_nbytes += nbytes;
    }
    std::memmove(bytes_of(target), bytes_of(source), nbytes);
    return cudaSuccess;
}

cudaError_t fill(void *target, int value, size_t nbytes) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        if (nbytes != 0 && !covers(device_memory, target, nbytes)) {
            return fake::misuse(cudaErrorIllegalAddress, "a fill of device memory that was freed", target);
        }
    }
    std::memset(bytes_of(target), value, nbytes);
    return cudaSuccess;
}

}  // namespace

namespace fake {

char *reserve_addresses(size_t nbytes) {
    std::lock_guard<std::mutex> lock(mutex);
    // two ranges do not touch: what reads over the end of one is not in the next
    constexpr size_t align = size_t(2) << 20;
    char *address = addresses + num_reserved;
    num_reserved += (nbytes + GRANULARITY + align - 1) / align * align;
    if (num_reserved > ARENA_NBYTES) {
        std::abort();
    }
    return address;
}

bool take_bytes(size_t nbytes) {
    std::lock_guard<std::mutex> lock(mutex);
    if (counts.used_nbytes + nbytes > capacity) {
        counts.refused_mallocs++;
        return false;
    }
    counts.used_nbytes += nbytes;
    return true;
}

void give_back_bytes(size_t nbytes) {
    counts.used_nbytes -= nbytes;
}

void map_bytes(char *address, size_t nbytes) {
    std::lock_guard<std::mutex> lock(mutex);
    device_memory[address] = nbytes;
}

void unmap_bytes(char *address) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = device_memory.find(address);
    if (found != device_memory.end()) {
        madvise(bytes_of(address), found->second / PAGE_NBYTES * PAGE_NBYTES, MADV_DONTNEED);
        device_memory.erase(found);
    }
}

cudaError_t allocate(void **address, size_t nbytes) {
    if (!take_bytes(nbytes)) {
        return result(cudaErrorMemoryAllocation);
    }
    *address = reserve_addresses(nbytes);
    map_bytes(static_cast<char *>(*address), nbytes);
    counts.mallocs++;
    return cudaSuccess;
}

cudaError_t release(void *address) {
    if (address == nullptr) {
        return cudaSuccess;
    }
    size_t nbytes;
    {
        std::lock_guard<std::mutex> lock(mutex);
        auto found = device_memory.find(static_cast<char *>(address));
        if (found == device_memory.end()) {
            return misuse(cudaErrorInvalidValue, "a free of what was not allocated", address);
        }
        nbytes = found->second;
    }
    unmap_bytes(static_cast<char *>(address));
    give_back_bytes(nbytes);
    counts.frees++;
    return cudaSuccess;
}

}  // namespace fake

// How much device memory there is, from now on; what is allocated stays.
EXPORT void fake_cuda_set_capacity(size_t nbytes) {
    std::lock_guard<std::mutex> lock(mutex);
    capacity = nbytes;
}

// How much host memory can be pinned, from now on.
EXPORT void fake_cuda_set_pinnable(size_t nbytes) {
    std::lock_guard<std::mutex> lock(mutex);
    pinnable = nbytes;
}

EXPORT cudaError_t cudaMalloc(void **address, size_t nbytes) {
    return fake::allocate(address, nbytes);
}

EXPORT cudaError_t cudaFree(void *address) {
    fake::complete_all();  // it waits for the device
    return fake::release(address);
}

EXPORT cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    std::lock_guard<std::mutex> lock(mutex);
    size_t used = fake::counts.used_nbytes;
    *total = capacity;
    *free = capacity > used ? capacity - used : 0;
    return cudaSuccess;
}

// The allocator of CUDA itself (backend:cudaMallocAsync): there is one pool, which gives back at once.

EXPORT cudaError_t cudaMallocAsync(void **address, size_t nbytes, cudaStream_t) {
    return fake::allocate(address, nbytes);
}

EXPORT cudaError_t cudaFreeAsync(void *address, cudaStream_t) {
    return fake::release(address);
}

EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int) {
    *pool = reinterpret_cast<cudaMemPool_t>(1);
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void *value) {
    *static_cast<uint64_t *>(value) = fake::counts.used_nbytes;
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void *) {
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) {
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc *, size_t) {
    return cudaSuccess;
}

// Copies and fills.

EXPORT cudaError_t cudaMemcpy(void *target, const void *source, size_t nbytes, cudaMemcpyKind kind) {
    fake::counts.stream_waits++;
    return copy(target, source, nbytes, kind);
}

EXPORT cudaError_t cudaMemcpyAsync(
    void *target, const void *source, size_t nbytes, cudaMemcpyKind kind, cudaStream_t) {
    return copy(target, source, nbytes, kind);
}

EXPORT cudaError_t cudaMemset(void *target, int value, size_t nbytes) {
    return fill(target, value, nbytes);
}

EXPORT cudaError_t cudaMemsetAsync(void *target, int value, size_t nbytes, cudaStream_t) {
    return fill(target, value, nbytes);
}

// Host memory. As CUDA does, whole pages are registered, and no page twice.

EXPORT cudaError_t cudaHostRegister(void *address, size_t nbytes, unsigned) {
    std::lock_guard<std::mutex> lock(mutex);
    char *first = page_of(address);
    size_t whole = page_nbytes(address, nbytes);
    if (overlaps(pinned_memory, first, whole)) {
        return fake::result(cudaErrorHostMemoryAlreadyRegistered);
    }
    if (fake::counts.registered_nbytes + whole > pinnable) {
        return fake::result(cudaErrorMemoryAllocation);
    }
    pinned_memory[first] = whole;
    fake::counts.registered_nbytes += whole;
    fake::counts.registrations++;
    return cudaSuccess;
}

EXPORT cudaError_t cudaHostUnregister(void *address) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = pinned_memory.find(page_of(address));
    if (found == pinned_memory.end()) {
        return fake::result(cudaErrorHostMemoryNotRegistered);
    }
    fake::counts.registered_nbytes -= found->second;
    fake::counts.unregistrations++;
    pinned_memory.erase(found);
    return cudaSuccess;
}

EXPORT cudaError_t cudaHostAlloc(void **address, size_t nbytes, unsigned) {
    size_t whole = page_nbytes(nullptr, std::max(nbytes, size_t(1)));
    *address = std::aligned_alloc(PAGE_NBYTES, whole);
    if (*address == nullptr) {
        return fake::result(cudaErrorMemoryAllocation);
    }
    std::lock_guard<std::mutex> lock(mutex);
    pinned_memory[static_cast<char *>(*address)] = whole;
    fake::counts.host_allocs++;
    return cudaSuccess;
}

EXPORT cudaError_t cudaFreeHost(void *address) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        if (pinned_memory.erase(static_cast<char *>(address)) == 0) {
            return fake::misuse(cudaErrorInvalidValue, "a free of host memory that was not allocated", address);
        }
    }
    std::free(address);
    return cudaSuccess;
}

EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *address) {
    std::lock_guard<std::mutex> lock(mutex);
    std::memset(attributes, 0, sizeof *attributes);
    if (covers(device_memory, address, 1)) {
        attributes->type = cudaMemoryTypeDevice;
        attributes->devicePointer = const_cast<void *>(address);
    } else if (covers(pinned_memory, address, 1)) {
        attributes->type = cudaMemoryTypeHost;
        attributes->devicePointer = const_cast<void *>(address);
        attributes->hostPointer = const_cast<void *>(address);
    } else {
        attributes->type = cudaMemoryTypeUnregistered;
        attributes->hostPointer = const_cast<void *>(address);
    }
    return cudaSuccess;
}
