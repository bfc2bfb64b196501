/* Products with the model's matrices, and rows of them.

   `pack` puts a matrix [outputs, inputs] in the order in which a product with one row reads it, from its first byte to its
   last: blocks of LANES outputs, in each the first STEP inputs of all of them, then the next. A core foresees no other order as
   well. The last block has fewer outputs where there are no more, its last step fewer inputs.

   A sum goes over the inputs in one order, whatever the number of rows and threads and wherever a row stands: a row's
   result depends on nothing but itself. */

#include "vectors.h"

#if BFLOAT16 && defined __AVX512BF16__
#include <immintrin.h>

enum { STEP = 2 * LANES };
typedef __m512bh operand;

static inline operand operand_at(const element *at) { return (__m512bh)_mm512_loadu_si512(at); }
static inline floats multiply_add(floats sum, operand a, operand b) {
  return (floats)_mm512_dpbf16_ps((__m512)sum, a, b);
}
#else
enum { STEP = LANES };
typedef floats operand;

static inline operand operand_at(const element *at) { return load(at); }
static inline floats multiply_add(floats sum, operand a, operand b) { return sum + a * b; }
#endif

/* Rows of a tile; rows that come sooner by the first one's reading; rows that stay in a core's second cache; products
   that are not worth waking other threads for. */
enum { TALL = 4, FEW_ROWS = 8, CHUNK_ROWS = 64, FEW_PRODUCTS = 1 << 17 };

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* `count` elements that are no whole step, zeros behind them. */
static inline operand operand_of(const element *at, int64_t count) {
  element rest[STEP] = {0};
  memcpy(rest, at, (size_t)count * sizeof(element));
  return operand_at(rest);
}

/* What `tile_4_4` reads of a block takes as long to come as to multiply, so it asks for its share of the next one. */
#define NEXT(R, N)                                                                                                     \
  if (R == TALL) {                                                                                                     \
    const element *next = block + width * inputs + first * inputs + at * N;                                            \
    UNROLL                                                                                                             \
    for (int n = 0; n < N; n++) __builtin_prefetch(next + n * STEP);                                                   \
  }

/* tile_R_N: R rows of `x` times the outputs of a block that begin with its `first`; `width` is the block's, R * N is at
   most LANES. Outputs that the block does not have are computed as its last one, and left out. */
#define TILE(R, N)                                                                                                     \
  static inline __attribute__((always_inline)) void tile_##R##_##N(                                                    \
      const element *x, int64_t stride, const element *block, int64_t width, int64_t first, int64_t inputs,            \
      const element *bias, element *out, int64_t outputs) {                                                            \
    floats acc[LANES] = {0};                                                                                           \
    int64_t count = smaller(width - first, N), at = 0, place[N];                                                       \
    UNROLL                                                                                                             \
    for (int n = 0; n < N; n++) place[n] = width == LANES ? first + n : smaller(first + n, width - 1);                 \
    for (; at + STEP <= inputs; at += STEP) {                                                                          \
      operand w[N];                                                                                                    \
      UNROLL                                                                                                           \
      for (int n = 0; n < N; n++) w[n] = operand_at(block + at * width + place[n] * STEP);                             \
      NEXT(R, N)                                                                                                       \
      UNROLL                                                                                                           \
      for (int r = 0; r < R; r++) {                                                                                    \
        operand v = operand_at(x + r * stride + at);                                                                   \
        UNROLL                                                                                                         \
        for (int n = 0; n < N; n++) acc[r * N + n] = multiply_add(acc[r * N + n], v, w[n]);                            \
      }                                                                                                                \
    }                                                                                                                  \
    if (at < inputs) {                                                                                                 \
      int64_t left = inputs - at;                                                                                      \
      UNROLL                                                                                                           \
      for (int r = 0; r < R; r++) {                                                                                    \
        operand v = operand_of(x + r * stride + at, left);                                                             \
        UNROLL                                                                                                         \
        for (int n = 0; n < N; n++)                                                                                    \
          acc[r * N + n] = multiply_add(acc[r * N + n], v, operand_of(block + at * width + place[n] * left, left));    \
      }                                                                                                                \
    }                                                                                                                  \
    floats result = sums(acc);                                                                                         \
    if (bias != NULL) {                                                                                                \
      element offsets[LANES] = {0};                                                                                    \
      UNROLL                                                                                                           \
      for (int i = 0; i < R * N; i++) offsets[i] = bias[place[i % N]];                                                 \
      result += load(offsets);                                                                                         \
    }                                                                                                                  \
    element rounded[LANES];                                                                                            \
    store(rounded, result);                                                                                            \
    UNROLL                                                                                                             \
    for (int r = 0; r < R; r++) memcpy(out + r * outputs + first, rounded + r * N, (size_t)count * sizeof(element));   \
  }

TILE(1, 16)
TILE(2, 8)
TILE(3, 4)
TILE(4, 4)

/* All `rows` of x times one block. Of a few rows the first one's tile reads it from its first byte to its last, as it does
   where there is no other: then it is in a near cache. */
static inline __attribute__((always_inline)) void multiply(const element *x, int64_t stride, const element *block,
                                                           int64_t width, int64_t inputs, const element *bias,
                                                           int64_t rows, element *out, int64_t outputs) {
  int64_t row = 0;
  if (rows < FEW_ROWS) {
    tile_1_16(x, stride, block, width, 0, inputs, bias, out, outputs);
    row = 1;
  }
  for (; row + TALL <= rows; row += TALL)
    for (int64_t first = 0; first < width; first += 4)
      tile_4_4(x + row * stride, stride, block, width, first, inputs, bias, out + row * outputs, outputs);
  const element *from = x + row * stride;
  element *to = out + row * outputs;
  if (rows - row == 1) tile_1_16(from, stride, block, width, 0, inputs, bias, to, outputs);
  if (rows - row == 2)
    for (int64_t first = 0; first < width; first += 8)
      tile_2_8(from, stride, block, width, first, inputs, bias, to, outputs);
  if (rows - row == 3)
    for (int64_t first = 0; first < width; first += 4)
      tile_3_4(from, stride, block, width, first, inputs, bias, to, outputs);
}

/* `out` [rows, outputs] = `x` [rows, inputs] times the transpose of `weight` [outputs, inputs] in `pack`'s order, plus `bias`
   [outputs] unless NULL. Rows of `x` begin `stride` elements apart, those of `out` follow one another. */
void linear(const element *x, int64_t stride, const element *weight, const element *bias, int64_t rows, int64_t inputs,
            int64_t outputs, element *out) {
#pragma omp parallel if (rows * inputs * outputs > FEW_PRODUCTS)
  for (int64_t row = 0; row < rows; row += CHUNK_ROWS) {
    int64_t count = smaller(rows - row, CHUNK_ROWS);
#pragma omp for schedule(static) nowait
    for (int64_t first = 0; first < outputs; first += LANES) {
      int64_t width = smaller(outputs - first, LANES);
      const element *block = weight + first * inputs, *offsets = bias == NULL ? NULL : bias + first;
      element *to = out + row * outputs + first;
      if (width == LANES) multiply(x + row * stride, stride, block, LANES, inputs, offsets, count, to, outputs);
      else multiply(x + row * stride, stride, block, width, inputs, offsets, count, to, outputs);
    }
  }
}

/* `packed`: the elements of `weight` [outputs, inputs] in the order that is told above. */
void pack(const element *weight, int64_t outputs, int64_t inputs, element *packed) {
#pragma omp parallel for
  for (int64_t first = 0; first < outputs; first += LANES) {
    element *to = packed + first * inputs;
    for (int64_t at = 0; at < inputs; at += STEP)
      for (int64_t row = first; row < smaller(first + LANES, outputs); row++) {
        int64_t count = smaller(inputs - at, STEP);
        memcpy(to, weight + row * inputs + at, (size_t)count * sizeof(element));
        to += count;
      }
  }
}

/* `out` [count, inputs]: the rows `ids` of `weight` [outputs, inputs] in `pack`'s order. 1 for an id that
   is none, and then `out` is not whole. */
int take_rows(const element *weight, int64_t outputs, int64_t inputs, const int64_t *ids, int64_t count, element *out) {
  for (int64_t i = 0; i < count; i++) {
    if (ids[i] < 0 || ids[i] >= outputs) return 1;
    int64_t first = ids[i] / LANES * LANES, width = smaller(outputs - first, LANES);
    for (int64_t at = 0; at < inputs; at += STEP) {
      int64_t step = smaller(inputs - at, STEP);
      const element *from = weight + first * inputs + at * width + (ids[i] - first) * step;
      memcpy(out + i * inputs + at, from, (size_t)step * sizeof(element));
    }
  }
  return 0;
}
