/* What kernels.c and its innermost loops, vectors.h, both know. */

#pragma once

#include <stdint.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HAS_LEVELS
#endif

#define BLOCK 16 /* tokens of a block of the cache: BLOCK_TOKENS of blocks.py */
#define CHUNK 8 /* blocks whose scores are held at a time */
#define COLUMNS 8 /* heads that see the same keys and are computed together, at most */
#define PANEL 32 /* outputs of a matrix product that lie side by side in its weight */
#define TILE 8 /* rows that a matrix product computes together, at most */

/* What becomes of a product: nothing, or the activation of one half of it times the other. */
enum { PLAIN, GATED_SILU, GATED_GELU };

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

/* A hash of 64 bits, as in sampling.py: of a number, or of each number of a vector. */
#define MIX(v) \
    v = (v ^ (v >> 30)) * 0xBF58476D1CE4E5B9ull; \
    v = (v ^ (v >> 27)) * 0x94D049BB133111EBull; \
    return v ^ (v >> 31);

/* The innermost loops at one level of a processor; see vectors.h. */
typedef struct {
    int64_t width; /* bytes of a vector */
    void (*add_norm_rows)(float *out, float *hidden, const float *product, const float *product_norm, const float *norm,
                          const int64_t *chosen, int64_t begin, int64_t end, int64_t width, float eps, float centre);
    void (*multiply_rows)(float *out, const float *x, const float *panel, const float *bias, int64_t rows,
                          int64_t inputs, int64_t outputs, int64_t count, int64_t form);
    void (*store_rows)(float *queries, float *keys, float *values, const float *mixed, const float *rotary,
                       const int32_t *tables, int64_t table_width, const int64_t *sequences, const int64_t *positions,
                       int64_t begin, int64_t end, int64_t groups, int64_t sharers, int64_t head,
                       const float *query_norm, const float *key_norm, float eps, float centre);
    void (*attend_queries)(float *sums, const float *queries, const int32_t *positions, const stream *at, int64_t head,
                           int columns, scoring how);
    void (*cap_row)(float *logits, int64_t width, float cap);
    void (*sample_row)(double *found, int64_t rows, const float *from, int64_t key, float temperature, int is_greedy,
                       int64_t real, int64_t first);
    void (*sum_row)(double *to, const float *from, float floor, float top, uint32_t prefix, int64_t width,
                    int64_t shift);
} vectors;

#pragma GCC visibility push(hidden)
extern const vectors vectors_16, vectors_32, vectors_64;
#pragma GCC visibility pop
