/* STREAM's triad (McCalpin), plain stores, on as many threads as it is told. Bound by update.py, which built it. */
#include <pthread.h>
#include <stdint.h>

struct part {
    double *a;
    const double *b, *c;
    int64_t from, to;
};

static void *walk(void *argument) {
    struct part p = *(struct part *)argument;
    for (int64_t i = p.from; i < p.to; i++) p.a[i] = p.b[i] + 3.0 * p.c[i];
    return 0;
}

void triad(double *a, const double *b, const double *c, int64_t numel, int num_threads) {
    pthread_t threads[256];
    struct part parts[256];
    if (num_threads > 256) num_threads = 256;
    for (int t = 0; t < num_threads; t++) {
        parts[t] = (struct part){a, b, c, numel * t / num_threads, numel * (t + 1) / num_threads};
        if (t > 0) pthread_create(&threads[t], 0, walk, &parts[t]);
    }
    walk(&parts[0]);
    for (int t = 1; t < num_threads; t++) pthread_join(threads[t], 0);
}
