/*
 * The I/O engine against a kernel that misbehaves. Usage: aio_program DIRECTORY
 *
 * The backend is a table of functions, so each fault is a small wrapper around a real one.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../../native/aio_backend.h"
#include "../../native/internal.h"
#include "check.h"

#define PAGE 4096
#define FILE_BYTES ((size_t) 1 << 20)
#define BLOCK_BYTES ((size_t) 32768)
#define SECOND INT64_C(1000000000)

static const char *directory;
static const inf_backend *real;
static atomic_int calls;        /* of the wrapper under test */

/* ---- a file of known bytes ---- */

static char *new_buffer(size_t nbytes, int seed)
{
	char *buffer;

	CHECK(posix_memalign((void **) &buffer, PAGE, nbytes) == 0);
	for (size_t i = 0; i < nbytes; i++)
		buffer[i] = (char) ((i * 2654435761u >> 7) + (size_t) seed);
	return buffer;
}

static int new_file(int flags)
{
	char path[4096];
	char *content = new_buffer(FILE_BYTES, 1);

	snprintf(path, sizeof(path), "%s/data", directory);
	int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | flags, 0600);
	if (fd < 0 && errno == EINVAL)          /* no direct I/O here */
		fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
	CHECK(fd >= 0);
	CHECK(unlink(path) == 0);
	CHECK(pwrite(fd, content, FILE_BYTES, 0) == (ssize_t) FILE_BYTES);
	free(content);
	return fd;
}

static inf_aio *open_engine(const inf_backend *backend, const inf_backend *fallback, int64_t deadline_ns)
{
	struct inf_aio_options options = {
		.block_bytes = BLOCK_BYTES, .queue_depth = 4, .workers = {2, 2}, .deadline_ns = deadline_ns, .backend = backend, .fallback = fallback,
	};
	inf_aio *aio;

	atomic_store(&calls, 0);
	CHECK(inf_aio_open(&options, &aio) == 0);
	return aio;
}

static struct inf_outcome move(inf_aio *aio, int direction, int fd, int64_t offset, void *address, size_t nbytes)
{
	struct inf_outcome outcome;
	inf_request *request;

	CHECK(inf_aio_submit(aio, direction, fd, offset, address, nbytes, &request) == 0);
	CHECK(inf_request_wait(request, -1, &outcome) == 1);
	inf_request_release(request);
	CHECK(outcome.finished_ns >= outcome.started_ns && outcome.started_ns > 0);
	CHECK((outcome.error == 0) == (outcome.failed_offset == -1));
	return outcome;
}

/* Writes a pattern through the engine, reads it back through the engine, and looks at it from outside too. */
static void round_trip(inf_aio *aio, int fd)
{
	char *sent = new_buffer(FILE_BYTES, 7), *got = new_buffer(FILE_BYTES, 9), *seen = new_buffer(FILE_BYTES, 9);

	CHECK(move(aio, INF_WRITE, fd, 0, sent, FILE_BYTES).error == 0);
	CHECK(pread(fd, seen, FILE_BYTES, 0) == (ssize_t) FILE_BYTES);
	CHECK(!memcmp(sent, seen, FILE_BYTES));
	CHECK(move(aio, INF_READ, fd, 0, got, FILE_BYTES).error == 0);
	CHECK(!memcmp(sent, got, FILE_BYTES));
	free(sent);
	free(got);
	free(seen);
}

static void round_trip_on(const inf_backend *backend, const inf_backend *fallback)
{
	for (int direct = 0; direct < 2; direct++) {
		int fd = new_file(direct ? O_DIRECT : 0);
		inf_aio *aio = open_engine(backend, fallback, 60 * SECOND);

		round_trip(aio, fd);
		inf_aio_close(aio);
		close(fd);
	}
}

/* ---- every backend as it is ---- */

static void bytes_survive_on_every_backend(void)
{
	const char *names[] = {"libaio", "kernel", "threads"};

	for (int i = 0; i < 3; i++)
		if (inf_backend_find(names[i]))
			round_trip_on(inf_backend_find(names[i]), NULL);
	CHECK(inf_backend_find("floppy") == NULL);
}

/* ---- a kernel that moves less than asked ---- */

/* Most answers end off a sector; a few do not reach one, too rarely to come four times in a row for one block. */
static size_t shortened(size_t nbytes)
{
	static const size_t limits[] = {PAGE, PAGE + 512, 3 * PAGE + 1, BLOCK_BYTES, 5000, 2 * PAGE - 1, 20000};
	int call = atomic_fetch_add(&calls, 1);
	size_t limit = call % 64 == 5 ? 100 : limits[call % 7];

	return nbytes < limit ? nbytes : limit;
}

/* The answer is cut, not the transfer: the bytes are there, the engine does not know it. */
static int short_reap(aio_context_t context, long most, struct io_event *events)
{
	int got = real->reap(context, most, events);

	for (int i = 0; i < got; i++)
		if (events[i].res > 0)
			events[i].res = (long long) shortened((size_t) events[i].res);
	return got;
}

static ssize_t short_transfer(int direction, int fd, void *address, size_t nbytes, int64_t offset)
{
	ssize_t got = real->transfer(direction, fd, address, nbytes, offset);

	return got > 0 ? (ssize_t) shortened((size_t) got) : got;
}

static void short_transfers_resume(void)
{
	inf_backend with_context = *real, without = *inf_backend_find("threads");

	with_context.reap = short_reap;
	without.transfer = short_transfer;
	round_trip_on(&with_context, NULL);
	round_trip_on(&without, NULL);
}

static int stingy_reap(aio_context_t context, long most, struct io_event *events)
{
	int got = real->reap(context, most, events);

	for (int i = 0; i < got; i++)
		events[i].res = 1;
	return got;
}

static void transfers_that_never_fill_a_sector_fail(void)
{
	inf_backend backend = *real;
	int fd = new_file(O_DIRECT);
	char *buffer = new_buffer(FILE_BYTES, 3);

	backend.reap = stingy_reap;
	inf_aio *aio = open_engine(&backend, NULL, 60 * SECOND);
	if (fcntl(fd, F_GETFL) & O_DIRECT)
		CHECK(move(aio, INF_READ, fd, 0, buffer, FILE_BYTES).error == -EIO);
	inf_aio_close(aio);
	close(fd);
	free(buffer);
}

static int generous_reap(aio_context_t context, long most, struct io_event *events)
{
	int got = real->reap(context, most, events);

	for (int i = 0; i < got; i++)
		events[i].res = BLOCK_BYTES + 1;
	return got;
}

static void more_bytes_than_asked_is_an_error(void)
{
	inf_backend backend = *real;
	int fd = new_file(0);
	char *buffer = new_buffer(BLOCK_BYTES, 3);

	backend.reap = generous_reap;
	inf_aio *aio = open_engine(&backend, NULL, 60 * SECOND);
	CHECK(move(aio, INF_READ, fd, 0, buffer, BLOCK_BYTES).error == -EIO);
	inf_aio_close(aio);
	close(fd);
	free(buffer);
}

/* ---- a kernel that is busy or interrupted ---- */

static int busy_submit(aio_context_t context, struct iocb *iocb)
{
	static const int moods[] = {-EAGAIN, -EINTR, 0, -EAGAIN, 0, -EINTR};
	int mood = moods[atomic_fetch_add(&calls, 1) % 6];

	return mood ? mood : real->submit(context, iocb);
}

static int busy_reap(aio_context_t context, long most, struct io_event *events)
{
	int got = real->reap(context, most, events);

	for (int i = 0; i < got; i++)
		if (atomic_fetch_add(&calls, 1) % 5 == 0)
			events[i].res = i % 2 ? -EINTR : -EAGAIN;
	return got;
}

static ssize_t busy_transfer(int direction, int fd, void *address, size_t nbytes, int64_t offset)
{
	int call = atomic_fetch_add(&calls, 1) % 5;

	return call == 0 ? -EINTR : call == 1 ? -EAGAIN : real->transfer(direction, fd, address, nbytes, offset);
}

static void busy_and_interrupted_calls_are_made_again(void)
{
	inf_backend submit = *real, reap = *real, transfer = *inf_backend_find("threads");

	submit.submit = busy_submit;
	reap.reap = busy_reap;
	transfer.transfer = busy_transfer;
	round_trip_on(&submit, NULL);
	round_trip_on(&reap, NULL);
	round_trip_on(&transfer, NULL);
}

/* ---- a kernel without asynchronous I/O ---- */

static int no_setup(unsigned depth, aio_context_t *context)
{
	(void) depth;
	(void) context;
	return -EAGAIN;
}

static int second_setup_fails(unsigned depth, aio_context_t *context)
{
	return atomic_fetch_add(&calls, 1) == 1 ? -EAGAIN : real->setup(depth, context);
}

static int no_submit(aio_context_t context, struct iocb *iocb)
{
	(void) context;
	(void) iocb;
	return -EINVAL;
}

static void plain_calls_take_over_where_aio_is_refused(void)
{
	inf_backend backends[3] = {*real, *real, *real};

	backends[0].setup = no_setup;
	backends[1].setup = second_setup_fails;
	backends[2].submit = no_submit;
	for (int i = 0; i < 3; i++) {
		int fd = new_file(O_DIRECT);
		inf_aio *aio = open_engine(&backends[i], inf_backend_find("threads"), 60 * SECOND);

		CHECK(!strcmp(inf_aio_backend_name(aio), i < 2 ? "threads" : real->name));
		round_trip(aio, fd);
		CHECK(!strcmp(inf_aio_backend_name(aio), "threads"));
		inf_aio_close(aio);
		close(fd);
	}

	struct inf_aio_options options = {
		.block_bytes = BLOCK_BYTES, .queue_depth = 4, .workers = {1, 1}, .deadline_ns = SECOND, .backend = &backends[0],
	};
	inf_aio *aio;
	CHECK(inf_aio_open(&options, &aio) == -EAGAIN);         /* asked for by name: no fallback */
}

/* ---- errors ---- */

static int failing_reap(aio_context_t context, long most, struct io_event *events)
{
	int got = real->reap(context, most, events);

	for (int i = 0; i < got; i++)
		if (atomic_fetch_add(&calls, 1) == 5)
			events[i].res = -ENOSPC;
	return got;
}

static void one_failed_block_fails_its_request_only(void)
{
	inf_backend backend = *real;
	int fd = new_file(0);
	char *buffer = new_buffer(FILE_BYTES, 3);

	backend.reap = failing_reap;
	inf_aio *aio = open_engine(&backend, NULL, 60 * SECOND);
	struct inf_outcome outcome = move(aio, INF_WRITE, fd, 0, buffer, FILE_BYTES);
	CHECK(outcome.error == -ENOSPC);
	CHECK(outcome.failed_offset >= 0 && outcome.failed_offset < (int64_t) FILE_BYTES && outcome.failed_offset % (int64_t) BLOCK_BYTES == 0);
	CHECK(move(aio, INF_WRITE, fd, 0, buffer, FILE_BYTES).error == 0);
	inf_aio_close(aio);
	close(fd);
	free(buffer);
}

static void end_of_file_inside_a_request_is_an_error(void)
{
	const char *names[] = {"kernel", "threads"};

	for (int i = 0; i < 2; i++)
		for (int tail = 0; tail <= 1000; tail += 1000) {
			int fd = new_file(O_DIRECT);
			char *buffer = new_buffer(FILE_BYTES, 3);
			inf_aio *aio = open_engine(inf_backend_find(names[i]), NULL, 60 * SECOND);

			CHECK(ftruncate(fd, (off_t) FILE_BYTES / 2 + tail) == 0);
			CHECK(move(aio, INF_READ, fd, 0, buffer, FILE_BYTES / 2).error == 0);
			struct inf_outcome outcome = move(aio, INF_READ, fd, 0, buffer, FILE_BYTES);
			CHECK(outcome.error == -EIO && outcome.failed_offset >= (int64_t) FILE_BYTES / 2);
			inf_aio_close(aio);
			close(fd);
			free(buffer);
		}
}

/* ---- a drive that does not answer ---- */

static int losing_reap(aio_context_t context, long most, struct io_event *events)
{
	int got = real->reap(context, most, events), kept = 0;

	for (int i = 0; i < got; i++)
		if (atomic_fetch_add(&calls, 1) != 3)
			events[kept++] = events[i];
	return kept;
}

static void a_lost_completion_times_out_and_the_engine_goes_on(void)
{
	inf_backend backend = *real;
	int fd = new_file(0);
	char *buffer = new_buffer(FILE_BYTES, 3);

	backend.reap = losing_reap;
	inf_aio *aio = open_engine(&backend, NULL, SECOND / 5);
	CHECK(move(aio, INF_READ, fd, 0, buffer, FILE_BYTES).error == -ETIMEDOUT);
	CHECK(move(aio, INF_READ, fd, 0, buffer, FILE_BYTES).error == 0);      /* the other reader lives */
	CHECK(move(aio, INF_WRITE, fd, 0, buffer, FILE_BYTES).error == 0);
	inf_aio_close(aio);                     /* the buffer is never freed: the device may still write into it */
	close(fd);
}

static atomic_bool stuck;

static ssize_t stuck_transfer(int direction, int fd, void *address, size_t nbytes, int64_t offset)
{
	const struct timespec nap = {.tv_nsec = 1000000};

	while (direction == INF_READ && atomic_load(&stuck))
		nanosleep(&nap, NULL);
	return real->transfer(direction, fd, address, nbytes, offset);
}

static void requests_of_a_dead_drive_end_and_new_ones_fail_at_once(void)
{
	inf_backend backend = *inf_backend_find("threads");
	int fd = new_file(0);
	char *buffer = new_buffer(FILE_BYTES, 3);
	inf_request *requests[3];
	struct inf_outcome outcome;

	backend.transfer = stuck_transfer;
	atomic_store(&stuck, true);
	inf_aio *aio = open_engine(&backend, NULL, SECOND / 5);
	for (int i = 0; i < 3; i++)
		CHECK(inf_aio_submit(aio, INF_READ, fd, 0, buffer, FILE_BYTES, &requests[i]) == 0);
	CHECK(inf_request_wait(requests[2], SECOND / 100, &outcome) == 0);      /* a wait may be shorter than the deadline */
	for (int i = 0; i < 3; i++) {
		CHECK(inf_request_wait(requests[i], -1, &outcome) == 1 && outcome.error == -ETIMEDOUT);
		inf_request_release(requests[i]);
	}
	CHECK(move(aio, INF_READ, fd, 0, buffer, FILE_BYTES).error == -EIO);
	CHECK(move(aio, INF_WRITE, fd, 0, buffer, FILE_BYTES).error == 0);     /* the other direction has its own workers */
	inf_aio_close(aio);                                                     /* does not wait for the dead */

	atomic_store(&stuck, false);            /* the drive comes back and writes into the memory that we must not reuse */
	const struct timespec nap = {.tv_nsec = 50000000};
	nanosleep(&nap, NULL);
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
	RUN(short_transfers_resume);
	RUN(transfers_that_never_fill_a_sector_fail);
	RUN(more_bytes_than_asked_is_an_error);
	RUN(busy_and_interrupted_calls_are_made_again);
	RUN(plain_calls_take_over_where_aio_is_refused);
	RUN(one_failed_block_fails_its_request_only);
	RUN(end_of_file_inside_a_request_is_an_error);
	RUN_LEAKING(a_lost_completion_times_out_and_the_engine_goes_on);
	RUN_LEAKING(requests_of_a_dead_drive_end_and_new_ones_fail_at_once);
	RUN(many_callers_share_one_engine);
	RUN(close_finishes_what_is_under_way);
	RUN(a_forked_child_is_told_so);
	RUN(impossible_requests_are_refused);
	return 0;
}
