/* The end of every dot product of two rows (numeric contract 4): 16 chains, added pairwise. */
#ifndef MOE_KERNEL_REDUCE_H
#define MOE_KERNEL_REDUCE_H

enum { MOE_LANES = 16 };

MOE_INLINE float moe_reduce_lanes_(float lanes[MOE_LANES]) {
  for (int apart = MOE_LANES / 2; apart > 0; apart /= 2)
    for (int i = 0; i < apart; i++) lanes[i] = lanes[i] + lanes[i + apart];
  return lanes[0];
}

#endif
