/*
 * Threads that live as long as the pool. Callers hand them one task at a time and sleep until it is done.
 *
 * Blocks are taken one by one from a counter, so that a core that the machine lends to somebody else slows the task by
 * its share only, and a thread that gets none until all blocks are taken is not waited for. Which thread runs a block
 * never shows in a result.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "internal.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <unistd.h>

struct inf_pool {
	pid_t owner;                    /* threads do not survive fork() */
	int threads;
	pthread_mutex_t callers;        /* one task at a time */
	pthread_mutex_t mutex;
	pthread_cond_t wake;
	pthread_cond_t rest;
	bool closing;
	uint64_t round;                 /* counts tasks: a thread looks at each round once */
	int busy;                       /* threads at work on this round */
	inf_task *task;
	void *context;
	int64_t numel;
	atomic_int_fast64_t next;       /* first element nobody has taken */
	pthread_t ids[];
};

static bool has_blocks(inf_pool *pool)
{
	return atomic_load_explicit(&pool->next, memory_order_relaxed) < pool->numel;
}

static void take_blocks(inf_pool *pool)
{
	for (;;) {
		int64_t begin = atomic_fetch_add_explicit(&pool->next, INF_BLOCK, memory_order_relaxed);

		if (begin >= pool->numel)
			return;
		pool->task(pool->context, begin, begin + INF_BLOCK < pool->numel ? begin + INF_BLOCK : pool->numel);
	}
}

static void *thread_main(void *argument)
{
	inf_pool *pool = argument;
	uint64_t seen = 0;

	pthread_mutex_lock(&pool->mutex);
	for (;;) {
		while (pool->round == seen && !pool->closing)
			pthread_cond_wait(&pool->wake, &pool->mutex);
		if (pool->closing)
			break;
		seen = pool->round;
		if (!has_blocks(pool))
			continue;               /* too late for this one */
		pool->busy++;
		pthread_mutex_unlock(&pool->mutex);
		take_blocks(pool);
		pthread_mutex_lock(&pool->mutex);
		if (--pool->busy == 0)
			pthread_cond_signal(&pool->rest);
	}
	pthread_mutex_unlock(&pool->mutex);
	return NULL;
}

static int start_thread(inf_pool *pool, int index, const int *cores)
{
	pthread_attr_t attributes;
	int error = pthread_attr_init(&attributes);

	if (error)
		return -error;
	if (cores) {
		cpu_set_t set;

		CPU_ZERO(&set);
		if (cores[index] < 0 || cores[index] >= CPU_SETSIZE)
			error = EINVAL;
		else {
			CPU_SET(cores[index], &set);
			error = pthread_attr_setaffinity_np(&attributes, sizeof(set), &set);
		}
	}
	if (!error)
		error = pthread_create(&pool->ids[index], &attributes, thread_main, pool);
	pthread_attr_destroy(&attributes);
	return -error;
}

int inf_pool_open(int threads, const int *cores, inf_pool **result)
{
	inf_pool *pool;
	sigset_t all, old;
	int error = 0;

	if (threads < 1 || threads > 4096)
		return -EINVAL;
	pool = calloc(1, sizeof(*pool) + (size_t) threads * sizeof(pool->ids[0]));
	if (!pool)
		return -ENOMEM;
	pool->owner = getpid();
	pthread_mutex_init(&pool->callers, NULL);
	pthread_mutex_init(&pool->mutex, NULL);
	pthread_cond_init(&pool->wake, NULL);
	pthread_cond_init(&pool->rest, NULL);

	/* Signals are for Python's threads. */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	while (pool->threads < threads && !error) {
		error = start_thread(pool, pool->threads, cores);
		pool->threads += !error;
	}
	pthread_sigmask(SIG_SETMASK, &old, NULL);

	if (error) {
		inf_pool_close(pool);
		return error;
	}
	*result = pool;
	return 0;
}

int inf_pool_threads(const inf_pool *pool)
{
	return pool->threads;
}

int inf_pool_run(inf_pool *pool, int64_t numel, inf_task *task, void *context)
{
	if (numel <= INF_BLOCK) {               /* not worth waking anybody */
		if (numel > 0)
			task(context, 0, numel);
		return 0;
	}
	if (pool->owner != getpid())
		return -ECHILD;

	pthread_mutex_lock(&pool->callers);
	pthread_mutex_lock(&pool->mutex);
	pool->task = task;
	pool->context = context;
	pool->numel = numel;
	atomic_store(&pool->next, 0);
	pool->round++;
	pthread_cond_broadcast(&pool->wake);
	while (pool->busy || has_blocks(pool))
		pthread_cond_wait(&pool->rest, &pool->mutex);
	pthread_mutex_unlock(&pool->mutex);
	pthread_mutex_unlock(&pool->callers);
	return 0;
}

void inf_pool_close(inf_pool *pool)
{
	if (!pool || pool->owner != getpid())
		return;
	pthread_mutex_lock(&pool->mutex);
	pool->closing = true;
	pthread_cond_broadcast(&pool->wake);
	pthread_mutex_unlock(&pool->mutex);
	for (int i = 0; i < pool->threads; i++)
		pthread_join(pool->ids[i], NULL);
	pthread_cond_destroy(&pool->rest);
	pthread_cond_destroy(&pool->wake);
	pthread_mutex_destroy(&pool->mutex);
	pthread_mutex_destroy(&pool->callers);
	free(pool);
}
