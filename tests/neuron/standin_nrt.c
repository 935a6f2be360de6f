/* standin_nrt.c: a stand-in for libnrt.so.1, for tests. It is not Neuron's: it has NRT 2.0's synchronous interface,
   two cores whose memory is apart from the host's, and executes what a standin_kernel says by calling moe.h. It counts
   what is not given back, notices what libnrt would not allow, and makes any call fail that a test names.

     STANDIN_OLD     without the functions that a libnrt may lack
     STANDIN_BROKEN  without nrt_execute */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "neff.h"

#define EXPORT __attribute__((visibility("default")))

enum { CORES = 2, MAGIC_MODEL = 0x6d6f646c, MAGIC_TENSOR = 0x74656e73, MAGIC_SET = 0x73657473, DEAD = 0x64656164 };

typedef struct storage {
  uint8_t *bytes, *written;
  size_t size;
  int users;
} storage;

struct moe_nrt_tensor {
  uint32_t magic;
  int core, sets; /* how many live sets have it */
  storage *memory;
  size_t offset, size;
  struct moe_nrt_tensor *of; /* of a slice */
  int slices;
};

struct moe_nrt_model {
  uint32_t magic;
  int core;
  standin_kernel kernel;
};

typedef struct tensor_set {
  uint32_t magic;
  int count;
  char name[STANDIN_TENSORS][256];
  moe_nrt_tensor *tensor[STANDIN_TENSORS];
} tensor_set;

/* ---------------------------------------------------------------------------------------------------------- control */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
  int open, closed, live, violations, after, status, failed;
  const char *function;
  const moe_nrt_model *profiled;
  size_t used[CORES];
  struct {
    const char *name;
    int calls;
  } count[64];
} state;

static void violate(const char *what) {
  fprintf(stderr, "stand-in libnrt: %s\n", what);
  state.violations++;
}

static int *calls_of(const char *name) {
  int i = 0;
  while (state.count[i].name && strcmp(state.count[i].name, name) != 0) i++;
  state.count[i].name = name;
  return &state.count[i].calls;
}

/* Whether this call is the one to fail; with the lock held. */
static moe_nrt_status enter(const char *name) {
  ++*calls_of(name);
  if (!state.function || strcmp(state.function, name) != 0 || state.after-- > 0) return MOE_NRT_SUCCESS;
  if (state.status != MOE_NRT_QUEUE_FULL) state.function = NULL; /* a full queue stays full */
  state.failed = 1;
  return (moe_nrt_status)state.status;
}

/* Most functions want an open runtime. */
static moe_nrt_status enter_open(const char *name) {
  const moe_nrt_status status = enter(name);
  if (state.open) return status;
  violate(name);
  return state.closed ? MOE_NRT_CLOSED : MOE_NRT_UNINITIALIZED;
}

/* static result inner arguments, under the lock. */
#define LOCKED(type, expression)  \
  pthread_mutex_lock(&lock);      \
  type result_ = (expression);    \
  pthread_mutex_unlock(&lock);    \
  return result_

static void control_fail(const char *function, int after, int status) {
  pthread_mutex_lock(&lock);
  state.function = function, state.after = after, state.status = status, state.failed = 0;
  pthread_mutex_unlock(&lock);
}
static int control_failed(void) { LOCKED(int, state.failed); }
static int control_live(void) { LOCKED(int, state.live); }
static int control_violations(void) { LOCKED(int, state.violations); }
static int control_calls(const char *function) { LOCKED(int, *calls_of(function)); }
static void control_reset(void) {
  pthread_mutex_lock(&lock);
  memset(&state, 0, sizeof state);
  pthread_mutex_unlock(&lock);
}
extern const standin_control standin;
EXPORT const standin_control standin = {control_fail, control_failed, control_live,
                                        control_violations, control_calls, control_reset};

/* ---------------------------------------------------------------------------------------------------------- runtime */

EXPORT moe_nrt_status nrt_init(moe_nrt_framework_type framework, const char *version, const char *layer) {
  pthread_mutex_lock(&lock);
  moe_nrt_status status = enter("nrt_init");
  if (state.open || state.closed) violate("nrt_init is called twice in a process");
  if (framework != MOE_NRT_FRAMEWORK_TYPE_NO_FW || !version || !layer) violate("nrt_init: arguments");
  state.open = status == MOE_NRT_SUCCESS;
  pthread_mutex_unlock(&lock);
  return status;
}

EXPORT void nrt_close(void) {
  pthread_mutex_lock(&lock);
  (void)enter_open("nrt_close");
  if (state.live) violate("nrt_close, and something is not given back");
  state.open = 0, state.closed = 1;
  pthread_mutex_unlock(&lock);
}

/* ----------------------------------------------------------------------------------------------------------- models */

static int is_model(const moe_nrt_model *m) {
  if (m && m->magic == MAGIC_MODEL) return 1;
  violate("no model");
  return 0;
}

EXPORT moe_nrt_status nrt_load(const void *neff, size_t size, int32_t vnc, int32_t vnc_count, moe_nrt_model **model) {
  pthread_mutex_lock(&lock);
  moe_nrt_status status = enter_open("nrt_load");
  const standin_neff *file = neff;
  if (status == MOE_NRT_SUCCESS && size < sizeof *file) status = MOE_NRT_INVALID;
  if (vnc_count != -1) violate("nrt_load: vnc_count must be -1");
  if (status == MOE_NRT_SUCCESS && vnc >= CORES) status = MOE_NRT_LOAD_NOT_ENOUGH_NC;
  if (status == MOE_NRT_SUCCESS) {
    moe_nrt_model *m = calloc(1, sizeof *m);
    m->magic = MAGIC_MODEL, m->core = vnc < 0 ? 1 : vnc;
    memcpy(&m->kernel, &file->kernel, sizeof m->kernel);
    *model = m;
    state.live++;
  }
  pthread_mutex_unlock(&lock);
  return status;
}

/* What fails to unload is gone even so. */
EXPORT moe_nrt_status nrt_unload(moe_nrt_model *model) {
  pthread_mutex_lock(&lock);
  const moe_nrt_status status = enter_open("nrt_unload");
  if (is_model(model)) {
    if (state.profiled == model) violate("nrt_unload of a model that is profiled");
    model->magic = DEAD;
    free(model);
    state.live--;
  }
  pthread_mutex_unlock(&lock);
  return status;
}

EXPORT moe_nrt_status nrt_get_model_tensor_info(moe_nrt_model *model, moe_nrt_tensor_info_array **info) {
  pthread_mutex_lock(&lock);
  moe_nrt_status status = enter_open("nrt_get_model_tensor_info");
  if (status == MOE_NRT_SUCCESS && is_model(model)) {
    const standin_kernel *k = &model->kernel;
    moe_nrt_tensor_info_array *array = calloc(1, sizeof *array + k->count * sizeof(moe_nrt_tensor_info));
    moe_nrt_tensor_info *t = array->tensor_array;
    array->tensor_count = k->count;
    for (uint32_t i = 0; i < k->count && i < STANDIN_TENSORS; i++, t++) {
      memcpy(t->name, k->tensor[i].name, sizeof k->tensor[i].name);
      t->usage = (moe_nrt_tensor_usage)k->tensor[i].usage, t->dtype = (moe_nrt_dtype)k->tensor[i].dtype;
      t->size = k->tensor[i].size, t->ndim = k->tensor[i].ndim;
      t->shape = malloc(sizeof k->tensor[i].shape);
      memcpy(t->shape, k->tensor[i].shape, sizeof k->tensor[i].shape);
    }
    *info = array;
    state.live++;
  }
  pthread_mutex_unlock(&lock);
  return status;
}

EXPORT moe_nrt_status nrt_free_model_tensor_info(moe_nrt_tensor_info_array *info) {
  pthread_mutex_lock(&lock);
  const moe_nrt_status status = enter_open("nrt_free_model_tensor_info");
  moe_nrt_tensor_info *t = info->tensor_array;
  for (uint64_t i = 0; i < info->tensor_count && i < STANDIN_TENSORS; i++, t++) free(t->shape);
  free(info);
  state.live--;
  pthread_mutex_unlock(&lock);
  return status;
}

/* ---------------------------------------------------------------------------------------------------------- tensors */

static int is_tensor(const moe_nrt_tensor *t) {
  if (t && t->magic == MAGIC_TENSOR) return 1;
  violate("no tensor");
  return 0;
}

static moe_nrt_status range(const moe_nrt_tensor *t, size_t offset, size_t size) {
  return !is_tensor(t) || offset > t->size || size > t->size - offset ? MOE_NRT_INVALID : MOE_NRT_SUCCESS;
}

static moe_nrt_tensor *tensor_new(int core, storage *memory, size_t offset, size_t size) {
  moe_nrt_tensor *t = calloc(1, sizeof *t);
  t->magic = MAGIC_TENSOR, t->core = core, t->memory = memory, t->offset = offset, t->size = size;
  memory->users++;
  state.live++;
  return t;
}

EXPORT moe_nrt_status nrt_tensor_allocate(moe_nrt_tensor_placement placement, int vnc, size_t size, const char *name,
                                          moe_nrt_tensor **tensor) {
  (void)name;
  pthread_mutex_lock(&lock);
  moe_nrt_status status = enter_open("nrt_tensor_allocate");
  if (placement != MOE_NRT_TENSOR_PLACEMENT_DEVICE || vnc < 0 || vnc >= CORES) status = MOE_NRT_INVALID;
  if (status == MOE_NRT_SUCCESS) {
    storage *memory = calloc(1, sizeof *memory);
    memory->bytes = malloc(size + 1), memory->written = calloc(size + 1, 1), memory->size = size;
    memset(memory->bytes, 0xff, size); /* NaN in every type */
    *tensor = tensor_new(vnc, memory, 0, size);
    state.used[vnc] += size;
  }
  pthread_mutex_unlock(&lock);
  return status;
}

EXPORT void nrt_tensor_free(moe_nrt_tensor **tensor) {
  pthread_mutex_lock(&lock);
  (void)enter_open("nrt_tensor_free");
  if (tensor && is_tensor(*tensor)) {
    moe_nrt_tensor *t = *tensor;
    if (t->sets) violate("nrt_tensor_free: a set has the tensor");
    if (t->slices) violate("nrt_tensor_free: a slice has the tensor");
    if (t->of) t->of->slices--;
    if (--t->memory->users == 0) {
      state.used[t->core] -= t->memory->size;
      free(t->memory->bytes), free(t->memory->written), free(t->memory);
    }
    t->magic = DEAD;
    free(t);
    *tensor = NULL;
    state.live--;
  }
  pthread_mutex_unlock(&lock);
}

EXPORT moe_nrt_status nrt_tensor_read(const moe_nrt_tensor *t, void *to, size_t offset, size_t size) {
  pthread_mutex_lock(&lock);
  moe_nrt_status status = enter_open("nrt_tensor_read");
  if (status == MOE_NRT_SUCCESS) status = range(t, offset, size);
  if (status == MOE_NRT_SUCCESS) memcpy(to, t->memory->bytes + t->offset + offset, size);
  pthread_mutex_unlock(&lock);
  return status;
}

EXPORT moe_nrt_status nrt_tensor_write(moe_nrt_tensor *t, const void *from, size_t offset, size_t size) {
  pthread_mutex_lock(&lock);
  moe_nrt_status status = enter_open("nrt_tensor_write");
  if (status == MOE_NRT_SUCCESS) status = range(t, offset, size);
  if (status == MOE_NRT_SUCCESS) {
    memcpy(t->memory->bytes + t->offset + offset, from, size);
    memset(t->memory->written + t->offset + offset, 1, size);
  }
  pthread_mutex_unlock(&lock);
  return status;
}

#ifndef STANDIN_OLD

EXPORT moe_nrt_status nrt_tensor_memset(moe_nrt_tensor *t, uint64_t offset, int value, size_t size) {
  pthread_mutex_lock(&lock);
  moe_nrt_status status = enter_open("nrt_tensor_memset");
  if (status == MOE_NRT_SUCCESS) status = range(t, offset, size);
  if (status == MOE_NRT_SUCCESS) {
    memset(t->memory->bytes + t->offset + offset, value, size);
    memset(t->memory->written + t->offset + offset, 1, size);
  }
  pthread_mutex_unlock(&lock);
  return status;
}

EXPORT moe_nrt_status nrt_tensor_copy(const moe_nrt_tensor *from, size_t from_offset, moe_nrt_tensor *to,
                                      size_t to_offset, size_t size) {
  pthread_mutex_lock(&lock);
  moe_nrt_status status = enter_open("nrt_tensor_copy");
  if (status == MOE_NRT_SUCCESS) status = range(from, from_offset, size);
  if (status == MOE_NRT_SUCCESS) status = range(to, to_offset, size);
  if (status == MOE_NRT_SUCCESS && from->core != to->core) status = MOE_NRT_INVALID;
  if (status == MOE_NRT_SUCCESS) {
    memmove(to->memory->bytes + to->offset + to_offset, from->memory->bytes + from->offset + from_offset, size);
    memmove(to->memory->written + to->offset + to_offset, from->memory->written + from->offset + from_offset, size);
  }
  pthread_mutex_unlock(&lock);
  return status;
}

EXPORT moe_nrt_status nrt_tensor_allocate_slice(const moe_nrt_tensor *source, size_t offset, size_t size,
                                                const char *name, moe_nrt_tensor **slice) {
  (void)name;
  pthread_mutex_lock(&lock);
  moe_nrt_status status = enter_open("nrt_tensor_allocate_slice");
  if (status == MOE_NRT_SUCCESS) status = range(source, offset, size);
  if (status == MOE_NRT_SUCCESS) {
    *slice = tensor_new(source->core, source->memory, source->offset + offset, size);
    (*slice)->of = (moe_nrt_tensor *)(uintptr_t)source;
    (*slice)->of->slices++;
  }
  pthread_mutex_unlock(&lock);
  return status;
}

EXPORT moe_nrt_status nrt_get_model_info(const moe_nrt_model *model, moe_nrt_model_info *info, size_t size_in,
                                         size_t *size_out) {
  pthread_mutex_lock(&lock);
  const moe_nrt_status status = enter_open("nrt_get_model_info");
  if (status == MOE_NRT_SUCCESS && is_model(model) && size_in >= sizeof *info) {
    info->vnc = (uint32_t)model->core;
    *size_out = sizeof *info;
  }
  pthread_mutex_unlock(&lock);
  return status;
}

EXPORT moe_nrt_status nrt_get_instance_info(moe_nrt_instance_info *info, size_t size) {
  pthread_mutex_lock(&lock);
  const moe_nrt_status status = enter("nrt_get_instance_info");
  if (size != sizeof *info) violate("nrt_get_instance_info: size");
  if (status == MOE_NRT_SUCCESS) {
    memset(info, 0, sizeof *info);
    info->family = MOE_NRT_INSTANCE_TRN2;
    memcpy(info->arch_name, "stand-in", 9), memcpy(info->device_revision, "r1", 3);
  }
  pthread_mutex_unlock(&lock);
  return status;
}

EXPORT moe_nrt_status nrt_get_version(moe_nrt_version *version, size_t size) {
  pthread_mutex_lock(&lock);
  const moe_nrt_status status = enter("nrt_get_version");
  if (size != sizeof *version) violate("nrt_get_version: size");
  if (status == MOE_NRT_SUCCESS) version->rt_major = 2, version->rt_minor = 34, version->rt_patch = 10;
  pthread_mutex_unlock(&lock);
  return status;
}

static moe_nrt_status cores(const char *name, uint32_t *count) {
  pthread_mutex_lock(&lock);
  const moe_nrt_status status = enter(name);
  if (status == MOE_NRT_SUCCESS) *count = CORES;
  pthread_mutex_unlock(&lock);
  return status;
}
EXPORT moe_nrt_status nrt_get_total_vnc_count(uint32_t *count) { return cores("nrt_get_total_vnc_count", count); }
EXPORT moe_nrt_status nrt_get_visible_vnc_count(uint32_t *count) { return cores("nrt_get_visible_vnc_count", count); }

EXPORT moe_nrt_status nrt_get_vnc_memory_stats(uint32_t vnc, moe_nrt_vnc_memory_stats *stats, size_t size_in,
                                               size_t *size_out) {
  pthread_mutex_lock(&lock);
  moe_nrt_status status = enter_open("nrt_get_vnc_memory_stats");
  if (vnc >= CORES || size_in < sizeof *stats) status = MOE_NRT_INVALID;
  if (status == MOE_NRT_SUCCESS)
    stats->bytes_used = state.used[vnc], stats->bytes_limit = (size_t)1 << 30, *size_out = sizeof *stats;
  pthread_mutex_unlock(&lock);
  return status;
}

EXPORT moe_nrt_status nrt_profile_start(moe_nrt_model *model, const char *file) {
  pthread_mutex_lock(&lock);
  const moe_nrt_status status = enter_open("nrt_profile_start");
  if (status == MOE_NRT_SUCCESS && is_model(model) && file) state.profiled = model;
  pthread_mutex_unlock(&lock);
  return status;
}

EXPORT moe_nrt_status nrt_profile_stop(const char *file) {
  pthread_mutex_lock(&lock);
  const moe_nrt_status status = enter_open("nrt_profile_stop");
  if (!file || !state.profiled) violate("nrt_profile_stop before nrt_profile_start");
  state.profiled = NULL;
  pthread_mutex_unlock(&lock);
  return status;
}

EXPORT moe_nrt_status nrt_execute_repeat(moe_nrt_model *model, const moe_nrt_tensor_set *in, moe_nrt_tensor_set *out,
                                         int repeat);
EXPORT void nrt_tensor_cast(void);
EXPORT void nrt_tensor_cast(void) {}

#endif

/* ------------------------------------------------------------------------------------------------------------- sets */

static int is_set(const tensor_set *s) {
  if (s && s->magic == MAGIC_SET) return 1;
  violate("no tensor set");
  return 0;
}

EXPORT moe_nrt_status nrt_allocate_tensor_set(moe_nrt_tensor_set **result) {
  pthread_mutex_lock(&lock);
  const moe_nrt_status status = enter_open("nrt_allocate_tensor_set");
  if (status == MOE_NRT_SUCCESS) {
    tensor_set *s = calloc(1, sizeof *s);
    s->magic = MAGIC_SET;
    *result = s;
    state.live++;
  }
  pthread_mutex_unlock(&lock);
  return status;
}

EXPORT void nrt_destroy_tensor_set(moe_nrt_tensor_set **result) {
  pthread_mutex_lock(&lock);
  (void)enter_open("nrt_destroy_tensor_set");
  tensor_set *s = *result;
  if (is_set(s)) {
    for (int i = 0; i < s->count; i++)
      if (is_tensor(s->tensor[i])) s->tensor[i]->sets--;
    s->magic = DEAD;
    free(s);
    *result = NULL;
    state.live--;
  }
  pthread_mutex_unlock(&lock);
}

static moe_nrt_tensor *in_set(const tensor_set *s, const char *name) {
  for (int i = 0; i < s->count; i++)
    if (strcmp(s->name[i], name) == 0) return s->tensor[i];
  return NULL;
}

EXPORT moe_nrt_status nrt_add_tensor_to_tensor_set(moe_nrt_tensor_set *set, const char *name, moe_nrt_tensor *tensor) {
  pthread_mutex_lock(&lock);
  moe_nrt_status status = enter_open("nrt_add_tensor_to_tensor_set");
  tensor_set *s = set;
  if (status == MOE_NRT_SUCCESS && is_set(s) && is_tensor(tensor)) {
    int i = 0;
    while (i < s->count && strcmp(s->name[i], name) != 0) i++;
    if (i < s->count && is_tensor(s->tensor[i])) s->tensor[i]->sets--; /* replaced */
    if (i == s->count) s->count++;
    snprintf(s->name[i], sizeof s->name[i], "%s", name);
    s->tensor[i] = tensor;
    tensor->sets++;
  }
  pthread_mutex_unlock(&lock);
  return status;
}

/* -------------------------------------------------------------------------------------------------------- execution */

/* A kernel's call while it runs: its own copy of the arguments, with pointers into device memory. */
typedef struct launch {
  standin_kernel kernel;
  void *converted[STANDIN_TENSORS];
} launch;

/* Where device memory is; of the device's own order, in logical order. */
static void *launch_data(launch *run, uint32_t i, const moe_nrt_tensor *t) {
  const standin_tensor *d = &run->kernel.tensor[i];
  uint8_t *bytes = t->memory->bytes + t->offset;
  if (d->order == MOE_NEURON_ORDER_SAME) return bytes;
  run->converted[i] = malloc(d->size * 2);
  const int scale = d->order == MOE_NEURON_ORDER_DOWN_SCALE;
  const moe_nki_vector_args args = {.kind = scale ? MOE_NKI_DOWN_SCALE : MOE_NKI_GATE_UP_BIAS,
      .dtype = d->dtype == MOE_NRT_DTYPE_FLOAT32 ? MOE_DTYPE_F32 : MOE_DTYPE_BF16, .E = d->shape[0],
      .length = d->shape[2], .in = bytes, .out = run->converted[i]};
  if (moe_nki_vector_convert(NULL, &args) != MOE_OK) abort();
  return run->converted[i];
}

/* What an output is added to is an input at the same place. */
static void launch_add(const launch *run, const tensor_set *in, const standin_tensor *d, const moe_nrt_tensor *to) {
  const standin_kernel *k = &run->kernel;
  for (uint32_t i = 0; i < k->count; i++) {
    const standin_tensor *other = &k->tensor[i];
    const moe_nrt_tensor *from = other->usage == MOE_NRT_TENSOR_USAGE_INPUT ? in_set(in, other->name) : NULL;
    if (from && other->nested == d->nested && other->offset == d->offset)
      memcpy(to->memory->bytes + to->offset, from->memory->bytes + from->offset,
             from->size < to->size ? from->size : to->size);
  }
}

/* Binds device memory to the arguments; with the lock held. Outputs come last, and take the place of what they are
   added to. */
static moe_nrt_status launch_bind(launch *run, const moe_nrt_model *model, const tensor_set *in,
                                  const tensor_set *out) {
  standin_kernel *k = &run->kernel;
  memcpy(k, &model->kernel, sizeof *k);
  for (uint32_t i = 0; i < 2 * k->count; i++) {
    const standin_tensor *d = &k->tensor[i % k->count];
    const int output = d->usage == MOE_NRT_TENSOR_USAGE_OUTPUT;
    if (output != (i >= k->count)) continue;
    const moe_nrt_tensor *t = in_set(output ? out : in, d->name);
    if (!t || !is_tensor(t) || t->size != d->size || t->core != model->core) return MOE_NRT_INVALID;
    for (size_t b = 0; b < t->size && !output; b++)
      if (!t->memory->written[t->offset + b]) return violate("an input was not written"), MOE_NRT_EXEC_BAD_INPUT;
    if (output) memset(t->memory->written + t->offset, 1, t->size), launch_add(run, in, d, t);
    void *data = launch_data(run, i % k->count, t);
    memcpy((d->nested ? k->nested[d->nested - 1].bytes : k->args) + d->offset, &data, sizeof data);
  }
  for (int n = 0; n < STANDIN_NESTED; n++) {
    const void *nested = k->nested[n].bytes;
    if (k->nested[n].pointer) memcpy(k->args + k->nested[n].pointer, &nested, sizeof nested);
  }
  return MOE_NRT_SUCCESS;
}

static void *host_take(void *user, size_t bytes) { return (void)user, malloc(bytes); }
static void host_give(void *user, void *memory, size_t bytes) { (void)user, (void)bytes, free(memory); }

/* The operations, by kind and element type. */
#define RUN(op, args_type, kind, NAME) \
  static moe_status run_##op(moe_context *ctx, const void *args) { return moe_##op(ctx, (const args_type *)args); }
#define RUN_OF(name, type, NAME) MOE_NEURON_OP_LIST(RUN, name, NAME)
MOE_DTYPE_LIST(RUN_OF)
MOE_NEURON_MXFP8_OP_LIST(RUN)
static const struct {
  standin_op op;
  moe_dtype dtype;
  moe_status (*run)(moe_context *ctx, const void *args);
} operations[] = {
#define ROW(op, args_type, kind, NAME) {STANDIN_##kind, MOE_DTYPE_##NAME, run_##op},
#define ROWS_OF(name, type, NAME) MOE_NEURON_OP_LIST(ROW, name, NAME)
    MOE_DTYPE_LIST(ROWS_OF) MOE_NEURON_MXFP8_OP_LIST(ROW)};

static moe_nrt_status launch_run(launch *run) {
  moe_context ctx = {.allocate = host_take, .release = host_give};
  moe_status status = MOE_ERROR_INVALID_OPTION;
  for (size_t i = 0; i < sizeof operations / sizeof *operations; i++)
    if (operations[i].op == (standin_op)run->kernel.op && operations[i].dtype == (moe_dtype)run->kernel.dtype)
      status = operations[i].run(&ctx, run->kernel.args);
  for (int i = 0; i < STANDIN_TENSORS; i++) free(run->converted[i]);
  if (status == MOE_ERROR_INVALID_INDEX) return MOE_NRT_EXEC_OOB;
  if (status != MOE_OK) fprintf(stderr, "stand-in libnrt: %s\n", ctx.message);
  return status == MOE_OK ? MOE_NRT_SUCCESS : MOE_NRT_EXEC_BAD_INPUT;
}

/* A numeric error is one whose outputs are there. */
static moe_nrt_status execute(const char *name, moe_nrt_model *model, const tensor_set *in, tensor_set *out) {
  pthread_mutex_lock(&lock);
  launch *run = calloc(1, sizeof *run);
  const moe_nrt_status wanted = enter_open(name);
  moe_nrt_status status = wanted == MOE_NRT_EXEC_COMPLETED_WITH_NUM_ERR ? MOE_NRT_SUCCESS : wanted;
  if (status == MOE_NRT_SUCCESS)
    status = is_model(model) && is_set(in) && is_set(out) ? launch_bind(run, model, in, out) : MOE_NRT_INVALID;
  pthread_mutex_unlock(&lock);
  if (status == MOE_NRT_SUCCESS) status = launch_run(run); /* cores work at the same time */
  free(run);
  return status == MOE_NRT_SUCCESS ? wanted : status;
}

#ifndef STANDIN_BROKEN
EXPORT moe_nrt_status nrt_execute(moe_nrt_model *model, const moe_nrt_tensor_set *in, moe_nrt_tensor_set *out) {
  return execute("nrt_execute", model, in, out);
}
#endif
#ifndef STANDIN_OLD
EXPORT moe_nrt_status nrt_execute_repeat(moe_nrt_model *model, const moe_nrt_tensor_set *in, moe_nrt_tensor_set *out,
                                         int repeat) {
  moe_nrt_status status = MOE_NRT_SUCCESS;
  for (int i = 0; i < repeat && status == MOE_NRT_SUCCESS; i++) status = execute("nrt_execute_repeat", model, in, out);
  return status;
}
#endif
