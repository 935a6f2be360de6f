/* The activations as mathematics, over REAL, with its functions REF_EXP, REF_TANH, REF_ERF and REF_PART (the real part,
   which decides every comparison). Included once per number type. */

static inline REAL REF(act)(const moe_layer_config *o, REAL x) {
  REAL z = ref_alpha(o) * x;
  switch (o->activation) {
    case MOE_ACT_SILU:
    case MOE_ACT_SWISH: return x / (1 + REF_EXP(-z));
    case MOE_ACT_GELU: return x / 2 * (1 + REF_ERF(x / sqrt(2)));
    case MOE_ACT_GELU_TANH: return x / 2 * (1 + REF_TANH(sqrt(2 / REF_PI) * (x + 0.044715 * x * x * x)));
    case MOE_ACT_RELU: return REF_PART(x) > 0 ? x : 0;
    case MOE_ACT_SQUARED_RELU: return REF_PART(x) > 0 ? x * x : 0;
    case MOE_ACT_SITU: return ref_alpha(o) * REF_TANH(x / ref_alpha(o)) / (1 + REF_EXP(-x));
    default: return x;
  }
}

static inline REAL REF(act_grad)(const moe_layer_config *o, REAL x) {
  REAL z = ref_alpha(o) * x, s = 1 / (1 + REF_EXP(-z));
  switch (o->activation) {
    case MOE_ACT_SILU:
    case MOE_ACT_SWISH: return s + s * (z / (1 + REF_EXP(z)));
    case MOE_ACT_GELU: return (1 + REF_ERF(x / sqrt(2))) / 2 + x * REF_EXP(-x * x / 2) / sqrt(2 * REF_PI);
    case MOE_ACT_GELU_TANH: {
      double c = sqrt(2 / REF_PI);
      REAL t = REF_TANH(c * (x + 0.044715 * x * x * x));
      return (1 + t) / 2 + x / 2 * (1 - t) * (1 + t) * c * (1 + 3 * 0.044715 * x * x);
    }
    case MOE_ACT_RELU: return REF_PART(x) > 0 ? 1 : 0;
    case MOE_ACT_SQUARED_RELU: return REF_PART(x) > 0 ? 2 * x : 0;
    case MOE_ACT_SITU: {
      REAL t = REF_TANH(x / ref_alpha(o)), sigmoid = 1 / (1 + REF_EXP(-x));
      return (1 - t) * (1 + t) * sigmoid + ref_alpha(o) * t * sigmoid / (1 + REF_EXP(x));
    }
    default: return 1;
  }
}
