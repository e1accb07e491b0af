// The device itself, with the figures of an A100, and kernels, which do nothing. On later ones torch's attention is
// that of cuDNN, which is not faked.

#include "fake.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstring>

namespace {

constexpr int CUDA_VERSION_NUMBER = 13000;
constexpr int MAJOR = 8;
constexpr int MINOR = 0;
constexpr int NUM_PROCESSORS = 108;
constexpr int NUM_THREADS_PER_BLOCK = 1024;
constexpr int NUM_THREADS_PER_PROCESSOR = 2048;
constexpr int NUM_REGISTERS = 65536;
constexpr size_t SHARED_PER_BLOCK = 48 << 10;
constexpr size_t SHARED_PER_BLOCK_AT_MOST = 163 << 10;
constexpr size_t SHARED_PER_PROCESSOR = 164 << 10;

cudaError_t launch() {
    fake::counts.kernels++;
    return cudaSuccess;
}

}  // namespace

EXPORT cudaError_t cudaGetDeviceCount(int *count) {
    *count = 1;
    return cudaSuccess;
}

EXPORT cudaError_t cudaGetDevice(int *device) {
    *device = 0;
    return cudaSuccess;
}

EXPORT cudaError_t cudaSetDevice(int device) {
    return device == 0 ? cudaSuccess : fake::result(cudaErrorInvalidDevice);
}

EXPORT cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDA_VERSION_NUMBER;
    return cudaSuccess;
}

EXPORT cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDA_VERSION_NUMBER;
    return cudaSuccess;
}

EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int) {
    size_t free;
    std::memset(properties, 0, sizeof *properties);
    cudaMemGetInfo(&free, &properties->totalGlobalMem);
    std::strcpy(properties->name, "fake CUDA device");
    properties->uuid.bytes[0] = 1;
    properties->major = MAJOR;
    properties->minor = MINOR;
    properties->warpSize = 32;
    properties->multiProcessorCount = NUM_PROCESSORS;
    properties->maxThreadsPerBlock = NUM_THREADS_PER_BLOCK;
    properties->maxThreadsPerMultiProcessor = NUM_THREADS_PER_PROCESSOR;
    properties->sharedMemPerBlock = SHARED_PER_BLOCK;
    properties->sharedMemPerBlockOptin = SHARED_PER_BLOCK_AT_MOST;
    properties->sharedMemPerMultiprocessor = SHARED_PER_PROCESSOR;
    properties->regsPerBlock = NUM_REGISTERS;
    properties->regsPerMultiprocessor = NUM_REGISTERS;
    properties->l2CacheSize = 40 << 20;
    for (int axis = 0; axis < 3; axis++) {
        properties->maxThreadsDim[axis] = NUM_THREADS_PER_BLOCK;
        properties->maxGridSize[axis] = 2147483647;
    }
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor:
            *value = MAJOR;
            break;
        case cudaDevAttrComputeCapabilityMinor:
            *value = MINOR;
            break;
        case cudaDevAttrMultiProcessorCount:
            *value = NUM_PROCESSORS;
            break;
        case cudaDevAttrWarpSize:
            *value = 32;
            break;
        case cudaDevAttrMaxThreadsPerBlock:
            *value = NUM_THREADS_PER_BLOCK;
            break;
        case cudaDevAttrMaxSharedMemoryPerBlock:
            *value = SHARED_PER_BLOCK;
            break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin:
            *value = SHARED_PER_BLOCK_AT_MOST;
            break;
        default:
            *value = 0;
    }
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int) {
    std::snprintf(text, size, "0000:01:00.0");
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) {
    *can = 0;
    return cudaSuccess;
}

// Functions of the driver by name. torch takes the table of what it may ever call as a whole, so that a function which
// the fake libcuda lacks is one that refuses.
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(
    const char *symbol, void **function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult *found) {
    static void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (driver == nullptr) {
        return fake::misuse(cudaErrorInsufficientDriver, "libcuda.so.1 of the fake runtime is missing", nullptr);
    }
    *function = dlsym(driver, symbol);
    if (*function == nullptr) {
        *function = dlsym(driver, "fake_cuda_not_supported");
    }
    if (found != nullptr) {
        *found = cudaDriverEntryPointSuccess;
    }
    return cudaSuccess;
}

// Kernels.

EXPORT cudaError_t cudaLaunchKernel(const void *, dim3, dim3, void **, size_t, cudaStream_t) {
    return launch();
}

EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *, const void *, void **) {
    return launch();
}

EXPORT cudaError_t cudaLaunchCooperativeKernel(const void *, dim3, dim3, void **, size_t, cudaStream_t) {
    return launch();
}

// What a compiler of CUDA 13 puts in place of cudaLaunchKernel.
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void **, size_t, cudaStream_t) {
    return launch();
}

EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void *>(function));
    return cudaSuccess;
}

EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *) {
    std::memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = NUM_THREADS_PER_BLOCK;
    attributes->numRegs = 32;
    attributes->ptxVersion = 10 * MAJOR + MINOR;
    attributes->binaryVersion = 10 * MAJOR + MINOR;
    return cudaSuccess;
}

EXPORT cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) {
    return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *count, const void *, int, size_t, unsigned) {
    *count = 8;
    return cudaSuccess;
}

EXPORT cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
    *address = const_cast<void *>(symbol);
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpyToSymbol(const void *, const void *, size_t, size_t, cudaMemcpyKind) {
    return cudaSuccess;
}
