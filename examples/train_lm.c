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

   Reading guide: layer_forward and layer_backward show how the library is called. */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#define MOE_IMPLEMENTATION
#include "moe.h"

#include <inttypes.h>
#include <math.h>
#include <time.h>
#include <unistd.h>

#include "pool.h"
#include "text.h"
#include "adamw.h"
#include "options.h"
#include "plot.h"

enum { H = 128, I = 256, E = 8, K = 2, LAYERS = 2 };       /* hidden, intermediate, experts, experts per token */
enum { BATCH = 2048, ROWS = 64, BYTES = 256 };            /* positions per step, rows per work item */
enum { POINTS = 20 };                                      /* held-out measurements on the way */

static const float LEARNING_RATE = 6e-3f, WEIGHT_DECAY = 2.0f, CLIP_NORM = 1.0f;
static const float BALANCE = 0.01f, Z_LOSS = 1e-4f; /* coefficients of the router's auxiliary losses */

/* ------------------------------------------------------------------------------------ the library, by element type */

typedef struct dtype_ops {
  const char *name;
  size_t size;
  float loss_scale; /* half precision needs its gradients lifted out of the subnormals */
  int mxfp8;        /* operands of the experts' products are rounded */
  moe_status (*narrow)(moe_context *ctx, void *dst, const float *src, int64_t n);
  moe_status (*widen)(moe_context *ctx, float *dst, const void *src, int64_t n);
  moe_status (*router)(moe_context *ctx, const moe_router_topk_args *args);
  moe_status (*router_bwd)(moe_context *ctx, const moe_router_topk_bwd_args *args);
  moe_status (*experts)(moe_context *ctx, const moe_layer *layer, void *y, void *saved);
  moe_status (*experts_bwd)(moe_context *ctx, const moe_layer *layer, const void *saved, const void *y_grad,
                            const moe_layer_grads *grads);
} dtype_ops;

#define DEFINE_CONVERSIONS(name, type, NAME)                                                  \
  static moe_status narrow_##name(moe_context *ctx, void *dst, const float *src, int64_t n) { \
    return moe_##name##_from_f32(ctx, dst, src, n);                                           \
  }                                                                                           \
  static moe_status widen_##name(moe_context *ctx, float *dst, const void *src, int64_t n) {  \
    return moe_##name##_to_f32(ctx, dst, src, n);                                             \
  }
MOE_DTYPE_LIST(DEFINE_CONVERSIONS)

#define DTYPE_OPS(text, mxfp8, name, type, NAME)                                                              \
  {text, sizeof(type), MOE_DTYPE_##NAME == MOE_DTYPE_FP16 ? 4096.0f : 1.0f, mxfp8, narrow_##name,             \
   widen_##name, moe_router_topk_##name, moe_router_topk_bwd_##name, moe_layer_forward_##name,                \
   moe_layer_backward_##name},
#define DTYPE_ENTRY(name, type, NAME) DTYPE_OPS(#name, 0, name, type, NAME)
static const dtype_ops DTYPES[] = {MOE_DTYPE_LIST(DTYPE_ENTRY) DTYPE_OPS("mxfp8", 1, bf16, moe_bf16, BF16)};

/* ------------------------------------------------------------------------------------------------------- the model */

typedef struct layer {
  tensor router, gate_up, down; /* [H,E] [E,H,2,I] [E,I,H] */
  void *input;                  /* [T,H] rmsnorm(x), compute type; the backward needs what follows as well */
  float *logits, *weights;      /* [T,E] [T,K] */
  int32_t *index;               /* [T,K] */
  void *saved;                  /* what the experts' forward keeps */
  int64_t *load, *load_sum;                        /* [E] tokens per expert: of this batch, and summed */
} layer;

enum { TENSORS = 2 + 3 * LAYERS };

typedef struct model {
  moe_context ctx;
  const dtype_ops *dtype;
  int64_t T, I, E, K;         /* T positions are in work */
  tensor embed, head;         /* [CONTEXT,BYTES,H] [H,BYTES] */
  layer layers[LAYERS];
  tensor *all[TENSORS];
  const uint8_t *bytes;       /* the text, and the positions to predict */
  const int32_t *position;
  int stage;                  /* x[stage] is in work: 0 the embedding, l the output of layer l */
  float *x[LAYERS + 1];       /* [T,H] the residual stream */
  float *norm[LAYERS + 1];    /* [T] 1/rms(x) */
  float *h, *dh, *dx;         /* [T,H] rmsnorm(x) or a layer's output; its gradient; the gradient of x */
  float *logits, *dlogits, *loss, *top_weight, *no_grad; /* [T,BYTES] [T,BYTES] [T] [T] [T] of the head */
  int32_t *top;               /* [T] the likeliest byte */
  float *router_grad, *weights_grad;                     /* [T,E] [T,K] */
  void *y, *dy, *dinput;      /* [T,H] compute type */
  void *owned[64];            /* what model_free gives back, beside the tensors */
  int owned_count;
  float loss_scale;           /* all gradients are multiplied by it */
  adamw optimizer;
  double expert_seconds, expert_flops;
} model;

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Every call into the library goes through here: its sentence names the argument at fault. */
static void must(const model *m, moe_status status) {
  if (status != MOE_OK) die(1, "%s: %s", moe_status_str(status), m->ctx.message);
}

static void run(model *m, int64_t count, moe_task task, void *arg) {
  m->ctx.parallel_for(m->ctx.parallel_for_user, count, task, arg);
}

static void run_rows(model *m, moe_task task) { run(m, (m->T + ROWS - 1) / ROWS, task, m); }

static int64_t rows_end(const model *m, int64_t item) { return (item + 1) * ROWS < m->T ? (item + 1) * ROWS : m->T; }

static void *allocate(void *user, size_t bytes) { return (void)user, malloc(bytes); }
static void release(void *user, void *memory, size_t bytes) { (void)user, (void)bytes, free(memory); }

static void *own(model *m, int64_t count, size_t bytes) {
  if (m->owned_count == (int)(sizeof m->owned / sizeof *m->owned)) die(1, "model.owned is too short");
  return m->owned[m->owned_count++] = zeroed((size_t)count, bytes);
}

static void layer_init(layer *l, model *m, uint64_t *random) {
  size_t size = m->dtype->size;
  tensor_init(&l->router, H * m->E, 0.15f, size, random); /* sqrt(3/H) would keep the variance */
  tensor_init(&l->gate_up, m->E * H * 2 * m->I, 0.15f, size, random);
  tensor_init(&l->down, m->E * m->I * H, 0.10f, size, random);
  l->input = own(m, BATCH * H, size);
  l->logits = own(m, BATCH * m->E, 4), l->weights = own(m, BATCH * m->K, 4), l->index = own(m, BATCH * m->K, 4);
  l->saved = own(m, BATCH * m->K * 2 * m->I, size);
  l->load = own(m, m->E, sizeof *l->load), l->load_sum = own(m, m->E, sizeof *l->load_sum);
}

/* A model of `experts` experts of width `width`, `chosen` of them per token. */
static model *model_new(const text *t, const dtype_ops *dtype, pool *threads, int experts, int chosen, int width,
                        uint64_t seed) {
  model *m = zeroed(1, sizeof *m);
  m->ctx = (moe_context){.parallel_for = pool_run, .parallel_for_user = threads, .num_threads = threads->threads,
                         .allocate = allocate, .release = release};
  m->dtype = dtype, m->loss_scale = dtype->loss_scale, m->bytes = t->bytes;
  m->optimizer = (adamw){.weight_decay = WEIGHT_DECAY, .beta1 = 0.9f, .beta2 = 0.99f, .clip_norm = CLIP_NORM,
                         .power1 = 1, .power2 = 1};
  m->E = experts, m->K = chosen, m->I = width;
  tensor_init(&m->embed, CONTEXT * BYTES * H, 0.25f, 0, &seed);
  tensor_init(&m->head, H * BYTES, 0.05f, 0, &seed);
  int tensors = 0;
  m->all[tensors++] = &m->embed, m->all[tensors++] = &m->head;
  for (int l = 0; l < LAYERS; l++) {
    layer_init(&m->layers[l], m, &seed);
    m->all[tensors++] = &m->layers[l].router, m->all[tensors++] = &m->layers[l].gate_up;
    m->all[tensors++] = &m->layers[l].down;
  }
  for (int s = 0; s <= LAYERS; s++) m->x[s] = own(m, BATCH * H, 4), m->norm[s] = own(m, BATCH, 4);
  m->h = own(m, BATCH * H, 4), m->dh = own(m, BATCH * H, 4), m->dx = own(m, BATCH * H, 4);
  m->logits = own(m, BATCH * BYTES, 4), m->dlogits = own(m, BATCH * BYTES, 4), m->loss = own(m, BATCH, 4);
  m->top = own(m, BATCH, 4), m->top_weight = own(m, BATCH, 4), m->no_grad = own(m, BATCH, 4);
  m->router_grad = own(m, BATCH * m->E, 4), m->weights_grad = own(m, BATCH * m->K, 4);
  m->y = own(m, BATCH * H, dtype->size), m->dy = own(m, BATCH * H, dtype->size);
  m->dinput = own(m, BATCH * H, dtype->size);
  return m;
}

static void model_free(model *m) {
  for (int i = 0; i < TENSORS; i++) tensor_free(m->all[i]);
  for (int i = 0; i < m->owned_count; i++) free(m->owned[i]);
  free(m);
}

/* The compute type's copies of the weights. */
static void model_narrow(model *m) {
  for (int i = 0; i < TENSORS; i++)
    if (m->all[i]->low) must(m, m->dtype->narrow(&m->ctx, m->all[i]->low, m->all[i]->value, m->all[i]->count));
}

/* ------------------------------------------------------------------ embedding, norm, loss: rows split over threads */

/* x[stage] = the embedding, or x[stage-1] plus what its layer put into h; then h = rmsnorm(x[stage]). */
static void stream_rows(void *arg, int64_t item) {
  model *m = arg;
  for (int64_t t = item * ROWS; t < rows_end(m, item); t++) {
    float *restrict x = m->x[m->stage] + t * H, *restrict h = m->h + t * H;
    if (m->stage > 0) {
      const float *restrict before = m->x[m->stage - 1] + t * H;
      for (int i = 0; i < H; i++) x[i] = before[i] + h[i];
    } else {
      for (int i = 0; i < H; i++) x[i] = 0;
      for (int j = 0; j < CONTEXT; j++) {
        const float *restrict row = m->embed.value + (j * BYTES + m->bytes[m->position[t] - 1 - j]) * H;
        for (int i = 0; i < H; i++) x[i] += row[i];
      }
    }
    float sum = 0;
    for (int i = 0; i < H; i++) sum += x[i] * x[i];
    float norm = m->norm[m->stage][t] = 1 / sqrtf(sum / H + 1e-6f);
    for (int i = 0; i < H; i++) h[i] = x[i] * norm;
  }
}

/* dx += dh through the rmsnorm of x[stage]. */
static void norm_backward_rows(void *arg, int64_t item) {
  model *m = arg;
  for (int64_t t = item * ROWS; t < rows_end(m, item); t++) {
    const float *restrict x = m->x[m->stage] + t * H, *restrict dh = m->dh + t * H;
    float *restrict dx = m->dx + t * H;
    float norm = m->norm[m->stage][t], dot = 0;
    for (int i = 0; i < H; i++) dot += dh[i] * x[i];
    dot *= norm * norm / H;
    for (int i = 0; i < H; i++) dx[i] += norm * (dh[i] - dot * x[i]);
  }
}

/* One table per item; every item walks the batch in order. */
static void embed_backward_table(void *arg, int64_t j) {
  model *m = arg;
  float *table = m->embed.grad + j * BYTES * H;
  memset(table, 0, BYTES * H * sizeof *table);
  for (int64_t t = 0; t < m->T; t++) {
    float *restrict row = table + m->bytes[m->position[t] - 1 - j] * H;
    const float *restrict dx = m->dx + t * H;
    for (int i = 0; i < H; i++) row[i] += dx[i];
  }
}

/* exp(x) for x <= 0, by arithmetic alone, so that it does not depend on the C library: 2^n times a polynomial. */
static float exp_negative(float x) {
  if (!(x >= -80)) return 0; /* NaN as well: its sum is then 0, and the gradient not finite */
  float n = (float)(int)(x * 1.44269504f - 0.5f), r = x - n * 0.693145752f - n * 1.42860677e-6f;
  float p = 1.0f / 24 + r * (1.0f / 120 + r * (1.0f / 720));
  p = 1 + r * (1 + r * (1.0f / 2 + r * (1.0f / 6 + r * p)));
  uint32_t bits = (uint32_t)((int)n + 127) << 23;
  float scale;
  memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

/* Softmax and cross-entropy: the loss in nats, and dlogits = loss_scale / T * (p - onehot). */
static void loss_rows(void *arg, int64_t item) {
  model *m = arg;
  float scale = m->loss_scale / (float)m->T;
  for (int64_t t = item * ROWS; t < rows_end(m, item); t++) {
    const float *logits = m->logits + t * BYTES;
    float *p = m->dlogits + t * BYTES, most = logits[m->top[t]], sum = 0;
    int target = m->bytes[m->position[t]];
    for (int i = 0; i < BYTES; i++) sum += p[i] = exp_negative(logits[i] - most);
    m->loss[t] = logf(sum) + most - logits[target];
    for (int i = 0; i < BYTES; i++) p[i] *= scale / sum;
    p[target] -= scale;
  }
}

/* ---------------------------------------------------------------------------------- the layer: the library at work */

/* What the forward and the backward are both told. MXFP8: e4m3fn, scales that no number saturates under. */
static moe_layer layer_shape(const model *m, const layer *l) {
  const moe_mx_rounding mxfp8 = {.enabled = m->dtype->mxfp8, .element = MOE_ELEMENT_E4M3FN,
    .scale_rule = MOE_SCALE_ROUND_UP, .cast = MOE_CAST_SATURATE};
  return (moe_layer){.T = m->T, .H = H, .I = m->I, .E = m->E, .K = m->K, .x = l->input, .topk_index = l->index,
    .topk_weights = l->weights, .gate_up = l->gate_up.low, .down = l->down.low, .config = {.activation = MOE_ACT_SILU},
    .mx = {.activations = mxfp8, .weights = mxfp8, .gradients = mxfp8, .weight_grads = m->dtype->mxfp8}};
}

/* h = moe(h): choose each row's experts and run them. */
static void layer_forward(model *m, layer *l) {
  moe_context *ctx = &m->ctx;
  must(m, m->dtype->narrow(ctx, l->input, m->h, m->T * H));

  moe_router_topk_args router = {.T = m->T, .H = H, .E = m->E, .K = m->K, .hidden_states = l->input,
    .router_weight = l->router.low, .router_logits = l->logits, .expert_index = l->index, .expert_weights = l->weights};
  must(m, m->dtype->router(ctx, &router));

  moe_layer experts = layer_shape(m, l);
  double start = seconds();
  must(m, m->dtype->experts(ctx, &experts, m->y, l->saved));
  m->expert_seconds += seconds() - start;
  m->expert_flops += 6.0 * (double)(m->T * m->K * H * m->I);

  must(m, m->dtype->widen(ctx, m->h, m->y, m->T * H));
  memset(l->load, 0, (size_t)m->E * sizeof *l->load);
  for (int64_t i = 0; i < m->T * m->K; i++) l->load[l->index[i]]++, l->load_sum[l->index[i]]++;
}

/* From dx, the gradient of x after the layer: the weight gradients, and dx before the layer. */
static void layer_backward(model *m, layer *l) {
  moe_context *ctx = &m->ctx;
  must(m, m->dtype->narrow(ctx, m->dy, m->dx, m->T * H));

  moe_layer experts = layer_shape(m, l);
  moe_layer_grads grads = {.x = m->dinput, .topk_weights = m->weights_grad, .gate_up = l->gate_up.grad,
    .down = l->down.grad, .weight_dtype = MOE_DTYPE_F32};
  double start = seconds();
  must(m, m->dtype->experts_bwd(ctx, &experts, l->saved, m->dy, &grads));
  m->expert_seconds += seconds() - start;
  m->expert_flops += 12.0 * (double)(m->T * m->K * H * m->I);

  /* The auxiliary losses add their gradient to the logits' first; the router's backward then carries both on. */
  float auxiliary;
  memset(m->router_grad, 0, (size_t)(m->T * m->E) * sizeof *m->router_grad);
  moe_router_loss_args balance = {.T = m->T, .E = m->E, .K = m->K, .coefficient = BALANCE * m->loss_scale,
    .router_logits = l->logits, .expert_index = l->index, .loss = &auxiliary, .router_logits_grad = m->router_grad};
  must(m, moe_router_load_balance_loss(ctx, &balance));
  moe_router_loss_args z = balance;
  z.coefficient = Z_LOSS * m->loss_scale;
  must(m, moe_router_z_loss(ctx, &z));

  moe_router_topk_bwd_args router = {.T = m->T, .H = H, .E = m->E, .K = m->K, .hidden_states = l->input,
    .router_weight = l->router.low, .router_logits = l->logits, .expert_index = l->index,
    .expert_weights_grad = m->weights_grad, .router_logits_grad = m->router_grad,
    .router_weight_grad = l->router.grad, .weight_grad_dtype = MOE_DTYPE_F32, .hidden_states_grad = m->dinput,
    .accumulate = MOE_ACCUMULATE_ROUTER_LOGITS_GRAD | MOE_ACCUMULATE_HIDDEN_STATES_GRAD};
  must(m, m->dtype->router_bwd(ctx, &router));

  must(m, m->dtype->widen(ctx, m->dh, m->dinput, m->T * H));
  run_rows(m, norm_backward_rows);
}

/* A router is a linear layer that also tells which outputs are the largest: with 256 "experts" it is the head. */
static void head_forward(model *m) {
  moe_router_topk_args head = {.T = m->T, .H = H, .E = BYTES, .K = 1, .hidden_states = m->h,
    .router_weight = m->head.value, .router_logits = m->logits, .expert_index = m->top,
    .expert_weights = m->top_weight};
  must(m, moe_router_topk_f32(&m->ctx, &head));
}

static void head_backward(model *m) {
  moe_router_topk_bwd_args head = {.T = m->T, .H = H, .E = BYTES, .K = 1, .hidden_states = m->h,
    .router_weight = m->head.value, .router_logits = m->logits, .expert_index = m->top,
    .expert_weights_grad = m->no_grad, .router_logits_grad = m->dlogits, .router_weight_grad = m->head.grad,
    .hidden_states_grad = m->dh, .accumulate = MOE_ACCUMULATE_ROUTER_LOGITS_GRAD};
  must(m, moe_router_topk_bwd_f32(&m->ctx, &head));
  memset(m->dx, 0, (size_t)(m->T * H) * sizeof *m->dx);
  run_rows(m, norm_backward_rows);
}

/* The mean loss in bits per byte over count <= BATCH positions. */
static double model_forward(model *m, const int32_t *position, int64_t count) {
  m->T = count, m->position = position, m->stage = 0;
  run_rows(m, stream_rows);
  for (int l = 0; l < LAYERS; l++) {
    layer_forward(m, &m->layers[l]);
    m->stage = l + 1;
    run_rows(m, stream_rows);
  }
  head_forward(m);
  run_rows(m, loss_rows);
  double sum = 0;
  for (int64_t t = 0; t < m->T; t++) sum += (double)m->loss[t];
  return sum / (double)m->T * 1.4426950408889634;
}

static void model_backward(model *m) {
  head_backward(m);
  for (m->stage = LAYERS - 1; m->stage >= 0; m->stage--) layer_backward(m, &m->layers[m->stage]);
  run(m, CONTEXT, embed_backward_table, m);
}

/* -------------------------------------------------------------------------------------------------------- training */

/* One AdamW step. Gradients that overflowed (half precision's may) are dropped, and scaled less from then on. */
static void model_update(model *m, float rate) {
  m->optimizer.rate = rate;
  if (!adamw_step(&m->optimizer, m->all, TENSORS, m->loss_scale, &m->ctx)) m->loss_scale *= 0.5f;
  else model_narrow(m);
}

/* Mean bits per byte over `count` held-out positions, spread evenly. load_sum then holds their experts. */
static double evaluate(model *m, const text *t, int64_t count) {
  static int32_t position[BATCH];
  if (count > t->held_out_count) count = t->held_out_count;
  for (int l = 0; l < LAYERS; l++) memset(m->layers[l].load_sum, 0, (size_t)m->E * sizeof *m->layers[l].load_sum);
  double sum = 0;
  for (int64_t done = 0; done < count;) {
    int64_t n = count - done < BATCH ? count - done : BATCH;
    for (int64_t i = 0; i < n; i++) position[i] = t->held_out[(done + i) * t->held_out_count / count];
    sum += model_forward(m, position, n) * (double)n;
    done += n;
  }
  return sum / (double)count;
}

/* On a terminal one line rewrites itself; otherwise a line for every twentieth of the way. */
static void progress(const model *m, const char *name, int64_t step, int64_t steps, double bits, double step_seconds) {
  printf("%s%-5s%5" PRId64 "/%" PRId64 "  loss %.3f  %5.0f tokens/s  %3.0f GFLOP/s", isatty(1) ? "\r" : "", name, step,
         steps, bits, (double)m->T / step_seconds, m->expert_flops / m->expert_seconds * 1e-9);
  int64_t least = INT64_MAX, most = 0;
  for (int i = 0; i < LAYERS * m->E; i++) {
    int64_t load = m->layers[i / m->E].load[i % m->E];
    least = load < least ? load : least, most = load > most ? load : most;
  }
  if (m->E > 1) printf("  load %4" PRId64 "..%" PRId64 "..%-4" PRId64, least, m->T * m->K / m->E, most);
  if (!isatty(1)) putchar('\n');
  fflush(stdout);
}

static float learning_rate(int64_t step, int64_t steps) { /* up over the first twentieth, then down to a twentieth */
  int64_t warm = steps / 20 + 1;
  if (step < warm) return LEARNING_RATE * (float)(step + 1) / (float)warm;
  return LEARNING_RATE * (1 - 0.95f * (float)(step - warm) / (float)(steps - warm));
}

/* Fills the curve and returns the held-out bits per byte at the end. */
static double train(model *m, const text *t, const options *o, curve *c) {
  static int32_t position[BATCH];
  float *loss = zeroed((size_t)o->steps, sizeof *loss), *held_out = zeroed(POINTS, sizeof *held_out);
  int32_t *at = zeroed(POINTS, sizeof *at);
  c->steps = o->steps, c->train = loss, c->at = at, c->held_out = held_out;
  uint64_t random = o->seed ^ 0x64617461; /* the same data for both models */
  double shown = seconds(), bits = 0;
  int64_t shown_step = 0;
  model_narrow(m);
  for (int64_t step = 0; step < o->steps; step++) {
    for (int i = 0; i < BATCH; i++) position[i] = t->train[next_random(&random) % (uint64_t)t->train_count];
    loss[step] = (float)model_forward(m, position, BATCH);
    model_backward(m);
    model_update(m, learning_rate(step, o->steps));
    bits = shown_step == step ? (double)loss[step] : 0.9 * bits + 0.1 * (double)loss[step];
    int point = (step + 1) * POINTS / o->steps > step * POINTS / o->steps;
    if (point || (isatty(1) && seconds() - shown > 0.25)) {
      progress(m, c->name, step + 1, o->steps, bits, (seconds() - shown) / (double)(step + 1 - shown_step));
      if (point) {
        at[c->points] = (int32_t)(step + 1);
        held_out[c->points++] = (float)evaluate(m, t, step + 1 == o->steps ? HELD_OUT_MAX : 2 * BATCH);
      }
      m->expert_seconds = m->expert_flops = 0, shown = seconds(), shown_step = step + 1;
    }
  }
  if (isatty(1)) putchar('\n');
  return (double)held_out[c->points - 1];
}

/* FNV-1a over the bits of all parameters. */
static uint64_t model_hash(const model *m) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (int i = 0; i < TENSORS; i++)
    for (int64_t j = 0; j < m->all[i]->count; j++) {
      uint32_t bits;
      memcpy(&bits, &m->all[i]->value[j], sizeof bits);
      hash = (hash ^ bits) * 0x100000001b3u;
    }
  return hash;
}

/* ----------------------------------------------------------------------------------------------------- the program */

static const dtype_ops *find_dtype(const char *name) {
  size_t i = 0, count = sizeof DTYPES / sizeof *DTYPES;
  while (i < count && strcmp(DTYPES[i].name, name)) i++;
  if (i == count) die(2, "--dtype must be bf16, fp16, f32 or mxfp8, not \"%s\"", name);
  return &DTYPES[i];
}

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
  puts("loss: bits per byte; GFLOP/s: of the experts; load: fewest, mean and most tokens of an expert in a batch");

  curve curves[2] = {{.name = dtype->mxfp8 ? "mxfp8" : "moe", .colour = "#0b6e99"},
                     {.name = dtype->mxfp8 ? "bf16" : "dense", .colour = "#c0562b"}};
  double bits = train(moe, &t, &o, &curves[0]);
  double other_bits = train(other, &t, &o, &curves[1]);
  printf("heldout bits/byte: %.4f (unigram %.4f, ", bits, text_unigram_bits(&t));
  if (dtype->mxfp8) printf("in bf16 %.4f: %+.2f %%)\n", other_bits, 100 * (bits / other_bits - 1));
  else printf("dense baseline of equal active size %.4f)\n", other_bits);

  int64_t load[LAYERS * E];
  for (int i = 0; i < LAYERS * E; i++) load[i] = moe->layers[i / E].load_sum[i % E];
  char title[64];
  snprintf(title, sizeof title, "Loss of the byte model, %s", dtype->name);
  if (plot_write("train_lm.svg", title, curves, 2, load, LAYERS, E) != 0)
    die(1, "cannot write train_lm.svg: %s", strerror(errno));
  printf("loss curves and expert load: train_lm.svg\n");
  printf("parameters: %016" PRIx64 "\n", model_hash(moe));
  pool_stop(&threads);
  for (int i = 0; i < 2; i++) free(curves[i].train), free(curves[i].at), free(curves[i].held_out);
  model_free(moe), model_free(other);
  free(t.bytes), free(t.train), free(t.held_out);
  return 0;
}
