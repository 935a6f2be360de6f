/* What an expert computes, by whichever interface it is called: activation, limits, affinities, rounded operands. */
#ifndef MOE_API_LAYER_H
#define MOE_API_LAYER_H

#include "context.h"
#include "layouts.h"
#include "quantize.h"

#include "begin.h"

/* ----------------------------------------------------------------------------------------------------- activations */

/* X(name, ENUMERATOR), with the activation of x; s = 1/(1+exp(-alpha*x)). */
#define MOE_ACTIVATION_LIST(X)                                                     \
  X(silu, SILU)                 /* x*s, alpha 1 by default */                      \
  X(gelu, GELU)                 /* x/2*(1+erf(x/sqrt 2)) */                        \
  X(gelu_tanh, GELU_TANH)       /* x/2*(1+tanh(sqrt(2/pi)*(x+0.044715*x^3))) */    \
  X(swish, SWISH)               /* x*s, alpha 1.702 by default */                  \
  X(relu, RELU)                 /* max(x,0); its derivative at 0 is 0 */           \
  X(squared_relu, SQUARED_RELU) /* max(x,0)^2 */                                   \
  X(identity, IDENTITY)         /* x */                                            \
  X(situ, SITU)                 /* alpha*tanh(x/alpha)/(1+exp(-x)), alpha 4 by default (Kimi-K3) */

typedef enum moe_activation {
#define MOE_ACTIVATION_ENUM_(name, NAME) MOE_ACT_##NAME,
  MOE_ACTIVATION_LIST(MOE_ACTIVATION_ENUM_)
#undef MOE_ACTIVATION_ENUM_
  MOE_ACT_COUNT_ /* not an activation */
} moe_activation;

/* The bounds of contract 6. */
#define MOE_ACT_ERROR 8
#define MOE_ACT_GRAD_ERROR 8

/* An activation and its derivative over an array of n floats, as the layer computes them: y[i] = act(x[i]), dy[i] =
   act'(x[i]). y, dy: outputs (optional, each). alpha, finite, is read for SiLU, Swish and SiTU; 0 = the default.
   Errors: NULL_ARGUMENT, INVALID_SHAPE (n < 0), INVALID_OPTION, OVERFLOW, MISALIGNED, OVERLAP. */
MOE_API moe_status moe_activation_f32(moe_context *ctx, moe_activation activation, float alpha, const float *x,
                                      float *y, float *dy, int64_t n);

/* ------------------------------------------------------------------------------------------------------ the expert */

/* Where the affinity a of a (token, expert) pair is multiplied. m is the product of activation and up projection, d =
   m*Wd + b_d the expert's result. */
typedef enum moe_affinity_mode {
  MOE_AFFINITY_POST_SCALE = 0, /* the result: y += a*d */
  MOE_AFFINITY_NO_SCALE = 1,   /* nowhere: y += d */
  MOE_AFFINITY_PRE_SCALE = 2,  /* the input, after its product: g = a*(x*Wg) + b_g, u = a*(x*Wu) + b_u; y += d */
  MOE_AFFINITY_ON_I = 3,       /* m: y += (a*m)*Wd + a*b_d (nkilib: expert_affinity_multiply_on_I) */
  MOE_AFFINITY_COUNT_
} moe_affinity_mode;

/* Which limits of moe_layer_config are in use: bits of `clamp`. */
enum { MOE_CLAMP_GATE_UPPER = 1, MOE_CLAMP_GATE_LOWER = 2, MOE_CLAMP_UP_UPPER = 4, MOE_CLAMP_UP_LOWER = 8,
       MOE_CLAMP_ACTIVATION_UPPER = 16 };

/* With g and u the gate and up projections, biases included: m = act(g)*(u + up_offset). SwigluStep (Step-3.5) is SiLU
   with MOE_CLAMP_ACTIVATION_UPPER and both limits of up; SiTU-GLU (Kimi-K3) is SiTU with up_softcap 25. */
typedef struct moe_layer_config {
  moe_activation activation;
  float alpha;     /* read for SiLU, Swish and SiTU; 0 = the activation's default */
  float up_offset; /* gpt-oss: 1 */
  int skip_gate;   /* 1: m = act(u); the gate's weights, biases and limits are not read */
  uint32_t clamp;  /* MOE_CLAMP_* bits: g and u are min(., upper limit), then max(., lower limit); act(.) is
                      min(act(.), activation_clamp_upper_limit), whose derivative is 0 at the limit and above */
  float gate_clamp_upper_limit, gate_clamp_lower_limit, up_clamp_upper_limit, up_clamp_lower_limit;
  moe_affinity_mode affinity_mode;
  float activation_clamp_upper_limit;
  float up_softcap; /* u, limited, acts as up_softcap*tanh(u/up_softcap); 0 = it acts as it is. Not with skip_gate */
} moe_layer_config;

/* -------------------------------------------------------------------------------------------------- weights' order */

/* The order in which a plain weight and its gradient are stored. No order changes a bit of any result. */
typedef enum moe_weight_order {
  MOE_ORDER_IN_OUT = 0,     /* gate_up [E,H,2,I], gate before up; down [E,I,H] */
  MOE_ORDER_OUT_IN = 1,     /* as PyTorch's Linear: gate_up [E,2,I,H], which is [E,2I,H], gate's rows first; down
                               [E,H,I] */
  MOE_ORDER_INTERLEAVED = 2, /* gate_up [E,I,2,H]: a row of gate, a row of up, and so on, as gpt-oss; not of down */
  MOE_ORDER_COUNT_
} moe_weight_order;

/* Zero: the weights are two tensors in the order IN_OUT. */
typedef struct moe_weight_orders {
  moe_weight_order gate_up, down;
  int up_apart;   /* 1: gate and up are tensors of their own, [E,H,I] or, OUT_IN, [E,I,H] each. With skip_gate there
                     need be no gate. Not INTERLEAVED */
  int per_expert; /* 1: instead of a tensor there is an array of E pointers (const void *const *, of gradients
                     void *const *), each to what the tensor holds of one expert */
} moe_weight_orders;

/* ------------------------------------------------------------------------------------------------ rounded operands */

/* Rounding to MX: a value becomes what moe_dequantize_mx makes of what moe_quantize_mx makes of it, in its own type. */
typedef struct moe_mx_rounding {
  int enabled;               /* 0: no rounding, and nothing else here is read */
  moe_element element;
  moe_scale_rule scale_rule;
  uint32_t cast;             /* MOE_CAST_* bits */
} moe_mx_rounding;

/* Which operands of products are rounded to MX, in groups of 32 along the axis that the product contracts. This is how
   MXFP8 training computes, and how Trainium's MX kernels take activations. An operand is rounded as contract 3 has it;
   gradients pass through the rounding unchanged.
                        activations              weights                           gradients
     forward            x along H, m along I     Wgu along H, Wd along I
     backward                                    Wd along H, [Wg|Wu] along I       dY along H; dg and du along I
     weight gradients   x, a*m along rows                                          dY, dg, du along rows
   Along I groups begin anew at up. Along rows they count an expert's rows in block order. A quantised weight is rounded
   in the backward only, where its groups lie along the other axis. Packed weights cannot be rounded, unless they were
   packed from quantised ones (INVALID_OPTION).
   With static input scales, an expert's own, x or m is not rounded in groups in the forward, but to what
   moe_dequantize_scaled makes of what moe_quantize_scaled makes of it under the scale; scale_rule and the layout have
   no say there then. The last line of the table stays as it is.
   Sources: microxcaling's linear; semantics of nkilib's mlp_bwd_mxfp8 and of moe_cte's MX kernels. */
typedef struct moe_mx_operands {
  moe_mx_rounding activations, weights, gradients;
  int weight_grads;                /* 1: also the table's last line */
  moe_mx_layout activation_layout; /* in the forward x and m are grouped as a weight in this layout is */
  const float *gate_up_in_scale;   /* [E] (optional): of x; finite and above 0, activations of 8 bits and enabled */
  const float *down_in_scale;      /* [E] (optional): of m, likewise */
} moe_mx_operands;

#include "end.h"

#endif
