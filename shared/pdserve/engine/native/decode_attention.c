/* Decode attention over a paged KV cache, read in place: one token of each sequence, all its pages, no copy.

   Compiled for one model on the machine that runs it (see build.py), with
     HEAD      elements of a head, a multiple of 16
     KV_HEADS  KV heads
     GROUP     query heads that share a KV head
     BLOCK     tokens of a page
     BFLOAT16  1: queries, pages and output are bfloat16; 0: float32. Arithmetic is float32 in both.

   Softmax is computed online, CHUNK tokens at a time (Milakov and Gimelshein, https://arxiv.org/abs/1805.02867), so that
   neither memory nor accuracy depends on the context's length. A row's result depends on nothing but its own sequence.
   Vectors are GCC's and Clang's: whatever the machine has is used, and 16 lanes are split where it has fewer. */

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { LANES = 16, PARTS = HEAD / LANES, CHUNK = 128, AHEAD = 24, ROW = KV_HEADS * HEAD };

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

#define PAIR(a, b, ...) (__builtin_shufflevector(a, b, __VA_ARGS__))

/* The sum of each of 16 vectors, in their order: a tree of pairwise sums, three operations for each pair. */
static inline floats sums(const floats *v) {
  floats two[8], four[4], eight[2];
  UNROLL
  for (int i = 0; i < 8; i++)
    two[i] = PAIR(v[2 * i], v[2 * i + 1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
             PAIR(v[2 * i], v[2 * i + 1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
  UNROLL
  for (int i = 0; i < 4; i++)
    four[i] = PAIR(two[2 * i], two[2 * i + 1], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
              PAIR(two[2 * i], two[2 * i + 1], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  UNROLL
  for (int i = 0; i < 2; i++)
    eight[i] = PAIR(four[2 * i], four[2 * i + 1], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
               PAIR(four[2 * i], four[2 * i + 1], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  return PAIR(eight[0], eight[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
         PAIR(eight[0], eight[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}

static inline float largest(floats v) {
  float found = v[0];
  for (int i = 1; i < LANES; i++) found = v[i] > found || v[i] != v[i] ? v[i] : found;
  return found;
}

static inline float total(floats v) {
  float sum = 0;
  UNROLL
  for (int i = 0; i < LANES; i++) sum += v[i];
  return sum;
}

static inline const element *row_of(const element *pages, const int64_t *table, int64_t token) {
  return pages + (table[token / BLOCK] * BLOCK + token % BLOCK) * ROW;
}

/* One head's rows lie ROW apart, too far for a core to foresee: asked for ahead of time. */
static inline void fetch(const element *row) {
  UNROLL
  for (int at = 0; at < HEAD; at += 64 / (int)sizeof(element)) __builtin_prefetch(row + at);
}

/* One sequence and one KV head: `queries` and `out` are its GROUP heads. */
static void attend(const element *queries, const element *keys, const element *values, const int64_t *table,
                   int64_t first, int64_t last, float scale, element *out) {
  floats q[GROUP][PARTS], acc[GROUP][PARTS] = {0};
  float peak[GROUP], mass[GROUP];
  UNROLL
  for (int g = 0; g < GROUP; g++) {
    peak[g] = -INFINITY, mass[g] = 0;
    UNROLL
    for (int p = 0; p < PARTS; p++) q[g][p] = load(queries + g * HEAD + p * LANES) * scale;
  }
  for (int64_t begin = first; begin < last; begin += CHUNK) {
    int count = last - begin < CHUNK ? (int)(last - begin) : CHUNK;
    floats weight[GROUP][CHUNK / LANES];
    for (int tile = 0; tile * LANES < count; tile++) {
      int width = count - tile * LANES < LANES ? count - tile * LANES : LANES;
      floats products[GROUP][LANES];
      for (int t = 0; t < LANES; t++) {
        if (t >= width) { /* never read: what stands behind a sequence's end is somebody else's */
          UNROLL
          for (int g = 0; g < GROUP; g++) products[g][t] = (floats){-INFINITY};
          continue;
        }
        const element *key = row_of(keys, table, begin + tile * LANES + t);
        if (begin + tile * LANES + t + AHEAD < last) fetch(row_of(keys, table, begin + tile * LANES + t + AHEAD));
        fetch(row_of(values, table, begin + tile * LANES + t));
        floats sum[GROUP] = {0};
        UNROLL
        for (int p = 0; p < PARTS; p++) {
          floats k = load(key + p * LANES);
          UNROLL
          for (int g = 0; g < GROUP; g++) sum[g] += q[g][p] * k;
        }
        UNROLL
        for (int g = 0; g < GROUP; g++) products[g][t] = sum[g];
      }
      UNROLL
      for (int g = 0; g < GROUP; g++) weight[g][tile] = sums(products[g]);
    }
    int tiles = (count + LANES - 1) / LANES;
    UNROLL
    for (int g = 0; g < GROUP; g++) {
      floats top = weight[g][0];
      for (int tile = 1; tile < tiles; tile++)
        top = (floats)(((ints)weight[g][tile] & (weight[g][tile] > top)) | ((ints)top & ~(weight[g][tile] > top)));
      float next = largest(top);
      next = next > peak[g] || next != next ? next : peak[g];
      float kept = peak[g] == next ? 1.0f : expf(peak[g] - next);
      floats added = {0};
      for (int tile = 0; tile < tiles; tile++) {
        weight[g][tile] = exponential(weight[g][tile] - next);
        added += weight[g][tile];
      }
      mass[g] = mass[g] * kept + total(added);
      peak[g] = next;
      UNROLL
      for (int p = 0; p < PARTS; p++) acc[g][p] *= kept;
    }
    for (int t = 0; t < count; t++) {
      const element *value = row_of(values, table, begin + t);
      UNROLL
      for (int p = 0; p < PARTS; p++) {
        floats v = load(value + p * LANES);
        UNROLL
        for (int g = 0; g < GROUP; g++) acc[g][p] += v * weight[g][t / LANES][t % LANES];
      }
    }
  }
  UNROLL
  for (int g = 0; g < GROUP; g++)
    UNROLL
    for (int p = 0; p < PARTS; p++) store(out + g * HEAD + p * LANES, acc[g][p] / mass[g]);
}

/* `queries`, `out`: [rows of the batch, KV_HEADS * GROUP, HEAD], of which the `count` ones named by `rows` are computed;
   rows of `queries` begin `stride` elements apart, those of `out` follow one another.
   `pages`: one layer's, [2, slots, KV_HEADS, HEAD], V `value_offset` elements behind K. `tables`: all block tables, one
   after another; sequence i's begins at `starts[i]`, and its tokens `first[i]` to `last[i]` (at least one) are seen. */
void decode_attention(const element *queries, int64_t stride, const element *pages, int64_t value_offset,
                      const int64_t *rows, const int64_t *tables, const int64_t *starts, const int64_t *first,
                      const int64_t *last, int64_t count, float scale, element *out) {
#pragma omp parallel for schedule(dynamic, 1) if (count * KV_HEADS > 1)
  for (int64_t job = 0; job < count * KV_HEADS; job++) {
    int64_t i = job / KV_HEADS, head = job % KV_HEADS;
    const element *query = queries + rows[i] * stride + head * GROUP * HEAD, *keys = pages + head * HEAD;
    element *result = out + (rows[i] * KV_HEADS + head) * GROUP * HEAD;
    attend(query, keys, keys + value_offset, tables + starts[i], first[i], last[i], scale, result);
  }
}
