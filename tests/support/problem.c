/* problem.c: options, tensors and their contents. The operations are in problem_ops.c. */
#include "problem.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dtype.h"
#include "random.h"

/* --------------------------------------------------------------------------------------------------------- options */

static moe_dtype random_dtype(uint64_t *s) {
  return (moe_dtype)test_random_range(s, MOE_DTYPE_DEFAULT, TEST_DTYPES);
}

static moe_router_config random_router(uint64_t *s) {
  moe_router_config c = {0};
  c.score_function = (moe_score_function)test_random_range(s, 0, MOE_SCORE_COUNT_ - 1);
  c.score_order = (moe_score_order)test_random_range(s, 0, MOE_SCORE_ORDER_COUNT_ - 1);
  c.renormalize = test_random_chance(s, 2);
  c.renormalize_epsilon = c.renormalize && test_random_chance(s, 2) ? 0x1p-66f : 0.0f;
  c.routed_scaling_factor = test_random_chance(s, 3) ? 2.5f : 0.0f;
  c.num_groups = test_random_chance(s, 4) ? 2 : 0;
  c.topk_groups = c.num_groups ? (int32_t)test_random_range(s, 1, 2) : 0;
  return c;
}

void problem_affinity_mode(struct problem_options *o, int64_t number) {
  static const moe_affinity_mode mode[PROBLEM_AFFINITY_MODES] = {MOE_AFFINITY_POST_SCALE, MOE_AFFINITY_NO_SCALE,
                                                                 MOE_AFFINITY_PRE_SCALE, MOE_AFFINITY_PRE_SCALE,
                                                                 MOE_AFFINITY_ON_I};
  o->layer.affinity_mode = mode[number];
  o->hints.pre_scale_delayed = number == 3;
}

static moe_layer_config random_layer(uint64_t *s, struct problem_options *o) {
  moe_layer_config c = {0};
  c.activation = (moe_activation)test_random_range(s, 0, MOE_ACT_IDENTITY);
  problem_affinity_mode(o, test_random_range(s, 0, PROBLEM_AFFINITY_MODES - 1));
  c.affinity_mode = o->layer.affinity_mode;
  c.up_offset = test_random_chance(s, 4) ? 1.0f : 0.0f;
  c.skip_gate = test_random_chance(s, 6);
  c.clamp = test_random_chance(s, 3) ? (uint32_t)test_random_range(s, 1, 15) : 0;
  c.gate_clamp_upper_limit = 0.7f;
  c.gate_clamp_lower_limit = -0.9f;
  c.up_clamp_upper_limit = 1.3f;
  c.up_clamp_lower_limit = -0.8f;
  return c;
}

void problem_options_settle(struct problem_options *o) {
  o->layer.alpha = 0.0f;
  if (o->layer.activation == MOE_ACT_SILU && (o->seed & 1)) o->layer.alpha = 1.25f;
  if (o->router.num_groups) o->E += o->E % 2;
  int64_t selectable = o->router.num_groups ? o->E / o->router.num_groups * o->router.topk_groups : o->E;
  if (o->K > selectable) o->K = selectable;
  if (o->dropping) {
    o->spec = MOE_CTE_SHARD_ON_I_DROPPING;
    if (o->capacity > o->B) o->capacity = 0;
  } else if (o->spec == MOE_CTE_SHARD_ON_I_DROPPING) {
    o->spec = MOE_CTE_SHARD_ON_I;
  }
  if (o->layer.affinity_mode == MOE_AFFINITY_ON_I) o->save_down = 0;
  if (o->layer.affinity_mode != MOE_AFFINITY_POST_SCALE) o->affinity_option = MOE_AFFINITY_OPTION_ON_I;
  if (o->spec == MOE_CTE_SHARD_ON_I_HYBRID) o->no_conditions = 0;
  if (o->not_accumulating) o->accumulate_output = 0;
  if (o->device_output_shape) o->accumulate_output = 0;
}

struct problem_options problem_options_random(uint64_t seed, moe_dtype dtype) {
  uint64_t s = seed * 4 + (uint64_t)dtype;
  struct problem_options o = {.seed = seed, .dtype = dtype};
  o.affinity_dtype = random_dtype(&s);
  o.checkpoint_dtype = random_dtype(&s);
  o.weight_grad_dtype = random_dtype(&s);
  o.T = test_random_range(&s, 1, 40);
  o.H = test_random_range(&s, 1, 70);
  o.I = test_random_range(&s, 1, 50);
  o.E = test_random_range(&s, 1, 6);
  o.K = test_random_range(&s, 1, 3);
  o.B = test_random_range(&s, 1, 19);
  o.router = random_router(&s);
  o.layer = random_layer(&s, &o);
  o.token_mask = test_random_chance(&s, 3);
  o.router_bias = test_random_chance(&s, 2);
  o.selection_bias = test_random_chance(&s, 3);
  o.expert_bias = test_random_chance(&s, 2);
  o.skip_token = test_random_chance(&s, 2);
  o.tight = (int)(seed >> 1 & 1);
  o.dropping = test_random_chance(&s, 6);
  o.no_conditions = test_random_chance(&s, 2);
  o.capacity = test_random_chance(&s, 5) ? test_random_range(&s, 1, 8) : 0;
  o.drop_policy = (moe_drop_policy)test_random_range(&s, 0, MOE_DROP_COUNT_ - 1);
  o.spec = (moe_cte_spec)test_random_range(&s, 0, 2);
  o.not_accumulating = test_random_chance(&s, 10);
  o.accumulate_output = test_random_chance(&s, 6);
  o.device_output_shape = test_random_chance(&s, 10);
  o.save_gate_up = test_random_chance(&s, 2);
  o.save_down = test_random_chance(&s, 2);
  o.affinity_option = (moe_affinity_option)test_random_range(&s, 0, MOE_AFFINITY_OPTION_COUNT_ - 1);
  o.hints.shard_option = (moe_shard_option)test_random_range(&s, 0, MOE_SHARD_COUNT_ - 1);
  o.direct_weights_grad = test_random_chance(&s, 3);
  o.accumulate = test_random_chance(&s, 2) ? (uint32_t)test_random(&s) & 511u : 0;
  o.empty_expert = test_random_chance(&s, 4) ? (int)test_random_range(&s, 1, o.E) : 0;
  o.tiny_rows = test_random_chance(&s, 3);
  o.nan_row = test_random_chance(&s, 8);
  problem_options_settle(&o);
  return o;
}

struct problem_options problem_options_long(uint64_t seed, moe_dtype dtype, int kind) {
  static const int64_t shape[PROBLEM_LONG_SHAPES][6] = {
      /* T, H, I, E, K, B */
      {4200, 5, 3, 3, 2, 700}, {1300, 9, 8, 1, 1, 1299}, {37, 530, 6, 4, 2, 5},   {33, 7, 530, 3, 2, 16},
      {60, 6, 3, 5000, 3, 2},  {130, 270, 140, 3, 2, 50}, {100, 6, 5, 300, 6, 7},
      /* weights that stream past, in blocks and whole; chunks of rows */
      {26, 600, 70, 4, 2, 8},   {5, 400, 40, 30, 4, 2},   {430, 130, 20, 1, 1, 100},
      /* about as much of the rows as is kept gathered, of some rows and of more */
      {30, 5600, 4, 1, 1, 30},  {380, 1000, 5, 1, 1, 380},
      /* so many experts that the last ones' work is divided finer */
      {430, 24, 520, 24, 2, 36},
      /* so many tokens and experts that chunks are longer */
      {4200, 5, 3, 40, 2, 64},
      /* enough rows for weights to turn beside them */
      {131, 96, 192, 1, 1, 131},
  };
  struct problem_options o = problem_options_random(seed, dtype);
  const int64_t *s = shape[kind];
  o.T = s[0], o.H = s[1], o.I = s[2], o.E = s[3], o.K = s[4], o.B = s[5];
  o.dropping = o.empty_expert = 0;
  problem_options_settle(&o);
  return o;
}

int64_t problem_output_rows(const struct problem_options *o) {
  if (!o->device_output_shape) return o->T;
  if (o->spec == MOE_CTE_SHARD_ON_BLOCK) return o->not_accumulating ? o->T : 2 * o->T;
  return o->skip_token ? o->T : o->T + 1;
}

/* --------------------------------------------------------------------------------------------------------- tensors */

/* The element type as a moe_dtype, MOE_DTYPE_DEFAULT for the integer tensors. */
static moe_dtype tensor_dtype(const struct problem_options *o, enum problem_type type) {
  switch (type) {
    case PROBLEM_F32: return MOE_DTYPE_F32;
    case PROBLEM_DATA: return o->dtype;
    case PROBLEM_AFFINITY: return o->affinity_dtype ? o->affinity_dtype : MOE_DTYPE_F32;
    case PROBLEM_CHECKPOINT: return o->checkpoint_dtype ? o->checkpoint_dtype : o->dtype;
    case PROBLEM_WEIGHT_GRAD: return o->weight_grad_dtype ? o->weight_grad_dtype : o->dtype;
    case PROBLEM_U8:
    case PROBLEM_I32:
    case PROBLEM_I64: break;
  }
  return MOE_DTYPE_DEFAULT;
}

static int element_bytes(const struct problem_options *o, enum problem_type type) {
  if (type == PROBLEM_U8) return 1;
  if (type == PROBLEM_I64) return 8;
  moe_dtype dtype = tensor_dtype(o, type);
  return dtype == MOE_DTYPE_DEFAULT ? 4 : (int)moe_dtype_size(dtype);
}

static void plan_tensors(struct problem *p) {
  const struct problem_options *o = &p->o;
  int64_t N = p->N;
#define PROBLEM_PLAN(ID, tensor_name, tensor_type, elements, ops, typical)                              \
  p->tensor[PT_##ID] = (struct problem_tensor){.name = #tensor_name, .type = PROBLEM_##tensor_type,     \
      .element = element_bytes(o, PROBLEM_##tensor_type), .count = (elements), .writers = (ops),        \
      .exponent = (typical), .data = NULL};
  PROBLEM_TENSORS(PROBLEM_PLAN)
#undef PROBLEM_PLAN
}

static void *allocate_malloc(void *user, int tensor, size_t bytes) {
  (void)user, (void)tensor;
  return malloc(bytes);
}

static void release_malloc(void *user, int tensor, void *memory) {
  (void)user, (void)tensor;
  free(memory);
}

int problem_open(struct problem *p, const struct problem_options *o, problem_allocate allocate, void *user) {
  memset(p, 0, sizeof *p);
  p->o = *o;
  p->N = o->dropping ? o->E : moe_route_blocks_count(o->T, o->E, o->K, o->B) + o->extra_blocks;
  plan_tensors(p);
  for (int i = 0; i < PT_COUNT; i++) {
    p->tensor[i].data = (allocate ? allocate : allocate_malloc)(user, i, problem_tensor_bytes(p, i));
    if (p->tensor[i].data == NULL) return 0;
  }
  problem_fill(p);
  return 1;
}

void problem_close(struct problem *p, problem_release release, void *user) {
  for (int i = 0; i < PT_COUNT; i++)
    if (p->tensor[i].data != NULL) (release ? release : release_malloc)(user, i, p->tensor[i].data);
  memset(p, 0, sizeof *p);
}

size_t problem_tensor_bytes(const struct problem *p, int tensor) {
  return (size_t)p->tensor[tensor].count * (size_t)p->tensor[tensor].element;
}

/* ------------------------------------------------------------------------------------------------------------ fill */

/* Bits of a number with exponent `exponent` or a little below. One in 32 is a zero, one in 64 subnormal. */
static uint32_t random_number(uint64_t *s, moe_dtype dtype, int exponent) {
  const int digits = test_dtypes[dtype].fraction_bits;
  uint64_t r = test_random(s);
  uint32_t sign = r >> 63 ? test_dtype_sign(dtype) : 0;
  uint32_t fraction = (uint32_t)(r >> 8) & ((1u << digits) - 1);
  if ((r & 31) == 0) return sign;
  int biased = (r & 63) == 1 ? 0 : exponent - (int)(r >> 6 & 3) + test_dtype_bias(dtype);
  if (biased < 0) biased = 0;
  return sign | (uint32_t)biased << digits | fraction;
}

static void put(unsigned char *data, int64_t i, int element, uint64_t value) {
  uint8_t v8 = (uint8_t)value;
  uint16_t v16 = (uint16_t)value;
  uint32_t v32 = (uint32_t)value;
  const void *const from[] = {NULL, &v8, &v16, NULL, &v32, NULL, NULL, NULL, &value};
  memcpy(data + i * element, from[element], (size_t)element);
}

static void fill_tensor(struct problem *p, int id) {
  struct problem_tensor *t = &p->tensor[id];
  uint64_t s = p->o.seed * 64 + (uint64_t)id;
  moe_dtype dtype = tensor_dtype(&p->o, t->type);
  for (int64_t i = 0; i < t->count; i++) {
    uint64_t value = dtype == MOE_DTYPE_DEFAULT ? test_random(&s) : random_number(&s, dtype, t->exponent);
    if (id == PT_TOKEN_MASK) value = value % 4 != 0;
    put(t->data, i, t->element, value);
  }
}

/* Row `row` of a [.,H] tensor gets typical values around 2^exponent. */
static void fill_row(struct problem *p, int id, int64_t row, int exponent) {
  uint64_t s = p->o.seed * 64 + 4096 + (uint64_t)(row * PT_COUNT + id);
  for (int64_t h = 0; h < p->o.H; h++)
    put(p->tensor[id].data, row * p->o.H + h, p->tensor[id].element, random_number(&s, p->o.dtype, exponent));
}

static void fill_nan_row(struct problem *p) {
  const uint32_t infinity = test_dtype_infinity(p->o.dtype), sign = test_dtype_sign(p->o.dtype);
  const uint32_t quiet = 1u << (test_dtypes[p->o.dtype].fraction_bits - 1);
  /* a signalling NaN, infinity, a negative quiet NaN with payload, -infinity */
  const uint32_t odd[4] = {infinity + 1, infinity, sign + infinity + quiet + 3, sign + infinity};
  int64_t row = p->o.T / 2;
  const struct problem_tensor *x = &p->tensor[PT_HIDDEN_STATES];
  for (int64_t h = 0; h < p->o.H; h += 3) put(x->data, row * p->o.H + h, x->element, odd[h / 3 % 4]);
}

void problem_fill(struct problem *p) {
  for (int id = 0; id < PT_COUNT; id++) fill_tensor(p, id);
  if (p->o.tiny_rows) { /* times a weight of 2^-3: around and below the smallest normal number */
    int tiny = test_dtypes[p->o.dtype].exponent_bits == 8 ? -121 : 1 - test_dtype_bias(p->o.dtype);
    for (int64_t t = 0; t < p->o.T; t += 3) fill_row(p, PT_HIDDEN_STATES, t, tiny - (int)(t % 5));
    for (int64_t t = 0; t < p->o.T; t += 4) fill_row(p, PT_OUTPUT_GRAD, t, tiny - (int)(t % 7));
  }
  if (p->o.nan_row) fill_nan_row(p);
}

/* ------------------------------------------------------------------------------------------------------------ hash */

static uint64_t get(const unsigned char *data, int64_t i, int element) {
  uint8_t v8;
  uint16_t v16;
  uint32_t v32;
  uint64_t v64;
  if (element == 1) return memcpy(&v8, data + i, 1), v8;
  if (element == 2) return memcpy(&v16, data + 2 * i, 2), v16;
  if (element == 4) return memcpy(&v32, data + 4 * i, 4), v32;
  return memcpy(&v64, data + 8 * i, 8), v64;
}

uint64_t problem_hash_bytes(uint64_t h, const void *data, int64_t count, int element) {
  for (int64_t i = 0; i < count; i++) {
    h = (h ^ get(data, i, element)) * UINT64_C(0x9fb21c651e98df25);
    h ^= h >> 32;
  }
  return h;
}

uint64_t problem_hash(const struct problem *p, uint64_t h, enum problem_op op) {
  for (int i = 0; i < PT_COUNT; i++) {
    const struct problem_tensor *t = &p->tensor[i];
    if (t->writers & (1u << op)) h = problem_hash_bytes(h, t->data, t->count, t->element);
  }
  return h;
}

/* --------------------------------------------------------------------------------------------------------- describe */

const char *problem_dtype_name(moe_dtype dtype) { return test_dtypes[dtype].name; }

void problem_describe(const struct problem *p, const moe_context *ctx, char *text, size_t bytes) {
  const struct problem_options *o = &p->o;
  snprintf(text, bytes,
           "seed=%llu dtype=%s T=%lld H=%lld I=%lld E=%lld K=%lld B=%lld N=%lld activation=%d mode=%d clamp=%u "
           "skip_token=%d tight=%d dropping=%d spec=%d isa=%s threads=%d schedule=%d",
           (unsigned long long)o->seed, problem_dtype_name(o->dtype), (long long)o->T, (long long)o->H, (long long)o->I,
           (long long)o->E, (long long)o->K, (long long)o->B, (long long)p->N, (int)o->layer.activation,
           (int)o->layer.affinity_mode, (unsigned)o->layer.clamp, o->skip_token, o->tight, o->dropping, (int)o->spec,
           moe_isa_name(moe_isa_active()), ctx ? (int)ctx->num_threads : 0, ctx ? (int)ctx->schedule : 0);
}
