/* Decoding on a CPU, fp32: a model's layers, with attention over a paged cache, and sampling.

   All layers are computed by one call, hf_layers, in one team of OpenMP's threads, which are those that torch has (its
   libgomp is loaded first). Each operation is a loop that the team shares (omp for), with a barrier at its end; called
   outside of a team, as tests do, the same loop runs in one thread. The innermost loops are in vectors.h; on x86 they are
   compiled for three levels, and the best is chosen when the library is loaded.

   A token's result is the same bits whatever other tokens are computed beside it: no sum depends on the batch, nor on
   the number of threads. */

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#include "kernels.h"

#define MANY 128 /* rows that a thread takes through all layers at a time, so that what lies between stays near */
#define FEW 4 /* rows that are one piece of work where a row takes little */

static const vectors *loops = &vectors_16;

/* Take the widest vectors that this processor has, of at most so many bytes; return theirs. */
int64_t hf_choose(int64_t most) {
    loops = &vectors_16;
#ifdef HAS_LEVELS
    __builtin_cpu_init();
    if (most >= 32 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) loops = &vectors_32;
    if (most >= 64 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        loops = &vectors_64;
#endif
    return loops->width;
}

__attribute__((constructor)) static void choose_widest(void) { hf_choose(64); }

/* Names the source that this was built from: its CRC-32. */
uint32_t hf_source(void) { return HF_SOURCE; }

/* The residual stream between two products: hidden += product, normalized first where product_norm is given, then
   out = RMSNorm of it, or without norm it itself. All but out may be NULL that is not there.

   out, hidden, product [rows, width]. With chosen, [rows]: out has those rows of hidden and product, which stay as they
   are. */
void hf_add_norm(float *out, float *hidden, const float *product, const float *product_norm, const float *norm,
                 const int64_t *chosen, int64_t rows, int64_t width, float eps, float centre) {
#pragma omp for schedule(static)
    for (int64_t begin = 0; begin < rows; begin += FEW)
        loops->add_norm_rows(out, hidden, product, product_norm, norm, chosen, begin,
                             begin + FEW < rows ? begin + FEW : rows, width, eps, centre);
}

/* out = x @ weight.T + bias, and then as form says.

   x [rows, inputs]; out [rows, outputs]. The weight is laid out in panels, [panels, inputs, PANEL], the last filled up:
   of PANEL outputs, or, gated, of PANEL / 2 of the gate and as many of what it is multiplied with. Each sum goes over
   the inputs in their order, one by one. bias: [panels, PANEL], or NULL. */
void hf_multiply(float *out, const float *x, const float *weight, const float *bias, int64_t rows, int64_t inputs,
                 int64_t outputs, int64_t form) {
    int64_t width = form == PLAIN ? PANEL : PANEL / 2, panels = (outputs + width - 1) / width;
    int64_t block = 8 * TILE, threads = omp_get_num_threads();
    while (block > TILE && panels * ((rows + block - 1) / block) < 2 * threads) block /= 2;
    int64_t blocks = (rows + block - 1) / block;
#pragma omp for schedule(static)
    for (int64_t item = 0; item < panels * blocks; item++) {
        int64_t panel = item / blocks, row = item % blocks * block, first = panel * width;
        loops->multiply_rows(out + row * outputs + first, x + row * inputs, weight + panel * inputs * PANEL,
                             bias ? bias + panel * PANEL : NULL, row + block < rows ? block : rows - row, inputs, outputs,
                             outputs - first < width ? outputs - first : width, form);
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
        loops->store_rows(queries, keys, values, mixed, rotary, tables, table_width, sequences, positions, begin,
                          begin + FEW < rows ? begin + FEW : rows, groups, sharers, head, query_norm, key_norm, eps, centre);
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

static int64_t first_block(const work *w, int64_t row) {
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
        loops->attend_queries(sums, queries, positions, &at, head, columns, w->how);
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

/* A layer's weights, norms, and how its attention turns and is scored; NULL: it has none. Matrices as hf_multiply wants
   them. */
typedef struct {
    const float *input_norm, *qkv, *qkv_bias, *query_norm, *key_norm, *projection, *attention_norm;
    const float *mlp_norm, *gate_up, *down, *output_norm, *rotary;
    scoring how;
} layer;

/* What is the same in all layers. */
typedef struct {
    int64_t hidden, groups, sharers, head, inner; /* widths; inner: of the activations within the MLP */
    int64_t activation;                           /* GATED_SILU or GATED_GELU */
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
    hf_store(queries, keys, values, mixed, l->rotary, s->tables, s->table_width, s->sequences, s->positions, s->rows,
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

static void output_rows(float *out, float *sums, const shape *f, const vocabulary *v, float *hidden,
                        const float *product, const int64_t *chosen, int64_t rows) {
    hf_add_norm(sums, hidden, product, v->product_norm, v->norm, chosen, rows, f->hidden, f->eps, f->centre);
    if (!v->output) return;
    hf_multiply(out, sums, v->output, NULL, rows, f->hidden, v->outputs, PLAIN);
    if (v->cap == 0) return;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) loops->cap_row(out + row * v->outputs, v->outputs, v->cap);
}

/* What follows the layers: chosen rows of hidden plus product, normalized, times the output weight; see hf_add_norm and
   hf_multiply. sums: [rows, shape.hidden]. Without an output weight sums are the result, and without norms the sum. */
void hf_output(float *out, float *sums, const shape *f, const vocabulary *v, float *hidden, const float *product,
               const int64_t *chosen, int64_t rows) {
#pragma omp parallel
    output_rows(out, sums, f, v, hidden, product, chosen, rows);
}

/* What stands in the place of a token that could not be sampled; see sampling.py. */
enum { NOT_FINITE = -1, NOTHING_LEFT = -2 };

/* The best column of each row, by logits over temperature plus noise, and what its log-probability is made of.

   logits [rows, width], of which the first real columns are the vocabulary's, from id first on; found [6, rows]: best
   score, its id, its scaled logit, the largest scaled logit, the sum of exp(scaled - largest). Scaled logits below
   floors are not chosen; keys of rows whose greedy is set are not used. */
void hf_sample(double *found, const float *logits, const int64_t *keys, const float *temperatures,
               const uint8_t *greedy, int64_t rows, int64_t width, int64_t real, int64_t first) {
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t row = 0; row < rows; row++)
        loops->sample_row(found + row, rows, logits + row * width, keys[row], temperatures[row], greedy[row], real,
                          first);
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
    int64_t *tokens;                      /* [slots, capacity] */
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

static uint64_t mix(uint64_t v) { MIX(v) }

/* See row_keys of sampling.py. */
static int64_t row_key(int64_t key, int64_t position) {
    return (int64_t)mix(mix((uint64_t)key) + (uint64_t)position);
}

/* Sample a slot's next token. */
static void choose_token(const slots *d, int64_t slot, const float *logits, int64_t real) {
    int64_t length = d->lengths[slot], at = slot * d->capacity + length, token;
    double found[6];
    float log_prob, sampled;
    loops->sample_row(found, 1, logits, row_key(d->keys[slot], length), d->temperatures[slot], d->greedy[slot], real, 0);
    hf_settle(&token, &log_prob, &sampled, found, d->greedy + slot, 1, 6, 1);
    if (token < 0) {
        d->failures[slot] = token;
        return;
    }
    d->tokens[at] = token;
    d->log_probs[at] = log_prob;
    d->sampled_log_probs[at] = sampled;
    d->versions[at] = (int32_t)d->version;
    d->lengths[slot] = length + 1;
}

static int goes_on(const slots *d, int64_t slot) {
    int64_t length = d->lengths[slot];
    if (d->failures[slot] || length >= d->ends[slot]) return 0;
    int64_t last = d->tokens[slot * d->capacity + length - 1];
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

/* Weights of columns, exp(scaled - largest), summed for each row by eight bits of the place in the order of fp32 numbers:
   those above the last shift bits. Only of columns whose higher bits are prefix, and which are not below floor.

   sums [rows, 256] fp64; scaled [rows, width]; floors, largest [rows]; prefixes [rows]. See edits.py, which has the same
   in torch. */
void hf_sum_by_digit(double *sums, const float *scaled, const float *floors, const float *largest,
                     const int64_t *prefixes, int64_t rows, int64_t width, int64_t shift) {
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t row = 0; row < rows; row++)
        loops->sum_row(sums + row * 256, scaled + row * width, floors[row], largest[row], (uint32_t)prefixes[row],
                       width, shift);
}
