/* painted_faces.h: calls, on a painted stack, of routings, of what ranks exchange, and of the MXFP8 MLP. */
#ifndef MOE_TEST_PAINTED_FACES_H
#define MOE_TEST_PAINTED_FACES_H

#include "painted_calls.h"

/* --------------------------------------------------------------------------------------------------------- routings */

static void use_with_workspace(int call, int size, const void *args, void **workspace, size_t *bytes) {
  use(size, args, bytes);
  *workspace = take(*bytes);
  use(call, args, NULL);
  free(*workspace);
}

/* A routing in all forms, and as ranks exchange it. */
static void use_routings(int64_t T, int64_t E) {
  enum { K = 2, B = 16 };
  const int64_t N = T * K / B + E + 1;
  const size_t slots = (size_t)(T * K) * 4, experts = (size_t)E * 8, blocks = (size_t)(N + 1) * 4;
  void *memory[] = {take(slots),   take(slots),   take(slots),   take((size_t)(N * B) * 4),
                    take(blocks),  take(blocks),  take(experts), take(experts),
                    take(experts), take(experts), take(experts), take(experts)};
  int32_t *index = memory[0], *m_sizes = memory[6], *counts = memory[7], *places = memory[8];
  moe_routing_args a = {.T = T,
                        .E = E,
                        .K = K,
                        .B = B,
                        .N = N,
                        .expert_index = index,
                        .m_sizes = m_sizes,
                        .gather_indices = memory[1],
                        .token_position_to_id = memory[3],
                        .block_to_expert = memory[4],
                        .conditions = memory[5],
                        .tokens_per_expert = memory[9],
                        .slot_positions = memory[2],
                        .bins = memory[10],
                        .padded_bins = memory[11]};
#define USE_ROUTING(form) \
  use_with_workspace(FN_##form, FN_##form##_workspace_size, &a, &a.workspace, &a.workspace_bytes)
  for (int64_t i = 0; i < T * K; i++) index[i] = (int32_t)(i % E);
  USE_ROUTING(moe_routing_from_topk), USE_ROUTING(moe_routing_from_sorted), USE_ROUTING(moe_routing_from_blocks);
#undef USE_ROUTING
  for (int once = 0; once < 2; once++) {
    moe_expert_parallel_send_args send = {.T = T,
                                          .E = E,
                                          .K = K,
                                          .ranks = E,
                                          .one_per_token = once,
                                          .expert_index = index,
                                          .send_counts = counts,
                                          .send_displacements = places,
                                          .send_tokens = memory[1]};
    use_with_workspace(FN_moe_expert_parallel_send, FN_moe_expert_parallel_send_workspace_size, &send, &send.workspace,
                       &send.workspace_bytes);
  }
  const moe_expert_parallel_receive_args receive = {.E = E,
                                                    .ranks = 1,
                                                    .rows = T * K,
                                                    .rank_m_sizes = m_sizes,
                                                    .receive_counts = counts,
                                                    .receive_displacements = places,
                                                    .local_m_sizes = memory[9],
                                                    .local_gather_indices = memory[1]};
  use(FN_moe_expert_parallel_receive, &receive, NULL);
  use(FN_moe_expert_parallel_first, NULL, NULL);
  for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) free(memory[i]);
}

static void test_routings(void **state) {
  (void)state;
  use_routings(70, 3), use_routings(2000, 500);
}

/* -------------------------------------------------------------------------------------------------------- MXFP8 MLP */

#define USE_MXFP8(function, args) \
  use_with_workspace(FN_##function, FN_##function##_workspace_size, args, &(args)->workspace, &(args)->workspace_bytes)

/* All of zeros, given as bf16 or as codes: the product, the MLP, its backward of what is saved and of nothing, and each
   phase. */
static void use_mxfp8(const moe_mlp_mxfp8 *mlp, moe_mxfp8_operand any, char *out, size_t room) {
  const int codes = any.scales != NULL;
  void *o[16];
  for (int i = 0; i < 16; i++) o[i] = out + (size_t)i * room;
  moe_matmul_mxfp8_args product = {
      .M = mlp->S, .N = mlp->I, .K = mlp->H, .format = mlp->format, .a = any, .b = any, .output = o[0]};
  USE_MXFP8(moe_matmul_mxfp8, &product);
  moe_mlp_fwd_mxfp8_args forward = {.mlp = *mlp,
                                    .hidden_states = any,
                                    .gate_up_weights = any,
                                    .down_weight = any,
                                    .gate_pre = o[0],
                                    .gate_act = codes ? NULL : o[1],
                                    .up = o[2],
                                    .hidden = codes ? NULL : o[3],
                                    .output = o[4]};
  USE_MXFP8(moe_mlp_fwd_mxfp8, &forward);
  moe_mlp_bwd_mxfp8_args backward = {.mlp = *mlp,
                                     .output_grad = any,
                                     .hidden_states = any,
                                     .gate_up_weights = any,
                                     .down_weight = any,
                                     .gate_pre_scratch = o[5],
                                     .gate_act_scratch = o[6],
                                     .up_scratch = o[7],
                                     .hidden_scratch = o[8],
                                     .d_gate = o[9],
                                     .d_up = o[10],
                                     .d_gate_up_T = o[11],
                                     .hidden_states_grad = o[12],
                                     .gate_up_weight_grad = o[13],
                                     .down_weight_grad = o[14],
                                     .weight_grad_dtype = codes ? MOE_DTYPE_F32 : MOE_DTYPE_DEFAULT};
  USE_MXFP8(moe_mlp_bwd_mxfp8, &backward);
  USE_MXFP8(moe_mlp_bwd_mxfp8_recompute, &backward);
  backward.gate_pre = o[0], backward.up = o[2];
  USE_MXFP8(moe_mlp_bwd_mxfp8, &backward);
  USE_MXFP8(moe_mlp_bwd_mxfp8_phase1, &backward);
  USE_MXFP8(moe_mlp_bwd_mxfp8_phase2, &backward);
  USE_MXFP8(moe_mlp_bwd_mxfp8_phase3, &backward);
  USE_MXFP8(moe_mlp_bwd_mxfp8_phase4, &backward);
}

static void test_mxfp8_mlp(void **state) {
  static const int64_t shapes[][3] = {{160, 96, 128}, {1, 64, 96}, {33, 300, 70}};
  const size_t room = 320 * 320 * 4;
  char *in = take(room), *out = take(16 * room);
  int64_t rows[2];
  (void)state;
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++)
    for (int i = 0; i < 3 * 4 && test_use_isa(isa); i++) {
      const int64_t *s = shapes[i / 4];
      const int codes = i % 4 / 2, swizzled = i < 4 && i % 2;
      const moe_mlp_mxfp8 mlp = {
          .S = s[0],
          .H = s[1],
          .I = s[2],
          .format = {.element = (moe_element)(i % 2),
                     .layout = swizzled ? MOE_MX_LAYOUT_NKI_WRAPX : MOE_MX_LAYOUT_PLAIN},
          .config = {.activation = (moe_activation)(i % MOE_ACT_COUNT_), .clamp = i % 2 ? 15 : 0},
          .unrounded_gate_act = i % 3 == 0};
      const moe_mxfp8_operand any = {in, codes ? (const uint8_t *)in : NULL, swizzled, MOE_MX_SCALES_OWN};
      snprintf(situation, sizeof situation, "S=%d, codes %d, swizzled %d", (int)s[0], codes, swizzled);
      use_mxfp8(&mlp, any, out, room);
    }
  use(FN_moe_program_sharding_info, NULL, rows);
  free(in), free(out);
  test_use_best_isa();
}

#endif /* MOE_TEST_PAINTED_FACES_H */
