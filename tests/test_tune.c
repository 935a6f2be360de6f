/* Tuned blocking: whatever a table says, the bits of every product are the same, in the workspace that was asked for.
   The tuner, by a clock that lets any one blocking be the fastest. The table as text. */
#include "support/test.h"

#include "support/fill.h"
#include "support/grouped.h"
#include "support/guard.h"
#include "support/pack.h"

enum { REPEATS = 1, MOST = 64 };

typedef struct product {
  moe_dtype dtype;
  int op;
  moe_grouped_gemm_args args;
  test_tensor x, w, dy, out, want;
  int32_t sizes[8], gather[4096];
} product;

/* What it says at each call: a run takes a second, but half of it where `fast` and `last` are the comparisons, of two
   blockings in turn, and the run is of the second. */
typedef struct fake_clock {
  int64_t calls, fast, last;
  double now;
} fake_clock;

static double fake_time(void *user) {
  fake_clock *c = (fake_clock *)user;
  const int64_t run = c->calls / 2, comparison = run / (2 * REPEATS), second = run % 2;
  if (c->calls++ % 2) c->now += second && (comparison == c->fast || comparison == c->last) ? 0.5 : 1;
  return c->now;
}

static void *take(void *user, size_t bytes) { return (void)user, malloc(bytes); }
static void give(void *user, void *memory, size_t bytes) { (void)user, (void)bytes, free(memory); }
static moe_context context(void) { return (moe_context){.allocate = take, .release = give, .num_threads = 3}; }

/* ----------------------------------------------------------------------------------------------------------- cases */

/* Every third expert has no rows. */
static void product_open(product *p, uint64_t seed, moe_dtype dtype, int op, int64_t rows) {
  uint64_t rng = seed;
  moe_grouped_gemm_args *a = &p->args;
  memset(p, 0, sizeof *p);
  p->dtype = dtype, p->op = op;
  a->E = 4, a->topk = 2, a->num_tokens = rows * 3 / 2 + 1, a->N = 64 * 3 + 6 * (int64_t)(seed % 2),
  a->K = test_random_range(&rng, 260, 330);
  const int64_t total = a->num_tokens * a->topk;
  for (int e = 0; e < 4; e++) p->sizes[e] = e == 2 ? 0 : (int32_t)rows;
  for (int64_t i = 0; i < total; i++) {
    const int64_t j = test_random_range(&rng, 0, i);
    p->gather[i] = p->gather[j], p->gather[j] = (int32_t)i;
  }
  a->permute_x = seed % 3 == 0, a->permute_y = seed % 3 == 1;
  p->x = test_tensor_new(dtype, (a->permute_x ? a->num_tokens : total) * a->K),
  p->w = test_tensor_new(dtype, 4 * a->N * a->K);
  p->dy = test_tensor_new(dtype, total * a->N);
  p->out = test_tensor_new(dtype, op == 0 ? total * a->N : op == 1 ? total * a->K : 4 * a->N * a->K);
  p->want = test_tensor_new(dtype, p->out.count);
  test_fill_uniform(&p->x, &rng, 1), test_fill_uniform(&p->w, &rng, 1), test_fill_uniform(&p->dy, &rng, 1);
  a->m_sizes = p->sizes, a->gather_indices = p->gather, a->X = p->x.data, a->W = p->w.data, a->dY = p->dy.data;
  a->Y = a->dX = a->dW = p->out.data;
  if (op == 0) a->dX = a->dW = NULL;
  if (op == 1) a->Y = a->dW = NULL;
  if (op == 2) a->Y = a->dX = NULL;
}

static void product_close(product *p) {
  test_tensor *all[] = {&p->x, &p->w, &p->dy, &p->out, &p->want};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) test_tensor_free(all[i]);
}

static void run(product *p, const moe_tune_table *table) {
  moe_context ctx = context();
  size_t bytes;
  assert_int_equal(grouped_size[p->dtype][p->op](&ctx, &p->args, &bytes), MOE_OK);
  struct guarded memory = guard_alloc(bytes, GUARD_AFTER);
  memset(memory.data, 0xff, bytes); /* NaN */
  moe_grouped_gemm_args a = p->args;
  a.workspace = memory.data, a.workspace_bytes = bytes;
  ctx.tune = table;
  memset(p->out.data, 0x5a, test_tensor_bytes(&p->out));
  if (grouped_call[p->dtype][p->op](&ctx, &a) != MOE_OK) fail_msg("%s", ctx.message);
  guard_free(&memory);
}

/* For so many seconds, 0: to the end. */
static void tune_for(product *p, moe_tune_table *table, fake_clock *clock, double seconds) {
  moe_context ctx = context();
  const moe_tune_grouped_gemm_args args = {.gemm = &p->args,
                                           .op = (moe_tune_op)p->op,
                                           .dtype = p->dtype,
                                           .table = table,
                                           .clock = fake_time,
                                           .clock_user = clock,
                                           .seconds = seconds,
                                           .repeats = REPEATS};
  if (moe_tune_grouped_gemm(&ctx, &args) != MOE_OK) fail_msg("%s", ctx.message);
  assert_string_equal(ctx.message, "");
  assert_null(ctx.tune);
}

static void tune(product *p, moe_tune_table *table, fake_clock *clock) { tune_for(p, table, clock, 0); }

static void same_bits(const product *p, const moe_tune_blocking *b, const char *what) {
  const int64_t differs = test_tensor_differs(&p->want, &p->out);
  if (differs >= 0)
    fail_msg(
        "%s: out[%lld] differs | dtype %s op %d isa %s N %lld K %lld kc %lld mc %lld nc %lld items %lld small_m %lld "
        "prefetch %lld",
        what, (long long)differs, test_dtype_name(p->dtype), p->op, moe_isa_name(moe_isa_active()),
        (long long)p->args.N, (long long)p->args.K, (long long)b->kc, (long long)b->mc, (long long)b->nc,
        (long long)b->items, (long long)b->small_m, (long long)b->prefetch);
}

static int numbers_set(const moe_tune_blocking *b) {
  return !!b->kc + !!b->mc + !!b->nc + !!b->items + !!b->small_m + !!b->prefetch;
}

/* ----------------------------------------------------------------------------------------------------------- tuner */

/* Lets every `step`-th blocking that is tried be the fastest. Returns how many there are. */
static int64_t check_choices(product *p, int64_t step) {
  moe_tune_entry entry, seen[MOST];
  moe_tune_table table = {&entry, 0, 1};
  fake_clock clock = {.fast = -1, .last = -1};
  run(p, NULL);
  test_tensor_copy(&p->want, &p->out);
  tune(p, &table, &clock);
  assert_int_equal(table.count, 1);
  assert_int_equal(numbers_set(&entry.blocking), 0);
  assert_true(entry.default_ns == 1000000000 && entry.best_ns == 1000000000);
  const int64_t comparisons = clock.calls / 2 / (2 * REPEATS);
  assert_true(comparisons * 4 * REPEATS == clock.calls && comparisons <= MOST);
  for (int64_t c = 0, n = 0; c + 1 < comparisons; c += step, n++) {
    clock = (fake_clock){.fast = c, .last = c + 1};
    table.count = 0;
    tune_for(p, &table, &clock, 2 * (double)c + 1.25); /* to its comparison, and the last one */
    same_bits(p, &entry.blocking, "tuner");            /* its last run */
    assert_int_equal(numbers_set(&entry.blocking), 1);
    assert_true(entry.default_ns == 1000000000 && entry.best_ns == 500000000 && entry.here && entry.E == 4);
    for (int64_t i = 0; i < n; i++) assert_memory_not_equal(&seen[i], &entry.blocking, sizeof entry.blocking);
    memcpy(&seen[n], &entry.blocking, sizeof entry.blocking);
    run(p, &table);
    same_bits(p, &entry.blocking, "tuned");
  }
  /* It is kept while nothing is faster, and goes where the default is as fast in the end. */
  if (comparisons > 1) {
    moe_tune_entry before = entry;
    clock = (fake_clock){.fast = -1, .last = comparisons};
    tune(p, &table, &clock);
    assert_int_equal(table.count, 1);
    assert_memory_equal(&before.blocking, &entry.blocking, sizeof before.blocking);
    clock = (fake_clock){.fast = -1, .last = -1};
    tune(p, &table, &clock);
    assert_int_equal(numbers_set(&entry.blocking), 0);
  }
  return comparisons - 1;
}

static void test_choices(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  test_use_best_isa();
  const moe_isa best = moe_isa_active();
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++)
    for (int op = 0; op < 3 && test_use_quick_isa(isa); op++)
      for (uint64_t n = 0; n < 2; n++) {
        product p;
        product_open(&p, n + (uint64_t)op, dtype, op, n ? 7 : isa ? 100 : 13);
        const int64_t choices = check_choices(&p, isa == (int)best ? 3 : 9);
        assert_true(choices >= (op == 2 ? 1 : 4) && choices < 25);
        product_close(&p);
      }
  test_use_best_isa();
}

/* Packed weights have a key of their own. */
static void test_packed(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  moe_context ctx = context();
  product p;
  product_open(&p, 2, dtype, 0, 100);
  moe_pack_weights_args packing = {
      .layout = MOE_PACK_GROUPED, .E = 4, .rows = p.args.N, .columns = p.args.K, .weight = p.w.data};
  assert_int_equal(test_pack_new(&ctx, dtype, &packing), MOE_OK);
  p.args.packed_W = packing.packed, p.args.packed_W_bytes = packing.packed_bytes;
  check_choices(&p, 1);
  moe_tune_entry entries[2];
  moe_tune_table table = {entries, 0, 2};
  fake_clock clock = {.fast = -1, .last = -1};
  tune(&p, &table, &clock);
  p.args.packed_W = NULL;
  tune(&p, &table, &clock);
  assert_int_equal(table.count, 2);
  assert_true(entries[0].flags == MOE_TUNE_PACKED && entries[1].flags == 0);
  free(packing.packed);
  product_close(&p);
}

/* Codes as they are stored, and weights in the other order. */
static void test_stored(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  static const float scales[] = {1, 0.5f, 3, 2};
  for (int op = 0; op < 3; op++) {
    product p;
    product_open(&p, 2, dtype, op, op == 1 ? 9 : 60);
    p.args.weight_order = MOE_GROUPED_EKN;
    check_choices(&p, 3);
    uint8_t *codes = (uint8_t *)malloc((size_t)p.w.count);
    uint64_t rng = 4;
    for (int64_t i = 0; i < p.w.count; i++) codes[i] = (uint8_t)(test_random(&rng) & 0xbf);
    const moe_quantized_weight weight = {
        .element = MOE_ELEMENT_E4M3FN, .scaling = MOE_WEIGHT_STATIC_PER_EXPERT, .codes = codes, .scales = scales};
    moe_tune_entry entries[2];
    moe_tune_table table = {entries, 0, 2};
    fake_clock clock = {.fast = -1, .last = -1};
    tune(&p, &table, &clock);
    p.args.quantized_W = &weight;
    if (op < 2) check_choices(&p, 3);
    tune(&p, &table, &clock);
    assert_int_equal(table.count, op < 2 ? 2 : 1);
    free(codes);
    product_close(&p);
  }
}

/* Any numbers at all, in a table that a caller wrote. */
static void test_any_numbers(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t rng = test_seed(3) + dtype;
  for (int64_t n = 0; n < test_cases(12, 6); n++)
    for (int isa = 0; isa < TEST_ISA_COUNT; isa++) {
      if (!test_use_quick_isa(isa)) continue;
      product p;
      moe_tune_entry entry;
      moe_tune_table table = {&entry, 0, 1};
      fake_clock clock = {.fast = -1, .last = -1};
      product_open(&p, test_random(&rng), dtype, (int)(n % 3), test_random_range(&rng, 1, n % 2 ? 36 : isa ? 110 : 50));
      run(&p, NULL);
      test_tensor_copy(&p.want, &p.out);
      tune_for(&p, &table, &clock, 0.5);
      int64_t *numbers = &entry.blocking.kc;
      for (size_t i = 0; i < sizeof entry.blocking / sizeof *numbers; i++) {
        static const int64_t extremes[] = {INT64_MIN, -2, 0, 1, 33, INT64_MAX};
        numbers[i] =
            test_random_chance(&rng, 3) ? extremes[test_random_range(&rng, 0, 5)] : test_random_range(&rng, -1, 400);
      }
      run(&p, &table);
      same_bits(&p, &entry.blocking, "any numbers");
      product_close(&p);
    }
  test_use_best_isa();
}

/* What has an entry of its own. */
static void test_keys(void **state) {
  (void)state;
  product p, q;
  moe_tune_entry entries[3];
  moe_tune_table table = {entries, 0, 3};
  fake_clock clock = {.fast = 0, .last = -1};
  product_open(&p, 0, MOE_DTYPE_F32, 0, 9), product_open(&q, 0, MOE_DTYPE_F32, 0, 9);
  tune(&p, &table, &clock);
  q.args.permute_x = 0, q.args.permute_y = 1; /* X has rows enough for it: a smaller one is not read */
  test_tensor_free(&q.x);
  q.x = test_tensor_new(MOE_DTYPE_F32, q.args.num_tokens * 2 * q.args.K), q.args.X = q.x.data;
  tune(&q, &table, &clock);
  assert_int_equal(table.count, 2);
  q.args.num_tokens--, q.sizes[3] -= 2; /* the number of tokens is not in the key */
  for (int64_t i = 0, k = 0; i < q.args.num_tokens * 2 + 2; i++)
    if (q.gather[i] < q.args.num_tokens * 2) q.gather[k++] = q.gather[i];
  tune(&q, &table, &clock);
  assert_int_equal(table.count, 2);
  q.op = 1, q.args.dX = q.x.data, q.args.X = NULL;
  tune(&q, &table, &clock);
  assert_int_equal(table.count, 3);
  product_close(&p), product_close(&q);
}

/* After so many seconds nothing more is tried. */
static void test_seconds(void **state) {
  (void)state;
  product p;
  moe_context ctx = context();
  moe_tune_entry entry;
  moe_tune_table table = {&entry, 0, 1};
  fake_clock clock = {.fast = -1, .last = -1};
  product_open(&p, 0, MOE_DTYPE_BF16, 0, 40);
  moe_tune_grouped_gemm_args args = {.gemm = &p.args,
                                     .dtype = MOE_DTYPE_BF16,
                                     .table = &table,
                                     .clock = fake_time,
                                     .clock_user = &clock,
                                     .seconds = 5,
                                     .repeats = 1};
  assert_int_equal(moe_tune_grouped_gemm(&ctx, &args), MOE_OK);
  assert_int_equal(clock.calls, 4 * (3 + 1)); /* 2, 4 and 6 seconds, and the last comparison */
  args.clock = NULL, args.seconds = 1e-9;
  assert_int_equal(moe_tune_grouped_gemm(NULL, &args), MOE_ERROR_WORKSPACE);
  assert_int_equal(moe_tune_grouped_gemm(&ctx, &args), MOE_OK);
  product_close(&p);
}

/* ------------------------------------------------------------------------------------------------------------ text */

static void test_text(void **state) {
  (void)state;
  product p;
  moe_context ctx = context();
  moe_tune_entry entries[4], loaded[4];
  moe_tune_table table = {entries, 0, 4}, again = {loaded, 0, 4};
  fake_clock clock = {.fast = -1, .last = -1};
  char text[2000], copy[2000];
  size_t length, same;
  for (int op = 0; op < 3; op++) {
    product_open(&p, (uint64_t)op, MOE_DTYPE_BF16, op, 30);
    clock = (fake_clock){.fast = 0, .last = -1};
    tune(&p, &table, &clock);
    product_close(&p);
  }
  entries[0].blocking = (moe_tune_blocking){1, 2, 3, 4, -1, INT32_MAX};
  entries[3] = entries[0];
  memset(entries[3].core, 0, sizeof entries[3].core), memcpy(entries[3].core, "Other-1-2", 9), entries[3].here = 0;
  table.count = 4;
  assert_int_equal(moe_tune_save(&ctx, &table, NULL, 0, &length), MOE_OK);
  assert_int_equal(moe_tune_save(&ctx, &table, text, length, &same), MOE_ERROR_INVALID_SHAPE);
  assert_int_equal(moe_tune_save(&ctx, &table, text, length + 1, &same), MOE_OK);
  assert_true(same == length && strlen(text) == length && memcmp(text, "moe-tune 1\ngrouped_gemm bf16 ", 29) == 0);
  int64_t skipped = -1;
  assert_int_equal(moe_tune_load(&ctx, &again, text, length, &skipped), MOE_OK);
  assert_true(skipped == 0 && again.count == 4);
  for (int i = 0; i < 4; i++) {
    assert_memory_equal(&entries[i].blocking, &loaded[i].blocking, sizeof entries[i].blocking);
    assert_string_equal(entries[i].core, loaded[i].core);
    assert_true(entries[i].here == loaded[i].here && entries[i].op == loaded[i].op && entries[i].isa == loaded[i].isa);
    assert_true(entries[i].rows == loaded[i].rows && entries[i].best_ns == loaded[i].best_ns);
    assert_true(entries[i].N == loaded[i].N && entries[i].flags == loaded[i].flags);
  }
  assert_int_equal(moe_tune_load(&ctx, &again, text, length, NULL), MOE_OK); /* all of them are there */
  assert_int_equal(again.count, 4);
  assert_int_equal(moe_tune_save(&ctx, &again, copy, sizeof copy, &same), MOE_OK);
  assert_string_equal(text, copy);
  /* Every text that is cut off somewhere is read to there. */
  for (size_t cut = 0; cut <= length; cut++) {
    struct guarded g = guard_alloc(cut, GUARD_AFTER);
    memcpy(g.data, text, cut);
    again.count = 0;
    const moe_status status = moe_tune_load(&ctx, &again, (const char *)g.data, cut, &skipped);
    assert_int_equal(status, cut > 0 && cut < 10 ? MOE_ERROR_INVALID_OPTION : MOE_OK);
    guard_free(&g);
  }
}

static int64_t load(moe_tune_table *table, const char *text) {
  moe_context ctx = context();
  int64_t skipped;
  if (moe_tune_load(&ctx, table, text, strlen(text), &skipped) != MOE_OK) fail_msg("%s", ctx.message);
  return skipped;
}

static void test_unknown_text(void **state) {
  (void)state;
  moe_tune_entry entries[2];
  moe_tune_table table = {entries, 0, 2};
  assert_int_equal(load(&table, "moe-tune 1"), 0);
  assert_int_equal(load(&table, "moe-tune 1\r\n\n# a remark\nblockwise f32 avx2 Some-1-2 E=1 N=1 K=1\n"), 2);
  assert_int_equal(table.count, 0);
  static const char *const none[] = {"grouped_gemm f64 avx2 A E=1 N=1 K=1",
                                     "grouped_gemm f32 avx3 A E=1 N=1 K=1",
                                     "grouped_gemm f32 avx2",
                                     "grouped_gemm f32 avx2 A E=1 N=1",
                                     "grouped_gemm f32 avx2 A E=1 N=1 K=",
                                     "grouped_gemm f32 avx2 A E=1 N=1 K=x",
                                     "grouped_gemm f32 avx2 A E=1 N=1 K",
                                     "grouped_gemm f32 avx2 A E=1 N=1 K=1234567890123456789",
                                     "grouped_gemm f32 avx2 A E=-1 N=1 K=1",
                                     "grouped_gemm f32 avx2 Aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa E=1 N=1 K=1"};
  for (size_t i = 0; i < sizeof none / sizeof *none; i++) {
    char text[200];
    snprintf(text, sizeof text, "moe-tune 1\n%s\n", none[i]);
    if (load(&table, text) != 1 || table.count != 0) fail_msg("%s", none[i]);
  }
  assert_int_equal(load(&table, "moe-tune 1\ngrouped_gemm_dw  fp16\tavx2 Some-1-2 later=7 K=3 N=2 E=1 small_m=-1\r\n"),
                   0);
  assert_int_equal(table.count, 1);
  assert_true(entries[0].op == MOE_TUNE_GROUPED_GEMM_DW && entries[0].dtype == MOE_DTYPE_FP16 && !entries[0].here);
  assert_true(entries[0].E == 1 && entries[0].N == 2 && entries[0].K == 3 && entries[0].blocking.small_m == -1);
  assert_true(entries[0].isa == MOE_ISA_AVX2 && entries[0].blocking.kc == 0);
}

/* ---------------------------------------------------------------------------------------------------------- errors */

#define REFUSED(call, code, sentence)               \
  do {                                              \
    moe_context ctx = context();                    \
    assert_int_equal(call, MOE_ERROR_##code);       \
    assert_string_equal(ctx.message, sentence);     \
    assert_int_equal(ctx.status, MOE_ERROR_##code); \
  } while (0)

static void test_errors(void **state) {
  (void)state;
  product p;
  moe_tune_entry entries[1] = {
      {{0}, 0, MOE_ISA_SCALAR, MOE_TUNE_GROUPED_GEMM, MOE_DTYPE_F32, 0, 1, 1, 1, {0}, 0, 0, 0}};
  moe_tune_table table = {entries, 0, 1}, full = {entries, 1, 1}, bad = {entries, 2, 1}, none = {NULL, 0, 1}, unknown;
  fake_clock clock = {0};
  size_t length = 77;
  char text[8];
  product_open(&p, 0, MOE_DTYPE_F32, 0, 5);
  const moe_tune_grouped_gemm_args good = {
      .gemm = &p.args, .dtype = MOE_DTYPE_F32, .table = &table, .clock = fake_time, .clock_user = &clock};
#define TUNE(change, status, sentence)                          \
  do {                                                          \
    moe_tune_grouped_gemm_args a = good;                        \
    change;                                                     \
    REFUSED(moe_tune_grouped_gemm(&ctx, &a), status, sentence); \
  } while (0)
  REFUSED(moe_tune_grouped_gemm(&ctx, NULL), NULL_ARGUMENT, "args is NULL");
  TUNE(a.gemm = NULL, NULL_ARGUMENT, "gemm is NULL");
  TUNE(a.table = NULL, NULL_ARGUMENT, "table is NULL");
  TUNE(a.table = &none, NULL_ARGUMENT, "table.entries is NULL");
  TUNE(a.table = &bad, INVALID_SHAPE, "table.count is outside [0,capacity]");
  TUNE(a.table = &full, INVALID_SHAPE, "table.capacity has no room for another entry");
  TUNE(a.op = (moe_tune_op)3, INVALID_OPTION, "op is not one of its enum's values");
  TUNE(a.dtype = (moe_dtype)9, INVALID_OPTION, "dtype is not one of its enum's values");
  TUNE(a.dtype = MOE_DTYPE_DEFAULT, INVALID_OPTION, "dtype must name the function");
  TUNE(a.seconds = -1, INVALID_OPTION, "seconds must not be negative");
  TUNE(a.seconds = (double)NAN, INVALID_OPTION, "seconds must not be negative");
  TUNE(a.repeats = -1, INVALID_OPTION, "repeats must not be negative");
  p.args.K = 0;
  TUNE((void)a, INVALID_SHAPE, "K must be at least 1"); /* the product's own */
#undef TUNE
  assert_int_equal(clock.calls, 0);
  none.count = 1, p.args.K = 300;
  REFUSED((ctx.tune = &none, moe_grouped_gemm_f32(&ctx, &p.args)), NULL_ARGUMENT,
          "ctx.tune has entries, but they are NULL");
  none.count = 0;
  REFUSED(moe_tune_save(&ctx, NULL, text, 8, &length), NULL_ARGUMENT, "table is NULL");
  REFUSED(moe_tune_save(&ctx, &table, text, 8, NULL), NULL_ARGUMENT, "length is NULL");
  REFUSED(moe_tune_save(&ctx, &table, NULL, 8, &length), NULL_ARGUMENT, "text is NULL");
  REFUSED(moe_tune_save(&ctx, &table, text, 8, &length), INVALID_SHAPE, "room is too small for the text");
  assert_int_equal(length, 77);
  unknown = full, entries[0].op = (moe_tune_op)5;
  REFUSED(moe_tune_save(&ctx, &unknown, NULL, 0, &length), INVALID_OPTION,
          "table.entries has an op, a dtype or an isa that there is not");
  REFUSED(moe_tune_load(&ctx, NULL, "", 0, NULL), NULL_ARGUMENT, "table is NULL");
  REFUSED(moe_tune_load(&ctx, &table, NULL, 1, NULL), NULL_ARGUMENT, "text is NULL");
  REFUSED(moe_tune_load(&ctx, &table, "moe tune 1", 10, NULL), INVALID_OPTION,
          "text does not begin with \"moe-tune \"");
  REFUSED(moe_tune_load(&ctx, &table, "moe-tune 2", 10, NULL), UNSUPPORTED, "text is of another version");
  REFUSED(moe_tune_load(&ctx, &table, "moe-tune 11", 11, NULL), UNSUPPORTED, "text is of another version");
  static const char two[] = "moe-tune 1\ngrouped_gemm f32 avx2 A E=1 N=1 K=1\ngrouped_gemm f32 avx2 A E=2 N=1 K=1\n";
  REFUSED(moe_tune_load(&ctx, &table, two, sizeof two - 1, NULL), INVALID_SHAPE,
          "table.capacity has no room for the entries of the text");
  assert_int_equal(table.count, 0);
  product_close(&p);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      EACH_DTYPE(test_choices),      EACH_DTYPE(test_packed),
      EACH_DTYPE(test_stored),       EACH_DTYPE(test_any_numbers),
      cmocka_unit_test(test_keys),   cmocka_unit_test(test_seconds),
      cmocka_unit_test(test_text),   cmocka_unit_test(test_unknown_text),
      cmocka_unit_test(test_errors),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
