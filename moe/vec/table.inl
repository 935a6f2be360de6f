/* The table of an instruction set's elementwise kernels. */

#define MOE_LOAD_ROWS_(name, type, NAME)  [MOE_DTYPE_##NAME] = MOE_CAT(moe_load_rows_##name##_, MOE_ISA),
#define MOE_STORE_ROWS_(name, type, NAME) [MOE_DTYPE_##NAME] = MOE_CAT(moe_store_rows_##name##_, MOE_ISA),

static const moe_vec_table_ MOE_K(vec_table) = {
    .load_rows = {MOE_DTYPE_LIST(MOE_LOAD_ROWS_)},
    .store_rows = {MOE_DTYPE_LIST(MOE_STORE_ROWS_)},
    .glu_forward = MOE_K(glu_forward),
    .glu_backward = MOE_K(glu_backward),
    .keep_inside = MOE_K(keep_inside),
    .activate = MOE_K(activate),
    .add_scaled = MOE_K(add_scaled),
    .add_rows = MOE_K(add_rows),
    .add_long = MOE_K(add_long),
    .scale_row = MOE_K(scale_row),
    .multiply_row = MOE_K(multiply_row),
    .copy_nt = MOE_K(copy_nt),
    .transpose_words = MOE_K(transpose_tile),
    .dot = MOE_K(dot),
};

#undef MOE_LOAD_ROWS_
#undef MOE_STORE_ROWS_
