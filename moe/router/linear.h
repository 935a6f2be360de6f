/* The router's three products: x*W, dz*W^T and x^T*dz, all MOE_PRODUCT_F32. */
#ifndef MOE_ROUTER_LINEAR_H
#define MOE_ROUTER_LINEAR_H

enum { MOE_PACK_CHUNK_ = 256 }; /* rows that one work item packs */

/* W [H,E] as B, with k = H; transposed, with k = E. */
typedef struct moe_router_weight_ {
  const moe_kernels *kernels;
  const char *data;
  moe_dtype dtype;
  int64_t H, E;
  int transposed;
  float *panels;
} moe_router_weight_;

MOE_FN int64_t moe_router_weight_columns_(const moe_router_weight_ *w) { return w->transposed ? w->H : w->E; }
MOE_FN int64_t moe_router_weight_depth_(const moe_router_weight_ *w) { return w->transposed ? w->E : w->H; }

MOE_FN int64_t moe_router_weight_bytes_(const moe_router_weight_ *w) {
  const int64_t panels = moe_ceil_div_(moe_router_weight_columns_(w), MOE_NR);
  return moe_mul_(panels, moe_panel_bytes_(MOE_PANEL_F32, moe_router_weight_depth_(w)));
}

MOE_FN float *moe_router_panel_(const moe_router_weight_ *w, int64_t panel) {
  return w->panels + panel * moe_even_(moe_router_weight_depth_(w)) * MOE_NR;
}

MOE_FN void moe_router_pack_item_(void *arg, int64_t item, moe_worker_ *worker) {
  const moe_router_weight_ *w = (const moe_router_weight_ *)arg;
  const int64_t size = moe_dtype_bytes_(w->dtype), row = w->E * size;
  (void)worker;
  if (w->transposed) {
    const int64_t at = item * MOE_NR, n = moe_min_(MOE_NR, w->H - at);
    const moe_columns_ columns = {{w->data + at * row, NULL}, 1, row, n};
    moe_pack_columns_(w->kernels, MOE_PANEL_F32, w->dtype, moe_router_panel_(w, item), &columns, w->E);
    return;
  }
  const int64_t chunks = moe_ceil_div_(w->H, MOE_PACK_CHUNK_), panel = item / chunks,
                from = item % chunks * MOE_PACK_CHUNK_;
  const int64_t at = panel * MOE_NR, n = moe_min_(MOE_NR, w->E - at);
  const moe_rows_ rows = {w->data + from * row + at * size, row, NULL};
  w->kernels->gemm->pack_rows[MOE_PANEL_F32][w->dtype](moe_router_panel_(w, panel) + from * MOE_NR, 0, MOE_NR, &rows,
                                                       moe_min_(MOE_PACK_CHUNK_, w->H - from), n);
}

/* Packs all panels. */
MOE_FN void moe_router_pack_(const moe_context *ctx, moe_router_weight_ *w) {
  const int64_t panels = moe_ceil_div_(moe_router_weight_columns_(w), MOE_NR);
  const int64_t chunks = w->transposed ? 1 : moe_ceil_div_(w->H, MOE_PACK_CHUNK_);
  moe_run_items_(ctx, panels * chunks, moe_router_pack_item_, w);
}

/* Rows [first, first+count) of a [.,n] matrix as A. */
MOE_FN void moe_router_a_(moe_a_ *a, const void *data, moe_dtype dtype, int64_t n, int64_t first, int64_t count,
                          char *a_packed) {
  const moe_rows_ rows = {(const char *)data, n * moe_dtype_bytes_(dtype), NULL};
  moe_a_from_rows_(a, &rows, first, count, dtype, 0, a_packed);
}

/* Bytes from a packed row of A to the next. */
MOE_FN int64_t moe_router_pitch_(const moe_kernels *kernels) { return kernels->blocking->kc_bytes[MOE_PANEL_F32]; }

enum { MOE_ROUTER_ROWS_ = 96 }; /* tokens of a work item: their logits stay in cache */
MOE_FN int64_t moe_router_items_(int64_t T) { return moe_ceil_div_(T, MOE_ROUTER_ROWS_); }

/* ------------------------------------------------------------------------------------------------------ x*W, dz*W^T */

/* out[first + i][.] = row i of A times W, plus the bias and, to accumulate, plus out itself. */
typedef struct moe_router_product_ {
  const moe_router_weight_ *weight;
  char *out; /* [.,columns] */
  moe_dtype dtype;
  const char *bias; /* of the weight's type, or NULL */
  int accumulate;
} moe_router_product_;

/* Floats of the products that a work item computes at a time. */
#define MOE_ROUTER_PRODUCTS_ (MOE_NC_PANELS * MOE_C_FLOATS_((int64_t)MOE_ROUTER_ROWS_))

/* Stores columns [at, at+n) of the products c. */
MOE_FN void moe_router_store_(const moe_router_product_ *p, int64_t first, int64_t rows, int64_t at, int64_t n,
                              float *c) {
  const moe_router_weight_ *w = p->weight;
  const int64_t size = moe_dtype_bytes_(p->dtype), stride = moe_router_weight_columns_(w) * size;
  float bias[MOE_NR];
  if (p->bias) moe_load_row_(w->kernels->vec, w->dtype, bias, p->bias + at * moe_dtype_bytes_(w->dtype), n);
  for (int64_t i = 0; i < rows && p->bias; i++) w->kernels->vec->add_scaled(c + i * MOE_NR, bias, 1.0f, n);
  moe_store_sums_(w->kernels, p->out + first * stride + at * size, stride, p->dtype, c, rows, n, p->accumulate);
}

MOE_FN void moe_router_multiply_(const moe_router_product_ *p, const moe_a_ *a, int64_t first, float *c) {
  const moe_router_weight_ *w = p->weight;
  const int64_t columns = moe_router_weight_columns_(w), k = moe_router_weight_depth_(w);
  const int64_t width = MOE_NC_PANELS * MOE_NR;
  for (int64_t at = 0; at < columns; at += width) {
    const int64_t end = moe_min_(columns, at + width);
    moe_b_ b;
    moe_b_packed_(&b, moe_router_panel_(w, at / MOE_NR), moe_panel_bytes_(MOE_PANEL_F32, k), end - at, k);
    const moe_gemm_ product = {w->kernels, MOE_PRODUCT_F32, a, &b, 0, moe_b_panels_(&b), c, NULL, NULL, NULL};
    moe_multiply_(&product);
    for (int64_t j = at; j < end; j += MOE_NR)
      moe_router_store_(p, first, a->rows, j, moe_min_(MOE_NR, end - j),
                        c + (j - at) / MOE_NR * MOE_C_FLOATS_(a->rows));
  }
}

/* ----------------------------------------------------------------------------------------------------------- x^T*dz */

enum {
  MOE_XT_ROWS_ = 2,    /* panels of x that one work item takes, at most */
  MOE_XT_COLUMNS_ = 4, /* panels of dz */
  MOE_XT_CHUNK_ = 128  /* tokens at a time */
};

typedef struct moe_router_xt_ {
  const moe_kernels *kernels;
  int64_t T, H, E;
  const char *x; /* [T,H] */
  moe_dtype dtype;
  const float *dz; /* [T,E] */
  char *out;       /* [H,E] */
  moe_dtype out_dtype;
  int accumulate;
  int64_t panels; /* of x, per work item */
} moe_router_xt_;

/* A worker's scratch memory: products, a chunk of x as rows, and a packed chunk of dz (before that, of x). */
MOE_FN int64_t moe_router_xt_bytes_(const moe_kernels *kernels) {
  return (MOE_XT_ROWS_ * (MOE_XT_COLUMNS_ * MOE_NR_BYTES_ + moe_router_pitch_(kernels)) + MOE_XT_CHUNK_ * 4) * MOE_NR;
}

MOE_FN int64_t moe_router_xt_items_(const moe_router_xt_ *g) {
  return moe_ceil_div_(g->H, g->panels * MOE_NR) * moe_ceil_div_(g->E, MOE_XT_COLUMNS_ * MOE_NR);
}

/* c += x^T dz over n tokens for 64 columns of both: x as rows, dz packed. */
MOE_FN void moe_router_xt_tile_(const moe_kernels *kernels, const char *x, const float *dz, int64_t n, float *c) {
  moe_ukernel_ ukernel;
  ukernel.row = ukernel.a_next = x;
  ukernel.rows = MOE_NR;
  ukernel.k = n;
  ukernel.panel = dz;
  ukernel.c = c;
  ukernel.c_next = c;
  ukernel.add = 1;
  ukernel.prefetches = NULL;
  ukernel.to.base = NULL;
  kernels->gemm->ukernel[MOE_PRODUCT_F32](&ukernel);
}

/* Stores rows [h,h+rows) and columns [e,e+columns) of the result, panel by panel. */
MOE_FN void moe_router_xt_store_(const moe_router_xt_ *g, int64_t h, int64_t rows, int64_t e, int64_t columns,
                                 float *c) {
  const int64_t size = moe_dtype_bytes_(g->out_dtype), square = MOE_NR * MOE_NR;
  for (int64_t i = 0; i < rows; i += MOE_NR)
    for (int64_t j = 0; j < columns; j += MOE_NR)
      moe_store_sums_(g->kernels, g->out + ((h + i) * g->E + e + j) * size, g->E * size, g->out_dtype,
                      c + (i / MOE_NR * MOE_XT_COLUMNS_ + j / MOE_NR) * square, moe_min_(MOE_NR, rows - i),
                      moe_min_(MOE_NR, columns - j), g->accumulate);
}

/* Work item: all tokens in ascending order, a chunk at a time, so that every sum is one chain. */
MOE_FN void moe_router_xt_item_(const moe_router_xt_ *g, int64_t item, float *memory) {
  const int64_t groups = moe_ceil_div_(g->E, MOE_XT_COLUMNS_ * MOE_NR), size = moe_dtype_bytes_(g->dtype);
  const int64_t h = item / groups * g->panels * MOE_NR, e = item % groups * MOE_XT_COLUMNS_ * MOE_NR;
  const int64_t rows = moe_min_(g->panels * MOE_NR, g->H - h), columns = moe_min_(MOE_XT_COLUMNS_ * MOE_NR, g->E - e);
  const int64_t square = MOE_NR * MOE_NR, a_floats = MOE_NR * moe_router_pitch_(g->kernels);
  float *c = memory, *dz = c + MOE_XT_ROWS_ * MOE_XT_COLUMNS_ * square;
  char *x = (char *)(dz + MOE_XT_CHUNK_ * MOE_NR);
  memset(c, 0, (size_t)(MOE_XT_ROWS_ * MOE_XT_COLUMNS_ * square) * sizeof *c);
  for (int64_t t = 0; t < g->T; t += MOE_XT_CHUNK_) {
    const int64_t n = moe_min_(MOE_XT_CHUNK_, g->T - t);
    for (int64_t i = 0; i < rows; i += MOE_NR) {
      const moe_rows_ source = {g->x + (t * g->H + h + i) * size, g->H * size, NULL};
      g->kernels->gemm->pack_rows[MOE_PANEL_F32][g->dtype](dz, 0, MOE_NR, &source, n, moe_min_(MOE_NR, rows - i));
      moe_transpose_panel_(g->kernels, MOE_PANEL_F32, (const char *)dz, n, MOE_NR, x + i / MOE_NR * a_floats,
                           moe_router_pitch_(g->kernels));
    }
    for (int64_t j = 0; j < columns; j += MOE_NR) {
      const moe_rows_ source = {(const char *)(g->dz + t * g->E + e + j), g->E * 4, NULL};
      g->kernels->gemm->pack_rows[MOE_PANEL_F32][MOE_DTYPE_F32](dz, 0, MOE_NR, &source, n,
                                                                moe_min_(MOE_NR, columns - j));
      for (int64_t i = 0; i < rows; i += MOE_NR)
        moe_router_xt_tile_(g->kernels, x + i / MOE_NR * a_floats, dz, n,
                            c + (i / MOE_NR * MOE_XT_COLUMNS_ + j / MOE_NR) * square);
    }
  }
  moe_router_xt_store_(g, h, rows, e, columns, c);
}

#endif
