/* What the I/O test programs share: a file of known bytes, an engine over a given backend, a transfer that is waited for. */
#pragma once

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
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

/* Busy and interrupted now and then, in the order of calls. */
static int busy_submit(aio_context_t context, struct iocb *iocb)
{
	static const int moods[] = {-EAGAIN, -EINTR, 0, -EAGAIN, 0, -EINTR};
	int mood = moods[atomic_fetch_add(&calls, 1) % 6];

	return mood ? mood : real->submit(context, iocb);
}

/* The fourth completion never arrives. */
static inline int losing_reap(aio_context_t context, long least, long most, struct io_event *events)
{
	int got = real->reap(context, least, most, events), kept = 0;

	for (int i = 0; i < got; i++)
		if (atomic_fetch_add(&calls, 1) != 3)
			events[kept++] = events[i];
	return kept;
}
