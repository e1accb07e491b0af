/* Move one block of a request: the system call, its retries with pauses, and its result. Uses neither the pool nor the
 * mutex; part of direct_io.c. */
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { TZ_READ = 0, TZ_WRITE = 1, TZ_SYNC = 2 };
enum { TZ_END_OF_FILE = -1 }; /* a value of `error`, which no errno has */
enum { MAX_TRIES = 16 };

typedef struct tz_request {
    /* Set by the caller before tz_submit. */
    int32_t kind, fd;
    int64_t offset, nbytes;
    char *memory;
    int32_t alignment;  /* for O_DIRECT; 1 if buffered */
    int32_t drop_pages; /* buffered: advise the kernel to drop the pages from its cache */
    int32_t urgent;     /* a read whose blocks are claimed before those of all requests that are not urgent */
    /* Owned by the pool until `finished`. */
    int64_t num_unclaimed; /* bytes that no worker has claimed; a sync counts as one byte */
    int64_t num_running;   /* blocks in system calls */
    struct tz_request *previous, *next;
    int64_t moved_ns; /* when a block last started or ended; 0 while all are queued */
    /* The result. `error`: 0, an errno or TZ_END_OF_FILE; the other fields describe the first block that failed. */
    int64_t submitted_ns, finished_ns;
    int64_t error_offset, error_wanted, error_got, file_nbytes;
    int32_t error;
    int32_t finished;
} tz_request;

/* The part of a request that one worker moves, and its progress. */
typedef struct {
    tz_request *request; /* NULL: nothing */
    int64_t start, wanted; /* bytes of the request; a sync has one */
    int64_t got, from;     /* bytes of the block: moved so far, and the start of the present try */
    int32_t num_tries;     /* since a byte was moved */
    int32_t error;
    int64_t file_nbytes;
} block;

/* Return the pause after `num_tries` tries without progress: 1 ms, doubled with each further try, at most 100 ms. */
static int64_t pause_ns(int num_tries)
{
    return num_tries > 7 ? 100000000 : (int64_t)1000000 << (num_tries - 1);
}

static void pause_before_try(int num_tries)
{
    struct timespec pause = {.tv_sec = 0, .tv_nsec = pause_ns(num_tries)};
    nanosleep(&pause, NULL);
}

/* Set the start of the next try: the end of the moved bytes, with O_DIRECT rounded down to the alignment. */
static void aim(block *block)
{
    block->from = block->got - block->got % block->request->alignment;
}

/* Record the result of one try. `moved`: bytes, or -errno. Return 1 if the block is done or has failed, 0 to try
 * again. A short transfer is continued at once. After EINTR, EAGAIN and transfers without progress the caller
 * pauses; MAX_TRIES of these in a row are an error. A sync is tried once. */
static int complete_io(block *block, int64_t moved)
{
    const tz_request *request = block->request;
    if (request->kind == TZ_SYNC) {
        block->error = moved < 0 ? (int32_t)-moved : 0;
        return 1;
    }
    if (moved >= 0 && block->from + moved > block->got) {
        block->got = block->from + moved;
        block->num_tries = 0;
        return block->got >= block->wanted;
    }
    int32_t code = moved < 0 ? (int32_t)-moved : EIO;
    struct stat status;
    if (moved >= 0 && request->kind == TZ_READ && fstat(request->fd, &status) == 0 &&
        request->offset + block->start + block->got >= status.st_size) {
        block->error = TZ_END_OF_FILE;
        block->file_nbytes = status.st_size;
        return 1;
    }
    if ((moved < 0 && code != EINTR && code != EAGAIN) || ++block->num_tries >= MAX_TRIES) {
        block->error = code;
        return 1;
    }
    return 0;
}

/* Advise the kernel to drop the pages of a buffered block from its cache, if the request asks for it. */
static void drop_pages(const block *block)
{
    const tz_request *request = block->request;
    int all = request->kind == TZ_SYNC;
    if (request->drop_pages && !block->error)
        (void)posix_fadvise(request->fd, all ? 0 : request->offset + block->start, all ? 0 : block->wanted,
                            POSIX_FADV_DONTNEED);
}

static int64_t try_once(const block *block)
{
    const tz_request *request = block->request;
    char *memory = request->memory + block->start + block->from;
    size_t nbytes = (size_t)(block->wanted - block->from);
    off_t offset = request->offset + block->start + block->from;
    int64_t moved = request->kind == TZ_SYNC   ? fdatasync(request->fd)
                    : request->kind == TZ_READ ? pread(request->fd, memory, nbytes, offset)
                                               : pwrite(request->fd, memory, nbytes, offset);
    return moved < 0 ? -errno : moved;
}

static void carry_out(block *block)
{
    for (;;) {
        aim(block);
        if (complete_io(block, try_once(block)))
            break;
        if (block->num_tries)
            pause_before_try(block->num_tries);
    }
    drop_pages(block);
}
