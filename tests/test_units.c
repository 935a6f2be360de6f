/* test_units: few rows times MXFP4 weights, whose products are formed in units of a group's scale where scale bytes and
   rows are in bounds (quant/table.h). On both sides of each bound, at the bounds, and under random scale bytes of all
   256 values, every instruction set gives the bits of the numeric contract's chain, which is followed here. */
#include "support/test.h"

#include <math.h>

#include "support/guard.h"
#include "support/random.h"

enum { ROWS = 9, COLUMNS = 129, GROUPS = 35, LEAST = 127 - 32, MOST = 127 + 8, X_LEAST = -60, X_MOST = 39 };
enum { SCALES_PLAIN, SCALES_AT_BOUNDS, SCALES_ONE_BELOW, SCALES_ONE_ABOVE, SCALES_ANY, SCALES_KINDS };
enum { X_PLAIN, X_AT_BOUNDS, X_ONE_BELOW, X_ONE_ABOVE, X_KINDS };

static const float e2m1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                               -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

typedef struct units {
  moe_mx_layout layout;
  int bf16;
  int64_t rows, n, k;
  int scales, x_kind;
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

/* A number of an exponent, with as many bits as the type has. */
static float number(units *u, int exponent) {
  const float x = ldexpf((float)(below(u, 128) + 128), exponent - 7);
  return below(u, 2) ? -x : x;
}

static void fill_x(units *u) {
  for (int64_t r = 0; r < u->rows; r++)
    for (int64_t q = 0; q < u->k; q++) {
      const int at_bounds = u->x_kind != X_PLAIN && below(u, 4) == 0;
      u->a[r][q] = below(u, 8) == 0 ? (below(u, 2) ? 0.0f : -0.0f)
                                    : number(u, at_bounds ? (below(u, 8) ? X_LEAST : X_MOST) : (int)below(u, 8) - 4);
    }
  float *one = &u->a[below(u, (uint64_t)u->rows)][below(u, (uint64_t)u->k)];
  if (u->x_kind == X_ONE_BELOW) *one = number(u, X_LEAST - 1 - (int)below(u, 60));
  if (u->x_kind == X_ONE_ABOVE) *one = number(u, X_MOST + 1 + (int)below(u, 40));
}

static void fill_scales(units *u) {
  for (int64_t j = 0; j < u->n; j++)
    for (int64_t g = 0; g < u->k / 32; g++) {
      const uint64_t kind = u->scales == SCALES_ANY ? 2 : u->scales != SCALES_PLAIN && below(u, 2) ? 1 : 0;
      u->byte[j][g] = (uint8_t)(kind == 2   ? below(u, 256)
                                : kind == 1 ? (below(u, 2) ? LEAST : MOST)
                                            : 115 + below(u, 8));
    }
  uint8_t *one = &u->byte[below(u, (uint64_t)u->n)][below(u, (uint64_t)u->k / 32)];
  if (u->scales == SCALES_ONE_BELOW) *one = (uint8_t)(LEAST - 1 - below(u, 2) * below(u, LEAST));
  if (u->scales == SCALES_ONE_ABOVE) *one = (uint8_t)(MOST + 1 + below(u, 2) * below(u, 255 - MOST));
}

/* Codes, scales and rows as the function takes them. */
static void store(units *u) {
  const int64_t groups = u->k / 32, ggml = u->layout == MOE_MX_LAYOUT_GGML;
  for (int64_t j = 0; j < u->n; j++)
    for (int64_t g = 0; g < groups; g++) {
      uint8_t *to = u->codes.data + (j * groups + g) * (ggml ? 17 : 16);
      if (ggml) *to++ = u->byte[j][g];
      else u->scale.data[j * groups + g] = u->byte[j][g];
      const uint8_t *code = u->code[j] + g * 32;
      for (int i = 0; i < 16; i++)
        to[i] = (uint8_t)(ggml ? code[i] | code[i + 16] << 4 : code[2 * i] | code[2 * i + 1] << 4);
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
      w[q] = flushed(u, byte == 255 ? NAN : ldexpf(e2m1[u->code[j][q]], byte - 127));
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
        fail_msg("isa %d bf16 %d layout %d rows %d n %d k %d scales %d x %d: (%d,%d) is %08x, not %08x", isa, u->bf16,
                 u->layout, (int)u->rows, (int)u->n, (int)u->k, u->scales, u->x_kind, (int)r, (int)j, got, want);
    }
}

static void multiply(units *u) {
  const int32_t sizes[1] = {(int32_t)u->rows};
  const moe_quantized_weight w = {.element = MOE_ELEMENT_E2M1,
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
  u->codes = guard_alloc((size_t)(u->n * groups * (ggml ? 17 : 16)), side);
  u->scale = guard_alloc((size_t)(u->n * groups), side);
  u->x = guard_alloc((size_t)(u->rows * u->k * size), side);
  u->y = guard_alloc((size_t)(u->rows * u->n * size), side);
  for (int64_t j = 0; j < u->n; j++)
    for (int64_t q = 0; q < u->k; q++) u->code[j][q] = (uint8_t)below(u, 16);
  fill_x(u);
  fill_scales(u);
  store(u);
  reference(u);
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++) {
    if (!test_use_isa(isa)) continue;
    multiply(u);
    compare(u, isa);
  }
  guard_free(&u->codes), guard_free(&u->scale), guard_free(&u->x), guard_free(&u->y);
}

/* All kinds of scales with all kinds of rows. */
static void test_layout(moe_mx_layout layout) {
  static const int64_t ks[] = {32, 160, 512, 544, 1120}, ns[] = {64, 128, 129, 70};
  static units u;
  u.layout = layout, u.rng = 7 + (uint64_t)layout;
  for (int i = 0; i < 2 * SCALES_KINDS * X_KINDS * 3; i++) {
    u.bf16 = i & 1;
    u.scales = i / 2 % SCALES_KINDS, u.x_kind = i / 2 / SCALES_KINDS % X_KINDS;
    u.rows = 1 + (int64_t)below(&u, ROWS), u.k = ks[below(&u, 5)], u.n = ns[below(&u, 4)];
    use_units(&u);
  }
}

static void test_plain(void **state) { (void)state, test_layout(MOE_MX_LAYOUT_PLAIN); }
static void test_gpt_oss(void **state) { (void)state, test_layout(MOE_MX_LAYOUT_GPT_OSS); }
static void test_ggml(void **state) { (void)state, test_layout(MOE_MX_LAYOUT_GGML); }

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_plain), cmocka_unit_test(test_gpt_oss),
                                     cmocka_unit_test(test_ggml)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
