/* CRC-32C (Castagnoli), reflected polynomial 0x82f63b78, as in RFC 3720 appendix B.4. */
#include "internal.h"

#include <pthread.h>
#include <string.h>

static uint32_t table[256];
static pthread_once_t table_once = PTHREAD_ONCE_INIT;

static void fill_table(void)
{
	for (uint32_t i = 0; i < 256; i++) {
		uint32_t crc = i;

		for (int bit = 0; bit < 8; bit++)
			crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
		table[i] = crc;
	}
}

uint32_t inf_crc32c_table(uint32_t crc, const void *data, size_t nbytes)
{
	const uint8_t *p = data;

	pthread_once(&table_once, fill_table);
	crc = ~crc;
	while (nbytes--)
		crc = crc >> 8 ^ table[(crc ^ *p++) & 0xff];
	return ~crc;
}

#if defined(__x86_64__)
#include <cpuid.h>
#include <nmmintrin.h>

#define LONG ((size_t) 4096)            /* bytes of each of three streams that run side by side: the instruction takes 3 cycles */

/*
 * shift[k][b]: what byte b at position k of a crc becomes after LONG zero bytes. A crc is linear over xor, so the crcs
 * of three neighbours join as shift(shift(a) ^ b) ^ c.
 */
static uint32_t shift[4][256];
static int has_sse42;
static pthread_once_t shift_once = PTHREAD_ONCE_INIT;

static uint32_t after_zeros(uint32_t crc, size_t nbytes)
{
	while (nbytes--)
		crc = crc >> 8 ^ table[crc & 0xff];
	return crc;
}

static void fill_shift(void)
{
	uint32_t a, b, c = 0, d;

	has_sse42 = __get_cpuid(1, &a, &b, &c, &d) && c & bit_SSE4_2;
	pthread_once(&table_once, fill_table);
	for (int k = 0; k < 4; k++) {
		uint32_t bits[8];

		for (int bit = 0; bit < 8; bit++)
			bits[bit] = after_zeros(1u << (8 * k + bit), LONG);
		for (uint32_t b = 0; b < 256; b++)
			for (int bit = 0; bit < 8; bit++)
				shift[k][b] ^= b >> bit & 1 ? bits[bit] : 0;
	}
}

static uint32_t shifted(uint32_t crc)
{
	return shift[0][crc & 0xff] ^ shift[1][crc >> 8 & 0xff] ^ shift[2][crc >> 16 & 0xff] ^ shift[3][crc >> 24];
}

static uint64_t load64(const uint8_t *p)
{
	uint64_t value;

	memcpy(&value, p, sizeof(value));
	return value;
}

__attribute__((target("sse4.2")))
static uint32_t crc32c_sse42(uint32_t crc, const uint8_t *p, size_t nbytes)
{
	uint64_t a = ~crc;

	for (; nbytes >= 3 * LONG; nbytes -= 3 * LONG, p += 3 * LONG) {
		uint64_t b = 0, c = 0;

		for (size_t i = 0; i < LONG; i += 8) {
			a = _mm_crc32_u64(a, load64(p + i));
			b = _mm_crc32_u64(b, load64(p + LONG + i));
			c = _mm_crc32_u64(c, load64(p + 2 * LONG + i));
		}
		a = shifted(shifted((uint32_t) a) ^ (uint32_t) b) ^ (uint32_t) c;
	}
	for (; nbytes >= 8; nbytes -= 8, p += 8)
		a = _mm_crc32_u64(a, load64(p));
	for (; nbytes; nbytes--)
		a = _mm_crc32_u8((uint32_t) a, *p++);
	return ~(uint32_t) a;
}

uint32_t inf_crc32c(uint32_t crc, const void *data, size_t nbytes)
{
	pthread_once(&shift_once, fill_shift);
	return has_sse42 ? crc32c_sse42(crc, data, nbytes) : inf_crc32c_table(crc, data, nbytes);
}
#else
uint32_t inf_crc32c(uint32_t crc, const void *data, size_t nbytes)
{
	return inf_crc32c_table(crc, data, nbytes);
}
#endif
