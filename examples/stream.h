/* stream.h: what of the byte model is around its layers: embedding, residual stream, rmsnorm, head and loss, both
   forward and backward. Rows are split over threads. Needs moe.h, text.h and adamw.h, and H, LAYERS and BATCH. */
#ifndef EXAMPLE_STREAM_H
#define EXAMPLE_STREAM_H

enum { ROWS = 64, BYTES = 256 }; /* rows per work item, logits */

typedef struct stream {
  moe_context *ctx;
  int64_t T;                  /* positions in work */
  tensor embed, head;         /* [CONTEXT,BYTES,H] [H,BYTES] */
  const uint8_t *bytes;       /* the text, and the positions to predict */
  const int32_t *position;
  int stage;                  /* x[stage] is in work: 0 the embedding, l the output of layer l */
  float *x[LAYERS + 1];       /* [T,H] the residual stream */
  float *norm[LAYERS + 1];    /* [T] 1/rms(x) */
  float *h, *dh, *dx;         /* [T,H] rmsnorm(x) or a layer's output; its gradient; the gradient of x */
  float *logits, *dlogits, *loss, *top_weight, *no_grad; /* [T,BYTES] [T,BYTES] [T] [T] [T] of the head */
  int32_t *top;               /* [T] the likeliest byte */
  float loss_scale;           /* all gradients are multiplied by it */
  void *owned[64];            /* what stream_free gives back, as it does the tensors */
  int owned_count;
} stream;

/* Every call into the library goes through here: its sentence names the argument at fault. */
static void must(const moe_context *ctx, moe_status status) {
  if (status != MOE_OK) die(1, "%s: %s", moe_status_str(status), ctx->message);
}

static void *own(stream *s, int64_t count, size_t bytes) {
  if (s->owned_count == (int)(sizeof s->owned / sizeof *s->owned)) die(1, "stream.owned is too short");
  return s->owned[s->owned_count++] = zeroed((size_t)count, bytes);
}

static void stream_init(stream *s, moe_context *ctx, const uint8_t *bytes, float loss_scale, uint64_t *random) {
  s->ctx = ctx, s->bytes = bytes, s->loss_scale = loss_scale;
  tensor_init(&s->embed, CONTEXT * BYTES * H, 0.25f, 0, random);
  tensor_init(&s->head, H * BYTES, 0.05f, 0, random);
  for (int i = 0; i <= LAYERS; i++) s->x[i] = own(s, BATCH * H, 4), s->norm[i] = own(s, BATCH, 4);
  s->h = own(s, BATCH * H, 4), s->dh = own(s, BATCH * H, 4), s->dx = own(s, BATCH * H, 4);
  s->logits = own(s, BATCH * BYTES, 4), s->dlogits = own(s, BATCH * BYTES, 4), s->loss = own(s, BATCH, 4);
  s->top = own(s, BATCH, 4), s->top_weight = own(s, BATCH, 4), s->no_grad = own(s, BATCH, 4);
}

static void stream_free(stream *s) {
  for (int i = 0; i < s->owned_count; i++) free(s->owned[i]);
}

static void run(stream *s, int64_t count, moe_task task) {
  s->ctx->parallel_for(s->ctx->parallel_for_user, count, task, s);
}

static void run_rows(stream *s, moe_task task) { run(s, (s->T + ROWS - 1) / ROWS, task); }

static int64_t rows_end(const stream *s, int64_t item) { return (item + 1) * ROWS < s->T ? (item + 1) * ROWS : s->T; }

/* x[stage] = the embedding, or x[stage-1] plus what its layer put into h; then h = rmsnorm(x[stage]). */
static void stream_rows(void *arg, int64_t item) {
  stream *s = arg;
  for (int64_t t = item * ROWS; t < rows_end(s, item); t++) {
    float *restrict x = s->x[s->stage] + t * H, *restrict h = s->h + t * H;
    if (s->stage > 0) {
      const float *restrict before = s->x[s->stage - 1] + t * H;
      for (int i = 0; i < H; i++) x[i] = before[i] + h[i];
    } else {
      for (int i = 0; i < H; i++) x[i] = 0;
      for (int j = 0; j < CONTEXT; j++) {
        const float *restrict row = s->embed.value + (j * BYTES + s->bytes[s->position[t] - 1 - j]) * H;
        for (int i = 0; i < H; i++) x[i] += row[i];
      }
    }
    float sum = 0;
    for (int i = 0; i < H; i++) sum += x[i] * x[i];
    float norm = s->norm[s->stage][t] = 1 / sqrtf(sum / H + 1e-6f);
    for (int i = 0; i < H; i++) h[i] = x[i] * norm;
  }
}

/* dx += dh through the rmsnorm of x[stage]. */
static void norm_backward_rows(void *arg, int64_t item) {
  stream *s = arg;
  for (int64_t t = item * ROWS; t < rows_end(s, item); t++) {
    const float *restrict x = s->x[s->stage] + t * H, *restrict dh = s->dh + t * H;
    float *restrict dx = s->dx + t * H;
    float norm = s->norm[s->stage][t], dot = 0;
    for (int i = 0; i < H; i++) dot += dh[i] * x[i];
    dot *= norm * norm / H;
    for (int i = 0; i < H; i++) dx[i] += norm * (dh[i] - dot * x[i]);
  }
}

/* One table per item; every item walks the batch in order. */
static void embed_backward_table(void *arg, int64_t j) {
  stream *s = arg;
  float *table = s->embed.grad + j * BYTES * H;
  memset(table, 0, BYTES * H * sizeof *table);
  for (int64_t t = 0; t < s->T; t++) {
    float *restrict row = table + s->bytes[s->position[t] - 1 - j] * H;
    const float *restrict dx = s->dx + t * H;
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
  stream *s = arg;
  float scale = s->loss_scale / (float)s->T;
  for (int64_t t = item * ROWS; t < rows_end(s, item); t++) {
    const float *logits = s->logits + t * BYTES;
    float *p = s->dlogits + t * BYTES, most = logits[s->top[t]], sum = 0;
    int target = s->bytes[s->position[t]];
    for (int i = 0; i < BYTES; i++) sum += p[i] = exp_negative(logits[i] - most);
    s->loss[t] = logf(sum) + most - logits[target];
    for (int i = 0; i < BYTES; i++) p[i] *= scale / sum;
    p[target] -= scale;
  }
}

/* A router is a linear layer that also tells which outputs are the largest: with 256 "experts" it is the head. */
static void head_forward(stream *s) {
  moe_router_topk_args head = {.T = s->T, .H = H, .E = BYTES, .K = 1, .hidden_states = s->h,
    .router_weight = s->head.value, .router_logits = s->logits, .expert_index = s->top,
    .expert_weights = s->top_weight};
  must(s->ctx, moe_router_topk_f32(s->ctx, &head));
}

static void head_backward(stream *s) {
  moe_router_topk_bwd_args head = {.T = s->T, .H = H, .E = BYTES, .K = 1, .hidden_states = s->h,
    .router_weight = s->head.value, .router_logits = s->logits, .expert_index = s->top,
    .expert_weights_grad = s->no_grad, .router_logits_grad = s->dlogits, .router_weight_grad = s->head.grad,
    .hidden_states_grad = s->dh, .accumulate = MOE_ACCUMULATE_ROUTER_LOGITS_GRAD};
  must(s->ctx, moe_router_topk_bwd_f32(s->ctx, &head));
  memset(s->dx, 0, (size_t)(s->T * H) * sizeof *s->dx);
  run_rows(s, norm_backward_rows);
}

/* The mean loss in bits per byte, after head_forward. */
static double stream_loss(stream *s) {
  run_rows(s, loss_rows);
  double sum = 0;
  for (int64_t t = 0; t < s->T; t++) sum += (double)s->loss[t];
  return sum / (double)s->T * 1.4426950408889634;
}

#endif
