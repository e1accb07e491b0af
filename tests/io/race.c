/* Built with -fsanitize=thread: several threads submit to one pool, wait, poll and free their requests.
 *
 *     race FILE */
#include "direct_io.c"
#include <stdio.h>
#include <string.h>

enum { NUM_THREADS = 4, NUM_TURNS = 200, NUM_NBYTES = 64 * 1024 };

static tz_pool *pool;
static int fd;
static int num_wrong;
static char longlived[NUM_THREADS * NUM_NBYTES] __attribute__((aligned(4096)));

static void *submit_and_wait(void *argument)
{
    long index = (long)argument;
    char *data = malloc(NUM_NBYTES), *back = longlived + index * NUM_NBYTES;
    for (int turn = 0; turn < NUM_TURNS; turn++) {
        memset(data, (int)index + turn, NUM_NBYTES);
        memset(back, 0, NUM_NBYTES);
        tz_request *requests[4];
        for (int kind = 0; kind < 4; kind++) {
            tz_request *request = requests[kind] = calloc(1, sizeof *request);
            request->kind = kind == 0 ? TZ_WRITE : kind == 1 ? TZ_SYNC : TZ_READ;
            request->fd = fd;
            request->offset = index * NUM_NBYTES + (kind == 3 ? (int64_t)1 << 40 : 0); /* 3: past the end */
            request->nbytes = kind == 1 ? 0 : NUM_NBYTES;
            request->memory = kind == 0 ? data : back;
            request->alignment = 1;
            request->urgent = kind == 2 && turn % 2;
            tz_submit(pool, request);
            while (kind < 2 && !tz_wait(pool, request, 1000))
                (void)tz_moved_ns(pool, request);
        }
        for (int kind = 0; kind < 4; kind++) {
            while (!tz_wait(pool, requests[kind], 1000000000))
                ;
            if (requests[kind]->error != (kind == 3 ? TZ_END_OF_FILE : 0))
                __atomic_add_fetch(&num_wrong, 1, __ATOMIC_RELAXED);
            free(requests[kind]);
        }
        if (memcmp(data, back, NUM_NBYTES) != 0)
            __atomic_add_fetch(&num_wrong, 1, __ATOMIC_RELAXED);
    }
    free(data);
    return NULL;
}

int main(int num_arguments, char **arguments)
{
    pthread_t threads[NUM_THREADS];
    if (num_arguments != 2 || (fd = open(arguments[1], O_RDWR | O_CREAT, 0600)) < 0)
        return 2;
    if (tz_pool_open(3, 4096, &pool))
        return 3;
    for (long index = 0; index < NUM_THREADS; index++)
        pthread_create(&threads[index], NULL, submit_and_wait, (void *)index);
    for (int index = 0; index < NUM_THREADS; index++)
        pthread_join(threads[index], NULL);
    num_wrong += !tz_failed(pool);
    tz_pool_close(pool, 0);
    tz_pool_free(pool);
    if (num_wrong)
        fprintf(stderr, "%d wrong\n", num_wrong);
    return num_wrong != 0;
}
