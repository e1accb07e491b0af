// Counts, and errors.

#include "fake.h"

#include <cstdio>

namespace fake {

Counts counts;

static thread_local cudaError_t last_error = cudaSuccess;

cudaError_t result(cudaError_t error) {
    if (error != cudaSuccess) {
        last_error = error;
    }
    return error;
}

cudaError_t misuse(cudaError_t error, const char *what, const void *address) {
    counts.misuses++;
    std::fprintf(stderr, "fake CUDA: %s (%p)\n", what, address);
    return result(error);
}

}  // namespace fake

EXPORT cudaError_t cudaGetLastError() {
    cudaError_t error = fake::last_error;
    fake::last_error = cudaSuccess;
    return error;
}

EXPORT cudaError_t cudaPeekAtLastError() {
    return fake::last_error;
}

// Write "name count" lines. `text` has room for all of them.
EXPORT void fake_cuda_counts(char *text, size_t size) {
    size_t used = 0;
#define FAKE_WRITE(name) used += std::snprintf(text + used, size - used, "%s %ld\n", #name, fake::counts.name.load());
    FAKE_COUNTS(FAKE_WRITE)
#undef FAKE_WRITE
}
