/* Activation checkpoints: gate and up pre-activations [N,2,I,B] and a*m [N,I,B], block rows innermost, and down outputs
   [N,B,H]. In blocks of one row the columns of a row are neighbours. */
#ifndef MOE_LAYER_CHECKPOINT_H
#define MOE_LAYER_CHECKPOINT_H

/* First element of (slot, part of `parts`, column i); column i+1 is B elements further. Of two parts 0 is the gate. */
MOE_FN int64_t moe_checkpoint_at_(const moe_blockwise_ *call, int64_t slot, int64_t parts, int64_t part, int64_t i) {
  const moe_blockwise_layer *l = &call->layer;
  return ((slot / l->B * parts + part) * l->I + i) * l->B + slot % l->B;
}

/* A run: how many rows from `row` on, at most 64 and before `end`, are neighbours in one block. */
MOE_FN int64_t moe_checkpoint_run_(const moe_blockwise_ *call, int64_t row, int64_t end) {
  const int32_t *slot = call->plan.slot;
  const int64_t B = call->layer.B;
  int64_t n = 1;
  while (n < MOE_NR && row + n < end && slot[row + n] == slot[row] + n && (B == 1 || slot[row + n] % B != 0)) n++;
  return n;
}

enum { MOE_CHECKPOINT_SOME_ = MOE_NR / 2 }; /* so many are transposed at a time */

/* Stores columns [i0, i0+n) of a run of rows from x, whose rows are 64 apart. */
MOE_FN void moe_checkpoint_store_(const moe_blockwise_ *call, void *checkpoint, int64_t row, int64_t rows,
                                  int64_t parts, int64_t part, int64_t i0, int64_t n, const float *x) {
  const moe_vec_table_ *vec = call->group.kernels->vec;
  const int64_t size = call->checkpoint_size, stride = call->layer.B * size;
  float columns[MOE_CHECKPOINT_SOME_ * MOE_NR];
  char *to = (char *)checkpoint + moe_checkpoint_at_(call, call->plan.slot[row], parts, part, i0) * size;
  if (call->layer.B == 1) {
    vec->store_rows[call->checkpoint_dtype](to, parts * call->layer.I * size, NULL, x, rows, n);
    return;
  }
  for (int64_t at = 0; at < n; at += MOE_CHECKPOINT_SOME_) {
    const int64_t some = moe_min_(MOE_CHECKPOINT_SOME_, n - at);
    vec->transpose_words(columns, MOE_NR_BYTES_, x + at, MOE_NR_BYTES_, rows, some);
    vec->store_rows[call->checkpoint_dtype](to + at * stride, stride, NULL, columns, some, rows);
  }
}

/* The reverse. Whole vectors are transposed without a copy. */
MOE_FN void moe_checkpoint_load_(const moe_blockwise_ *call, const void *checkpoint, int64_t row, int64_t rows,
                                 int64_t parts, int64_t part, int64_t i0, int64_t n, float *x) {
  float columns[MOE_NR * MOE_CHECKPOINT_SOME_];
  const moe_kernels *kernels = call->group.kernels;
  moe_rows_ saved = {(const char *)checkpoint +
                         moe_checkpoint_at_(call, call->plan.slot[row], parts, part, i0) * call->checkpoint_size,
                     call->layer.B * call->checkpoint_size, NULL};
  const int whole = n == MOE_NR && rows % MOE_CHECKPOINT_SOME_ == 0;
  if (call->layer.B == 1) {
    const moe_rows_ lying = {saved.base, parts * call->layer.I * call->checkpoint_size, NULL};
    kernels->vec->load_rows[call->checkpoint_dtype](x, MOE_NR, &lying, rows, n);
  } else if (whole && call->checkpoint_dtype == MOE_DTYPE_F32) {
    kernels->vec->transpose_words(x, MOE_NR_BYTES_, saved.base, saved.stride, n, rows);
  } else if (whole && kernels->gemm->transpose_u16[call->checkpoint_dtype]) {
    kernels->gemm->transpose_u16[call->checkpoint_dtype](x, saved.base, saved.stride, MOE_NR, rows);
  } else {
    for (int64_t at = 0, some; at < rows; at += some, saved.base += some * call->checkpoint_size) {
      some = moe_min_(MOE_CHECKPOINT_SOME_, rows - at);
      kernels->vec->load_rows[call->checkpoint_dtype](columns, MOE_CHECKPOINT_SOME_, &saved, n, some);
      kernels->vec->transpose_words(x + at * MOE_NR, MOE_NR_BYTES_, columns, MOE_NR_BYTES_ / 2, n, some);
    }
  }
}

/* What is read for columns [i0, i0+n) of rows [row, row+rows), up and, if there is one, gate: of consecutive whole
   blocks or of the rest of one. */
MOE_FN void moe_checkpoint_reads_(const moe_blockwise_ *call, const void *checkpoint, int64_t row, int64_t rows,
                                  int64_t i0, int64_t n, moe_prefetch_ *prefetch) {
  const int64_t B = call->layer.B, size = call->checkpoint_size, skip = call->glu.skip_gate != 0;
  const int64_t slot = call->plan.slot[row], blocks = call->plan.slot[row + rows - 1] / B - slot / B + 1;
  const int whole = slot % B == 0 && rows >= B;
  const int64_t row_bytes = call->layer.I * size;
  const char *at = (const char *)checkpoint + moe_checkpoint_at_(call, slot, 2, skip, i0) * size;
  if (B == 1) {
    moe_prefetch_rows_(prefetch, at, skip ? NULL : at + row_bytes, NULL, 2 * row_bytes, rows, n * size);
    return;
  }
  moe_prefetch_rows_(prefetch, at, at + (1 + skip) * call->layer.I * B * size, NULL, B * size, n,
                     moe_min_(rows, B - slot % B) * size);
  prefetch->parts = (2 - skip) * (whole ? moe_min_(blocks, moe_ceil_div_(rows, B)) : 1);
}

typedef struct moe_checkpoint_zero_ {
  const moe_blockwise_ *call;
  char *gate_up, *down, *scaled; /* each may be NULL */
} moe_checkpoint_zero_;

/* Of pairs: zeroes what is kept of those without a row, and all gates with skip_gate. */
MOE_FN void moe_checkpoint_zero_pairs_(const moe_checkpoint_zero_ *zero) {
  const moe_blockwise_ *call = zero->call;
  const int64_t size = call->checkpoint_size, part = call->layer.I * size, rows = call->plan.rows,
                none = call->layer.N - rows;
  for (int64_t row = 0; row < rows && zero->gate_up && call->glu.skip_gate; row++)
    memset(zero->gate_up + 2 * row * part, 0, (size_t)part);
  if (zero->gate_up) memset(zero->gate_up + 2 * rows * part, 0, (size_t)(2 * none * part));
  if (zero->down) memset(zero->down + rows * call->layer.H * size, 0, (size_t)(none * call->layer.H * size));
}

/* Work item: zeroes block b's slots that are no rows. */
MOE_FN void moe_checkpoint_zero_item_(void *arg, int64_t b, moe_worker_ *worker) {
  const moe_checkpoint_zero_ *zero = (const moe_checkpoint_zero_ *)arg;
  const moe_blockwise_ *call = zero->call;
  const moe_blockwise_layer *l = &call->layer;
  const int64_t size = call->checkpoint_size;
  (void)worker;
  for (int64_t r = 0, end; r < l->B; r = end) {
    const uint8_t *used = call->plan.used + b * l->B;
    for (end = r + 1; end < l->B && used[end] == used[r];) end++;
    if (!used[r] && zero->down) memset(zero->down + (b * l->B + r) * l->H * size, 0, (size_t)((end - r) * l->H * size));
    for (int64_t i = 0; i < 2 * l->I && zero->gate_up; i++)
      if (!used[r] || (call->glu.skip_gate && i < l->I))
        memset(zero->gate_up + moe_checkpoint_at_(call, b * l->B + r, 2, 0, i) * size, 0, (size_t)((end - r) * size));
    for (int64_t i = 0; i < l->I && zero->scaled && !used[r]; i++)
      memset(zero->scaled + moe_checkpoint_at_(call, b * l->B + r, 1, 0, i) * size, 0, (size_t)((end - r) * size));
  }
}

#endif
