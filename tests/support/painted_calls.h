/* painted_calls.h: every public function by number, called on a painted stack; how much of it each took at most. */
#ifndef MOE_TEST_PAINTED_CALLS_H
#define MOE_TEST_PAINTED_CALLS_H

#include "painted.h"
#include "test.h"

/* -------------------------------------------------------------------------------------------------------- functions */

struct request {
  moe_context *ctx;
  const void *args;
  void *out;
  moe_status status;
  uint64_t other;
};

struct array { /* arguments of what converts n numbers */
  void *to, *also_to;
  const void *from;
  int64_t n;
  int option;
};

struct face { /* arguments of moe_layer_* */
  moe_layer layer;
  moe_layer_grads grads;
  void *y, *saved;
};

#define INVOKE_CALL(function, type) r->status = function(r->ctx, (const type *)r->args)
#define INVOKE_SIZE(function, type) r->status = function(r->ctx, (const type *)r->args, (size_t *)r->out)
#define INVOKE_NARROW(function, type) \
  r->status = function(r->ctx, (type *)a->to, (const float *)a->from, a->n)
#define INVOKE_CAST(function, type) \
  r->status = function(r->ctx, (type *)a->to, (const float *)a->from, a->n, (uint32_t)a->option)
#define INVOKE_WIDEN(function, type) r->status = function(r->ctx, (float *)a->to, (const type *)a->from, a->n)
#define INVOKE_FORWARD(function, type) r->status = function(r->ctx, &face->layer, face->y, face->saved)
#define INVOKE_BACKWARD(function, type) \
  r->status = function(r->ctx, &face->layer, face->saved, face->y, &face->grads)
#define INVOKE_BACKWARD_SIZE(function, type) \
  r->status = function(r->ctx, &face->layer, face->saved, (size_t *)r->out)
#define INVOKE_OTHER(function, type) OTHER_##function
#define OTHER_moe_expert_parallel_first r->other = (uint64_t)moe_expert_parallel_first(8, 3, 1)
#define OTHER_moe_program_sharding_info \
  r->status = moe_program_sharding_info(r->ctx, 3, 1, 100, (int64_t *)r->out, (int64_t *)r->out + 1)
#define OTHER_moe_tune_save \
  r->status = moe_tune_save(r->ctx, (const moe_tune_table *)a->from, (char *)a->to, (size_t)a->n, (size_t *)r->out)
#define OTHER_moe_tune_load \
  r->status = moe_tune_load(r->ctx, (moe_tune_table *)a->to, (const char *)a->from, (size_t)a->n, (int64_t *)r->out)
#define OTHER_moe_mx_layout_size r->status = moe_mx_layout_size(r->ctx, r->args, r->out)
#define OTHER_moe_nki_x4_permutation \
  r->status = moe_nki_x4_permutation(r->ctx, (moe_mx_layout)a->option, 2, a->n, (int64_t *)a->to)
#define OTHER_moe_nki_vector_size r->status = moe_nki_vector_size(r->ctx, r->args, r->out, (size_t *)r->out + 1)
#define OTHER_moe_route_blocks_count r->other = (uint64_t)moe_route_blocks_count(100, 8, 2, 16)
#define OTHER_moe_activation_f32                                                                                    \
  r->status = moe_activation_f32(r->ctx, (moe_activation)a->option, 0.0f, (const float *)a->from, (float *)a->to, \
                                 (float *)a->also_to, a->n)
#define OTHER_moe_status_str r->other = moe_status_str(MOE_ERROR_OVERLAP) != NULL
#define OTHER_moe_status_text r->other = moe_status_text(MOE_ERROR_OVERLAP) != NULL
#define OTHER_moe_dtype_size r->other = moe_dtype_size(MOE_DTYPE_BF16)
#define OTHER_moe_isa_name r->other = moe_isa_name(MOE_ISA_AVX2) != NULL
#define OTHER_moe_isa_supported r->other = (uint64_t)moe_isa_supported(MOE_ISA_AVX512BF16)
#define OTHER_moe_isa_active r->other = (uint64_t)moe_isa_active()
#define OTHER_moe_isa_limit r->status = moe_isa_limit(moe_isa_active())

#define PUBLIC(function, form, type)         \
  static void invoke_##function(void *arg) { \
    struct request *r = arg;                 \
    const struct array *a = r->args;         \
    const struct face *face = r->args;       \
    (void)a, (void)face;                     \
    INVOKE_##form(function, type);           \
  }
#include "support/public.inl"

enum {
#define PUBLIC(function, form, type) FN_##function,
#include "support/public.inl"
  FUNCTIONS
};

static struct {
  const char *name;
  void (*invoke)(void *arg);
  size_t most;         /* stack of the call, or of a task */
  int calls;
  char situation[400]; /* of the call that took most */
} functions[] = {
#define PUBLIC(function, form, type) {#function, invoke_##function, 0, 0, ""},
#include "support/public.inl"
};

/* ------------------------------------------------------------------------------------------------------------ calls */

static struct painted caller, worker;
static size_t task_most;
static char situation[400];

struct task {
  moe_task run;
  void *arg;
  int64_t index;
};

static void run_task(void *arg) {
  const struct task *task = arg;
  task->run(task->arg, task->index);
}

/* One task after the other, on a stack of their own. */
static void painted_parallel_for(void *user, int64_t count, moe_task run, void *arg) {
  (void)user;
  for (int64_t i = 0; i < count; i++) {
    struct task task = {run, arg, i};
    const size_t used = painted_run(&worker, run_task, &task);
    if (used > task_most) task_most = used;
  }
}

static void note(int function, size_t used, const char *what) {
  functions[function].calls++;
  if (used <= functions[function].most) return;
  functions[function].most = used;
  snprintf(functions[function].situation, sizeof situation, "%s, isa=%s %.300s", what, moe_isa_name(moe_isa_active()),
           situation);
}

static void use_once(int function, moe_context *ctx, const void *args, void *out) {
  struct request r = {ctx, args, out, MOE_OK, 0};
  task_most = 0;
  note(function, painted_run(&caller, functions[function].invoke, &r), "call");
  if (task_most > 0) note(function, task_most, "task");
  if (r.status != MOE_OK) fail_msg("%s: %s | %s", functions[function].name, ctx ? ctx->message : "", situation);
}

static moe_context serial = {.num_threads = 1};
static moe_context parallel = {
    .num_threads = 2, .parallel_for = painted_parallel_for, .schedule = MOE_SCHEDULE_HI_LO};

/* Serial and in parallel. */
static void use(int function, const void *args, void *out) {
  use_once(function, &serial, args, out);
  use_once(function, &parallel, args, out);
}

static void *take(size_t bytes) {
  void *memory = aligned_alloc(64, (bytes / 64 + 1) * 64);
  if (memory == NULL) abort();
  memset(memory, 0, bytes);
  return memory;
}

#endif /* MOE_TEST_PAINTED_CALLS_H */
