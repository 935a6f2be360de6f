/* A product's operands, and a piece of their k on its way: which tile multiplies what, and what it does beside. A
   piece's packed panel stays in cache. Beside the first panel the rows are gathered side by side, in the panel's type,
   a tile's at a time and where it can be within the tile before. Every panel is packed, where it can be within its
   first tile or, if its columns are to turn, within the last ones of the panel before. The next piece's memory is
   fetched meanwhile. */
#ifndef MOE_KERNEL_PIECE_H
#define MOE_KERNEL_PIECE_H

enum { MOE_TURN_AFTER_ = 5 }; /* tiles beside which a panel is fetched before it turns */

/* Floats of one panel's products; and of all, at most. */
#define MOE_PRODUCTS_FLOATS_(rows) (((rows) + 16) * MOE_PANEL) /* room for whole vectors of rows */
#define MOE_PRODUCTS_MOST_         (MOE_PANELS_WIDE * MOE_PRODUCTS_FLOATS_((int64_t)MOE_ROWS_MAX))

/* Where products go. */
typedef struct moe_results_ {
  const moe_ahead_ *into; /* fetched meanwhile, or NULL */
  /* Takes panel p's products c, which it may change, as soon as they are whole; rounding is as everywhere. NULL: they
     stay. */
  void (*leave)(void *arg, int64_t p, float *c);
  /* Instead of `into`, or NULL: what that reads, which is fetched beside the panel's tiles of the last piece. */
  moe_ahead_ (*reads)(void *arg, int64_t p);
  void *arg;
  /* Instead of `leave`, where the first panel's columns leave for and those of the others beside them, if they are
     whole and k > 0: as soon as a tile's rows are. */
  moe_place_ to;
} moe_results_;

MOE_FN moe_results_ moe_results_leave_(void (*leave)(void *arg, int64_t p, float *c), void *arg) {
  moe_results_ results = {0};
  results.leave = leave;
  results.arg = arg;
  return results;
}

typedef struct moe_operands_ {
  const moe_kernels *kernels;
  moe_product_ product;
  const moe_left_ *left;
  const moe_right_ *right;     /* at most moe_panels_at_once_ */
  float *c;                    /* panel p's products [left.rows][64] at p * MOE_PRODUCTS_FLOATS_(left.rows), if they
                                  stay */
  char *piece;                 /* moe_packing_bytes_, unless both operands are as the tile takes them */
  const moe_ahead_ *next;      /* what will be read after this product, or NULL */
  const moe_results_ *results; /* or NULL: the products stay in c */
} moe_operands_;

/* Elements [from, from+n) of rows [first, first+rows), side by side, in the panel's type; an odd n rounded up. */
MOE_FN void moe_gather_(const moe_operands_ *m, moe_panel_kind_ kind, int64_t from, int64_t n, int64_t first,
                        int64_t rows, char *to) {
  moe_rows_ part = moe_rows_from_(&m->left->place, first);
  const int64_t pitch = m->kernels->piece_bytes[kind], size = kind == MOE_PANEL_F32 ? 4 : 2;
  part.base += from * moe_dtype_bytes_(m->left->dtype);
  if (kind == MOE_PANEL_F32)
    m->kernels->load_rows[m->left->dtype]((float *)(void *)to, pitch / size, &part, rows, n);
  for (int64_t i = 0; i < rows && kind == MOE_PANEL_PAIRS; i++)
    memcpy(to + i * pitch, moe_row_(&part, i), (size_t)(n * size));
  for (int64_t i = 0; i < rows && n % 2; i++) memset(to + i * pitch + n * size, 0, (size_t)size);
}

/* Where panels are packed: one after the other in the same place or, where the tiles of one turn the next, by turns. */
typedef struct moe_packing_ {
  char *here, *next; /* next: or NULL */
  int64_t turned;    /* k of the panel here that the tiles before have turned, if need be still to be converted */
} moe_packing_;

MOE_FN int64_t moe_packing_bytes_(const moe_kernels *kernels, moe_panel_kind_ kind) {
  return kernels->piece_bytes[kind] * MOE_PANEL * (kernels->turn_tile[kind] ? 2 : 1);
}

/* What turns into upper halves finds the lower ones zero, and only such floats are packed beside it. */
MOE_FN moe_packing_ moe_packing_begin_(const moe_operands_ *m, moe_panel_kind_ kind) {
  moe_packing_ packing = {m->piece, NULL, 0};
  if (!moe_right_turns_(m->right) || m->left->across || !m->kernels->turn_tile[kind]) return packing;
  if (m->left->rows < (MOE_TURN_AFTER_ + MOE_TURN_PARTS_) * MOE_TILE_ROWS) return packing;
  packing.next = m->piece + m->kernels->piece_bytes[kind] * MOE_PANEL;
  if (moe_is_upper_(m->right->dtype)) memset(m->piece, 0, (size_t)moe_packing_bytes_(m->kernels, kind));
  return packing;
}

/* On to the next panel, so many of whose k have turned. */
MOE_FN void moe_packing_move_(moe_packing_ *packing, int64_t turned) {
  char *here = packing->here;
  packing->turned = turned;
  if (turned == 0) return;
  packing->here = packing->next;
  packing->next = here;
}

/* A piece of k on its way: elements [from, from+n), then `more`. */
typedef struct moe_piece_at_ {
  int64_t from, n, more;
  char *gathered; /* the rows, `pitch` bytes apart (of a panel, its columns) */
  int64_t pitch;
  moe_beside_ *beside;
  moe_packing_ *packing;
  int64_t turns;     /* tiles of the panel at hand that turn the next one */
  int64_t runs, run; /* see moe_runs_ahead_; run: the next */
  int64_t ready;     /* rows that are gathered */
} moe_piece_at_;

/* Elements of a piece. Rows that gather themselves meet panels that are packed: nothing asks for short ones. */
MOE_FN int64_t moe_piece_size_(const moe_operands_ *m, moe_panel_kind_ kind) {
  return moe_piece_(m->kernels, kind, m->left->gather ? MOE_ROWS_MAX : m->left->rows, m->right->k);
}

/* The piece from `from` on, and where its rows lie gathered. */
MOE_FN moe_piece_at_ moe_piece_begin_(const moe_operands_ *m, moe_panel_kind_ kind, int64_t from) {
  const moe_left_ *left = m->left;
  const int64_t size = moe_piece_size_(m, kind), rest = m->right->k - from;
  moe_piece_at_ piece = {0};
  piece.from = from;
  piece.n = moe_min_(size, rest);
  piece.more = moe_min_(size, rest - piece.n);
  piece.pitch = left->across ? 4 : m->kernels->piece_bytes[kind];
  piece.gathered = left->gathered + (left->keep ? from / size * left->rows * piece.pitch : 0);
  return piece;
}

/* A panel's elements [from, from+k); k 0: there is none. */
typedef struct moe_panel_at_ {
  int64_t p, from, k;
} moe_panel_at_;

/* What is multiplied `count` panels after p: if there are no more, the next piece's first. */
MOE_FN moe_panel_at_ moe_panel_after_(const moe_operands_ *m, const moe_piece_at_ *piece, int64_t p, int64_t count) {
  const moe_panel_at_ here = {p + count, piece->from, piece->n}, then = {0, piece->from + piece->n, piece->more};
  return p + count < moe_right_panels_(m->right) ? here : then;
}

/* Whether the rows are gathered beside the first panel. */
MOE_FN int moe_gathers_(const moe_left_ *left) { return !left->held && !left->gather; }

/* Spreads memory ahead over tiles of k elements, each of which has room for a fetch for every pair of them. */
MOE_FN void moe_piece_pace_(const moe_operands_ *m, moe_ahead_ *ahead, int64_t tiles, int64_t k) {
  moe_ahead_pace_(ahead, tiles, moe_max_(1, k / 2), m->kernels->tile_parts == 1);
}

/* The tile that gathers k elements of the next rows, or NULL. */
MOE_FN moe_tile_fn_ moe_gathers_in_tile_(const moe_operands_ *m, int64_t k) {
  return k % MOE_PREPARE_K_ == 0 ? m->kernels->gather_tile[m->kernels->panel[m->product]] : NULL;
}

/* Gathers the first rows of the tile at hand, from i on, unless it has been done, and lets the ordinary tile gather
   those that follow while there are whole ones; otherwise it is to take no more. Returns what multiplies. */
MOE_FN moe_tile_fn_ moe_gather_tile_(const moe_operands_ *m, moe_piece_at_ *piece, int64_t i, moe_tile_ *tile,
                                     moe_tile_fn_ multiply) {
  const moe_panel_kind_ kind = m->kernels->panel[m->product];
  const int usual = multiply == m->kernels->tile[m->product];
  const int64_t rest = m->left->rows - i,
                first = usual && rest <= MOE_TILE_LAST_ ? rest : moe_min_(MOE_TILE_ROWS, rest);
  const int64_t ready = moe_max_(i, piece->ready), others = rest / MOE_TILE_ROWS - 1;
  const moe_tile_fn_ gathers = moe_gathers_in_tile_(m, piece->n);
  if (i + first > ready)
    moe_gather_(m, kind, piece->from, piece->n, ready, i + first - ready, piece->gathered + ready * piece->pitch);
  tile->rows = first;
  if (!usual || others < 1 || !gathers) return multiply;
  tile->rows = others * MOE_TILE_ROWS;
  tile->later = moe_rows_from_(&m->left->place, i + MOE_TILE_ROWS);
  tile->later.base += piece->from * moe_dtype_bytes_(m->left->dtype);
  tile->later_rows = rest - MOE_TILE_ROWS;
  tile->dtype = m->left->dtype;
  tile->gathered = piece->gathered + (i + MOE_TILE_ROWS) * piece->pitch;
  piece->ready = i + tile->rows + MOE_TILE_ROWS;
  return gathers;
}

/* How many of panel p's tiles turn the next panel: of its k, which must be as many as those at hand, as many parts as
   there are whole tiles left for. */
MOE_FN int64_t moe_turns_(const moe_operands_ *m, const moe_piece_at_ *piece, int64_t p) {
  if (!piece->packing->next) return 0;
  const moe_panel_at_ next = moe_panel_after_(m, piece, p, 1);
  const int gathers = p == 0 && moe_gathers_(m->left), whole = (next.p + 1) * MOE_PANEL <= m->right->n;
  const int64_t tiles = m->left->rows / MOE_TILE_ROWS - MOE_TURN_AFTER_;
  const int64_t parts = moe_min_(MOE_TURN_PARTS_, tiles / MOE_TURN_PARTS_);
  if (gathers || !whole || next.k != piece->n || next.k % MOE_PREPARE_K_ != 0) return 0;
  if (!moe_turns_to_float_(m->right->dtype) && parts < MOE_TURN_PARTS_) return 0;
  return parts * MOE_TURN_PARTS_;
}

/* Lets the last whole tiles turn the next panel, and the ordinary one multiply the rows before and the last few.
   Returns what multiplies those from i on. */
MOE_FN moe_tile_fn_ moe_turn_tile_(const moe_operands_ *m, const moe_piece_at_ *piece, int64_t p, int64_t i,
                                   moe_tile_ *tile, moe_tile_fn_ multiply) {
  if (piece->turns == 0) return multiply;
  const int64_t rest = m->left->rows - i, before = moe_tiles_before_last_(rest) - piece->turns;
  const moe_panel_at_ then = moe_panel_after_(m, piece, p, 1);
  if (before < 0 || multiply != m->kernels->tile[m->product]) return multiply;
  tile->rows = (before > 0 ? before : piece->turns) * MOE_TILE_ROWS;
  if (before > 0) return multiply;
  const moe_right_ next = moe_right_part_(m->right, then.p, 1);
  tile->base[0] = next.base[0] + then.from * moe_dtype_bytes_(next.dtype);
  tile->stride = next.stride;
  tile->dtype = next.dtype;
  tile->packed = piece->packing->next;
  return m->kernels->turn_tile[m->kernels->panel[m->product]];
}

/* The rows whose next elements are fetched beside this piece's tiles: all, or those of the first three tiles, which no
   tile fetches. */
MOE_FN void moe_rows_ahead_(const moe_operands_ *m, const moe_piece_at_ *piece) {
  const moe_left_ *left = m->left;
  const int64_t size = moe_dtype_bytes_(left->dtype);
  piece->beside->row = piece->beside->count = piece->beside->due = 0;
  if (!moe_gathers_(left) || piece->more == 0) return;
  piece->beside->rows = left->place;
  piece->beside->rows.base += (piece->from + piece->n) * size;
  piece->beside->bytes = piece->more * size;
  piece->beside->count = moe_gathers_in_tile_(m, piece->more) ? moe_min_(left->rows, 3 * MOE_TILE_ROWS) : left->rows;
}

/* Whether the first tile can pack one panel's piece while it multiplies: whole columns that lie as they are read. */
MOE_FN int moe_packs_in_tile_(const moe_operands_ *m, const moe_right_ *one, const moe_piece_at_ *piece) {
  if (!m->kernels->pack_tile[m->kernels->panel[m->product]]) return 0;
  return !one->unpack && !one->transposed && one->n == moe_right_width_(one) && piece->n % 2 == 0 &&
         m->left->rows >= MOE_TILE_ROWS;
}

/* Lets the tile pack one panel's elements from `from` on. */
MOE_FN void moe_tile_source_(const moe_right_ *one, int64_t from, char *packed, moe_tile_ *tile) {
  const int64_t at = from * one->stride, width = moe_right_width_(one) * moe_dtype_bytes_(one->dtype);
  tile->base[0] = one->base[0] + at;
  tile->base[1] = one->parts == 2 ? one->base[1] + at : tile->base[0] + width / 2;
  tile->dtype = one->dtype;
  tile->stride = one->stride;
  tile->packed = packed;
}

/* How far from panel p the next one lies that a tile packs, or 0. What was fetched a piece ago may have left the
   second-level cache since. */
MOE_FN int64_t moe_source_ahead_(const moe_operands_ *m, const moe_piece_at_ *piece, int64_t p) {
  const moe_right_ *right = m->right;
  const int64_t width = moe_right_width_(right) * moe_dtype_bytes_(right->dtype), last = moe_right_panels_(right) - 1;
  if (p < last) return width;
  return piece->more > 0 ? piece->n * right->stride - last * width : 0;
}

/* A panel that has been turned as the right operand that it still is, to be converted where it is. */
MOE_FN moe_right_ moe_right_turned_(const moe_right_ *right, char *panel) {
  moe_right_ turned = {0};
  turned.base[0] = panel;
  turned.parts = 1;
  turned.stride = MOE_SQUARE_;
  turned.dtype = right->dtype;
  return turned;
}

/* Whether what the panels' products meet as they leave is fetched beside this piece's tiles. It and what comes next
   then get half of the tiles each. */
MOE_FN int moe_leave_ahead_(const moe_operands_ *m, const moe_piece_at_ *piece) {
  return piece->more == 0 && m->results && m->results->reads;
}

/* What is fetched beside the next run of panels, from p on: the following one or, after the last, the next piece's
   first, or what is read after this product. With panels that are in cache it is the left operand's next piece. Returns
   the run's end. */
MOE_FN int64_t moe_piece_ahead_(const moe_operands_ *m, moe_piece_at_ *piece, int64_t p) {
  const moe_panel_kind_ kind = m->kernels->panel[m->product];
  const int64_t panels = moe_right_panels_(m->right), run = ++piece->run % piece->runs;
  const int64_t end = moe_run_first_(m->right, piece->runs, piece->run),
                first = moe_run_first_(m->right, piece->runs, run);
  const moe_panel_at_ then = moe_panel_after_(m, piece, p, end - p);
  const moe_right_ right =
      moe_right_part_(m->right, then.p, moe_run_first_(m->right, piece->runs, run + 1) - first);
  const moe_ahead_ none = {0};
  moe_ahead_ *ahead = &piece->beside->ahead;
  if (then.k > 0)
    *ahead = m->left->reads ? m->left->reads(m->left, then.from, then.k)
                            : moe_right_ahead_(kind, &right, then.from, then.k);
  else
    *ahead = m->next ? *m->next : none;
  const int64_t tiles = (end - p) * (piece->beside->tiles / panels);
  const int64_t before = tiles - piece->turns;
  const int64_t half = moe_ceil_div_(tiles, 2);
  moe_piece_pace_(m, ahead, moe_leave_ahead_(m, piece) ? moe_min_(before, half) : before, piece->n);
  return end;
}

/* Where the sums of panel p leave for after this piece. */
MOE_FN moe_place_ moe_panel_to_(const moe_operands_ *m, const moe_piece_at_ *piece, int64_t p) {
  const moe_place_ nowhere = {0};
  const int whole = (p + 1) * moe_right_width_(m->right) <= m->right->n;
  if (piece->more > 0 || !m->results || !whole) return nowhere;
  moe_place_ to = moe_place_at_(&m->results->to, 0, p * MOE_PANEL);
  to.begins = p == 0;
  to.ends = (p + 2) * moe_right_width_(m->right) > m->right->n;
  return to;
}

/* Lets the tile find the piece of panel p, if need be packed. Returns what multiplies first: it may be what packs. */
MOE_FN moe_tile_fn_ moe_tile_panel_(const moe_operands_ *m, const moe_piece_at_ *piece, int64_t p, moe_tile_fn_ usual,
                                    moe_tile_ *tile) {
  const moe_panel_kind_ kind = m->kernels->panel[m->product];
  if (m->right->panel) {
    tile->panel = m->right->panel + p * m->right->panel_bytes + moe_panel_bytes_(kind, piece->from);
    return usual;
  }
  const moe_right_ one = moe_right_part_(m->right, p, 1);
  const moe_packing_ *packing = piece->packing;
  const int64_t turned = packing->turned;
  tile->panel = packing->here;
  if (turned > 0 && !moe_turns_to_float_(one.dtype)) {
    const moe_right_ halves = moe_right_turned_(&one, packing->here);
    moe_tile_source_(&halves, 0, packing->here, tile);
    tile->ahead = 0;
    return m->kernels->pack_tile[kind];
  }
  if (moe_packs_in_tile_(m, &one, piece)) {
    moe_tile_source_(&one, piece->from, packing->here, tile);
    tile->ahead = moe_source_ahead_(m, piece, p);
    return m->kernels->pack_tile[kind];
  }
  if (turned < piece->n)
    moe_pack_right_(m->kernels, kind, &one, piece->from + turned, piece->n - turned,
                    packing->here + moe_panel_bytes_(kind, turned));
  return usual;
}

#endif
