/* How micro-kernels of packed A, for weight gradients, store: their sums can go to memory for good. Included again for
   an instruction set that only rounds otherwise (round2). */

/* Row i as whole lines of its destination: its bytes move up behind those that the panel before could not fill a line
   with. A line that is not whole, where the first panel begins or the last one ends, is stored in part. */
MOE_INLINE void MOE_K(ukernel_carry)(const moe_ukernel_ *t, const moe_ukernel_at_ *at, int64_t i, char *line) {
  char *to = at->to + i * t->to.stride, *first = moe_line_of_(to), *carry = at->carry + i * 64;
  const int64_t begun = to - first, bytes = moe_ukernel_to_bytes_(t);
  MOE_V(i) before = MOE_V(loadi)(carry);
  for (int64_t j = 0; j < bytes; j += 64) {
    const MOE_V(i) own = MOE_V(loadi)(line + j);
    MOE_V(storei)(line + j, MOE_V(shift_in)(before, own, begun));
    before = own;
  }
  MOE_V(storei)(carry, before);
  if (t->to.begins) MOE_V(storei_part)(first, MOE_V(loadi)(line), begun, 64);
  if (t->to.ends) MOE_V(storei_part)(first + bytes, MOE_V(shift_in)(before, before, begun), 0, begun);
}

/* Row i's sums go to c or, for non-temporal stores, rounded to `lines`; where there is a NaN, by c. */
MOE_INLINE void MOE_K(ukernel_row_end)(const moe_ukernel_ *t, const moe_ukernel_at_ *at, int i, char *lines,
                                       const MOE_V(f) * sum) {
  float *c = at->c + i * MOE_NR;
  char *line = lines ? lines + i * moe_ukernel_to_bytes_(t) : NULL;
  if (!lines || MOE_V(any_nan4)(sum)) {
    MOE_UNROLL
    for (int j = 0; j < MOE_NR / MOE_W; j++) MOE_V(store)(c + j * MOE_W, sum[j]);
    if (lines) t->store(line, 0, NULL, c, 1, MOE_NR);
  } else {
    MOE_UNROLL
    for (int j = 0; j < MOE_NR / MOE_W; j++) {
      if (t->to.dtype == MOE_DTYPE_F32) MOE_V(storei)(line + j * MOE_W * 4, MOE_V(casti)(sum[j]));
      else if (j % 2 == 0) MOE_V(storei)
      (line + j * MOE_W * 2,
       t->to.dtype == MOE_DTYPE_BF16 ? MOE_K(round2)(sum[j], sum[j + 1]) : MOE_V(halve2)(sum[j], sum[j + 1]));
    }
  }
}

MOE_INLINE void MOE_K(ukernel_line_nt)(moe_nt_ *nt) {
  MOE_V(storei_nt)(nt->to, MOE_V(loadi)(nt->from));
  moe_nt_move_(nt);
}

/* The rest, before other rows take its place. */
MOE_INLINE void MOE_K(ukernel_lines_nt)(moe_nt_ *nt) {
  while (nt->left > 0) MOE_K(ukernel_line_nt)(nt);
}

/* Plain stores are made at once, from the first-level cache; of non-temporal ones a line at a time follows. The sums of
   a few rows are in c in any case. */
MOE_INLINE void MOE_K(ukernel_store)(const moe_ukernel_ *t, const moe_ukernel_at_ *at, int few, char *lines,
                                     moe_nt_ *nt) {
  const int64_t rows = at->now, bytes = moe_ukernel_to_bytes_(t);
  if (!at->to) return;
  if (t->to.nt) {
    if (few) t->store(lines, bytes, NULL, at->c, rows, MOE_NR);
    for (int64_t i = 0; i < rows && at->carry; i++) MOE_K(ukernel_carry)(t, at, i, lines + i * bytes);
    *nt = moe_nt_begin_(&t->to, lines, at->to, rows, bytes);
  } else {
    t->store(at->to, t->to.stride, NULL, at->c, rows, MOE_NR);
  }
}
