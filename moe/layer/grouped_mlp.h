/* moe_grouped_mlp_*: the layer of sorted slots, by Unsloth's names. */
#ifndef MOE_LAYER_GROUPED_MLP_H
#define MOE_LAYER_GROUPED_MLP_H

/* What the layer names otherwise. */
static const char *const moe_grouped_mlp_names_[][2] = {
    {"T", "num_tokens"},
    {"K", "topk"},
    {"x", "X"},
    {"y", "Y"},
    {"y_grad", "dY"},
    {"grads.x", "dX"},
    {"grads.topk_weights", "dtopk_weights"},
    {"grads.gate_up", "dgate_up"},
    {"grads.down", "ddown"},
    {"grads.gate_up_bias", "dgate_up_bias"},
    {"grads.down_bias", "ddown_bias"},
    {"grads.weight_dtype", "weight_grad_dtype"},
};

MOE_FN moe_status moe_grouped_mlp_run_(moe_context *ctx, const moe_grouped_mlp_args *a, moe_dtype dtype, int backward,
                                       int query, size_t *bytes) {
  if (!a) return moe_fail_(ctx, MOE_ERROR_NULL_ARGUMENT, "args", "is NULL");
  moe_layer l = {.T = a->num_tokens,
                 .H = a->H,
                 .I = a->I,
                 .E = a->E,
                 .K = a->topk,
                 .x = a->X,
                 .gate_up = a->gate_up,
                 .down = a->down,
                 .orders = {.gate_up = MOE_ORDER_OUT_IN, .down = MOE_ORDER_OUT_IN},
                 .gate_up_bias = a->gate_up_bias,
                 .down_bias = a->down_bias,
                 .config = a->config,
                 .accumulate = a->accumulate,
                 .workspace = a->workspace,
                 .workspace_bytes = a->workspace_bytes};
  const moe_pairs_ pairs = {.K = a->topk,
                            .sorted = 1,
                            .m_sizes = a->m_sizes,
                            .gather_indices = a->gather_indices,
                            .topk_weights = a->topk_weights};
  const moe_layer_grads grads = {.x = a->dX,
                                 .topk_weights = a->dtopk_weights,
                                 .gate_up = a->dgate_up,
                                 .down = a->ddown,
                                 .gate_up_bias = a->dgate_up_bias,
                                 .down_bias = a->ddown_bias,
                                 .weight_dtype = a->weight_grad_dtype,
                                 .accumulate = a->accumulate};
  const moe_status status = backward
                                ? moe_face_run_backward_(ctx, &l, &pairs, a->saved, a->dY, &grads, dtype, query, bytes)
                                : moe_face_run_forward_(ctx, &l, &pairs, a->Y, a->saved, dtype, query, bytes);
  return moe_face_rename_(ctx, status, "", moe_grouped_mlp_names_,
                          sizeof moe_grouped_mlp_names_ / sizeof *moe_grouped_mlp_names_);
}

#define MOE_DEFINE_GROUPED_MLP_(function, dtype, backward)                                                  \
  moe_status function(moe_context *ctx, const moe_grouped_mlp_args *args) {                                 \
    return moe_grouped_mlp_run_(ctx, args, dtype, backward, 0, NULL);                                       \
  }                                                                                                         \
  moe_status function##_workspace_size(moe_context *ctx, const moe_grouped_mlp_args *args, size_t *bytes) { \
    return moe_grouped_mlp_run_(ctx, args, dtype, backward, 1, bytes);                                      \
  }
#define MOE_DEFINE_GROUPED_MLPS_(name, type, NAME)                     \
  MOE_DEFINE_GROUPED_MLP_(moe_grouped_mlp_##name, MOE_DTYPE_##NAME, 0) \
  MOE_DEFINE_GROUPED_MLP_(moe_grouped_mlp_bwd_##name, MOE_DTYPE_##NAME, 1)
MOE_DTYPE_LIST(MOE_DEFINE_GROUPED_MLPS_)
#undef MOE_DEFINE_GROUPED_MLPS_
#undef MOE_DEFINE_GROUPED_MLP_

#endif
