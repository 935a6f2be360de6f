/* What no result shows, so that the test is of the library's inside. What is prefetched: every line that the rows touch,
   wherever they begin and however many steps there are; and runs of panels as equal as can be. What a tuned blocking
   changes, and for which calls. */
#define MOE_IMPLEMENTATION
#include "support/test.h"

enum { LINES = 1 << 12 };

typedef struct lines {
  const char *first;
  uint8_t touched[LINES], fetched[LINES];
} lines;

static int64_t line_of(const lines *l, const char *at) { return (at - l->first) / 64; }

/* One block as moe_prefetch_now_ takes it, and as a micro-kernel does, fetch by fetch. */
static void fetch_block(lines *l, const moe_prefetch_ *prefetch, int by_fetch) {
  if (by_fetch) {
    const moe_prefetch_block_ fetch = {prefetch->block.at, prefetch->block.run, prefetch->block.stride,
                                       prefetch->block.skip};
    moe_prefetch_at_ at = moe_prefetch_begin_(&fetch);
    for (int64_t n = prefetch->deep * fetch.run; n > 0; n--) {
      l->fetched[line_of(l, at.at)] = 1;
      moe_prefetch_next_(&at);
    }
    return;
  }
  for (int64_t row = 0; row < prefetch->deep; row++)
    for (int64_t n = 0; n < prefetch->wide; n++)
      l->fetched[line_of(l, prefetch->block.at + row * prefetch->stride + 64 * n)] = 1;
}

static void test_every_line(void **state) {
  (void)state;
  static MOE_LINE_ALIGNED char memory[64 * LINES];
  uint64_t rng = 5;
  for (int n = 0; n < 20000; n++) {
    static lines l;
    int32_t index[24];
    const int64_t rows = test_random_range(&rng, 1, 12), bytes = test_random_range(&rng, 1, 700);
    const int64_t stride = bytes + (test_random_chance(&rng, 2) ? -bytes & 63 : test_random_range(&rng, 0, 200));
    const int indexed = test_random_chance(&rng, 4), full = test_random_chance(&rng, 2);
    const int64_t parts = indexed ? 1 : test_random_range(&rng, 1, 2);
    const int64_t pitch = 12 * stride + test_random_range(&rng, 0, 3) * 32;
    const int64_t steps = test_random_range(&rng, 1, 40), room = test_random_range(&rng, 1, 64);
    const char *first = memory + test_random_range(&rng, 0, 200);
    memset(&l, 0, sizeof l);
    l.first = memory;
    for (int64_t i = 0; i < rows; i++) index[i] = (int32_t)test_random_range(&rng, 0, 20);
    for (int64_t p = 0; p < parts; p++)
      for (int64_t i = 0; i < rows; i++)
        for (int64_t at = 0; at < bytes; at++)
          l.touched[line_of(&l, first + p * pitch + (indexed ? index[i] : i) * stride + at)] = 1;
    moe_prefetch_ prefetch;
    moe_prefetch_rows_(&prefetch, first, parts == 2 ? first + pitch : NULL, indexed ? index : NULL, stride, rows,
                       bytes);
    moe_prefetch_pace_(&prefetch, steps, room, full);
    int64_t blocks = 0;
    for (; prefetch.block.at; moe_prefetch_move_(&prefetch), blocks++) fetch_block(&l, &prefetch, full);
    for (int64_t i = 0; i < LINES; i++)
      if (l.touched[i] && !l.fetched[i])
        fail_msg(
            "line %d of %d rows of %d bytes, %d apart, is not fetched: at %d, indexed %d, parts %d, steps %d, room "
            "%d, full %d",
            (int)i, (int)rows, (int)bytes, (int)stride, (int)(first - memory), indexed, (int)parts, (int)steps,
            (int)room, full);
    if (blocks > steps * prefetch.times) fail_msg("%d blocks in %d steps", (int)blocks, (int)steps);
  }
}

static void test_equal_runs(void **state) {
  (void)state;
  for (int64_t panels = 1; panels < 140; panels++)
    for (int64_t runs = 1; runs <= panels; runs++) {
      assert_int_equal(moe_run_first_(panels, runs, 0), 0);
      assert_int_equal(moe_run_first_(panels, runs, runs), panels);
      for (int64_t run = 0; run < runs; run++) {
        const int64_t count = moe_run_first_(panels, runs, run + 1) - moe_run_first_(panels, runs, run);
        assert_in_range(count, panels / runs, moe_ceil_div_(panels, runs));
      }
    }
}

/* Whether a call with this key is tuned, and then as the entry says. */
static int tuned(const moe_tune_entry *entry, moe_tune_entry key) {
  const moe_tune_table table = {(moe_tune_entry *)(uintptr_t)entry, 1, 1};
  const moe_context ctx = {.tune = &table};
  moe_group_ group;
  moe_group_init_(&group, MOE_DTYPE_F32, 4);
  const moe_kernels *usual = group.kernels;
  moe_group_tune_(&group, &ctx, &key);
  if (group.kernels == usual) return 0;
  const moe_blocking_ *b = group.kernels->blocking;
  assert_true(b->kc[MOE_PANEL_F32] == 64 && b->mc == 48 && b->nc_panels == 3 && b->items_per_worker == 9);
  assert_true(b->prefetch_bytes == 77 && b->small_m_plain_rows[MOE_DTYPE_F32] == 7 && b->small_m_bf16_rows == 5);
  assert_true(b->small_m_codes_rows == 7 && b->small_m_columns_rows[MOE_DTYPE_BF16] == 7);
  assert_true(b->kc_bytes[MOE_PANEL_F32] == usual->blocking->kc_bytes[MOE_PANEL_F32]);
  assert_ptr_equal(group.kernels->gemm, usual->gemm);
  return 1;
}

static void test_tuned(void **state) {
  (void)state;
  moe_tune_entry entry = {.here = 1,
                          .isa = moe_isa_active(),
                          .op = MOE_TUNE_GROUPED_GEMM_DX,
                          .dtype = MOE_DTYPE_F32,
                          .flags = MOE_TUNE_PERMUTE_X,
                          .E = 4,
                          .N = 5,
                          .K = 6,
                          .blocking = {70, 48, 3, 9, 7, 77}};
  const moe_tune_entry key = entry;
  assert_true(tuned(&entry, key));
#define OTHER(change)                   \
  do {                                  \
    moe_tune_entry other = key;         \
    change;                             \
    assert_false(tuned(&entry, other)); \
  } while (0)
  OTHER(other.op = MOE_TUNE_GROUPED_GEMM);
  OTHER(other.dtype = MOE_DTYPE_BF16);
  OTHER(other.flags = 0);
  OTHER(other.E = 5);
  OTHER(other.N = 6);
  OTHER(other.K = 5);
#undef OTHER
  entry.here = 0;
  assert_false(tuned(&entry, key));
  entry.here = 1, entry.isa = (moe_isa)(entry.isa + 1);
  assert_false(tuned(&entry, key));
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_every_line), cmocka_unit_test(test_equal_runs),
                                     cmocka_unit_test(test_tuned)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
