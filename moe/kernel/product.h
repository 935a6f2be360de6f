/* Rows times a group of panels, each 64 columns of a right operand: the loop around the tile. It walks k in pieces
   (piece.h) and multiplies every panel's with all rows, so that weights are read once, for one row or hundreds. A few
   rows are multiplied with the weights as they stream past, unpacked. */
#ifndef MOE_KERNEL_PRODUCT_H
#define MOE_KERNEL_PRODUCT_H

enum {
  MOE_PANELS_MOST = 128, /* panels at a time, of however few rows */
  /* Products that are added to as weights stream past: fewer would fit a first-level cache, but end memory's runs
     sooner, which costs more (measured). */
  MOE_STREAM_FLOATS_ = 16384,
  MOE_STREAM_AHEAD_ = 16384 /* bytes that are under way from memory meanwhile */
};

/* Whether plain weights stream by dot products. */
MOE_FN int moe_streams_pairs_(const moe_kernels *kernels, moe_product_ product, moe_dtype dtype) {
  return kernels->stream_pairs && product == MOE_PRODUCT_BF16 && dtype == MOE_DTYPE_BF16;
}

/* How a product is formed: panel by panel or, of so few rows that reading the right operand is most of the work, as it
   streams past. */
typedef enum moe_way_ {
  MOE_WAY_PANELS_,
  MOE_WAY_ROWS_,    /* its rows stream, and fetch for themselves what comes next, in another product as well */
  MOE_WAY_COLUMNS_, /* its columns do, and turn */
  MOE_WAY_UNPACK_   /* it streams itself while it unpacks */
} moe_way_;

/* The last two want rows whole: kept. */
MOE_FN moe_way_ moe_way_of_(const moe_kernels *kernels, moe_product_ product, const moe_left_ *left,
                            const moe_right_ *right) {
  const int few_of_codes = left->rows <= kernels->codes_rows;
  if (!kernels->stream) return MOE_WAY_PANELS_;
  if (right->format) return few_of_codes ? MOE_WAY_ROWS_ : MOE_WAY_PANELS_;
  if (right->unpack) return few_of_codes && right->stream && left->keep ? MOE_WAY_UNPACK_ : MOE_WAY_PANELS_;
  if (left->keep && moe_streams_columns_(kernels, product, right, left->rows)) return MOE_WAY_COLUMNS_;
  if (right->panel || right->transposed) return MOE_WAY_PANELS_;
  const int pairs = moe_streams_pairs_(kernels, product, right->dtype);
  const int64_t few = pairs ? MOE_ROWS_FEW_PAIRS : kernels->plain_rows[right->dtype];
  return left->rows <= few ? MOE_WAY_ROWS_ : MOE_WAY_PANELS_;
}

/* How many panels to multiply with so many rows at a time: as many as `floats` hold the products of. Memory is then
   read in longer runs, and rows are gathered less often. */
MOE_FN int64_t moe_panels_at_once_(int64_t floats, int64_t rows) {
  return moe_min_(MOE_PANELS_MOST, floats / MOE_PRODUCTS_FLOATS_(rows));
}

MOE_FN int moe_leaves_(const moe_operands_ *m) { return m->results && m->results->leave; }

/* Panel p's products. */
MOE_FN float *moe_products_at_(const moe_operands_ *m, int64_t p) {
  return m->c + p * MOE_PRODUCTS_FLOATS_(m->left->rows);
}

/* Where they are formed: of whole k, where each panel's leave before the next, in one place, which stays in cache. */
MOE_FN float *moe_piece_products_(const moe_operands_ *m, const moe_piece_at_ *piece, int64_t p) {
  return moe_products_at_(m, moe_leaves_(m) && piece->n == m->right->k ? 0 : p);
}

/* Panel p's products c leave, if they do: from the cache they are still in. */
MOE_FN void moe_leave_panel_(const moe_operands_ *m, int64_t p, float *c) {
  if (!moe_leaves_(m)) return;
  const moe_fpenv_ saved = moe_fpenv_enter_();
  m->results->leave(m->results->arg, p, c);
  moe_fpenv_leave_(saved);
}

/* All rows times panel p: at once, but for tiles that pack, gather or turn. After the last piece the products leave. */
MOE_FN void moe_multiply_panel_(const moe_operands_ *m, moe_piece_at_ *piece, int64_t p) {
  const moe_left_ *left = m->left;
  const moe_panel_kind_ kind = m->kernels->panel[m->product];
  const moe_tile_fn_ usual = left->across ? m->kernels->across_tile[kind] : m->kernels->tile[m->product];
  float *c = moe_piece_products_(m, piece, p);
  moe_tile_ tile;
  tile.k = piece->n;
  tile.add = piece->from > 0;
  tile.beside = piece->beside;
  const moe_place_ to = moe_panel_to_(m, piece, p);
  tile.store = m->kernels->store_rows[to.dtype];
  moe_tile_fn_ multiply = moe_tile_panel_(m, piece, p, usual, &tile);
  for (int64_t i = 0; i < left->rows; i += tile.rows, multiply = usual) {
    const int64_t rest = left->rows - i;
    tile.rows = multiply == usual ? rest : MOE_TILE_ROWS;
    tile.c = c + i * MOE_PANEL;
    tile.row = piece->gathered + i * piece->pitch;
    tile.to = moe_place_at_(&to, i, 0);
    if (p == 0 && moe_gathers_(left)) multiply = moe_gather_tile_(m, piece, i, &tile, multiply);
    else multiply = moe_turn_tile_(m, piece, p, i, &tile, multiply);
    const int last = tile.rows >= rest;
    tile.soon = last ? piece->gathered : tile.row + tile.rows * piece->pitch;
    tile.soon_c = last ? moe_piece_products_(m, piece, moe_panel_after_(m, piece, p, 1).p)
                       : tile.c + tile.rows * MOE_PANEL;
    multiply(&tile);
  }
  if (piece->more == 0 && !to.base) moe_leave_panel_(m, p, c);
  moe_packing_move_(piece->packing, piece->turns * piece->n / MOE_TURN_TILES_);
}

/* All rows times a right operand that unpacks itself. */
MOE_FN void moe_stream_unpacking_(const moe_operands_ *m) {
  const moe_left_ *left = m->left;
  const int64_t size = moe_piece_size_(m, MOE_PANEL_F32);
  const int64_t row = moe_ceil_div_(m->right->k, size) * size;
  float *x = (float *)(void *)left->gathered;
  if (!left->held) m->kernels->load_rows[left->dtype](x, row, &left->place, left->rows, m->right->k);
  for (int64_t p = 0; p < moe_right_panels_(m->right); p++) {
    const moe_right_ one = moe_right_part_(m->right, p, 1);
    moe_stream_ s = {0};
    s.x = x;
    s.x_stride = row;
    s.rows = left->rows;
    s.k = m->right->k;
    s.c = moe_products_at_(m, p);
    one.stream(&one, m->kernels, &s);
  }
}

/* By the kernel for what the columns are. */
MOE_FN void moe_stream_with_(const moe_operands_ *m, const moe_stream_ *s) {
  const moe_kernels *kernels = m->kernels;
  if (s->format) kernels->stream_fp8(s);
  else if (moe_streams_pairs_(kernels, m->product, s->dtype)) kernels->stream_pairs(s);
  else kernels->stream(s);
}

/* All rows times a piece of the right operand, as many columns at a time as keep their products in cache. */
MOE_FN void moe_stream_piece_(const moe_operands_ *m, const moe_piece_at_ *piece) {
  const moe_left_ *left = m->left;
  const int64_t panels = moe_right_panels_(m->right), most = moe_max_(1, MOE_STREAM_FLOATS_ / (left->rows * MOE_PANEL));
  for (int64_t p = 0; p < panels; p += most) {
    const moe_right_ right = moe_right_part_(m->right, p, most);
    const int64_t run = right.parts * right.n * right.group / 32;
    moe_stream_ s = {0};
    s.format = right.format;
    s.dtype = right.dtype;
    s.load = m->kernels->load_rows[right.dtype];
    s.size = right.group / 32;
    s.beside = right.stride == run && (right.parts == 1 || right.base[1] - right.base[0] == run / 2);
    s.drops = m->kernels->drops_fetches;
    s.pair_rows = m->kernels->stores_halves && s.size < 4 ? 2 : MOE_STREAM_ROWS; /* sums that leave would cost most */
    s.x = (const float *)(const void *)piece->gathered;
    s.x_stride = piece->pitch / 4;
    s.rows = left->rows;
    s.k = piece->n;
    for (int64_t part = 0; part < right.parts; part++) s.base[part] = right.base[part] + piece->from * right.stride;
    s.parts = right.parts;
    s.stride = right.stride;
    s.n = right.n;
    s.ahead = moe_max_(8, MOE_STREAM_AHEAD_ / run) * right.stride;
    s.c_stride = MOE_PRODUCTS_FLOATS_(left->rows);
    s.c = moe_products_at_(m, p);
    moe_stream_with_(m, &s);
  }
}

/* Those of a row behind an odd number of them as well: streams may take two at a time. */
MOE_FN void moe_clear_products_(const moe_operands_ *m) {
  const int64_t rows = moe_even_(m->left->rows);
  for (int64_t p = 0; p < moe_right_panels_(m->right); p++)
    memset(moe_products_at_(m, p), 0, (size_t)(rows * MOE_PANEL) * sizeof *m->c);
}

/* What is fetched while k elements from `from` on of the columns before column j stream: those of the next columns or,
   if there are none, the first ones' next elements or what is read after this product. */
MOE_FN moe_fetch_at_ moe_columns_fetch_(const moe_operands_ *m, int64_t j, int64_t from, int64_t k) {
  const moe_right_ *right = m->right;
  const int64_t size = moe_dtype_bytes_(right->dtype);
  const int last = j >= right->n, done = last && from + k >= right->k;
  const char *at = right->base[0] + (last ? (from + k) * size : j * right->stride + from * size);
  moe_fetch_ fetch = moe_fetch_rows_(at, right->stride, moe_lines_(at, right->stride, k * size));
  if (done) fetch = (moe_fetch_){(const char *)m->c, 1, 0, 0}; /* a line that is there */
  if (done && m->next && m->next->block.at) fetch = moe_fetch_rows_(m->next->block.at, m->next->stride, m->next->lines);
  return moe_fetch_begin_(&fetch);
}

/* All rows times k elements from `from` on of the columns from j on, piece by piece. */
MOE_FN void moe_stream_some_columns_(const moe_operands_ *m, int64_t j, int64_t from, int64_t k) {
  const moe_left_ *left = m->left;
  const moe_right_ *right = m->right;
  moe_fetch_at_ fetch = moe_columns_fetch_(m, j + MOE_COLUMNS, from, k);
  moe_columns_ s = {0};
  s.stride = right->stride;
  s.size = moe_dtype_bytes_(right->dtype);
  s.n = moe_min_(MOE_COLUMNS, right->n - j);
  s.dtype = right->dtype;
  s.rows = left->rows;
  s.c = moe_products_at_(m, j / MOE_PANEL) + j % MOE_PANEL;
  s.fetch = &fetch;
  for (const int64_t end = from + k; from < end; from += s.k) {
    const moe_piece_at_ piece = moe_piece_begin_(m, m->kernels->panel[m->product], from);
    s.base = right->base[0] + j * right->stride + from * s.size;
    s.k = piece.n;
    s.x = piece.gathered;
    s.x_stride = piece.pitch;
    m->kernels->stream_columns[m->product](&s);
  }
}

/* All rows times columns that turn on the way, MOE_COLUMNS at a time, which memory sends one after the other. */
MOE_FN void moe_stream_columns_(const moe_operands_ *m) {
  const moe_panel_kind_ kind = m->kernels->panel[m->product];
  const int64_t size = moe_piece_size_(m, kind), k = m->right->k, deep = moe_columns_k_(m->right, size);
  for (int64_t from = 0; from < k && !m->left->held; from += size) {
    const moe_piece_at_ piece = moe_piece_begin_(m, kind, from);
    moe_gather_(m, kind, from, piece.n, 0, m->left->rows, piece.gathered);
  }
  for (int64_t from = 0; from < k; from += deep)
    for (int64_t j = 0; j < m->right->n; j += MOE_COLUMNS)
      moe_stream_some_columns_(m, j, from, moe_min_(deep, k - from));
}

/* All rows times rows of columns. */
MOE_FN void moe_stream_rows_(const moe_operands_ *m) {
  const int64_t size = moe_piece_size_(m, MOE_PANEL_F32);
  for (int64_t from = 0; from < m->right->k; from += size) {
    const moe_piece_at_ piece = moe_piece_begin_(m, MOE_PANEL_F32, from);
    if (!m->left->held) moe_gather_(m, MOE_PANEL_F32, from, piece.n, 0, m->left->rows, piece.gathered);
    moe_stream_piece_(m, &piece);
  }
}

/* A few rows. */
MOE_FN void moe_multiply_streaming_(const moe_operands_ *m, moe_way_ way) {
  moe_clear_products_(m);
  if (way == MOE_WAY_COLUMNS_) moe_stream_columns_(m);
  else if (way == MOE_WAY_UNPACK_) moe_stream_unpacking_(m);
  else moe_stream_rows_(m);
}

MOE_FN void moe_multiply_panels_(const moe_operands_ *m) {
  const moe_left_ *left = m->left;
  const moe_right_ *right = m->right;
  const moe_panel_kind_ kind = m->kernels->panel[m->product];
  const int64_t size = moe_piece_size_(m, kind), k = right->k, panels = moe_right_panels_(right);
  const int64_t tiles = moe_ceil_div_(left->rows, MOE_TILE_ROWS);
  moe_packing_ packing = moe_packing_begin_(m, kind);
  moe_beside_ beside = {0};
  beside.tiles = panels * tiles;
  if (m->results && m->results->into) beside.into = *m->results->into;
  moe_piece_pace_(m, &beside.into, moe_ceil_div_(k, size) * panels * tiles, moe_min_(size, k));
  if (k == 0) moe_clear_products_(m);
  for (int64_t from = 0; from < k; from += size) {
    moe_piece_at_ piece = moe_piece_begin_(m, kind, from);
    piece.beside = &beside;
    piece.packing = &packing;
    piece.runs = moe_runs_ahead_(m->kernels, kind, right, piece.n, left->rows);
    moe_rows_ahead_(m, &piece);
    if (left->gather) left->gather(left, m->kernels, from, piece.n, piece.gathered, m->piece);
    for (int64_t p = 0, ahead = 0; p < panels; p++) {
      piece.turns = moe_turns_(m, &piece, p);
      if (p == ahead) ahead = moe_piece_ahead_(m, &piece, p);
      if (moe_leave_ahead_(m, &piece)) {
        beside.into = m->results->reads(m->results->arg, p);
        moe_piece_pace_(m, &beside.into, moe_ceil_div_(tiles, 2), piece.n);
      }
      moe_multiply_panel_(m, &piece, p);
    }
  }
}

/* c = left * right */
MOE_FN void moe_multiply_(const moe_operands_ *m) {
  const moe_way_ way = moe_way_of_(m->kernels, m->product, m->left, m->right);
  const int streams = way != MOE_WAY_PANELS_;
#if MOE_X86
  const int by_mode = m->product == MOE_PRODUCT_BF16 && (streams || m->kernels->bf16_by_mode);
  if (by_mode) moe_flush_on_();
#endif
  if (streams) moe_multiply_streaming_(m, way);
  else moe_multiply_panels_(m);
  for (int64_t p = 0; p < moe_right_panels_(m->right) && (streams || m->right->k == 0); p++)
    moe_leave_panel_(m, p, moe_products_at_(m, p));
#if MOE_X86
  if (by_mode) moe_flush_off_();
#endif
}

#endif
