/* The same faults in requests that go through io_uring; part of faulty_libc.c.
 *
 * An entry that a fault strikes is taken out of the ring before the kernel sees it, and a NOP put in its place, or for
 * a stall a read of a timer, so that the ring itself goes on. When that completes, the fault's effect is had by the call
 * that the entry stood for, and its outcome written into the completion. "setup", "enter" and "register" can fail too.
 *
 * Completions must come while the thread is in io_uring_enter and at no other time (IORING_SETUP_DEFER_TASKRUN). The
 * layout of the ring is that of the system's own header, not of the code under test. */
#include <linux/io_uring.h>
#include <stdarg.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>

enum { MAX_RINGS = 64, MAX_STRUCK = 64 };

struct struck_entry {
    int is_used, is_held, fd, timer_fd;
    const char *which;
    char what[16], *memory;
    uint64_t tag, offset, nbytes, ticks;
};

static struct shadow {
    int fd;
    struct io_uring_params params;
    char *shared;
    struct io_uring_sqe *entries;
    unsigned put_seen, reap_seen;
    struct struck_entry struck[MAX_STRUCK];
} rings[MAX_RINGS];
static int num_rings;

static struct shadow *ring_of(int fd)
{
    struct shadow *found = NULL; /* the last: a number may have been given twice */
    pthread_mutex_lock(&mutex);
    for (int index = 0; index < num_rings; index++)
        if (rings[index].fd == fd)
            found = &rings[index];
    pthread_mutex_unlock(&mutex);
    return found;
}

static void note_ring(int fd, const struct io_uring_params *params)
{
    size_t shared_nbytes = params->cq_off.cqes + params->cq_entries * sizeof(struct io_uring_cqe);
    size_t entries_nbytes = params->sq_entries * sizeof(struct io_uring_sqe);
    pthread_mutex_lock(&mutex);
    if (num_rings == MAX_RINGS || !(params->flags & 1 << 13))
        abort();
    struct shadow *ring = &rings[num_rings++];
    ring->fd = fd;
    ring->params = *params;
    ring->shared = mmap(NULL, shared_nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, IORING_OFF_SQ_RING);
    ring->entries = mmap(NULL, entries_nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, IORING_OFF_SQES);
    pthread_mutex_unlock(&mutex);
}

static unsigned *word(struct shadow *ring, unsigned offset)
{
    return (unsigned *)(ring->shared + offset);
}

/* Under the mutex: what was stalled without an end goes on. */
static void release_timers(void)
{
    struct itimerspec now = {.it_value = {0, 1}};
    for (int index = 0; index < num_rings; index++)
        for (struct struck_entry *note = rings[index].struck; note < rings[index].struck + MAX_STRUCK; note++)
            if (note->is_used && note->is_held) {
                note->is_held = 0;
                timerfd_settime(note->timer_fd, 0, &now, NULL);
            }
}

static void strike(struct shadow *ring, struct io_uring_sqe *entry)
{
    int reads = entry->opcode == IORING_OP_READ || entry->opcode == IORING_OP_READ_FIXED;
    int writes = entry->opcode == IORING_OP_WRITE || entry->opcode == IORING_OP_WRITE_FIXED;
    const char *which = reads ? "read" : writes ? "write" : entry->opcode == IORING_OP_FSYNC ? "sync" : "";
    char what[16];
    struck(which, entry->fd, what);
    if (!*what)
        return;
    struct struck_entry *note = ring->struck;
    while (note->is_used)
        note++;
    *note = (struct struck_entry){.is_used = 1, .fd = entry->fd, .which = which, .tag = entry->user_data};
    strcpy(note->what, what);
    note->memory = (char *)(uintptr_t)entry->addr;
    note->offset = entry->off;
    note->nbytes = entry->len;
    memset(entry, 0, sizeof *entry);
    entry->user_data = note->tag;
    entry->opcode = IORING_OP_NOP;
    if (!strcmp(what, "stall")) {
        pthread_mutex_lock(&mutex);
        long milliseconds = argument;
        struct itimerspec pause = {.it_value = {milliseconds / 1000, milliseconds % 1000 * 1000000 + 1}};
        if ((note->is_held = milliseconds < 0))
            pause = (struct itimerspec){.it_value = {1000, 0}};
        note->timer_fd = entry->fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC);
        timerfd_settime(note->timer_fd, 0, &pause, NULL);
        pthread_mutex_unlock(&mutex);
        entry->opcode = IORING_OP_READ;
        entry->addr = (uint64_t)(uintptr_t)&note->ticks;
        entry->len = sizeof note->ticks;
    }
}

static void complete(struct shadow *ring, struct io_uring_cqe *completion)
{
    for (struct struck_entry *note = ring->struck; note < ring->struck + MAX_STRUCK; note++) {
        if (!note->is_used || note->tag != completion->user_data)
            continue;
        if (!strcmp(note->what, "stall")) {
            close(note->timer_fd);
            *note->what = 0;
        }
        if (!strcmp(note->which, "sync")) {
            int code = *note->what ? (int)argument : 0;
            completion->res = code ? -code : syscall(SYS_fdatasync, note->fd) ? -errno : 0;
        } else {
            ssize_t moved = move_as(note->what, note->which, note->fd, note->memory, note->nbytes, (off_t)note->offset);
            completion->res = moved < 0 ? -errno : (int)moved;
        }
        note->is_used = 0;
        return;
    }
}

/* 1, and errno, if the call itself is to fail. */
static int call_fails(const char *which)
{
    int fails = 0;
    pthread_mutex_lock(&mutex);
    if (!strcmp(call, which)) {
        count++;
        fails = nth == 0 || nth == count;
    }
    pthread_mutex_unlock(&mutex);
    if (fails)
        errno = (int)argument;
    return fails;
}

long syscall(long number, ...)
{
    va_list given;
    va_start(given, number);
    long a[6];
    for (int index = 0; index < 6; index++)
        a[index] = va_arg(given, long);
    va_end(given);
    long (*real)(long, ...) = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    if (number == __NR_io_uring_setup) {
        if (call_fails("setup"))
            return -1;
        long fd = real(number, a[0], a[1]);
        if (fd >= 0)
            note_ring((int)fd, (struct io_uring_params *)a[1]);
        return fd;
    }
    if (number == __NR_io_uring_register && call_fails("register"))
        return -1;
    if (number != __NR_io_uring_enter)
        return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    if (call_fails("enter"))
        return -1;
    struct shadow *ring = ring_of((int)a[0]);
    unsigned mask = *word(ring, ring->params.sq_off.ring_mask), tail = *word(ring, ring->params.sq_off.tail);
    for (; ring->put_seen != tail; ring->put_seen++)
        strike(ring, &ring->entries[ring->put_seen & mask]);
    long result = real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    int code = errno;
    mask = *word(ring, ring->params.cq_off.ring_mask);
    tail = __atomic_load_n(word(ring, ring->params.cq_off.tail), __ATOMIC_ACQUIRE);
    struct io_uring_cqe *completions = (struct io_uring_cqe *)(ring->shared + ring->params.cq_off.cqes);
    for (; ring->reap_seen != tail; ring->reap_seen++)
        complete(ring, &completions[ring->reap_seen & mask]);
    errno = code;
    return result;
}
