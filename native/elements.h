/* One element at a time: the conversions that every faster loop must equal to the bit. */
#pragma once

#include <stdint.h>
#include <string.h>

#include "internal.h"

static inline uint32_t bits_of(float x)
{
	uint32_t bits;

	memcpy(&bits, &x, sizeof(bits));
	return bits;
}

static inline float float_of(uint32_t bits)
{
	float x;

	memcpy(&x, &bits, sizeof(x));
	return x;
}

static inline float bf16_to_f32(uint16_t h)
{
	return float_of((uint32_t) h << 16);
}

/* Round to nearest even. Every NaN becomes 0xffff, as in torch's vector cast. */
static inline uint16_t f32_to_bf16(float x)
{
	uint32_t bits = bits_of(x);

	if (x != x)
		return 0xffff;
	return (uint16_t) ((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline float f16_to_f32(uint16_t h)
{
	uint32_t sign = (uint32_t) (h & 0x8000) << 16, exponent = h >> 10 & 0x1f, fraction = h & 0x3ff;

	if (exponent == 0x1f)           /* infinity, or a NaN made quiet */
		return float_of(sign | 0x7f800000 | fraction << 13 | (fraction ? 0x400000u : 0));
	if (exponent == 0)              /* denormal: fraction * 2^-24, exact in fp32 */
		return float_of(sign | bits_of((float) fraction * 0x1p-24f));
	return float_of(sign | (exponent + 112) << 23 | fraction << 13);
}

/* Round to nearest even. A NaN keeps the upper bits of its payload and becomes quiet, as in vcvtps2ph. */
static inline uint16_t f32_to_f16(float x)
{
	uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;

	if (rest > 0x7f800000)
		return (uint16_t) (sign | 0x7e00 | (rest >> 13 & 0x3ff));
	if (rest >= 0x477ff000)         /* 65520 and above round to infinity */
		return (uint16_t) (sign | 0x7c00);
	if (rest < 0x38800000)          /* below 2^-14: let the adder round at 2^-24, the last place of a denormal */
		return (uint16_t) (sign | (bits_of(float_of(rest) + 0.5f) - bits_of(0.5f)));
	return (uint16_t) (sign | ((rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13));
}

static inline float load_element(const void *x, int type, int64_t i)
{
	if (type == INF_F32)
		return ((const float *) x)[i];
	uint16_t h = ((const uint16_t *) x)[i];
	return type == INF_BF16 ? bf16_to_f32(h) : f16_to_f32(h);
}

static inline void store_element(void *x, int type, int64_t i, float value)
{
	if (type == INF_F32)
		((float *) x)[i] = value;
	else if (type != INF_NONE)
		((uint16_t *) x)[i] = type == INF_BF16 ? f32_to_bf16(value) : f32_to_f16(value);
}
