/* Scattered requests: many small transfers in one. Usage: aio_scatter_program DIRECTORY */
#define _GNU_SOURCE
#include <time.h>

#include "aio_rig.h"

#define COUNT 64
#define STRIDE (2 * PAGE)
#define DEPTH 4         /* of open_engine, which has two workers a lane */

static char *memory;            /* COUNT buffers */
static struct inf_transfer transfers[COUNT];
static struct inf_timing timings[COUNT];

/* The pages of the file in an order that jumps about, every other one from the second half of its buffer's bytes. */
static void plan(int direction, int buffer)
{
	memset(timings, 0, sizeof(timings));
	for (int i = 0; i < COUNT; i++)
		transfers[i] = (struct inf_transfer) {
			.offset = (int64_t) (i * 37 % COUNT) * STRIDE, .nbytes = i % 3 ? STRIDE : PAGE, .direction = direction, .buffer = buffer < 0 ? -1 : i,
		};
}

static struct inf_scatter scatter_of(const int *fd)
{
	return (struct inf_scatter) {
		.fds = fd, .files = 1, .transfers = transfers, .count = COUNT, .address = memory, .stride = STRIDE, .timings = timings,
	};
}

static struct inf_outcome run(inf_aio *aio, int lane, const struct inf_scatter *scatter)
{
	struct inf_outcome outcome;
	inf_request *request;

	CHECK(inf_aio_submit_scatter(aio, lane, scatter, &request) == 0);
	CHECK(inf_request_wait(request, -1, &outcome) == 1);
	inf_request_release(request);
	return outcome;
}

static void check_timings(int slots)
{
	for (int i = 0; i < COUNT; i++) {
		CHECK(timings[i].begun_ns > 0 && timings[i].begun_ns <= timings[i].issued_ns && timings[i].issued_ns <= timings[i].done_ns);
		CHECK(timings[i].depth >= 1 && timings[i].depth <= slots);
		CHECK(i == 0 || timings[i].begun_ns >= timings[i - 1].begun_ns);       /* in their order */
	}
}

static void round_trip_scattered(const inf_backend *backend)
{
	for (int direct = 0; direct < 2; direct++)
		for (int lane = 0; lane < 2; lane++) {
			int fd = new_file(direct ? O_DIRECT : 0);
			inf_aio *aio = open_engine(backend, NULL, 60 * SECOND);
			struct inf_scatter scatter = scatter_of(&fd);
			char *sent = new_buffer((size_t) COUNT * STRIDE, 5);

			CHECK(inf_aio_slots(aio, lane) >= 2 && inf_aio_slots(aio, lane) <= 64);
			memcpy(memory, sent, (size_t) COUNT * STRIDE);
			plan(INF_WRITE, 0);
			CHECK(run(aio, lane, &scatter).error == 0);
			check_timings(inf_aio_slots(aio, lane));
			memset(memory, 0, (size_t) COUNT * STRIDE);
			plan(INF_READ, 0);
			CHECK(run(aio, lane, &scatter).error == 0);
			check_timings(inf_aio_slots(aio, lane));
			for (int i = 0; i < COUNT; i++)
				CHECK(!memcmp(memory + (size_t) i * STRIDE, sent + (size_t) i * STRIDE, transfers[i].nbytes));
			inf_aio_close(aio);
			close(fd);
			free(sent);
		}
}

static void scattered_bytes_survive_on_every_backend(void)
{
	const char *names[] = {"libaio", "kernel", "threads"};

	for (int i = 0; i < 3; i++)
		if (inf_backend_find(names[i]))
			round_trip_scattered(inf_backend_find(names[i]));
}

static ssize_t short_transfer(int direction, int fd, void *address, size_t nbytes, int64_t offset)
{
	ssize_t got = real->transfer(direction, fd, address, nbytes, offset);

	return got > PAGE ? PAGE + 100 : got;
}

static void short_and_busy_ones_go_on_where_they_stopped(void)
{
	inf_backend busy = *real, stingy = *inf_backend_find("threads");

	busy.submit = busy_submit;
	stingy.transfer = short_transfer;
	round_trip_scattered(&busy);
	round_trip_scattered(&stingy);
	round_trip_on(&busy, NULL);             /* and extents beside them, as ever */
}

/* ---- depth and buffers ---- */

static atomic_int in_flight, deepest;

static int counting_submit(aio_context_t context, struct iocb *iocb)
{
	int now = atomic_fetch_add(&in_flight, 1) + 1;

	if (now > atomic_load(&deepest))        /* one worker: nobody else writes it */
		atomic_store(&deepest, now);
	return real->submit(context, iocb);
}

static int counting_reap(aio_context_t context, long least, long most, struct io_event *events)
{
	int got = real->reap(context, least, most, events);

	if (got > 0)
		atomic_fetch_sub(&in_flight, got);
	return got;
}

static inf_aio *open_single(const inf_backend *backend, int64_t deadline_ns)
{
	struct inf_aio_options options = {
		.block_bytes = PAGE, .queue_depth = DEPTH, .workers = {1, 1}, .deadline_ns = deadline_ns, .backend = backend,
	};
	inf_aio *aio;

	CHECK(inf_aio_open(&options, &aio) == 0);
	return aio;
}

static void both_directions_share_one_depth_and_the_buffers_of_its_slots(void)
{
	inf_backend backend = *real;
	int fd = new_file(O_DIRECT);
	struct inf_scatter scatter = scatter_of(&fd);
	struct inf_outcome outcome;
	inf_request *requests[2];

	backend.submit = counting_submit;
	backend.reap = counting_reap;
	atomic_store(&in_flight, 0);
	atomic_store(&deepest, 0);
	inf_aio *aio = open_single(&backend, 60 * SECOND);
	CHECK(inf_aio_slots(aio, INF_READ) == DEPTH);
	plan(INF_READ, -1);
	for (int i = 0; i < COUNT; i += 2) {
		transfers[i].direction = INF_WRITE;
		transfers[i].buffer = -2;
	}
	memset(memory + DEPTH * STRIDE, 77, (DEPTH + 1) * STRIDE);
	scatter.count = COUNT / 2;
	CHECK(inf_aio_submit_scatter(aio, INF_READ, &scatter, &requests[0]) == 0);
	scatter.transfers += COUNT / 2;         /* the structure is ours again */
	scatter.timings += COUNT / 2;
	CHECK(inf_aio_submit_scatter(aio, INF_READ, &scatter, &requests[1]) == 0);
	for (int i = 0; i < 2; i++) {
		CHECK(inf_request_wait(requests[i], -1, &outcome) == 1 && outcome.error == 0);
		inf_request_release(requests[i]);
	}
	check_timings(DEPTH);
	CHECK(atomic_load(&in_flight) == 0 && atomic_load(&deepest) <= DEPTH);
	CHECK(timings[COUNT - 1].depth > 1);                    /* the queue did not run dry between the two */
	for (int i = 0; i < (DEPTH + 1) * STRIDE; i++)
		CHECK(memory[DEPTH * STRIDE + i] == 77);        /* reads keep to the first buffers, no slot lies beyond the last */
	CHECK(pread(fd, memory, PAGE, 0) == PAGE && memory[0] == 77 && memory[PAGE - 1] == 77); /* what was written came from the second ones */
	inf_aio_close(aio);
	close(fd);
}

/* ---- an end before the last one ---- */

static void nothing_begins_after_its_time(void)
{
	int fd = new_file(0);
	struct inf_scatter scatter = scatter_of(&fd);
	inf_aio *aio = open_single(real, 60 * SECOND);

	plan(INF_READ, 0);
	scatter.until_ns = 1;
	CHECK(run(aio, INF_READ, &scatter).error == 0);
	for (int i = 0; i < COUNT; i++)
		CHECK(!timings[i].begun_ns && !timings[i].done_ns);
	scatter.until_ns = INT64_MAX;
	CHECK(run(aio, INF_READ, &scatter).error == 0);
	check_timings(DEPTH);
	inf_aio_close(aio);
	close(fd);
}

static ssize_t slow_transfer(int direction, int fd, void *address, size_t nbytes, int64_t offset)
{
	const struct timespec nap = {.tv_nsec = 20000000};

	nanosleep(&nap, NULL);
	return real->transfer(direction, fd, address, nbytes, offset);
}

static void what_is_left_when_time_is_up_is_left_out(void)
{
	inf_backend backend = *inf_backend_find("threads");
	struct timespec now;
	int fd = new_file(0), begun = 0;
	struct inf_scatter scatter = scatter_of(&fd);

	backend.transfer = slow_transfer;
	inf_aio *aio = open_single(&backend, 60 * SECOND);
	plan(INF_READ, 0);
	clock_gettime(CLOCK_MONOTONIC, &now);
	scatter.until_ns = (int64_t) now.tv_sec * SECOND + now.tv_nsec + SECOND / 20;
	CHECK(run(aio, INF_READ, &scatter).error == 0);
	while (begun < COUNT && timings[begun].begun_ns)
		begun++;
	CHECK(begun < COUNT);
	for (int i = 0; i < COUNT; i++) {
		CHECK((timings[i].done_ns > 0) == (i < begun));
		CHECK(timings[i].begun_ns < scatter.until_ns);
	}
	CHECK(move(aio, INF_READ, fd, 0, memory, PAGE).error == 0);
	inf_aio_close(aio);
	close(fd);
}

/* ---- errors ---- */

static void the_failed_transfer_can_be_told(void)
{
	const char *names[] = {"kernel", "threads"};

	for (int i = 0; i < 2; i++) {
		int fds[2] = {new_file(0), new_file(0)}, failed = 0;
		struct inf_scatter scatter = scatter_of(fds);
		inf_aio *aio = open_single(inf_backend_find(names[i]), 60 * SECOND);

		CHECK(ftruncate(fds[1], 0) == 0);
		scatter.files = 2;
		plan(INF_READ, 0);
		transfers[9].file = 1;
		struct inf_outcome outcome = run(aio, INF_READ, &scatter);
		CHECK(outcome.error == -EIO && outcome.failed_offset == transfers[9].offset);
		for (int j = 0; j < COUNT; j++)
			failed += timings[j].begun_ns && !timings[j].done_ns;
		CHECK(failed == 1 && timings[9].begun_ns && !timings[9].done_ns);
		inf_aio_close(aio);
		close(fds[0]);
		close(fds[1]);
	}
}

static atomic_int syncs;

static ssize_t sync_transfer(int direction, int fd, void *address, size_t nbytes, int64_t offset)
{
	if (direction == INF_SYNC && atomic_fetch_add(&syncs, 1) == 2)
		return -EIO;
	return real->transfer(direction, fd, address, nbytes, offset);
}

static void a_sync_is_a_transfer_and_its_failure_is_told(void)
{
	const char *names[] = {"kernel", "threads"};

	for (int i = 0; i < 2; i++) {
		inf_backend backend = *inf_backend_find(names[i]);
		int fd = new_file(0);
		struct inf_scatter scatter = scatter_of(&fd);

		backend.transfer = sync_transfer;
		atomic_store(&syncs, 0);
		inf_aio *aio = open_single(&backend, 60 * SECOND);
		plan(INF_WRITE, 0);
		for (int j = 9; j < 30; j += 10)
			transfers[j] = (struct inf_transfer) {.direction = INF_SYNC};
		CHECK(run(aio, INF_WRITE, &scatter).error == -EIO);     /* the third */
		CHECK(timings[9].done_ns && timings[19].done_ns && timings[29].begun_ns && !timings[29].done_ns);
		plan(INF_WRITE, 0);
		transfers[9] = (struct inf_transfer) {.direction = INF_SYNC};
		CHECK(run(aio, INF_WRITE, &scatter).error == 0 && atomic_load(&syncs) == 4);
		inf_aio_close(aio);
		close(fd);
	}
}

static void a_lost_one_times_out(void)
{
	inf_backend backend = *real;
	int fd = new_file(0);
	struct inf_scatter scatter = scatter_of(&fd);

	backend.reap = losing_reap;
	atomic_store(&calls, 0);
	inf_aio *aio = open_single(&backend, SECOND / 5);
	plan(INF_READ, 0);
	CHECK(run(aio, INF_READ, &scatter).error == -ETIMEDOUT);
	CHECK(run(aio, INF_READ, &scatter).error == -EIO);      /* its only worker waits for the drive */
	inf_aio_close(aio);
	close(fd);
}

static void impossible_ones_are_refused(void)
{
	const struct inf_transfer bad[] = {
		{.nbytes = PAGE, .direction = 3}, {.nbytes = PAGE, .offset = -1}, {.nbytes = 0}, {.nbytes = STRIDE + 1}, {.nbytes = PAGE, .file = 1},
		{.nbytes = PAGE, .file = -1}, {.nbytes = PAGE, .buffer = -3}, {.nbytes = PAGE, .offset = INT64_MAX}, {.nbytes = PAGE, .direction = INF_SYNC},
	};
	int fd = new_file(0), closed = -1;
	struct inf_scatter scatter = scatter_of(&fd);
	inf_request *request;
	inf_aio *aio = open_single(real, 60 * SECOND);

	for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
		plan(INF_READ, 0);
		transfers[COUNT - 1] = bad[i];
		CHECK(inf_aio_submit_scatter(aio, INF_READ, &scatter, &request) == -EINVAL);
	}
	plan(INF_READ, 0);
	CHECK(inf_aio_submit_scatter(aio, INF_SYNC, &scatter, &request) == -EINVAL);
	scatter.fds = &closed;
	CHECK(inf_aio_submit_scatter(aio, INF_READ, &scatter, &request) == -EBADF);
	scatter.fds = &fd;
	scatter.count = 0;
	CHECK(run(aio, INF_READ, &scatter).error == 0);         /* nothing to do is done */
	inf_aio_close(aio);
	close(fd);
}

int main(int count, char **arguments)
{
	CHECK(count == 2);
	directory = arguments[1];
	real = inf_backend_find("kernel");
	memory = new_buffer((size_t) COUNT * STRIDE, 0);
	RUN(scattered_bytes_survive_on_every_backend);
	RUN(short_and_busy_ones_go_on_where_they_stopped);
	RUN(both_directions_share_one_depth_and_the_buffers_of_its_slots);
	RUN(nothing_begins_after_its_time);
	RUN(what_is_left_when_time_is_up_is_left_out);
	RUN(the_failed_transfer_can_be_told);
	RUN(a_sync_is_a_transfer_and_its_failure_is_told);
	RUN_LEAKING(a_lost_one_times_out);
	RUN(impossible_ones_are_refused);
	free(memory);
	return 0;
}
