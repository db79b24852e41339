/* What the engine asks of the kernel, as a table: real ones in aio_backend.c, faulty ones in the tests. */
#pragma once

#include <linux/aio_abi.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* Each answers as the system call does, with -errno in place of -1. */
struct inf_backend {
	const char *name;
	int (*setup)(unsigned depth, aio_context_t *context);                   /* NULL: no asynchronous calls, use transfer */
	int (*submit)(aio_context_t context, struct iocb *iocb);                /* one: 0 or -errno */
	/* Waits until `least` are there, which may be none; answers how many were taken. */
	int (*reap)(aio_context_t context, long least, long most, struct io_event *events);
	int (*destroy)(aio_context_t context);
	ssize_t (*transfer)(int direction, int fd, void *address, size_t nbytes, int64_t offset);      /* INF_SYNC: 0 or -errno */
};
