/* A request and one block of it: the system call that moves it, tries and pauses, and what became of it. Knows no pool
 * and no mutex; part of direct_io.c. */
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { TZ_READ = 0, TZ_WRITE = 1, TZ_SYNC = 2 };
enum { TZ_END_OF_FILE = -1 }; /* as `error`: no errno says it */
enum { MAX_TRIES = 16 };

typedef struct tz_request {
    /* Set by the caller before tz_submit. */
    int32_t kind, fd;
    int64_t offset, nbytes;
    char *memory;
    int32_t alignment;  /* of O_DIRECT; 1 if buffered */
    int32_t drop_pages; /* buffered: ask for the pages to be dropped from the cache */
    int32_t urgent;     /* of a read: its blocks are claimed before those of all that are not */
    /* The pool's, until `finished`. */
    int64_t num_unclaimed; /* bytes that no worker has taken yet; a sync counts as one byte */
    int32_t num_running;   /* blocks in system calls */
    int32_t num_blockers;  /* of a sync: unfinished writes before it */
    struct tz_request *previous, *next;
    int64_t moved_ns; /* when a block last started or ended; 0 while all are queued */
    /* The outcome. `error`: 0, an errno or TZ_END_OF_FILE; the rest is of the block that met it first. */
    int64_t submitted_ns, finished_ns;
    int64_t error_offset, error_wanted, error_got, file_nbytes;
    int32_t error;
    int32_t finished;
} tz_request;

/* What a worker moves in one go, and how far it has come. */
typedef struct {
    tz_request *request; /* NULL: nothing */
    int64_t start, wanted; /* bytes of the request; a sync's one byte stands for it */
    int64_t got, from;     /* bytes of the block: moved, and where the try on its way begins */
    int32_t num_tries;     /* since a byte was moved */
    int32_t error;
    int64_t file_nbytes;
} block;

/* 1 ms, doubled with each try up to 100 ms. */
static int64_t pause_ns(int num_tries)
{
    return num_tries > 7 ? 100000000 : (int64_t)1000000 << (num_tries - 1);
}

static void pause_before_try(int num_tries)
{
    struct timespec pause = {.tv_sec = 0, .tv_nsec = pause_ns(num_tries)};
    nanosleep(&pause, NULL);
}

/* Where the next try begins: with O_DIRECT at the last aligned offset before the end of what was moved. */
static void aim(block *block)
{
    block->from = block->got - block->got % block->request->alignment;
}

/* Take in what one try gave: bytes moved, or -errno. 1 once the block is done, well or badly; else it is tried again,
 * after a pause if `num_tries`. A short transfer is continued; EINTR, EAGAIN and transfers of nothing are tried again,
 * within bounds; a sync is tried once. */
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

/* Buffered, and done: what is on its way to the disk, or was read, need not stay in memory. Advice only. */
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
