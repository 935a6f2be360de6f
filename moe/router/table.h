/* The router's kernels. */
#ifndef MOE_ROUTER_TABLE_H
#define MOE_ROUTER_TABLE_H

typedef struct moe_router_table_ {
  void (*exp_row)(float *y, const float *x, float shift, int64_t n); /* y = exp(x - shift) */
  /* y = sigmoid or sqrt-softplus of x; dy: its derivative, or NULL */
  void (*score_row)(float *y, float *dy, const float *x, moe_score_function score_function, int64_t n);
  void (*softcap_row)(float *y, float *dy, const float *x, float cap, int64_t n); /* y = cap*tanh(x/cap); dy, or NULL */
} moe_router_table_;

#endif
