/* Two sets of outputs, compared element by element with bounds; and the report as text. */
#ifndef MOE_NEURON_REPORT_H
#define MOE_NEURON_REPORT_H

/* What two computations of x may differ by, of which each is within e before it is stored: both errors, two roundings,
   and what is flushed. */
MOE_FN double moe_neuron_apart_(moe_dtype dtype, double x, double e) {
  return 2 * e + moe_neuron_unit_of_(dtype) * 2 * (fabs(x) + e) + (dtype == MOE_DTYPE_FP16 ? 0x1p-24 : 0x1p-125);
}

/* One element into the report. bound < 0: there is none. */
MOE_FN void moe_neuron_judge_(moe_neuron_error *report, int64_t at, double device, double cpu, double bound,
                              double *worst) {
  const int same = device == cpu || (device != device && cpu != cpu);
  const double error = same ? 0 : fabs(device - cpu);
  const int over = !same && !(bound < 0) && !(error <= bound); /* also where the bound is NaN */
  const double part = same ? 0 : !(error < INFINITY) ? INFINITY : bound > 0 ? error / bound : error;
  report->elements++;
  report->over += over;
  if (!(error <= report->largest)) report->largest = error < INFINITY ? error : INFINITY;
  if (report->elements > 1 && !(part > *worst)) return;
  *worst = part;
  report->at = at, report->device = device, report->cpu = cpu, report->error = error, report->bound = bound;
}

/* Elements [at, at+n) of an output; where experts lie apart, some at a time. */
MOE_FN void moe_neuron_values_of_(const moe_neuron_operand *o, int64_t at, int64_t n, float *to) {
  const int64_t each = o->per_expert ? o->rows * o->row / o->shape[0] : at + n;
  for (int64_t done = 0, some; done < n; done += some) {
    const int64_t e = (at + done) / each, from = (at + done) % each;
    some = moe_min_(n - done, each - from);
    moe_neuron_widen_(o->elements, moe_neuron_part_(o, e), from, some, to + done);
  }
}

MOE_FN void moe_neuron_judge_tensor_(const moe_neuron_operand *cpu, const moe_neuron_operand *device,
                                     const moe_neuron_bounds_ *bounds, const moe_neuron_out_ *out,
                                     moe_neuron_error *report) {
  enum { CHUNK = 256 };
  float c[CHUNK], d[CHUNK];
  double worst = 0;
  memset(report, 0, sizeof *report);
  report->name = cpu->name;
  for (int64_t r = 0; r < cpu->rows; r++)
    for (int64_t i = 0, n; i < cpu->row; i += n) {
      const int64_t at = r * cpu->step + i, from = r * cpu->row + i;
      n = moe_min_(CHUNK, cpu->row - i);
      moe_neuron_values_of_(cpu, at, n, c);
      moe_neuron_values_of_(device, at, n, d);
      for (int64_t k = 0; k < n; k++) {
        const double x = (double)c[k];
        const double bound =
            out->e ? moe_neuron_apart_(cpu->elements, x, moe_neuron_bound_at_(bounds, out, from + k, x)) : -1;
        moe_neuron_judge_(report, at + k, (double)d[k], x, bound, &worst);
      }
    }
}

/* ------------------------------------------------------------------------------------------------------------- text */

__attribute__((format(printf, 4, 5))) MOE_FN void moe_neuron_print_(char *text, size_t bytes, size_t *at,
                                                                    const char *format, ...) {
  va_list list;
  va_start(list, format);
  const int n = vsnprintf(text && *at < bytes ? text + *at : NULL, text && *at < bytes ? bytes - *at : 0, format, list);
  va_end(list);
  if (n > 0) *at += (size_t)n;
}

size_t moe_neuron_report_text(const moe_neuron_report *report, char *text, size_t bytes) {
  size_t at = 0;
  if (text && bytes > 0) text[0] = 0;
  if (!report) return 0;
  moe_neuron_print_(text, bytes, &at, "%-30s %10s %8s %12s %12s %9s  %s\n", "tensor", "elements", "over", "error",
                    "bound", "of bound", "at: device, cpu");
  for (int32_t i = 0; i < report->count; i++) {
    const moe_neuron_error *t = &report->tensor[i];
    moe_neuron_print_(text, bytes, &at, "%-30s %10lld %8lld %12.4g ", t->name, (long long)t->elements,
                      (long long)t->over, t->error);
    if (report->bounded) moe_neuron_print_(text, bytes, &at, "%12.4g %8.2f%%  ", t->bound, t->error / t->bound * 100);
    else moe_neuron_print_(text, bytes, &at, "%12s %9s  ", "none", "");
    moe_neuron_print_(text, bytes, &at, "%lld: %.7g, %.7g\n", (long long)t->at, t->device, t->cpu);
  }
  moe_neuron_print_(text, bytes, &at, "%s\n",
                    !report->bounded ? "no bound: operands are rounded to MX"
                    : report->agree  ? "they agree: every element is within its bound"
                                     : "they do not agree: elements are over their bounds");
  return at;
}

#endif
