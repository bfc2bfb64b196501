/* Decode attention over a paged KV cache, read in place: one token of each sequence, all its pages, no copy.

   Softmax is computed online, CHUNK tokens at a time (Milakov and Gimelshein, https://arxiv.org/abs/1805.02867), so that
   neither memory nor accuracy depends on the context's length. A row's result depends on nothing but its own sequence. */

#include "vectors.h"

enum { CHUNK = 128, AHEAD = 24 };

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
      floats top = (floats){0} - INFINITY;
      for (int tile = 0; tile < tiles; tile++)
        top = larger(weight[g][tile], top);
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
