/* The layers of real models: forward and backward of a batch, decoding of one and of four tokens. */
#ifndef MOE_BENCH_SUITE_H
#define MOE_BENCH_SUITE_H

static const char *const suite_picture = "moe_bench.svg";

/* For the tensors of one case: 8 GB, on a small machine half of what it has. */
static double suite_memory(void) {
  double most = 8e9;
#ifdef _SC_PHYS_PAGES
  const double half = 0.5 * (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
  if (half > 0 && half < most) most = half;
#endif
  return most;
}

/* Weights and their gradients, and a fifth of that for the rest: halves E until they fit. */
static bench_shape suite_shape(const bench_setting *set, const bench_model *m, const suite_case *c) {
  bench_shape s = {c->T, m->H, m->I, m->E, m->K};
  const double copies = bench_op_named(c->op)->parts & BENCH_GRADIENTS ? 2 : 1;
  const double expert = 1.2 * copies * 3.0 * (double)s.H * (double)s.I * (double)moe_dtype_size(set->dtype->dtype);
  const double most = suite_memory();
  while (s.E / 2 >= s.K && (double)s.E * expert > most) s.E /= 2;
  return s;
}

static void suite_print(const bench_setting *set, const bench_model *m, const bench_result *r) {
  if (!set->json) printf("%-17s", m->name);
  bench_print(set, r);
  if (!set->json && r->shape.E != m->E)
    printf("%-17s(E scaled from %lld to %lld to fit into memory)\n", "", (long long)m->E, (long long)r->shape.E);
}

static void suite_picture_write(const bench_setting *set, roof_plot *plot) {
  char title[128];
  snprintf(title, sizeof title, "moe_bench: %s on %s, %d thread%s", set->dtype->name, moe_isa_name(moe_isa_active()),
           set->machine.threads.threads, set->machine.threads.threads > 1 ? "s" : "");
  plot->title = title;
  if (roof_write(plot, suite_picture) != 0)
    fprintf(stderr, "moe_bench: cannot write %s\n", suite_picture);
  else if (!set->json)
    printf("wrote %s\n", suite_picture);
}

static void bench_suite(bench_setting *set) {
  const char *kinds[SUITE_CASES];
  roof_plot plot = {.limits = set->limits,
                    .with_dot = set->dtype->dtype == MOE_DTYPE_BF16,
                    .kinds = kinds,
                    .kind_count = SUITE_CASES};
  for (int c = 0; c < SUITE_CASES; c++) kinds[c] = suite_cases[c].name;
  for (int m = 0; m < BENCH_MODELS; m++)
    for (int c = 0; c < SUITE_CASES; c++) {
      bench_progress(plot.count + 1, BENCH_MODELS * SUITE_CASES, bench_models[m].name, kinds[c]);
      const bench_shape shape = suite_shape(set, &bench_models[m], &suite_cases[c]);
      const bench_result r = bench_case(set, bench_op_named(suite_cases[c].op), shape);
      bench_progress_end();
      suite_print(set, &bench_models[m], &r);
      plot.points[plot.count++] = (roof_point){r.flops / r.bytes, r.flops / r.seconds * 1e-9, bench_percent(&r), m, c};
    }
  suite_picture_write(set, &plot);
}

#endif
