/* extras.h: what a layer of a struct problem can be told beyond its options: nki-library's newer arguments, chosen by a
   seed. */
#ifndef MOE_TEST_EXTRAS_H
#define MOE_TEST_EXTRAS_H

#include <stdlib.h>
#include <string.h>

#include "problem.h"
#include "random.h"

enum { EXTRAS_EXPERTS = 3000 };

struct extras {
  moe_dtype accumulation_dtype;
  int limited, in_scales; /* bits of in_scales: of x, of m */
  int32_t valid;          /* with limited */
  float scale[2][EXTRAS_EXPERTS];
  moe_nkilib_hints hints;
  unsigned char *scaled; /* [N,I,B], or NULL */
  int64_t count;
  int element;
};

static inline int64_t extras_rows(const struct problem *p) { return p->N * p->o.B; }

/* As much as the options allow. in_scales round x and m, whatever else is rounded. */
static inline struct extras extras_random(struct problem *p, uint64_t *s) {
  struct extras x = {0};
  const moe_dtype saved = p->o.checkpoint_dtype ? p->o.checkpoint_dtype : p->o.dtype;
  if (test_random_chance(s, 2)) x.accumulation_dtype = p->o.dtype;
  x.limited = test_random_chance(s, 2);
  x.valid = (int32_t)test_random_range(s, 0, p->o.T);
  const int can = p->o.E <= EXTRAS_EXPERTS && p->o.mx.activation_layout == MOE_MX_LAYOUT_PLAIN;
  x.in_scales = can && test_random_chance(s, 3) ? (int)test_random_range(s, 1, 3) : 0;
  for (int i = 0; i < 2 * EXTRAS_EXPERTS; i++)
    x.scale[i / EXTRAS_EXPERTS][i % EXTRAS_EXPERTS] = (float)test_random_range(s, 1, 99) * 0x1p-10f;
  x.hints = p->o.hints;
  x.hints.use_packed_scales = test_random_chance(s, 2), x.hints.non_overlapping_shards = test_random_chance(s, 2);
  x.hints.weight_dtype = test_random_chance(s, 2) ? p->o.dtype : MOE_DTYPE_DEFAULT;
  x.hints.top_k = test_random_range(s, 0, p->o.E), x.hints.ep_degree = test_random_range(s, 0, 64);
  for (int i = 0; i < 4; i++)
    x.hints.phase[i] = (moe_nkilib_phase){test_random_range(s, 0, 8), test_random_range(s, 0, 8),
                                          test_random_range(s, 0, 8), i & 1, test_random_chance(s, 2)};
  x.element = (int)moe_dtype_size(saved);
  x.count = extras_rows(p) * p->o.I;
  if (test_random_chance(s, 2)) x.scaled = (unsigned char *)calloc((size_t)x.count, (size_t)x.element);
  if (x.in_scales)
    p->o.mx.activations = (moe_mx_rounding){.enabled = 1, .element = MOE_ELEMENT_E4M3FN, .cast = MOE_CAST_SATURATE};
  return x;
}

static inline void extras_give_layer(const struct extras *x, moe_blockwise_layer *l) {
  l->accumulation_dtype = x->accumulation_dtype;
  if (x->limited) l->num_valid_tokens = &x->valid;
  if (x->in_scales & 1) l->mx.gate_up_in_scale = x->scale[0];
  if (x->in_scales & 2) l->mx.down_in_scale = x->scale[1];
}

static inline void extras_give(const struct extras *x, struct problem_args *args) {
  extras_give_layer(x, &args->forward.layer), extras_give_layer(x, &args->backward.layer);
  args->forward.hints = args->backward.hints = x->hints;
  args->forward.scaled_intermediate_checkpoint_T = x->scaled;
  args->backward.scaled_intermediate_checkpoint_T = x->scaled;
}

#endif /* MOE_TEST_EXTRAS_H */
