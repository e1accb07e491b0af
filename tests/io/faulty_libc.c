/* LD_PRELOAD: system calls on files fail as a test asks, under whichever engine made them.
 *
 * faulty_libc_set(part_of_path, call, nth, effect, argument) arms one fault and forgets the last: the `nth` call (from
 * 1, counted from now; 0 means every call) of "read", "write", "sync" or "allocate" on a descriptor whose path
 * contains `part_of_path` has this effect:
 *   "fail"   it does nothing and fails with errno `argument`
 *   "short"  it moves at most `argument` bytes (through O_DIRECT: it moves more, and reports these)
 *   "stall"  it sleeps `argument` milliseconds first; -1: until the next call of faulty_libc_set
 *   "flip"   it moves all, and bit 0 of the byte `argument` is flipped on the way
 * faulty_libc_count() is the number of calls seen since. The variants of one call (pread, preadv2, read, ...)
 * are one.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char part_of_path[256], call[16], effect[16];
static long nth, count;
static volatile long argument;

void faulty_libc_set(const char *path, const char *which, long number, const char *what, long value)
{
    pthread_mutex_lock(&mutex);
    snprintf(part_of_path, sizeof part_of_path, "%s", path);
    snprintf(call, sizeof call, "%s", which);
    snprintf(effect, sizeof effect, "%s", what);
    nth = number;
    argument = value;
    count = 0;
    pthread_mutex_unlock(&mutex);
}

long faulty_libc_count(void)
{
    return count;
}

/* Copies the effect if this call is the one; else an empty string. */
static void struck(const char *which, int fd, char *what)
{
    char link[64], path[4096];
    *what = 0;
    if (!*part_of_path || strcmp(call, which) != 0)
        return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return;
    path[length] = 0;
    if (!strstr(path, part_of_path))
        return;
    pthread_mutex_lock(&mutex);
    count++;
    if (nth == 0 || nth == count)
        strcpy(what, effect);
    pthread_mutex_unlock(&mutex);
}

static void stall(void)
{
    long milliseconds = argument;
    struct timespec pause = {milliseconds / 1000, milliseconds % 1000 * 1000000}, poll = {0, 1000000};
    if (milliseconds >= 0)
        nanosleep(&pause, NULL);
    while (milliseconds < 0 && argument < 0)
        nanosleep(&poll, NULL);
}

typedef ssize_t (*plain)(int, void *, size_t);
typedef ssize_t (*positioned)(int, void *, size_t, off_t);

/* A call that is befallen by `what`. */
static ssize_t move_as(const char *what, const char *which, int fd, char *memory, size_t nbytes, off_t offset)
{
    int reads = strcmp(which, "read") == 0;
    if (!strcmp(what, "fail")) {
        errno = (int)argument;
        return -1;
    }
    if (!strcmp(what, "stall"))
        stall();
    size_t shown = nbytes;
    if (!strcmp(what, "short") && (size_t)argument < nbytes) {
        shown = (size_t)argument;
        if (!(fcntl(fd, F_GETFL) & O_DIRECT))
            nbytes = shown;
    }
    int flips = !strcmp(what, "flip") && (size_t)argument < nbytes;
    char *copy = NULL; /* the caller's memory stays right: it may be looked at while it is written */
    if (flips && !reads && !posix_memalign((void **)&copy, 4096, nbytes)) {
        memcpy(copy, memory, nbytes);
        copy[argument] ^= 1;
    }
    void *from = copy ? copy : memory;
    ssize_t moved;
    if (nbytes == 0)
        moved = 0;
    else if (offset < 0)
        moved = ((plain)dlsym(RTLD_NEXT, which))(fd, from, nbytes);
    else
        moved = ((positioned)dlsym(RTLD_NEXT, reads ? "pread64" : "pwrite64"))(fd, from, nbytes, offset);
    free(copy);
    if (flips && reads)
        memory[argument] ^= 1;
    return moved > (ssize_t)shown ? (ssize_t)shown : moved;
}

static ssize_t move(const char *which, int fd, char *memory, size_t nbytes, off_t offset)
{
    char what[16];
    struck(which, fd, what);
    return move_as(what, which, fd, memory, nbytes, offset);
}

/* The engines pass one piece of memory in each call. */
#define VECTOR(which, name, ...)                                                                                        \
    ssize_t name(int fd, const struct iovec *vector, int num_parts, off_t offset __VA_ARGS__)                           \
    {                                                                                                                   \
        return num_parts == 1 ? move(which, fd, vector->iov_base, vector->iov_len, offset) : (errno = EINVAL, -1);      \
    }
#define POSITIONED(which, name, type)                                                                                   \
    ssize_t name(int fd, type memory, size_t nbytes, off_t offset)                                                      \
    {                                                                                                                   \
        return move(which, fd, (char *)memory, nbytes, offset);                                                         \
    }

POSITIONED("read", pread, void *)
POSITIONED("read", pread64, void *)
POSITIONED("write", pwrite, const void *)
POSITIONED("write", pwrite64, const void *)
VECTOR("read", preadv)
VECTOR("read", preadv64)
VECTOR("read", preadv2, , int flags __attribute__((unused)))
VECTOR("read", preadv64v2, , int flags __attribute__((unused)))
VECTOR("write", pwritev)
VECTOR("write", pwritev64)
VECTOR("write", pwritev2, , int flags __attribute__((unused)))
VECTOR("write", pwritev64v2, , int flags __attribute__((unused)))

ssize_t read(int fd, void *memory, size_t nbytes)
{
    return move("read", fd, memory, nbytes, -1);
}

ssize_t write(int fd, const void *memory, size_t nbytes)
{
    return move("write", fd, (char *)memory, nbytes, -1);
}

static int whole_file_call(const char *which, int fd)
{
    char what[16];
    struck(which, fd, what);
    if (!strcmp(what, "stall"))
        stall();
    return strcmp(what, "fail") ? 0 : (int)argument;
}

int fdatasync(int fd)
{
    int code = whole_file_call("sync", fd);
    if (!code)
        return ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(fd);
    errno = code;
    return -1;
}

int posix_fallocate64(int fd, off_t offset, off_t nbytes)
{
    int code = whole_file_call("allocate", fd);
    return code ? code : ((int (*)(int, off_t, off_t))dlsym(RTLD_NEXT, "posix_fallocate64"))(fd, offset, nbytes);
}

int posix_fallocate(int fd, off_t offset, off_t nbytes)
{
    return posix_fallocate64(fd, offset, nbytes);
}
