/*
 * The ceiling of an AdamW step: the bytes it must move, next to no arithmetic.
 * Reads p, g, m, v and writes p, m, v (28 bytes an element with fp32 gradients), with one multiply and one add each.
 */
#include <stddef.h>

#define BLOCK ((size_t) 4096)

void traffic(float *restrict p, const float *restrict g, float *restrict m, float *restrict v, size_t numel)
{
#pragma omp parallel for schedule(static)
	for (size_t begin = 0; begin < numel; begin += BLOCK) {
		size_t end = begin + BLOCK < numel ? begin + BLOCK : numel;

		for (size_t i = begin; i < end; i++) {
			m[i] = m[i] * 0.5f + g[i];
			v[i] = v[i] * 0.5f + g[i];
			p[i] = p[i] - m[i] * 1e-9f;
		}
	}
}
