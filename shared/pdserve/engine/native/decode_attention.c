/* Decode attention over a paged KV cache, read in place: one token of each sequence, all its pages, no copy.

   Softmax is computed online, CHUNK tokens at a time (Milakov and Gimelshein, https://arxiv.org/abs/1805.02867), so that
   neither memory nor accuracy depends on the context's length. A row's result depends on nothing but its own sequence.
   Where pairs of bfloat16 are multiplied, weights of the softmax, at most 1, are rounded to bfloat16 before they meet the
   values, as in prefill_attention.c; all sums are float32. */

#include "pairs.h"

#ifdef _OPENMP
extern int omp_get_max_threads(void); /* omp.h is not everywhere where the runtime is */
#else
static inline int omp_get_max_threads(void) { return 1; }
#endif

/* Operands of a head's row, of pairs the last one half empty where parts are odd; tokens of a chunk. */
enum { OPERANDS = (PARTS + DEEP - 1) / DEEP, SUMS = OPERANDS * DEEP, CHUNK = 64 };

/* Some of a sequence's tokens, and its blocks; `keys` are the first head's that is looked at. */
typedef struct {
  const int64_t *table;
  const element *keys;
  int64_t begin, end;
} chunk;

static inline chunk chunk_of(const int64_t *table, const element *keys, int64_t begin, int64_t last) {
  return (chunk){table, keys, begin, smaller(begin + CHUNK, last)};
}

/* A head's row will be read soon: into the second cache, where more are on their way at once than into the first. */
static inline void fetch(const element *row) {
  UNROLL
  for (int at = 0; at < HEAD; at += 64 / (int)sizeof(element)) __builtin_prefetch(row + at, 0, 2);
}

/* A softmax's weights as they are multiplied. */
#if PAIRS
typedef element softened;
static inline void keep(softened *at, floats weights) { store(at, weights); }
#else
typedef float softened;
static inline void keep(softened *at, floats weights) { memcpy(at, &weights, sizeof weights); }
#endif

static inline operand part_of(const element *row, int part) {
#if PAIRS
  if (part * DEEP + 1 == PARTS)
    return (__m512bh)_mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i *)(row + part * DEEP * LANES)));
#endif
  return operand_at(row + part * DEEP * LANES);
}

/* What the heads of one KV head have seen of a sequence. */
typedef struct {
  floats sums[GROUP][SUMS];
  float peak[GROUP], mass[GROUP];
} state;

static inline void begin(state *s) {
  *s = (state){0};
  for (int g = 0; g < GROUP; g++) s->peak[g] = -INFINITY;
}

/* The tokens' weights, [GROUP][CHUNK], times their values, added to the sums. */
static inline void add_values(floats acc[GROUP][SUMS], softened weights[GROUP][CHUNK], const element *values,
                              chunk tokens) {
  int count = (int)(tokens.end - tokens.begin);
#if PAIRS
  for (int t = 0; t < count; t += DEEP) {
    const element *first = row_of(values, tokens.table, tokens.begin + t);
    const element *second = t + 1 < count ? row_of(values, tokens.table, tokens.begin + t + 1) : NULL;
    operand weight[GROUP];
    UNROLL
    for (int g = 0; g < GROUP; g++) weight[g] = spread(weights[g] + t, DEEP);
    UNROLL
    for (int p = 0; p < OPERANDS; p++) {
      __m512i a = (__m512i)part_of(first, p), b = second ? (__m512i)part_of(second, p) : _mm512_setzero_si512();
      operand low = (__m512bh)_mm512_unpacklo_epi16(a, b), high = (__m512bh)_mm512_unpackhi_epi16(a, b);
      UNROLL
      for (int g = 0; g < GROUP; g++) {
        acc[g][2 * p] = multiply_add(acc[g][2 * p], weight[g], low);
        acc[g][2 * p + 1] = multiply_add(acc[g][2 * p + 1], weight[g], high);
      }
    }
  }
#else
  for (int t = 0; t < count; t++) {
    const element *value = row_of(values, tokens.table, tokens.begin + t);
    UNROLL
    for (int p = 0; p < PARTS; p++) {
      operand v = operand_at(value + p * LANES);
      UNROLL
      for (int g = 0; g < GROUP; g++) acc[g][p] += v * weights[g][t];
    }
  }
#endif
}

/* The sums of `add_values` in a row's order: of pairs, `unpack` takes four elements in turn from each 8 of a row. */
static inline void in_order(floats sums[SUMS]) {
#if PAIRS
  UNROLL
  for (int p = 0; p < SUMS; p += 2) {
    floats low = sums[p], high = sums[p + 1];
    sums[p] = __builtin_shufflevector(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    sums[p + 1] = __builtin_shufflevector(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  }
#else
  (void)sums;
#endif
}

/* One KV head's part in attention over a chunk, the `head`th of those that are looked at; `queries` are its GROUP heads.
   Meanwhile its rows of the `next` chunk are fetched: pages come from anywhere, and what a core does not foresee comes at a
   third of the speed unless much of it is asked for early. */
static void attend(state *s, const element *queries, int64_t head, int64_t value_offset, chunk tokens, chunk next,
                   float scale) {
  const element *keys = tokens.keys + head * HEAD, *next_keys = next.keys + head * HEAD;
  int count = (int)(tokens.end - tokens.begin), tiles = (count + LANES - 1) / LANES;
  int64_t ahead = next.begin, each = (next.end - next.begin + count - 1) / count;
  operand q[GROUP][OPERANDS];
  floats scores[GROUP][CHUNK / LANES];
  softened weights[GROUP][CHUNK];
  UNROLL
  for (int g = 0; g < GROUP; g++)
    UNROLL
    for (int p = 0; p < OPERANDS; p++) q[g][p] = part_of(queries + g * HEAD, p);
  for (int tile = 0; tile < tiles; tile++) {
    floats products[GROUP][LANES];
    for (int t = 0; t < LANES; t++) {
      int64_t token = tokens.begin + tile * LANES + t;
      if (token >= tokens.end) { /* never read: what stands behind a sequence's end is somebody else's */
        UNROLL
        for (int g = 0; g < GROUP; g++) products[g][t] = (floats){0} - INFINITY;
        continue;
      }
      for (int64_t end = smaller(ahead + each, next.end); ahead < end; ahead++) {
        fetch(row_of(next_keys, next.table, ahead));
        fetch(row_of(next_keys + value_offset, next.table, ahead));
      }
      const element *key = row_of(keys, tokens.table, token);
      floats sum[GROUP] = {0};
      UNROLL
      for (int p = 0; p < OPERANDS; p++) {
        operand k = part_of(key, p);
        UNROLL
        for (int g = 0; g < GROUP; g++) sum[g] = multiply_add(sum[g], q[g][p], k);
      }
      UNROLL
      for (int g = 0; g < GROUP; g++) products[g][t] = sum[g];
    }
    UNROLL
    for (int g = 0; g < GROUP; g++) scores[g][tile] = sums(products[g]) * scale;
  }
  UNROLL
  for (int g = 0; g < GROUP; g++) {
    floats top = scores[g][0], added = {0};
    for (int tile = 1; tile < tiles; tile++) top = larger(scores[g][tile], top);
    float peak = largest(top);
    peak = peak > s->peak[g] || peak != peak ? peak : s->peak[g];
    float kept = s->peak[g] == peak ? 1.0f : expf(s->peak[g] - peak);
    for (int tile = 0; tile < tiles; tile++) {
      floats weight = exponential(scores[g][tile] - peak);
      keep(weights[g] + tile * LANES, weight);
      added += weight;
    }
    s->mass[g] = s->mass[g] * kept + total(added);
    s->peak[g] = peak;
    UNROLL
    for (int p = 0; p < SUMS; p++) s->sums[g][p] *= kept;
  }
  floats acc[GROUP][SUMS];
  memcpy(acc, s->sums, sizeof acc);
  add_values(acc, weights, keys + value_offset, tokens);
  memcpy(s->sums, acc, sizeof acc);
}

/* What a head's group has seen, weighed: its rows of the output. */
static void finish(state *s, element *out) {
  UNROLL
  for (int g = 0; g < GROUP; g++) {
    in_order(s->sums[g]);
    UNROLL
    for (int p = 0; p < PARTS; p++) store(out + g * HEAD + p * LANES, s->sums[g][p] / s->mass[g]);
  }
}

static inline int64_t claimed(int64_t *taken) {
  int64_t job;
#pragma omp atomic capture
  job = (*taken)++;
  return job;
}

/* `queries`, `out`: [rows of the batch, KV_HEADS * GROUP, HEAD], of which the `count` ones named by `rows` are computed;
   rows of `queries` begin `stride` elements apart, those of `out` follow one another.
   `pages`: one layer's, [2, slots, KV_HEADS, HEAD], V `value_offset` elements behind K. `tables`: all block tables, one
   after another; sequence i's begins at `starts[i]`, and its tokens `first[i]` to `last[i]` (at least one) are seen. */
void decode_attention(const element *queries, int64_t stride, const element *pages, int64_t value_offset,
                      const int64_t *rows, const int64_t *tables, const int64_t *starts, const int64_t *first,
                      const int64_t *last, int64_t count, float scale, element *out) {
  /* Of many sequences each is one thread's, of few each head. */
  int64_t heads = count < 2 * omp_get_max_threads() ? 1 : KV_HEADS, parts = KV_HEADS / heads, jobs = count * parts;
  int64_t taken = 0;
#pragma omp parallel if (jobs > 1)
  for (int64_t job = claimed(&taken), following; job < jobs; job = following) {
    following = claimed(&taken);
    int64_t i = job / parts, then = following / parts, head = job % parts;
    const element *query = queries + rows[i] * stride + head * GROUP * HEAD, *keys = pages + head * HEAD;
    state seen[KV_HEADS];
    for (int64_t h = 0; h < heads; h++) begin(seen + h);
    chunk tokens = chunk_of(tables + starts[i], keys, first[i], last[i]);
    for (chunk next; tokens.begin < last[i]; tokens = next) {
      next = chunk_of(tokens.table, keys, tokens.end, last[i]);
      chunk soon = next;
      if (next.begin == last[i] && following < jobs)
        soon = chunk_of(tables + starts[then], pages + following % parts * HEAD, first[then], last[then]);
      for (int64_t h = 0; h < heads; h++)
        attend(seen + h, query + h * GROUP * HEAD, h, value_offset, tokens, soon, scale);
    }
    for (int64_t h = 0; h < heads; h++) finish(seen + h, out + (rows[i] * KV_HEADS + head + h) * GROUP * HEAD);
  }
}
