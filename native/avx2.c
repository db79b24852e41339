/* Eight fp32 to a vector. */
#if defined(__x86_64__)
#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>

#define TARGET __attribute__((target("avx2,fma,f16c")))
#define WIDTH 8
#define OP static inline __attribute__((always_inline)) TARGET

typedef __m256 vector;
typedef __m128i halves;            /* as many 16-bit elements */
typedef struct { __m256d lane[4]; } wide;

OP vector set1(float x) { return _mm256_set1_ps(x); }
OP vector mul(vector a, vector b) { return _mm256_mul_ps(a, b); }
OP vector add(vector a, vector b) { return _mm256_add_ps(a, b); }
OP vector sub(vector a, vector b) { return _mm256_sub_ps(a, b); }
OP vector divide(vector a, vector b) { return _mm256_div_ps(a, b); }
OP vector root(vector a) { return _mm256_sqrt_ps(a); }
OP vector mul_add(vector a, vector b, vector c) { return _mm256_fmadd_ps(a, b, c); }

OP vector load_f32(const float *x) { return _mm256_loadu_ps(x); }
OP void store_f32(float *x, vector v) { _mm256_storeu_ps(x, v); }

OP vector load_bf16(const uint16_t *x)
{
	return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *) x)), 16));
}

OP halves pack_bf16(vector v)
{
	__m256i bits = _mm256_castps_si256(v);
	__m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
	__m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
	__m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));

	rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0xffff), nan);
	return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
}

OP vector load_f16(const uint16_t *x) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) x)); }

OP halves pack_f16(vector v)
{
	return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

OP void store_halves(uint16_t *x, halves h) { _mm_storeu_si128((__m128i *) x, h); }
OP void stream_halves(uint16_t *x, halves h) { _mm_stream_si128((__m128i *) x, h); }      /* x on a multiple of sizeof(h) */

OP wide load_wide(const double *lanes)
{
	return (wide) {{_mm256_loadu_pd(lanes), _mm256_loadu_pd(lanes + 4), _mm256_loadu_pd(lanes + 8), _mm256_loadu_pd(lanes + 12)}};
}

OP void store_wide(double *lanes, const wide *w)
{
	for (int i = 0; i < 4; i++)
		_mm256_storeu_pd(lanes + 4 * i, w->lane[i]);
}

OP void add_squares(wide *sums, int half, vector v)
{
	__m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(v)), high = _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1));

	sums->lane[2 * half] = _mm256_add_pd(sums->lane[2 * half], _mm256_mul_pd(low, low));
	sums->lane[2 * half + 1] = _mm256_add_pd(sums->lane[2 * half + 1], _mm256_mul_pd(high, high));
}

#include "simd.h"

const struct inf_kernels inf_avx2 = {.adam = adam, .cast = cast, .accumulate = accumulate, .squares = squares};
#else
typedef int inf_avx2_needs_x86;
#endif
