/* Anonymous memory on 2 MiB pages: fewer segments per disk request, fewer TLB misses in Adam. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "internal.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

#define HUGE ((size_t) 2 << 20)
#define PAGE ((size_t) 4096)

struct touch {
	volatile char *begin;
	volatile char *end;
	pthread_t id;
};

static size_t round_up(size_t value, size_t granule)
{
	return (value + granule - 1) / granule * granule;
}

/* The kernel zeroes pages on first touch, one page at a time in the thread that touches: the slow part of allocation. */
static void *touch_pages(void *argument)
{
	struct touch *part = argument;

	for (volatile char *p = part->begin; p < part->end; p += PAGE)
		*p = 0;
	return NULL;
}

static void touch_in_parallel(char *base, size_t nbytes, int threads)
{
	size_t pages = nbytes / HUGE;
	size_t count = threads > 0 && (size_t) threads < pages ? (size_t) threads : pages;
	struct touch *parts = count > 1 && threads > 1 ? calloc(count, sizeof(*parts)) : NULL;
	size_t started = 0;

	while (parts && started + 1 < count) {
		parts[started].begin = base + pages * started / count * HUGE;
		parts[started].end = base + pages * (started + 1) / count * HUGE;
		if (pthread_create(&parts[started].id, NULL, touch_pages, &parts[started]))
			break;
		started++;
	}
	/* What no thread took is ours. */
	struct touch rest = {.begin = base + (started ? pages * started / count * HUGE : 0), .end = base + nbytes};
	touch_pages(&rest);
	for (size_t i = 0; i < started; i++)
		pthread_join(parts[i].id, NULL);
	free(parts);
}

int inf_memory_map(size_t nbytes, int threads, void **address)
{
	size_t length = round_up(nbytes, HUGE);
	size_t head;
	char *base;

	if (nbytes == 0 || length < nbytes || length + HUGE < length)
		return -EINVAL;
	base = mmap(NULL, length + HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (base == MAP_FAILED)
		return -errno;
	head = round_up((uintptr_t) base, HUGE) - (uintptr_t) base;
	if (head)
		munmap(base, head);
	munmap(base + head + length, HUGE - head);
	base += head;

	/*
	 * A device that writes into a private page while fork() marks it copy-on-write writes into the page of one process only:
	 * open(2), O_DIRECT. The child does not get these pages at all.
	 */
	if (madvise(base, length, MADV_DONTFORK)) {
		int error = -errno;

		munmap(base, length);
		return error;
	}
	(void) madvise(base, length, MADV_HUGEPAGE);    /* a wish: kernels without it give 4 KiB pages */
	touch_in_parallel(base, length, threads);
	*address = base;
	return 0;
}

int inf_memory_unmap(void *address, size_t nbytes)
{
	return munmap(address, round_up(nbytes, HUGE)) ? -errno : 0;
}
