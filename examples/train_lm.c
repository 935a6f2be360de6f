/* train_lm.c: a small language model with Mixture-of-Experts layers, trained on the CPU with moe.h.

     cc -O2 -I. examples/train_lm.c -o train_lm -lm && ./train_lm
     ./train_lm [--dtype bf16|fp16|f32|mxfp8] [--steps N] [--seed S] [--threads N] [FILE...]

   The model predicts a byte from the 16 bytes before it:

     x = sum over the 16 places of table[place][byte]           (the embedding, a table for each distance)
     LAYERS times:  x += moe(rmsnorm(x))                         (router, K of E experts, SwiGLU)
     logits = rmsnorm(x) * head                                  (256 of them), softmax, cross-entropy

   Weights, gradients and AdamW live in float; experts and routers compute in the type asked for. Then a dense model is
   trained, which has one expert as wide as the K that a token visits: the same arithmetic per byte, the same data in
   the same order. With mxfp8 all that the experts multiply, forward and backward, is rounded to MXFP8 and kept in
   bf16; the second model is the same one in bf16. The result's bits depend neither on the number of threads nor on the
   instruction set.

   Reading guide: layer_init, layer_forward and layer_backward show how the library is called; stream.h has what of the
   model is around its layers, training.h the loop around the model. */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#define MOE_IMPLEMENTATION
#include "moe.h"

#include <inttypes.h>
#include <math.h>
#include <unistd.h>

enum { H = 128, I = 256, E = 8, K = 2, LAYERS = 2 }; /* hidden, intermediate, experts, experts per token */
enum { BATCH = 2048 };                               /* positions per step */

#include "pool.h"
#include "text.h"
#include "adamw.h"
#include "options.h"
#include "plot.h"
#include "dtypes.h"
#include "stream.h"
#include "training.h"

static const float WEIGHT_DECAY = 2.0f, CLIP_NORM = 1.0f;
static const float BALANCE = 0.01f, Z_LOSS = 1e-4f; /* coefficients of the router's auxiliary losses */

/* ------------------------------------------------------------------------------------------------------- the layer */

typedef struct layer {
  tensor router, gate_up, down; /* [H,E] [E,H,2,I] [E,I,H] */
  moe_router_topk_args choose;
  moe_layer moe;
  void *input, *saved;          /* [T,H] rmsnorm(x), compute type; what the forward keeps for the backward */
  float *logits_grad;           /* [T,E] */
} layer;

enum { TENSORS = 2 + 3 * LAYERS };

typedef struct model {
  training t; /* comes first */
  moe_context ctx;
  const dtype_ops *dtype;
  int64_t I, E, K;
  stream s;
  layer layers[LAYERS];
  tensor *all[TENSORS];
  void *y, *dy, *dinput; /* [T,H] compute type */
  adamw optimizer;
} model;

/* MXFP8: e4m3fn, scales that no number saturates under. */
static void layer_init(layer *l, model *m, uint64_t *random) {
  stream *s = &m->s;
  size_t size = m->dtype->size, saved;
  tensor_init(&l->router, H * m->E, 0.15f, size, random); /* sqrt(3/H) would keep the variance */
  tensor_init(&l->gate_up, m->E * H * 2 * m->I, 0.15f, size, random);
  tensor_init(&l->down, m->E * m->I * H, 0.10f, size, random);
  l->choose = (moe_router_topk_args){.router_weight = l->router.low, .router_logits = own(s, BATCH * m->E, 4),
    .expert_index = own(s, BATCH * m->K, 4), .expert_weights = own(s, BATCH * m->K, 4)};
  const moe_mx_rounding mxfp8 = {.enabled = m->dtype->mxfp8, .element = MOE_ELEMENT_E4M3FN,
    .scale_rule = MOE_SCALE_ROUND_UP, .cast = MOE_CAST_SATURATE};
  l->input = own(s, BATCH * H, size), l->logits_grad = own(s, BATCH * m->E, 4);
  l->moe = (moe_layer){.T = BATCH, .H = H, .I = m->I, .E = m->E, .K = m->K, .x = l->input, .router = &l->choose,
    .gate_up = l->gate_up.low, .down = l->down.low, .keep_results = 1, /* for the gradient of expert_weights */
    .mx = {.activations = mxfp8, .weights = mxfp8, .gradients = mxfp8, .weight_grads = m->dtype->mxfp8}};
  must(&m->ctx, m->dtype->saved_bytes(&m->ctx, &l->moe, &saved));
  l->saved = own(s, 1, saved);
}

/* h = moe(h): choose each row's experts and run them. */
static void layer_forward(model *m, layer *l) {
  stream *s = &m->s;
  must(&m->ctx, m->dtype->narrow(&m->ctx, l->input, s->h, s->T * H));
  l->moe.T = s->T;
  double start = seconds();
  must(&m->ctx, m->dtype->forward(&m->ctx, &l->moe, m->y, l->saved));
  m->t.layer_seconds += seconds() - start;
  m->t.layer_flops += 6.0 * (double)(s->T * m->K * H * m->I);
  must(&m->ctx, m->dtype->widen(&m->ctx, s->h, m->y, s->T * H));
  int64_t *load = m->t.load + (l - m->layers) * m->E, *sum = m->t.load_sum + (l - m->layers) * m->E;
  memset(load, 0, (size_t)m->E * sizeof *load);
  for (int64_t i = 0; i < s->T * m->K; i++) load[l->choose.expert_index[i]]++, sum[l->choose.expert_index[i]]++;
}

/* From dx, the gradient of x after the layer: the weight gradients, and dx before the layer. The auxiliary losses add
   their gradient to the logits' first; the layer's backward then carries both on. */
static void layer_backward(model *m, layer *l) {
  stream *s = &m->s;
  must(&m->ctx, m->dtype->narrow(&m->ctx, m->dy, s->dx, s->T * H));
  float loss;
  memset(l->logits_grad, 0, (size_t)(s->T * m->E) * sizeof *l->logits_grad);
  moe_router_loss_args auxiliary = {.T = s->T, .E = m->E, .K = m->K, .coefficient = BALANCE * s->loss_scale,
    .router_logits = l->choose.router_logits, .expert_index = l->choose.expert_index, .loss = &loss,
    .router_logits_grad = l->logits_grad};
  must(&m->ctx, moe_router_load_balance_loss(&m->ctx, &auxiliary));
  auxiliary.coefficient = Z_LOSS * s->loss_scale;
  must(&m->ctx, moe_router_z_loss(&m->ctx, &auxiliary));
  moe_layer_grads grads = {.x = m->dinput, .gate_up = l->gate_up.grad, .down = l->down.grad,
    .router_weight = l->router.grad, .router_logits = l->logits_grad, .weight_dtype = MOE_DTYPE_F32,
    .accumulate = MOE_ACCUMULATE_ROUTER_LOGITS_GRAD};
  double start = seconds();
  must(&m->ctx, m->dtype->backward(&m->ctx, &l->moe, l->saved, m->dy, &grads));
  m->t.layer_seconds += seconds() - start;
  m->t.layer_flops += 12.0 * (double)(s->T * m->K * H * m->I);
  must(&m->ctx, m->dtype->widen(&m->ctx, s->dh, m->dinput, s->T * H));
  run_rows(s, norm_backward_rows);
}

/* ------------------------------------------------------------------------------------------------------- the model */

/* The compute type's copies of the weights. */
static void model_narrow(model *m) {
  for (int i = 0; i < TENSORS; i++)
    if (m->all[i]->low) must(&m->ctx, m->dtype->narrow(&m->ctx, m->all[i]->low, m->all[i]->value, m->all[i]->count));
}

/* The mean loss in bits per byte over count <= BATCH positions. */
static double model_forward(training *t, const int32_t *position, int64_t count) {
  model *m = (model *)(void *)t;
  stream *s = &m->s;
  s->T = count, s->position = position, s->stage = 0;
  run_rows(s, stream_rows);
  for (int l = 0; l < LAYERS; l++) {
    layer_forward(m, &m->layers[l]);
    s->stage = l + 1;
    run_rows(s, stream_rows);
  }
  head_forward(s);
  return stream_loss(s);
}

/* The gradients and one AdamW step. Gradients that overflowed (half precision's may) are dropped, and scaled less from
   then on. */
static void model_step(training *t, float rate) {
  model *m = (model *)(void *)t;
  stream *s = &m->s;
  head_backward(s);
  for (s->stage = LAYERS - 1; s->stage >= 0; s->stage--) layer_backward(m, &m->layers[s->stage]);
  run(s, CONTEXT, embed_backward_table);
  m->optimizer.rate = rate;
  if (!adamw_step(&m->optimizer, m->all, TENSORS, s->loss_scale, &m->ctx)) s->loss_scale *= 0.5f;
  else model_narrow(m);
}

static void *allocate(void *user, size_t bytes) { return (void)user, malloc(bytes); }
static void release(void *user, void *memory, size_t bytes) { (void)user, (void)bytes, free(memory); }

/* A model of `experts` experts of width `width`, `chosen` of them per token. */
static model *model_new(const text *t, const dtype_ops *dtype, pool *threads, int experts, int chosen, int width,
                        uint64_t seed) {
  model *m = zeroed(1, sizeof *m);
  int tensors = 0;
  m->ctx = (moe_context){.parallel_for = pool_run, .parallel_for_user = threads, .num_threads = threads->threads,
                         .allocate = allocate, .release = release};
  m->dtype = dtype, m->E = experts, m->K = chosen, m->I = width;
  m->t = (training){.forward = model_forward, .step = model_step, .loads = LAYERS * experts};
  m->optimizer = (adamw){.weight_decay = WEIGHT_DECAY, .beta1 = 0.9f, .beta2 = 0.99f, .clip_norm = CLIP_NORM,
                         .power1 = 1, .power2 = 1};
  stream_init(&m->s, &m->ctx, t->bytes, dtype->loss_scale, &seed);
  m->all[tensors++] = &m->s.embed, m->all[tensors++] = &m->s.head;
  for (layer *l = m->layers; l < m->layers + LAYERS; l++) {
    layer_init(l, m, &seed);
    m->all[tensors++] = &l->router, m->all[tensors++] = &l->gate_up, m->all[tensors++] = &l->down;
  }
  m->y = own(&m->s, BATCH * H, dtype->size), m->dy = own(&m->s, BATCH * H, dtype->size);
  m->dinput = own(&m->s, BATCH * H, dtype->size);
  m->t.load = own(&m->s, m->t.loads, sizeof *m->t.load), m->t.load_sum = own(&m->s, m->t.loads, sizeof *m->t.load_sum);
  model_narrow(m);
  return m;
}

static void model_free(model *m) {
  for (int i = 0; i < TENSORS; i++) tensor_free(m->all[i]);
  stream_free(&m->s);
  free(m);
}

/* ----------------------------------------------------------------------------------------------------- the program */

int main(int argc, char **argv) {
  options o = {.dtype = "bf16", .steps = 1000, .seed = 1};
  text t = {0};
  read_arguments(argc, argv, POOL_MAX, &o, &t);
  const dtype_ops *dtype = find_dtype(o.dtype);
  static pool threads;
  pool_start(&threads, o.threads);
  model *moe = model_new(&t, dtype, &threads, E, K, I, o.seed);
  model *other = dtype->mxfp8 ? model_new(&t, find_dtype("bf16"), &threads, E, K, I, o.seed)
                              : model_new(&t, dtype, &threads, 1, 1, I * K, o.seed);
  printf("moe.h %d.%d.%d: %s on %s, %d thread%s; %zu bytes of text in %" PRId64 " files, every tenth chunk held out\n",
         MOE_VERSION_MAJOR, MOE_VERSION_MINOR, MOE_VERSION_PATCH, dtype->name, moe_isa_name(moe_isa_active()),
         threads.threads, threads.threads == 1 ? "" : "s", t.size, t.files);
  printf("moe: %d layers, %d of %d experts of %d x %d; ", LAYERS, K, E, H, I);
  if (dtype->mxfp8) puts("bf16: the same without rounding to MXFP8");
  else printf("dense: one expert of %d x %d\n", H, I * K);
  puts("loss: bits per byte; GFLOP/s: of the layers; load: fewest, mean and most tokens of an expert in a batch");

  curve curves[2] = {{.name = dtype->mxfp8 ? "mxfp8" : "moe", .colour = "#0b6e99"},
                     {.name = dtype->mxfp8 ? "bf16" : "dense", .colour = "#c0562b"}};
  double bits = train(&moe->t, &t, &o, &curves[0]);
  double other_bits = train(&other->t, &t, &o, &curves[1]);
  printf("heldout bits/byte: %.4f (unigram %.4f, ", bits, text_unigram_bits(&t));
  if (dtype->mxfp8) printf("in bf16 %.4f: %+.2f %%)\n", other_bits, 100 * (bits / other_bits - 1));
  else printf("dense baseline of equal active size %.4f)\n", other_bits);

  char title[64];
  snprintf(title, sizeof title, "Loss of the byte model, %s", dtype->name);
  if (plot_write("train_lm.svg", title, curves, 2, moe->t.load_sum, LAYERS, E) != 0)
    die(1, "cannot write train_lm.svg: %s", strerror(errno));
  printf("loss curves and expert load: train_lm.svg\n");
  printf("parameters: %016" PRIx64 "\n", tensors_hash(moe->all, TENSORS));
  pool_stop(&threads);
  for (int i = 0; i < 2; i++) free(curves[i].train), free(curves[i].at), free(curves[i].held_out);
  model_free(moe), model_free(other);
  free(t.bytes), free(t.train), free(t.held_out);
  return 0;
}
