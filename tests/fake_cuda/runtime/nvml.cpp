// libnvidia-ml.so.1: the device has a handle, and nothing more is known of it. torch's allocator asks for the fabric of
// expandable segments, and for the processes on the device where it is out of memory.

#define NOT_SUPPORTED(name) \
    extern "C" int name() { \
        return 3;           \
    }

extern "C" int nvmlInit_v2() {
    return 0;
}

extern "C" int nvmlDeviceGetHandleByPciBusId_v2(const char *, void **handle) {
    *handle = reinterpret_cast<void *>(1);
    return 0;
}

extern "C" int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 13000;
    return 0;
}

// The device is in no fabric: all that follows the version is zero.
extern "C" int nvmlDeviceGetGpuFabricInfoV(void *, unsigned *info) {
    constexpr int NUM_FIELDS = 8;
    for (int field = 1; field < NUM_FIELDS; field++) {
        info[field] = 0;
    }
    return 0;
}

extern "C" int nvmlDeviceGetComputeRunningProcesses(void *, unsigned *count, void *) {
    *count = 0;
    return 0;
}

NOT_SUPPORTED(nvmlDeviceGetNvLinkRemoteDeviceType)
NOT_SUPPORTED(nvmlDeviceGetNvLinkRemotePciInfo_v2)
