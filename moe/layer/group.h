/* Grouped products: rows sorted by expert, each group times its own expert's weights, 64 columns at a time. What the blockwise
   layer and the grouped GEMM share: the groups, the order of work items, and every lane's scratch memory. */
#ifndef MOE_LAYER_GROUP_H
#define MOE_LAYER_GROUP_H

typedef struct moe_group_ {
  moe_kernels kernels;
  moe_product_ product;
  moe_panel_kind_ panel;
  int64_t E;
  const int64_t *first; /* [E+1]: expert e owns rows first[e] .. first[e+1] */
  int by_expert;        /* the order of work items: an expert's panels together, or a panel's experts */
  char *scratch;        /* lanes x lane_bytes */
  int64_t lane_bytes, sum_floats, grad_x_bytes, grad_y_bytes;
} moe_group_;

/* A lane's scratch memory. */
typedef struct moe_lane_ {
  float *c;         /* [MOE_ROWS_MAX][64] products */
  void *piece;      /* see moe_operands_ */
  float *converted; /* see moe_operands_ */
  float *sum;       /* MOE_CHUNK x 64 partial outputs, or a column of T */
  char *grad_x, *grad_y; /* packed operands of weight gradients */
} moe_lane_;

MOE_FN moe_group_ moe_group_of_(moe_dtype dtype, int64_t E) {
  moe_group_ group;
  memset(&group, 0, sizeof group);
  group.kernels = moe_kernels_();
  group.product = dtype == MOE_DTYPE_BF16 ? MOE_PRODUCT_BF16 : MOE_PRODUCT_F32;
  group.panel = group.kernels.panel[group.product];
  group.E = E;
  return group;
}

MOE_FN int64_t moe_group_rows_(const moe_group_ *group, int64_t expert) { return group->first[expert + 1] - group->first[expert]; }

/* ---------------------------------------------------------------------------------------------------- lane scratch */

/* One lane's layout; the arena only adds up when it has no memory. */
MOE_FN moe_lane_ moe_lane_layout_(const moe_group_ *group, moe_arena_ *arena) {
  moe_lane_ lane;
  lane.c = (float *)moe_take_(arena, (int64_t)(MOE_ROWS_MAX + MOE_LANES) * MOE_PANEL * 4); /* room for whole vectors of rows */
  lane.piece = moe_take_(arena, MOE_PIECE_BYTES_);
  lane.converted = (float *)moe_take_(arena, MOE_CONVERTED_BYTES_);
  lane.sum = (float *)moe_take_(arena, moe_mul_(group->sum_floats, 4));
  lane.grad_x = (char *)moe_take_(arena, group->grad_x_bytes);
  lane.grad_y = (char *)moe_take_(arena, group->grad_y_bytes);
  return lane;
}

MOE_FN void moe_lanes_layout_(moe_group_ *group, moe_arena_ *arena, int64_t lanes, int64_t sum_floats, int64_t grad_x_bytes, int64_t grad_y_bytes) {
  moe_arena_ one = {NULL, 0};
  group->sum_floats = sum_floats;
  group->grad_x_bytes = grad_x_bytes;
  group->grad_y_bytes = grad_y_bytes;
  moe_lane_layout_(group, &one);
  group->lane_bytes = one.used;
  group->scratch = (char *)moe_take_(arena, moe_mul_(lanes, one.used));
}

MOE_FN moe_lane_ moe_lane_at_(const moe_group_ *group, int64_t lane) {
  moe_arena_ arena = {group->scratch + lane * group->lane_bytes, 0};
  return moe_lane_layout_(group, &arena);
}

/* lane.c = left * right, while `next` is fetched. */
MOE_FN void moe_lane_multiply_(const moe_group_ *group, const moe_lane_ *lane, const moe_left_ *left, const moe_right_ *right, const moe_ahead_ *next) {
  const moe_operands_ m = {&group->kernels, group->product, left, right, lane->c, lane->piece, lane->converted, next};
  moe_multiply_(&m);
}

/* An item of a stage over experts x panels. */
MOE_FN void moe_split_item_(const moe_group_ *group, int64_t item, int64_t panels, int64_t *expert, int64_t *panel) {
  *expert = group->by_expert ? item / panels : item % group->E;
  *panel = group->by_expert ? item % panels : item / group->E;
}

/* dst = sum, or dst += sum, rounded once. `sum` is used up. */
MOE_FN void moe_store_sum_(const moe_kernels *kernels, void *dst, moe_dtype dtype, float *sum, int64_t n, int accumulate) {
  float old[MOE_PANEL];
  if (accumulate) {
    kernels->load_row[dtype](old, dst, n);
    kernels->add_scaled(sum, old, NULL, 1.0f, n);
  }
  kernels->store_row[dtype](dst, sum, n);
}

#endif
