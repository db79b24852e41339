/* What the C files share among themselves. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "infinity.h"

#define INF_LANES 16                            /* fp64 accumulators of a sum of squares: element i goes to lane i % 16 */
#define INF_BLOCK ((int64_t) 65536)             /* elements of one block; its partial sum has a fixed order */

static inline size_t inf_type_bytes(int type)
{
	return type == INF_F32 ? 4 : type == INF_NONE ? 0 : 2;
}

/* ---- pool.c ---- */

typedef void inf_task(void *context, int64_t begin, int64_t end);

/* Runs task over [0, numel) in pieces that start on multiples of INF_BLOCK. 0, or -ECHILD in a forked child. */
int inf_pool_run(inf_pool *pool, int64_t numel, inf_task *task, void *context);

/* ---- the element loops, one set per instruction set, all equal to the bit ---- */

struct inf_adam_scalars {
	float grad_scale;
	float decay;                    /* 1 - lr * weight_decay */
	float lerp_weight;              /* 1 - beta1 */
	float beta2;
	float square_weight;            /* 1 - beta2 */
	float correction2_sqrt;         /* sqrt(1 - beta2^step) */
	float eps;
	float minus_step_size;          /* -lr / (1 - beta1^step) */
};

struct inf_kernels {
	void (*adam)(const struct inf_adam_scalars *scalars, float *master, float *exp_avg, float *exp_avg_sq,
		const void *grad, int grad_type, void *out, int out_type, int64_t numel);
	void (*cast)(const void *source, int source_type, void *target, int target_type, int64_t numel);
	/* The lanes are added to; the first element belongs to lane 0. */
	void (*accumulate)(void *total, int total_type, const void *addend, int addend_type, int64_t numel, double *lanes);
	void (*squares)(const void *x, int type, int64_t numel, double *lanes);
};

extern const struct inf_kernels inf_plain, inf_avx2, inf_avx512;

/* NULL when isa is not available here; -1 is the best one. */
const struct inf_kernels *inf_kernels_for(int isa);
