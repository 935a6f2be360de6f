/* A call's blocking where its context has a table (api/tune.h). */
#ifndef MOE_LAYER_TUNED_H
#define MOE_LAYER_TUNED_H

MOE_FN int moe_tune_same_(const moe_tune_entry *a, const moe_tune_entry *b) {
  return a->isa == b->isa && a->op == b->op && a->dtype == b->dtype && a->flags == b->flags && a->E == b->E &&
         a->N == b->N && a->K == b->K;
}

/* What the kernels can do of a tuned blocking, for products with panels of this kind. */
MOE_FN void moe_blocking_tune_(moe_blocking_ *b, moe_panel_kind_ kind, const moe_tune_blocking *tuned) {
  const int64_t few = moe_min_(MOE_SMALL_M_MAX, moe_max_(0, tuned->small_m));
  if (tuned->kc > 0) b->kc[kind] = moe_max_(1, moe_min_(b->kc[kind], tuned->kc) / MOE_KC_MULTIPLE) * MOE_KC_MULTIPLE;
  if (tuned->mc > 0) b->mc = moe_min_(b->mc, tuned->mc);
  if (tuned->nc > 0) b->nc_panels = moe_min_(b->nc_panels, tuned->nc);
  if (tuned->items > 0) b->items_per_worker = moe_min_(tuned->items, MOE_MAX_WORKERS_);
  if (tuned->prefetch > 0) b->prefetch_bytes = tuned->prefetch;
  if (tuned->small_m == 0) return;
  for (int dtype = 0; dtype < MOE_DTYPE_COUNT_; dtype++)
    b->small_m_plain_rows[dtype] = b->small_m_columns_rows[dtype] = few;
  b->small_m_bf16_rows = moe_min_(MOE_SMALL_M_BF16, few);
  b->small_m_codes_rows = few;
}

/* Lets the group's products be divided as the context's table says of a call with this key, of which here and isa are
   not looked at. Workspaces are laid out before: they do not depend on it. */
MOE_FN void moe_group_tune_(moe_group_ *group, const moe_context *ctx, moe_tune_entry *key) {
  key->isa = group->kernels->isa;
  for (int64_t i = 0; ctx && ctx->tune && i < ctx->tune->count; i++) {
    const moe_tune_entry *entry = &ctx->tune->entries[i];
    if (!entry->here || !moe_tune_same_(entry, key)) continue;
    group->tuned = *group->kernels;
    group->tuned_blocking = *group->kernels->blocking;
    moe_blocking_tune_(&group->tuned_blocking, group->panel, &entry->blocking);
    group->tuned.blocking = &group->tuned_blocking;
    group->kernels = &group->tuned;
    return;
  }
}

#endif
