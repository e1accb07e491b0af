/* Run one job at a time on threads that sleep between calls; part of update.c. A thread that has finished a piece of
 * the job takes the next one, so that a slow core does not delay the others. While a job runs, a second caller works
 * alone. Threads start with the first job that needs them. After fork() a child starts its own. */

struct job {
    void (*piece)(void *context, int64_t index);
    void *context;
    int64_t num_pieces;
    int num_workers;
    atomic_llong next;
};

struct worker {
    struct tz_pool *pool;
    int index;
};

struct tz_pool {
    atomic_int holder; /* pid of the process in which a job runs, or 0 */
    pid_t owner;       /* pid of the process that started the threads */
    int max_workers, num_workers, busy, closing;
    uint64_t generation;
    struct job *job;
    pthread_mutex_t lock;
    pthread_cond_t posted, finished;
    pthread_t threads[TZ_MAX_THREADS];
    struct worker workers[TZ_MAX_THREADS];
};

static void work(struct job *job) {
    for (int64_t i; (i = atomic_fetch_add(&job->next, 1)) < job->num_pieces;) job->piece(job->context, i);
}

/* Wait on a condition variable for at most 0.1 s; the caller then checks its condition again. glibc before 2.41 can
 * lose a signal (its bug 25847): without the limit a step would then never end. */
static void wait_briefly(pthread_cond_t *condition, pthread_mutex_t *lock) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 100000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_nsec -= 1000000000;
        until.tv_sec++;
    }
    pthread_cond_timedwait(condition, lock, &until);
}

static void *run_worker(void *argument) {
    struct worker *self = argument;
    struct tz_pool *pool = self->pool;
    pthread_mutex_lock(&pool->lock);
    for (uint64_t seen = 0; !pool->closing;) {
        if (pool->generation == seen) {
            pthread_cond_wait(&pool->posted, &pool->lock);
            continue;
        }
        seen = pool->generation;
        struct job *job = pool->job;
        if (!job || self->index >= job->num_workers) continue;
        pool->busy++;
        pthread_mutex_unlock(&pool->lock);
        work(job);
        pthread_mutex_lock(&pool->lock);
        if (!--pool->busy) pthread_cond_signal(&pool->finished);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

/* Start threads until there are `wanted` workers. Return how many of these there are: fewer if a thread cannot be
 * started. The caller holds the pool. Workers block all signals, which are for Python's threads. */
static int start_workers(struct tz_pool *pool, int wanted) {
    if (pool->owner != getpid()) { /* after fork(): locks of the parent's threads are never released */
        pthread_mutex_init(&pool->lock, NULL);
        pthread_cond_init(&pool->posted, NULL);
        pthread_cond_init(&pool->finished, NULL);
        pool->num_workers = pool->busy = 0;
        pool->generation = 0;
        pool->job = NULL;
        pool->owner = getpid();
    }
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool->num_workers < wanted) {
        struct worker *next = &pool->workers[pool->num_workers];
        *next = (struct worker){pool, pool->num_workers};
        if (pthread_create(&pool->threads[pool->num_workers], NULL, run_worker, next)) break;
        pool->num_workers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return pool->num_workers < wanted ? pool->num_workers : wanted;
}

/* Acquire the pool; return 0 if another thread of this process holds it. */
static int try_acquire(struct tz_pool *pool) {
    int self = getpid(), holder = 0;
    while (!atomic_compare_exchange_strong(&pool->holder, &holder, self))
        if (holder == self) return 0;
    return 1;
}

static void run(struct tz_pool *pool, void (*piece)(void *, int64_t), void *context, int64_t num_pieces) {
    struct job job = {.piece = piece, .context = context, .num_pieces = num_pieces};
    int wanted = num_pieces > pool->max_workers ? pool->max_workers : (int)num_pieces - 1;
    if (wanted < 1 || !try_acquire(pool)) {
        work(&job);
        return;
    }
    job.num_workers = start_workers(pool, wanted);
    pthread_mutex_lock(&pool->lock);
    pool->job = &job;
    pool->generation++;
    pthread_cond_broadcast(&pool->posted);
    pthread_mutex_unlock(&pool->lock);
    work(&job);
    pthread_mutex_lock(&pool->lock);
    pool->job = NULL; /* threads that have not woken yet find no work */
    while (pool->busy) wait_briefly(&pool->finished, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
    atomic_store(&pool->holder, 0);
}

/* Create a pool of num_threads, including the caller's own. Return NULL if there is no memory. */
API struct tz_pool *tz_pool_open(int num_threads) {
    struct tz_pool *pool = calloc(1, sizeof *pool);
    if (pool) pool->max_workers = num_threads > TZ_MAX_THREADS ? TZ_MAX_THREADS - 1 : num_threads - 1;
    return pool;
}

/* End the threads. No call may be running. */
API void tz_pool_close(struct tz_pool *pool) {
    if (pool->owner == getpid()) {
        pthread_mutex_lock(&pool->lock);
        pool->closing = 1;
        pthread_cond_broadcast(&pool->posted);
        pthread_mutex_unlock(&pool->lock);
        for (int i = 0; i < pool->num_workers; i++) pthread_join(pool->threads[i], NULL);
    }
    free(pool);
}
