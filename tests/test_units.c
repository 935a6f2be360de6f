/* test_units: few rows times MX weights, whose products are formed in units of a group's scale where the scale bytes of
   a column and the rows permit it (quant/small_m_mx.inl). At the bound and on its other side, with sums that are next to
   it, and under random scale bytes of all 256 values, every instruction set gives the bits of the numeric contract's
   chain, which is followed here. */
#include "support/test.h"

#include <math.h>

#include "support/guard.h"
#include "support/random.h"

enum { ROWS = 19, COLUMNS = 129, GROUPS = 35 };
enum { PLAIN, AT_BOUND, ONE_ABOVE, FAR_ABOVE, ANY, SPECIAL_CODES, SPECIAL_X, KINDS };

/* An element: codes are multiples of 2^least below 2^most. */
typedef struct element {
  moe_element name;
  int bits, fraction, bias, least, most;
  uint32_t max, infinity; /* codes; 0: there is none */
} element;
static const element elements[] = {{MOE_ELEMENT_E2M1, 4, 1, 1, -1, 3, 7, 0},
                                   {MOE_ELEMENT_E4M3FN, 8, 3, 7, -9, 9, 126, 0},
                                   {MOE_ELEMENT_E5M2, 8, 2, 15, -16, 16, 123, 124}};

typedef struct units {
  const element *e;
  moe_mx_layout layout;
  int bf16;
  int64_t rows, n, k;
  int kind;
  uint64_t rng;
  struct guarded codes, scale, x, y; /* as stored */
  uint8_t code[COLUMNS][GROUPS * 32], byte[COLUMNS][GROUPS];
  float a[ROWS][GROUPS * 32], c[ROWS][COLUMNS];
} units;

static uint64_t below(units *u, uint64_t n) { return (test_random(&u->rng) >> 20) % n; }

static uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

static float flushed(const units *u, float x) { return u->bf16 && fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }

static float value(const element *e, uint32_t code) {
  const uint32_t sign = code >> (e->bits - 1), magnitude = code & ((1u << (e->bits - 1)) - 1u);
  const int exponent = (int)(magnitude >> e->fraction);
  const float fraction = (float)(magnitude & ((1u << e->fraction) - 1u)), one = (float)(1 << e->fraction);
  float x = ldexpf(exponent ? one + fraction : fraction, (exponent ? exponent : 1) - e->bias - e->fraction);
  if (magnitude > e->max) x = magnitude == e->infinity ? INFINITY : NAN;
  return sign ? -x : x;
}

/* How far apart scale bytes and 127 may be, with exponents of x from x_least to x_most, or these and 0. */
static int bound(const units *u, int x_least, int x_most) {
  int depth = 0;
  while (u->k > (int64_t)1 << depth) depth++;
  const int low = 119 + x_least + u->e->least, high = 127 - x_most - u->e->most - depth;
  return low < high ? low : high;
}

/* A number of an exponent, with as many bits as the type has. */
static float number(units *u, int exponent) {
  const float x = ldexpf((float)(below(u, 128) + 128), exponent - 7);
  return below(u, 2) ? -x : x;
}

static void fill_x(units *u, int x_least, int x_most) {
  for (int64_t r = 0; r < u->rows; r++)
    for (int64_t q = 0; q < u->k; q++) {
      const int exponent = below(u, 4)   ? x_least + (int)below(u, (uint64_t)(x_most - x_least + 1))
                           : below(u, 2) ? x_least
                                         : x_most;
      u->a[r][q] = below(u, 8) == 0 ? (below(u, 2) ? 0.0f : -0.0f) : number(u, exponent);
    }
  static const float special[] = {0x1p-133f, -0x1.3p-130f, INFINITY, -INFINITY, NAN, 0x1p127f, 0x1p-126f};
  if (u->kind == SPECIAL_X) u->a[below(u, (uint64_t)u->rows)][below(u, (uint64_t)u->k)] = special[below(u, 7)];
}

/* Scale bytes of a column from `low` to `low` + range, which 127 is among, both of which there are. */
static void fill_scales(units *u, int range) {
  const int groups = (int)u->k / 32;
  for (int64_t j = 0; j < u->n; j++) {
    const int least = (int)below(u, (uint64_t)range + 1), low = 127 - least < 0 ? 0 : 127 - least;
    const int high = low + range > 255 ? 255 : low + range;
    for (int g = 0; g < groups; g++) {
      const int ends = u->kind < ANY && below(u, 3) == 0, end = below(u, 2) ? low : high;
      const int byte = u->kind == ANY ? (int)below(u, 256) : low + (int)below(u, (uint64_t)(high - low) + 1);
      u->byte[j][g] = (uint8_t)(ends ? end : byte);
    }
  }
}

static void fill_codes(units *u) {
  const uint32_t sign = 1u << (u->e->bits - 1);
  for (int64_t j = 0; j < u->n; j++)
    for (int64_t q = 0; q < u->k; q++) {
      uint32_t code = (uint32_t)below(u, 2 * sign);
      if (u->kind != SPECIAL_CODES && (code & (sign - 1)) > u->e->max) code = 0;
      if (u->kind == SPECIAL_CODES && below(u, 64) && (code & (sign - 1)) > u->e->max) code = sign;
      u->code[j][q] = (uint8_t)code;
    }
}

/* Codes, scales and rows as the function takes them. */
static void store(units *u) {
  const int64_t groups = u->k / 32, ggml = u->layout == MOE_MX_LAYOUT_GGML, size = u->e->bits * 4 + ggml;
  for (int64_t j = 0; j < u->n; j++)
    for (int64_t g = 0; g < groups; g++) {
      uint8_t *to = u->codes.data + (j * groups + g) * size;
      if (ggml) *to++ = u->byte[j][g];
      else u->scale.data[j * groups + g] = u->byte[j][g];
      const uint8_t *code = u->code[j] + g * 32;
      for (int i = 0; i < u->e->bits * 4; i++)
        to[i] = (uint8_t)(u->e->bits == 8 ? code[i]
                          : ggml          ? code[i] | code[i + 16] << 4
                                          : code[2 * i] | code[2 * i + 1] << 4);
    }
  for (int64_t r = 0; r < u->rows; r++)
    for (int64_t q = 0; q < u->k; q++) {
      const uint32_t bits = bits_of(u->a[r][q]);
      const uint16_t upper = (uint16_t)(bits >> 16);
      if (u->bf16) memcpy(u->x.data + 2 * (r * u->k + q), &upper, 2);
      else memcpy(u->x.data + 4 * (r * u->k + q), &bits, 4);
    }
}

/* The contract's chain: two k at a time, the odd one first. */
static void reference(units *u) {
  for (int64_t j = 0; j < u->n; j++) {
    float w[GROUPS * 32];
    for (int64_t q = 0; q < u->k; q++) {
      const int byte = u->byte[j][q / 32];
      w[q] = flushed(u, byte == 255 ? NAN : ldexpf(value(u->e, u->code[j][q]), byte - 127));
    }
    for (int64_t r = 0; r < u->rows; r++) {
      float c = 0.0f;
      for (int64_t q = 0; q < u->k; q++) c = flushed(u, fmaf(flushed(u, u->a[r][q ^ 1]), w[q ^ 1], c));
      u->c[r][j] = c;
    }
  }
}

static void compare(const units *u, int isa) {
  for (int64_t r = 0; r < u->rows; r++)
    for (int64_t j = 0; j < u->n; j++) {
      const float c = u->c[r][j];
      uint32_t want = isnan(c) ? 0x7fc00000u : bits_of(c), got = 0;
      if (u->bf16 && !isnan(c)) want = (want + 0x7fffu + (want >> 16 & 1u)) & 0xffff0000u;
      if (u->bf16) memcpy((unsigned char *)&got + 2, u->y.data + 2 * (r * u->n + j), 2);
      else memcpy(&got, u->y.data + 4 * (r * u->n + j), 4);
      if (got != want)
        fail_msg("isa %d bf16 %d element %d layout %d rows %d n %d k %d kind %d: (%d,%d) is %08x, not %08x", isa,
                 u->bf16, u->e->name, u->layout, (int)u->rows, (int)u->n, (int)u->k, u->kind, (int)r, (int)j, got,
                 want);
    }
}

static void multiply(units *u) {
  const int32_t sizes[1] = {(int32_t)u->rows};
  const moe_quantized_weight w = {.element = u->e->name,
                                  .scaling = MOE_WEIGHT_MX,
                                  .layout = u->layout,
                                  .codes = u->codes.data,
                                  .scales = u->scale.data};
  moe_grouped_gemm_args args = {.num_tokens = u->rows, .topk = 1, .E = 1, .N = u->n, .K = u->k, .m_sizes = sizes};
  moe_context ctx = {0};
  size_t bytes = 0;
  args.X = u->x.data, args.Y = u->y.data, args.quantized_W = &w;
  assert_int_equal(u->bf16 ? moe_grouped_gemm_bf16_workspace_size(&ctx, &args, &bytes)
                           : moe_grouped_gemm_f32_workspace_size(&ctx, &args, &bytes),
                   MOE_OK);
  args.workspace = malloc(bytes + 1), args.workspace_bytes = bytes;
  memset(args.workspace, 0xff, bytes);
  assert_int_equal(u->bf16 ? moe_grouped_gemm_bf16(&ctx, &args) : moe_grouped_gemm_f32(&ctx, &args), MOE_OK);
  free(args.workspace);
}

static void use_units(units *u) {
  const int64_t groups = u->k / 32, size = u->bf16 ? 2 : 4, ggml = u->layout == MOE_MX_LAYOUT_GGML;
  const enum guard_side side = below(u, 2) ? GUARD_AFTER : GUARD_BEFORE;
  u->codes = guard_alloc((size_t)(u->n * groups * (u->e->bits * 4 + ggml)), side);
  u->scale = guard_alloc((size_t)(u->n * groups), side);
  u->x = guard_alloc((size_t)(u->rows * u->k * size), side);
  u->y = guard_alloc((size_t)(u->rows * u->n * size), side);
  store(u);
  reference(u);
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++) {
    if (!test_use_isa(isa)) continue;
    multiply(u);
    compare(u, isa);
  }
  guard_free(&u->codes), guard_free(&u->scale), guard_free(&u->x), guard_free(&u->y);
}

static void use_random(units *u) {
  const int x_least = -(int)below(u, 100), x_most = (int)below(u, 60), most = bound(u, x_least, x_most);
  const int range = most + (u->kind == ONE_ABOVE ? 1 : u->kind == FAR_ABOVE ? 2 + (int)below(u, 60) : 0);
  fill_x(u, u->kind == PLAIN ? -4 : x_least, u->kind == PLAIN ? 4 : x_most);
  fill_scales(u, u->kind == PLAIN || range < 1 ? 8 : range > 255 ? 255 : range);
  fill_codes(u);
  use_units(u);
}

/* All codes 0, and scale bytes `byte`, but for the last group's: the units of sums. */
static void fill_last(units *u, int byte, int last) {
  memset(u->code, 0, sizeof u->code);
  for (int64_t j = 0; j < u->n; j++)
    for (int64_t g = 0; g < u->k / 32; g++) u->byte[j][g] = (uint8_t)(g == u->k / 32 - 1 ? last : byte);
}

/* A sum that is the least number there is, or below it in the last group's unit or of the contract. */
static void use_least(units *u, int over, int last) {
  const int x_least = -40, range = bound(u, x_least, 0) + over;
  const float two = ldexpf(1.0f, x_least), row[4] = {-two, two * (1.0f + 0x1p-7f), 0.0f, two};
  memset(u->a, 0, sizeof u->a);
  fill_last(u, last ? 127 : 127 - range, last ? 127 + range : 127 - range);
  for (int64_t r = 0; r < u->rows; r++) memcpy(u->a[r], row, sizeof row);
  for (int64_t j = 0; j < u->n; j++)
    for (int q = 0; q < (last ? 2 : 4); q++) u->code[j][q] = 1;
  use_units(u);
}

/* The largest sum there is, or above it in the last group's unit, or of the contract before it becomes smaller. */
static void use_most(units *u, int over, int last) {
  const int range = bound(u, 0, 0) + over;
  fill_last(u, last ? 127 : 127 + range, last ? 127 - range : 127 + range);
  for (int64_t r = 0; r < u->rows; r++)
    for (int64_t q = 0; q < u->k; q++) u->a[r][q] = 2.0f - 0x1p-7f;
  for (int64_t j = 0; j < u->n; j++)
    for (int64_t q = 0; q < u->k - (last ? 32 : 0); q++)
      u->code[j][q] = (uint8_t)(u->e->max | (!last && q >= u->k / 2 ? 1u << (u->e->bits - 1) : 0u));
  use_units(u);
}

/* All kinds of scales and rows; sums at the bounds. */
static void test_layout(const element *e, moe_mx_layout layout) {
  static const int64_t ks[] = {32, 160, 512, 544, 1120}, ns[] = {64, 128, 129, 70};
  static units u;
  u.e = e, u.layout = layout, u.rng = 7 + (uint64_t)layout;
  for (int i = 0; i < 2 * KINDS * 8; i++) {
    u.bf16 = i & 1, u.kind = i / 2 % KINDS;
    u.rows = 1 + (int64_t)below(&u, i % 3 ? 5 : ROWS), u.k = ks[below(&u, 5)], u.n = ns[below(&u, 4)];
    use_random(&u);
  }
  u.kind = AT_BOUND, u.rows = 3, u.n = 128, u.k = 1024;
  for (int i = 0; i < 2 * 2 * 4; i++) {
    u.bf16 = i & 1;
    use_least(&u, i / 4, i / 2 % 2);
    use_most(&u, i / 4, i / 2 % 2);
  }
}

static void test_plain(void **state) { (void)state, test_layout(elements, MOE_MX_LAYOUT_PLAIN); }
static void test_gpt_oss(void **state) { (void)state, test_layout(elements, MOE_MX_LAYOUT_GPT_OSS); }
static void test_ggml(void **state) { (void)state, test_layout(elements, MOE_MX_LAYOUT_GGML); }
static void test_e4m3(void **state) { (void)state, test_layout(elements + 1, MOE_MX_LAYOUT_PLAIN); }
static void test_e5m2(void **state) { (void)state, test_layout(elements + 2, MOE_MX_LAYOUT_PLAIN); }

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_plain), cmocka_unit_test(test_gpt_oss),
                                     cmocka_unit_test(test_ggml), cmocka_unit_test(test_e4m3),
                                     cmocka_unit_test(test_e5m2)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
