/*
 * The I/O engine against a kernel that misbehaves. Usage: aio_faults_program DIRECTORY
 *
 * The backend is a table of functions, so each fault is a small wrapper around a real one.
 */
#define _GNU_SOURCE
#include <time.h>

#include "aio_rig.h"

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
static int short_reap(aio_context_t context, long least, long most, struct io_event *events)
{
	int got = real->reap(context, least, most, events);

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

static int stingy_reap(aio_context_t context, long least, long most, struct io_event *events)
{
	int got = real->reap(context, least, most, events);

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

static int generous_reap(aio_context_t context, long least, long most, struct io_event *events)
{
	int got = real->reap(context, least, most, events);

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

static int busy_reap(aio_context_t context, long least, long most, struct io_event *events)
{
	int got = real->reap(context, least, most, events);

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

static int failing_reap(aio_context_t context, long least, long most, struct io_event *events)
{
	int got = real->reap(context, least, most, events);

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

int main(int count, char **arguments)
{
	CHECK(count == 2);
	directory = arguments[1];
	real = inf_backend_find("kernel");
	RUN(short_transfers_resume);
	RUN(transfers_that_never_fill_a_sector_fail);
	RUN(more_bytes_than_asked_is_an_error);
	RUN(busy_and_interrupted_calls_are_made_again);
	RUN(plain_calls_take_over_where_aio_is_refused);
	RUN(one_failed_block_fails_its_request_only);
	RUN(end_of_file_inside_a_request_is_an_error);
	RUN_LEAKING(a_lost_completion_times_out_and_the_engine_goes_on);
	RUN_LEAKING(requests_of_a_dead_drive_end_and_new_ones_fail_at_once);
	return 0;
}
