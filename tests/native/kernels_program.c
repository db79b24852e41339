/*
 * The element kernels and the pool, on buffers that end where the data ends: what reads or writes past it, or shares data between
 * threads, shows under a sanitizer. Arithmetic is checked against torch in test_native.py; here only that all sets agree.
 */
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../native/internal.h"
#include "check.h"

#define ARRAYS 5        /* master, exp_avg, exp_avg_sq, grad, out */

static const int types[] = {INF_F32, INF_BF16, INF_F16};
static const int64_t sizes[] = {0, 1, 7, 8, 9, 15, 16, 17, 31, 33, 1000, 65536, 65537, 200003};
static inf_pool *pool;

static float value_at(int64_t i, int seed)
{
	return (float) ((i * 7919 + seed * 104729) % 20011 - 10005) / 5000.0f;
}

static void *new_array(int type, int64_t numel, int seed, bool positive)
{
	float *source = malloc((size_t) numel * 4 + 1);
	void *target = malloc((size_t) numel * inf_type_bytes(type) + (numel == 0));

	for (int64_t i = 0; i < numel; i++)
		source[i] = positive ? value_at(i, seed) * value_at(i, seed) : value_at(i, seed);
	inf_plain.cast(source, INF_F32, target, type, numel);
	free(source);
	return target;
}

struct arrays {
	struct inf_adam_chunk chunk;
	void *grad;
};

static struct arrays new_arrays(int64_t numel, int grad_type, int out_type)
{
	struct arrays a = {.grad = new_array(grad_type, numel, 4, false)};

	a.chunk = (struct inf_adam_chunk) {
		.master = new_array(INF_F32, numel, 1, false), .exp_avg = new_array(INF_F32, numel, 2, false),
		.exp_avg_sq = new_array(INF_F32, numel, 3, true), .grad = a.grad, .grad_type = grad_type, .out_type = out_type, .numel = numel,
		.param_out = out_type == INF_NONE ? NULL : new_array(out_type, numel, 5, false),
	};
	return a;
}

static void free_arrays(struct arrays *a)
{
	free(a->chunk.master);
	free(a->chunk.exp_avg);
	free(a->chunk.exp_avg_sq);
	free(a->chunk.param_out);
	free(a->grad);
}

static bool same(const void *a, const void *b, size_t nbytes)
{
	return nbytes == 0 || !memcmp(a, b, nbytes);
}

static void adam_agrees_on(int64_t numel, int grad_type, int out_type)
{
	/* three segments with gaps, none on a vector boundary */
	struct inf_adam_segment segments[] = {
		{0, numel / 3, 1e-3, 0.9, 0.999, 1e-8, 0.1, 3}, {numel / 3 + (numel > 3), numel / 2 + (numel > 3), 1e-2, 0.3, 0.99, 1e-6, 0, 1},
		{numel / 2 + (numel > 3), numel, 1e-4, 0.9, 0.95, 1e-8, 0.01, 100},
	};
	struct arrays plain = new_arrays(numel, grad_type, out_type);

	CHECK(inf_adamw(pool, INF_ISA_PLAIN, &plain.chunk, segments, 3, 0.5) == 0);
	for (int isa = INF_ISA_AVX2; isa <= inf_isa_best(); isa++) {
		struct arrays fast = new_arrays(numel, grad_type, out_type);

		CHECK(inf_adamw(pool, isa, &fast.chunk, segments, 3, 0.5) == 0);
		CHECK(same(plain.chunk.master, fast.chunk.master, (size_t) numel * 4));
		CHECK(same(plain.chunk.exp_avg, fast.chunk.exp_avg, (size_t) numel * 4));
		CHECK(same(plain.chunk.exp_avg_sq, fast.chunk.exp_avg_sq, (size_t) numel * 4));
		CHECK(same(plain.chunk.param_out, fast.chunk.param_out, (size_t) numel * inf_type_bytes(out_type)));
		free_arrays(&fast);
	}
	free_arrays(&plain);
}

static void adam_agrees_on_every_set_size_and_type(void)
{
	for (size_t s = 0; s < sizeof(sizes) / sizeof(*sizes); s++)
		for (int grad = 0; grad < 3; grad++)
			for (int out = INF_NONE; out <= INF_F16; out++)
				adam_agrees_on(sizes[s], types[grad], out);
}

static void sums_and_casts_agree_on(int64_t numel, int from, int to)
{
	double squares[3] = {0}, totals[3] = {0};
	void *source = new_array(from, numel, 1, false), *casts[3] = {NULL}, *sums[3] = {NULL};
	size_t nbytes = (size_t) numel * inf_type_bytes(to);

	for (int isa = 0; isa <= inf_isa_best(); isa++) {
		casts[isa] = new_array(to, numel, 9, false);
		sums[isa] = new_array(to, numel, 8, false);
		CHECK(inf_cast(pool, isa, source, from, casts[isa], to, numel) == 0);
		CHECK(inf_sum_of_squares(pool, isa, source, from, numel, &squares[isa]) == 0);
		CHECK(squares[isa] == squares[0] && same(casts[isa], casts[0], nbytes));
		if (to == INF_F32 || to == from) {
			CHECK(inf_accumulate(pool, isa, sums[isa], to, source, from, numel, &totals[isa]) == 0);
			CHECK(totals[isa] == totals[0] && same(sums[isa], sums[0], nbytes));
		} else {
			CHECK(inf_accumulate(pool, isa, sums[isa], to, source, from, numel, &totals[isa]) == -EINVAL);
		}
	}
	for (int isa = 0; isa < 3; isa++) {
		free(casts[isa]);
		free(sums[isa]);
	}
	free(source);
}

static void sums_and_casts_agree_on_every_set_size_and_type(void)
{
	for (size_t s = 0; s < sizeof(sizes) / sizeof(*sizes); s++)
		for (int from = 0; from < 3; from++)
			for (int to = 0; to < 3; to++)
				sums_and_casts_agree_on(sizes[s], types[from], types[to]);
}

static void crc32c_agrees_with_its_table(void)
{
	uint8_t *bytes = new_array(INF_F32, 20000, 1, false);

	CHECK(inf_crc32c(0, "123456789", 9) == 0xe3069283u);
	for (size_t nbytes = 0; nbytes < 80000; nbytes = nbytes * 2 + 1)
		for (size_t start = 0; start < 9 && start < nbytes; start++)
			CHECK(inf_crc32c(7, bytes + start, nbytes - start) == inf_crc32c_table(7, bytes + start, nbytes - start));
	free(bytes);
}

static void memory_is_zero_and_aligned(void)
{
	for (size_t nbytes = 1; nbytes < (size_t) 9 << 20; nbytes = nbytes * 5 + 4095)
		for (int threads = 0; threads < 4; threads++) {
			void *address;

			CHECK(inf_memory_map(nbytes, threads, &address) == 0);
			CHECK((uintptr_t) address % ((size_t) 2 << 20) == 0);
			CHECK(((char *) address)[0] == 0 && ((char *) address)[nbytes - 1] == 0);
			memset(address, 1, nbytes);
			CHECK(inf_memory_unmap(address, nbytes) == 0);
		}
	void *nowhere;
	CHECK(inf_memory_map(0, 1, &nowhere) == -EINVAL && inf_memory_map(SIZE_MAX, 1, &nowhere) == -EINVAL);
	CHECK(inf_memory_map((size_t) 1 << 52, 1, &nowhere) == -ENOMEM);
}

static void *sum_often(void *argument)
{
	double first, again;
	int64_t numel = 300000;

	CHECK(inf_sum_of_squares(pool, -1, argument, INF_F32, numel, &first) == 0);
	for (int i = 0; i < 20; i++) {
		CHECK(inf_sum_of_squares(pool, -1, argument, INF_F32, numel, &again) == 0);
		CHECK(again == first);
	}
	return NULL;
}

static void callers_take_turns_on_one_pool(void)
{
	pthread_t ids[4];
	void *data[4];

	for (int i = 0; i < 4; i++) {
		data[i] = new_array(INF_F32, 300000, i, false);
		CHECK(pthread_create(&ids[i], NULL, sum_often, data[i]) == 0);
	}
	for (int i = 0; i < 4; i++) {
		CHECK(pthread_join(ids[i], NULL) == 0);
		free(data[i]);
	}
}

static void bad_arguments_are_refused(void)
{
	float x[4] = {0};
	struct inf_adam_chunk chunk = {.master = x, .exp_avg = x, .exp_avg_sq = x, .grad = x, .grad_type = INF_F32, .out_type = INF_NONE, .numel = 4};
	struct inf_adam_segment past_the_end = {.start = 0, .stop = 5, .step = 1}, no_step = {.start = 0, .stop = 4, .step = 0};
	inf_pool *none;
	int no_core = 1 << 20;

	CHECK(inf_adamw(pool, -1, &chunk, &past_the_end, 1, 1) == -EINVAL);
	CHECK(inf_adamw(pool, -1, &chunk, &no_step, 1, 1) == -EINVAL);
	CHECK(inf_adamw(pool, 17, &chunk, &no_step, 1, 1) == -EINVAL);
	CHECK(inf_cast(pool, -1, x, INF_NONE, x, INF_F32, 4) == -EINVAL);
	CHECK(inf_pool_open(0, NULL, &none) == -EINVAL && inf_pool_open(1, &no_core, &none) == -EINVAL);
}

static void a_forked_child_is_told_so(void)
{
	float *x = new_array(INF_F32, 200000, 1, false);
	double sum;
	int status;

	pid_t child = fork();
	if (child == 0) {
		CHECK(inf_sum_of_squares(pool, -1, x, INF_F32, 200000, &sum) == -ECHILD);
		inf_pool_close(pool);
		_exit(0);
	}
	CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
	CHECK(inf_sum_of_squares(pool, -1, x, INF_F32, 200000, &sum) == 0);
	free(x);
}

int main(void)
{
	for (int threads = 1; threads <= 3; threads += 2) {
		CHECK(inf_pool_open(threads, NULL, &pool) == 0 && inf_pool_threads(pool) == threads);
		RUN(adam_agrees_on_every_set_size_and_type);
		RUN(sums_and_casts_agree_on_every_set_size_and_type);
		RUN(callers_take_turns_on_one_pool);
		RUN(a_forked_child_is_told_so);
		RUN(bad_arguments_are_refused);
		inf_pool_close(pool);
	}
	RUN(crc32c_agrees_with_its_table);
	RUN(memory_is_zero_and_aligned);
	return 0;
}
