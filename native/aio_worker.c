/*
 * The threads of the engine. A worker owns one kernel context and keeps it at queue depth; the watchdog gives up on a
 * worker whose transfer does not come back in time.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "aio.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>

#define MAX_STALLS 3
#define PAUSE_MS 1
#define SYNC_PER_WORKER 8               /* without asynchronous calls a transfer in flight costs a thread */

int inf_sync_workers(const struct inf_aio_options *options, int direction)
{
	int depth = options->queue_depth < SYNC_PER_WORKER ? options->queue_depth : SYNC_PER_WORKER;
	int want = options->workers[direction] * depth;

	return want < 64 ? want : options->workers[direction] > 64 ? options->workers[direction] : 64;
}

static size_t smaller(size_t a, size_t b)
{
	return a < b ? a : b;
}

/* ---- blocks: from the queue to the kernel and back; mutex held ---- */

static void push(struct block **list, struct block *block)
{
	block->next = *list;
	*list = block;
}

static struct block *pop(struct block **list)
{
	struct block *block = *list;

	if (block)
		*list = block->next;
	return block;
}

static void finish_block(struct worker *worker, struct block *block)
{
	struct inf_request *request = block->request;

	block->request = NULL;
	push(&worker->idle, block);
	worker->aio->held--;
	worker->lane->out--;
	if (--request->outstanding == 0 && (request->cut == request->whole || request->outcome.error))
		inf_request_finish(request);
	inf_request_drop(request);
}

static void cut_extent(struct worker *worker, struct inf_request *request, struct block *block)
{
	block->file = request->file;
	block->direction = request->direction;
	block->offset = request->offset + (int64_t) request->cut;
	block->address = request->address + request->cut;
	block->nbytes = smaller(request->whole - request->cut, worker->aio->options.block_bytes);
	request->cut += block->nbytes;
}

static void cut_transfer(struct worker *worker, struct inf_request *request, struct block *block)
{
	const struct inf_scatter *scatter = &request->scatter;
	const struct inf_transfer *transfer = &scatter->transfers[request->cut];
	int slot = worker->first_slot + (int) (block - worker->blocks) + (transfer->buffer == -2 ? worker->lane->slot_bound : 0);

	block->file = request->files[transfer->file];
	block->direction = transfer->direction;
	block->offset = transfer->offset;
	block->address = (char *) scatter->address + scatter->stride * (size_t) (transfer->buffer < 0 ? slot : transfer->buffer);
	block->nbytes = transfer->nbytes;
	block->timing = &scatter->timings[request->cut];
	block->timing->begun_ns = block->timing->issued_ns = block->since_ns;
	block->timing->depth = worker->lane->out;
	request->cut++;
}

/* The head of the queue, once requests whose time is up have left it. */
static struct inf_request *next_request(struct worker *worker, int64_t now_ns)
{
	struct inf_request *request;

	while ((request = worker->lane->head) && request->scatter.until_ns && now_ns >= request->scatter.until_ns)
		inf_request_curtail(request);
	return request;
}

static struct block *cut_block(struct worker *worker)
{
	int64_t now_ns = worker->idle && worker->lane->head ? inf_now_ns() : 0;
	struct inf_request *request = now_ns ? next_request(worker, now_ns) : NULL;
	struct block *block = request ? pop(&worker->idle) : NULL;

	if (!block)
		return NULL;
	*block = (struct block) {.request = request, .since_ns = now_ns};
	if (!request->cut)
		request->outcome.started_ns = now_ns;
	request->outstanding++;
	request->references++;
	worker->lane->out++;
	if (request->files)
		cut_transfer(worker, request, block);
	else
		cut_extent(worker, request, block);
	if (worker->aio->held++ == 0 && worker->aio->dozing)
		pthread_cond_signal(&worker->aio->watch);
	if (request->cut == request->whole) {
		worker->lane->head = request->next;
		if (!request->next)
			worker->lane->tail = NULL;
		request->queued = false;
		request->next = NULL;
	}
	return block;
}

static struct block *take_block(struct worker *worker)
{
	struct block *block;

	while ((block = pop(&worker->again)) && block->request->outcome.error)
		finish_block(worker, block);            /* its request failed meanwhile */
	return block ? block : cut_block(worker);
}

static int64_t block_offset(const struct block *block)
{
	return block->offset + (int64_t) block->moved;
}

static void fail_block(struct worker *worker, struct block *block, int error)
{
	inf_request_fail(block->request, error, block_offset(block));
	finish_block(worker, block);
}

static void succeed_block(struct worker *worker, struct block *block)
{
	if (block->timing)
		block->timing->done_ns = inf_now_ns();
	finish_block(worker, block);
}

/*
 * The kernel moved `moved` bytes. Short is legal: the rest is handed in again, from a point that direct I/O accepts.
 * Nothing at all is the end of the file inside a request: the store is damaged.
 */
static void advance_block(struct worker *worker, struct block *block, size_t moved)
{
	size_t reached = block->moved + moved;

	if (reached < block->nbytes)
		reached -= reached % block->file.grain;
	if (moved == 0 || reached > block->nbytes || (reached == block->moved && ++block->stalls > MAX_STALLS)) {
		fail_block(worker, block, -EIO);
		return;
	}
	if (reached > block->moved) {
		block->stalls = 0;
		block->since_ns = inf_now_ns();
	}
	block->moved = reached;
	if (reached == block->nbytes)
		succeed_block(worker, block);
	else
		push(&worker->again, block);
}

/* One answer of the kernel: bytes, or -errno. */
static void complete_block(struct worker *worker, struct block *block, long answer)
{
	if (answer == -EINTR || answer == -EAGAIN) {
		worker->refused |= answer == -EAGAIN;
		push(&worker->again, block);
	} else if (answer < 0) {
		fail_block(worker, block, (int) answer);
	} else if (block->direction == INF_SYNC) {
		succeed_block(worker, block);
	} else {
		advance_block(worker, block, (size_t) answer);
	}
}

/* Mutex held on both sides of the call, not during it. */
static long transfer(struct worker *worker, struct block *block)
{
	long answer;

	pthread_mutex_unlock(&worker->aio->mutex);
	answer = worker->backend->transfer(block->direction, block->file.fd, block->address + block->moved, block->nbytes - block->moved,
		block_offset(block));
	pthread_mutex_lock(&worker->aio->mutex);
	return answer;
}

/* ---- a worker with a kernel context ---- */

static int submit(struct worker *worker, struct block *block)
{
	int error;

	memset(&block->iocb, 0, sizeof(block->iocb));
	block->iocb.aio_data = (uintptr_t) block;
	block->iocb.aio_lio_opcode = block->direction == INF_READ ? IOCB_CMD_PREAD : IOCB_CMD_PWRITE;
	block->iocb.aio_fildes = (uint32_t) block->file.fd;
	block->iocb.aio_buf = (uintptr_t) (block->address + block->moved);
	block->iocb.aio_nbytes = block->nbytes - block->moved;
	block->iocb.aio_offset = block_offset(block);
	block->iocb.aio_flags = IOCB_FLAG_RESFD;
	block->iocb.aio_resfd = (uint32_t) worker->event_fd;
	worker->in_flight++;
	pthread_mutex_unlock(&worker->aio->mutex);
	error = worker->backend->submit(worker->context, &block->iocb);         /* may block while the device's queue is full */
	pthread_mutex_lock(&worker->aio->mutex);
	if (error)
		worker->in_flight--;
	else if (block->timing && !block->moved && !worker->abandoned)
		block->timing->issued_ns = inf_now_ns();
	return error;
}

static bool means_no_aio(int error)
{
	return error == -EINVAL || error == -ENOSYS || error == -EPERM || error == -EOPNOTSUPP;
}

/*
 * The kernel would not take the block. When pread or pwrite works where its very first asynchronous twin did not, this
 * file system has no asynchronous I/O: the worker and some helpers go on with plain calls.
 */
static void handle_refusal(struct worker *worker, struct block *block, int error)
{
	const inf_backend *fallback = worker->aio->options.fallback;

	if (error != -EAGAIN && error != -EINTR && !worker->proved && fallback && means_no_aio(error)) {
		long answer = transfer(worker, block);

		if (worker->abandoned)
			return;
		if (answer >= 0)
			worker->backend = worker->aio->backend = fallback;
		complete_block(worker, block, answer);
	} else {
		complete_block(worker, block, error);
	}
}

static void fill_queue(struct worker *worker)
{
	struct block *block;
	int error;

	while (!worker->refused && worker->backend->setup && (block = take_block(worker))) {
		if (block->direction == INF_SYNC) {     /* kernel AIO has none on most file systems: other blocks stay under way meanwhile */
			long answer = transfer(worker, block);

			if (worker->abandoned)
				return;
			complete_block(worker, block, answer);
			continue;
		}
		error = submit(worker, block);
		if (worker->abandoned)
			return;
		if (error)
			handle_refusal(worker, block, error);
		else
			worker->proved = true;
		if (worker->abandoned)
			return;
	}
}

/* Sleeps until a completion or a new request rings. Mutex held on both sides of the call, not during it. */
static int collect_or_ring(struct worker *worker)
{
	struct pollfd bell = {.fd = worker->event_fd, .events = POLLIN};
	uint64_t rings;
	int pause_ms = worker->refused ? PAUSE_MS : -1, got;

	worker->refused = false;
	worker->sleeping = true;
	pthread_mutex_unlock(&worker->aio->mutex);
	if (poll(&bell, 1, pause_ms) > 0 && read(worker->event_fd, &rings, sizeof(rings)) < 0)
		rings = 0;              /* the bell is not blocking; another round finds what there is */
	got = worker->backend->reap(worker->context, 0, worker->depth, worker->events);
	pthread_mutex_lock(&worker->aio->mutex);
	worker->sleeping = false;
	return got;
}

/* A full queue has no use for new requests: one call waits for a completion and takes it. */
static int collect(struct worker *worker)
{
	int got;

	if (worker->refused || worker->in_flight < worker->depth)
		return collect_or_ring(worker);
	pthread_mutex_unlock(&worker->aio->mutex);
	got = worker->backend->reap(worker->context, 1, worker->depth, worker->events);
	pthread_mutex_lock(&worker->aio->mutex);
	return got;
}

static void run_asynchronously(struct worker *worker)
{
	while (!worker->abandoned) {
		fill_queue(worker);
		if (worker->abandoned || !worker->backend->setup)
			return;
		if (worker->aio->stopping && !worker->in_flight && !worker->again)
			return;

		int got = collect(worker);

		for (int i = 0; i < got && !worker->abandoned; i++) {
			worker->in_flight--;
			complete_block(worker, (struct block *) (uintptr_t) worker->events[i].data, (long) worker->events[i].res);
			if (!worker->abandoned)
				fill_queue(worker);     /* one out, one in: what came back together is not waited for by the queue */
		}
	}
}

/* ---- a worker without one ---- */

static void pause_briefly(struct worker *worker)
{
	struct timespec pause = {.tv_nsec = PAUSE_MS * 1000000};

	worker->refused = false;
	pthread_mutex_unlock(&worker->aio->mutex);
	nanosleep(&pause, NULL);
	pthread_mutex_lock(&worker->aio->mutex);
}

static void run_synchronously(struct worker *worker)
{
	while (!worker->abandoned) {
		struct block *block = take_block(worker);

		if (!block && worker->aio->stopping)
			return;
		if (!block) {
			pthread_cond_wait(&worker->aio->work, &worker->aio->mutex);
			continue;
		}

		long answer = transfer(worker, block);

		if (worker->abandoned)
			return;
		complete_block(worker, block, answer);
		if (worker->refused)
			pause_briefly(worker);
	}
}

/* ---- life of a worker ---- */

static void add_helpers(struct worker *worker)
{
	struct lane *lane = worker->lane;

	while (lane->count < lane->room && !worker->aio->stopping && !inf_worker_start(lane, worker->aio, worker->backend))
		;
}

/* Takes the kernel some milliseconds, so each worker sees to its own. Mutex held on both sides, not during it. */
static void destroy_context(struct worker *worker)
{
	aio_context_t context = worker->context;

	worker->context = 0;
	if (!context)
		return;
	pthread_mutex_unlock(&worker->aio->mutex);
	worker->setup_by->destroy(context);
	pthread_mutex_lock(&worker->aio->mutex);
}

static void *worker_main(void *argument)
{
	struct worker *worker = argument;
	inf_aio *aio = worker->aio;

	pthread_mutex_lock(&aio->mutex);
	if (worker->backend->setup)
		run_asynchronously(worker);
	if (!worker->abandoned && !worker->backend->setup) {
		if (worker->context)
			add_helpers(worker);    /* it began with a context: the fallback has just been taken */
		run_synchronously(worker);
	}
	if (!worker->abandoned)
		destroy_context(worker);
	worker->exited = true;
	pthread_cond_broadcast(&aio->quiet);
	pthread_mutex_unlock(&aio->mutex);
	return NULL;
}

static int prepare_worker(struct worker *worker, int depth)
{
	int error;

	worker->depth = depth;
	worker->blocks = calloc((size_t) depth, sizeof(*worker->blocks));
	worker->events = calloc((size_t) depth, sizeof(*worker->events));
	if (!worker->blocks || !worker->events)
		return -ENOMEM;
	for (int i = 0; i < depth; i++)
		push(&worker->idle, &worker->blocks[i]);
	if (!worker->backend->setup)
		return 0;
	worker->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (worker->event_fd < 0)
		return -errno;
	error = worker->backend->setup((unsigned) depth, &worker->context);
	if (error)
		worker->context = 0;    /* nothing to destroy */
	return error;
}

int inf_worker_start(struct lane *lane, inf_aio *aio, const inf_backend *backend)
{
	struct worker *worker = &lane->workers[lane->count];
	int error;

	*worker = (struct worker) {.aio = aio, .lane = lane, .backend = backend, .setup_by = backend, .event_fd = -1, .first_slot = lane->slots};
	error = prepare_worker(worker, backend->setup ? aio->options.queue_depth : 1);
	if (!error)
		error = -pthread_create(&worker->id, NULL, worker_main, worker);
	if (error) {
		inf_worker_free(worker);
		return error;
	}
	lane->slots += worker->depth;
	lane->count++;
	lane->alive++;
	return 0;
}

void inf_worker_free(struct worker *worker)
{
	if (worker->context)
		worker->setup_by->destroy(worker->context);
	if (worker->event_fd >= 0)
		close(worker->event_fd);
	free(worker->events);
	free(worker->blocks);
	*worker = (struct worker) {.event_fd = -1};
}

/* A worker that is not asleep looks at the queue before it sleeps, so it needs no bell. */
void inf_worker_ring(struct worker *worker)
{
	const uint64_t one = 1;

	if (worker->sleeping && write(worker->event_fd, &one, sizeof(one)) < 0)
		return;                 /* the counter is full: the bell is ringing */
}

/* ---- the watchdog ---- */

/* Its blocks stay with the device for ever, and so does their memory. Everything that waits for them is told now. */
static void abandon(struct worker *worker)
{
	worker->abandoned = true;
	worker->lane->alive--;
	for (int i = 0; i < worker->depth; i++) {
		struct block *block = &worker->blocks[i];

		if (!block->request)
			continue;
		worker->aio->held--;
		if (block->request->finished)   /* another of its blocks was given up before */
			continue;
		inf_request_fail(block->request, -ETIMEDOUT, block_offset(block));
		block->request->outcome.error = -ETIMEDOUT;     /* whatever else went wrong: this memory is lost */
		inf_request_finish(block->request);
	}
	while (!worker->lane->alive && worker->lane->head) {
		struct inf_request *request = worker->lane->head;

		inf_request_fail(request, -ETIMEDOUT, request->offset);
		inf_request_finish(request);
	}
	pthread_cond_broadcast(&worker->aio->quiet);
}

static bool overdue(const struct worker *worker, int64_t now_ns)
{
	if (worker->abandoned || worker->exited)
		return false;
	for (int i = 0; i < worker->depth; i++)
		if (worker->blocks[i].request && now_ns - worker->blocks[i].since_ns > worker->aio->options.deadline_ns)
			return true;
	return false;
}

static void scan_lanes(inf_aio *aio)
{
	int64_t now_ns = inf_now_ns();

	for (int direction = 0; direction < 2; direction++)
		for (int i = 0; i < aio->lanes[direction].count; i++)
			if (overdue(&aio->lanes[direction].workers[i], now_ns))
				abandon(&aio->lanes[direction].workers[i]);
}

void *inf_watchdog_main(void *argument)
{
	inf_aio *aio = argument;
	int64_t tick_ns = aio->options.deadline_ns / 8 + 1000000;

	if (tick_ns > 1000000000)
		tick_ns = 1000000000;
	pthread_mutex_lock(&aio->mutex);
	while (aio->watching) {
		if (!aio->held) {               /* nothing can be late: sleep until a block goes out */
			aio->dozing = true;
			pthread_cond_wait(&aio->watch, &aio->mutex);
			aio->dozing = false;
			continue;
		}

		int64_t next_ns = inf_now_ns() + tick_ns;
		struct timespec next = {.tv_sec = next_ns / 1000000000, .tv_nsec = next_ns % 1000000000};

		pthread_cond_timedwait(&aio->watch, &aio->mutex, &next);
		scan_lanes(aio);
	}
	pthread_mutex_unlock(&aio->mutex);
	return NULL;
}
