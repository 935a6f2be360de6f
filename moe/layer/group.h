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
  int64_t lanes;
  int by_expert;        /* the order of work items: an expert's panels together, or a panel's experts */
  char *scratch;        /* lanes x lane_bytes */
  int64_t lane_bytes, sum_floats, grad_x_bytes, grad_y_bytes;
} moe_group_;

/* A lane's scratch memory. */
typedef struct moe_lane_ {
  float *c;              /* products, see moe_operands_ */
  char *pieces, *gathered; /* see moe_operands_ */
  float *sum;            /* partial outputs, or a column of T */
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
  lane.c = (float *)moe_take_(arena, MOE_PANELS_MAX * MOE_PRODUCTS_FLOATS_ * 4);
  lane.pieces = (char *)moe_take_(arena, MOE_PANELS_MAX * MOE_PIECE_BYTES_);
  lane.gathered = (char *)moe_take_(arena, MOE_ROWS_MAX * MOE_PIECE_ROW_BYTES_);
  lane.sum = (float *)moe_take_(arena, moe_mul_(group->sum_floats, 4));
  lane.grad_x = (char *)moe_take_(arena, group->grad_x_bytes);
  lane.grad_y = (char *)moe_take_(arena, group->grad_y_bytes);
  return lane;
}

MOE_FN void moe_lanes_layout_(moe_group_ *group, moe_arena_ *arena, int64_t lanes, int64_t sum_floats, int64_t grad_x_bytes, int64_t grad_y_bytes) {
  moe_arena_ one = {NULL, 0};
  group->lanes = lanes;
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

/* Panel p's products. */
MOE_FN float *moe_lane_products_(const moe_lane_ *lane, int64_t p) { return lane->c + p * MOE_PRODUCTS_FLOATS_; }

/* lane's products = left * right[panels], while `next` is fetched. */
MOE_FN void moe_lane_multiply_(const moe_group_ *group, const moe_lane_ *lane, const moe_left_ *left, const moe_right_ *right, int64_t panels,
                               const moe_ahead_ *next) {
  const moe_operands_ m = {&group->kernels, group->product, left, right, panels, lane->c, lane->pieces, lane->gathered, next};
  moe_multiply_(&m);
}

/* How many rows to take at a time of those that are left: as equal parts as fit. */
MOE_FN int64_t moe_rows_at_once_(int64_t rows) { return rows > 0 ? moe_ceil_div_(rows, moe_ceil_div_(rows, MOE_ROWS_MAX)) : 0; }

/* How many panels a work item takes: up to `most`, while every lane still finds a few items. Results do not depend on it. */
MOE_FN int64_t moe_panels_per_item_(int64_t lanes, int64_t others, int64_t panels, int64_t most) {
  int64_t n = most;
  while (n > 1 && others * moe_ceil_div_(panels, n) < 8 * lanes) n /= 2;
  return n;
}

/* An item of a stage over experts x parts. */
MOE_FN void moe_split_item_(const moe_group_ *group, int64_t item, int64_t parts, int64_t *expert, int64_t *part) {
  *expert = group->by_expert ? item / parts : item % group->E;
  *part = group->by_expert ? item % parts : item / group->E;
}

/* The panels of one item of such a stage: [first, first+count) of `panels`, `per_item` at a time. */
typedef struct moe_span_ {
  int64_t expert, first, count;
} moe_span_;

MOE_FN moe_span_ moe_span_of_(const moe_group_ *group, int64_t item, int64_t panels, int64_t per_item) {
  moe_span_ span;
  moe_split_item_(group, item, moe_ceil_div_(panels, per_item), &span.expert, &span.first);
  span.first *= per_item;
  span.count = moe_min_(per_item, panels - span.first);
  return span;
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
