/*
 * The loops of plain.c, WIDTH elements at a time. avx2.c and avx512.c say what a vector is and include this file.
 *
 * Every operation rounds as its scalar twin does and in the same place, so the results are equal to the bit; what does not
 * fill a vector goes to the plain loop. The type of each operand is a constant in each copy of a loop.
 */
#include "elements.h"

#define INLINE static inline __attribute__((always_inline)) TARGET
#define LOOP static __attribute__((noinline)) TARGET

/* For every type of one operand: BODY sees it as a constant. */
#define FOR_TYPE(type, BODY)                    \
	switch (type) {                         \
	case INF_F32: BODY(INF_F32); break;     \
	case INF_BF16: BODY(INF_BF16); break;   \
	case INF_F16: BODY(INF_F16); break;     \
	}

INLINE vector load(const void *x, int type, int64_t i)
{
	if (type == INF_F32)
		return load_f32((const float *) x + i);
	if (type == INF_BF16)
		return load_bf16((const uint16_t *) x + i);
	return load_f16((const uint16_t *) x + i);
}

INLINE halves pack(int type, vector value)
{
	return type == INF_BF16 ? pack_bf16(value) : pack_f16(value);
}

INLINE void store(void *x, int type, int64_t i, vector value)
{
	if (type == INF_F32)
		store_f32((float *) x + i, value);
	else if (type != INF_NONE)
		store_halves((uint16_t *) x + i, pack(type, value));
}

/* Past the caches: nobody reads the new parameters here, so their lines need not be fetched before they are written. */
INLINE void stream(void *x, int type, int64_t i, vector value)
{
	if (type == INF_BF16 || type == INF_F16)
		stream_halves((uint16_t *) x + i, pack(type, value));
	else
		store(x, type, i, value);
}

INLINE void adam_loop(const struct inf_adam_scalars *s, float *master, float *exp_avg, float *exp_avg_sq, const void *grad, int grad_type,
	void *out, int out_type, int64_t numel, bool near, bool streaming)
{
	const vector grad_scale = set1(s->grad_scale), decay = set1(s->decay), beta2 = set1(s->beta2), square_weight = set1(s->square_weight);
	const vector correction = set1(s->correction2_sqrt), eps = set1(s->eps), minus_step_size = set1(s->minus_step_size);
	const vector weight = set1(near ? s->lerp_weight : s->lerp_weight - 1);

	for (int64_t i = 0; i < numel; i += WIDTH) {
		vector g = mul(load(grad, grad_type, i), grad_scale);
		vector p = mul(load_f32(master + i), decay);
		vector m = load_f32(exp_avg + i);
		vector v = load_f32(exp_avg_sq + i);

		m = mul_add(weight, sub(g, m), near ? m : g);
		v = mul_add(mul(square_weight, g), g, mul(v, beta2));
		p = add(p, divide(mul(minus_step_size, m), add(divide(root(v), correction), eps)));
		store_f32(exp_avg + i, m);
		store_f32(exp_avg_sq + i, v);
		store_f32(master + i, p);
		if (streaming)
			stream(out, out_type, i, p);
		else
			store(out, out_type, i, p);
	}
	if (streaming)
		_mm_sfence();           /* in memory before anybody is told that they are */
}

LOOP void adam(const struct inf_adam_scalars *s, float *master, float *exp_avg, float *exp_avg_sq, const void *grad, int grad_type,
	void *out, int out_type, int64_t numel)
{
	const int64_t n = numel / WIDTH * WIDTH;
	const bool aligned = (uintptr_t) out % sizeof(halves) == 0;

	if (s->lerp_weight < 0.5f && aligned) {
#define OUT(o, g) case o: adam_loop(s, master, exp_avg, exp_avg_sq, grad, g, out, o, n, true, true); break;
#define GRAD(g) switch (out_type) { OUT(INF_NONE, g) OUT(INF_F32, g) OUT(INF_BF16, g) OUT(INF_F16, g) }
		FOR_TYPE(grad_type, GRAD)
#undef GRAD
#undef OUT
	} else {                /* rare, so one copy of each that looks at the types as it goes */
		if (s->lerp_weight < 0.5f)
			adam_loop(s, master, exp_avg, exp_avg_sq, grad, grad_type, out, out_type, n, true, false);
		else
			adam_loop(s, master, exp_avg, exp_avg_sq, grad, grad_type, out, out_type, n, false, false);
	}
	inf_plain.adam(s, master + n, exp_avg + n, exp_avg_sq + n, (const char *) grad + (size_t) n * inf_type_bytes(grad_type), grad_type,
		out ? (char *) out + (size_t) n * inf_type_bytes(out_type) : NULL, out_type, numel - n);
}

INLINE void cast_loop(const void *source, int source_type, void *target, int target_type, int64_t numel)
{
	for (int64_t i = 0; i < numel; i += WIDTH)
		store(target, target_type, i, load(source, source_type, i));
}

LOOP void cast(const void *source, int source_type, void *target, int target_type, int64_t numel)
{
	const int64_t n = numel / WIDTH * WIDTH;

#define SOURCE_INF_F32(s) cast_loop(source, s, target, INF_F32, n)
#define SOURCE_INF_BF16(s) cast_loop(source, s, target, INF_BF16, n)
#define SOURCE_INF_F16(s) cast_loop(source, s, target, INF_F16, n)
	if (target_type == INF_F32)
		FOR_TYPE(source_type, SOURCE_INF_F32)
	else if (target_type == INF_BF16)
		FOR_TYPE(source_type, SOURCE_INF_BF16)
	else
		FOR_TYPE(source_type, SOURCE_INF_F16)
	inf_plain.cast((const char *) source + (size_t) n * inf_type_bytes(source_type), source_type,
		(char *) target + (size_t) n * inf_type_bytes(target_type), target_type, numel - n);
}

INLINE void square_loop(const void *x, int type, int64_t numel, double *lanes)
{
	wide sums = load_wide(lanes);

	for (int64_t i = 0; i < numel; i += INF_LANES)
		for (int k = 0; k < INF_LANES / WIDTH; k++)
			add_squares(&sums, k, load(x, type, i + k * WIDTH));
	store_wide(lanes, &sums);
}

LOOP void squares(const void *x, int type, int64_t numel, double *lanes)
{
	const int64_t n = numel / INF_LANES * INF_LANES;

#define BODY(t) square_loop(x, t, n, lanes)
	FOR_TYPE(type, BODY)
#undef BODY
	inf_plain.squares((const char *) x + (size_t) n * inf_type_bytes(type), type, numel - n, lanes);
}

INLINE void accumulate_loop(void *total, int total_type, const void *addend, int addend_type, int64_t numel, double *lanes)
{
	wide sums = load_wide(lanes);

	for (int64_t i = 0; i < numel; i += INF_LANES)
		for (int k = 0; k < INF_LANES / WIDTH; k++) {
			int64_t at = i + k * WIDTH;

			store(total, total_type, at, add(load(total, total_type, at), load(addend, addend_type, at)));
			add_squares(&sums, k, load(total, total_type, at));     /* of the rounded total */
		}
	store_wide(lanes, &sums);
}

LOOP void accumulate(void *total, int total_type, const void *addend, int addend_type, int64_t numel, double *lanes)
{
	const int64_t n = numel / INF_LANES * INF_LANES;

	if (total_type == INF_F32) {
#define BODY(t) accumulate_loop(total, INF_F32, addend, t, n, lanes)
		FOR_TYPE(addend_type, BODY)
#undef BODY
	} else {
#define BODY(t) accumulate_loop(total, t, addend, t, n, lanes)
		FOR_TYPE(total_type, BODY)
#undef BODY
	}
	inf_plain.accumulate((char *) total + (size_t) n * inf_type_bytes(total_type), total_type,
		(const char *) addend + (size_t) n * inf_type_bytes(addend_type), addend_type, numel - n, lanes);
}
