/* What the kernels share: vectors of 16 lanes, elements of the cache, rows of its pages. Vectors are GCC's and Clang's:
   whatever the machine has is used, and 16 lanes are split where it has fewer. The kernels are compiled for one model on
   the machine that runs them (see build.py), with
     HEAD      elements of a head, a multiple of 16
     KV_HEADS  KV heads
     GROUP     query heads that share a KV head
     BLOCK     tokens of a page
     BFLOAT16  1: queries, pages and output are bfloat16; 0: float32. Sums are float32 in both. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { LANES = 16, PARTS = HEAD / LANES, ROW = KV_HEADS * HEAD };

typedef float floats __attribute__((vector_size(LANES * 4)));
typedef int32_t ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t words __attribute__((vector_size(LANES * 4)));
typedef uint16_t halves __attribute__((vector_size(LANES * 2)));

#if BFLOAT16
typedef uint16_t element;

static inline floats load(const element *at) {
  halves raw;
  memcpy(&raw, at, sizeof raw);
  return (floats)(__builtin_convertvector(raw, words) << 16);
}

/* To the nearest, ties to even; what is not a number stays one. */
static inline void store(element *at, floats value) {
  words bits = (words)value;
  words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  words quiet = (bits >> 16) | 0x40;
  words nan = (words)(value != value);
  halves raw = __builtin_convertvector((rounded & ~nan) | (quiet & nan), halves);
  memcpy(at, &raw, sizeof raw);
}
#else
typedef float element;

static inline floats load(const element *at) {
  floats value;
  memcpy(&value, at, sizeof value);
  return value;
}

static inline void store(element *at, floats value) { memcpy(at, &value, sizeof value); }
#endif

/* e^x for x at most 0, to 2 units in the last place; below -87 it is 0. Cody and Waite's reduction, Taylor's series. */
static inline floats exponential(floats x) {
  floats n = (x * 1.44269504f + 12582912.0f) - 12582912.0f; /* adding 1.5 * 2^23 rounds to a whole number */
  floats f = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  floats p = f * (1.0f / 720) + 1.0f / 120;
  p = p * f + 1.0f / 24;
  p = p * f + 1.0f / 6;
  p = p * f + 0.5f;
  p = p * f + 1.0f;
  p = p * f + 1.0f;
  ints power = (__builtin_convertvector(n, ints) + 127) << 23;
  ints kept = x >= -87.0f; /* NaN is not, and must come out as NaN */
  ints nan = x != x;
  return (floats)(((ints)(p * (floats)power) & kept) | ((ints)x & nan));
}

/* Loops over a head's parts and a group's heads are written out, so that what they sum up in stays in registers. */
#define UNROLL _Pragma("GCC unroll 16")

/* Of two vectors: the lanes of each run of 2n that come first, a's and b's by turns, and those that come second. A tree of
   the sums of the two adds up vectors, a ladder of exchanges transposes them. */
#define LOW1(a, b) __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30)
#define HIGH1(a, b) __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31)
#define LOW2(a, b) __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define HIGH2(a, b) __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define LOW4(a, b) __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27)
#define HIGH4(a, b) __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31)
#define LOW8(a, b) __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
#define HIGH8(a, b) __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)

/* Lane by lane; NaN where either is. */
static inline floats larger(floats a, floats b) {
  ints chosen = (a > b) | (a != a);
  return (floats)(((ints)a & chosen) | ((ints)b & ~chosen));
}

/* Over all lanes, by halves; NaN where any is. */
static inline float largest(floats v) {
  v = larger(LOW8(v, v), HIGH8(v, v));
  v = larger(LOW4(v, v), HIGH4(v, v));
  v = larger(LOW2(v, v), HIGH2(v, v));
  return larger(LOW1(v, v), HIGH1(v, v))[0];
}

static inline float total(floats v) {
  v = LOW8(v, v) + HIGH8(v, v);
  v = LOW4(v, v) + HIGH4(v, v);
  v = LOW2(v, v) + HIGH2(v, v);
  return v[0] + v[1];
}

/* The sum of each of 16 vectors, in their order. */
static inline floats sums(const floats *v) {
  floats two[8], four[4], eight[2];
  UNROLL
  for (int i = 0; i < 8; i++) two[i] = LOW1(v[2 * i], v[2 * i + 1]) + HIGH1(v[2 * i], v[2 * i + 1]);
  UNROLL
  for (int i = 0; i < 4; i++) four[i] = LOW2(two[2 * i], two[2 * i + 1]) + HIGH2(two[2 * i], two[2 * i + 1]);
  UNROLL
  for (int i = 0; i < 2; i++) eight[i] = LOW4(four[2 * i], four[2 * i + 1]) + HIGH4(four[2 * i], four[2 * i + 1]);
  return LOW8(eight[0], eight[1]) + HIGH8(eight[0], eight[1]);
}

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* A token's row of one head, in the pages that a block table names. */
static inline const element *row_of(const element *pages, const int64_t *table, int64_t token) {
  return pages + (table[token / BLOCK] * BLOCK + token % BLOCK) * ROW;
}
