/* Argument checks that every public function shares. A function lists its tensors; they are checked for presence, size,
   alignment and overlap before anything is written. */
#ifndef MOE_BASE_CHECK_H
#define MOE_BASE_CHECK_H

typedef enum moe_role_ { MOE_INPUT, MOE_INPUT_OPTIONAL, MOE_OUTPUT, MOE_OUTPUT_OPTIONAL } moe_role_;

typedef struct moe_tensor_ {
  const char *name;
  const void *data;
  int64_t bytes; /* < 0: the size overflowed */
  int64_t align; /* bytes of an element */
  moe_role_ role;
} moe_tensor_;

/* The tensors of a call. Where the bit `each >> i & 1` is set, tensor i is an array of pointers to `experts` of them. */
enum { MOE_TENSORS_MAX_ = 64 }; /* a moe_layer with all that there can be has 53 */
typedef struct moe_tensors_ {
  moe_tensor_ tensor[MOE_TENSORS_MAX_];
  int count;
  uint64_t each;
  int64_t experts;
} moe_tensors_;

/* Adds an array of them to the list. */
#define MOE_LIST_(tensors, own) moe_list_(tensors, own, (int)(sizeof own / sizeof *own))
MOE_FN moe_status moe_list_(moe_tensors_ *tensors, const moe_tensor_ *own, int count) {
  memcpy(tensors->tensor + tensors->count, own, (size_t)count * sizeof *own);
  tensors->count += count;
  return MOE_OK;
}

MOE_FN int moe_overlap_(const moe_tensor_ *a, const moe_tensor_ *b) {
  if (!a->data || !b->data || a->bytes <= 0 || b->bytes <= 0) return 0;
  uintptr_t x = (uintptr_t)a->data, y = (uintptr_t)b->data;
  return x < y ? y - x < (uintptr_t)a->bytes : x - y < (uintptr_t)b->bytes;
}

MOE_FN int moe_is_output_(const moe_tensor_ *t) { return t->role == MOE_OUTPUT || t->role == MOE_OUTPUT_OPTIONAL; }

/* Tensor i, or the one of expert e; of how many. */
MOE_FN int64_t moe_tensors_of_(const moe_tensors_ *tensors, int i) {
  return tensors->each >> i & 1 && tensors->tensor[i].data ? tensors->experts : 1;
}
MOE_FN moe_tensor_ moe_tensor_at_(const moe_tensors_ *tensors, int i, int64_t e) {
  moe_tensor_ t = tensors->tensor[i];
  if (tensors->each >> i & 1 && t.data)
    t.data = ((const void *const *)t.data)[e], t.role = moe_is_output_(&t) ? MOE_OUTPUT : MOE_INPUT;
  return t;
}

/* A pointer, once it is known whether there must be one. */
MOE_FN moe_status moe_check_tensor_(moe_context *ctx, const moe_tensor_ *t) {
  if (!t->data && t->bytes > 0 && (t->role == MOE_INPUT || t->role == MOE_OUTPUT))
    return moe_fail_(ctx, MOE_ERROR_NULL_ARGUMENT, t->name, "is NULL");
  if (t->align > 0 && (uintptr_t)t->data % (uintptr_t)t->align != 0)
    return moe_fail_(ctx, MOE_ERROR_MISALIGNED, t->name, "is not aligned to its element type");
  if (t->bytes > 0 && (uintptr_t)t->data > UINTPTR_MAX - (uintptr_t)t->bytes)
    return moe_fail_(ctx, MOE_ERROR_OVERFLOW, t->name, "of this shape wraps around the address space");
  return MOE_OK;
}

/* Whether the output i, of expert e, overlaps any other tensor. */
MOE_FN int moe_overlaps_any_(const moe_tensors_ *tensors, int i, int64_t e) {
  const moe_tensor_ output = moe_tensor_at_(tensors, i, e);
  for (int j = 0; j < tensors->count; j++)
    for (int64_t other = 0; other < moe_tensors_of_(tensors, j); other++) {
      const moe_tensor_ t = moe_tensor_at_(tensors, j, other);
      if ((i != j || e != other) && moe_overlap_(&output, &t)) return 1;
    }
  return 0;
}

/* With `sizes_only`, pointers are not looked at (workspace queries). A tensor without elements may be NULL. */
MOE_FN moe_status moe_check_tensors_(moe_context *ctx, const moe_tensors_ *tensors, int sizes_only) {
  const moe_tensor_ *tensor = tensors->tensor;
  const int count = tensors->count;
  for (int i = 0; i < count; i++)
    if (tensor[i].bytes < 0)
      return moe_fail_(ctx, MOE_ERROR_OVERFLOW, tensor[i].name, "of this shape overflows the address space");
  for (int i = 0; i < count && !sizes_only; i++) {
    if ((tensors->each >> i & 1) && (uintptr_t)tensor[i].data % sizeof(void *) != 0)
      return moe_fail_(ctx, MOE_ERROR_MISALIGNED, tensor[i].name, "is not an aligned array of pointers");
    for (int64_t e = 0; e < moe_tensors_of_(tensors, i); e++) {
      const moe_tensor_ t = moe_tensor_at_(tensors, i, e);
      MOE_TRY(moe_check_tensor_(ctx, &t));
    }
  }
  for (int i = 0; i < count && !sizes_only; i++)
    for (int64_t e = 0; e < moe_tensors_of_(tensors, i) && moe_is_output_(&tensor[i]); e++)
      if (moe_overlaps_any_(tensors, i, e))
        return moe_fail_(ctx, MOE_ERROR_OVERLAP, tensor[i].name, "overlaps another tensor of this call");
  return MOE_OK;
}

MOE_FN moe_status moe_check_positive_(moe_context *ctx, const char *name, int64_t value) {
  return value > 0 ? MOE_OK : moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, name, "must be at least 1");
}

MOE_FN moe_status moe_check_not_negative_(moe_context *ctx, const char *name, int64_t value) {
  return value >= 0 ? MOE_OK : moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, name, "is negative");
}

/* Ids are int32, so what they count must fit. */
MOE_FN moe_status moe_check_count_(moe_context *ctx, const char *name, int64_t value) {
  MOE_TRY(moe_check_positive_(ctx, name, value));
  return value < INT32_MAX ? MOE_OK : moe_fail_(ctx, MOE_ERROR_OVERFLOW, name, "does not fit in 32-bit ids");
}

/* The same of what there may be none of: tokens, blocks. */
MOE_FN moe_status moe_check_count_or_none_(moe_context *ctx, const char *name, int64_t value) {
  return value == 0 ? MOE_OK : moe_check_count_(ctx, name, value);
}

MOE_FN moe_status moe_check_flag_(moe_context *ctx, const char *name, int value) {
  return value == 0 || value == 1 ? MOE_OK : moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, name, "must be 0 or 1");
}

MOE_FN moe_status moe_check_enum_(moe_context *ctx, const char *name, int value, int count) {
  return value >= 0 && value < count
             ? MOE_OK
             : moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, name, "is not one of its enum's values");
}

MOE_FN moe_status moe_check_accumulate_(moe_context *ctx, uint32_t accumulate, uint32_t outputs) {
  return (accumulate & ~outputs) == 0
             ? MOE_OK
             : moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "accumulate", "has bits that name no output of this call");
}

/* How many values the enums have that come from a list. */
#define MOE_ONE_(...) +1
enum {
  MOE_ISA_COUNT_ = 0 MOE_ISA_LIST(MOE_ONE_),
  MOE_DTYPE_COUNT_ = 1 MOE_DTYPE_LIST(MOE_ONE_),
  MOE_ELEMENT_COUNT_ = 0 MOE_ELEMENT_LIST(MOE_ONE_), /* without integers */
  MOE_ELEMENT_ALL_ = MOE_ELEMENT_COUNT_ MOE_INTEGER_LIST(MOE_ONE_)
};

MOE_FN moe_dtype moe_or_(moe_dtype dtype, moe_dtype fallback) { return dtype == MOE_DTYPE_DEFAULT ? fallback : dtype; }

MOE_FN moe_status moe_check_finite_(moe_context *ctx, const char *name, const float *value) {
  return moe_is_finite_(value) ? MOE_OK : moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, name, "must be finite");
}

#endif
