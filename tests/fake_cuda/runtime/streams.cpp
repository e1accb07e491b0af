// Streams and events. Nothing is ever in flight; what an event says of itself is faked, so that waits are taken.

#include "fake.h"

#include <algorithm>
#include <cstdint>
#include <ctime>
#include <map>
#include <mutex>
#include <set>

namespace {

constexpr int NUM_LATE_QUERIES = 8;  // a loop of queries ends; code that asks a few times before it waits has to wait

// How much of each stream comes before something: the number of the last event that was recorded there.
using Before = std::map<cudaStream_t, long>;

struct Event {
    unsigned flags = 0;
    bool is_recorded = false;
    int late_queries = 0;  // that say "not ready" before one says that it is complete
    cudaStream_t stream = nullptr;
    long number = 0;  // on its stream
    Before before;    // itself is in it
    double recorded_ms = 0;
};

std::mutex mutex;
std::set<Event *> events;
std::map<cudaStream_t, Before> streams;
uintptr_t next_stream = 0x1000;  // below are CUDA's own: 0 is the default stream, 1 and 2 its two kinds by name

double now_ms() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e3 + time.tv_nsec / 1e6;
}

bool is_stream(cudaStream_t stream) {
    return reinterpret_cast<uintptr_t>(stream) <= 2 || streams.count(stream) != 0;
}

// Whoever has waited for `before` knows all of these events to be complete.
void complete(const Before &before) {
    for (Event *event : events) {
        auto found = before.find(event->stream);
        if (found != before.end() && event->number <= found->second) {
            event->late_queries = 0;
        }
    }
}

Event *find(cudaEvent_t event) {
    auto found = events.find(reinterpret_cast<Event *>(event));
    return found == events.end() ? nullptr : *found;
}

cudaError_t create_stream(cudaStream_t *stream) {
    std::lock_guard<std::mutex> lock(mutex);
    *stream = reinterpret_cast<cudaStream_t>(++next_stream);
    streams[*stream] = {};
    fake::counts.streams_created++;
    return cudaSuccess;
}

cudaError_t check_stream(cudaStream_t stream) {
    std::lock_guard<std::mutex> lock(mutex);
    if (!is_stream(stream)) {
        return fake::misuse(cudaErrorInvalidResourceHandle, "a stream that does not exist", stream);
    }
    return cudaSuccess;
}

}  // namespace

namespace fake {

void complete_all() {
    std::lock_guard<std::mutex> lock(mutex);
    for (Event *event : events) {
        event->late_queries = 0;
    }
}

}  // namespace fake

EXPORT cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    return create_stream(stream);
}

EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) {
    return create_stream(stream);
}

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int) {
    return create_stream(stream);
}

EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    std::lock_guard<std::mutex> lock(mutex);
    if (streams.erase(stream) == 0) {
        return fake::misuse(cudaErrorInvalidResourceHandle, "the end of a stream that does not exist", stream);
    }
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = 0;
    return check_stream(stream);
}

EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) {
    return check_stream(stream);
}

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    fake::counts.stream_waits++;
    std::lock_guard<std::mutex> lock(mutex);
    if (!is_stream(stream)) {
        return fake::misuse(cudaErrorInvalidResourceHandle, "a wait for a stream that does not exist", stream);
    }
    complete(streams[stream]);
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceSynchronize() {
    fake::counts.device_waits++;
    fake::complete_all();
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    std::lock_guard<std::mutex> lock(mutex);
    if (!is_stream(stream)) {
        return fake::misuse(cudaErrorInvalidResourceHandle, "a wait on a stream that does not exist", stream);
    }
    Event *found = find(event);
    if (found == nullptr) {
        return fake::misuse(cudaErrorInvalidResourceHandle, "a wait for an event that does not exist", event);
    }
    for (auto [other, number] : found->before) {
        long &last = streams[stream][other];
        last = std::max(last, number);
    }
    return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *argument) {
    function(argument);
    return check_stream(stream);
}

EXPORT cudaError_t cudaStreamAddCallback(
    cudaStream_t stream, cudaStreamCallback_t function, void *argument, unsigned) {
    function(stream, cudaSuccess, argument);
    return check_stream(stream);
}

// Graphs: nothing is ever captured.

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t,
    cudaStreamCaptureStatus *status,
    unsigned long long *id,
    cudaGraph_t *,
    const cudaGraphNode_t **,
    const cudaGraphEdgeData **,
    size_t *) {
    *status = cudaStreamCaptureStatusNone;
    if (id != nullptr) {
        *id = 0;
    }
    return cudaSuccess;
}

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *) {
    return cudaSuccess;
}

// Events. The first queries of one that was recorded say that it is not ready.

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    std::lock_guard<std::mutex> lock(mutex);
    auto made = new Event;
    made->flags = flags;
    events.insert(made);
    *event = reinterpret_cast<cudaEvent_t>(made);
    fake::counts.events_created++;
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreate(cudaEvent_t *event) {
    return cudaEventCreateWithFlags(event, cudaEventDefault);
}

EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
    std::lock_guard<std::mutex> lock(mutex);
    Event *found = find(event);
    if (found == nullptr) {
        return fake::misuse(cudaErrorInvalidResourceHandle, "the end of an event that does not exist", event);
    }
    events.erase(found);
    delete found;
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
    std::lock_guard<std::mutex> lock(mutex);
    Event *found = find(event);
    if (found == nullptr || !is_stream(stream)) {
        return fake::misuse(cudaErrorInvalidResourceHandle, "a record of an event or a stream that is not", event);
    }
    found->is_recorded = true;
    found->late_queries = NUM_LATE_QUERIES;
    found->stream = stream;
    found->number = ++streams[stream][stream];
    found->before = streams[stream];
    found->recorded_ms = now_ms();
    fake::counts.events_recorded++;
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}

EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
    std::lock_guard<std::mutex> lock(mutex);
    Event *found = find(event);
    if (found == nullptr) {
        return fake::misuse(cudaErrorInvalidResourceHandle, "a query of an event that does not exist", event);
    }
    if (found->late_queries > 0) {
        found->late_queries--;
        return fake::result(cudaErrorNotReady);
    }
    complete(found->before);
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    std::lock_guard<std::mutex> lock(mutex);
    Event *found = find(event);
    if (found == nullptr) {
        return fake::misuse(cudaErrorInvalidResourceHandle, "a wait for an event that does not exist", event);
    }
    if (found->late_queries > 0) {
        fake::counts.event_waits++;
        if ((found->flags & cudaEventBlockingSync) == 0) {
            fake::counts.spinning_event_waits++;
        }
    }
    complete(found->before);
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) {
    std::lock_guard<std::mutex> lock(mutex);
    Event *first = find(start);
    Event *second = find(end);
    if (first == nullptr || second == nullptr) {
        return fake::misuse(cudaErrorInvalidResourceHandle, "the time of an event that does not exist", start);
    }
    if (((first->flags | second->flags) & cudaEventDisableTiming) != 0 || !first->is_recorded || !second->is_recorded) {
        return fake::misuse(cudaErrorInvalidResourceHandle, "the time of an event without one", start);
    }
    if (first->late_queries > 0 || second->late_queries > 0) {
        return fake::result(cudaErrorNotReady);
    }
    *ms = static_cast<float>(second->recorded_ms - first->recorded_ms);
    return cudaSuccess;
}
