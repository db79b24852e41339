/* Three ways to the disk: libaio (opened at run time), the system calls that it wraps, pread/pwrite. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "aio_backend.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"

static const struct timespec at_once = {0, 0};

/* ---- pread and pwrite ---- */

static ssize_t plain_transfer(int direction, int fd, void *address, size_t nbytes, int64_t offset)
{
	ssize_t got;

	if (direction == INF_SYNC)
		got = fsync(fd);
	else
		got = direction == INF_READ ? pread(fd, address, nbytes, offset) : pwrite(fd, address, nbytes, offset);
	return got < 0 ? -errno : got;
}

static const inf_backend threads_backend = {.name = "threads", .transfer = plain_transfer};

/* ---- the system calls ---- */

static int kernel_setup(unsigned depth, aio_context_t *context)
{
	return syscall(SYS_io_setup, depth, context) < 0 ? -errno : 0;
}

static int kernel_submit(aio_context_t context, struct iocb *iocb)
{
	long taken = syscall(SYS_io_submit, context, 1L, &iocb);

	return taken == 1 ? 0 : taken < 0 ? -errno : -EAGAIN;
}

static int kernel_reap(aio_context_t context, long least, long most, struct io_event *events)
{
	long got = syscall(SYS_io_getevents, context, least, most, events, least ? NULL : &at_once);

	return got < 0 ? -errno : (int) got;
}

static int kernel_destroy(aio_context_t context)
{
	return syscall(SYS_io_destroy, context) < 0 ? -errno : 0;
}

static const inf_backend kernel_backend = {
	.name = "kernel", .setup = kernel_setup, .submit = kernel_submit, .reap = kernel_reap, .destroy = kernel_destroy, .transfer = plain_transfer,
};

/* ---- libaio: same structures, same answers, and it reads completions without entering the kernel ---- */

static struct {
	int (*io_setup)(int, aio_context_t *);
	int (*io_submit)(aio_context_t, long, struct iocb **);
	int (*io_getevents)(aio_context_t, long, long, struct io_event *, const struct timespec *);
	int (*io_destroy)(aio_context_t);
} libaio;
static bool libaio_found;
static pthread_once_t libaio_once = PTHREAD_ONCE_INIT;

static bool resolve(void *library, const char *name, void *function)
{
	void *symbol = dlsym(library, name);

	memcpy(function, &symbol, sizeof(symbol));      /* ISO C has no cast from object to function pointers */
	return symbol != NULL;
}

static void open_libaio(void)
{
	/* Debian 13 and Ubuntu 24.04 renamed the library when time_t grew elsewhere; the interface is the same here. */
	void *library = dlopen("libaio.so.1t64", RTLD_NOW | RTLD_LOCAL);

	if (!library)
		library = dlopen("libaio.so.1", RTLD_NOW | RTLD_LOCAL);
	libaio_found = library && resolve(library, "io_setup", &libaio.io_setup) && resolve(library, "io_submit", &libaio.io_submit) &&
		resolve(library, "io_getevents", &libaio.io_getevents) && resolve(library, "io_destroy", &libaio.io_destroy);
}

static int libaio_setup(unsigned depth, aio_context_t *context)
{
	return libaio.io_setup((int) depth, context);
}

static int libaio_submit(aio_context_t context, struct iocb *iocb)
{
	int taken = libaio.io_submit(context, 1, &iocb);

	return taken == 1 ? 0 : taken < 0 ? taken : -EAGAIN;
}

static int libaio_reap(aio_context_t context, long least, long most, struct io_event *events)
{
	return libaio.io_getevents(context, least, most, events, least ? NULL : &at_once);
}

static int libaio_destroy(aio_context_t context)
{
	return libaio.io_destroy(context);
}

static const inf_backend libaio_backend = {
	.name = "libaio", .setup = libaio_setup, .submit = libaio_submit, .reap = libaio_reap, .destroy = libaio_destroy, .transfer = plain_transfer,
};

const inf_backend *inf_backend_find(const char *name)
{
	pthread_once(&libaio_once, open_libaio);
	if (!strcmp(name, "libaio"))
		return libaio_found ? &libaio_backend : NULL;
	if (!strcmp(name, "kernel"))
		return &kernel_backend;
	return !strcmp(name, "threads") ? &threads_backend : NULL;
}
