/* What stands between a layer's matrix products, each in one pass over its rows where torch takes three to nine: norms,
   gates, rotations. Sums and products are float32 and are rounded once, at the end. */

#include "vectors.h"

enum { FEW = 8 }; /* rows that are not worth waking other threads for */

/* `hidden` [rows, width], of a multiple of 16 elements: `added`, unless NULL, is added to it in place. `out`: the root mean
   square norm of that (https://arxiv.org/abs/1910.07467), times `weight`. Rows follow one another. */
void add_norm(element *hidden, const element *added, const element *weight, float eps, int64_t rows, int64_t width,
              element *out) {
#pragma omp parallel for if (rows > FEW)
  for (int64_t row = 0; row < rows; row++) {
    element *x = hidden + row * width, *to = out + row * width;
    floats squares = {0};
    for (int64_t at = 0; at < width; at += LANES) {
      floats value = load(x + at);
      if (added != NULL) {
        store(x + at, value + load(added + row * width + at));
        value = load(x + at); /* as the residual will be read */
      }
      squares += value * value;
    }
    float factor = 1.0f / sqrtf(total(squares) / (float)width + eps);
    for (int64_t at = 0; at < width; at += LANES) store(to + at, load(x + at) * factor * load(weight + at));
  }
}

/* `gates` [rows, 2 * width]: out = silu(first half) * second half, [rows, width]; widths of a multiple of 16. */
void gate(const element *gates, int64_t rows, int64_t width, element *out) {
#pragma omp parallel for if (rows > FEW)
  for (int64_t row = 0; row < rows; row++) {
    const element *x = gates + row * 2 * width;
    for (int64_t at = 0; at < width; at += LANES) {
      floats value = load(x + at);
      ints negative = value < 0.0f;
      floats power = exponential((floats)((ints)value ^ (~negative & (int)0x80000000))); /* e^-|x| never overflows */
      floats up = (floats)(((ints)power & negative) | ((ints)((floats){0} + 1.0f) & ~negative));
      store(out + row * width + at, value * up / (1.0f + power) * load(x + width + at));
    }
  }
}

/* Rotates the first `heads` heads of each row of `x` in place; rows begin `stride` elements apart. `table`: float32 cosines
   and sines [positions, 2, HEAD] of engine.rope.rope_table, whose first half of the sines is negated. */
void rotate(element *x, int64_t stride, const int64_t *positions, const float *table, int64_t rows, int64_t heads) {
  enum { HALF = HEAD / 2 };
#pragma omp parallel for if (rows > FEW)
  for (int64_t row = 0; row < rows; row++) {
    const float *cosines = table + positions[row] * 2 * HEAD, *sines = cosines + HEAD;
    for (int64_t head = 0; head < heads; head++) {
      element *at = x + row * stride + head * HEAD, turned[HEAD];
      for (int i = 0; i < HEAD; i += LANES) {
        floats cosine, sine;
        memcpy(&cosine, cosines + i, sizeof cosine);
        memcpy(&sine, sines + i, sizeof sine);
        element other[LANES];
        for (int j = 0; j < LANES; j++) other[j] = at[(i + j + HALF) % HEAD];
        store(turned + i, load(at + i) * cosine + load(other) * sine);
      }
      memcpy(at, turned, sizeof turned);
    }
  }
}

/* Stores `keys` and `values` [rows, KV_HEADS, HEAD] at `slots` of one layer's `pages` [2, slots, KV_HEADS, HEAD], V
   `value_offset` elements behind K. Their rows begin `key_stride` and `value_stride` elements apart. */
void store_rows(element *pages, int64_t value_offset, const int64_t *slots, const element *keys, int64_t key_stride,
                const element *values, int64_t value_stride, int64_t rows) {
#pragma omp parallel for if (rows > FEW)
  for (int64_t row = 0; row < rows; row++) {
    element *to = pages + slots[row] * ROW;
    memcpy(to, keys + row * key_stride, ROW * sizeof(element));
    memcpy(to + value_offset, values + row * value_stride, ROW * sizeof(element));
  }
}
