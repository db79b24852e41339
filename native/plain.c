/*
 * The loops anyone can read. Each faster set (simd.h) is tested to be equal to these to the bit.
 *
 * Compiled with -ffp-contract=off: a fused multiply-add stands only where fmaf() is written.
 */
#include "elements.h"

#include <math.h>

/*
 * AdamW, decoupled weight decay (Loshchilov & Hutter, arXiv 1711.05101), in the order in which torch's fused CPU kernel
 * rounds. Denormals are kept, as torch keeps them.
 */
static void adam(const struct inf_adam_scalars *s, float *master, float *exp_avg, float *exp_avg_sq, const void *grad, int grad_type,
	void *out, int out_type, int64_t numel)
{
	for (int64_t i = 0; i < numel; i++) {
		float g = load_element(grad, grad_type, i) * s->grad_scale;
		float p = master[i] * s->decay;

		/* lerp from the nearer end: m + w (g - m), or g + (w - 1) (g - m) where w is at least one half */
		float m = s->lerp_weight < 0.5f ? fmaf(s->lerp_weight, g - exp_avg[i], exp_avg[i]) : fmaf(s->lerp_weight - 1, g - exp_avg[i], g);
		float v = fmaf(s->square_weight * g, g, exp_avg_sq[i] * s->beta2);
		float denominator = sqrtf(v) / s->correction2_sqrt + s->eps;

		p += s->minus_step_size * m / denominator;
		exp_avg[i] = m;
		exp_avg_sq[i] = v;
		master[i] = p;
		store_element(out, out_type, i, p);
	}
}

static void cast(const void *source, int source_type, void *target, int target_type, int64_t numel)
{
	for (int64_t i = 0; i < numel; i++)
		store_element(target, target_type, i, load_element(source, source_type, i));
}

static void squares(const void *x, int type, int64_t numel, double *lanes)
{
	for (int64_t i = 0; i < numel; i++) {
		double value = load_element(x, type, i);

		lanes[i % INF_LANES] += value * value;          /* the product of two fp32 is exact in fp64 */
	}
}

static void accumulate(void *total, int total_type, const void *addend, int addend_type, int64_t numel, double *lanes)
{
	for (int64_t i = 0; i < numel; i++) {
		store_element(total, total_type, i, load_element(total, total_type, i) + load_element(addend, addend_type, i));
		double value = load_element(total, total_type, i);

		lanes[i % INF_LANES] += value * value;
	}
}

const struct inf_kernels inf_plain = {.adam = adam, .cast = cast, .accumulate = accumulate, .squares = squares};
