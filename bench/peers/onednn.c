/* The layer by oneDNN 3, as a shared object for onednn_peer.py: expert by expert, a matmul primitive per product, and
   loops for the rest. Weights are taken as they are stored, transposes are strides, primitives are made beforehand. */
#include <dnnl.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if DNNL_VERSION_MAJOR < 3 || DNNL_CPU_RUNTIME != DNNL_RUNTIME_OMP
#error "oneDNN 3 for the CPU with OpenMP is needed"
#endif

/* Pairs (token, expert) are sorted by expert; there are P = T*K. onednn_peer.py lists the same fields. */
typedef struct peer_problem {
  int64_t T, H, I, E, K;
  const int64_t *counts, *tokens, *places; /* [E] pairs of each expert; [P]; [T,K] where a token's pairs are */
  const float *weights;                    /* [P] */
  void *x, *gate_up, *down, *y;            /* [T,H], [E,H,2,I], [E,I,H], [T,H] */
  void *dy, *dx, *dgate_up, *ddown;        /* dy NULL: forward only */
  float *dweights;                         /* [P] */
} peer_problem;

/* ---------------------------------------------------------------------------------------------------- element types */

typedef union peer_bits {
  float f;
  uint32_t u;
} peer_bits;

static inline float bf16_value(uint16_t x) {
  const peer_bits bits = {.u = (uint32_t)x << 16};
  return bits.f;
}

static inline uint16_t bf16_of(float x) { /* no NaNs here */
  const peer_bits bits = {.f = x};
  return (uint16_t)((bits.u + 0x7fffu + (bits.u >> 16 & 1u)) >> 16);
}

#define PEER_SAME(x) (x)
#define PEER_TYPES(X)                               \
  X(bf16, dnnl_bf16, uint16_t, bf16_value, bf16_of) \
  X(fp16, dnnl_f16, _Float16, (float), (_Float16))  \
  X(f32, dnnl_f32, float, PEER_SAME, PEER_SAME)

#define PEER_DEFINE(name, dnnl, type, load, store)                         \
  static void load_##name(const void *from, float *to, int64_t n) {        \
    for (int64_t i = 0; i < n; i++) to[i] = load(((const type *)from)[i]); \
  }                                                                        \
  static void store_##name(const float *from, void *to, int64_t n) {       \
    for (int64_t i = 0; i < n; i++) ((type *)to)[i] = store(from[i]);      \
  }
PEER_TYPES(PEER_DEFINE)

typedef struct peer_type {
  const char *name;
  dnnl_data_type_t type;
  size_t size;
  void (*load)(const void *from, float *to, int64_t n);
  void (*store)(const float *from, void *to, int64_t n);
} peer_type;

#define PEER_ROW(name, dnnl, type, load, store) {#name, dnnl, sizeof(type), load_##name, store_##name},
static const peer_type peer_types[] = {PEER_TYPES(PEER_ROW)};

/* ----------------------------------------------------------------------------------------- loops, a piece at a time */

enum { PEER_PIECE = 512 };

static void *element(const peer_type *type, const void *array, int64_t i) {
  return (char *)(uintptr_t)array + (size_t)i * type->size;
}

static int64_t piece_of(int64_t from, int64_t n) { return n - from < PEER_PIECE ? n - from : PEER_PIECE; }

/* middle = silu(gate)*up, [n,I]; gate_up is [n,2,I]. */
static void glu(const peer_type *type, const void *gate_up, void *middle, int64_t n, int64_t I) {
#pragma omp parallel for
  for (int64_t r = 0; r < n; r++)
    for (int64_t from = 0; from < I; from += PEER_PIECE) {
      const int64_t size = piece_of(from, I), at = r * 2 * I + from;
      float g[PEER_PIECE], u[PEER_PIECE];
      type->load(element(type, gate_up, at), g, size);
      type->load(element(type, gate_up, at + I), u, size);
      for (int64_t i = 0; i < size; i++) u[i] *= g[i] / (1.0f + expf(-g[i]));
      type->store(u, element(type, middle, r * I + from), size);
    }
}

static void glu_gradient(const peer_type *type, const void *gate_up, const void *dmiddle, void *dgate_up, int64_t n,
                         int64_t I) {
#pragma omp parallel for
  for (int64_t r = 0; r < n; r++)
    for (int64_t from = 0; from < I; from += PEER_PIECE) {
      const int64_t size = piece_of(from, I), at = r * 2 * I + from;
      float g[PEER_PIECE], u[PEER_PIECE], dm[PEER_PIECE];
      type->load(element(type, gate_up, at), g, size);
      type->load(element(type, gate_up, at + I), u, size);
      type->load(element(type, dmiddle, r * I + from), dm, size);
      for (int64_t i = 0; i < size; i++) {
        const float sigmoid = 1.0f / (1.0f + expf(-g[i])), gate = g[i];
        g[i] = dm[i] * u[i] * sigmoid * (1.0f + gate * (1.0f - sigmoid));
        u[i] = dm[i] * gate * sigmoid;
      }
      type->store(g, element(type, dgate_up, at), size);
      type->store(u, element(type, dgate_up, at + I), size);
    }
}

/* Every pair's token's row times its weight, [n,H]. */
static void gather_scaled(const peer_type *type, const void *rows, const int64_t *tokens, const float *weights,
                          void *to, int64_t n, int64_t H) {
#pragma omp parallel for
  for (int64_t r = 0; r < n; r++)
    for (int64_t from = 0; from < H; from += PEER_PIECE) {
      const int64_t size = piece_of(from, H);
      float x[PEER_PIECE];
      type->load(element(type, rows, tokens[r] * H + from), x, size);
      for (int64_t h = 0; h < size; h++) x[h] *= weights[r];
      type->store(x, element(type, to, r * H + from), size);
    }
}

/* Dot products of pairs' rows with their tokens'. */
static void dots(const peer_type *type, const void *rows, const int64_t *tokens, const float *pairs, float *to,
                 int64_t n, int64_t H) {
#pragma omp parallel for
  for (int64_t r = 0; r < n; r++) {
    float x[PEER_PIECE], sum = 0;
    for (int64_t from = 0; from < H; from += PEER_PIECE) {
      const int64_t size = piece_of(from, H);
      type->load(element(type, rows, tokens[r] * H + from), x, size);
      for (int64_t h = 0; h < size; h++) sum += x[h] * pairs[r * H + from + h];
    }
    to[r] = sum;
  }
}

/* Sums over every one of n tokens' K pairs; weights NULL: 1. */
static void sum_pairs(const peer_type *type, const float *pairs, const int64_t *places, int64_t K, const float *weights,
                      void *to, int64_t n, int64_t H) {
#pragma omp parallel for
  for (int64_t t = 0; t < n; t++)
    for (int64_t from = 0; from < H; from += PEER_PIECE) {
      const int64_t size = piece_of(from, H);
      float sum[PEER_PIECE] = {0};
      for (int64_t k = t * K; k < (t + 1) * K; k++) {
        const float *row = pairs + places[k] * H + from, weight = weights ? weights[places[k]] : 1.0f;
        for (int64_t h = 0; h < size; h++) sum[h] += weight * row[h];
      }
      type->store(sum, element(type, to, t * H + from), size);
    }
}

/* ---------------------------------------------------------------------------------------------------------- matmuls */

typedef struct peer_matrix {
  char *at;
  dnnl_data_type_t type;
  int64_t rows, columns, row_stride, column_stride;
} peer_matrix;

typedef struct peer_matmul {
  dnnl_primitive_t primitive;
  dnnl_exec_arg_t args[3];
} peer_matmul;

typedef struct peer_plan {
  peer_matmul *steps;
  int count;
} peer_plan;

typedef struct peer_layer {
  peer_problem problem;
  const peer_type *type;
  int64_t pairs;
  int failed;
  dnnl_engine_t engine;
  dnnl_stream_t stream;
  void *xs, *gate_up, *middle, *dys, *dmiddle, *dgate_up; /* of every pair */
  float *d, *dxs;                                         /* of every pair */
  peer_plan up, down, down_gradients, up_gradients;
} peer_layer;

static peer_matrix matrix(void *at, dnnl_data_type_t type, int64_t row, int64_t rows, int64_t columns) {
  const peer_matrix made = {
      (char *)at + (size_t)(row * columns) * dnnl_data_type_size(type), type, rows, columns, columns, 1};
  return made;
}

static peer_matrix transposed(peer_matrix m) {
  const peer_matrix made = {m.at, m.type, m.columns, m.rows, m.column_stride, m.row_stride};
  return made;
}

static dnnl_memory_t memory_of(peer_layer *layer, peer_matrix m) {
  const dnnl_dims_t dims = {m.rows, m.columns}, strides = {m.row_stride, m.column_stride};
  dnnl_memory_t memory = NULL;
  dnnl_memory_desc_t shape = NULL;
  if (dnnl_memory_desc_create_with_strides(&shape, 2, dims, m.type, strides) ||
      dnnl_memory_create(&memory, shape, layer->engine, m.at))
    layer->failed = 1;
  dnnl_memory_desc_destroy(shape);
  return memory;
}

/* c = a*b; a plan has room for two steps per expert. */
static void add(peer_layer *layer, peer_plan *plan, peer_matrix a, peer_matrix b, peer_matrix c) {
  const peer_matrix all[] = {a, b, c};
  const int names[] = {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST};
  const_dnnl_memory_desc_t shape[3];
  peer_matmul *step = &plan->steps[plan->count++];
  dnnl_primitive_desc_t desc = NULL;
  for (int i = 0; i < 3; i++) {
    step->args[i] = (dnnl_exec_arg_t){names[i], memory_of(layer, all[i])};
    if (!layer->failed) dnnl_memory_get_memory_desc(step->args[i].memory, &shape[i]);
  }
  if (layer->failed) return;
  if (dnnl_matmul_primitive_desc_create(&desc, layer->engine, shape[0], shape[1], NULL, shape[2], NULL) ||
      dnnl_primitive_create(&step->primitive, desc))
    layer->failed = 1;
  dnnl_primitive_desc_destroy(desc);
}

static void run(peer_layer *layer, const peer_plan *plan) {
  for (int i = 0; i < plan->count; i++)
    if (dnnl_primitive_execute(plan->steps[i].primitive, layer->stream, 3, plan->steps[i].args)) layer->failed = 1;
  dnnl_stream_wait(layer->stream);
}

/* -------------------------------------------------------------------------------------------------------- the layer */

/* The products of one expert, whose pairs begin at `first`. */
static void add_expert(peer_layer *layer, int64_t e, int64_t first) {
  const peer_problem *p = &layer->problem;
  const dnnl_data_type_t type = layer->type->type;
  const int64_t n = p->counts[e], H = p->H, I = p->I;
  const peer_matrix xs = matrix(layer->xs, type, first, n, H), middle = matrix(layer->middle, type, first, n, I);
  const peer_matrix gate_up = matrix(p->gate_up, type, e * H, H, 2 * I), down = matrix(p->down, type, e * I, I, H);
  add(layer, &layer->up, xs, gate_up, matrix(layer->gate_up, type, first, n, 2 * I));
  add(layer, &layer->down, middle, down, matrix(layer->d, dnnl_f32, first, n, H));
  if (!p->dy) return;
  const peer_matrix dys = matrix(layer->dys, type, first, n, H);
  const peer_matrix dgate_up = matrix(layer->dgate_up, type, first, n, 2 * I);
  add(layer, &layer->down_gradients, dys, transposed(down), matrix(layer->dmiddle, type, first, n, I));
  add(layer, &layer->down_gradients, transposed(middle), dys, matrix(p->ddown, type, e * I, I, H));
  add(layer, &layer->up_gradients, dgate_up, transposed(gate_up), matrix(layer->dxs, dnnl_f32, first, n, H));
  add(layer, &layer->up_gradients, transposed(xs), dgate_up, matrix(p->dgate_up, type, e * H, H, 2 * I));
}

static void *zeros(peer_layer *layer, int64_t count, size_t size) {
  void *memory = calloc((size_t)count, size);
  if (!memory) layer->failed = 1;
  return memory;
}

static void allocate(peer_layer *layer) {
  const peer_problem *p = &layer->problem;
  const size_t size = layer->type->size;
  const int64_t of_H = layer->pairs * p->H, of_I = layer->pairs * p->I;
  layer->xs = zeros(layer, of_H, size);
  layer->gate_up = zeros(layer, 2 * of_I, size);
  layer->middle = zeros(layer, of_I, size);
  layer->d = (float *)zeros(layer, of_H, sizeof(float));
  layer->up.steps = (peer_matmul *)zeros(layer, p->E, sizeof(peer_matmul));
  layer->down.steps = (peer_matmul *)zeros(layer, p->E, sizeof(peer_matmul));
  if (!p->dy) return;
  layer->dys = zeros(layer, of_H, size);
  layer->dmiddle = zeros(layer, of_I, size);
  layer->dgate_up = zeros(layer, 2 * of_I, size);
  layer->dxs = (float *)zeros(layer, of_H, sizeof(float));
  layer->down_gradients.steps = (peer_matmul *)zeros(layer, 2 * p->E, sizeof(peer_matmul));
  layer->up_gradients.steps = (peer_matmul *)zeros(layer, 2 * p->E, sizeof(peer_matmul));
}

/* ----------------------------------------------------------------------------------------- called by onednn_peer.py */

const char *peer_version(void) {
  static char text[32];
  const dnnl_version_t *version = dnnl_version();
  snprintf(text, sizeof text, "%d.%d.%d", version->major, version->minor, version->patch);
  return text;
}

void peer_threads(int threads) { omp_set_num_threads(threads); }

void peer_free(peer_layer *layer) {
  peer_plan *plans[] = {&layer->up, &layer->down, &layer->down_gradients, &layer->up_gradients};
  void *arrays[] = {layer->xs,      layer->gate_up,  layer->middle, layer->dys,
                    layer->dmiddle, layer->dgate_up, layer->d,      layer->dxs};
  for (size_t i = 0; i < sizeof plans / sizeof *plans; i++) {
    for (int k = 0; k < plans[i]->count; k++) {
      dnnl_primitive_destroy(plans[i]->steps[k].primitive);
      for (int a = 0; a < 3; a++) dnnl_memory_destroy(plans[i]->steps[k].args[a].memory);
    }
    free(plans[i]->steps);
  }
  for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) free(arrays[i]);
  dnnl_stream_destroy(layer->stream);
  dnnl_engine_destroy(layer->engine);
  free(layer);
}

/* NULL where oneDNN has no kernel for the type, or there is no memory. */
peer_layer *peer_make(const peer_problem *problem, const char *type) {
  peer_layer *layer = (peer_layer *)calloc(1, sizeof *layer);
  if (!layer) return NULL;
  layer->problem = *problem;
  layer->pairs = problem->T * problem->K;
  for (size_t i = 0; i < sizeof peer_types / sizeof *peer_types; i++)
    if (strcmp(peer_types[i].name, type) == 0) layer->type = &peer_types[i];
  layer->failed = !layer->type || dnnl_engine_create(&layer->engine, dnnl_cpu, 0) ||
                  dnnl_stream_create(&layer->stream, layer->engine, dnnl_stream_default_flags);
  if (!layer->failed) allocate(layer);
  int64_t first = 0;
  for (int64_t e = 0; e < problem->E && !layer->failed; first += problem->counts[e++])
    if (problem->counts[e] > 0) add_expert(layer, e, first);
  if (!layer->failed) return layer;
  peer_free(layer);
  return NULL;
}

/* 0, or 1 when oneDNN refused a step. */
int peer_forward(peer_layer *layer) {
  const peer_problem *p = &layer->problem;
  const size_t bytes = (size_t)p->H * layer->type->size;
#pragma omp parallel for
  for (int64_t r = 0; r < layer->pairs; r++)
    memcpy((char *)layer->xs + (size_t)r * bytes, (const char *)p->x + (size_t)p->tokens[r] * bytes, bytes);
  run(layer, &layer->up);
  glu(layer->type, layer->gate_up, layer->middle, layer->pairs, p->I);
  run(layer, &layer->down);
  sum_pairs(layer->type, layer->d, p->places, p->K, p->weights, p->y, p->T, p->H);
  return layer->failed;
}

int peer_backward(peer_layer *layer) {
  const peer_problem *p = &layer->problem;
  dots(layer->type, p->dy, p->tokens, layer->d, p->dweights, layer->pairs, p->H);
  gather_scaled(layer->type, p->dy, p->tokens, p->weights, layer->dys, layer->pairs, p->H);
  run(layer, &layer->down_gradients);
  glu_gradient(layer->type, layer->gate_up, layer->dmiddle, layer->dgate_up, layer->pairs, p->I);
  run(layer, &layer->up_gradients);
  sum_pairs(layer->type, layer->dxs, p->places, p->K, NULL, p->dx, p->T, p->H);
  return layer->failed;
}
