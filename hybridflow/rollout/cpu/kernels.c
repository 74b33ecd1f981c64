/* Decoding on a CPU, fp32: a model's layers, with attention over a paged cache, and sampling.

   All layers are computed by one call, hf_layers, in one team of OpenMP's threads, which are those that torch has (its
   libgomp is loaded first). Each operation is a loop that the team shares (omp for), with a barrier at its end; called
   outside of a team, as tests do, the same loop runs in one thread. Vectors are GCC's own, so that the same source runs
   on any machine; on x86 it is compiled for three levels, and the best is chosen when the library is loaded.

   A token's result is the same bits whatever other tokens are computed beside it: no sum depends on the batch, nor on
   the number of threads. */

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define LEVELS __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define HAS_MANY_REGISTERS __builtin_cpu_supports("x86-64-v4")
#else
#define LEVELS
#define HAS_MANY_REGISTERS 0
#endif
#define INLINE static inline __attribute__((always_inline))

#define LANES 16
#define BLOCK 16 /* tokens of a block of the cache: BLOCK_TOKENS of blocks.py */
#define CHUNK 8 /* blocks whose scores are held at a time */
#define COLUMNS 8 /* heads that see the same keys and are computed together, at most */
#define PANEL 32 /* outputs of a matrix product that lie side by side in its weight */
#define TILE 8 /* rows that a matrix product computes together, at most */
#define MANY 128 /* rows that a thread takes through all layers at a time, so that what lies between stays near */
#define FEW 4 /* rows that are one piece of work where a row takes little */

typedef float floats __attribute__((vector_size(64), aligned(4)));
typedef int32_t ints __attribute__((vector_size(64), aligned(4)));
typedef uint32_t uints __attribute__((vector_size(64), aligned(4)));
typedef uint64_t words __attribute__((vector_size(64), aligned(8)));
typedef float half_floats __attribute__((vector_size(32), aligned(4)));
typedef int32_t half_ints __attribute__((vector_size(32), aligned(4)));

#define LOAD(p) (*(const floats *)(p))
#define STORE(p, v) (*(floats *)(p) = (v))
#define FILL(x) ((floats){0} + (x))

INLINE floats choose(ints mask, floats yes, floats no) { return (floats)(((ints)yes & mask) | ((ints)no & ~mask)); }

typedef union {
    floats whole;
    half_floats halves[2];
} pair;

typedef union {
    half_floats whole;
    float parts[8];
} eight;

INLINE float sum_of(floats v) {
    pair both = {.whole = v};
    eight e = {.whole = both.halves[0] + both.halves[1]};
    const float *p = e.parts;
    return ((p[0] + p[4]) + (p[2] + p[6])) + ((p[1] + p[5]) + (p[3] + p[7]));
}

INLINE float max_of(floats v) {
    pair both = {.whole = v};
    half_floats a = both.halves[0], b = both.halves[1];
    half_ints is_more = a > b;
    eight e = {.whole = (half_floats)(((half_ints)a & is_more) | ((half_ints)b & ~is_more))};
    float most = e.parts[0];
    for (int i = 1; i < 8; i++) most = e.parts[i] > most ? e.parts[i] : most;
    return most;
}

/* exp for arguments up to 88, zero below -87: a power of two times a polynomial (Cephes). */
INLINE floats exp_of(floats x) {
    floats low = FILL(-87.0f);
    ints is_low = x < low;
    x = choose(is_low, low, x);
    floats shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the sum's last bits are the rounded integer */
    floats n = shifted - 12582912.0f;
    floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    floats p = FILL(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    floats power = (floats)(((ints)shifted << 23) + 0x3f800000);
    return choose(is_low, FILL(0.0f), p * power);
}

/* log for positive normal numbers (Cephes). */
INLINE floats log_of(floats x) {
    ints bits = (ints)x;
    ints exponent = (bits >> 23) - 126;
    floats m = (floats)((bits & 0x007fffff) | 0x3f000000);
    ints is_small = m < FILL(0.70710678f);
    exponent += is_small;
    m = m + choose(is_small, m, FILL(0.0f)) - 1.0f;
    floats e = __builtin_convertvector(exponent, floats);
    floats z = m * m;
    floats p = FILL(7.0376836292e-2f);
    p = p * m - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    p = p * m * z + e * -2.12194440e-4f - z * 0.5f;
    return m + p + e * 0.693359375f;
}

/* tanh (Cephes); NaN of NaN. */
INLINE floats tanh_of(floats x) {
    floats large = FILL(44.0f), size = (floats)((ints)x & 0x7fffffff);
    floats e = exp_of(choose(size > large, large, size) * 2.0f);
    floats far = 1.0f - 2.0f / (e + 1.0f);
    far = (floats)((ints)far | ((ints)x & (int32_t)0x80000000));
    floats z = x * x;
    floats p = FILL(-5.70498872745e-3f);
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    return choose(size < FILL(0.625f), p * z * x + x, far);
}

/* Names the source that this was built from: its CRC-32. */
uint32_t hf_source(void) { return HF_SOURCE; }

/* Into the second cache: for the first, there are too many lines on their way. */
INLINE void fetch(const float *from, int64_t count) {
    for (int64_t i = 0; i < count; i += 16) __builtin_prefetch(from + i, 0, 2);
}

/* RMSNorm of a row: out = x / rms(x) * (centre + weight); out may be x. */
INLINE void norm_row(float *out, const float *x, const float *weight, int64_t width, float eps, float centre) {
    floats parts = {0}, more = {0};
    int64_t i = 0;
    for (; i + 2 * LANES <= width; i += 2 * LANES) {
        floats a = LOAD(x + i), b = LOAD(x + i + LANES);
        parts += a * a;
        more += b * b;
    }
    float total = sum_of(parts + more);
    for (; i < width; i++) total += x[i] * x[i];
    float factor = 1.0f / sqrtf(total / width + eps);
    for (i = 0; i + LANES <= width; i += LANES)
        STORE(out + i, LOAD(x + i) * factor * (LOAD(weight + i) + centre));
    for (; i < width; i++) out[i] = x[i] * factor * (weight[i] + centre);
}

LEVELS static void add_norm_rows(float *out, float *hidden, const float *product, const float *product_norm,
                                 const float *norm, const int64_t *chosen, int64_t begin, int64_t end, int64_t width,
                                 float eps, float centre) {
    for (int64_t i = begin; i < end; i++) {
        int64_t row = chosen ? chosen[i] : i;
        float *to = out + i * width, *residual = hidden + row * width;
        const float *from = residual, *added = product + row * width;
        if (product) {
            if (product_norm) norm_row(to, added, product_norm, width, eps, centre), added = to;
            for (int64_t j = 0; j < width; j++) to[j] = residual[j] + added[j];
            if (!chosen) memcpy(residual, to, width * sizeof(float));
            from = to;
        }
        if (norm) norm_row(to, from, norm, width, eps, centre);
        else if (from != to) memcpy(to, from, width * sizeof(float));
    }
}

/* The residual stream between two products: hidden += product, normalized first where product_norm is given, then
   out = RMSNorm of it, or without norm it itself. All but out may be NULL that is not there.

   out, hidden, product [rows, width]. With chosen, [rows]: out has those rows of hidden and product, which stay as they
   are. */
void hf_add_norm(float *out, float *hidden, const float *product, const float *product_norm, const float *norm,
                 const int64_t *chosen, int64_t rows, int64_t width, float eps, float centre) {
#pragma omp for schedule(static)
    for (int64_t begin = 0; begin < rows; begin += FEW)
        add_norm_rows(out, hidden, product, product_norm, norm, chosen, begin, begin + FEW < rows ? begin + FEW : rows,
                      width, eps, centre);
}

/* What becomes of a product: nothing, or the activation of one half of it times the other. */
enum { PLAIN, GATED_SILU, GATED_GELU };

INLINE floats gated(floats gate, floats up, int64_t form) {
    if (form == GATED_GELU) return 0.5f * gate * (1.0f + tanh_of(0.797884561f * (gate + 0.044715f * gate * gate * gate))) * up;
    floats power = -gate, most = FILL(88.0f);
    return gate / (1.0f + exp_of(choose(power > most, most, power))) * up;
}

/* Up to LANES numbers, the others as filled. */
INLINE floats load_some(const float *from, int64_t count, float filled) {
    if (count >= LANES) return LOAD(from);
    floats values = FILL(filled);
    for (int64_t i = 0; i < count; i++) values[i] = from[i];
    return values;
}

INLINE void store_some(float *to, floats values, int64_t count) {
    if (count >= LANES) STORE(to, values);
    else
        for (int64_t i = 0; i < count; i++) to[i] = values[i];
}

/* Some rows times one panel of a weight; the sums stay in registers. What lies ahead is fetched meanwhile. */
INLINE void multiply_tile(float *out, const float *x, const float *panel, const float *ahead, int64_t num_ahead,
                          const float *bias, int64_t inputs, int64_t outputs, int64_t count, int64_t form,
                          const int rows) {
    floats left[TILE], right[TILE];
    for (int r = 0; r < rows; r++) left[r] = right[r] = FILL(0.0f);
    for (int64_t i = 0; i < inputs; i++) {
        floats a = LOAD(panel + i * PANEL), b = LOAD(panel + i * PANEL + LANES);
        if (i % TILE == 0) fetch(ahead + i / TILE * num_ahead, num_ahead);
        for (int r = 0; r < rows; r++) {
            left[r] += a * x[r * inputs + i];
            right[r] += b * x[r * inputs + i];
        }
    }
    for (int r = 0; r < rows; r++) {
        float *to = out + r * outputs;
        if (form != PLAIN) {
            store_some(to, gated(left[r], right[r], form), count);
            continue;
        }
        floats low = bias ? left[r] + LOAD(bias) : left[r], high = bias ? right[r] + LOAD(bias + LANES) : right[r];
        store_some(to, low, count);
        if (count > LANES) store_some(to + LANES, high, count - LANES);
    }
}

LEVELS static void multiply_rows(float *out, const float *x, const float *panel, const float *bias, int64_t rows,
                                 int64_t inputs, int64_t outputs, int64_t count, int64_t form, int64_t tile) {
    /* The next panel, a part of it for each tile. */
    int64_t tiles = (rows + tile - 1) / tile, num_ahead = tiles < TILE ? (TILE + tiles - 1) / tiles * PANEL : PANEL;
    const float *ahead = panel + inputs * PANEL;
    for (int64_t row = 0; row < rows; row += tile) {
        float *to = out + row * outputs;
        const float *from = x + row * inputs;
#define CASE(n) case n: multiply_tile(to, from, panel, ahead, num_ahead, bias, inputs, outputs, count, form, n); break;
        switch (rows - row < tile ? rows - row : tile) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) }
#undef CASE
        ahead += inputs / TILE * num_ahead;
    }
}

/* out = x @ weight.T + bias, and then as form says.

   x [rows, inputs]; out [rows, outputs]. The weight is laid out in panels, [panels, inputs, PANEL], the last filled up:
   of PANEL outputs, or, gated, of PANEL / 2 of the gate and as many of what it is multiplied with. Each sum goes over
   the inputs in their order, one by one. bias: [panels, PANEL], or NULL. */
void hf_multiply(float *out, const float *x, const float *weight, const float *bias, int64_t rows, int64_t inputs,
                 int64_t outputs, int64_t form) {
    int64_t width = form == PLAIN ? PANEL : PANEL / 2, panels = (outputs + width - 1) / width;
    int64_t tile = HAS_MANY_REGISTERS ? TILE : 3, block = 8 * TILE, threads = omp_get_num_threads();
    while (block > TILE && panels * ((rows + block - 1) / block) < 2 * threads) block /= 2;
    int64_t blocks = (rows + block - 1) / block;
#pragma omp for schedule(static)
    for (int64_t item = 0; item < panels * blocks; item++) {
        int64_t panel = item / blocks, row = item % blocks * block, first = panel * width;
        multiply_rows(out + row * outputs + first, x + row * inputs, weight + panel * inputs * PANEL,
                      bias ? bias + panel * PANEL : NULL, row + block < rows ? block : rows - row, inputs, outputs,
                      outputs - first < width ? outputs - first : width, form, tile);
    }
}
/* One head: normalized where a weight is given, then turned; angles are cosines and sines of half a head. */
INLINE void turn(float *to, const float *from, const float *cosines, const float *sines, int head, const float *weight,
                 float eps, float centre) {
    int half = head / 2;
    float factor = 1.0f;
    if (weight) {
        float total = 0;
        for (int i = 0; i < head; i++) total += from[i] * from[i];
        factor = 1.0f / sqrtf(total / head + eps);
    }
    for (int i = 0; i < half; i++) {
        float a = from[i], b = from[i + half];
        if (weight) {
            a = a * factor * (weight[i] + centre);
            b = b * factor * (weight[i + half] + centre);
        }
        to[i] = a * cosines[i] - b * sines[i];
        to[i + half] = b * cosines[i] + a * sines[i];
    }
}

LEVELS static void store_rows(float *queries, float *keys, float *values, const float *mixed, const float *rotary,
                              const int32_t *tables, int64_t table_width, const int64_t *sequences,
                              const int64_t *positions, int64_t begin, int64_t end, int64_t groups, int64_t sharers,
                              int64_t head, const float *query_norm, const float *key_norm, float eps, float centre) {
    for (int64_t row = begin; row < end; row++) {
        const float *cosines = rotary + positions[row] * head, *sines = cosines + head / 2;
        int64_t block = tables[sequences[row] * table_width + positions[row] / BLOCK], token = positions[row] % BLOCK;
        float key[head];
        for (int64_t group = 0; group < groups; group++) {
            const float *from = mixed + (row * groups + group) * (sharers + 2) * head;
            float *to = queries + (row * groups + group) * sharers * head;
            for (int64_t i = 0; i < sharers; i++)
                turn(to + i * head, from + i * head, cosines, sines, head, query_norm, eps, centre);
            turn(key, from + sharers * head, cosines, sines, head, key_norm, eps, centre);
            float *column = keys + (block * groups + group) * head * BLOCK + token;
            for (int64_t i = 0; i < head; i++) column[i * BLOCK] = key[i];
            memcpy(values + ((block * groups + group) * BLOCK + token) * head, from + (sharers + 1) * head,
                   head * sizeof(float));
        }
    }
}

/* Queries out of the fused projection, turned; keys and values into their places of the cache.

   mixed [rows, groups, sharers + 2, head]; queries [rows, groups, sharers, head]; keys [blocks, groups, head, BLOCK];
   values [blocks, groups, BLOCK, head]; rotary [positions, 2, head / 2]; tables and so on as in hf_attend. */
void hf_store(float *queries, float *keys, float *values, const float *mixed, const float *rotary,
              const int32_t *tables, int64_t table_width, const int64_t *sequences, const int64_t *positions,
              int64_t rows, int64_t groups, int64_t sharers, int64_t head, const float *query_norm,
              const float *key_norm, float eps, float centre) {
#pragma omp for schedule(static)
    for (int64_t begin = 0; begin < rows; begin += FEW)
        store_rows(queries, keys, values, mixed, rotary, tables, table_width, sequences, positions, begin,
                   begin + FEW < rows ? begin + FEW : rows, groups, sharers, head, query_norm, key_norm, eps, centre);
}

/* How attention of a layer is scored. */
typedef struct {
    float scale, softcap; /* no cap: 0 */
    int64_t window;       /* none: 0 */
} scoring;

/* The cached tokens of a sequence, of one group, and those that come after it, which are fetched in good time. */
typedef struct {
    const float *keys, *values; /* of the group in block 0 */
    int64_t stride;             /* floats from a block to the next */
    const int32_t *table;
    int64_t from, to; /* blocks that are seen */
    const int32_t *next_table; /* of who is next, from the first block that is seen */
    int64_t next_blocks;
} stream;

/* Scores of some queries with the tokens of one block; those that a query does not see are -INFINITY. */
INLINE void score_block(float *scores, const float *queries, const float *keys, const float *next, const float *values,
                        const int32_t *positions, int first, int head, const int columns, scoring how) {
    const ints steps = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    floats even[COLUMNS], odd[COLUMNS];
    for (int c = 0; c < columns; c++) even[c] = odd[c] = FILL(0.0f);
    for (int d = 0; d < head; d += 2) {
        floats a = LOAD(keys + d * BLOCK), b = LOAD(keys + (d + 1) * BLOCK);
        fetch(values + d * BLOCK, 2 * BLOCK);
        fetch(next + d * BLOCK, 2 * BLOCK);
        for (int c = 0; c < columns; c++) {
            even[c] += a * queries[c * head + d];
            odd[c] += b * queries[c * head + d + 1];
        }
    }
    for (int c = 0; c < columns; c++) {
        floats score = (even[c] + odd[c]) * how.scale;
        if (how.softcap > 0) score = tanh_of(score / how.softcap) * how.softcap;
        ints place = steps + first, is_seen = place <= positions[c];
        if (how.window > 0) is_seen &= place > positions[c] - (int32_t)how.window;
        STORE(scores + c * CHUNK * BLOCK, choose(is_seen, score, FILL(-INFINITY)));
    }
}

/* Adds the values of some tokens of one block, weighted, in LANES * parts of their dims. */
INLINE void add_block(floats *sums, const float *weights, const float *values, const float *coming, int tokens, int head,
                      const int columns, const int parts) {
    for (int token = 0; token < tokens; token++) {
        fetch(coming + token * head, head);
        for (int part = 0; part < parts; part++) {
            floats value = LOAD(values + token * head + part * LANES);
            for (int c = 0; c < columns; c++) sums[c * parts + part] += value * weights[c * CHUNK * BLOCK + token];
        }
    }
}

/* Keys that are read after those of a block: as far behind the end of its chunk, or of the sequence that is next. */
INLINE const float *coming_keys(const stream *at, int64_t block, int64_t begin, int64_t end) {
    int64_t behind = end + block - begin;
    if (behind < at->to) return at->keys + at->table[behind] * at->stride;
    if (end == at->to && block - begin < at->next_blocks) return at->keys + at->next_table[block - begin] * at->stride;
    return at->keys + at->table[block] * at->stride;
}

/* Adds the values of the blocks of a chunk, in LANES * parts of their dims, to sums scaled by factors. */
INLINE void add_chunk(float *sums, const float *factors, const float *weights, const stream *at, int64_t begin,
                      int64_t end, int tokens, int dim, int head, const int columns, const int parts) {
    floats local[COLUMNS * 2];
    for (int c = 0; c < columns; c++)
        for (int part = 0; part < parts; part++)
            local[c * parts + part] = LOAD(sums + c * head + dim + part * LANES) * factors[c];
    for (int64_t block = begin; block < end; block++)
        add_block(local, weights + (block - begin) * BLOCK, at->values + at->table[block] * at->stride + dim,
                  coming_keys(at, block, begin, end), block + 1 < at->to ? BLOCK : tokens, head, columns, parts);
    for (int c = 0; c < columns; c++)
        for (int part = 0; part < parts; part++) STORE(sums + c * head + dim + part * LANES, local[c * parts + part]);
}

/* Weights of a chunk out of its scores, in place; what was summed before is to be scaled by the factor. */
INLINE float weigh(float *scores, int count, float *top, floats *total) {
    floats most = FILL(*top);
    for (int i = 0; i < count; i += LANES) {
        floats v = LOAD(scores + i);
        most = choose(v > most, v, most);
    }
    float now = max_of(most);
    floats factor = exp_of(FILL(*top - now));
    *top = now;
    *total *= factor;
    for (int i = 0; i < count; i += LANES) {
        floats weight = exp_of(LOAD(scores + i) - now);
        *total += weight;
        STORE(scores + i, weight);
    }
    return factor[0];
}

/* Attention of some queries that see the tokens of one sequence, and of one group, each up to its own position.

   Chunks begin at multiples of CHUNK, so that a query's result is the same whichever others are computed with it. */
INLINE void attend_columns(float *sums, const float *queries, const int32_t *positions, const stream *at, int head,
                           const int columns, scoring how) {
    float scores[COLUMNS * CHUNK * BLOCK] __attribute__((aligned(64)));
    float tops[COLUMNS], factors[COLUMNS];
    floats totals[COLUMNS];
    int tokens = 1; /* of the last block; those behind it may be NaN */
    for (int c = 0; c < columns; c++) {
        tops[c] = -3.0e38f; /* finite, since infinities have no difference */
        totals[c] = FILL(0.0f);
        int last = positions[c] - (int)(at->to - 1) * BLOCK + 1;
        tokens = last > tokens ? last : tokens;
    }
    memset(sums, 0, columns * head * sizeof(float));
    for (int64_t begin = at->from, end; begin < at->to; begin = end) {
        end = (begin / CHUNK + 1) * CHUNK < at->to ? (begin / CHUNK + 1) * CHUNK : at->to;
        for (int64_t block = begin; block < end; block++) {
            const float *keys = at->keys + at->table[block] * at->stride;
            const float *next = block + 1 < end ? at->keys + at->table[block + 1] * at->stride : keys;
            score_block(scores + (block - begin) * BLOCK, queries, keys, next,
                        at->values + at->table[block] * at->stride, positions, (int)block * BLOCK, head, columns, how);
        }
        for (int c = 0; c < columns; c++)
            factors[c] = weigh(scores + c * CHUNK * BLOCK, (int)(end - begin) * BLOCK, tops + c, totals + c);
        int dim = 0;
        for (; dim + 2 * LANES <= head; dim += 2 * LANES)
            add_chunk(sums, factors, scores, at, begin, end, tokens, dim, head, columns, 2);
        if (dim < head) add_chunk(sums, factors, scores, at, begin, end, tokens, dim, head, columns, 1);
    }
    for (int c = 0; c < columns; c++) {
        float share = 1.0f / sum_of(totals[c]);
        for (int i = 0; i < head; i += LANES) STORE(sums + c * head + i, LOAD(sums + c * head + i) * share);
    }
}

/* As attend_columns; fewer of them are filled up with empty ones. */
LEVELS static void attend_queries(float *sums, const float *queries, const int32_t *positions, const stream *at,
                                  int64_t head, int columns, scoring how) {
    switch (columns) {
    case 1: attend_columns(sums, queries, positions, at, (int)head, 1, how); break;
    case 2: attend_columns(sums, queries, positions, at, (int)head, 2, how); break;
    case 4: attend_columns(sums, queries, positions, at, (int)head, 4, how); break;
    default: attend_columns(sums, queries, positions, at, (int)head, COLUMNS, how);
    }
}

/* What attention is computed of; see hf_attend. */
typedef struct {
    float *outs;
    const float *queries, *keys, *values;
    const int32_t *tables;
    int64_t table_width;
    const int64_t *sequences, *positions;
    int64_t rows, groups, sharers, head;
    scoring how;
} work;

INLINE int64_t first_block(const work *w, int64_t row) {
    int64_t position = w->positions[row];
    return w->how.window > 0 && position >= w->how.window ? (position - w->how.window + 1) / BLOCK : 0;
}

/* Some rows of one sequence, positions rising, and one group; next: the row of the same group that follows. */
static void attend_rows(const work *w, int64_t row, int64_t count, int64_t group, int64_t next) {
    int64_t head = w->head, size = head * BLOCK, before = group * size;
    stream at = {w->keys + before,
                 w->values + before,
                 w->groups * size,
                 w->tables + w->sequences[row] * w->table_width,
                 first_block(w, row),
                 w->positions[row + count - 1] / BLOCK + 1,
                 NULL,
                 0};
    if (next < w->rows) {
        at.next_table = w->tables + w->sequences[next] * w->table_width + first_block(w, next);
        at.next_blocks = w->positions[next] / BLOCK + 1 - first_block(w, next);
    }
    float queries[COLUMNS * head], sums[COLUMNS * head];
    int32_t positions[COLUMNS];
    for (int64_t first = 0; first < w->sharers; first += COLUMNS) {
        int64_t heads = w->sharers - first < COLUMNS ? w->sharers - first : COLUMNS, used = heads * count;
        int columns = used <= 2 ? (int)used : used <= 4 ? 4 : COLUMNS;
        for (int64_t c = 0; c < columns; c++) {
            int64_t query = c < used ? c : 0, line = row + query / heads;
            int64_t from = (line * w->groups + group) * w->sharers + first + query % heads;
            positions[c] = (int32_t)w->positions[line];
            memcpy(queries + c * head, w->queries + from * head, head * sizeof(float));
        }
        attend_queries(sums, queries, positions, &at, head, columns, w->how);
        for (int64_t c = 0; c < used; c++) {
            int64_t to = (((row + c / heads) * w->groups + group) * w->sharers + first + c % heads) * head;
            memcpy(w->outs + to, sums + c * head, head * sizeof(float));
        }
    }
}

/* Attention of rows, each with the tokens of its own sequence up to its position, which are in the cache.

   outs, queries [rows, groups, sharers, head]; tables [sequences, table_width] int32: the blocks of each sequence;
   sequences [rows]: which table a row has, those of one sequence side by side, their positions rising. */
void hf_attend(float *outs, const float *queries, const float *keys, const float *values, const int32_t *tables,
               int64_t table_width, const int64_t *sequences, const int64_t *positions, int64_t rows, int64_t groups,
               int64_t sharers, int64_t head, float scale, float softcap, int64_t window) {
    const work w = {outs,      queries, keys,   values,  tables, table_width, sequences,
                    positions, rows,    groups, sharers, head,   {scale, softcap, window}};
    /* Rows that one load of the keys serves, where they are of one sequence. */
    int64_t together = sharers < COLUMNS ? COLUMNS / sharers : 1, tiles = (rows + together - 1) / together;
#pragma omp for schedule(dynamic, 2)
    for (int64_t item = 0; item < tiles * groups; item++) {
        int64_t group = item % groups, row = item / groups * together;
        int64_t end = row + together < rows ? row + together : rows;
        for (int64_t count; row < end; row += count) {
            count = 1;
            while (row + count < end && sequences[row + count] == sequences[row]) count++;
            attend_rows(&w, row, count, group, row + count);
        }
    }
}

/* A layer's weights, norms, and how its attention is scored; NULL: it has none. Matrices as hf_multiply wants them. */
typedef struct {
    const float *input_norm, *qkv, *qkv_bias, *query_norm, *key_norm, *projection, *attention_norm;
    const float *mlp_norm, *gate_up, *down, *output_norm;
    scoring how;
} layer;

/* What is the same in all layers. */
typedef struct {
    int64_t hidden, groups, sharers, head, inner; /* widths; inner: of the activations within the MLP */
    int64_t activation;                           /* GATED_SILU or GATED_GELU */
    const float *rotary;
    float eps, centre;
} shape;

/* Tokens to be computed. */
typedef struct {
    int64_t rows, table_width;
    const int64_t *sequences, *positions;
    const int32_t *tables;
    float *cache; /* of each layer all keys, then all values */
    int64_t stride; /* floats from a layer's keys to its values, and on to the next layer's keys */
    float *hidden, *product; /* [rows, shape.hidden] */
    float *space; /* [rows, space_width] for what lies between */
} step;

/* Numbers of a row that lie between hidden and product. */
static int64_t space_width(const shape *f) {
    return f->hidden + (3 * f->sharers + 2) * f->groups * f->head + f->inner;
}

/* Half a layer, attention or MLP: adds the product of the half before, where there is one, leaves its own. */
static void half_layer(const shape *f, const layer *l, const step *s, int64_t half) {
    const float *before = half ? s->product : NULL;
    int64_t queries_width = f->groups * f->sharers * f->head, mixed_width = queries_width + 2 * f->groups * f->head;
    float *normed = s->space, *mixed = normed + s->rows * f->hidden, *queries = mixed + s->rows * mixed_width;
    float *context = queries + s->rows * queries_width, *inner = context + s->rows * queries_width;
    float *keys = s->cache + half / 2 * 2 * s->stride, *values = keys + s->stride;
    l += half / 2;
    if (half % 2) {
        hf_add_norm(normed, s->hidden, before, l->attention_norm, l->mlp_norm, NULL, s->rows, f->hidden, f->eps,
                    f->centre);
        hf_multiply(inner, normed, l->gate_up, NULL, s->rows, f->hidden, f->inner, f->activation);
        hf_multiply(s->product, inner, l->down, NULL, s->rows, f->inner, f->hidden, PLAIN);
        return;
    }
    hf_add_norm(normed, s->hidden, before, half ? l[-1].output_norm : NULL, l->input_norm, NULL, s->rows, f->hidden,
                f->eps, f->centre);
    hf_multiply(mixed, normed, l->qkv, l->qkv_bias, s->rows, f->hidden, mixed_width, PLAIN);
    hf_store(queries, keys, values, mixed, f->rotary, s->tables, s->table_width, s->sequences, s->positions, s->rows,
             f->groups, f->sharers, f->head, l->query_norm, l->key_norm, f->eps, f->centre);
    hf_attend(context, queries, keys, values, s->tables, s->table_width, s->sequences, s->positions, s->rows,
              f->groups, f->sharers, f->head, l->how.scale, l->how.softcap, l->how.window);
    hf_multiply(s->product, context, l->projection, NULL, s->rows, queries_width, f->hidden, PLAIN);
}

/* Where the rows of a thread begin, so that a sequence's rows, which look at one another, are all of one thread. */
static int64_t border(const step *s, int64_t thread, int64_t threads) {
    int64_t row = thread * s->rows / threads / TILE * TILE;
    while (row > 0 && row < s->rows && s->sequences[row] == s->sequences[row - 1]) row++;
    return row;
}

/* Whether there is enough for each thread, and about the same, when sequences are dealt out. */
static int is_divisible(const step *s, int64_t threads) {
    if (s->rows < 2 * TILE * threads) return 0;
    for (int64_t thread = 0; thread < threads; thread++) {
        int64_t begin = border(s, thread, threads), end = thread + 1 < threads ? border(s, thread + 1, threads) : s->rows;
        if (4 * (end - begin) * threads > 5 * s->rows) return 0;
    }
    return 1;
}

/* Half layers from first to last, each of which leaves in product what the next one, or hf_output, adds to hidden: where
   a weight is shared among ranks, their sum has to come between.

   With many rows each thread computes some of them from first to last, by itself, and waits for nobody. With few, or
   few sequences, all threads share each operation: the weights are read once only. */
void hf_layers(const shape *f, const layer *layers, const step *s, int64_t first, int64_t last) {
    int64_t threads = omp_get_max_threads();
    if (threads == 1 || !is_divisible(s, threads)) {
#pragma omp parallel
        for (int64_t half = first; half < last; half++) half_layer(f, layers, s, half);
        return;
    }
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t thread = 0; thread < threads; thread++) {
        int64_t begin = border(s, thread, threads), end = thread + 1 < threads ? border(s, thread + 1, threads) : s->rows;
        for (int64_t row = begin; row < end; row += MANY) {
            step part = *s;
            part.rows = row + MANY < end ? MANY : end - row;
            part.sequences += row;
            part.positions += row;
            part.hidden += row * f->hidden;
            part.product += row * f->hidden;
            part.space += row * space_width(f);
#pragma omp parallel num_threads(1)
            for (int64_t half = first; half < last; half++) half_layer(f, layers, &part, half);
        }
    }
}

/* What lies before the first layer and behind the last one; NULL: this stage has none. */
typedef struct {
    const float *embedding;           /* [tokens, hidden] */
    const float *product_norm, *norm; /* of the last layer's product, and of the sum */
    const float *output;              /* as hf_multiply wants it */
    int64_t outputs, real;            /* numbers in a row of logits, and how many of them are tokens' */
    float factor, cap;                /* of embeddings, and of logits, 0: no cap */
} vocabulary;

LEVELS static void cap_row(float *logits, int64_t width, float cap) {
    for (int64_t i = 0; i < width; i += LANES)
        store_some(logits + i, tanh_of(load_some(logits + i, width - i, 0.0f) / cap) * cap, width - i);
}

static void output_rows(float *out, float *sums, const shape *f, const vocabulary *v, float *hidden,
                        const float *product, const int64_t *chosen, int64_t rows) {
    hf_add_norm(sums, hidden, product, v->product_norm, v->norm, chosen, rows, f->hidden, f->eps, f->centre);
    if (!v->output) return;
    hf_multiply(out, sums, v->output, NULL, rows, f->hidden, v->outputs, PLAIN);
    if (v->cap == 0) return;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) cap_row(out + row * v->outputs, v->outputs, v->cap);
}

/* What follows the layers: chosen rows of hidden plus product, normalized, times the output weight; see hf_add_norm and
   hf_multiply. sums: [rows, shape.hidden]. Without an output weight sums are the result, and without norms the sum. */
void hf_output(float *out, float *sums, const shape *f, const vocabulary *v, float *hidden, const float *product,
               const int64_t *chosen, int64_t rows) {
#pragma omp parallel
    output_rows(out, sums, f, v, hidden, product, chosen, rows);
}

INLINE words mix(words v) {
    v = (v ^ (v >> 30)) * 0xBF58476D1CE4E5B9ull;
    v = (v ^ (v >> 27)) * 0x94D049BB133111EBull;
    return v ^ (v >> 31);
}

/* Standard Gumbel noise of 16 columns; see sampling.py, which has the same in torch. */
INLINE floats noise(uint64_t key, int64_t column) {
    const words steps = {0, 1, 2, 3, 4, 5, 6, 7};
    words ids = steps + (uint64_t)(column + 1);
    words low = mix(key + ids * 0x9E3779B97F4A7C15ull) >> 32, high = mix(key + (ids + 8) * 0x9E3779B97F4A7C15ull) >> 32;
    half_floats a = __builtin_convertvector(low, half_floats), b = __builtin_convertvector(high, half_floats);
    pair both = {.halves = {a, b}};
    floats u = (both.whole + 0.5f) * 2.3283064e-10f;
    ints is_one = u >= FILL(1.0f);
    u = choose(is_one, FILL(0.99999994f), u);
    floats w = 1.0f - u;
    floats exponential = ((w - 1.0f) + u) / w - log_of(w);
    return -log_of(exponential);
}

/* What stands in the place of a token that could not be sampled; see sampling.py. */
enum { NOT_FINITE = -1, NOTHING_LEFT = -2 };

LEVELS static void sample_row(double *found, int64_t rows, const float *from, int64_t key, float temperature,
                              int is_greedy, int64_t real, int64_t first) {
    float factor = 1.0f / temperature;
    floats best = FILL(-INFINITY), most = FILL(-INFINITY), total = {0};
    ints place = {0};
    const ints steps = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int64_t i = 0; i < real; i += LANES) {
        floats z = load_some(from + i, real - i, -INFINITY) * factor;
        most = choose(z > most, z, most);
    }
    float top = max_of(most);
    for (int64_t i = 0; i < real; i += LANES) {
        floats z = load_some(from + i, real - i, -INFINITY) * factor;
        total += exp_of(z - top);
        floats score = is_greedy ? z : z + noise((uint64_t)key, first + i);
        ints is_better = score > best;
        best = choose(is_better, score, best);
        place = (place & ~is_better) | ((steps + (int32_t)i) & is_better);
    }
    int winner = 0;
    for (int lane = 1; lane < LANES; lane++)
        if (best[lane] > best[winner] || (best[lane] == best[winner] && place[lane] < place[winner])) winner = lane;
    found[0] = best[winner];
    found[rows] = (double)(first + place[winner]);
    found[2 * rows] = real > 0 ? from[place[winner]] * factor : -INFINITY;
    found[3 * rows] = top;
    found[4 * rows] = found[5 * rows] = sum_of(total);
}

/* The best column of each row, by logits over temperature plus noise, and what its log-probability is made of.

   logits [rows, width], of which the first real columns are the vocabulary's, from id first on; found [6, rows]: best
   score, its id, its scaled logit, the largest scaled logit, the sum of exp(scaled - largest). Scaled logits below
   floors are not chosen; keys of rows whose greedy is set are not used. */
void hf_sample(double *found, const float *logits, const int64_t *keys, const float *temperatures,
               const uint8_t *greedy, int64_t rows, int64_t width, int64_t real, int64_t first) {
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t row = 0; row < rows; row++)
        sample_row(found + row, rows, logits + row * width, keys[row], temperatures[row], greedy[row], real, first);
}

/* The logarithm of the sum of exponentials over all ranks, of which each has its largest and its sum beside that. */
static double normalizer(const double *largest, const double *totals, int64_t ranks, int64_t stride) {
    double top = largest[0], total = 0;
    for (int64_t rank = 1; rank < ranks; rank++) {
        double other = largest[rank * stride];
        top = other > top || isnan(other) ? other : top;
    }
    for (int64_t rank = 0; rank < ranks; rank++)
        if (totals[rank * stride] != 0) total += totals[rank * stride] * exp(largest[rank * stride] - top);
    return top + log(total);
}

/* The winners of all ranks' candidates: tokens, log_probs and sampled_log_probs [rows] of sampling.py, where the same is
   written in torch. candidates [ranks, lines, rows]: the 6 lines of hf_sample, or also the candidate's edited logit and
   the largest edited one. */
void hf_settle(int64_t *tokens, float *log_probs, float *sampled_log_probs, const double *candidates,
               const uint8_t *greedy, int64_t ranks, int64_t lines, int64_t rows) {
    const int64_t stride = lines * rows;
    for (int64_t row = 0; row < rows; row++) {
        const double *first = candidates + row, *best = first;
        for (const double *each = first; each < first + ranks * stride; each += stride)
            if (each[0] > best[0]) best = each;
        int64_t edited = lines == 6 ? 2 : 6;
        double all = normalizer(first + 3 * rows, first + 4 * rows, ranks, stride);
        double kept = normalizer(first + (edited + 1) * rows, first + 5 * rows, ranks, stride);
        tokens[row] = !isfinite(all) ? NOT_FINITE : best[0] == -INFINITY ? NOTHING_LEFT : (int64_t)best[rows];
        log_probs[row] = (float)(best[2 * rows] - all);
        sampled_log_probs[row] = greedy[row] ? 0.0f : (float)(best[edited * rows] - kept);
    }
}

/* Sequences in slots that get their next tokens: the arrays of scheduler.py, sampling.py and records.py. */
typedef struct {
    int64_t capacity, num_stops, version;
    int32_t *tokens;                      /* [slots, capacity] */
    int64_t *lengths;                     /* [slots]: of what is known; the last token is not in the cache */
    const int64_t *ends, *no_stop_before; /* [slots]: lengths at which they end, and below which no token stops them */
    const int32_t *stops;                 /* [slots, num_stops] */
    const int64_t *keys;                  /* [slots] */
    const float *temperatures;            /* [slots] */
    const uint8_t *greedy;                /* [slots] */
    float *log_probs, *sampled_log_probs; /* [slots, capacity] */
    int32_t *versions;                    /* [slots, capacity] */
    int64_t *failures;                    /* [slots]: what stands in the place of a token; 0: nothing failed */
} slots;

/* See row_keys of sampling.py. */
static int64_t row_key(int64_t key, int64_t position) {
    words v = mix(mix((words){(uint64_t)key}) + (uint64_t)position);
    return (int64_t)v[0];
}

/* Sample a slot's next token. */
static void choose_token(const slots *d, int64_t slot, const float *logits, int64_t real) {
    int64_t length = d->lengths[slot], at = slot * d->capacity + length, token;
    double found[6];
    float log_prob, sampled;
    sample_row(found, 1, logits, row_key(d->keys[slot], length), d->temperatures[slot], d->greedy[slot], real, 0);
    hf_settle(&token, &log_prob, &sampled, found, d->greedy + slot, 1, 6, 1);
    if (token < 0) {
        d->failures[slot] = token;
        return;
    }
    d->tokens[at] = (int32_t)token;
    d->log_probs[at] = log_prob;
    d->sampled_log_probs[at] = sampled;
    d->versions[at] = (int32_t)d->version;
    d->lengths[slot] = length + 1;
}

static int goes_on(const slots *d, int64_t slot) {
    int64_t length = d->lengths[slot];
    if (d->failures[slot] || length >= d->ends[slot]) return 0;
    int32_t last = d->tokens[slot * d->capacity + length - 1];
    for (int64_t i = 0; i < d->num_stops && length >= d->no_stop_before[slot]; i++)
        if (d->stops[slot * d->num_stops + i] == last) return 0;
    return 1;
}

/* What a team decodes: as a step, with the slots as its sequences, of which those that end leave it. */
typedef struct {
    step tokens;
    int64_t *sequences, *positions; /* those of tokens */
    float *sums, *logits;           /* [rows, shape.hidden] and [rows, vocabulary.outputs] */
} batch;

static void decode_batch(const shape *f, const layer *layers, int64_t num_layers, const vocabulary *v, const slots *d,
                         batch *b, int64_t most) {
    const step *s = &b->tokens;
    for (int64_t i = 0; i < most && s->rows > 0; i++) {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < s->rows; row++) {
            int64_t slot = s->sequences[row], token = d->tokens[slot * d->capacity + s->positions[row]];
            for (int64_t j = 0; j < f->hidden; j++)
                s->hidden[row * f->hidden + j] = v->embedding[token * f->hidden + j] * v->factor;
        }
        for (int64_t half = 0; half < 2 * num_layers; half++) half_layer(f, layers, s, half);
        output_rows(b->logits, b->sums, f, v, s->hidden, s->product, NULL, s->rows);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < s->rows; row++)
            choose_token(d, s->sequences[row], b->logits + row * v->outputs, v->real);
#pragma omp single
        {
            int64_t kept = 0;
            for (int64_t row = 0; row < s->rows; row++)
                if (goes_on(d, s->sequences[row])) {
                    b->sequences[kept] = s->sequences[row];
                    b->positions[kept++] = d->lengths[s->sequences[row]] - 1;
                }
            b->tokens.rows = kept;
        }
    }
}

/* Every so many of the chosen slots are a batch. */
static batch deal(const shape *f, const vocabulary *v, const slots *d, const batch *all, const int64_t *chosen,
                  int64_t begin, int64_t every) {
    batch b = *all;
    int64_t count = all->tokens.rows, first = 0;
    for (int64_t other = 0; other < begin; other++) first += (count - other + every - 1) / every;
    b.sequences += first, b.positions += first;
    b.tokens.sequences = b.sequences, b.tokens.positions = b.positions;
    b.tokens.hidden += first * f->hidden, b.tokens.product += first * f->hidden;
    b.tokens.space += first * space_width(f);
    b.sums += first * f->hidden, b.logits += first * v->outputs;
    b.tokens.rows = 0;
    for (int64_t i = begin; i < count; i += every) {
        b.sequences[b.tokens.rows] = chosen[i];
        b.positions[b.tokens.rows++] = d->lengths[chosen[i]] - 1;
    }
    return b;
}

/* Up to so many tokens of each chosen slot, one after the other, up to where it ends; the cache has room for them.

   With many slots each thread decodes some of them by itself, and waits for nobody in between; with few, all threads
   share each operation, so that the weights are read once only. */
void hf_decode(const shape *f, const layer *layers, int64_t num_layers, const vocabulary *v, const slots *d,
               const batch *all, const int64_t *chosen, int64_t most) {
    int64_t threads = omp_get_max_threads();
    if (threads == 1 || all->tokens.rows < 2 * TILE * threads) {
        batch b = deal(f, v, d, all, chosen, 0, 1);
#pragma omp parallel
        decode_batch(f, layers, num_layers, v, d, &b, most);
        return;
    }
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t thread = 0; thread < threads; thread++) {
        batch b = deal(f, v, d, all, chosen, thread, threads);
#pragma omp parallel num_threads(1)
        decode_batch(f, layers, num_layers, v, d, &b, most);
    }
}

LEVELS static void sum_row(double *to, const float *from, float floor, float top, uint32_t prefix, int64_t width,
                           int64_t shift) {
    memset(to, 0, 256 * sizeof *to);
    for (int64_t i = 0; i < width; i += LANES) {
        floats z = load_some(from + i, width - i, -INFINITY);
        ints bits = (ints)z;
        uints order = (uints)(bits ^ ((bits >> 31) | INT32_MIN));
        ints is_wanted = (z >= FILL(floor)) & (z > FILL(-INFINITY));
        if (shift < 24) is_wanted &= (order >> (uint32_t)(shift + 8)) == (uints){0} + prefix;
        int32_t any = 0;
        for (int lane = 0; lane < LANES; lane++) any |= is_wanted[lane];
        if (!any) continue;
        floats weights = exp_of(z - top);
        uints digits = (order >> (uint32_t)shift) & 255;
        for (int lane = 0; lane < LANES; lane++)
            if (is_wanted[lane]) to[digits[lane]] += weights[lane];
    }
}

/* Weights of columns, exp(scaled - largest), summed for each row by eight bits of the place in the order of fp32 numbers:
   those above the last shift bits. Only of columns whose higher bits are prefix, and which are not below floor.

   sums [rows, 256] fp64; scaled [rows, width]; floors, largest [rows]; prefixes [rows]. See edits.py, which has the same
   in torch. */
void hf_sum_by_digit(double *sums, const float *scaled, const float *floors, const float *largest,
                     const int64_t *prefixes, int64_t rows, int64_t width, int64_t shift) {
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t row = 0; row < rows; row++)
        sum_row(sums + row * 256, scaled + row * width, floors[row], largest[row], (uint32_t)prefixes[row], width, shift);
}
