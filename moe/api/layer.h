/* What forward and backward of a layer share, whichever interface they are called by. */
#ifndef MOE_API_LAYER_H
#define MOE_API_LAYER_H

#include "context.h"
#include "layouts.h"
#include "quantize.h"

#include "begin.h"

/* ------------------------------------------------------------------------------------------------- blockwise layer */

/* X(name, ENUMERATOR) f(x); z = alpha*x, s = 1/(1+exp(-z)). */
#define MOE_ACTIVATION_LIST(X)                                                     \
  X(silu, SILU)                 /* x*s, alpha defaults to 1 */                     \
  X(gelu, GELU)                 /* x/2*(1+erf(x/sqrt 2)) */                        \
  X(gelu_tanh, GELU_TANH)       /* x/2*(1+tanh(sqrt(2/pi)*(x+0.044715*x^3))) */    \
  X(swish, SWISH)               /* x*s, alpha defaults to 1.702 */                 \
  X(relu, RELU)                 /* max(x,0); derivative 0 at 0 */                  \
  X(squared_relu, SQUARED_RELU) /* max(x,0)^2 */                                   \
  X(identity, IDENTITY)

typedef enum moe_activation {
#define MOE_ACTIVATION_ENUM_(name, NAME) MOE_ACT_##NAME,
  MOE_ACTIVATION_LIST(MOE_ACTIVATION_ENUM_)
#undef MOE_ACTIVATION_ENUM_
  MOE_ACT_COUNT_ /* not an activation */
} moe_activation;

#define MOE_ACT_ERROR 8      /* contract 6 */
#define MOE_ACT_GRAD_ERROR 8 /* contract 6 */

/* a = the affinity of (token, expert), d = m*Wd + b_d. */
typedef enum moe_affinity_mode {
  MOE_AFFINITY_POST_SCALE = 0,        /* y += a*d */
  MOE_AFFINITY_NO_SCALE = 1,          /* y += d */
  MOE_AFFINITY_PRE_SCALE = 2,         /* expert input a*x: g,u = a*(x*W) + bias */
  MOE_AFFINITY_ON_I = 3,              /* y += (a*m)*Wd + a*b_d (nkilib expert_affinity_multiply_on_I) */
  MOE_AFFINITY_COUNT_
} moe_affinity_mode;

enum { MOE_CLAMP_GATE_UPPER = 1, MOE_CLAMP_GATE_LOWER = 2, MOE_CLAMP_UP_UPPER = 4, MOE_CLAMP_UP_LOWER = 8 };

typedef struct moe_layer_config {
  moe_activation activation;
  float alpha;     /* 0 = the activation's default; SiLU and Swish only */
  float up_offset; /* m = act(g)*(u+up_offset); gpt-oss uses 1 */
  int skip_gate;   /* m = act(u): gate weights, biases and limits are never read */
  uint32_t clamp;  /* MOE_CLAMP_* bits: which limits are on. Upper first, then lower */
  float gate_clamp_upper_limit, gate_clamp_lower_limit, up_clamp_upper_limit, up_clamp_lower_limit;
  moe_affinity_mode affinity_mode;
} moe_layer_config;

/* Rounding to MX: v becomes what moe_dequantize_mx makes, in v's own type, of what moe_quantize_mx makes of it. */
typedef struct moe_mx_rounding {
  int enabled;               /* 0: not, and nothing else is looked at */
  moe_element element;
  moe_scale_rule scale_rule;
  uint32_t cast;             /* MOE_CAST_* bits */
} moe_mx_rounding;

/* Which operands of products are rounded to MX, each in groups of 32 along its own contraction axis: MXFP8 training,
   and the activations of Trainium's MX kernels. What is rounded is the operand as contract 3 has it; the gradient
   passes through.
                  activations               weights                           gradients
     forward      x along H, m along I      Wgu along H, Wd along I
     backward                               Wd along H, [Wg|Wu] along I       dY along H, dg and du along I
     weight grads x, a*m along rows                                           dY, dg, du along rows
   Groups along I start anew at up; along rows they count an expert's rows in block order. A quantised weight is rounded
   in the backward only, where its groups run the other way; plain weights that are packed cannot be (INVALID_OPTION).
   Sources: seed mlp_bwd_mxfp8, microxcaling's linear; semantics of moe_cte's MX kernels. */
typedef struct moe_mx_operands {
  moe_mx_rounding activations, weights, gradients;
  int weight_grads;              /* 1: the last line, too */
  moe_mx_layout activation_layout; /* forward: a group holds the elements that one of a weight in this layout does */
} moe_mx_operands;

/* Activation and derivative over an array, as the layer computes them: y[i] = act(x[i]), dy[i] = act'(x[i]) (either may
   be NULL). alpha 0 = the activation's default. */
MOE_API moe_status moe_activation_f32(moe_context *ctx, moe_activation activation, float alpha, const float *x,
                                      float *y, float *dy, int64_t n);

#include "end.h"

#endif
