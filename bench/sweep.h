/* Cost must grow as T*K*H*I: time per flop over many token and expert counts, relative to the best. */
#ifndef MOE_BENCH_SWEEP_H
#define MOE_BENCH_SWEEP_H

enum { SWEEP_T_FIRST = 64, SWEEP_TS = 8, SWEEP_E_FIRST = 8, SWEEP_ES = 6, SWEEP_CASES = SWEEP_TS * SWEEP_ES };
enum { SWEEP_H = 1024, SWEEP_I = 512, SWEEP_K = 4, SWEEP_ROWS = 64 };

/* Case i of the grid, T running faster. */
static bench_shape sweep_shape(int i) {
  const bench_shape shape = {(int64_t)SWEEP_T_FIRST << i % SWEEP_TS, SWEEP_H, SWEEP_I,
                             (int64_t)SWEEP_E_FIRST << i / SWEEP_TS, SWEEP_K};
  return shape;
}

static int sweep_has_rows(const bench_result *r) { return r->shape.T * r->shape.K >= SWEEP_ROWS * r->shape.E; }

static double sweep_seconds_per_flop(const bench_result *r) { return r->seconds / r->flops; }

/* A row per E, a column per T; * where an expert has SWEEP_ROWS rows or more. */
static void sweep_print(const bench_op *op, const bench_result *results) {
  double best = 0, worst = 0;
  for (int i = 0; i < SWEEP_CASES; i++) {
    const double each = sweep_seconds_per_flop(&results[i]);
    if (best <= 0 || each < best) best = each;
    if (sweep_has_rows(&results[i]) && each > worst) worst = each;
  }
  printf("%s, H=%d I=%d K=%d: time per flop relative to the best; * an expert has %d rows or more\n%8s", op->name,
         SWEEP_H, SWEEP_I, SWEEP_K, SWEEP_ROWS, "E \\ T");
  for (int i = 0; i < SWEEP_TS; i++) printf("%7lld ", (long long)sweep_shape(i).T);
  for (int i = 0; i < SWEEP_CASES; i++) {
    if (i % SWEEP_TS == 0) printf("\n%8lld", (long long)results[i].shape.E);
    printf("%7.2f%c", sweep_seconds_per_flop(&results[i]) / best, sweep_has_rows(&results[i]) ? '*' : ' ');
  }
  printf("\nbest %.1f GFLOP/s; the slowest with %d rows or more takes %.2f times as long per flop\n", 1e-9 / best,
         SWEEP_ROWS, worst / best);
}

static void bench_sweep(bench_setting *set, const bench_op *op) {
  bench_result results[SWEEP_CASES];
  for (int i = 0; i < SWEEP_CASES; i++) {
    char what[64];
    const bench_shape shape = sweep_shape(i);
    snprintf(what, sizeof what, "E=%lld T=%lld", (long long)shape.E, (long long)shape.T);
    bench_progress(i + 1, SWEEP_CASES, op->name, what);
    results[i] = bench_case(set, op, shape);
    bench_progress_end();
    if (set->json) bench_print(set, &results[i]);
  }
  if (!set->json) sweep_print(op, results);
}

#endif
