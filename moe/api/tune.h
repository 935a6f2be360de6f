/* Blocking by measurement: a table of the caller's says how products of a shape are divided, and a tuner fills it. No
   result depends on it: only speed does. */
#ifndef MOE_API_TUNE_H
#define MOE_API_TUNE_H

#include "context.h"
#include "grouped.h"

#include "begin.h"

/* What may be tuned. 0 = the default in each; what does not suit the kernels is rounded to what does. X(name):
     kc        elements of the contraction at a time, a multiple of 32
     mc        rows of A at a time
     nc        panels of 64 columns at a time
     items     work items per worker at least, where there are panels enough
     small_m   rows up to which nothing of the weights is packed, at most 32; -1 = they always are
     prefetch  bytes of the weights that are prefetched before they are wanted */
#define MOE_TUNE_LIST(X) X(kc) X(mc) X(nc) X(items) X(small_m) X(prefetch)

typedef struct moe_tune_blocking {
#define MOE_TUNE_FIELD_(name) int64_t name;
  MOE_TUNE_LIST(MOE_TUNE_FIELD_)
#undef MOE_TUNE_FIELD_
} moe_tune_blocking;

typedef enum moe_tune_op {
  MOE_TUNE_GROUPED_GEMM = 0,
  MOE_TUNE_GROUPED_GEMM_DX = 1,
  MOE_TUNE_GROUPED_GEMM_DW = 2,
  MOE_TUNE_OP_COUNT_
} moe_tune_op;

/* The bits of moe_tune_entry.flags. Of a quantised weight the bits from 8, 16 and 24 on are its element, its scaling and
   its layout. */
enum {
  MOE_TUNE_PERMUTE_X = 1,
  MOE_TUNE_PERMUTE_Y = 2,
  MOE_TUNE_PACKED = 4,
  MOE_TUNE_EKN = 8,
  MOE_TUNE_QUANTIZED = 16
};

/* The key is here, isa, op, dtype, flags, E, N and K. As with Unsloth the number of tokens is not in it. */
typedef struct moe_tune_entry {
  char core[32];   /* vendor, family and model, "AuthenticAMD-25-97" say: what it was measured on; */
  int here;        /*   1: that is this machine's. Others' entries are kept, but not used */
  moe_isa isa;
  moe_tune_op op;
  moe_dtype dtype; /* of the function */
  int64_t flags, E, N, K;
  moe_tune_blocking blocking;
  int64_t rows, default_ns, best_ns; /* measured with so many rows per expert: by default, and with this blocking */
} moe_tune_entry;

/* A zeroed table is empty. A context points to it (moe_context.tune), and any number of contexts may, while nobody
   changes it. Calls search it from end to end. */
typedef struct moe_tune_table {
  moe_tune_entry *entries; /* [capacity] */
  int64_t count, capacity;
} moe_tune_table;

/* Measures one product of a few dozen blockings, one number after the other, and keeps the best in the table, in place
   of the entry with the same key if there is one, from which it then starts. What can make no difference is not
   measured: mc of more than the rows per expert, small_m where experts have more than 32 rows, nc of more panels than
   there are, and so on. A product is run as args->gemm says, with the context's threads: its outputs are written, or
   added to, many times. A number replaces another if it takes 3 % less time; the entry is the default if that is not
   slower in the end. The entry has the blocking 0 where the defaults are best.
   Errors: as of the product, with its sentence; NULL_ARGUMENT, INVALID_SHAPE (the table is full), INVALID_OPTION,
   UNSUPPORTED (no clock where the C library has no timespec_get). */
typedef struct moe_tune_grouped_gemm_args {
  const moe_grouped_gemm_args *gemm;
  moe_tune_op op;
  moe_dtype dtype;              /* the suffix of the function; not DEFAULT */
  moe_tune_table *table;        /* in and out */
  double (*clock)(void *user);  /* (optional) seconds; NULL: timespec_get, which may jump where the time is set */
  void *clock_user;             /* handed to clock */
  double seconds;               /* measure no more blockings after so long; 0 = no limit */
  int32_t repeats;              /* runs of each; 0 = 5 */
} moe_tune_grouped_gemm_args;
MOE_API moe_status moe_tune_grouped_gemm(moe_context *ctx, const moe_tune_grouped_gemm_args *args);

/* The table as text: "moe-tune 1", then a line for each entry: op, dtype, isa, core, and its numbers as name=value.
   *length is its length without the zero at its end. text may be NULL if room is 0: then only *length is written.
   Errors: NULL_ARGUMENT, INVALID_SHAPE (room is too small). */
MOE_API moe_status moe_tune_save(moe_context *ctx, const moe_tune_table *table, char *text, size_t room,
                                 size_t *length);

/* Adds the entries of a text to the table, in place of those with the same key and core. Lines that are no entries are
   skipped, and counted; names that are not known are passed over, numbers that are missing are 0. An empty text is
   none. The table needs room for as many entries as there are lines with a key that it does not have.
   Errors: NULL_ARGUMENT, INVALID_OPTION (it is no such text), UNSUPPORTED (another version), INVALID_SHAPE (the table
   has no room). */
MOE_API moe_status moe_tune_load(moe_context *ctx, moe_tune_table *table, const char *text, size_t length,
                                 int64_t *skipped /* (optional) */);

#include "end.h"

#endif
