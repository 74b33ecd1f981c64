/* The small operations of decoding on a CPU, fp32: norm, rotary embedding, attention over a paged cache, sampling.

   Matrix products are oneDNN's, through torch. What is here is all that stands between them: each a single pass over
   memory, split over OpenMP's threads, which are those that torch has (its libgomp is loaded first). Vectors are GCC's
   own, so that the same source runs on any machine; on x86 it is compiled for three levels, and the best is chosen when
   the library is loaded.

   A token's result is the same bits whatever other tokens are computed beside it: no sum depends on the batch. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define LEVELS __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define LEVELS
#endif
#define INLINE static inline __attribute__((always_inline))

#define LANES 16
#define BLOCK 16 /* tokens of a block of the cache: BLOCK_TOKENS of kv_cache.py */
#define MAX_SHARERS 8
#define PARTS 8 /* pieces that a loop over rows is split into */

typedef float floats __attribute__((vector_size(64), aligned(4)));
typedef int32_t ints __attribute__((vector_size(64), aligned(4)));
typedef uint64_t words __attribute__((vector_size(64), aligned(8)));
typedef float half_floats __attribute__((vector_size(32), aligned(4)));

#define LOAD(p) (*(const floats *)(p))
#define STORE(p, v) (*(floats *)(p) = (v))
#define FILL(x) ((floats){0} + (x))

INLINE floats choose(ints mask, floats yes, floats no) { return (floats)(((ints)yes & mask) | ((ints)no & ~mask)); }

INLINE float sum_of(floats v) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += v[i];
    return total;
}

INLINE float max_of(floats v) {
    float most = v[0];
    for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
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

/* RMSNorm of rows: out = x / rms(x) * (centre + weight). */
LEVELS static void norm_rows(float *out, const float *x, const float *weight, int64_t begin, int64_t end, int64_t width,
                             float eps, float centre) {
    for (int64_t row = begin; row < end; row++) {
        const float *from = x + row * width;
        float *to = out + row * width;
        floats parts = {0}, more = {0};
        float total = 0;
        int64_t i = 0;
        for (; i + 2 * LANES <= width; i += 2 * LANES) {
            floats a = LOAD(from + i), b = LOAD(from + i + LANES);
            parts += a * a;
            more += b * b;
        }
        total = sum_of(parts + more);
        for (; i < width; i++) total += from[i] * from[i];
        float factor = 1.0f / sqrtf(total / width + eps);
        for (i = 0; i + LANES <= width; i += LANES)
            STORE(to + i, LOAD(from + i) * factor * (LOAD(weight + i) + centre));
        for (; i < width; i++) to[i] = from[i] * factor * (weight[i] + centre);
    }
}

void hf_rms_norm(float *out, const float *x, const float *weight, int64_t rows, int64_t width, float eps, float centre) {
#pragma omp parallel for schedule(static) if (rows * width > 16384)
    for (int64_t part = 0; part < PARTS; part++)
        norm_rows(out, x, weight, part * rows / PARTS, (part + 1) * rows / PARTS, width, eps, centre);
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
                              const int64_t *positions, const int64_t *places, int64_t begin, int64_t end,
                              int64_t groups, int64_t sharers, int64_t head, const float *query_norm,
                              const float *key_norm, float eps, float centre) {
    for (int64_t row = begin; row < end; row++) {
        const float *cosines = rotary + positions[row] * head, *sines = cosines + head / 2;
        int64_t block = places[row] / BLOCK, token = places[row] % BLOCK;
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
   values [blocks, groups, BLOCK, head]; rotary [positions, 2, head / 2]; places: block * BLOCK + token, a row each. */
void hf_store(float *queries, float *keys, float *values, const float *mixed, const float *rotary,
              const int64_t *positions, const int64_t *places, int64_t rows, int64_t groups, int64_t sharers,
              int64_t head, const float *query_norm, const float *key_norm, float eps, float centre) {
#pragma omp parallel for schedule(static) if (rows * groups * head > 2048)
    for (int64_t part = 0; part < PARTS; part++)
        store_rows(queries, keys, values, mixed, rotary, positions, places, part * rows / PARTS,
                   (part + 1) * rows / PARTS, groups, sharers, head, query_norm, key_norm, eps, centre);
}

/* Scores of the sharers of a group with the tokens of one block. */
INLINE void score_block(float *scores, int64_t stride, const float *query, const float *keys, int head, int sharers,
                        float scale) {
    floats even[MAX_SHARERS], odd[MAX_SHARERS];
    for (int s = 0; s < sharers; s++) even[s] = odd[s] = FILL(0.0f);
    for (int d = 0; d < head; d += 2) {
        floats a = LOAD(keys + d * BLOCK), b = LOAD(keys + (d + 1) * BLOCK);
        for (int s = 0; s < sharers; s++) {
            even[s] += a * query[s * head + d];
            odd[s] += b * query[s * head + d + 1];
        }
    }
    for (int s = 0; s < sharers; s++) STORE(scores + s * stride, (even[s] + odd[s]) * scale);
}

/* Adds the values of some tokens of one block, LANES * 4 of their dims at most, weighted. */
INLINE void add_block(floats *sums, const float *weights, int64_t stride, const float *values, int tokens, int head,
                      int sharers, int parts) {
    for (int token = 0; token < tokens; token++)
        for (int part = 0; part < parts; part++) {
            floats value = LOAD(values + token * head + part * LANES);
            for (int s = 0; s < sharers; s++) sums[s * 4 + part] += value * weights[s * stride + token];
        }
}

INLINE void attend_row(float *out, const float *query, const float *keys, const float *values, const int32_t *table,
                       float *scores, int64_t position, int64_t group, int64_t groups, int head, const int sharers,
                       float scale, float softcap, int64_t window) {
    int64_t first = window > 0 && position >= window ? position - window + 1 : 0;
    int64_t from = first / BLOCK, to = position / BLOCK + 1, stride = (to - from) * BLOCK;
    for (int64_t block = from; block < to; block++)
{
        const float *next = keys + ((int64_t)table[block + 1 < to ? block + 1 : from] * groups + group) * head * BLOCK;
        for (int i = 0; i < head * BLOCK; i += LANES) __builtin_prefetch(next + i);
        score_block(scores + (block - from) * BLOCK, stride, query,
                    keys + ((int64_t)table[block] * groups + group) * head * BLOCK, head, sharers, scale);}
    for (int s = 0; s < sharers; s++) {
        float *row = scores + s * stride;
        if (softcap > 0)
            for (int64_t i = 0; i < stride; i++) row[i] = softcap * tanhf(row[i] / softcap);
        for (int64_t i = from * BLOCK; i < first; i++) row[i - from * BLOCK] = -INFINITY;
        for (int64_t i = position + 1; i < to * BLOCK; i++) row[i - from * BLOCK] = -INFINITY;
        floats most = LOAD(row), total = {0};
        for (int64_t i = LANES; i < stride; i += LANES) {
            floats v = LOAD(row + i);
            most = choose(v > most, v, most);
        }
        floats top = FILL(max_of(most));
        for (int64_t i = 0; i < stride; i += LANES) {
            floats weight = exp_of(LOAD(row + i) - top);
            total += weight;
            STORE(row + i, weight);
        }
        floats share = FILL(1.0f / sum_of(total));
        for (int64_t i = 0; i < stride; i += LANES) STORE(row + i, LOAD(row + i) * share);
    }
    for (int dim = 0; dim < head; dim += 4 * LANES) {
        int parts = (head - dim) / LANES < 4 ? (head - dim) / LANES : 4;
        floats sums[MAX_SHARERS * 4];
        for (int i = 0; i < sharers * 4; i++) sums[i] = FILL(0.0f);
        for (int64_t block = from; block < to; block++) {
            const float *next = values + ((int64_t)table[block + 1 < to ? block + 1 : from] * groups + group) * BLOCK * head + dim;
            for (int i = 0; i < BLOCK; i++) for (int j=0;j<parts;j++) __builtin_prefetch(next + i * head + j * LANES);
            const float *at = values + ((int64_t)table[block] * groups + group) * BLOCK * head + dim;
            const float *weights = scores + (block - from) * BLOCK;
            int tokens = block + 1 < to ? BLOCK : (int)(position % BLOCK) + 1; /* those behind it may be NaN */
            switch (parts) {
            case 4: add_block(sums, weights, stride, at, tokens, head, sharers, 4); break;
            case 2: add_block(sums, weights, stride, at, tokens, head, sharers, 2); break;
            default: add_block(sums, weights, stride, at, tokens, head, sharers, parts);
            }
        }
        for (int s = 0; s < sharers; s++)
            for (int part = 0; part < parts; part++) STORE(out + s * head + dim + part * LANES, sums[s * 4 + part]);
    }
}

#define SHARERS(n)                                                                                                     \
    case n:                                                                                                            \
        attend_row(out, query, keys, values, table, scores, position, group, groups, head, n, scale, softcap, window); \
        break;

LEVELS static void attend_group(float *out, const float *query, const float *keys, const float *values,
                                const int32_t *table, float *scores, int64_t position, int64_t group, int64_t groups,
                                int64_t sharers, int64_t head, float scale, float softcap, int64_t window) {
    for (; sharers > 0; sharers -= MAX_SHARERS, out += MAX_SHARERS * head, query += MAX_SHARERS * head)
        switch (sharers < MAX_SHARERS ? sharers : MAX_SHARERS) {
            SHARERS(1) SHARERS(2) SHARERS(3) SHARERS(4) SHARERS(5) SHARERS(6) SHARERS(7) SHARERS(8)
        }
}

/* Attention of rows, each with the tokens of its own sequence up to its position, which are in the cache.

   outs, queries [rows, groups, sharers, head]; tables [sequences, table_width] int32: the blocks of each sequence;
   sequences [rows]: which table a row has. Returns nonzero when there is no memory for the scores. */
int hf_attend(float *outs, const float *queries, const float *keys, const float *values, const int32_t *tables,
              int64_t table_width, const int64_t *sequences, const int64_t *positions, int64_t rows, int64_t groups,
              int64_t sharers, int64_t head, float scale, float softcap, int64_t window) {
    int64_t longest = 0;
    int failed = 0;
    for (int64_t row = 0; row < rows; row++) longest = positions[row] > longest ? positions[row] : longest;
    size_t room = (size_t)(longest / BLOCK + 1) * BLOCK * MAX_SHARERS * sizeof(float);
#pragma omp parallel
    {
        float *scores = aligned_alloc(64, room);
        if (!scores) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic, 8)
        for (int64_t item = 0; item < rows * groups; item++) {
            int64_t group = item % groups, row = item / groups, at = (row * groups + group) * sharers * head;
            if (scores)
                attend_group(outs + at, queries + at, keys, values, tables + sequences[row] * table_width, scores,
                             positions[row], group, groups, sharers, head, scale, softcap, window);
        }
        free(scores);
    }
    return failed;
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
    floats u = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    u = (u + 0.5f) * 2.3283064e-10f;
    ints is_one = u >= FILL(1.0f);
    u = choose(is_one, FILL(0.99999994f), u);
    floats w = 1.0f - u;
    floats exponential = ((w - 1.0f) + u) / w - log_of(w);
    return -log_of(exponential);
}

LEVELS static void sample_row(double *found, int64_t rows, const float *from, int64_t key, float temperature,
                              int is_greedy, int64_t real, int64_t first) {
    float factor = 1.0f / temperature;
    floats best = FILL(-INFINITY), most = FILL(-INFINITY), total = {0};
    ints place = {0};
    const ints steps = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int64_t i = 0; i < real; i += LANES) {
        floats z = FILL(-INFINITY);
        if (i + LANES <= real) z = LOAD(from + i) * factor;
        else
            for (int64_t j = i; j < real; j++) z[j - i] = from[j] * factor;
        most = choose(z > most, z, most);
    }
    float top = max_of(most);
    for (int64_t i = 0; i < real; i += LANES) {
        floats z = FILL(-INFINITY);
        if (i + LANES <= real) z = LOAD(from + i) * factor;
        else
            for (int64_t j = i; j < real; j++) z[j - i] = from[j] * factor;
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
