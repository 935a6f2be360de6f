/* random.h: splitmix64, in integers only. */
#ifndef MOE_TEST_RANDOM_H
#define MOE_TEST_RANDOM_H

#include <stdint.h>

static inline uint64_t test_random(uint64_t *state) {
  uint64_t z = (*state += UINT64_C(0x9e3779b97f4a7c15));
  z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
  return z ^ (z >> 31);
}

/* Both ends are possible. */
static inline int64_t test_random_range(uint64_t *state, int64_t low, int64_t high) {
  return low + (int64_t)(test_random(state) % (uint64_t)(high - low + 1));
}

static inline int test_random_chance(uint64_t *state, int one_in) { return test_random(state) % (uint64_t)one_in == 0; }

#endif /* MOE_TEST_RANDOM_H */
