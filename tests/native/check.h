/* A test program says what it checked and where it failed; 0 is success. */
#pragma once

#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                                        \
	do {                                                                                    \
		if (!(condition)) {                                                             \
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);         \
			exit(1);                                                                \
		}                                                                               \
	} while (0)

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/lsan_interface.h>
#else
#define __lsan_disable()
#define __lsan_enable()
#endif

/* What a dead drive may still write to is kept for ever, on purpose. */
#define RUN_LEAKING(test)               \
	do {                            \
		__lsan_disable();       \
		RUN(test);              \
		__lsan_enable();        \
	} while (0)

#define RUN(test)                       \
	do {                            \
		test();                 \
		printf("%s\n", #test);  \
		fflush(stdout);         \
	} while (0)
