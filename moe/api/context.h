/* What a call needs to know of its caller: threads, allocator, where an error goes. And the instruction sets. */
#ifndef MOE_API_CONTEXT_H
#define MOE_API_CONTEXT_H

#include "types.h"

#include "begin.h"

/* ---------------------------------------------------------------------------------------------- instruction sets */

/* X(suffix, ENUMERATOR), in ascending order: each one includes those before it. AVX512 is F, BW, VL and DQ, and uses
   VBMI where the CPU has it. AVX512BF16 is these, VBMI and BF16: all CPUs with BF16 but Cooper Lake. */
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

MOE_API const char *moe_isa_name(moe_isa isa); /* its suffix, "avx512bf16" say; "unknown" for any other value */
MOE_API int moe_isa_supported(moe_isa isa);    /* 1 if this CPU and operating system can run it, else 0 */
MOE_API moe_isa moe_isa_active(void);          /* what the next call will use */

/* From now on the process uses `isa` or, where the CPU lacks it, the best one below it. Results stay the same; speed,
   workspace sizes and the layout of packed weights change. Not to be called while another thread is inside the library.
   Without this call the library uses the best instruction set. On Intel's cores it then multiplies bf16 by fused
   multiply-adds, which give the same bits faster there; after moe_isa_limit(MOE_ISA_AVX512BF16) it uses the bf16 dot
   product everywhere.
   Errors: INVALID_OPTION for an unknown value. */
MOE_API moe_status moe_isa_limit(moe_isa isa);

/* -------------------------------------------------------------------------------------------------------- context */

typedef void (*moe_task)(void *arg, int64_t index);

/* How work items are dealt to threads. The bits of a result never depend on it. */
typedef enum moe_schedule {
  MOE_SCHEDULE_PING_PONG = 0, /* the next free thread takes the next item */
  MOE_SCHEDULE_HI_LO = 1,     /* each thread owns one contiguous range */
  MOE_SCHEDULE_SHUFFLED = 2,  /* items in a pseudo-random order: to see that order does not matter */
  MOE_SCHEDULE_COUNT_
} moe_schedule;

struct moe_tune_table;

/* A zeroed context is valid: one thread (with -fopenmp, OpenMP's threads) and no allocator. A context serves one call
   at a time. Every function also takes ctx == NULL: a zeroed context whose message nobody reads. */
typedef struct moe_context {
  /* (optional) Must run task(arg, i) once for every i in [0,count) and return when all are done: in any order, on any
     threads, one after another if need be. No task waits for another. */
  void (*parallel_for)(void *user, int64_t count, moe_task task, void *arg);
  void *parallel_for_user; /* handed to parallel_for */
  int32_t num_threads;     /* the largest count that parallel_for is given, up to 1024; 0 = 1, or with -fopenmp
                              omp_get_max_threads() */
  moe_schedule schedule;
  /* (optional, both or neither) Where a call takes its workspace if its arguments have none. May return NULL. */
  void *(*allocate)(void *user, size_t bytes);
  void (*release)(void *user, void *memory, size_t bytes);
  void *allocator_user; /* handed to both */
  const struct moe_tune_table *tune; /* (optional) how products are divided, by measurement: see tune.h */
  moe_status status;    /* output: of the last call */
  char message[256];    /* output: what was wrong, in one sentence that begins with the argument's name; "" after OK */
} moe_context;

#include "end.h"

#endif
