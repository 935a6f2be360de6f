/* The layer's forward by ggml, for ggml_peer.py, as llama.cpp builds it: mul_mat_id by gate and by up, swiglu,
   mul_mat_id by down, times the weights, the K terms added. x and y are float, as everywhere in ggml. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

typedef struct peer_problem {
  int64_t T, H, I, E, K, threads;
  int64_t repack;               /* 1: weights as ggml's CPU backend rearranges them for itself */
  const void *gate, *up, *down; /* [E,I,H], [E,I,H], [E,H,I], bf16 or blocks of mxfp4 */
  const float *x, *weights;     /* [T,H], [T,K] */
  const int32_t *index;         /* [T,K] */
} peer_problem;

typedef struct peer_layer {
  ggml_backend_t backend;
  struct ggml_context *weights, *inputs, *nodes;
  ggml_backend_buffer_t weights_buffer, inputs_buffer;
  ggml_gallocr_t allocator;
  struct ggml_cgraph *graph;
  struct ggml_tensor *gate, *up, *down, *x, *index, *affinities, *y;
} peer_layer;

static struct ggml_context *peer_context(size_t tensors) {
  const struct ggml_init_params params = {
      .mem_size = tensors * ggml_tensor_overhead() + ggml_graph_overhead(), .mem_buffer = NULL, .no_alloc = true};
  return ggml_init(params);
}

/* The kind of buffer in which the CPU backend rearranges such weights for mul_mat_id; NULL: none. */
static ggml_backend_buffer_type_t peer_repack_type(ggml_backend_t backend, struct ggml_tensor *w, int64_t K,
                                                   int64_t T) {
  ggml_backend_dev_t device = ggml_backend_get_device(backend);
  void *address = ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device),
                                                    "ggml_backend_dev_get_extra_bufts");
  ggml_backend_dev_get_extra_bufts_t list;
  memcpy(&list, &address, sizeof list);
  ggml_backend_buffer_type_t found = NULL;
  for (ggml_backend_buffer_type_t *type = list ? list(device) : NULL; type && *type && !found; type++) {
    struct ggml_context *trial = peer_context(4);
    struct ggml_tensor *b = ggml_new_tensor_3d(trial, GGML_TYPE_F32, w->ne[0], K, T);
    struct ggml_tensor *ids = ggml_new_tensor_2d(trial, GGML_TYPE_I32, K, T);
    struct ggml_tensor *product = ggml_mul_mat_id(trial, w, b, ids);
    w->buffer = ggml_backend_buft_alloc_buffer(*type, 0);
    if (ggml_backend_dev_supports_op(device, product)) found = *type;
    ggml_backend_buffer_free(w->buffer);
    w->buffer = NULL;
    ggml_free(trial);
  }
  return found;
}

static int peer_load_weights(peer_layer *l, const peer_problem *p, enum ggml_type type) {
  l->weights = peer_context(3);
  l->gate = ggml_new_tensor_3d(l->weights, type, p->H, p->I, p->E);
  l->up = ggml_new_tensor_3d(l->weights, type, p->H, p->I, p->E);
  l->down = ggml_new_tensor_3d(l->weights, type, p->I, p->H, p->E);
  ggml_backend_buffer_type_t kind = p->repack ? peer_repack_type(l->backend, l->gate, p->K, p->T)
                                              : ggml_backend_get_default_buffer_type(l->backend);
  if (!kind) return 0;
  l->weights_buffer = ggml_backend_alloc_ctx_tensors_from_buft(l->weights, kind);
  if (!l->weights_buffer) return 0;
  ggml_backend_buffer_set_usage(l->weights_buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
  ggml_backend_tensor_set(l->gate, p->gate, 0, ggml_nbytes(l->gate));
  ggml_backend_tensor_set(l->up, p->up, 0, ggml_nbytes(l->up));
  ggml_backend_tensor_set(l->down, p->down, 0, ggml_nbytes(l->down));
  return 1;
}

static int peer_load_inputs(peer_layer *l, const peer_problem *p) {
  l->inputs = peer_context(3);
  l->x = ggml_new_tensor_3d(l->inputs, GGML_TYPE_F32, p->H, 1, p->T);
  l->index = ggml_new_tensor_2d(l->inputs, GGML_TYPE_I32, p->K, p->T);
  l->affinities = ggml_new_tensor_3d(l->inputs, GGML_TYPE_F32, 1, p->K, p->T);
  l->inputs_buffer = ggml_backend_alloc_ctx_tensors(l->inputs, l->backend);
  if (!l->inputs_buffer) return 0;
  ggml_backend_tensor_set(l->x, p->x, 0, ggml_nbytes(l->x));
  ggml_backend_tensor_set(l->index, p->index, 0, ggml_nbytes(l->index));
  ggml_backend_tensor_set(l->affinities, p->weights, 0, ggml_nbytes(l->affinities));
  return 1;
}

static int peer_build(peer_layer *l, const peer_problem *p) {
  l->nodes = peer_context((size_t)(2 * p->K + 16));
  struct ggml_context *c = l->nodes;
  struct ggml_tensor *up = ggml_mul_mat_id(c, l->up, l->x, l->index);
  struct ggml_tensor *gate = ggml_mul_mat_id(c, l->gate, l->x, l->index);
  struct ggml_tensor *d = ggml_mul_mat_id(c, l->down, ggml_swiglu_split(c, gate, up), l->index); /* [T,K,H] */
  d = ggml_mul(c, d, l->affinities);
  for (int64_t k = 0; k < p->K; k++) {
    struct ggml_tensor *term = ggml_view_2d(c, d, p->H, p->T, d->nb[2], (size_t)k * d->nb[1]);
    l->y = k == 0 ? term : ggml_add(c, l->y, term);
  }
  if (p->K == 1) l->y = ggml_cont(c, l->y);
  ggml_set_output(l->y);
  l->graph = ggml_new_graph(c);
  ggml_build_forward_expand(l->graph, l->y);
  l->allocator = ggml_gallocr_new(ggml_backend_get_default_buffer_type(l->backend));
  return ggml_gallocr_alloc_graph(l->allocator, l->graph);
}

void peer_free(peer_layer *l) {
  if (l->allocator) ggml_gallocr_free(l->allocator);
  if (l->weights_buffer) ggml_backend_buffer_free(l->weights_buffer);
  if (l->inputs_buffer) ggml_backend_buffer_free(l->inputs_buffer);
  ggml_free(l->nodes);
  ggml_free(l->inputs);
  ggml_free(l->weights);
  if (l->backend) ggml_backend_free(l->backend);
  free(l);
}

/* type: bf16 or mxfp4. NULL where ggml cannot. */
peer_layer *peer_make(const peer_problem *p, const char *type) {
  peer_layer *l = (peer_layer *)calloc(1, sizeof *l);
  if (!l) return NULL;
  const enum ggml_type weights = strcmp(type, "bf16") == 0 ? GGML_TYPE_BF16 : GGML_TYPE_MXFP4;
  l->backend = ggml_backend_cpu_init();
  if (!l->backend || !peer_load_weights(l, p, weights) || !peer_load_inputs(l, p) || !peer_build(l, p)) {
    peer_free(l);
    return NULL;
  }
  ggml_backend_cpu_set_n_threads(l->backend, (int)p->threads);
  return l;
}

/* 0: done. */
int peer_forward(peer_layer *l) { return ggml_backend_graph_compute(l->backend, l->graph) != GGML_STATUS_SUCCESS; }

void peer_output(const peer_layer *l, float *y) { ggml_backend_tensor_get(l->y, y, 0, ggml_nbytes(l->y)); }

const char *peer_version(void) { return ggml_version(); }
