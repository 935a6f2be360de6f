/* public.inl: every public function once, as PUBLIC(function, form, type) of the includer. compile_checks.sh compares
   the list with what moe.h declares. Forms:
     CALL    moe_status f(moe_context *, const type *)
     SIZE    the same with a size_t * behind
     NARROW  moe_status f(moe_context *, type *, const float *, int64_t)
     CAST    the same with a uint32_t behind
     WIDEN   moe_status f(moe_context *, float *, const type *, int64_t)
     FORWARD, BACKWARD, BACKWARD_SIZE  those of moe_layer_*
     OTHER   anything else (type is void) */
#define PUBLIC_SIZED_(function, type) PUBLIC(function, CALL, type) PUBLIC(function##_workspace_size, SIZE, type)
#define PUBLIC_TYPED_(name, type, NAME)                                                                               \
  PUBLIC(moe_##name##_from_f32, NARROW, type)                                                                         \
  PUBLIC(moe_##name##_to_f32, WIDEN, type)                                                                            \
  PUBLIC_SIZED_(moe_router_topk_##name, moe_router_topk_args)                                                         \
  PUBLIC_SIZED_(moe_router_topk_bwd_##name, moe_router_topk_bwd_args)                                                 \
  PUBLIC_SIZED_(moe_blockwise_mm_fwd_##name, moe_blockwise_mm_fwd_args)                                               \
  PUBLIC_SIZED_(moe_blockwise_mm_bwd_##name, moe_blockwise_mm_bwd_args)                                               \
  PUBLIC_SIZED_(moe_grouped_mlp_##name, moe_grouped_mlp_args)                                                         \
  PUBLIC_SIZED_(moe_grouped_mlp_bwd_##name, moe_grouped_mlp_args)                                                     \
  PUBLIC(moe_layer_forward_##name, FORWARD, void)                                                                     \
  PUBLIC(moe_layer_forward_##name##_workspace_size, SIZE, moe_layer)                                                  \
  PUBLIC(moe_layer_backward_##name, BACKWARD, void)                                                                   \
  PUBLIC(moe_layer_backward_##name##_workspace_size, BACKWARD_SIZE, void)                                             \
  PUBLIC(moe_layer_saved_bytes_##name, SIZE, moe_layer)                                                               \
  PUBLIC_SIZED_(moe_grouped_gemm_##name, moe_grouped_gemm_args)                                                       \
  PUBLIC_SIZED_(moe_grouped_gemm_dx_##name, moe_grouped_gemm_args)                                                    \
  PUBLIC_SIZED_(moe_grouped_gemm_dw_##name, moe_grouped_gemm_args)                                                    \
  PUBLIC(moe_pack_weights_##name, CALL, moe_pack_weights_args)                                                        \
  PUBLIC(moe_pack_weights_##name##_size, SIZE, moe_pack_weights_args)
#define PUBLIC_ELEMENT_(name, NAME, bits, fraction, bias, max, infinity, nan) \
  PUBLIC(moe_##name##_from_f32, CAST, uint8_t)                                \
  PUBLIC(moe_##name##_to_f32, WIDEN, uint8_t)

MOE_DTYPE_LIST(PUBLIC_TYPED_)
MOE_MXFP8_LIST(PUBLIC_SIZED_)
PUBLIC(moe_program_sharding_info, OTHER, void)
MOE_ELEMENT_LIST(PUBLIC_ELEMENT_)
PUBLIC(moe_e8m0_from_f32, NARROW, uint8_t)
PUBLIC(moe_e8m0_to_f32, WIDEN, uint8_t)
PUBLIC(moe_quantize_mx, CALL, moe_quantize_mx_args)
PUBLIC(moe_dequantize_mx, CALL, moe_dequantize_mx_args)
PUBLIC(moe_quantize_scaled, CALL, moe_quantize_scaled_args)
PUBLIC(moe_dequantize_scaled, CALL, moe_dequantize_scaled_args)
PUBLIC(moe_quantize_group, CALL, moe_quantize_group_args)
PUBLIC(moe_dequantize_group, CALL, moe_dequantize_group_args)
PUBLIC(moe_mx_layout_convert, CALL, moe_mx_layout_args)
PUBLIC(moe_mx_layout_size, OTHER, void)
PUBLIC(moe_nki_x4_permutation, OTHER, void)
PUBLIC(moe_nki_vector_convert, CALL, moe_nki_vector_args)
PUBLIC(moe_nki_vector_size, OTHER, void)
PUBLIC(moe_router_load_balance_loss, CALL, moe_router_loss_args)
PUBLIC(moe_router_z_loss, CALL, moe_router_loss_args)
PUBLIC(moe_router_bias_update, CALL, moe_router_bias_update_args)
PUBLIC_SIZED_(moe_route_blocks, moe_route_blocks_args)
PUBLIC(moe_route_blocks_count, OTHER, void)
PUBLIC_SIZED_(moe_routing_from_topk, moe_routing_args)
PUBLIC_SIZED_(moe_routing_from_sorted, moe_routing_args)
PUBLIC_SIZED_(moe_routing_from_blocks, moe_routing_args)
PUBLIC(moe_expert_parallel_first, OTHER, void)
PUBLIC_SIZED_(moe_expert_parallel_send, moe_expert_parallel_send_args)
PUBLIC(moe_expert_parallel_receive, CALL, moe_expert_parallel_receive_args)
PUBLIC(moe_tune_grouped_gemm, CALL, moe_tune_grouped_gemm_args)
PUBLIC(moe_tune_save, OTHER, void)
PUBLIC(moe_tune_load, OTHER, void)
PUBLIC(moe_activation_f32, OTHER, void)
PUBLIC(moe_status_str, OTHER, void)
PUBLIC(moe_status_text, OTHER, void)
PUBLIC(moe_dtype_size, OTHER, void)
PUBLIC(moe_isa_name, OTHER, void)
PUBLIC(moe_isa_supported, OTHER, void)
PUBLIC(moe_isa_active, OTHER, void)
PUBLIC(moe_isa_limit, OTHER, void)

#undef PUBLIC_SIZED_
#undef PUBLIC_TYPED_
#undef PUBLIC_ELEMENT_
#undef PUBLIC
