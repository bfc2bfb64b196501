/* Products with the model's matrices, and rows of them.

   `pack` puts a matrix [outputs, inputs] in the order in which products read it: blocks of WIDE outputs, in each the first
   DEEP inputs of all of them, then the next. So a vector holds LANES outputs, and one input of a row is multiplied with all
   of them at once. Zeros fill what a last block or a last step lacks.

   A sum goes over the inputs in their order, whatever the number of rows and threads and wherever a row stands: a row's
   result depends on nothing but itself. */

#include "pairs.h"

/* Vectors of a block, rows of a tile: their products are sums in 24 registers, which leaves 8 for what is multiplied. Rows
   that stay in a core's second cache; products that are not worth waking other threads for. */
enum { VECTORS = 3, TALL = 8, WIDE = VECTORS * LANES, CHUNK_ROWS = 64, FEW_PRODUCTS = 1 << 17 };

/* Where the block that begins with output `first` lies. */
static inline int64_t block_at(int64_t first, int64_t inputs) { return first * ((inputs + DEEP - 1) / DEEP * DEEP); }

/* Add to the sums what `count` inputs give, which are a step. */
static inline __attribute__((always_inline)) void add_step(floats acc[TALL][VECTORS], int rows, const element *x,
                                                           int64_t stride, const element *block, int64_t count) {
  operand w[VECTORS];
  UNROLL
  for (int v = 0; v < VECTORS; v++) w[v] = operand_at(block + v * LANES * DEEP);
  UNROLL
  for (int r = 0; r < rows; r++) {
    operand value = spread(x + r * stride, count);
    UNROLL
    for (int v = 0; v < VECTORS; v++) acc[r][v] = multiply_add(acc[r][v], value, w[v]);
  }
}

/* `rows` rows of `x` times a block of which there are `width` outputs. `rows` is a constant wherever this is called, or the
   sums would not stay in registers. */
static inline __attribute__((always_inline)) void tile(int rows, const element *x, int64_t stride, const element *block,
                                                       int64_t width, int64_t inputs, const element *bias, element *out,
                                                       int64_t outputs) {
  floats acc[TALL][VECTORS] = {0};
  int64_t at = 0;
  for (; at + DEEP <= inputs; at += DEEP) add_step(acc, rows, x + at, stride, block + at * WIDE, DEEP);
  if (at < inputs) add_step(acc, rows, x + at, stride, block + at * WIDE, inputs - at);
  element offsets[WIDE] = {0}, rounded[WIDE];
  if (bias != NULL) memcpy(offsets, bias, (size_t)width * sizeof(element));
  UNROLL
  for (int r = 0; r < rows; r++) {
    UNROLL
    for (int v = 0; v < VECTORS; v++) store(rounded + v * LANES, acc[r][v] + load(offsets + v * LANES));
    memcpy(out + r * outputs, rounded, (size_t)width * sizeof(element));
  }
}

/* All `rows` of x times one block. */
static void multiply(const element *x, int64_t stride, const element *block, int64_t width, int64_t inputs,
                     const element *bias, int64_t rows, element *out, int64_t outputs) {
#define TILE(R)                                                                                                        \
  case R: tile(R, x, stride, block, width, inputs, bias, out, outputs); break;
  for (; rows > 0; rows -= TALL, x += TALL * stride, out += TALL * outputs) switch (smaller(rows, TALL)) {
      TILE(1)
      TILE(2)
      TILE(3)
      TILE(4)
      TILE(5)
      TILE(6)
      TILE(7)
      TILE(8)
    }
}

/* `out` [rows, outputs] = `x` [rows, inputs] times the transpose of `weight` [outputs, inputs] in `pack`'s order, plus `bias`
   [outputs] unless NULL. Rows of `x` begin `stride` elements apart, those of `out` follow one another. */
void linear(const element *x, int64_t stride, const element *weight, const element *bias, int64_t rows, int64_t inputs,
            int64_t outputs, element *out) {
#pragma omp parallel if (rows * inputs * outputs > FEW_PRODUCTS)
  for (int64_t row = 0; row < rows; row += CHUNK_ROWS) {
    int64_t count = smaller(rows - row, CHUNK_ROWS);
#pragma omp for schedule(static) nowait
    for (int64_t first = 0; first < outputs; first += WIDE) {
      const element *offsets = bias == NULL ? NULL : bias + first;
      multiply(x + row * stride, stride, weight + block_at(first, inputs), smaller(outputs - first, WIDE), inputs,
               offsets, count, out + row * outputs + first, outputs);
    }
  }
}

/* Elements of a packed matrix. */
int64_t packed_size(int64_t outputs, int64_t inputs) {
  return block_at((outputs + WIDE - 1) / WIDE * WIDE, inputs);
}

/* Where an element of a packed matrix lies. */
static inline int64_t place_of(int64_t output, int64_t input, int64_t inputs) {
  int64_t first = output / WIDE * WIDE, at = input / DEEP * DEEP;
  return block_at(first, inputs) + at * WIDE + (output - first) * DEEP + (input - at);
}

/* `packed`, which holds zeros: the elements of `weight` [outputs, inputs] in the order that is told above. */
void pack(const element *weight, int64_t outputs, int64_t inputs, element *packed) {
#pragma omp parallel for
  for (int64_t output = 0; output < outputs; output++)
    for (int64_t input = 0; input < inputs; input++)
      packed[place_of(output, input, inputs)] = weight[output * inputs + input];
}

/* `out` [count, inputs]: the rows `ids` of `weight` [outputs, inputs] in `pack`'s order. 1 for an id that
   is none, and then `out` is not whole. */
int take_rows(const element *weight, int64_t outputs, int64_t inputs, const int64_t *ids, int64_t count, element *out) {
  for (int64_t i = 0; i < count; i++) {
    if (ids[i] < 0 || ids[i] >= outputs) return 1;
    const element *from = weight + place_of(ids[i], 0, inputs);
    for (int64_t at = 0; at < inputs; at++) out[i * inputs + at] = from[at / DEEP * DEEP * WIDE + at % DEEP];
  }
  return 0;
}
