/* The innermost loops of kernels.c, in vectors of LANES numbers; each level of a processor includes this once.

   Vectors are GCC's own. They are as wide as the processor's: GCC takes wider ones through memory, number by number. */

#include <math.h>
#include <string.h>

#include "kernels.h"

#define INLINE static inline __attribute__((always_inline))
#define BYTES (4 * LANES)
#define ROWS (LANES == 16 ? TILE : 6) /* rows of a product whose sums fit into the registers */
#define WIDE (LANES == 16 ? COLUMNS : COLUMNS / 2) /* columns whose sums fit into the registers */

typedef float floats __attribute__((vector_size(BYTES), aligned(4)));
typedef int32_t ints __attribute__((vector_size(BYTES), aligned(4)));
typedef uint32_t uints __attribute__((vector_size(BYTES), aligned(4)));
typedef uint64_t words __attribute__((vector_size(BYTES), aligned(8)));
typedef double doubles __attribute__((vector_size(BYTES), aligned(8)));
typedef float half_floats __attribute__((vector_size(BYTES / 2), aligned(4)));

#define LOAD(p) (*(const floats *)(p))
#define STORE(p, v) (*(floats *)(p) = (v))
#define FILL(x) ((floats){0} + (x))

static const int32_t STEPS[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
static const uint64_t LONG_STEPS[8] = {0, 1, 2, 3, 4, 5, 6, 7};

INLINE floats choose(ints mask, floats yes, floats no) { return (floats)(((ints)yes & mask) | ((ints)no & ~mask)); }

typedef union {
    floats whole;
    half_floats halves[2];
    float parts[LANES];
} parted;

INLINE float sum_of(floats v) {
    parted p = {.whole = v};
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) p.parts[i] += p.parts[i + half];
    return p.parts[0];
}

INLINE float max_of(floats v) {
    parted p = {.whole = v};
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) p.parts[i] = p.parts[i] > p.parts[i + half] ? p.parts[i] : p.parts[i + half];
    return p.parts[0];
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

static void add_norm_rows(float *out, float *hidden, const float *product, const float *product_norm,
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

/* Some rows times two vectors of columns of a panel; the sums stay in registers. What lies ahead is fetched meanwhile. */
INLINE void multiply_tile(float *out, const float *x, const float *panel, const float *ahead, int64_t num_ahead,
                          const float *bias, int64_t inputs, int64_t outputs, int64_t count, int64_t form,
                          const int rows) {
    floats left[TILE], right[TILE];
    for (int r = 0; r < rows; r++) left[r] = right[r] = FILL(0.0f);
    for (int64_t i = 0; i < inputs; i++) {
        floats a = LOAD(panel + i * PANEL), b = LOAD(panel + i * PANEL + PANEL / 2);
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
        store_some(to, bias ? left[r] + LOAD(bias) : left[r], count);
        if (count > PANEL / 2)
            store_some(to + PANEL / 2, bias ? right[r] + LOAD(bias + PANEL / 2) : right[r], count - PANEL / 2);
    }
}

static void multiply_rows(float *out, const float *x, const float *panel, const float *bias, int64_t rows,
                          int64_t inputs, int64_t outputs, int64_t count, int64_t form) {
    /* The next panel, a part of it for each tile. */
    int64_t tiles = (rows + ROWS - 1) / ROWS, num_ahead = tiles < TILE ? (TILE + tiles - 1) / tiles * PANEL : PANEL;
    const float *ahead = panel + inputs * PANEL;
    for (int64_t row = 0; row < rows; row += ROWS) {
        const float *from = x + row * inputs;
        for (int64_t first = 0; first < PANEL / 2 && first < count; first += LANES) {
            float *to = out + row * outputs + first;
            const float *columns = panel + first, *added = bias ? bias + first : NULL;
            int64_t fetched = first ? 0 : num_ahead;
#define CASE(n) case n: multiply_tile(to, from, columns, ahead, fetched, added, inputs, outputs, count - first, form, n); break;
            switch (rows - row < ROWS ? rows - row : ROWS) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) }
#undef CASE
        }
        ahead += inputs / TILE * num_ahead;
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

static void store_rows(float *queries, float *keys, float *values, const float *mixed, const float *rotary,
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

/* Scores of some queries with LANES of the tokens of one block; those that a query does not see are -INFINITY. */
INLINE void score_tokens(float *scores, const float *queries, const float *keys, const float *next, const float *values,
                         const int32_t *positions, int first, int head, const int columns, const int fetches,
                         scoring how) {
    floats even[COLUMNS], odd[COLUMNS];
    for (int c = 0; c < columns; c++) even[c] = odd[c] = FILL(0.0f);
    for (int d = 0; d < head; d += 2) {
        floats a = LOAD(keys + d * BLOCK), b = LOAD(keys + (d + 1) * BLOCK);
        if (fetches) {
            fetch(values + d * BLOCK, 2 * BLOCK);
            fetch(next + d * BLOCK, 2 * BLOCK);
        }
        for (int c = 0; c < columns; c++) {
            even[c] += a * queries[c * head + d];
            odd[c] += b * queries[c * head + d + 1];
        }
    }
    for (int c = 0; c < columns; c++) {
        floats score = (even[c] + odd[c]) * how.scale;
        if (how.softcap > 0) score = tanh_of(score / how.softcap) * how.softcap;
        ints place = *(const ints *)STEPS + first, is_seen = place <= positions[c];
        if (how.window > 0) is_seen &= place > positions[c] - (int32_t)how.window;
        STORE(scores + c * CHUNK * BLOCK, choose(is_seen, score, FILL(-INFINITY)));
    }
}

INLINE void score_block(float *scores, const float *queries, const float *keys, const float *next, const float *values,
                        const int32_t *positions, int first, int head, const int columns, scoring how) {
    const int wide = columns < WIDE ? columns : WIDE;
    for (int token = 0; token < BLOCK; token += LANES)
        for (int c = 0; c < columns; c += wide)
            score_tokens(scores + c * CHUNK * BLOCK + token, queries + c * head, keys + token, next, values,
                         positions + c, first + token, head, wide, token + c == 0, how);
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
        for (; WIDE == COLUMNS && dim + 2 * LANES <= head; dim += 2 * LANES)
            add_chunk(sums, factors, scores, at, begin, end, tokens, dim, head, columns, 2);
        for (; dim < head; dim += LANES)
            add_chunk(sums, factors, scores, at, begin, end, tokens, dim, head, columns, 1);
    }
    for (int c = 0; c < columns; c++) {
        float share = 1.0f / sum_of(totals[c]);
        for (int i = 0; i < head; i += LANES) STORE(sums + c * head + i, LOAD(sums + c * head + i) * share);
    }
}

/* As attend_columns; fewer of them are filled up with empty ones. */
static void attend_queries(float *sums, const float *queries, const int32_t *positions, const stream *at,
                           int64_t head, int columns, scoring how) {
    switch (columns) {
    case 1: attend_columns(sums, queries, positions, at, (int)head, 1, how); break;
    case 2: attend_columns(sums, queries, positions, at, (int)head, 2, how); break;
    case 4: attend_columns(sums, queries, positions, at, (int)head, 4, how); break;
    default: attend_columns(sums, queries, positions, at, (int)head, COLUMNS, how);
    }
}

static void cap_row(float *logits, int64_t width, float cap) {
    for (int64_t i = 0; i < width; i += LANES)
        store_some(logits + i, tanh_of(load_some(logits + i, width - i, 0.0f) / cap) * cap, width - i);
}

INLINE words mix(words v) { MIX(v) }

/* Numbers below 2^32, rounded once: they are the last bits of doubles from 2^52 on. */
INLINE half_floats rounded(words v) {
    const uint64_t large = 0x4330000000000000ull;
    return __builtin_convertvector((doubles)(v | large) - 4503599627370496.0, half_floats);
}

/* Standard Gumbel noise of LANES columns; see sampling.py, which has the same in torch. */
INLINE floats noise(uint64_t key, int64_t column) {
    words ids = *(const words *)LONG_STEPS + (uint64_t)(column + 1);
    words low = mix(key + ids * 0x9E3779B97F4A7C15ull) >> 32;
    words high = mix(key + (ids + LANES / 2) * 0x9E3779B97F4A7C15ull) >> 32;
    parted both = {.halves = {rounded(low), rounded(high)}};
    floats u = (both.whole + 0.5f) * 2.3283064e-10f;
    ints is_one = u >= FILL(1.0f);
    u = choose(is_one, FILL(0.99999994f), u);
    floats w = 1.0f - u;
    floats exponential = ((w - 1.0f) + u) / w - log_of(w);
    return -log_of(exponential);
}

static void sample_row(double *found, int64_t rows, const float *from, int64_t key, float temperature,
                       int is_greedy, int64_t real, int64_t first) {
    float factor = 1.0f / temperature;
    floats best = FILL(-INFINITY), most = FILL(-INFINITY), total = {0};
    ints place = {0};
    const ints steps = *(const ints *)STEPS;
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

static void sum_row(double *to, const float *from, float floor, float top, uint32_t prefix, int64_t width,
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

const vectors LEVEL = {
    BYTES, add_norm_rows, multiply_rows, store_rows, attend_queries, cap_row, sample_row, sum_row,
};
