/* What this processor can run. */
#include "internal.h"

#include <pthread.h>
#include <stdbool.h>

#if defined(__x86_64__)
#include <cpuid.h>

/* Registers that the operating system saves and restores: XCR0, Intel SDM volume 1, 13.3. */
static uint64_t saved_registers(void)
{
	uint32_t low, high;

	__asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
	return (uint64_t) high << 32 | low;
}

static bool has_isa(int isa)
{
	const uint64_t ymm = 0x6, zmm = 0xe6;
	uint32_t a, b, c, d, leaf7;

	if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !(c & bit_FMA) || !(c & bit_F16C))
		return false;
	if (!__get_cpuid_count(7, 0, &a, &leaf7, &c, &d))
		return false;
	if (isa == INF_ISA_AVX2)
		return (saved_registers() & ymm) == ymm && (leaf7 & bit_AVX2);
	return (saved_registers() & zmm) == zmm && (leaf7 & bit_AVX2) && (leaf7 & bit_AVX512F) && (leaf7 & bit_AVX512BW) &&
		(leaf7 & bit_AVX512VL) && (leaf7 & bit_AVX512DQ);
}
#else
static bool has_isa(int isa)
{
	(void) isa;
	return false;
}
#endif

static bool available[INF_ISA_AVX512 + 1];
static pthread_once_t available_once = PTHREAD_ONCE_INIT;

static void ask_processor(void)         /* once: cpuid leaves a virtual machine, microseconds each time */
{
	available[INF_ISA_PLAIN] = true;
	available[INF_ISA_AVX2] = has_isa(INF_ISA_AVX2);
	available[INF_ISA_AVX512] = has_isa(INF_ISA_AVX512);
}

int inf_isa_available(int isa)
{
	pthread_once(&available_once, ask_processor);
	return isa >= 0 && isa <= INF_ISA_AVX512 && available[isa];
}

int inf_isa_best(void)
{
	int isa = INF_ISA_AVX512;

	while (!inf_isa_available(isa))
		isa--;
	return isa;
}

const struct inf_kernels *inf_kernels_for(int isa)
{
	if (isa < 0)
		isa = inf_isa_best();
	if (!inf_isa_available(isa))
		return NULL;
#if defined(__x86_64__)
	if (isa == INF_ISA_AVX512)
		return &inf_avx512;
	if (isa == INF_ISA_AVX2)
		return &inf_avx2;
#endif
	return &inf_plain;
}
