/* adamw.h: parameters in float, and AdamW with a clipped gradient norm. Needs moe.h and text.h first. */
#ifndef EXAMPLE_ADAMW_H
#define EXAMPLE_ADAMW_H

enum { ADAMW_CHUNK = 8192 }; /* values per work item; sums go chunk by chunk, whoever computes them */

typedef struct tensor {
  float *value, *grad, *m, *v; /* m and v are the moments */
  void *low;                   /* value in the compute type, for what the experts and routers read; may be NULL */
  double *norms;               /* [chunks] squared gradient norms */
  int64_t count, chunks;
} tensor;

typedef struct adamw {
  float rate, weight_decay, beta1, beta2, clip_norm;
  double power1, power2;            /* beta^steps, 1 at the start */
  float grad_factor, fix1, fix2;    /* of this step: clipping and unscaling; bias corrections */
} adamw;

typedef struct adamw_job {
  adamw *a;
  tensor *p;
} adamw_job;

static uint64_t next_random(uint64_t *state) { /* splitmix64 */
  uint64_t z = (*state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

/* Uniform values in [-width, width). low_bytes: of one element of `low`, or 0. */
static void tensor_init(tensor *p, int64_t count, float width, size_t low_bytes, uint64_t *random) {
  size_t n = (size_t)count, chunks = (n + ADAMW_CHUNK - 1) / ADAMW_CHUNK;
  *p = (tensor){.value = zeroed(n, 4), .grad = zeroed(n, 4), .m = zeroed(n, 4), .v = zeroed(n, 4),
                .low = low_bytes ? zeroed(n, low_bytes) : NULL, .norms = zeroed(chunks, sizeof *p->norms),
                .count = count, .chunks = (int64_t)chunks};
  for (size_t i = 0; i < n; i++) p->value[i] = ((float)(next_random(random) >> 40) * 0x1p-23f - 1) * width;
}

static void tensor_free(tensor *p) {
  free(p->value), free(p->grad), free(p->m), free(p->v), free(p->low), free(p->norms);
}

static int64_t adamw_chunk_end(const tensor *p, int64_t chunk) {
  return chunk + 1 < p->chunks ? (chunk + 1) * ADAMW_CHUNK : p->count;
}

static void adamw_norm_chunk(void *arg, int64_t chunk) {
  tensor *p = ((adamw_job *)arg)->p;
  double sum = 0;
  for (int64_t i = chunk * ADAMW_CHUNK; i < adamw_chunk_end(p, chunk); i++)
    sum += (double)p->grad[i] * (double)p->grad[i];
  p->norms[chunk] = sum;
}

static void adamw_step_chunk(void *arg, int64_t chunk) {
  adamw a = *((adamw_job *)arg)->a;
  tensor *p = ((adamw_job *)arg)->p;
  float *restrict w = p->value, *restrict m = p->m, *restrict v = p->v;
  for (int64_t i = chunk * ADAMW_CHUNK; i < adamw_chunk_end(p, chunk); i++) {
    float g = p->grad[i] * a.grad_factor;
    m[i] = a.beta1 * m[i] + (1 - a.beta1) * g;
    v[i] = a.beta2 * v[i] + (1 - a.beta2) * g * g;
    w[i] -= a.rate * (m[i] * a.fix1 / (sqrtf(v[i] * a.fix2) + 1e-8f) + a.weight_decay * w[i]);
  }
}

/* One step from gradients that were multiplied by `scale`. Returns 0, and steps not, when they have overflowed. */
static int adamw_step(adamw *a, tensor **tensors, int count, float scale, const moe_context *ctx) {
  double squares = 0;
  for (int i = 0; i < count; i++) {
    adamw_job job = {a, tensors[i]};
    ctx->parallel_for(ctx->parallel_for_user, job.p->chunks, adamw_norm_chunk, &job);
    for (int64_t c = 0; c < job.p->chunks; c++) squares += job.p->norms[c];
  }
  double norm = sqrt(squares) / (double)scale;
  if (!(norm < 1e30)) return 0;
  a->grad_factor = (norm > (double)a->clip_norm ? a->clip_norm / (float)norm : 1) / scale;
  a->power1 *= (double)a->beta1, a->power2 *= (double)a->beta2;
  a->fix1 = (float)(1 / (1 - a->power1)), a->fix2 = (float)(1 / (1 - a->power2));
  for (int i = 0; i < count; i++) {
    adamw_job job = {a, tensors[i]};
    ctx->parallel_for(ctx->parallel_for_user, job.p->chunks, adamw_step_chunk, &job);
  }
  return 1;
}

/* FNV-1a over the bits of all values. */
static uint64_t tensors_hash(tensor *const *tensors, int count) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (int i = 0; i < count; i++)
    for (int64_t j = 0; j < tensors[i]->count; j++) {
      uint32_t bits;
      memcpy(&bits, &tensors[i]->value[j], sizeof bits);
      hash = (hash ^ bits) * 0x100000001b3u;
    }
  return hash;
}

#endif
