/* io_uring(7) by its three system calls alone: no liburing, and no header of a kernel that may be older than the one
 * it runs on. A ring belongs to the thread that opened it, which alone puts entries, enters and reaps.
 *
 *     ring_open; (ring_put ... ring_put, ring_enter, ring_reap until NULL) ...; ring_close */
#ifndef TZ_RING_H
#define TZ_RING_H
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef __NR_io_uring_setup /* the same on all processors but alpha */
#define __NR_io_uring_setup 425
#define __NR_io_uring_enter 426
#define __NR_io_uring_register 427
#endif

/* What linux/io_uring.h calls IORING_OP_... */
enum { RING_FSYNC = 3, RING_READ_FIXED = 4, RING_WRITE_FIXED = 5, RING_TIMEOUT = 11, RING_READ = 22, RING_WRITE = 23 };
enum { RING_FSYNC_DATASYNC = 1, RING_ENTER_GETEVENTS = 1 };
/* IORING_FEAT_SINGLE_MMAP, _NODROP, _RW_CUR_POS: Linux 5.6, which has RING_READ too. */
enum { RING_NEEDED = 1 | 1 << 1 | 1 << 3 };
enum { RING_SUBMIT_ALL = 1 << 7, RING_COOP_TASKRUN = 1 << 8 };
enum { RING_SINGLE_ISSUER = 1 << 12, RING_DEFER_TASKRUN = 1 << 13 };
enum { RING_REGISTER_BUFFERS2 = 15, RING_REGISTER_BUFFERS_UPDATE = 16, RING_RSRC_SPARSE = 1 };
enum { RING_OFFSET_RINGS = 0, RING_OFFSET_ENTRIES = 0x10000000 };
enum { RING_MAX_BUFFERS = 64 };
#define RING_BUFFER_NBYTES ((int64_t)1 << 30) /* the most that one registered buffer may hold */

/* struct io_uring_sqe. `tag` comes back with the completion; `buffer`: of the FIXED ones. */
typedef struct {
    uint8_t opcode, flags;
    uint16_t priority;
    int32_t fd;
    uint64_t offset, address;
    uint32_t nbytes, op_flags;
    uint64_t tag;
    uint16_t buffer, personality;
    int32_t file_index;
    uint64_t unused[2];
} ring_entry;

/* struct io_uring_cqe. `result`: bytes, or -errno. */
typedef struct {
    uint64_t tag;
    int32_t result;
    uint32_t flags;
} ring_completion;

/* struct io_uring_params. Offsets into the shared memory of both rings. */
typedef struct {
    uint32_t num_entries, num_completions, flags, cpu, idle, features, wq_fd, unused[3];
    struct {
        uint32_t head, tail, mask, num_entries, flags, dropped, array, unused;
        uint64_t address;
    } submission;
    struct {
        uint32_t head, tail, mask, num_entries, overflow, entries, flags, unused;
        uint64_t address;
    } completion;
} ring_params;

typedef struct {
    int fd;
    char *shared;
    size_t shared_nbytes;
    ring_entry *entries;
    size_t entries_nbytes;
    ring_completion *completions;
    uint32_t *put_head, *put_tail, *reap_head, *reap_tail, put_mask, reap_mask;
    int has_table, num_buffers; /* registered memory */
    struct iovec buffers[RING_MAX_BUFFERS];
} ring;

static int ring_setup(uint32_t num_entries, ring_params *params)
{
    /* Best first: completions are worked off by the one thread when it asks for them, not by interrupting it. */
    static const uint32_t ways[] = {RING_SUBMIT_ALL | RING_SINGLE_ISSUER | RING_DEFER_TASKRUN, /* Linux 6.1 */
                                    RING_SUBMIT_ALL | RING_COOP_TASKRUN,                       /* 5.19 */
                                    0};
    for (size_t way = 0;; way++) {
        memset(params, 0, sizeof *params);
        params->flags = ways[way];
        int fd = (int)syscall(__NR_io_uring_setup, num_entries, params);
        if (fd >= 0 || errno != EINVAL || !ways[way])
            return fd;
    }
}

static void *ring_map(int fd, size_t nbytes, off_t what)
{
    void *memory = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, what);
    if (memory != MAP_FAILED)
        madvise(memory, nbytes, MADV_DONTFORK);
    return memory;
}

static void ring_close(ring *ring)
{
    if (ring->shared)
        munmap(ring->shared, ring->shared_nbytes);
    if (ring->entries)
        munmap(ring->entries, ring->entries_nbytes);
    if (ring->fd >= 0)
        close(ring->fd);
}

/* 0 or an errno. Up to `num_entries` may be on their way at once. */
static int ring_open(ring *ring, uint32_t num_entries)
{
    ring_params params;
    memset(ring, 0, sizeof *ring);
    ring->fd = ring_setup(num_entries, &params);
    if (ring->fd < 0)
        return errno;
    size_t end_of_put = params.submission.array + params.num_entries * sizeof(uint32_t);
    size_t end_of_reap = params.completion.entries + params.num_completions * sizeof(ring_completion);
    ring->shared_nbytes = end_of_put > end_of_reap ? end_of_put : end_of_reap;
    ring->entries_nbytes = params.num_entries * sizeof(ring_entry);
    void *shared = MAP_FAILED, *entries = MAP_FAILED;
    int code = (params.features & RING_NEEDED) == RING_NEEDED ? 0 : ENOSYS;
    if (!code && ((shared = ring_map(ring->fd, ring->shared_nbytes, RING_OFFSET_RINGS)) == MAP_FAILED ||
                  (entries = ring_map(ring->fd, ring->entries_nbytes, RING_OFFSET_ENTRIES)) == MAP_FAILED))
        code = errno;
    ring->shared = shared == MAP_FAILED ? NULL : shared;
    ring->entries = entries == MAP_FAILED ? NULL : entries;
    if (code) {
        ring_close(ring);
        return code;
    }
    ring->put_head = (uint32_t *)(ring->shared + params.submission.head);
    ring->put_tail = (uint32_t *)(ring->shared + params.submission.tail);
    ring->put_mask = *(uint32_t *)(ring->shared + params.submission.mask);
    ring->reap_head = (uint32_t *)(ring->shared + params.completion.head);
    ring->reap_tail = (uint32_t *)(ring->shared + params.completion.tail);
    ring->reap_mask = *(uint32_t *)(ring->shared + params.completion.mask);
    ring->completions = (ring_completion *)(ring->shared + params.completion.entries);
    uint32_t *array = (uint32_t *)(ring->shared + params.submission.array);
    for (uint32_t index = 0; index < params.num_entries; index++)
        array[index] = index;
    return 0;
}

/* The caller keeps at most `num_entries` on their way, so that there is always room. */
static void ring_put(ring *ring, ring_entry entry)
{
    uint32_t tail = *ring->put_tail;
    ring->entries[tail & ring->put_mask] = entry;
    __atomic_store_n(ring->put_tail, tail + 1, __ATOMIC_RELEASE);
}

/* Put but not taken by the kernel yet. */
static uint32_t ring_num_put(const ring *ring)
{
    return *ring->put_tail - __atomic_load_n(ring->put_head, __ATOMIC_ACQUIRE);
}

/* Give the kernel all that was put, and wait for one completion. 0 or an errno. */
static int ring_enter(ring *ring)
{
    long taken = syscall(__NR_io_uring_enter, ring->fd, ring_num_put(ring), 1, RING_ENTER_GETEVENTS, NULL, 0);
    return taken < 0 ? errno : 0;
}

/* Remove the last entry that was put and not taken by the kernel; 0 where there is none. */
static int ring_remove_last(ring *ring, uint64_t *tag)
{
    if (!ring_num_put(ring))
        return 0;
    uint32_t tail = *ring->put_tail - 1;
    *tag = ring->entries[tail & ring->put_mask].tag;
    __atomic_store_n(ring->put_tail, tail, __ATOMIC_RELEASE);
    return 1;
}

/* One completion, if there is any. */
static int ring_reap(ring *ring, ring_completion *completion)
{
    uint32_t head = *ring->reap_head;
    if (head == __atomic_load_n(ring->reap_tail, __ATOMIC_ACQUIRE))
        return 0;
    *completion = ring->completions[head & ring->reap_mask];
    __atomic_store_n(ring->reap_head, head + 1, __ATOMIC_RELEASE);
    return 1;
}

/* Pin memory, so that requests within it need not; 0 or an errno. It must stay mapped until the ring is closed. */
static int ring_register(ring *ring, char *memory, int64_t nbytes)
{
    if (!ring->has_table) {
        struct {
            uint32_t num, flags;
            uint64_t unused, data, tags;
        } table = {.num = RING_MAX_BUFFERS, .flags = RING_RSRC_SPARSE};
        if (syscall(__NR_io_uring_register, ring->fd, RING_REGISTER_BUFFERS2, &table, sizeof table) < 0)
            return errno;
        ring->has_table = 1;
    }
    while (nbytes) {
        if (ring->num_buffers == RING_MAX_BUFFERS)
            return ENOSPC;
        struct iovec *buffer = &ring->buffers[ring->num_buffers];
        buffer->iov_base = memory;
        buffer->iov_len = (size_t)(nbytes < RING_BUFFER_NBYTES ? nbytes : RING_BUFFER_NBYTES);
        struct {
            uint32_t first, unused;
            uint64_t data, tags;
            uint32_t num, unused2;
        } update = {.first = (uint32_t)ring->num_buffers, .data = (uint64_t)(uintptr_t)buffer, .num = 1};
        if (syscall(__NR_io_uring_register, ring->fd, RING_REGISTER_BUFFERS_UPDATE, &update, sizeof update) < 0)
            return errno;
        ring->num_buffers++;
        memory += buffer->iov_len;
        nbytes -= (int64_t)buffer->iov_len;
    }
    return 0;
}

/* The registered buffer that holds all of this memory, or -1. */
static int ring_buffer_of(const ring *ring, const char *memory, int64_t nbytes)
{
    for (int index = 0; index < ring->num_buffers; index++) {
        const char *base = ring->buffers[index].iov_base;
        if (memory >= base && memory + nbytes <= base + ring->buffers[index].iov_len)
            return index;
    }
    return -1;
}
#endif
