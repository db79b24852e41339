/* The life of the I/O engine: many callers, close, fork, what it refuses. Usage: aio_life_program DIRECTORY */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <sys/wait.h>

#include "aio_rig.h"

/* ---- every backend as it is ---- */

static void bytes_survive_on_every_backend(void)
{
	const char *names[] = {"libaio", "kernel", "threads"};

	for (int i = 0; i < 3; i++)
		if (inf_backend_find(names[i]))
			round_trip_on(inf_backend_find(names[i]), NULL);
	CHECK(inf_backend_find("floppy") == NULL);
}

/* ---- many callers ---- */

struct caller {
	inf_aio *aio;
	int fd;
	int index;
	pthread_t id;
};

static void *call(void *argument)
{
	struct caller *caller = argument;
	size_t share = FILE_BYTES / 8;
	int64_t base = (int64_t) share * caller->index;
	char *sent = new_buffer(share, caller->index), *got = new_buffer(share, 99);

	for (int round = 0; round < 10; round++) {
		inf_request *requests[4];
		struct inf_outcome outcome;

		for (int i = 0; i < 4; i++)     /* quarters, all under way at once */
			CHECK(inf_aio_submit(caller->aio, INF_WRITE, caller->fd, base + (int64_t) share / 4 * i, sent + share / 4 * (size_t) i, share / 4,
				&requests[i]) == 0);
		for (int i = 3; i >= 0; i--) {
			while (i % 2 && !inf_request_wait(requests[i], 0, &outcome))    /* some only ask, until it is over */
				sched_yield();
			CHECK(inf_request_wait(requests[i], -1, &outcome) == 1 && outcome.error == 0);
			inf_request_release(requests[i]);
		}
		CHECK(move(caller->aio, INF_READ, caller->fd, base, got, share).error == 0);
		CHECK(!memcmp(sent, got, share));
	}
	free(sent);
	free(got);
	return NULL;
}

static void many_callers_share_one_engine(void)
{
	inf_backend busy = *real;
	busy.submit = busy_submit;
	const inf_backend *backends[] = {real, inf_backend_find("threads"), &busy};

	for (int b = 0; b < 3; b++) {
		struct caller callers[8];
		int fd = new_file(0);
		inf_aio *aio = open_engine(backends[b], NULL, 60 * SECOND);

		for (int i = 0; i < 8; i++) {
			callers[i] = (struct caller) {.aio = aio, .fd = fd, .index = i};
			CHECK(pthread_create(&callers[i].id, NULL, call, &callers[i]) == 0);
		}
		for (int i = 0; i < 8; i++)
			CHECK(pthread_join(callers[i].id, NULL) == 0);
		inf_aio_close(aio);
		close(fd);
	}
}

static void close_finishes_what_is_under_way(void)
{
	int fd = new_file(0);
	char *buffer = new_buffer(FILE_BYTES, 5), *seen = new_buffer(FILE_BYTES, 6);
	inf_aio *aio = open_engine(real, NULL, 60 * SECOND);
	inf_request *kept, *dropped;
	struct inf_outcome outcome;

	CHECK(inf_aio_submit(aio, INF_WRITE, fd, 0, buffer, FILE_BYTES / 2, &kept) == 0);
	CHECK(inf_aio_submit(aio, INF_WRITE, fd, (int64_t) FILE_BYTES / 2, buffer + FILE_BYTES / 2, FILE_BYTES / 2, &dropped) == 0);
	inf_request_release(dropped);           /* nobody waits; it is written all the same */
	inf_aio_close(aio);
	CHECK(inf_request_wait(kept, 0, &outcome) == 1 && outcome.error == 0);
	inf_request_release(kept);              /* a handle may outlive the engine */
	CHECK(pread(fd, seen, FILE_BYTES, 0) == (ssize_t) FILE_BYTES && !memcmp(buffer, seen, FILE_BYTES));
	close(fd);
	free(buffer);
	free(seen);
}

static void impossible_requests_are_refused(void)
{
	int fd = new_file(0);
	char byte;
	inf_request *request;
	inf_aio *aio = open_engine(real, NULL, SECOND);
	struct inf_aio_options options = {.block_bytes = 0, .queue_depth = 1, .workers = {1, 1}, .deadline_ns = 1, .backend = real};

	CHECK(inf_aio_submit(aio, 2, fd, 0, &byte, 1, &request) == -EINVAL);
	CHECK(inf_aio_submit(aio, INF_READ, fd, -1, &byte, 1, &request) == -EINVAL);
	CHECK(inf_aio_submit(aio, INF_READ, -1, 0, &byte, 1, &request) == -EBADF);
	CHECK(move(aio, INF_READ, fd, 0, NULL, 0).error == 0);          /* nothing to do is done */
	inf_aio_close(aio);
	CHECK(inf_aio_open(&options, &aio) == -EINVAL);
	close(fd);
}

/* A child has neither the workers nor a mutex it could trust. It must not hang. */
static void a_forked_child_is_told_so(void)
{
	int fd = new_file(0), status;
	char *buffer = new_buffer(FILE_BYTES, 5);
	inf_aio *aio = open_engine(real, NULL, 60 * SECOND);
	inf_request *request;
	struct inf_outcome outcome;

	CHECK(inf_aio_submit(aio, INF_WRITE, fd, 0, buffer, FILE_BYTES, &request) == 0);
	pid_t child = fork();
	if (child == 0) {
		inf_request *another;

		CHECK(inf_aio_submit(aio, INF_READ, fd, 0, buffer, FILE_BYTES, &another) == -ECHILD);
		CHECK(inf_request_wait(request, -1, &outcome) == -ECHILD);
		inf_request_release(request);
		inf_aio_close(aio);
		_exit(0);
	}
	CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
	CHECK(inf_request_wait(request, -1, &outcome) == 1 && outcome.error == 0);
	inf_request_release(request);
	inf_aio_close(aio);
	close(fd);
	free(buffer);
}

int main(int count, char **arguments)
{
	CHECK(count == 2);
	directory = arguments[1];
	real = inf_backend_find("kernel");
	RUN(bytes_survive_on_every_backend);
	RUN(many_callers_share_one_engine);
	RUN(close_finishes_what_is_under_way);
	RUN(a_forked_child_is_told_so);
	RUN(impossible_requests_are_refused);
	return 0;
}
