/* What a product multiplies at once: vectors of DEEP elements a lane. With AVX512-BF16 they are pairs of bfloat16, whose
   two products go into one float32 sum; everywhere else single elements, taken as float32. */

#pragma once

#include "vectors.h"

#if BFLOAT16 && defined __AVX512BF16__
#define PAIRS 1
#include <immintrin.h>

enum { DEEP = 2 };
typedef __m512bh operand;

static inline operand operand_at(const element *at) { return (__m512bh)_mm512_loadu_si512(at); }
static inline floats multiply_add(floats sum, operand a, operand b) {
  return (floats)_mm512_dpbf16_ps((__m512)sum, a, b);
}

/* The first `count` of DEEP elements, in all lanes. */
static inline operand spread(const element *at, int64_t count) {
  uint32_t pair = at[0];
  if (count == DEEP) memcpy(&pair, at, sizeof pair);
  return (__m512bh)_mm512_set1_epi32((int)pair);
}
#else
#define PAIRS 0

enum { DEEP = 1 };
typedef floats operand;

static inline operand operand_at(const element *at) { return load(at); }
static inline floats multiply_add(floats sum, operand a, operand b) { return sum + a * b; }

static inline operand spread(const element *at, int64_t count) {
  (void)count;
#if BFLOAT16
  uint32_t bits = (uint32_t)*at << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
#else
  float value = *at;
#endif
  return value - (floats){0}; /* adding 0 would make 0 of -0 */
}
#endif
