/* Device tensors. */
#ifndef MOE_NEURON_TENSOR_H
#define MOE_NEURON_TENSOR_H

moe_status moe_neuron_tensor_new(moe_context *ctx, const moe_neuron *neuron, int32_t core, size_t bytes,
                                 const char *name, moe_neuron_tensor *tensor) {
  if (!tensor) return moe_neuron_null_(ctx, "tensor");
  memset(tensor, 0, sizeof *tensor);
  MOE_NEURON_TRY_(moe_neuron_check_open_(ctx, neuron));
  MOE_NEURON_TRY_(MOE_NEURON_CALL_(ctx, neuron, nrt_tensor_allocate, MOE_NRT_TENSOR_PLACEMENT_DEVICE, core, bytes, name,
                                   &tensor->tensor));
  tensor->neuron = neuron, tensor->bytes = bytes;
  return moe_neuron_succeed_(ctx);
}

/* That bytes [offset, offset+bytes) are the tensor's. */
MOE_FN moe_status moe_neuron_within_(moe_context *ctx, const moe_neuron_tensor *tensor, const char *name, size_t offset,
                                     size_t bytes) {
  if (!tensor || !tensor->tensor) return moe_neuron_null_(ctx, name);
  MOE_NEURON_TRY_(moe_neuron_check_open_(ctx, tensor->neuron));
  if (offset <= tensor->bytes && bytes <= tensor->bytes - offset) return MOE_OK;
  return moe_neuron_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "%s has %zu bytes: there are no %zu from %zu on", name,
                          tensor->bytes, bytes, offset);
}

moe_status moe_neuron_tensor_slice(moe_context *ctx, const moe_neuron_tensor *of, size_t offset, size_t bytes,
                                   moe_neuron_tensor *slice) {
  if (!slice) return moe_neuron_null_(ctx, "slice");
  memset(slice, 0, sizeof *slice);
  MOE_NEURON_TRY_(moe_neuron_within_(ctx, of, "of", offset, bytes));
  MOE_NEURON_TRY_(MOE_NEURON_HAS_(ctx, of->neuron, nrt_tensor_allocate_slice));
  MOE_NEURON_TRY_(
      MOE_NEURON_CALL_(ctx, of->neuron, nrt_tensor_allocate_slice, of->tensor, offset, bytes, NULL, &slice->tensor));
  slice->neuron = of->neuron, slice->bytes = bytes;
  return moe_neuron_succeed_(ctx);
}

moe_status moe_neuron_tensor_write(moe_context *ctx, moe_neuron_tensor *tensor, size_t offset, const void *from,
                                   size_t bytes) {
  MOE_NEURON_TRY_(moe_neuron_within_(ctx, tensor, "tensor", offset, bytes));
  if (!from) return moe_neuron_null_(ctx, "from");
  MOE_NEURON_TRY_(MOE_NEURON_CALL_(ctx, tensor->neuron, nrt_tensor_write, tensor->tensor, from, offset, bytes));
  return moe_neuron_succeed_(ctx);
}

moe_status moe_neuron_tensor_read(moe_context *ctx, const moe_neuron_tensor *tensor, size_t offset, void *to,
                                  size_t bytes) {
  MOE_NEURON_TRY_(moe_neuron_within_(ctx, tensor, "tensor", offset, bytes));
  if (!to) return moe_neuron_null_(ctx, "to");
  MOE_NEURON_TRY_(MOE_NEURON_CALL_(ctx, tensor->neuron, nrt_tensor_read, tensor->tensor, to, offset, bytes));
  return moe_neuron_succeed_(ctx);
}

moe_status moe_neuron_tensor_fill(moe_context *ctx, moe_neuron_tensor *tensor, size_t offset, int byte, size_t bytes) {
  MOE_NEURON_TRY_(moe_neuron_within_(ctx, tensor, "tensor", offset, bytes));
  MOE_NEURON_TRY_(MOE_NEURON_HAS_(ctx, tensor->neuron, nrt_tensor_memset));
  MOE_NEURON_TRY_(MOE_NEURON_CALL_(ctx, tensor->neuron, nrt_tensor_memset, tensor->tensor, offset, byte, bytes));
  return moe_neuron_succeed_(ctx);
}

moe_status moe_neuron_tensor_copy(moe_context *ctx, const moe_neuron_tensor *from, size_t from_offset,
                                  moe_neuron_tensor *to, size_t to_offset, size_t bytes) {
  MOE_NEURON_TRY_(moe_neuron_within_(ctx, from, "from", from_offset, bytes));
  MOE_NEURON_TRY_(moe_neuron_within_(ctx, to, "to", to_offset, bytes));
  MOE_NEURON_TRY_(MOE_NEURON_HAS_(ctx, from->neuron, nrt_tensor_copy));
  MOE_NEURON_TRY_(
      MOE_NEURON_CALL_(ctx, from->neuron, nrt_tensor_copy, from->tensor, from_offset, to->tensor, to_offset, bytes));
  return moe_neuron_succeed_(ctx);
}

void moe_neuron_tensor_free(moe_neuron_tensor *tensor) {
  if (!tensor || !tensor->tensor) return;
  if (tensor->neuron->library) tensor->neuron->nrt.nrt_tensor_free(&tensor->tensor);
  memset(tensor, 0, sizeof *tensor);
}

/* Zeroes bytes of a tensor, also where this libnrt cannot do that by itself. */
MOE_FN moe_status moe_neuron_zero_(moe_context *ctx, const moe_neuron *neuron, moe_nrt_tensor *tensor, size_t offset,
                                   size_t bytes) {
  static const char zero[4096];
  if (bytes == 0) return MOE_OK;
  if (neuron->nrt.nrt_tensor_memset) return MOE_NEURON_CALL_(ctx, neuron, nrt_tensor_memset, tensor, offset, 0, bytes);
  for (size_t n; bytes > 0; offset += n, bytes -= n) {
    n = bytes < sizeof zero ? bytes : sizeof zero;
    MOE_NEURON_TRY_(MOE_NEURON_CALL_(ctx, neuron, nrt_tensor_write, tensor, zero, offset, n));
  }
  return MOE_OK;
}

#endif
