/* Causal attention of a chunk of one sequence over its context in a paged KV cache, read in place.

   Queries are taken TILE tokens of a group's heads at a time, keys COLUMNS at a time: scores, an online softmax (see
   FlashAttention-2, https://arxiv.org/abs/2307.08691), and the weighted sum of values. What lies wholly in the future, or
   before the window, is not computed. Both products run in one micro-kernel of 6 rows and up to 64 columns, whose sums stay
   in registers. With AVX512-BF16 it multiplies pairs of bfloat16, as oneDNN does: weights of the softmax, at most 1, are
   rounded to bfloat16 before they meet the values. All sums are float32. */

#include <stdlib.h>

#include "pairs.h"

enum {
  COLUMNS = 64,                       /* keys of a tile */
  WIDE = COLUMNS / LANES,             /* in vectors */
  ROWS = 6,                           /* of the micro-kernel */
  TILE = GROUP < 192 ? 192 / GROUP : 1, /* tokens of a tile of queries */
  QUERIES = (TILE * GROUP + ROWS - 1) / ROWS * ROWS,
  NARROW = PARTS % 4 == 0 ? 4 : PARTS % 2 == 0 ? 2 : 1,
};

/* Scratch of one tile: queries [QUERIES][HEAD] and weights [QUERIES][COLUMNS] as the micro-kernel's left side, keys
   [HEAD / DEEP][COLUMNS] and values [COLUMNS / DEEP][HEAD] as its right one, scores and sums. */
#if PAIRS
typedef uint16_t left;
typedef words right;
#else
typedef float left;
typedef floats right;
#endif

typedef struct {
  floats scores[QUERIES][WIDE], sums[QUERIES][PARTS];
  right keys[HEAD / DEEP][WIDE], values[COLUMNS / DEEP][PARTS];
  left queries[QUERIES][HEAD], weights[QUERIES][COLUMNS];
  float peak[QUERIES], mass[QUERIES];
} scratch;

/* to[row][j] (+)= the sum over `steps` of a[row][step] * b[step][j]: ROWS rows, n vectors of each. */
static inline __attribute__((always_inline)) void multiply(floats *to, int to_stride, const left *a, int a_stride,
                                                           const right *b, int b_stride, int steps, int n, int add) {
  floats sum[ROWS][4];
  UNROLL
  for (int r = 0; r < ROWS; r++)
    UNROLL
    for (int j = 0; j < n; j++) sum[r][j] = add ? to[r * to_stride + j] : (floats){0};
  for (int step = 0; step < steps; step++) {
    UNROLL
    for (int r = 0; r < ROWS; r++) {
#if PAIRS
      operand factor = spread(a + r * a_stride + DEEP * step, DEEP);
      UNROLL
      for (int j = 0; j < n; j++) sum[r][j] = multiply_add(sum[r][j], factor, (operand)b[step * b_stride + j]);
#else
      float factor = a[r * a_stride + step];
      UNROLL
      for (int j = 0; j < n; j++) sum[r][j] += b[step * b_stride + j] * factor;
#endif
    }
  }
  UNROLL
  for (int r = 0; r < ROWS; r++)
    UNROLL
    for (int j = 0; j < n; j++) to[r * to_stride + j] = sum[r][j];
}

/* 16 rows of 16 lanes, transposed in place. */
static inline void transpose(right *v) {
#define EXCHANGE(n)                                             \
  UNROLL                                                        \
  for (int i = 0; i < LANES; i++)                               \
    if (!(i & n)) {                                             \
      right low = LOW##n(v[i], v[i + n]), high = HIGH##n(v[i], v[i + n]); \
      v[i] = low, v[i + n] = high;                              \
    }
  EXCHANGE(8)
  EXCHANGE(4)
  EXCHANGE(2)
  EXCHANGE(1)
#undef EXCHANGE
}

/* 16 lanes of a row, from its element `at` on; DEEP elements each. */
static inline right lanes(const element *row, int at) {
#if PAIRS
  right raw;
  memcpy(&raw, row + at, sizeof raw);
  return raw;
#else
  return load(row + at);
#endif
}

/* Keys begin to end, at most COLUMNS, transposed. What stands behind the end is somebody else's: zeros instead. */
static void take_keys(scratch *s, const element *keys, const int64_t *table, int64_t begin, int64_t end) {
  for (int column = 0; column < WIDE; column++) {
    int64_t first = begin + column * LANES;
    if (HEAD / DEEP % LANES == 0) {
      for (int part = 0; part < HEAD / DEEP / LANES; part++) {
        right block[LANES];
        for (int t = 0; t < LANES; t++)
          block[t] = first + t < end ? lanes(row_of(keys, table, first + t), part * LANES * DEEP) : (right){0};
        transpose(block);
        for (int i = 0; i < LANES; i++) s->keys[part * LANES + i][column] = block[i];
      }
      continue;
    }
    for (int t = 0; t < LANES; t++) { /* heads of 16 or 48 elements in pairs: too few for a square */
      const element *row = first + t < end ? row_of(keys, table, first + t) : NULL;
      for (int i = 0; i < HEAD / DEEP; i++) {
        uint32_t lane = 0;
        if (row) memcpy(&lane, row + i * DEEP, sizeof lane);
        s->keys[i][column][t] = lane;
      }
    }
  }
}

/* Values begin to end, in pairs of tokens where the micro-kernel wants such. */
static void take_values(scratch *s, const element *values, const int64_t *table, int64_t begin, int64_t end) {
  for (int t = 0; t < COLUMNS; t += DEEP) {
    const element *row = begin + t < end ? row_of(values, table, begin + t) : NULL;
#if PAIRS
    const element *next = begin + t + 1 < end ? row_of(values, table, begin + t + 1) : NULL;
    for (int p = 0; p < PARTS; p++) {
      halves a = {0}, b = {0};
      if (row) memcpy(&a, row + p * LANES, sizeof a);
      if (next) memcpy(&b, next + p * LANES, sizeof b);
      s->values[t / 2][p] = __builtin_convertvector(a, words) | (__builtin_convertvector(b, words) << 16);
    }
#else
    for (int p = 0; p < PARTS; p++) s->values[t][p] = row ? load(row + p * LANES) : (floats){0};
#endif
  }
}

/* One row's softmax over a tile of keys, of which columns low to high are seen: scores to weights, peak and mass kept. */
static inline void weigh(scratch *s, int row, int low, int high, float scale) {
  floats top = {0}, added = {0};
  ints index = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  floats least = (floats){0} - INFINITY;
  UNROLL
  for (int j = 0; j < WIDE; j++) {
    floats score = s->scores[row][j] * scale;
    if (low > 0 || high < COLUMNS) {
      ints seen = (index + j * LANES >= low) & (index + j * LANES < high);
      score = (floats)(((ints)score & seen) | ((ints)least & ~seen));
    }
    s->scores[row][j] = score;
    top = j ? larger(score, top) : score;
  }
  float peak = largest(top);
  peak = peak > s->peak[row] || peak != peak ? peak : s->peak[row];
  float base = peak == -INFINITY ? 0.0f : peak; /* nothing was seen yet: weights are 0, not NaN */
  float kept = s->peak[row] == peak ? 1.0f : expf(s->peak[row] - base);
  UNROLL
  for (int j = 0; j < WIDE; j++) {
    floats weight = exponential(s->scores[row][j] - base);
    added += weight;
#if PAIRS
    store(s->weights[row] + j * LANES, weight);
#else
    memcpy(s->weights[row] + j * LANES, &weight, sizeof weight);
#endif
  }
  s->mass[row] = s->mass[row] * kept + total(added);
  s->peak[row] = peak;
  if (kept != 1.0f)
    for (int p = 0; p < PARTS; p++) s->sums[row][p] *= kept;
}

/* Tokens `begin` to `end` of the chunk (positions in the sequence), for the heads of one KV head. Rows of the tile are a
   token's heads, token after token. */
static void attend(scratch *s, const element *queries, int64_t stride, int64_t chunk, const element *keys,
                   const element *values, const int64_t *table, int64_t begin, int64_t end, int64_t window, float scale,
                   element *out) {
  int rows = (int)(end - begin) * GROUP, padded = (rows + ROWS - 1) / ROWS * ROWS;
  for (int row = 0; row < padded; row++) {
    s->peak[row] = -INFINITY, s->mass[row] = 0;
    for (int p = 0; p < PARTS; p++) s->sums[row][p] = (floats){0};
    const element *query = queries + (begin - chunk + row / GROUP) * stride + row % GROUP * HEAD;
    for (int p = 0; p < PARTS; p++) {
#if PAIRS
      halves raw = {0};
      if (row < rows) memcpy(&raw, query + p * LANES, sizeof raw);
#else
      floats raw = row < rows ? load(query + p * LANES) : (floats){0};
#endif
      memcpy(s->queries[row] + p * LANES, &raw, sizeof raw);
    }
  }
  int64_t first = begin - window + 1 > 0 ? (begin - window + 1) / COLUMNS * COLUMNS : 0;
  for (int64_t column = first; column < end; column += COLUMNS) {
    take_keys(s, keys, table, column, end);
    take_values(s, values, table, column, end);
    for (int row = 0; row < padded; row += ROWS)
      multiply(s->scores[row], WIDE, s->queries[row], HEAD, s->keys[0], WIDE, HEAD / DEEP, WIDE, 0);
    for (int row = 0; row < rows; row++) {
      int64_t position = begin + row / GROUP;
      int64_t low = position - window + 1 - column, high = position + 1 - column;
      weigh(s, row, low > 0 ? (int)low : 0, high < COLUMNS ? (int)high : COLUMNS, scale);
    }
    for (int row = 0; row < padded; row += ROWS)
      for (int p = 0; p < PARTS; p += NARROW)
        multiply(s->sums[row] + p, PARTS, s->weights[row], COLUMNS, s->values[0] + p, PARTS, COLUMNS / DEEP, NARROW, 1);
  }
  for (int row = 0; row < rows; row++) {
    element *result = out + (begin - chunk + row / GROUP) * (KV_HEADS * GROUP * HEAD) + row % GROUP * HEAD;
    for (int p = 0; p < PARTS; p++) store(result + p * LANES, s->sums[row][p] / s->mass[row]);
  }
}

/* `queries`, `out`: the chunk's rows, [query_len, KV_HEADS * GROUP, HEAD]; rows of `queries` begin `stride` elements apart,
   those of `out` follow one another. `pages`: one layer's, [2, slots, KV_HEADS, HEAD], V `value_offset` elements behind K;
   the chunk's own keys and values are in them. `table`: the sequence's blocks. The chunk ends at token `context_len`; a
   token sees `window` tokens, itself included. Returns 0, or 1 where there is no memory for the scratch. */
int prefill_attention(const element *queries, int64_t stride, const element *pages, int64_t value_offset,
                      const int64_t *table, int64_t query_len, int64_t context_len, int64_t window, float scale,
                      element *out) {
  int64_t tiles = (query_len + TILE - 1) / TILE, chunk = context_len - query_len;
  int failed = 0;
#pragma omp parallel for schedule(dynamic, 1) if (tiles * KV_HEADS > 1)
  for (int64_t job = 0; job < tiles * KV_HEADS; job++) {
    scratch *s = aligned_alloc(64, (sizeof(scratch) + 63) / 64 * 64);
    if (s == NULL) {
#pragma omp atomic write
      failed = 1;
      continue;
    }
    int64_t head = job % KV_HEADS, begin = chunk + (tiles - 1 - job / KV_HEADS) * TILE; /* the longest ones first */
    int64_t end = begin + TILE < context_len ? begin + TILE : context_len;
    const element *keys = pages + head * HEAD;
    attend(s, queries + head * GROUP * HEAD, stride, chunk, keys, keys + value_offset, table, begin, end, window, scale,
           out + head * GROUP * HEAD);
    free(s);
  }
  return failed;
}
