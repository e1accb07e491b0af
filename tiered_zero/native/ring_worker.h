/* The one worker of a pool that has a ring; part of direct_io.c. */

enum { TAG_WAKE = 1 << 30, TAG_PAUSE = 1 << 29 }; /* tags of what is no block; a block's tag is its index */

/* Mutex held. `always`: also a worker that cannot take a block now. A ring that is full looks for itself. */
static void wake(tz_pool *pool, int always)
{
    uint64_t one = 1;
    if (pool->blocks && (always || pool->asleep)) {
        pool->asleep = 0;
        ssize_t written = write(pool->event_fd, &one, sizeof one);
        (void)written; /* cannot fail: the counter is read long before it is full */
    }
}

static void put_block(ring *ring, block *block, int32_t index)
{
    const tz_request *request = block->request;
    aim(block);
    char *memory = request->memory + block->start + block->from;
    ring_entry entry = {.fd = request->fd, .tag = (uint64_t)index};
    if (request->kind == TZ_SYNC) {
        entry.opcode = RING_FSYNC;
        entry.op_flags = RING_FSYNC_DATASYNC;
    } else {
        int reads = request->kind == TZ_READ, buffer = ring_buffer_of(ring, memory, block->wanted - block->from);
        entry.opcode = buffer < 0 ? (reads ? RING_READ : RING_WRITE) : (reads ? RING_READ_FIXED : RING_WRITE_FIXED);
        entry.buffer = (uint16_t)(buffer < 0 ? 0 : buffer);
        entry.offset = (uint64_t)(request->offset + block->start + block->from);
        entry.address = (uint64_t)(uintptr_t)memory;
        entry.nbytes = (uint32_t)(block->wanted - block->from);
    }
    ring_put(ring, entry);
}

/* The others go on. */
static void put_pause(ring *ring, block *block, int32_t index)
{
    block->pause[0] = 0;
    block->pause[1] = pause_ns(block->num_tries);
    ring_entry entry = {.opcode = RING_TIMEOUT, .fd = -1, .nbytes = 1, .tag = (uint64_t)index | TAG_PAUSE};
    entry.address = (uint64_t)(uintptr_t)block->pause;
    ring_put(ring, entry);
}

/* A try has ended, or a pause. 1 once the block is done. */
static int advance(ring *ring, block *block, int32_t index, int pause_ended, int64_t result)
{
    if (!pause_ended && complete_io(block, result)) {
        drop_pages(block);
        return 1;
    }
    if (!pause_ended && block->num_tries)
        put_pause(ring, block, index);
    else
        put_block(ring, block, index);
    return 0;
}

/* Fail the entries that the kernel refuses to take, with its errno, as if each had been tried. */
static int32_t fail_unsubmitted(tz_pool *pool, ring *ring, int code, int32_t *done, int *is_armed)
{
    int32_t num_done = 0;
    for (uint64_t tag; ring_remove_last(ring, &tag);) {
        if (tag == TAG_WAKE) {
            *is_armed = 0;
        } else {
            int32_t index = (int32_t)(tag & ~(uint64_t)TAG_PAUSE);
            pool->blocks[index].error = code;
            done[num_done++] = index;
        }
    }
    return num_done;
}

static void arm(tz_pool *pool, ring *ring, uint64_t *wake_count)
{
    ring_entry entry = {.opcode = RING_READ, .fd = pool->event_fd, .nbytes = sizeof *wake_count, .tag = TAG_WAKE};
    entry.address = (uint64_t)(uintptr_t)wake_count;
    ring_put(ring, entry);
}

/* Mutex not held. Sleep until something is done; the indices of the blocks that are, and how many. */
static int32_t turn(tz_pool *pool, ring *ring, int *num_failures, int *is_armed, int32_t *done)
{
    int code = ring_enter(ring);
    *num_failures = code && code != EINTR ? *num_failures + 1 : 0;
    int32_t num_done = 0;
    for (ring_completion completion; ring_reap(ring, &completion); *num_failures = 0) {
        if (completion.tag == TAG_WAKE) {
            *is_armed = 0;
            continue;
        }
        int32_t index = (int32_t)(completion.tag & ~(uint64_t)TAG_PAUSE);
        if (advance(ring, &pool->blocks[index], index, (completion.tag & TAG_PAUSE) != 0, completion.result))
            done[num_done++] = index;
    }
    if (*num_failures >= MAX_TRIES)
        num_done += fail_unsubmitted(pool, ring, code, done + num_done, is_armed);
    if (*num_failures)
        pause_before_try(*num_failures);
    return num_done;
}

/* Mutex held. Fill the ring with blocks, in the order of the list; how many are on their way then. */
static int32_t claim_blocks(tz_pool *pool, ring *ring, int32_t num_busy)
{
    tz_request *request;
    for (int32_t index = 0; num_busy < pool->depth && (request = first_claimable(pool)); index++) {
        while (pool->blocks[index].request)
            index++;
        block next = claim(pool, request);
        if (request->error) { /* a sync behind a write that failed */
            conclude(pool, &next);
            index--;
        } else {
            pool->blocks[index] = next;
            put_block(ring, &pool->blocks[index], index);
            num_busy++;
        }
    }
    return num_busy;
}

/* Mutex held on entry and on return, not while the kernel pins the memory. */
static void register_memory(tz_pool *pool, ring *ring)
{
    char *memory = pool->register_memory;
    pthread_mutex_unlock(&pool->mutex);
    int code = ring_register(ring, memory, pool->register_nbytes);
    pthread_mutex_lock(&pool->mutex);
    pool->register_code = code;
    pool->register_memory = NULL;
    pthread_cond_broadcast(&pool->done);
}

static void *work_ring(void *argument)
{
    tz_pool *pool = argument;
    ring ring;
    int32_t *done = calloc((size_t)pool->depth, sizeof *done), num_busy = 0, num_done = 0;
    int code = done ? ring_open(&ring, (uint32_t)pool->depth + 1) : ENOMEM, num_failures = 0, is_armed = 0;
    uint64_t wake_count;
    pthread_mutex_lock(&pool->mutex);
    pool->ring_code = code;
    pthread_cond_broadcast(&pool->done);
    while (!code) {
        if (pool->register_memory)
            register_memory(pool, &ring);
        num_busy = claim_blocks(pool, &ring, num_busy);
        if (pool->stopping && !num_busy && !is_armed)
            break; /* the kernel has nothing of ours any more */
        if (!is_armed && !pool->stopping) {
            arm(pool, &ring, &wake_count);
            is_armed = 1;
        }
        pool->asleep = num_busy < pool->depth;
        pthread_mutex_unlock(&pool->mutex);
        num_done = turn(pool, &ring, &num_failures, &is_armed, done);
        pthread_mutex_lock(&pool->mutex);
        pool->asleep = 0;
        for (int32_t at = 0; at < num_done; at++) {
            conclude(pool, &pool->blocks[done[at]]);
            pool->blocks[done[at]].request = NULL;
        }
        num_busy -= num_done;
    }
    pthread_mutex_unlock(&pool->mutex);
    if (!code)
        ring_close(&ring);
    free(done);
    return NULL;
}
