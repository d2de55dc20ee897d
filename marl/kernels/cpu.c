/* What a model's layers compute on a CPU beside products, for kernels.py: causal attention of new tokens to the slots of
   a cache, and of whole rows; norms; with their backward passes. What is read and written may be in bfloat16 (`half`).
   All is added up in float32. What is multiplied is in float32, too, but for attention of heads in bfloat16 whose width
   allows `pairs`: as it stands there, two products at once, and weights are rounded first, as flash attention's are.

   Four queries share what is read: heads with the same keys, or neighbouring tokens. Keys and values are asked for before
   they are needed, so that decoding is as fast as memory is read. What a token makes of what it sees is added up in the
   same order whoever shares its tile, its pass or its thread; but a value that is no number reaches up to three tokens
   before it. Built once for each instruction set (pyproject.toml). */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
#define LANES 16 /* numbers of a vector */
#else
#define LANES 8
#endif
#define TILE 4               /* queries at once */
#define KEYS (LANES / TILE)  /* keys at once, so that their scores make a vector */
#define WIDTH (LANES / TILE) /* vectors of a value at once: as many sums as there are registers */
#define AHEAD 32             /* keys or values that are asked for before their turn */
#define PAIRED 32            /* heads whose width is a multiple of it have pairs */
#define BLOCK 64             /* keys of a row at once, and queries: what they make of each other stays at hand */
#define INLINE static inline __attribute__((always_inline))
#if !defined __clang__ && __GNUC__ < 12
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ints){__VA_ARGS__})
#else
#define SHUFFLE __builtin_shufflevector
#endif
#define UNROLL _Pragma("GCC unroll 16")

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t shorts __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef uint32_t longer __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

extern int omp_get_thread_num(void); /* of the OpenMP that torch has loaded */

INLINE vec load(const float *from) { return *(const vec *)from; }
INLINE void store(float *to, vec values) { *(vec *)to = values; }

/* The numbers from number `at` on; those in bfloat16 are the upper halves of floats. */
INLINE vec read(const void *from, long at, const int half) {
  if (!half) return load((const float *)from + at);
  return (vec)(__builtin_convertvector(*(const shorts *)((const uint16_t *)from + at), longer) << 16);
}

INLINE void ask(const void *from, long at, const int half) {
  __builtin_prefetch((const char *)from + at * (half ? 2 : 4));
}

/* A number, or a pair of those in bfloat16, in all lanes. */
INLINE vec every(const float *from) {
  int32_t bits;
  memcpy(&bits, from, sizeof bits);
  return (vec)((ints){0} + bits);
}

INLINE vec where(ints which, vec yes, vec no) { return (vec)(((ints)yes & which) | ((ints)no & ~which)); }

/* To bfloat16: the nearest, of two the even one. Some processors make nothing of what is below 2^-126. */
INLINE shorts rounded(vec values) {
#ifdef __AVX512BF16__
  return (shorts)_mm512_cvtneps_pbh((__m512)values);
#else
  longer bits = (longer)values;
  longer nearest = bits + 0x7fff + ((bits >> 16) & 1);
  longer found = (longer)where(values == values, (vec)nearest, (vec)(bits | 0x400000)); /* no number stays none */
  return __builtin_convertvector(found >> 16, shorts);
#endif
}

/* Puts numbers from number `at` on. */
INLINE void put(void *to, long at, vec values, const int half) {
  if (half) *(shorts *)((uint16_t *)to + at) = rounded(values);
  else store((float *)to + at, values);
}

/* Numbers in bfloat16 by pairs, one of the first with one of the second each. */
INLINE vec pair(shorts first, shorts second) {
  return (vec)(__builtin_convertvector(first, longer) | __builtin_convertvector(second, longer) << 16);
}

INLINE vec beside(const void *first, const void *second, long at) {
  return pair(*(const shorts *)((const uint16_t *)first + at), *(const shorts *)((const uint16_t *)second + at));
}

/* Adds products lane by lane; of `pairs` both. */
INLINE vec plus(const int pairs, vec total, vec a, vec b) {
  if (!pairs) return total + a * b;
#ifdef __AVX512BF16__
  return (vec)_mm512_dpbf16_ps((__m512)total, (__m512bh)a, (__m512bh)b);
#else
  const ints upper = (ints){0} + (int32_t)0xffff0000;
  return total + (vec)((ints)a << 16) * (vec)((ints)b << 16) + (vec)((ints)a & upper) * (vec)((ints)b & upper);
#endif
}

INLINE float sum(vec a) {
  float s = 0;
  for (int i = 0; i < LANES; i++) s += a[i];
  return s;
}

INLINE float highest(vec a) {
  float s = a[0];
  for (int i = 1; i < LANES; i++) s = a[i] > s ? a[i] : s;
  return s;
}

/* Of as many vectors as they have lanes the sum of each, in their order: pairs are added lane by lane. */
INLINE vec sums(const vec a[LANES]) {
#if LANES == 16
  vec b[8], c[4], d[2];
  UNROLL for (int i = 0; i < 8; i++) {
    vec x = a[2 * i], y = a[2 * i + 1];
    b[i] = SHUFFLE(x, y, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
           SHUFFLE(x, y, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  }
  UNROLL for (int i = 0; i < 4; i++) {
    vec x = b[2 * i], y = b[2 * i + 1];
    c[i] = SHUFFLE(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           SHUFFLE(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
  UNROLL for (int i = 0; i < 2; i++) {
    vec x = c[2 * i], y = c[2 * i + 1];
    d[i] = SHUFFLE(x, y, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
           SHUFFLE(x, y, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  }
  return SHUFFLE(d[0], d[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
         SHUFFLE(d[0], d[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
#else
  vec b[4], c[2];
  UNROLL for (int i = 0; i < 4; i++) {
    vec x = a[2 * i], y = a[2 * i + 1];
    b[i] = SHUFFLE(x, y, 0, 8, 1, 9, 4, 12, 5, 13) + SHUFFLE(x, y, 2, 10, 3, 11, 6, 14, 7, 15);
  }
  UNROLL for (int i = 0; i < 2; i++) {
    vec x = b[2 * i], y = b[2 * i + 1];
    c[i] = SHUFFLE(x, y, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(x, y, 2, 3, 10, 11, 6, 7, 14, 15);
  }
  return SHUFFLE(c[0], c[1], 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(c[0], c[1], 4, 5, 6, 7, 12, 13, 14, 15);
#endif
}

/* e^x for x <= 0, to the last bit or two: 2^n times a polynomial (that of Cephes' expf). NaN stays NaN. */
INLINE vec exponential(vec x) {
  const vec low = (vec){0} - 87.f;
  x = where(x < low, low, x);
  ints n = __builtin_convertvector(x * 1.44269504f - .5f, ints); /* towards 0: to the nearest */
  vec f = __builtin_convertvector(n, vec);
  vec r = x - f * .693359375f + f * 2.12194440e-4f; /* ln 2 in two parts */
  vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.f;
  return p * (vec)((n + 127) << 23);
}

/* Products of TILE queries with `count` keys, from number `first` on, `step` numbers apart: (TILE, room), with room up to
   a multiple of KEYS. */
INLINE void products(const int width, const int half, const int pairs, const float *const queries[TILE],
                     const void *keys, long first, long step, long count, float scale, float *into, long room) {
  for (long j = 0; j < count; j += KEYS) {
    vec a[TILE * KEYS];
    long own[KEYS];
    UNROLL for (int i = 0; i < TILE * KEYS; i++) a[i] = (vec){0};
    UNROLL for (int n = 0; n < KEYS; n++) {
      own[n] = first + (j + n < count ? j + n : count - 1) * step;
      for (int c = 0; c < width; c += 1 + half) ask(keys, first + (j + n + AHEAD) * step + c * LANES, half);
    }
    UNROLL for (int c = 0; c < width / (1 + pairs); c++) {
      vec key[KEYS];
      UNROLL for (int n = 0; n < KEYS; n++)
        key[n] = pairs ? load((const float *)((const uint16_t *)keys + own[n]) + c * LANES)
                       : read(keys, own[n] + c * LANES, half);
      UNROLL for (int i = 0; i < TILE; i++) {
        vec query = load(queries[i] + c * LANES);
        UNROLL for (int n = 0; n < KEYS; n++) a[KEYS * i + n] = plus(pairs, a[KEYS * i + n], query, key[n]);
      }
    }
    vec found = sums(a) * scale;
    UNROLL for (int i = 0; i < TILE; i++) memcpy(into + i * room + j, (float *)&found + KEYS * i, KEYS * sizeof(float));
  }
}

/* Lets `count` vectors of numbers or pairs, `step` apart, stand across, BLOCK side by side: (size, BLOCK), with zeros
   behind them. */
INLINE void turn(const int size, const float *from, long step, long count, float *into) {
  for (long d = 0; d < size; d++)
    for (long j = 0; j < BLOCK; j++) into[d * BLOCK + j] = j < count ? from[j * step + d] : 0;
}

/* Products of TILE queries with BLOCK keys that stand across: (TILE, BLOCK). No sum crosses a vector here. */
INLINE void across(const int size, const int pairs, const float *const queries[TILE], const float *keys, float scale,
                   float *into) {
  for (int first = 0; first < BLOCK; first += WIDTH * LANES) {
    vec a[TILE][WIDTH];
    UNROLL for (int i = 0; i < TILE; i++) UNROLL for (int c = 0; c < WIDTH; c++) a[i][c] = (vec){0};
    for (int d = 0; d < size; d++)
      UNROLL for (int c = 0; c < WIDTH; c++) {
        vec key = load(keys + d * BLOCK + first + c * LANES);
        UNROLL for (int i = 0; i < TILE; i++) a[i][c] = plus(pairs, a[i][c], key, every(queries[i] + d));
      }
    UNROLL for (int i = 0; i < TILE; i++) UNROLL for (int c = 0; c < WIDTH; c++)
      store(into + i * BLOCK + first + c * LANES, a[i][c] * scale);
  }
}

/* Adds to each of TILE results the sum of `count` values, which lie as keys do, by its weights: `apart` from one result
   to the next, `along` from one value to the next. Of `pairs` there are weights for two values at once; such values are
   numbers (`half`), or stand in pairs already, and are counted so. From `far` they are asked for before their turn. */
INLINE void gather(const int width, const int half, const int pairs, const int far, const float *weights, long apart,
                   long along, const void *values, long first, long step, long count, float *const into[TILE]) {
  const int two = half && pairs;
  for (int from = 0; from < width; from += WIDTH) {
    const int some = width - from < WIDTH ? width - from : WIDTH;
    vec o[TILE][WIDTH];
    UNROLL for (int i = 0; i < TILE; i++) UNROLL for (int c = 0; c < some; c++)
      o[i][c] = load(into[i] + (from + c) * LANES);
    for (long j = 0, own = 0; j < count; j += 1 + two, own += along) {
      const long at = first + j * step + from * LANES;
      const uint16_t *this = (const uint16_t *)values + at, *next = this + (j + 1 < count ? step : 0);
      if (far) UNROLL for (int k = 0; k <= two; k++) UNROLL for (int c = 0; c < some; c += 1 + half)
        ask(values, at + (AHEAD + k) * step + c * LANES, half);
      UNROLL for (int c = 0; c < some; c++) {
        vec x = two ? beside(this, next, c * LANES) : read(values, at + c * LANES, half);
        UNROLL for (int i = 0; i < TILE; i++) o[i][c] = plus(pairs, o[i][c], x, every(weights + i * apart + own));
      }
    }
    UNROLL for (int i = 0; i < TILE; i++) UNROLL for (int c = 0; c < some; c++)
      store(into[i] + (from + c) * LANES, o[i][c]);
  }
}

/* Makes scores of `end` keys, with room up to a multiple of LANES, into e^(score - highest), and 0 behind them. Returns
   the sum of these. */
INLINE float weigh(float *scores, long end) {
  long padded = (end + LANES - 1) / LANES * LANES;
  for (long j = end; j < padded; j++) scores[j] = -INFINITY;
  vec most = load(scores), total = {0};
  for (long j = LANES; j < padded; j += LANES) {
    vec x = load(scores + j);
    most = where(x > most, x, most);
  }
  float top = highest(most);
  for (long j = 0; j < padded; j += LANES) {
    vec e = exponential(load(scores + j) - top);
    store(scores + j, e);
    total += e;
  }
  for (long j = end; j < padded; j++) scores[j] = 0;
  return sum(total);
}

struct call {
  const void *queries, *keys, *values;  /* (N, H, D), (S, L, G, D), (S, L, G, E) */
  const int64_t *rows, *places;         /* (N,): each token's slot, and its place there */
  float *out;                           /* (N, H, E) */
  float scale;
  long heads, shared, inside, outside, length, room; /* H, G, D, E, L, and how many scores there is room for */
  int half;                                          /* whether these are in bfloat16 */
};

/* TILE queries over one head's keys and values, from numbers `key` and `value` on; each query sees the first `ends`. */
INLINE void tile(const struct call *c, const int inside, const int outside, const int half,
                 const void *const given[TILE], long key, long value, const long ends[TILE], float *scores,
                 float *const out[TILE]) {
  const int pairs = half && inside * LANES % PAIRED == 0 && outside * LANES % PAIRED == 0;
  const int read_up = half && !pairs;
  long most = 0;
  float share[TILE], whole[TILE][read_up ? inside * LANES : 1];
  const float *queries[TILE];
  for (int i = 0; i < TILE; i++) {
    most = ends[i] > most ? ends[i] : most;
    queries[i] = read_up ? whole[i] : given[i];
    for (int d = 0; read_up && d < inside; d++) store(whole[i] + d * LANES, read(given[i], d * LANES, 1));
  }
  products(inside, half, pairs, queries, c->keys, key, c->shared * c->inside, most, c->scale, scores, c->room);
  for (int i = 0; i < TILE; i++) {
    float *own = scores + i * c->room;
    share[i] = 1.f / weigh(own, ends[i]);
    for (long j = (ends[i] + LANES - 1) / LANES * LANES; j < (most + LANES - 1) / LANES * LANES; j++) own[j] = 0;
    for (long j = 0; pairs && j < most; j += LANES) put(own, j, load(own + j), 1);
    memset(out[i], 0, outside * LANES * sizeof(float));
  }
  gather(outside, half, pairs, 1, scores, c->room, 1, c->values, value, c->shared * c->outside, most, out);
  for (int i = 0; i < TILE; i++)
    for (int d = 0; d < outside; d++) /* not twice where the last query fills a tile */
      if (!i || out[i] != out[i - 1]) store(out[i] + d * LANES, load(out[i] + d * LANES) * share[i]);
}

INLINE float number(const void *from, long at, const int half) {
  if (!half) return ((const float *)from)[at];
  uint32_t bits = (uint32_t)((const uint16_t *)from)[at] << 16;
  float found;
  memcpy(&found, &bits, sizeof found);
  return found;
}

/* The same for one query, of any width. */
INLINE void single(const struct call *c, const int half, const void *query, long key, long value, long end,
                   float *scores, float *out) {
  const long inside = c->inside, outside = c->outside, key_step = c->shared * inside, value_step = c->shared * outside;
  for (long j = 0; j < end; j++) {
    float s = 0;
#pragma omp simd reduction(+ : s)
    for (long d = 0; d < inside; d++) s += number(query, d, half) * number(c->keys, key + j * key_step + d, half);
    scores[j] = s * c->scale;
  }
  float share = 1.f / weigh(scores, end);
  memset(out, 0, outside * sizeof(float));
  for (long j = 0; j < end; j++)
    for (long d = 0; d < outside; d++) out[d] += scores[j] * number(c->values, value + j * value_step + d, half);
  for (long d = 0; d < outside; d++) out[d] *= share;
}

/* All queries of `count` neighbouring tokens, from `first` on, that look at head `g` of the keys. */
INLINE void head(const struct call *c, const int inside, const int outside, const int half, long first, long count,
                 long g, float *scores) {
  const long each = c->heads / c->shared, D = c->inside, E = c->outside, row = c->rows[first] * c->length;
  const long key = (row * c->shared + g) * D, value = (row * c->shared + g) * E, last = count * each - 1;
  for (long u = 0; u <= last; u += inside ? TILE : 1) {
    const void *queries[TILE];
    float *out[TILE];
    long ends[TILE];
    for (int i = 0; i < TILE; i++) {
      long own = u + i < last ? u + i : last, token = first + own / each; /* the last one again where none is left */
      long at = token * c->heads + g * each + own % each;
      queries[i] = (const char *)c->queries + at * D * (half ? 2 : 4);
      out[i] = c->out + at * E;
      ends[i] = c->places[token] + 1;
    }
    if (inside)
      tile(c, inside, outside, half, queries, key, value, ends, scores, out);
    else
      single(c, half, queries[0], key, value, ends[0], scores, out[0]);
  }
}

/* Widths that are known here make the fast code. */
INLINE void of_width(const struct call *c, const int half, long first, long count, long g, float *scores) {
  const long D = c->inside, E = c->outside;
  if (D == 64 && E == 64) head(c, 64 / LANES, 64 / LANES, half, first, count, g, scores);
  else if (D == 32 && E == 32) head(c, 32 / LANES, 32 / LANES, half, first, count, g, scores);
  else if (D == 128 && E == 128) head(c, 128 / LANES, 128 / LANES, half, first, count, g, scores);
  else if (D == 16 && E == 16) head(c, 16 / LANES, 16 / LANES, half, first, count, g, scores);
  else if (D % LANES == 0 && E % LANES == 0) head(c, D / LANES, E / LANES, half, first, count, g, scores);
  else head(c, 0, 0, half, first, count, g, scores);
}

static void in_float(const struct call *c, long first, long count, long g, float *scores) {
  of_width(c, 0, first, count, g, scores);
}

static void in_half(const struct call *c, long first, long count, long g, float *scores) {
  of_width(c, 1, first, count, g, scores);
}

/* `scores`: room for (threads, TILE, room) numbers; `tiles`: for N + 1. */
void attend(const void *queries, const void *keys, const void *values, const int64_t *rows, const int64_t *places,
            float *out, float *scores, int64_t *tiles, float scale, long tokens, long heads, long shared, long inside,
            long outside, long length, long room, long half, long threads) {
  const struct call c = {queries, keys,   values, rows,    places, out,  scale,
                         heads,   shared, inside, outside, length, room, (int)half};
  const long several = shared * TILE / heads > 1 ? shared * TILE / heads : 1; /* tokens that fill a tile */
  long count = 0;
  for (long t = 0; t < tokens; t++) {
    int joins = t > 0 && t - tiles[count - 1] < several && rows[t] == rows[t - 1] && places[t] == places[t - 1] + 1;
    if (!joins) tiles[count++] = t;
  }
  tiles[count] = tokens;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (long item = 0; item < count * shared; item++) {
    const long which = item / shared, first = tiles[which];
    (half ? in_half : in_float)(&c, first, tiles[which + 1] - first, item % shared,
                                scores + omp_get_thread_num() * TILE * room);
  }
}

struct rows {
  const float *queries, *keys, *values; /* (N, H, D), (N, G, D) twice; numbers, or pairs */
  const int64_t *begins;                /* (R + 1,): where each row begins */
  float scale;
  long heads, shared, width; /* H, G, D */
  int half;
  float *made, *logarithms, *totals;        /* forward: (N, H, D), (N, H) twice */
  const float *out, *slopes;                /* backward: what was made, and its gradients; numbers, or pairs */
  float *to_queries, *to_keys, *to_values;  /* gradients; of keys and values a copy a part */
};

/* `count` vectors one behind the other, or of two a pair each: (count, width), (count / 2, width). */
INLINE void stack(const int width, const int pairs, const float *const from[], long count, float *into) {
  for (long i = 0; i < count; i += 1 + pairs)
    for (int d = 0; d < width; d++, into += LANES)
      store(into, pairs ? beside(from[i], from[i + 1], d * LANES) : load(from[i] + d * LANES));
}

/* What tokens `first` to `last` of a row see in head `g` of its keys, block by block: `logarithms` are the highest scores
   until then, `totals` the sums of e^(score - highest). */
INLINE void forward(const struct rows *c, const int width, const int pairs, long begin, long first, long last, long g) {
  const int two = 1 + pairs;
  const long D = c->width, each = c->heads / c->shared, step = c->shared * D;
  const long size = width * LANES / two, here = BLOCK / two; /* numbers or pairs: of a head, and of BLOCK vectors */
  float keys[size * BLOCK], stacked[here * D], none[D], nowhere[D];
  ints lanes;
  for (int i = 0; i < LANES; i++) lanes[i] = i;
  memset(none, 0, sizeof none);
  for (long block = begin; block < last; block += BLOCK) {
    const long count = last - block < BLOCK ? last - block : BLOCK, at = (block * c->shared + g) * D;
    const float *vectors[BLOCK];
    for (long j = 0; j < BLOCK; j++) vectors[j] = j < count ? c->values + (at + j * step) / two : none;
    turn(size, c->keys + at / two, step / two, count, keys);
    stack(width, pairs, vectors, BLOCK, stacked);
    for (long u = (block > first ? block - first : 0) * each; u < (last - first) * each; u += TILE) {
      float scores[TILE * BLOCK], by_query[TILE * BLOCK], *into[TILE];
      long own[TILE], most = 0; /* keys that one of them sees */
      int32_t seen[TILE];
      for (int i = 0; i < TILE; i++) {
        const long token = first + (u + i) / each;
        own[i] = token * c->heads + g * each + (u + i) % each;
        vectors[i] = token < last ? c->queries + own[i] * size : none;
        into[i] = token < last ? c->made + own[i] * D : nowhere;
        seen[i] = token >= last ? 0 : token - block + 1 < BLOCK ? token - block + 1 : BLOCK;
        most = seen[i] > most ? seen[i] : most;
      }
      across(size, pairs, vectors, keys, c->scale, scores);
      for (int i = 0; i < TILE; i++) {
        vec score[BLOCK / LANES], top = (vec){0} - INFINITY, total = {0};
        UNROLL for (int j = 0; j < BLOCK / LANES; j++) {
          score[j] = where(lanes + j * LANES < seen[i], load(scores + i * BLOCK + j * LANES), (vec){0} - INFINITY);
          top = where(score[j] > top, score[j], top);
        }
        float before = seen[i] ? c->logarithms[own[i]] : 0, now = highest(top);
        now = now > before || !seen[i] ? now : before;
        const float less_by = now == -INFINITY ? 0 : now; /* nothing but -INFINITY so far is no reason for NaN */
        UNROLL for (int j = 0; j < BLOCK / LANES; j++) {
          vec likely = where(lanes + j * LANES < seen[i], exponential(score[j] - less_by), (vec){0});
          total += likely;
          put(by_query, i * BLOCK + j * LANES, likely, pairs);
        }
        if (!seen[i]) continue;
        if (now != before) {
          vec less = exponential((vec){0} + (before - now));
          for (int d = 0; d < width; d++) store(into[i] + d * LANES, load(into[i] + d * LANES) * less);
          c->totals[own[i]] *= less[0];
          c->logarithms[own[i]] = now;
        }
        c->totals[own[i]] += sum(total);
      }
      gather(width, 0, pairs, 0, by_query, BLOCK / two, 1, stacked, 0, D, (most + pairs) / two, into);
    }
  }
  for (long u = 0; u < (last - first) * each; u++) {
    const long own = (first + u / each) * c->heads + g * each + u % each;
    const float share = 1.f / c->totals[own];
    c->logarithms[own] += logf(c->totals[own]);
    for (int d = 0; d < width; d++) store(c->made + own * D + d * LANES, load(c->made + own * D + d * LANES) * share);
  }
}

/* What tokens `first` to `last` of a row pass back through head `g` of its keys.

   With p = e^(score - logarithm) and slope s of the output o: to the value p s, to the score p (s v - s o). */
INLINE void backward(const struct rows *c, const int width, const int pairs, long begin, long first, long last, long g,
                     float *to_keys, float *to_values) {
  const int two = 1 + pairs;
  const long D = c->width, each = c->heads / c->shared, step = c->shared * D;
  const long size = width * LANES / two, here = BLOCK / two; /* numbers or pairs: of a head, and of BLOCK vectors */
  float keys[size * BLOCK], values[size * BLOCK], stacked[here * D], queries[here * D], slopes[here * D];
  float p[here * BLOCK], s[here * BLOCK], none[D], nowhere[D]; /* p, s: weights of keys for queries, or pairs of these */
  ints lanes;
  for (int i = 0; i < LANES; i++) lanes[i] = i;
  memset(none, 0, sizeof none);
  for (long block = begin; block < last; block += BLOCK) {
    const long count = last - block < BLOCK ? last - block : BLOCK, at = (block * c->shared + g) * D;
    const float *vectors[BLOCK], *sloping[BLOCK];
    for (long j = 0; j < BLOCK; j++) vectors[j] = j < count ? c->keys + (at + j * step) / two : none;
    turn(size, c->keys + at / two, step / two, count, keys);
    turn(size, c->values + at / two, step / two, count, values);
    stack(width, pairs, vectors, BLOCK, stacked);
    for (long u = (block > first ? block - first : 0) * each; u < (last - first) * each; u += BLOCK) {
      long used = 0, most = 0; /* queries, and keys that one of them sees */
      for (; used < BLOCK && u + used < (last - first) * each; used += TILE) {
        float scores[TILE * BLOCK], sides[TILE * BLOCK], by_query[TILE * BLOCK], logarithms[TILE], along[TILE], *into[TILE];
        int32_t seen[TILE];
        for (int i = 0; i < TILE; i++) {
          const long token = first + (u + used + i) / each, own = token * c->heads + g * each + (u + used + i) % each;
          const int there = token < last;
          vectors[used + i] = there ? c->queries + own * size : none;
          sloping[used + i] = there ? c->slopes + own * size : none;
          logarithms[i] = there ? c->logarithms[own] : 0;
          into[i] = there ? c->to_queries + own * D : nowhere;
          seen[i] = !there ? 0 : token - block + 1 < BLOCK ? token - block + 1 : BLOCK;
          most = seen[i] > most ? seen[i] : most;
          vec total = {0};
          for (int d = 0; there && d < width; d++)
            total += read(sloping[used + i], d * LANES, pairs) * read(c->out + own * size, d * LANES, pairs);
          along[i] = sum(total);
        }
        across(size, pairs, vectors + used, keys, c->scale, scores);
        across(size, pairs, sloping + used, values, 1.f, sides);
        for (int i = 0; i < TILE; i += two)
          for (int j = 0; j < BLOCK; j += LANES) {
            vec likely[2], side[2];
            UNROLL for (int k = 0; k < two; k++) {
              const int own = (i + k) * BLOCK + j;
              ints sees = lanes + j < seen[i + k];
              likely[k] = where(sees, exponential(load(scores + own) - logarithms[i + k]), (vec){0});
              side[k] = where(sees, likely[k] * (load(sides + own) - along[i + k]) * c->scale, (vec){0});
              put(by_query, own, side[k], pairs);
            }
            const long own = (used + i) / two * BLOCK + j;
            store(p + own, pairs ? pair(rounded(likely[0]), rounded(likely[1])) : likely[0]);
            store(s + own, pairs ? pair(rounded(side[0]), rounded(side[1])) : side[0]);
          }
        gather(width, 0, pairs, 0, by_query, BLOCK / two, 1, stacked, 0, D, (count + pairs) / two, into);
      }
      stack(width, pairs, vectors, used, queries);
      stack(width, pairs, sloping, used, slopes);
      for (long j = 0; j < most; j += TILE) {
        float *key[TILE], *value[TILE];
        for (int i = 0; i < TILE; i++) {
          key[i] = j + i < count ? to_keys + at + (j + i) * step : nowhere;
          value[i] = j + i < count ? to_values + at + (j + i) * step : nowhere;
        }
        gather(width, 0, pairs, 0, s + j, 1, BLOCK, queries, 0, D, used / two, key);
        gather(width, 0, pairs, 0, p + j, 1, BLOCK, slopes, 0, D, used / two, value);
      }
    }
  }
}

INLINE void part(const struct rows *c, const int width, const int pairs, long begin, long first, long last, long g,
                 float *to_keys, float *to_values) {
  if (c->made) forward(c, width, pairs, begin, first, last, g);
  else backward(c, width, pairs, begin, first, last, g, to_keys, to_values);
}

static void in_numbers(const struct rows *c, long begin, long first, long last, long g, float *to_keys, float *to_values) {
  if (c->width == 64) part(c, 64 / LANES, 0, begin, first, last, g, to_keys, to_values);
  else if (c->width == 32) part(c, 32 / LANES, 0, begin, first, last, g, to_keys, to_values);
  else if (c->width == 128) part(c, 128 / LANES, 0, begin, first, last, g, to_keys, to_values);
  else part(c, c->width / LANES, 0, begin, first, last, g, to_keys, to_values);
}

static void in_pairs(const struct rows *c, long begin, long first, long last, long g, float *to_keys, float *to_values) {
  if (c->width == 64) part(c, 64 / LANES, 1, begin, first, last, g, to_keys, to_values);
  else if (c->width == 32) part(c, 32 / LANES, 1, begin, first, last, g, to_keys, to_values);
  else if (c->width == 128) part(c, 128 / LANES, 1, begin, first, last, g, to_keys, to_values);
  else part(c, c->width / LANES, 1, begin, first, last, g, to_keys, to_values);
}

/* All rows, each of whose tokens are so many pieces of equal work. */
static void all(const struct rows *c, long rows, long parts, long threads) {
  const long size = c->begins[rows] * c->shared * c->width;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (long item = 0; item < rows * c->shared * parts; item++) {
    const long row = item / (c->shared * parts), g = item / parts % c->shared, piece = parts - 1 - item % parts;
    const long begin = c->begins[row], length = c->begins[row + 1] - begin;
    const long first = begin + (long)(length * sqrt((double)piece / parts));
    const long last = begin + (long)(length * sqrt((double)(piece + 1) / parts));
    float *to_keys = c->made ? 0 : c->to_keys + piece * size, *to_values = c->made ? 0 : c->to_values + piece * size;
    (c->half ? in_pairs : in_numbers)(c, begin, first, last, g, to_keys, to_values);
  }
}

/* D must be a multiple of LANES, of `half` of PAIRED; `made` and `totals` hold zeros, `logarithms` -INFINITY. */
void attend_rows(const float *queries, const float *keys, const float *values, const int64_t *begins, float *made,
                 float *logarithms, float *totals, float scale, long rows, long parts, long heads, long shared, long width,
                 long half, long threads) {
  const struct rows c = {queries, keys,   values, begins, scale,      heads,
                         shared,  width,  half,   made,   logarithms, totals};
  all(&c, rows, parts, threads);
}

/* Gradients, which hold zeros: to the queries (N, H, D), and in `parts` pieces, to be summed, to keys and values
   (parts, N, G, D). */
void attend_back(const float *queries, const float *keys, const float *values, const int64_t *begins, const float *out,
                 float *logarithms, const float *slopes, float *to_queries, float *to_keys, float *to_values, float scale,
                 long rows, long parts, long heads, long shared, long width, long half, long threads) {
  const struct rows c = {queries, keys, values,     begins, scale, heads,  shared,     width,   half,
                         0,       logarithms, 0,    out,    slopes, to_queries, to_keys, to_values};
  all(&c, rows, parts, threads);
}

/* w x / sqrt(mean(x^2) + eps) of each row (width,), a multiple of LANES; `inverse` (rows,): by what x was multiplied. */
INLINE void norm_row(const void *x, const void *weight, void *out, float *inverse, float eps, long row, long width,
                     const int x_half, const int w_half, const int out_half) {
  const long at = row * width;
  vec total = {0};
  for (long d = 0; d < width; d += LANES) {
    vec a = read(x, at + d, x_half);
    total += a * a;
  }
  const float r = 1.f / sqrtf(sum(total) / width + eps);
  inverse[row] = r;
  for (long d = 0; d < width; d += LANES)
    put(out, at + d, read(x, at + d, x_half) * r * read(weight, d, w_half), out_half);
}

static void norm_rows(const void *x, const void *weight, void *out, float *inverse, float eps, long first, long last,
                      long width, int x_half, int w_half, int out_half) {
  for (long row = first; row < last; row++) {
    if (x_half || w_half) norm_row(x, weight, out, inverse, eps, row, width, x_half, w_half, out_half);
    else if (out_half) norm_row(x, weight, out, inverse, eps, row, width, 0, 0, 1);
    else norm_row(x, weight, out, inverse, eps, row, width, 0, 0, 0);
  }
}

/* In `parts`, by a thread each. One begins no team of threads: OpenMP would make its larger one anew after that. */
void norm(const void *x, const void *weight, void *out, float *inverse, float eps, long rows, long width, long parts,
          long x_half, long w_half, long out_half) {
  if (parts == 1) {
    norm_rows(x, weight, out, inverse, eps, 0, rows, width, (int)x_half, (int)w_half, (int)out_half);
    return;
  }
#pragma omp parallel for num_threads(parts) schedule(static)
  for (long part = 0; part < parts; part++)
    norm_rows(x, weight, out, inverse, eps, rows * part / parts, rows * (part + 1) / parts, width, (int)x_half,
              (int)w_half, (int)out_half);
}

/* With slope s of the output: r (w s - x r^2 mean(w s x)) to x; r x s to the weight, summed by piece. */
INLINE void norm_back_row(const void *slopes, const void *x, const void *weight, float r, void *to_x, float *to_weight,
                          long at, long width, const int s_half, const int x_half, const int w_half) {
  vec total = {0};
  for (long d = 0; d < width; d += LANES)
    total += read(weight, d, w_half) * read(slopes, at + d, s_half) * read(x, at + d, x_half);
  const float along = sum(total) / width * r * r;
  for (long d = 0; d < width; d += LANES) {
    vec a = read(x, at + d, x_half), s = read(slopes, at + d, s_half);
    put(to_x, at + d, (read(weight, d, w_half) * s - a * along) * r, x_half);
    store(to_weight + d, load(to_weight + d) + a * s * r);
  }
}

/* `to_weight` (parts, width) holds zeros. */
void norm_back(const void *slopes, const void *x, const void *weight, const float *inverse, void *to_x,
               float *to_weight, long rows, long width, long parts, long s_half, long x_half, long w_half, long threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long part = 0; part < parts; part++)
    for (long row = rows * part / parts; row < rows * (part + 1) / parts; row++) {
      float *own = to_weight + part * width;
      if (x_half || w_half)
        norm_back_row(slopes, x, weight, inverse[row], to_x, own, row * width, width, (int)s_half, (int)x_half, (int)w_half);
      else if (s_half) norm_back_row(slopes, x, weight, inverse[row], to_x, own, row * width, width, 1, 0, 0);
      else norm_back_row(slopes, x, weight, inverse[row], to_x, own, row * width, width, 0, 0, 0);
    }
}

/* Whether this processor has the instructions that this was built with. */
int runs(void) {
  __builtin_cpu_init();
#ifdef __AVX512F__
  if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")))
    return 0;
#endif
#ifdef __AVX512BF16__
  if (!__builtin_cpu_supports("avx512bf16")) return 0;
#endif
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
}
