// libcuda.so.1: what torch asks of the driver itself. Kernels and modules do nothing; what the allocator's expandable
// segments need is done by memory.cpp, in the library that is loaded first.
// Without cuda.h: the names below take no arguments that they do not use, as in cublas.cpp.

#include "fake.h"

#include <cstdint>
#include <map>
#include <mutex>

#define NOTHING(name)   \
    EXPORT int name() { \
        return 0;       \
    }

namespace {

constexpr int OUT_OF_MEMORY = 2;
constexpr int INVALID_VALUE = 1;
constexpr int NOT_SUPPORTED = 801;
constexpr size_t GRANULARITY_NBYTES = size_t(2) << 20;

std::mutex mutex;
std::map<uint64_t, size_t> handles;  // of memory without an address -> bytes
uint64_t last_handle = 0;

}  // namespace

NOTHING(cuCtxSetCurrent)
NOTHING(cuDevicePrimaryCtxRetain)
NOTHING(cuFuncGetAttribute)
NOTHING(cuFuncSetAttribute)
NOTHING(cuFuncSetCacheConfig)
NOTHING(cuLaunchCooperativeKernel)
NOTHING(cuLaunchKernel)
NOTHING(cuLinkAddData_v2)
NOTHING(cuLinkComplete)
NOTHING(cuLinkCreate_v2)
NOTHING(cuModuleGetFunction)
NOTHING(cuModuleLoad)
NOTHING(cuModuleLoadData)
NOTHING(cuModuleLoadDataEx)
NOTHING(cuModuleUnload)
NOTHING(cuOccupancyMaxActiveBlocksPerMultiprocessor)
NOTHING(cuPointerGetAttribute)
NOTHING(cuTensorMapEncodeTiled)

EXPORT int cuCtxGetCurrent(void **context) {
    *context = reinterpret_cast<void *>(1);
    return 0;
}

EXPORT int cuDeviceGet(int *device, int) {
    *device = 0;
    return 0;
}

EXPORT int cuDeviceGetAttribute(int *value, int, int) {
    *value = 0;
    return 0;
}

EXPORT int cuDevicePrimaryCtxGetState(int, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return 0;
}

EXPORT int cuGetErrorString(int, const char **text) {
    *text = "an error of the fake driver";
    return 0;
}

// Memory and addresses apart: addresses are reserved, memory is made, and mapped there.

EXPORT int cuMemGetAllocationGranularity(size_t *nbytes, const void *, int) {
    *nbytes = GRANULARITY_NBYTES;
    return 0;
}

EXPORT int cuMemAddressReserve(char **address, size_t nbytes, size_t, uint64_t, uint64_t) {
    *address = fake::reserve_addresses(nbytes);
    return 0;
}

NOTHING(cuMemAddressFree)  // they are not handed out again
NOTHING(cuMemSetAccess)

EXPORT int cuMemCreate(uint64_t *handle, size_t nbytes, const void *, uint64_t) {
    if (!fake::take_bytes(nbytes)) {
        return OUT_OF_MEMORY;
    }
    std::lock_guard<std::mutex> lock(mutex);
    *handle = ++last_handle;
    handles[*handle] = nbytes;
    fake::counts.mallocs++;
    return 0;
}

EXPORT int cuMemRelease(uint64_t handle) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = handles.find(handle);
    if (found == handles.end()) {
        return INVALID_VALUE;
    }
    fake::give_back_bytes(found->second);
    handles.erase(found);
    fake::counts.frees++;
    return 0;
}

EXPORT int cuMemMap(char *address, size_t nbytes, size_t, uint64_t, uint64_t) {
    fake::map_bytes(address, nbytes);
    return 0;
}

EXPORT int cuMemUnmap(char *address, size_t) {
    fake::unmap_bytes(address);
    return 0;
}

// What else is asked for by name: green contexts, memory of other processes and of several devices.
EXPORT int fake_cuda_not_supported() {
    return NOT_SUPPORTED;
}
