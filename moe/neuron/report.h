/* Two sets of outputs, compared element by element with bounds; and the report as text. */
#ifndef MOE_NEURON_REPORT_H
#define MOE_NEURON_REPORT_H

/* Memory that a comparison takes, released all at once. */
typedef struct moe_neuron_scratch_ {
  moe_context *ctx;
  void *block[48];
  size_t bytes[48];
  int count;
} moe_neuron_scratch_;

/* Zeroed; NULL if there is none. */
MOE_FN void *moe_neuron_take_(moe_neuron_scratch_ *scratch, int64_t count, size_t size) {
  const int64_t bytes = moe_mul_(count > 0 ? count : 1, (int64_t)size);
  moe_context *ctx = scratch->ctx;
  if (bytes < 0 || scratch->count == 48 || !ctx || !ctx->allocate) return NULL;
  void *memory = ctx->allocate(ctx->allocator_user, (size_t)bytes);
  if (!memory) return NULL;
  scratch->block[scratch->count] = memset(memory, 0, (size_t)bytes);
  scratch->bytes[scratch->count++] = (size_t)bytes;
  return memory;
}

MOE_FN void moe_neuron_give_(moe_neuron_scratch_ *scratch) {
  while (scratch->count-- > 0)
    scratch->ctx->release(scratch->ctx->allocator_user, scratch->block[scratch->count], scratch->bytes[scratch->count]);
}

MOE_FN moe_status moe_neuron_no_memory_(moe_context *ctx) {
  return moe_neuron_fail_(ctx, MOE_ERROR_OUT_OF_MEMORY, "ctx.allocate gives no memory for the bounds");
}

/* Elements [from, from+n) of a tensor, as floats. */
MOE_FN void moe_neuron_widen_(moe_dtype dtype, const void *tensor, int64_t from, int64_t n, float *to) {
  if (dtype == MOE_DTYPE_BF16) (void)moe_bf16_to_f32(NULL, to, (const moe_bf16 *)tensor + from, n);
  else if (dtype == MOE_DTYPE_FP16) (void)moe_fp16_to_f32(NULL, to, (const moe_fp16 *)tensor + from, n);
  else memcpy(to, (const float *)tensor + from, (size_t)n * sizeof *to);
}

/* Half a unit in the last place of 1. */
MOE_FN double moe_neuron_unit_(moe_dtype dtype) {
  return dtype == MOE_DTYPE_BF16 ? 0x1p-8 : dtype == MOE_DTYPE_FP16 ? 0x1p-11 : 0x1p-24;
}

/* What two computations of x may differ by, of which each is within e before it is stored: both errors, two roundings,
   and what is flushed. */
MOE_FN double moe_neuron_apart_(moe_dtype dtype, double x, double e) {
  return 2 * e + moe_neuron_unit_(dtype) * 2 * (fabs(x) + e) + (dtype == MOE_DTYPE_FP16 ? 0x1p-24 : 0x1p-125);
}

/* One element into the report. bound < 0: there is none. */
MOE_FN void moe_neuron_judge_(moe_neuron_error *report, int64_t at, double device, double cpu, double bound,
                              double *worst) {
  const int same = device == cpu || (device != device && cpu != cpu);
  const double error = same ? 0 : fabs(device - cpu);
  const int over = !same && bound >= 0 && !(error <= bound);
  const double part = same ? 0 : !(error < INFINITY) ? INFINITY : bound > 0 ? error / bound : error;
  report->elements++;
  report->over += over;
  if (!(error <= report->largest)) report->largest = error < INFINITY ? error : INFINITY;
  if (report->elements > 1 && !(part > *worst)) return;
  *worst = part;
  report->at = at, report->device = device, report->cpu = cpu, report->error = error, report->bound = bound;
}

MOE_FN void moe_neuron_judge_tensor_(const moe_neuron_operand *cpu, const moe_neuron_operand *device,
                                     const float *bound, moe_neuron_error *report) {
  enum { CHUNK = 256 };
  float c[CHUNK], d[CHUNK];
  double worst = 0;
  memset(report, 0, sizeof *report);
  report->name = cpu->name;
  for (int64_t r = 0; r < cpu->rows; r++)
    for (int64_t i = 0, n; i < cpu->row; i += n) {
      const int64_t at = r * cpu->step + i;
      n = moe_min_(CHUNK, cpu->row - i);
      moe_neuron_widen_(cpu->elements, cpu->data, at, n, c);
      moe_neuron_widen_(cpu->elements, device->data, at, n, d);
      for (int64_t k = 0; k < n; k++)
        moe_neuron_judge_(
            report, at + k, (double)d[k], (double)c[k],
            bound ? moe_neuron_apart_(cpu->elements, (double)c[k], (double)bound[r * cpu->row + i + k]) : -1, &worst);
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
