/*
 * The engine's own structures.
 *
 * One mutex guards everything that is not constant, but for a request's `finished` and the outcome that is fixed then; no
 * system call that can take long runs under it. Memory of a request lives until nobody can touch it: the caller's handle,
 * the queue and every block hold a reference. A block that a dead drive keeps is never given back, so neither is its request.
 */
#pragma once

#include <pthread.h>
#include <stdbool.h>
#include <time.h>
#include <unistd.h>

#include "aio_backend.h"
#include "internal.h"

struct file {
	int fd;
	size_t grain;                   /* a short transfer resumes at a multiple of this: 4096 under O_DIRECT, else 1 */
};

struct inf_request {
	inf_aio *aio;
	int direction;                  /* the lane */
	struct file file;               /* one extent of this file, or */
	int64_t offset;
	char *address;
	struct file *files;             /* transfers of these, NULL for an extent */
	struct inf_scatter scatter;
	size_t whole;                   /* bytes of the extent, or transfers */
	size_t cut;                     /* of those, already dealt out as blocks */
	int outstanding;                /* blocks dealt out and not finished */
	int references;
	bool queued;
	bool finished;                  /* atomic: who only asks takes no mutex. The outcome is fixed from then on */
	struct inf_outcome outcome;
	pthread_cond_t done;
	struct inf_request *next;
};

/* One transfer: at most block_bytes of an extent, or one of a scattered request. */
struct block {
	struct iocb iocb;
	struct inf_request *request;    /* NULL: free */
	struct inf_timing *timing;      /* NULL: nobody asks */
	struct file file;
	int direction;
	int64_t offset;
	char *address;
	size_t nbytes;
	size_t moved;
	int stalls;                     /* transfers in a row that moved less than a grain */
	int64_t since_ns;               /* last time it got anywhere */
	struct block *next;
};

struct worker {
	inf_aio *aio;
	struct lane *lane;
	pthread_t id;
	bool exited;
	bool abandoned;                 /* its drive is dead: it must touch nothing any more */
	bool proved;                    /* the kernel has taken an asynchronous transfer */
	bool sleeping;                  /* waits for its eventfd and could take work */
	bool refused;                   /* the kernel said EAGAIN: pause before the next try */
	const inf_backend *backend;     /* in use; setup_by made the context */
	const inf_backend *setup_by;
	aio_context_t context;
	int event_fd;                   /* -1: none. Completions and new requests ring it */
	int in_flight;                  /* blocks the kernel has */
	int first_slot;                 /* number of blocks[0] among the slots of the lane */
	int depth;                      /* entries in blocks and in events */
	struct block *blocks;
	struct io_event *events;
	struct block *idle;
	struct block *again;            /* to be handed in once more */
};

/* One direction. */
struct lane {
	struct inf_request *head;
	struct inf_request *tail;
	struct worker *workers;
	int count;                      /* started */
	int room;                       /* entries in workers */
	int alive;                      /* started and not abandoned */
	int slots;                      /* blocks of the workers started */
	int slot_bound;                 /* the most they can become */
	int out;                        /* blocks dealt out and not finished */
};

struct inf_aio {
	pid_t owner;
	int references;                 /* atomic: the opener and every request */
	struct inf_aio_options options;
	const inf_backend *backend;     /* in use */
	pthread_mutex_t mutex;
	pthread_cond_t work;            /* for workers without an eventfd */
	pthread_cond_t quiet;           /* a request finished for good, a worker left */
	pthread_cond_t watch;
	bool closing;                   /* no new requests */
	bool stopping;                  /* workers leave when they have nothing in flight */
	bool watching;
	bool dozing;                    /* the watchdog sleeps until a block goes out */
	int unfinished;                 /* requests */
	int held;                       /* blocks that may not come back */
	pthread_t watchdog;
	struct lane lanes[2];
};

static inline int64_t inf_now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t) now.tv_sec * 1000000000 + now.tv_nsec;
}

/* aio.c, mutex held */
void inf_request_fail(struct inf_request *request, int error, int64_t offset);
void inf_request_finish(struct inf_request *request);
void inf_request_curtail(struct inf_request *request);  /* what is not dealt out yet is left out */
void inf_request_drop(struct inf_request *request);

/* aio_worker.c */
int inf_worker_start(struct lane *lane, inf_aio *aio, const inf_backend *backend);      /* mutex held */
void inf_worker_ring(struct worker *worker);            /* mutex held */
void inf_worker_free(struct worker *worker);            /* it has left */
int inf_sync_workers(const struct inf_aio_options *options, int direction);
void *inf_watchdog_main(void *aio);
