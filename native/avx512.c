/* Sixteen fp32 to a vector. */
#if defined(__x86_64__)
#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")))
#define WIDTH 16
#define OP static inline __attribute__((always_inline)) TARGET

typedef __m512 vector;
typedef __m256i halves;            /* as many 16-bit elements */
typedef struct { __m512d lane[2]; } wide;

OP vector set1(float x) { return _mm512_set1_ps(x); }
OP vector mul(vector a, vector b) { return _mm512_mul_ps(a, b); }
OP vector add(vector a, vector b) { return _mm512_add_ps(a, b); }
OP vector sub(vector a, vector b) { return _mm512_sub_ps(a, b); }
OP vector divide(vector a, vector b) { return _mm512_div_ps(a, b); }
OP vector root(vector a) { return _mm512_sqrt_ps(a); }
OP vector mul_add(vector a, vector b, vector c) { return _mm512_fmadd_ps(a, b, c); }

OP vector load_f32(const float *x) { return _mm512_loadu_ps(x); }
OP void store_f32(float *x, vector v) { _mm512_storeu_ps(x, v); }

OP vector load_bf16(const uint16_t *x)
{
	return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *) x)), 16));
}

/* Not vcvtneps2bf16: it takes denormals for zero. */
OP halves pack_bf16(vector v)
{
	__m512i bits = _mm512_castps_si512(v);
	__m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
	__m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);

	rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_epi32(0xffff));
	return _mm512_cvtepi32_epi16(rounded);
}

OP vector load_f16(const uint16_t *x) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) x)); }

OP halves pack_f16(vector v)
{
	return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

OP void store_halves(uint16_t *x, halves h) { _mm256_storeu_si256((__m256i *) x, h); }
OP void stream_halves(uint16_t *x, halves h) { _mm256_stream_si256((__m256i *) x, h); }      /* x on a multiple of sizeof(h) */

OP wide load_wide(const double *lanes)
{
	return (wide) {{_mm512_loadu_pd(lanes), _mm512_loadu_pd(lanes + 8)}};
}

OP void store_wide(double *lanes, const wide *w)
{
	for (int i = 0; i < 2; i++)
		_mm512_storeu_pd(lanes + 8 * i, w->lane[i]);
}

OP void add_squares(wide *sums, int half, vector v)
{
	__m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(v)), high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1));

	(void) half;
	sums->lane[0] = _mm512_add_pd(sums->lane[0], _mm512_mul_pd(low, low));
	sums->lane[1] = _mm512_add_pd(sums->lane[1], _mm512_mul_pd(high, high));
}

#include "simd.h"

const struct inf_kernels inf_avx512 = {.adam = adam, .cast = cast, .accumulate = accumulate, .squares = squares};
#else
typedef int inf_avx512_needs_x86;
#endif
