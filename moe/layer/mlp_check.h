/* A call of the dense MLP: what is given, what is to be made, and whether all of it fits. */
#ifndef MOE_LAYER_MLP_CHECK_H
#define MOE_LAYER_MLP_CHECK_H

/* Which function is called; the phases are bits of `phases`. */
enum {
  MOE_MLP_RECOMPUTE_ = 1,
  MOE_MLP_PHASE1_ = 2,
  MOE_MLP_PHASE2_ = 4,
  MOE_MLP_PHASE3_ = 8,
  MOE_MLP_PHASE4_ = 16,
  MOE_MLP_BACKWARD_ = 31,
  MOE_MLP_FORWARD_ = 32
};

/* A tensor [S,I] of bf16 that is given, or computed: then it goes to `out`, or into the workspace. */
typedef struct moe_mlp_tensor_ {
  const char *given;
  char *out;
  int needed, make; /* it is read or written; it is computed */
  char *at;         /* its first row of this call */
} moe_mlp_tensor_;
enum { MOE_GATE_PRE_, MOE_GATE_ACT_, MOE_UP_, MOE_HIDDEN_, MOE_D_GATE_, MOE_D_UP_, MOE_MLP_TENSORS_ };

typedef struct moe_mlp_ {
  moe_mxfp8_ m;
  moe_mlp_mxfp8 mlp;
  int phases;                  /* of the function */
  int wanted;                  /* of these, what there is to do */
  moe_mlp_bwd_mxfp8_args args; /* of the forward: those that it has as well */
  moe_mxfp8_operand down_weight, d_gate, d_up, joined, d_gate_up_T, hidden;
  void *output;
  int64_t base, rows; /* of the results of the phase */
  moe_dtype weight_grad_dtype;
  moe_glu_ glu;    /* limits rounded to bf16 */
  moe_glu_ limits; /* as given */
  moe_mlp_tensor_ tensor[MOE_MLP_TENSORS_];
  moe_mx_matrix_ x, gate, up;                /* recompute, forward */
  moe_mx_matrix_ m_rows, down;               /* forward */
  moe_mx_matrix_ dy, down_T;                 /* phase 1 */
  moe_mx_matrix_ dg, du, gate_T, up_T, both; /* phase 2 */
  moe_mx_matrix_ grad, grad_up, x_columns;   /* phase 3 */
  moe_mx_matrix_ dy_columns, hidden_columns; /* phase 4 */
} moe_mlp_;

/* ------------------------------------------------------------------------------------------------------ validation */

MOE_FN moe_status moe_mlp_check_options_(moe_context *ctx, const moe_mlp_mxfp8 *mlp) {
  MOE_TRY(moe_check_context_(ctx));
  MOE_TRY(moe_mxfp8_check_format_(ctx, &mlp->format));
  MOE_TRY(moe_check_count_or_none_(ctx, "S", mlp->S));
  MOE_TRY(moe_check_count_(ctx, "H", mlp->H));
  MOE_TRY(moe_check_count_(ctx, "I", mlp->I));
  MOE_TRY(moe_mxfp8_check_axis_(ctx, &mlp->format, "S", mlp->S));
  MOE_TRY(moe_mxfp8_check_axis_(ctx, &mlp->format, "H", mlp->H));
  MOE_TRY(moe_mxfp8_check_axis_(ctx, &mlp->format, "I", mlp->I));
  MOE_TRY(moe_check_config_(ctx, &mlp->config));
  if (mlp->config.skip_gate) return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "config.skip_gate", "must be 0 in an MLP");
  if (mlp->config.affinity_mode != MOE_AFFINITY_POST_SCALE)
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "config.affinity_mode", "must be 0: an MLP has no affinities");
  MOE_TRY(moe_check_flag_(ctx, "unrounded_gate_act", mlp->unrounded_gate_act));
  MOE_TRY(moe_check_flag_(ctx, "hints.spill_reload", mlp->hints.spill_reload));
  MOE_TRY(moe_check_flag_(ctx, "hints.use_scale_packing", mlp->hints.use_scale_packing));
  MOE_TRY(moe_check_flag_(ctx, "hints.run_with_lnc2", mlp->hints.run_with_lnc2));
  for (int i = 0; i < 15; i++)
    if (mlp->hints.tiles[i / 3][i % 3] < 0)
      return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "hints.tiles", "has a negative count");
  return MOE_OK;
}

/* The rows of this call, of `all`. */
MOE_FN moe_status moe_mlp_check_rows_(moe_context *ctx, moe_mlp_ *p, int64_t base, int64_t count, int64_t all) {
  if (base < 0 || base > all || count < 0 || count > all - base)
    return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "row_base", "and row_count are no rows of the result");
  p->base = base;
  p->rows = count ? count : all - base;
  return MOE_OK;
}

/* What of the [S,I] tensors is needed, and made. */
MOE_FN void moe_mlp_resolve_tensors_(moe_mlp_ *p) {
  const moe_mlp_bwd_mxfp8_args *args = &p->args;
  const void *given[] = {args->gate_pre, args->gate_act, args->up, args->hidden};
  void *out[] = {args->gate_pre_scratch, args->gate_act_scratch, args->up_scratch, args->hidden_scratch};
  const int makes = p->phases & (MOE_MLP_RECOMPUTE_ | MOE_MLP_FORWARD_), first = (p->wanted & MOE_MLP_PHASE1_) != 0;
  moe_mlp_tensor_ *t = p->tensor, *g = t + MOE_GATE_PRE_, *act = t + MOE_GATE_ACT_, *up = t + MOE_UP_;
  moe_mlp_tensor_ *hidden = t + MOE_HIDDEN_;
  for (int i = 0; i < 4; i++) {
    t[i].given = (const char *)given[i];
    t[i].out = makes && !given[i] ? (char *)out[i] : NULL;
    t[i].needed = t[i].out != NULL;
  }
  if (first && (act->given || !p->mlp.unrounded_gate_act)) act->needed = 1;
  if (p->phases & MOE_MLP_FORWARD_ || (p->wanted & MOE_MLP_PHASE4_ && !args->hidden_T.data)) hidden->needed = 1;
  act->make = act->needed && !act->given;
  hidden->make = hidden->needed && !hidden->given;
  if (hidden->make && act->given) act->needed = 1;
  if (first || act->make || (hidden->make && !act->given)) g->needed = 1;
  if (first || hidden->make) up->needed = 1;
  g->make = makes && g->needed && !g->given;
  up->make = makes && up->needed && !up->given;
  for (int i = MOE_D_GATE_; i <= MOE_D_UP_; i++) {
    char *d = (char *)(i == MOE_D_GATE_ ? args->d_gate : args->d_up);
    t[i].make = first;
    t[i].out = first ? d : NULL;
    t[i].given = first ? NULL : d;
    t[i].needed = first || p->wanted & MOE_MLP_PHASE2_ || (p->wanted & MOE_MLP_PHASE3_ && !args->d_gate_up_T);
  }
}

/* Lists an [S,I] tensor as an input or an output of the function. */
MOE_FN void moe_mlp_list_tensor_(const moe_mlp_ *p, int which, const char *given, const char *out, int required,
                                 moe_tensors_ *tensors) {
  const moe_mlp_tensor_ *t = &p->tensor[which];
  const int64_t bytes = moe_mul3_(p->mlp.S, p->mlp.I, MOE_BF16_BYTES_);
  const int missing = t->needed && !t->make; /* must be given */
  const moe_tensor_ own[] = {
      {given, t->needed ? t->given : NULL, bytes, MOE_BF16_BYTES_, missing ? MOE_INPUT : MOE_INPUT_OPTIONAL},
      {out, t->out, bytes, MOE_BF16_BYTES_, required && t->make ? MOE_OUTPUT : MOE_OUTPUT_OPTIONAL}};
  MOE_LIST_(tensors, own);
}

MOE_FN void moe_mlp_list_tensors_(const moe_mlp_ *p, moe_tensors_ *tensors) {
  const int fwd = p->phases & MOE_MLP_FORWARD_, divided = p->phases == MOE_MLP_PHASE1_;
  moe_mlp_list_tensor_(p, MOE_GATE_PRE_, "gate_pre", fwd ? "gate_pre" : "gate_pre_scratch", 0, tensors);
  moe_mlp_list_tensor_(p, MOE_GATE_ACT_, "gate_act", fwd ? "gate_act" : "gate_act_scratch", 0, tensors);
  moe_mlp_list_tensor_(p, MOE_UP_, "up", fwd ? "up" : "up_scratch", 0, tensors);
  moe_mlp_list_tensor_(p, MOE_HIDDEN_, "hidden", fwd ? "hidden" : "hidden_scratch", 0, tensors);
  moe_mlp_list_tensor_(p, MOE_D_GATE_, "d_gate", "d_gate", divided, tensors);
  moe_mlp_list_tensor_(p, MOE_D_UP_, "d_up", "d_up", divided, tensors);
}

/* Lists operand x [F,K], or the one that it is made from, [K,F_other]... where it is wanted. */
#define MOE_MLP_LIST_(field, F, K, read) \
  MOE_TRY(moe_mxfp8_list_(ctx, &p->mlp.format, #field, #field ".scales", &args->field, F, K, read, tensors))

MOE_FN moe_status moe_mlp_list_operands_(moe_context *ctx, const moe_mlp_ *p, moe_tensors_ *tensors) {
  const moe_mlp_bwd_mxfp8_args *args = &p->args;
  const int64_t S = p->mlp.S, H = p->mlp.H, I = p->mlp.I;
  const int one = (p->wanted & MOE_MLP_PHASE1_) != 0, two = (p->wanted & MOE_MLP_PHASE2_) != 0;
  const int three = (p->wanted & MOE_MLP_PHASE3_) != 0, four = (p->wanted & MOE_MLP_PHASE4_) != 0;
  const int products = p->tensor[MOE_GATE_PRE_].make || p->tensor[MOE_UP_].make;
  const int gate_T = args->gate_weight_T.data != NULL, up_T = args->up_weight_T.data != NULL;
  MOE_MLP_LIST_(output_grad, S, H, one || (four && !args->output_grad_T.data));
  MOE_MLP_LIST_(hidden_states, S, H, products || (three && !args->hidden_states_T.data));
  MOE_MLP_LIST_(gate_up_weights, 2 * I, H, products || (two && !(gate_T && up_T)));
  MOE_MLP_LIST_(gate_weight_T, H, I, two && gate_T);
  MOE_MLP_LIST_(up_weight_T, H, I, two && up_T);
  MOE_MLP_LIST_(down_weight, H, I, p->phases & MOE_MLP_FORWARD_ || (one && !args->down_weight_T.data));
  MOE_MLP_LIST_(down_weight_T, I, H, one && args->down_weight_T.data);
  MOE_MLP_LIST_(hidden_states_T, H, S, three && args->hidden_states_T.data);
  MOE_MLP_LIST_(output_grad_T, H, S, four && args->output_grad_T.data);
  MOE_MLP_LIST_(hidden_T, I, S, four && args->hidden_T.data);
  return MOE_OK;
}
#undef MOE_MLP_LIST_

MOE_FN void moe_mlp_list_results_(const moe_mlp_ *p, moe_tensors_ *tensors) {
  const moe_mlp_bwd_mxfp8_args *args = &p->args;
  const int64_t S = p->mlp.S, H = p->mlp.H, I = p->mlp.I, size = moe_dtype_bytes_(p->weight_grad_dtype);
  const int alone = p->phases != MOE_MLP_BACKWARD_, T_is_read = p->phases == MOE_MLP_PHASE3_;
  const int has_T = p->wanted & (MOE_MLP_PHASE1_ | MOE_MLP_PHASE3_);
  const moe_tensor_ own[] = {
      {"output", p->output, moe_mul3_(S, H, MOE_BF16_BYTES_), MOE_BF16_BYTES_,
       p->phases & MOE_MLP_FORWARD_ ? MOE_OUTPUT : MOE_OUTPUT_OPTIONAL},
      {"d_gate_up_T", has_T ? args->d_gate_up_T : NULL, moe_mul4_(2, I, S, MOE_BF16_BYTES_), MOE_BF16_BYTES_,
       T_is_read ? MOE_INPUT_OPTIONAL : MOE_OUTPUT_OPTIONAL},
      {"hidden_states_grad", p->wanted & MOE_MLP_PHASE2_ ? args->hidden_states_grad : NULL,
       moe_mul3_(S, H, MOE_BF16_BYTES_), MOE_BF16_BYTES_,
       alone && p->wanted & MOE_MLP_PHASE2_ ? MOE_OUTPUT : MOE_OUTPUT_OPTIONAL},
      {"gate_up_weight_grad", p->wanted & MOE_MLP_PHASE3_ ? args->gate_up_weight_grad : NULL, moe_mul4_(2, I, H, size),
       size, alone && p->wanted & MOE_MLP_PHASE3_ ? MOE_OUTPUT : MOE_OUTPUT_OPTIONAL},
      {"down_weight_grad", p->wanted & MOE_MLP_PHASE4_ ? args->down_weight_grad : NULL, moe_mul3_(H, I, size), size,
       alone && p->wanted & MOE_MLP_PHASE4_ ? MOE_OUTPUT : MOE_OUTPUT_OPTIONAL}};
  MOE_LIST_(tensors, own);
}

/* Of the whole backward only what is asked for; a phase by itself is. */
MOE_FN int moe_mlp_wanted_(const moe_mlp_ *p) {
  const moe_mlp_bwd_mxfp8_args *args = &p->args;
  int wanted = p->phases;
  if (p->phases != MOE_MLP_BACKWARD_) return wanted;
  if (!args->hidden_states_grad) wanted &= ~MOE_MLP_PHASE2_;
  if (!args->gate_up_weight_grad) wanted &= ~MOE_MLP_PHASE3_;
  if (!args->down_weight_grad) wanted &= ~MOE_MLP_PHASE4_;
  if (!(wanted & (MOE_MLP_PHASE2_ | MOE_MLP_PHASE3_)) && !args->d_gate && !args->d_up && !args->d_gate_up_T)
    wanted &= ~MOE_MLP_PHASE1_;
  return wanted;
}

/* What follows from p->args, p->mlp and p->phases. */
MOE_FN moe_status moe_mlp_check_all_(moe_context *ctx, moe_mlp_ *p, moe_tensors_ *tensors) {
  const moe_mlp_bwd_mxfp8_args *args = &p->args;
  MOE_TRY(moe_mlp_check_options_(ctx, &p->mlp));
  const int64_t all = p->phases == MOE_MLP_PHASE3_ ? 2 * p->mlp.I : p->phases == MOE_MLP_PHASE4_ ? p->mlp.H : p->mlp.S;
  if (p->phases == MOE_MLP_BACKWARD_ && (args->row_base || args->row_count))
    return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "row_base", "and row_count must be 0: the phases take them");
  MOE_TRY(moe_mlp_check_rows_(ctx, p, args->row_base, args->row_count, all));
  MOE_TRY(moe_check_enum_(ctx, "weight_grad_dtype", (int)args->weight_grad_dtype, MOE_DTYPE_COUNT_));
  MOE_TRY(moe_check_accumulate_(ctx, args->accumulate,
                                MOE_ACCUMULATE_GATE_UP_WEIGHT_GRAD | MOE_ACCUMULATE_DOWN_WEIGHT_GRAD));
  p->weight_grad_dtype = moe_or_(args->weight_grad_dtype, MOE_DTYPE_BF16);
  p->wanted = moe_mlp_wanted_(p);
  moe_mxfp8_init_(&p->m, &p->mlp.format);
  moe_resolve_glu_(&p->mlp.config, &p->limits);
  p->glu = p->limits;
  moe_round_limits_(p->m.group.kernels, MOE_DTYPE_BF16, &p->glu);
  moe_mlp_resolve_tensors_(p);
  MOE_TRY(moe_mlp_list_operands_(ctx, p, tensors));
  moe_mlp_list_tensors_(p, tensors);
  moe_mlp_list_results_(p, tensors);
  return MOE_OK;
}

MOE_FN moe_status moe_mlp_bwd_check_(moe_context *ctx, void *state, const moe_call_ *call, moe_tensors_ *tensors) {
  moe_mlp_ *p = (moe_mlp_ *)state;
  p->args = *(const moe_mlp_bwd_mxfp8_args *)call->args;
  p->mlp = p->args.mlp;
  p->phases = call->kind;
  return moe_mlp_check_all_(ctx, p, tensors);
}

MOE_FN moe_status moe_mlp_fwd_check_(moe_context *ctx, void *state, const moe_call_ *call, moe_tensors_ *tensors) {
  moe_mlp_ *p = (moe_mlp_ *)state;
  const moe_mlp_fwd_mxfp8_args *args = (const moe_mlp_fwd_mxfp8_args *)call->args;
  p->mlp = args->mlp;
  p->phases = MOE_MLP_FORWARD_;
  p->output = args->output;
  p->args.row_base = args->row_base, p->args.row_count = args->row_count;
  p->args.hidden_states = args->hidden_states;
  p->args.gate_up_weights = args->gate_up_weights;
  p->args.down_weight = args->down_weight;
  p->args.gate_pre_scratch = args->gate_pre, p->args.gate_act_scratch = args->gate_act;
  p->args.up_scratch = args->up, p->args.hidden_scratch = args->hidden;
  return moe_mlp_check_all_(ctx, p, tensors);
}

#endif
