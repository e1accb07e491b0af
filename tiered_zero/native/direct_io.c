/* Move blocks between memory and files on a pool of threads; bound with ctypes by tiered_zero/io/native.py.
 *
 * A request of any size is one tz_submit and one tz_wait. The pool keeps the unfinished requests in one list: urgent
 * reads, then all others, both in the order in which they came. A free worker takes the next unclaimed block of the
 * first request that has one, so that the device's queue drains neither between requests nor between files. The caller
 * submits a sync when its writes are finished.
 *
 * Each worker is a thread that moves one block by system calls.
 *
 * The pool's one mutex guards everything except the system calls and `finished`, which is stored last (release): after
 * that the pool does not touch the request again, and its owner may free it.
 *
 * Uses no Python and no global state, and prints nothing. Linux; needs pthreads only. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define _FILE_OFFSET_BITS 64
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#include "block.h"
#include "version.h"

enum { STACK_NBYTES = 128 * 1024 };

typedef struct tz_pool {
    pthread_mutex_t mutex;
    pthread_cond_t work, done;
    tz_request *first, *last;
    int64_t block_nbytes;
    int64_t moved_ns; /* when any block last started or ended */
    int32_t num_threads;
    int32_t stopping;
    int32_t failed; /* a request has failed */
    pthread_t threads[];
} tz_pool;

/* Return the time of CLOCK_MONOTONIC, which is Python's time.monotonic() on Linux. */
static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Remove a request from the list, and mark it as finished: its owner may free it at once. Mutex held. */
static void finish(tz_pool *pool, tz_request *request)
{
    if (request->error)
        __atomic_store_n(&pool->failed, 1, __ATOMIC_RELEASE);
    *(request->previous ? &request->previous->next : &pool->first) = request->next;
    *(request->next ? &request->next->previous : &pool->last) = request->previous;
    request->finished_ns = now_ns();
    __atomic_store_n(&request->finished, 1, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&pool->done);
}

/* Insert an urgent request behind the last urgent one, any other at the end. Mutex held. */
static void enlist(tz_pool *pool, tz_request *request)
{
    tz_request *next = NULL;
    if (request->urgent)
        for (next = pool->first; next && next->urgent;)
            next = next->next;
    request->next = next;
    request->previous = next ? next->previous : pool->last;
    *(request->previous ? &request->previous->next : &pool->first) = request;
    *(next ? &next->previous : &pool->last) = request;
}

/* Return the first request with an unclaimed block, or NULL. Mutex held. At most `num_threads` are fully claimed. */
static tz_request *first_claimable(const tz_pool *pool)
{
    tz_request *request = pool->first;
    while (request && !request->num_unclaimed)
        request = request->next;
    return request;
}

/* Claim the next block of a request that has one. Mutex held. */
static block claim(tz_pool *pool, tz_request *request)
{
    block next = {.request = request};
    next.start = request->kind == TZ_SYNC ? 0 : request->nbytes - request->num_unclaimed;
    next.wanted = request->num_unclaimed < pool->block_nbytes ? request->num_unclaimed : pool->block_nbytes;
    request->num_unclaimed -= next.wanted;
    request->num_running++;
    request->moved_ns = pool->moved_ns = now_ns();
    return next;
}

/* Record a block that is done; its owner may then free the request. Mutex held. */
static void conclude(tz_pool *pool, const block *block)
{
    tz_request *request = block->request;
    request->moved_ns = pool->moved_ns = now_ns();
    request->num_running--;
    if (block->error && !request->error) {
        request->error = block->error;
        request->error_offset = request->offset + block->start;
        request->error_wanted = request->kind == TZ_SYNC ? 0 : block->wanted;
        request->error_got = block->got;
        request->file_nbytes = block->file_nbytes;
        request->num_unclaimed = 0; /* blocks that have not begun are dropped */
    }
    if (!request->num_unclaimed && !request->num_running)
        finish(pool, request);
}

/* Claim and move one block of a request. Mutex held on entry and on return, released in between. */
static void work_on(tz_pool *pool, tz_request *request)
{
    block block = claim(pool, request);
    if (!request->error) {
        pthread_mutex_unlock(&pool->mutex);
        carry_out(&block);
        pthread_mutex_lock(&pool->mutex);
    }
    conclude(pool, &block);
}

/* Wait for at most one second; the caller then checks again: glibc before 2.41 can lose a signal (its bug 25847). */
static void wait_for_work(tz_pool *pool)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec++;
    pthread_cond_timedwait(&pool->work, &pool->mutex, &until);
}

static void *work(void *argument)
{
    tz_pool *pool = argument;
    pthread_mutex_lock(&pool->mutex);
    for (;;) {
        tz_request *request = first_claimable(pool);
        if (request)
            work_on(pool, request);
        else if (pool->stopping)
            break;
        else
            wait_for_work(pool);
    }
    pthread_mutex_unlock(&pool->mutex);
    return NULL;
}

/* End the workers after their blocks. `abandon`: do not wait for them, because some are stuck in a system call; the
 * pool and its unfinished requests must then never be freed. */
void tz_pool_close(tz_pool *pool, int32_t abandon)
{
    pthread_mutex_lock(&pool->mutex);
    pool->stopping = 1;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->mutex);
    for (int32_t index = 0; index < pool->num_threads; index++) {
        if (abandon)
            pthread_detach(pool->threads[index]);
        else
            pthread_join(pool->threads[index], NULL);
    }
}

/* Free a pool that was closed and not abandoned, when no thread calls it any more. */
void tz_pool_free(tz_pool *pool)
{
    pthread_cond_destroy(&pool->work);
    pthread_cond_destroy(&pool->done);
    pthread_mutex_destroy(&pool->mutex);
    free(pool);
}

static tz_pool *new_pool(int32_t num_threads, int64_t block_nbytes)
{
    tz_pool *pool = calloc(1, sizeof(tz_pool) + (size_t)num_threads * sizeof(pthread_t));
    if (!pool)
        return NULL;
    pool->block_nbytes = block_nbytes;
    pool->moved_ns = now_ns();
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->work, &monotonic);
    pthread_cond_init(&pool->done, &monotonic);
    pthread_condattr_destroy(&monotonic);
    return pool;
}

/* Start the workers. Return 0 or an errno. They block all signals, which are for the program's own threads. */
static int start_threads(tz_pool *pool, int32_t num_threads)
{
    pthread_attr_t small_stack;
    pthread_attr_init(&small_stack);
    pthread_attr_setstacksize(&small_stack, STACK_NBYTES);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int code = 0;
    while (!code && pool->num_threads < num_threads) {
        code = pthread_create(&pool->threads[pool->num_threads], &small_stack, work, pool);
        pool->num_threads += code == 0;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&small_stack);
    return code;
}

/* Create a pool. Return 0 and set *result, or return an errno. */
int32_t tz_pool_open(int32_t num_threads, int64_t block_nbytes, tz_pool **result)
{
    tz_pool *pool = new_pool(num_threads, block_nbytes);
    if (!pool)
        return ENOMEM;
    int code = start_threads(pool, num_threads);
    if (code) {
        tz_pool_close(pool, 0);
        tz_pool_free(pool);
    } else {
        *result = pool;
    }
    return code;
}

/* Submit a request. Blocks only for the mutex. */
void tz_submit(tz_pool *pool, tz_request *request)
{
    pthread_mutex_lock(&pool->mutex);
    request->submitted_ns = now_ns();
    request->num_unclaimed = request->kind == TZ_SYNC ? 1 : request->nbytes;
    enlist(pool, request);
    if (!request->num_unclaimed)
        finish(pool, request); /* a request for nothing */
    else if (request->num_unclaimed > pool->block_nbytes)
        pthread_cond_broadcast(&pool->work);
    else
        pthread_cond_signal(&pool->work);
    pthread_mutex_unlock(&pool->mutex);
}

/* Return 1 when the request is finished, or 0 after `timeout_ns`. */
int32_t tz_wait(tz_pool *pool, tz_request *request, int64_t timeout_ns)
{
    if (__atomic_load_n(&request->finished, __ATOMIC_ACQUIRE))
        return 1;
    if (timeout_ns <= 0)
        return 0;
    int64_t until_ns = now_ns() + timeout_ns;
    struct timespec until = {.tv_sec = until_ns / 1000000000, .tv_nsec = until_ns % 1000000000};
    pthread_mutex_lock(&pool->mutex);
    while (!request->finished && pthread_cond_timedwait(&pool->done, &pool->mutex, &until) == 0)
        ;
    int32_t finished = request->finished;
    pthread_mutex_unlock(&pool->mutex);
    return finished;
}

/* Return the time (as now_ns) of this request's last progress; while it is queued, of any request's. */
int64_t tz_moved_ns(tz_pool *pool, const tz_request *request)
{
    pthread_mutex_lock(&pool->mutex);
    int64_t moved_ns = request->moved_ns ? request->moved_ns : pool->moved_ns;
    pthread_mutex_unlock(&pool->mutex);
    return moved_ns;
}

/* Return 1 if any request has failed. */
int32_t tz_failed(tz_pool *pool)
{
    return __atomic_load_n(&pool->failed, __ATOMIC_ACQUIRE);
}
