/* What bounds are made of. e is how far a computation can be from the exact result. Products accumulate in binary32, in
   any order, |c' - c| <= gamma_n * sum |a*b|. Errors of a sum's terms are carried through as independent ones: at most
   their sum, and but for a chance of 2*exp(-c^2/2) at most c times the root of the sum of their squares, c being
   options.arithmetic.confidence (Hoeffding; so is gamma_n, see Higham and Mary, A new approach to probabilistic
   rounding error analysis, 2019). */
#ifndef MOE_NEURON_BOUND_H
#define MOE_NEURON_BOUND_H

/* ----------------------------------------------------------------------------------------------------------- memory */

/* Memory that a comparison takes, released all at once. */
enum { MOE_NEURON_BLOCKS_ = 128 };
typedef struct moe_neuron_scratch_ {
  moe_context *ctx;
  void *block[MOE_NEURON_BLOCKS_];
  size_t bytes[MOE_NEURON_BLOCKS_];
  int count;
} moe_neuron_scratch_;

/* Zeroed; NULL if there is none. */
MOE_FN void *moe_neuron_take_(moe_neuron_scratch_ *scratch, int64_t count, size_t size) {
  const int64_t bytes = moe_mul_(count > 0 ? count : 1, (int64_t)size);
  moe_context *ctx = scratch->ctx;
  if (bytes < 0 || scratch->count == MOE_NEURON_BLOCKS_ || !ctx || !ctx->allocate) return NULL;
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
MOE_FN double moe_neuron_unit_of_(moe_dtype dtype) {
  return dtype == MOE_DTYPE_BF16 ? 0x1p-8 : dtype == MOE_DTYPE_FP16 ? 0x1p-11 : 0x1p-24;
}

/* ------------------------------------------------------------------------------------------------ bounds of outputs */

/* An output's bounds, [n] each: the second and third are there once something was added. */
typedef struct moe_neuron_out_ {
  float *e;      /* but for what is in `square` */
  float *square; /* squares of independent errors */
  float *size;   /* magnitudes of what is summed */
  int64_t n;
  int accumulated; /* to something that is not known */
} moe_neuron_out_;

/* A comparison. */
typedef struct moe_neuron_bounds_ {
  const moe_neuron_table *table;
  moe_neuron_out_ out[MOE_NEURON_OPERANDS_MAX]; /* by the table's index; n 0: not compared */
  moe_neuron_scratch_ scratch;
  int failed; /* there was no memory */
  moe_dtype dtype;
  double operand, activation, confidence; /* options.arithmetic, resolved */
  double roundings;                       /* times operand */
  int64_t partial;                        /* at most so many partial sums of an element are rounded */
} moe_neuron_bounds_;

/* An output's; NULL: it is not compared. */
MOE_FN moe_neuron_out_ *moe_neuron_out_of_(moe_neuron_bounds_ *bounds, const char *name) {
  const moe_neuron_operand *o = bounds->table->operand;
  for (int32_t i = 0; i < bounds->table->count; i++)
    if (o[i].use == MOE_NEURON_OUTPUT && strcmp(o[i].name, name) == 0)
      return bounds->out[i].n > 0 ? &bounds->out[i] : NULL;
  return NULL;
}

/* e += x in float, rounded up. */
MOE_FN void moe_neuron_more_(float *e, double x) { *e = (float)(((double)*e + x) * (1 + 0x1p-22)); }

MOE_FN void moe_neuron_more_of_(moe_neuron_bounds_ *bounds, float **array, int64_t n, int64_t at, double x) {
  if (!*array && !bounds->failed) *array = (float *)moe_neuron_take_(&bounds->scratch, n, sizeof **array);
  if (*array) moe_neuron_more_(*array + at, x);
  else bounds->failed = 1;
}

/* Element `at` is a sum, of which a part of magnitude `size` has an error of at most e. */
MOE_FN void moe_neuron_add_bound_(moe_neuron_bounds_ *bounds, moe_neuron_out_ *out, int64_t at, double size, double e) {
  moe_neuron_more_(out->e + at, e);
  moe_neuron_more_of_(bounds, &out->size, out->n, at, size);
}
/* Likewise, and errors of other parts are independent of this one's. */
MOE_FN void moe_neuron_add_independent_(moe_neuron_bounds_ *bounds, moe_neuron_out_ *out, int64_t at, double e) {
  moe_neuron_more_of_(bounds, &out->square, out->n, at, e * e);
}

/* ------------------------------------------------------------------------------------------------------- arithmetic */

#define MOE_NEURON_U_ 0x1p-24

/* How much n roundings of one size can add up to. */
MOE_FN double moe_neuron_times_rounded_(const moe_neuron_bounds_ *bounds, int64_t n) {
  return fmin((double)n, bounds->confidence * sqrt((double)n));
}
MOE_FN double moe_neuron_gamma_(const moe_neuron_bounds_ *bounds, int64_t n) {
  const double u = moe_neuron_times_rounded_(bounds, n + 2) * MOE_NEURON_U_;
  return u < 0.5 ? u / (1 - u) : 1;
}

/* What errors can add up to, given their sum and that of their squares. */
MOE_FN double moe_neuron_carried_(const moe_neuron_bounds_ *bounds, double sum, double squares) {
  return fmin(sum, bounds->confidence * sqrt(squares));
}

/* The error of a product of factors with errors. */
MOE_FN double moe_neuron_product_(double a, double ea, double b, double eb) {
  return fabs(a) * eb + ea * (fabs(b) + eb);
}

/* All of an element's bound, where the CPU has the value x. What is accumulated is at most |x| and what was added. */
MOE_FN double moe_neuron_bound_at_(const moe_neuron_bounds_ *bounds, const moe_neuron_out_ *out, int64_t at, double x) {
  const double size = out->size ? (double)out->size[at] : 0;
  const double rounds = bounds->operand * moe_neuron_times_rounded_(bounds, bounds->partial + 1) + 2 * MOE_NEURON_U_;
  return (double)out->e[at] + (out->square ? bounds->confidence * sqrt((double)out->square[at]) : 0) +
         (out->accumulated ? rounds * (fabs(x) + 2 * size) : 0);
}

#endif
