// cuBLAS and cuBLASLt: handles that point nowhere, and products that are counted as kernels and not computed.
// Arguments that are not used are left out: a C function may be called with more of them than it takes.

#include "fake.h"

#include <cstring>

#define HANDLE(name)                            \
    EXPORT int name(void **handle) {            \
        *handle = reinterpret_cast<void *>(64); \
        return 0;                               \
    }

#define NOTHING(name)   \
    EXPORT int name() { \
        return 0;       \
    }

#define PRODUCT(name)           \
    EXPORT int name() {         \
        fake::counts.kernels++; \
        return 0;               \
    }

HANDLE(cublasCreate_v2)
HANDLE(cublasLtCreate)
HANDLE(cublasLtMatmulDescCreate)
HANDLE(cublasLtMatmulPreferenceCreate)
HANDLE(cublasLtMatrixLayoutCreate)

NOTHING(cublasDestroy_v2)
NOTHING(cublasSetStream_v2)
NOTHING(cublasSetWorkspace_v2)
NOTHING(cublasSetMathMode)
NOTHING(cublasSetPointerMode_v2)
NOTHING(cublasSetSmCountTarget)
NOTHING(cublasLtMatmulDescDestroy)
NOTHING(cublasLtMatmulDescSetAttribute)
NOTHING(cublasLtMatmulPreferenceDestroy)
NOTHING(cublasLtMatmulPreferenceSetAttribute)
NOTHING(cublasLtMatrixLayoutDestroy)
NOTHING(cublasLtMatrixLayoutSetAttribute)

PRODUCT(cublasSgemm_v2)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasSgemv_v2)
PRODUCT(cublasSdot_v2)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasGemmEx)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasDotEx)
PRODUCT(cublasLtMatmul)

EXPORT int cublasGetMathMode(void *, int *mode) {
    *mode = 0;
    return 0;
}

EXPORT int cublasGetPointerMode_v2(void *, int *mode) {
    *mode = 0;
    return 0;
}

EXPORT int cublasGetVersion_v2(void *, int *version) {
    *version = 130000;
    return 0;
}

EXPORT size_t cublasLtGetVersion() {
    return 130000;
}

// One way to multiply is found, whatever is asked; it takes no workspace.
EXPORT int cublasLtMatmulAlgoGetHeuristic(
    void *, void *, void *, void *, void *, void *, void *, int, void *algorithm, int *count) {
    constexpr size_t HEURISTIC_NBYTES = 96;  // of cublasLtMatmulHeuristicResult_t
    std::memset(algorithm, 0, HEURISTIC_NBYTES);
    *count = 1;
    return 0;
}
