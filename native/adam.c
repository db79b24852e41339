/* One AdamW update of a chunk: segments to blocks, settings to fp32 scalars. The arithmetic is in plain.c and simd.h. */
#include "internal.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>

struct job {
	const struct inf_kernels *kernels;
	const struct inf_adam_chunk *chunk;
	const struct inf_adam_segment *segments;
	const struct inf_adam_scalars *scalars; /* one per segment */
	size_t count;
};

/* In fp64 to the end, rounded once: so does torch. */
static struct inf_adam_scalars scalars_of(const struct inf_adam_segment *s, double grad_scale)
{
	double correction1 = 1 - pow(s->beta1, (double) s->step), correction2 = 1 - pow(s->beta2, (double) s->step);

	return (struct inf_adam_scalars) {
		.grad_scale = (float) grad_scale,
		.decay = (float) (1 - s->lr * s->weight_decay),
		.lerp_weight = (float) (1 - s->beta1),
		.beta2 = (float) s->beta2,
		.square_weight = (float) (1 - s->beta2),
		.correction2_sqrt = (float) sqrt(correction2),
		.eps = (float) s->eps,
		.minus_step_size = (float) -(s->lr / correction1),
	};
}

static void update(const struct job *job, size_t segment, int64_t begin, int64_t end)
{
	const struct inf_adam_chunk *c = job->chunk;
	const char *grad = (const char *) c->grad + (size_t) begin * inf_type_bytes(c->grad_type);
	char *out = c->param_out ? (char *) c->param_out + (size_t) begin * inf_type_bytes(c->out_type) : NULL;

	job->kernels->adam(&job->scalars[segment], c->master + begin, c->exp_avg + begin, c->exp_avg_sq + begin, grad, c->grad_type, out, c->out_type,
		end - begin);
}

/* The pool counts elements of the segments laid end to end; here they find their places in the chunk. */
static void update_block(void *context, int64_t begin, int64_t end)
{
	const struct job *job = context;
	int64_t passed = 0;

	for (size_t i = 0; i < job->count && passed < end; i++) {
		const struct inf_adam_segment *s = &job->segments[i];
		int64_t numel = s->stop - s->start;
		int64_t from = begin > passed ? begin - passed : 0;
		int64_t to = end - passed < numel ? end - passed : numel;

		if (from < to)
			update(job, i, s->start + from, s->start + to);
		passed += numel;
	}
}

int inf_adamw(inf_pool *pool, int isa, const struct inf_adam_chunk *chunk, const struct inf_adam_segment *segments, size_t count, double grad_scale)
{
	struct job job = {.kernels = inf_kernels_for(isa), .chunk = chunk, .segments = segments, .count = count};
	struct inf_adam_scalars *scalars;
	int64_t numel = 0;
	int error;

	if (!job.kernels || (chunk->param_out == NULL) != (chunk->out_type == INF_NONE))
		return -EINVAL;
	scalars = calloc(count ? count : 1, sizeof(*scalars));
	if (!scalars)
		return -ENOMEM;
	for (size_t i = 0; i < count; i++) {
		if (segments[i].start < (i ? segments[i - 1].stop : 0) || segments[i].stop < segments[i].start || segments[i].stop > chunk->numel ||
			segments[i].step < 1) {
			free(scalars);
			return -EINVAL;
		}
		scalars[i] = scalars_of(&segments[i], grad_scale);
		numel += segments[i].stop - segments[i].start;
	}
	job.scalars = scalars;
	error = inf_pool_run(pool, numel, update_block, &job);
	free(scalars);
	return error;
}
