/*
 * Asynchronous reads and writes: the life of the engine and of a request. The threads are in aio_worker.c.
 *
 * A request is cut into blocks; workers of its direction take blocks from the head of the queue, so the next request
 * starts before the last block of this one is back.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "aio.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

static void init_condition(pthread_cond_t *condition)
{
	pthread_condattr_t attributes;

	pthread_condattr_init(&attributes);
	pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
	pthread_cond_init(condition, &attributes);
	pthread_condattr_destroy(&attributes);
}

static bool forked(const inf_aio *aio)          /* the threads stayed with the parent, the mutex may be held by one of them */
{
	return aio->owner != getpid();
}

/* ---- open ---- */

static bool good_options(const struct inf_aio_options *o)
{
	return o->block_bytes > 0 && o->block_bytes <= (size_t) 1 << 30 && o->queue_depth > 0 && o->queue_depth <= 65536 && o->workers[0] > 0 &&
		o->workers[1] > 0 && o->workers[0] <= 256 && o->workers[1] <= 256 && o->deadline_ns > 0 && o->backend;
}

static int start_workers(inf_aio *aio, const inf_backend *backend)
{
	int error = 0;

	pthread_mutex_lock(&aio->mutex);
	for (int direction = 0; direction < 2; direction++) {
		struct lane *lane = &aio->lanes[direction];
		int want = backend->setup ? aio->options.workers[direction] : inf_sync_workers(&aio->options, direction);

		while (lane->count < want && !error)
			error = inf_worker_start(lane, aio, backend);
	}
	pthread_mutex_unlock(&aio->mutex);
	return error;
}

/* Lets every worker that has nothing in flight go, and waits until all have. */
static void stop_workers(inf_aio *aio)
{
	pthread_mutex_lock(&aio->mutex);
	aio->stopping = true;
	pthread_cond_broadcast(&aio->work);
	for (int direction = 0; direction < 2; direction++)
		for (int i = 0; i < aio->lanes[direction].count; i++)
			inf_worker_ring(&aio->lanes[direction].workers[i]);

	for (int direction = 0; direction < 2; direction++)
		for (int i = 0; i < aio->lanes[direction].count; i++) {
			struct worker *worker = &aio->lanes[direction].workers[i];

			while (!worker->exited && !worker->abandoned)
				pthread_cond_wait(&aio->quiet, &aio->mutex);
		}
	pthread_mutex_unlock(&aio->mutex);
}

/* True when no abandoned worker is left that may still come back and look at the engine's memory. */
static bool reap_workers(inf_aio *aio)
{
	bool all = true;

	for (int direction = 0; direction < 2; direction++) {
		struct lane *lane = &aio->lanes[direction];

		for (int i = 0; i < lane->count; i++) {
			if (lane->workers[i].abandoned) {
				pthread_detach(lane->workers[i].id);
				all = false;
				continue;
			}
			pthread_join(lane->workers[i].id, NULL);
			inf_worker_free(&lane->workers[i]);
		}
		if (all)
			lane->count = lane->alive = lane->slots = 0;
	}
	return all;
}

static void drop_engine(inf_aio *aio)
{
	if (__atomic_sub_fetch(&aio->references, 1, __ATOMIC_ACQ_REL))
		return;
	free(aio->lanes[INF_READ].workers);
	free(aio->lanes[INF_WRITE].workers);
	pthread_cond_destroy(&aio->watch);
	pthread_cond_destroy(&aio->quiet);
	pthread_cond_destroy(&aio->work);
	pthread_mutex_destroy(&aio->mutex);
	free(aio);
}

/* A worker with a context has queue_depth blocks, one without has one. */
static int count_slots(const struct inf_aio_options *options, int direction)
{
	int with_context = options->backend->setup ? options->workers[direction] * options->queue_depth : 0;

	return with_context + (options->backend->setup && !options->fallback ? 0 : inf_sync_workers(options, direction));
}

static inf_aio *new_engine(const struct inf_aio_options *options)
{
	inf_aio *aio = calloc(1, sizeof(*aio));
	bool room = aio;

	for (int direction = 0; room && direction < 2; direction++) {
		struct lane *lane = &aio->lanes[direction];

		lane->room = inf_sync_workers(options, direction);
		lane->slot_bound = count_slots(options, direction);
		lane->workers = calloc((size_t) lane->room, sizeof(*lane->workers));
		room = lane->workers;
	}
	if (!room) {
		if (aio)
			free(aio->lanes[INF_READ].workers);
		free(aio);
		return NULL;
	}
	aio->owner = getpid();
	aio->references = 1;
	aio->options = *options;
	pthread_mutex_init(&aio->mutex, NULL);
	init_condition(&aio->work);
	init_condition(&aio->quiet);
	init_condition(&aio->watch);
	return aio;
}

static int start_engine(inf_aio *aio)
{
	int error;

	aio->watching = true;
	error = -pthread_create(&aio->watchdog, NULL, inf_watchdog_main, aio);
	if (error) {
		aio->watching = false;
		return error;
	}
	aio->backend = aio->options.backend;
	error = start_workers(aio, aio->backend);
	if (error && aio->options.fallback) {           /* no contexts left on this host, or a sandbox without these calls */
		stop_workers(aio);
		reap_workers(aio);
		aio->stopping = false;
		aio->backend = aio->options.fallback;
		error = start_workers(aio, aio->backend);
	}
	return error;
}

int inf_aio_open(const struct inf_aio_options *options, inf_aio **result)
{
	sigset_t all, old;
	inf_aio *aio;
	int error;

	if (!good_options(options))
		return -EINVAL;
	aio = new_engine(options);
	if (!aio)
		return -ENOMEM;
	sigfillset(&all);               /* signals are for Python's threads */
	pthread_sigmask(SIG_SETMASK, &all, &old);
	error = start_engine(aio);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (error) {
		inf_aio_close(aio);
		return error;
	}
	*result = aio;
	return 0;
}

const char *inf_aio_backend_name(inf_aio *aio)
{
	const char *name;

	if (forked(aio))
		return aio->options.backend->name;
	pthread_mutex_lock(&aio->mutex);
	name = aio->backend->name;
	pthread_mutex_unlock(&aio->mutex);
	return name;
}

/* ---- a request ---- */

static void enqueue(inf_aio *aio, struct inf_request *request)
{
	struct lane *lane = &aio->lanes[request->direction];

	request->queued = true;
	if (lane->tail)
		lane->tail->next = request;
	else
		lane->head = request;
	lane->tail = request;
	for (int i = 0; i < lane->count; i++)
		inf_worker_ring(&lane->workers[i]);
	pthread_cond_broadcast(&aio->work);
}

static void dequeue(struct inf_request *request)
{
	struct lane *lane = &request->aio->lanes[request->direction];
	struct inf_request **link = &lane->head, *before = NULL;

	if (!request->queued)
		return;
	for (; *link != request; link = &(*link)->next)
		before = *link;
	*link = request->next;
	if (lane->tail == request)
		lane->tail = before;
	request->queued = false;
	request->next = NULL;
}

/* Negative: the descriptor is no good. */
static int look_at(int fd, struct file *file)
{
	int flags = fcntl(fd, F_GETFL);

	if (flags < 0)
		return -errno;
	*file = (struct file) {.fd = fd, .grain = flags & O_DIRECT ? 4096 : 1};
	return 0;
}

static void free_request(struct inf_request *request)
{
	pthread_cond_destroy(&request->done);
	free(request->files);
	free(request);
}

static struct inf_request *new_request(inf_aio *aio, int direction, int64_t offset, void *address, size_t whole)
{
	struct inf_request *request = calloc(1, sizeof(*request));

	if (!request)
		return NULL;
	*request = (struct inf_request) {
		.aio = aio, .direction = direction, .offset = offset, .address = address, .whole = whole,
		.references = 2,                /* the handle, and the engine until it finishes */
		.outcome.failed_offset = -1,
	};
	init_condition(&request->done);
	return request;
}

/* The engine takes the request over, or it is freed. */
static int start_request(struct inf_request *request, inf_request **result)
{
	inf_aio *aio = request->aio;

	pthread_mutex_lock(&aio->mutex);
	if (aio->closing) {
		pthread_mutex_unlock(&aio->mutex);
		free_request(request);
		return -ESHUTDOWN;
	}
	__atomic_add_fetch(&aio->references, 1, __ATOMIC_RELAXED);
	aio->unfinished++;
	request->outcome.started_ns = inf_now_ns();
	if (!aio->lanes[request->direction].alive)
		inf_request_fail(request, -EIO, request->offset);       /* every worker waits for a drive that does not answer */
	if (request->outcome.error || !request->whole)
		inf_request_finish(request);
	else
		enqueue(aio, request);
	*result = request;
	pthread_mutex_unlock(&aio->mutex);
	return 0;
}

int inf_aio_submit(inf_aio *aio, int direction, int fd, int64_t offset, void *address, size_t nbytes, inf_request **result)
{
	struct inf_request *request;
	struct file file;
	int error;

	if (forked(aio))
		return -ECHILD;
	if ((direction != INF_READ && direction != INF_WRITE) || offset < 0 || nbytes > INT64_MAX - (size_t) offset)
		return -EINVAL;
	error = look_at(fd, &file);
	if (error)
		return error;
	request = new_request(aio, direction, offset, address, nbytes);
	if (!request)
		return -ENOMEM;
	request->file = file;
	return start_request(request, result);
}

/* ---- scattered requests ---- */

static bool good_transfers(const struct inf_scatter *s)
{
	for (size_t i = 0; i < s->count; i++) {
		const struct inf_transfer *t = &s->transfers[i];
		bool moves = t->direction == INF_READ || t->direction == INF_WRITE;

		if ((!moves && t->direction != INF_SYNC) || moves != (t->nbytes > 0) || t->file < 0 || t->file >= s->files)
			return false;
		if (t->offset < 0 || t->offset > INT64_MAX - (int64_t) t->nbytes || t->nbytes > s->stride || t->buffer < -2)
			return false;
	}
	return true;
}

int inf_aio_submit_scatter(inf_aio *aio, int lane, const struct inf_scatter *scatter, inf_request **result)
{
	struct inf_request *request;
	int error = 0;

	if (forked(aio))
		return -ECHILD;
	if ((lane != INF_READ && lane != INF_WRITE) || scatter->files < 1 || !good_transfers(scatter))
		return -EINVAL;
	request = new_request(aio, lane, 0, scatter->address, scatter->count);
	if (!request)
		return -ENOMEM;
	request->scatter = *scatter;
	request->files = calloc((size_t) scatter->files, sizeof(*request->files));
	if (!request->files)
		error = -ENOMEM;
	for (int i = 0; i < scatter->files && !error; i++)
		error = look_at(scatter->fds[i], &request->files[i]);
	if (error) {
		free_request(request);
		return error;
	}
	return start_request(request, result);
}

int inf_aio_slots(inf_aio *aio, int lane)
{
	return lane == INF_READ || lane == INF_WRITE ? aio->lanes[lane].slot_bound : -EINVAL;
}

/* The first failure is the one reported; what is not dealt out yet is not started. */
void inf_request_fail(struct inf_request *request, int error, int64_t offset)
{
	if (request->outcome.error)
		return;
	request->outcome.error = error;
	request->outcome.failed_offset = offset;
	dequeue(request);
}

void inf_request_finish(struct inf_request *request)
{
	inf_aio *aio = request->aio;

	if (request->finished)          /* timed out earlier, and its last block is back from a drive that still answers */
		return;
	dequeue(request);
	request->outcome.finished_ns = inf_now_ns();
	__atomic_store_n(&request->finished, true, __ATOMIC_RELEASE);
	pthread_cond_broadcast(&request->done);
	if (--aio->unfinished == 0)
		pthread_cond_broadcast(&aio->quiet);
	inf_request_drop(request);
}

void inf_request_curtail(struct inf_request *request)
{
	dequeue(request);
	request->whole = request->cut;
	if (!request->outstanding)
		inf_request_finish(request);
}

/* The engine outlives this call: the caller holds the mutex in its memory, and a reference. */
void inf_request_drop(struct inf_request *request)
{
	inf_aio *aio = request->aio;

	if (--request->references)
		return;
	free_request(request);
	__atomic_sub_fetch(&aio->references, 1, __ATOMIC_ACQ_REL);
}

static bool is_finished(const struct inf_request *request)
{
	return __atomic_load_n(&request->finished, __ATOMIC_ACQUIRE);
}

static void sleep_until_finished(struct inf_request *request, int64_t timeout_ns)
{
	inf_aio *aio = request->aio;
	int64_t until_ns = inf_now_ns() + timeout_ns;
	struct timespec until = {.tv_sec = until_ns / 1000000000, .tv_nsec = until_ns % 1000000000};
	int error = 0;

	if (!timeout_ns)                        /* only asks: not worth the workers' mutex */
		return;
	pthread_mutex_lock(&aio->mutex);
	while (!request->finished && !error)
		error = timeout_ns < 0 ? pthread_cond_wait(&request->done, &aio->mutex) : pthread_cond_timedwait(&request->done, &aio->mutex, &until);
	pthread_mutex_unlock(&aio->mutex);
}

int inf_request_wait(inf_request *request, int64_t timeout_ns, struct inf_outcome *outcome)
{
	if (forked(request->aio))
		return -ECHILD;
	if (!is_finished(request))
		sleep_until_finished(request, timeout_ns);
	if (!is_finished(request))
		return 0;
	*outcome = request->outcome;            /* it does not change any more */
	return 1;
}

void inf_request_release(inf_request *request)
{
	inf_aio *aio = request->aio;

	if (forked(aio))
		return;
	__atomic_add_fetch(&aio->references, 1, __ATOMIC_RELAXED);      /* the mutex must outlive its own unlocking */
	pthread_mutex_lock(&aio->mutex);
	inf_request_drop(request);
	pthread_mutex_unlock(&aio->mutex);
	drop_engine(aio);
}

/* ---- close ---- */

void inf_aio_close(inf_aio *aio)
{
	if (!aio || forked(aio))
		return;
	pthread_mutex_lock(&aio->mutex);
	aio->closing = true;
	while (aio->unfinished)         /* the watchdog sees to it that this ends */
		pthread_cond_wait(&aio->quiet, &aio->mutex);
	pthread_mutex_unlock(&aio->mutex);

	stop_workers(aio);
	pthread_mutex_lock(&aio->mutex);
	bool watching = aio->watching;
	aio->watching = false;
	pthread_cond_signal(&aio->watch);
	pthread_mutex_unlock(&aio->mutex);
	if (watching)
		pthread_join(aio->watchdog, NULL);
	if (reap_workers(aio))
		drop_engine(aio);       /* else it stays: a worker may come back from the dead drive and look at it */
}
