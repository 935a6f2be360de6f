/* The context of a call: threads, allocator, error; and the instruction sets. */
#ifndef MOE_API_CONTEXT_H
#define MOE_API_CONTEXT_H

#include "types.h"

#include "begin.h"

/* ---------------------------------------------------------------------------------------------- instruction sets */

/* X(suffix, ENUMERATOR), slowest first. */
#define MOE_ISA_LIST(X)      \
  X(scalar, SCALAR)          \
  X(avx2, AVX2)              \
  X(avx512, AVX512)          \
  X(avx512bf16, AVX512BF16)

typedef enum moe_isa {
#define MOE_ISA_ENUM_(name, NAME) MOE_ISA_##NAME,
  MOE_ISA_LIST(MOE_ISA_ENUM_)
#undef MOE_ISA_ENUM_
} moe_isa;

MOE_API const char *moe_isa_name(moe_isa isa); /* "avx512bf16"; "unknown" for anything else */
MOE_API int moe_isa_supported(moe_isa isa);    /* 1 when this CPU (and operating system) can run it */
MOE_API moe_isa moe_isa_active(void);          /* what the next call will use */

/* Use `isa` or, where the CPU lacks it, the best one below it. Process-wide; not to be called while another thread is
   inside the library. MOE_ERROR_INVALID_OPTION for an unknown value. Results do not change, only speed and
   the workspace needed. Left alone, the library takes the best, but multiplies bf16 by f32 fused multiply-adds where
   these are the quicker way to the same bits (Intel's cores); moe_isa_limit(MOE_ISA_AVX512BF16) insists on the dot
   product. */
MOE_API moe_status moe_isa_limit(moe_isa isa);

/* -------------------------------------------------------------------------------------------------------- context */

typedef void (*moe_task)(void *arg, int64_t index);

/* How work items are dealt to threads. Bits never depend on it. */
typedef enum moe_schedule {
  MOE_SCHEDULE_PING_PONG = 0, /* the next free thread takes the next item */
  MOE_SCHEDULE_HI_LO = 1,     /* each thread owns one contiguous range */
  MOE_SCHEDULE_SHUFFLED = 2,  /* items in a pseudo-random order: to convince yourself that order does not matter */
  MOE_SCHEDULE_COUNT_
} moe_schedule;

/* A zeroed context is valid: serial (OpenMP's threads under -fopenmp), no allocator. One context serves one call at a
   time. Every function also takes ctx == NULL, which is a zeroed context whose message is lost. */
typedef struct moe_context {
  /* Must run task(arg, i) once for every i in [0,count), in any order, on any threads, and return when all are done. A
     task that has begun must go on whatever others do: one may wait for it, though never for one that has not. */
  void (*parallel_for)(void *user, int64_t count, moe_task task, void *arg);
  void *parallel_for_user;
  int32_t num_threads; /* the most tasks the library hands to one parallel_for; 0 = 1, or omp_get_max_threads() */
  moe_schedule schedule;
  /* Used when an args struct has workspace == NULL. allocate may return NULL. Both or neither. */
  void *(*allocate)(void *user, size_t bytes);
  void (*release)(void *user, void *memory, size_t bytes);
  void *allocator_user;
  moe_status status; /* of the last call */
  char message[256]; /* one sentence; "" after success */
} moe_context;

#include "end.h"

#endif
