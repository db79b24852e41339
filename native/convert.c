/* Casts, accumulation and sums of squares over the pool. The element loops are in plain.c and simd.h. */
#include "internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct job {
	const struct inf_kernels *kernels;
	const char *source;
	int source_type;
	char *target;
	int target_type;
	double *partials;       /* one per block: added in block order, whoever computed them */
};

static const void *source_at(const struct job *job, int64_t i)
{
	return job->source + (size_t) i * inf_type_bytes(job->source_type);
}

static void *target_at(const struct job *job, int64_t i)
{
	return job->target + (size_t) i * inf_type_bytes(job->target_type);
}

static int is_type(int type)
{
	return type == INF_F32 || type == INF_BF16 || type == INF_F16;
}

static void cast_block(void *context, int64_t begin, int64_t end)
{
	const struct job *job = context;

	job->kernels->cast(source_at(job, begin), job->source_type, target_at(job, begin), job->target_type, end - begin);
}

int inf_cast(inf_pool *pool, int isa, const void *source, int source_type, void *target, int target_type, int64_t numel)
{
	struct job job = {.kernels = inf_kernels_for(isa), .source = source, .source_type = source_type, .target = target, .target_type = target_type};

	if (!job.kernels || !is_type(source_type) || !is_type(target_type) || numel < 0)
		return -EINVAL;
	return inf_pool_run(pool, numel, cast_block, &job);
}

/* Sixteen lanes to one, as a tree. */
static double fold(const double *lanes)
{
	double sums[INF_LANES];

	memcpy(sums, lanes, sizeof(sums));
	for (int width = INF_LANES / 2; width; width /= 2)
		for (int i = 0; i < width; i++)
			sums[i] += sums[i + width];
	return sums[0];
}

static void accumulate_block(void *context, int64_t begin, int64_t end)
{
	const struct job *job = context;
	double lanes[INF_LANES] = {0};

	job->kernels->accumulate(target_at(job, begin), job->target_type, source_at(job, begin), job->source_type, end - begin, lanes);
	job->partials[begin / INF_BLOCK] = fold(lanes);
}

static void square_block(void *context, int64_t begin, int64_t end)
{
	const struct job *job = context;
	double lanes[INF_LANES] = {0};

	job->kernels->squares(source_at(job, begin), job->source_type, end - begin, lanes);
	job->partials[begin / INF_BLOCK] = fold(lanes);
}

static int run_with_partials(inf_pool *pool, inf_task *task, struct job *job, int64_t numel, double *sum)
{
	int64_t blocks = (numel + INF_BLOCK - 1) / INF_BLOCK;
	int error;

	job->partials = calloc(blocks ? (size_t) blocks : 1, sizeof(double));
	if (!job->partials)
		return -ENOMEM;
	error = inf_pool_run(pool, numel, task, job);
	*sum = 0;
	for (int64_t i = 0; i < blocks; i++)
		*sum += job->partials[i];
	free(job->partials);
	return error;
}

int inf_accumulate(inf_pool *pool, int isa, void *total, int total_type, const void *addend, int addend_type, int64_t numel, double *squares)
{
	struct job job = {.kernels = inf_kernels_for(isa), .source = addend, .source_type = addend_type, .target = total, .target_type = total_type};

	if (!job.kernels || !is_type(total_type) || !is_type(addend_type) || numel < 0 || (total_type != INF_F32 && total_type != addend_type))
		return -EINVAL;
	return run_with_partials(pool, accumulate_block, &job, numel, squares);
}

int inf_sum_of_squares(inf_pool *pool, int isa, const void *x, int type, int64_t numel, double *squares)
{
	struct job job = {.kernels = inf_kernels_for(isa), .source = x, .source_type = type};

	if (!job.kernels || !is_type(type) || numel < 0)
		return -EINVAL;
	return run_with_partials(pool, square_block, &job, numel, squares);
}
