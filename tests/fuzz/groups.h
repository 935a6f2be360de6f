/* groups.h: whole tensors to groups under scales of any type, and back. */
#ifndef MOE_FUZZ_GROUPS_H
#define MOE_FUZZ_GROUPS_H

#include "support/quantized.h"

#include "numbers.h"

static moe_status fuzz_quantize_group(moe_context *ctx, const void *args) {
  return moe_quantize_group(ctx, (const moe_quantize_group_args *)args);
}
static moe_status fuzz_dequantize_group(moe_context *ctx, const void *args) {
  return moe_dequantize_group(ctx, (const moe_dequantize_group_args *)args);
}

/* Either direction; scales, where they are read, are any bits but in the tensor that is quantised. */
static void fuzz_groups(fuzz_input *in, moe_context *ctx) {
  static const int64_t sizes[] = {4, 2, 2, 1, 1};
  fuzz_call c = fuzz_call_of(in, ctx);
  const int decode = fuzz_pick(in, 2);
  moe_quantize_group_args q;
  memset(&q, 0, sizeof q);
  q.element = (moe_element)fuzz_enum(in, ELEMENTS + INTEGERS),
  q.scales_type = (moe_scales_type)fuzz_enum(in, MOE_SCALES_COUNT_);
  if (!decode) q.cast = fuzz_cast(in);
  q.dtype = (moe_dtype)fuzz_enum(in, 1 + TEST_DTYPES);
  q.rows = fuzz_length(in, 0, 60, 13), q.columns = fuzz_length(in, 0, 100, 13), q.group = fuzz_length(in, 1, 40, 16);
  if (in->legal && q.element == MOE_ELEMENT_MXINT8) in->legal = 0;
  const int legal = in->legal, zeros = legal && q.element == MOE_ELEMENT_UINT4 && fuzz_pick(in, 2);
  const int64_t groups = legal ? fuzz_ceil(q.columns, q.group) : 1, size = legal ? sizes[q.scales_type] : 1;
  const int64_t line = legal ? (q.columns * element_of(q.element)->bits + 7) / 8 : q.columns;
  const int64_t plain = fuzz_times(q.rows, q.columns), each = legal ? (int64_t)moe_dtype_size(fuzz_or_f32(q.dtype)) : 4;
  moe_dequantize_group_args d = {.element = q.element,
                                 .scales_type = q.scales_type,
                                 .dtype = q.dtype,
                                 .rows = q.rows,
                                 .columns = q.columns,
                                 .group = q.group};
  fuzz_tensor_of(&c, decode ? (void *)&d.plain : (void *)&q.plain, decode, plain, each);
  fuzz_tensor_of(&c, decode ? (void *)&d.codes : (void *)&q.codes, !decode, fuzz_times(q.rows, line), 1);
  fuzz_tensor_of(&c, decode ? (void *)&d.scales : (void *)&q.scales, !decode, fuzz_times(q.rows, groups), size);
  if (zeros)
    fuzz_tensor_of(&c, decode ? (void *)&d.zero_points : (void *)&q.zero_points, !decode, fuzz_times(q.rows, groups),
                   1);
  if (!fuzz_open(&c)) return;
  if (!decode) fuzz_floats(&c, q.dtype, &c.tensor[0]);
  fuzz_spoil(&c);
  (void)fuzz_run(&c, decode ? "moe_dequantize_group" : "moe_quantize_group",
                 decode ? fuzz_dequantize_group : fuzz_quantize_group, decode ? (const void *)&d : (const void *)&q);
  fuzz_close(&c);
}

#endif /* MOE_FUZZ_GROUPS_H */
