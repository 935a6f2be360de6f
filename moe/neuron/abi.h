/* What libnrt's synchronous interface is: NRT 2.0, as its public headers declare it, under names of our own. All of it
   may stand in one file with those headers. With MOE_NEURON_USE_SDK_HEADERS they are included, and every value, layout
   and prototype here is compared with theirs as it is compiled. */
#ifndef MOE_NEURON_ABI_H
#define MOE_NEURON_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ----------------------------------------------------------------------------------------------------------- values */

/* X(NAME, value, the moe_status that it becomes, what to do). */
#define MOE_NRT_STATUS_LIST(X)                                                                                         \
  X(SUCCESS, 0, OK, "nothing is to be done")                                                                           \
  X(FAILURE, 1, ERROR_DEVICE_FAILED, "see the runtime's log (NEURON_RT_LOG_LEVEL=INFO)")                               \
  X(INVALID, 2, ERROR_INVALID_OPTION, "the NEFF is damaged, or a tensor's name or size is not the NEFF's")             \
  X(INVALID_HANDLE, 3, ERROR_INVALID_OPTION, "a handle is not, or no longer, the runtime's")                           \
  X(RESOURCE, 4, ERROR_DEVICE_RESOURCE, "device memory is used up: unload models, free tensors")                       \
  X(TIMEOUT, 5, ERROR_DEVICE_TIMEOUT, "the kernel hangs, or NEURON_RT_EXEC_TIMEOUT is too short")                      \
  X(HW_ERROR, 6, ERROR_DEVICE_LOST, "the hardware failed: restart the process, replace the instance")                  \
  X(QUEUE_FULL, 7, ERROR_DEVICE_BUSY, "too many executions are waiting: try again after one has completed")            \
  X(LOAD_NOT_ENOUGH_NC, 9, ERROR_DEVICE_RESOURCE, "there are fewer free cores than the NEFF needs: see "               \
                                                  "NEURON_RT_NUM_CORES and NEURON_RT_VISIBLE_CORES")                   \
  X(UNSUPPORTED_NEFF_VERSION, 10, ERROR_UNSUPPORTED, "compile the NEFF with this runtime's SDK")                       \
  X(FAIL_HOST_MEM_ALLOC, 11, ERROR_OUT_OF_MEMORY, "the host's memory is used up")                                      \
  X(UNINITIALIZED, 13, ERROR_DEVICE_FAILED, "the runtime is not initialised: call moe_neuron_open first")              \
  X(CLOSED, 14, ERROR_DEVICE_FAILED, "the runtime was closed: a process cannot use it after that")                     \
  X(QUEUE_EMPTY, 15, ERROR_DEVICE_FAILED, "a queue without data was read")                                             \
  X(EXEC_UNIT_UNRECOVERABLE, 101, ERROR_DEVICE_LOST, "the execution unit cannot recover: restart the process")         \
  X(EXEC_BAD_INPUT, 1002, ERROR_INVALID_OPTION, "an input was not accepted: compare sizes with the NEFF's")            \
  X(EXEC_COMPLETED_WITH_NUM_ERR, 1003, ERROR_DEVICE_NUMERIC, "the outputs were read, and there is a NaN in what "      \
                                                             "was computed: look for it in the inputs")                \
  X(EXEC_COMPLETED_WITH_ERR, 1004, ERROR_DEVICE_FAILED, "the outputs are not to be trusted: run again")                \
  X(EXEC_NC_BUSY, 1005, ERROR_DEVICE_BUSY, "another model or process has the core")                                    \
  X(EXEC_OOB, 1006, ERROR_DEVICE_OUT_OF_BOUNDS, "a token or expert id is out of range: padding rows may need id -1 "   \
                                                "(skip_token), or a row T")                                            \
  X(COLL_PENDING, 1100, ERROR_DEVICE_BUSY, "a collective operation is pending")                                        \
  X(EXEC_HW_ERR_COLLECTIVES, 1200, ERROR_DEVICE_FAILED, "a collective operation hangs: look at the other workers")     \
  X(EXEC_HW_ERR_HBM_UE, 1201, ERROR_DEVICE_LOST, "device memory is damaged: restart, replace the instance")            \
  X(EXEC_HW_ERR_NC_UE, 1202, ERROR_DEVICE_LOST, "a core's memory had a parity error: restart the process")             \
  X(EXEC_HW_ERR_DMA_ABORT, 1203, ERROR_DEVICE_LOST, "a DMA engine stopped: restart the process")                       \
  X(EXEC_SW_NQ_OVERFLOW, 1204, ERROR_DEVICE_FAILED, "notifications were lost: see NEURON_RT_ENABLE_DGE_NOTIFICATIONS") \
  X(EXEC_HW_ERR_REPAIRABLE_HBM_UE, 1205, ERROR_DEVICE_FAILED, "device memory is repaired by a reset: restart") \
  X(NETWORK_PROXY_FAILURE, 1206, ERROR_DEVICE_FAILED, "the network between workers failed")

typedef enum moe_nrt_status {
#define MOE_NRT_ENUM_(name, value, status, advice) MOE_NRT_##name = value,
  MOE_NRT_STATUS_LIST(MOE_NRT_ENUM_)
#undef MOE_NRT_ENUM_
  MOE_NRT_STATUS_LARGEST_ = 0x7fffffff /* libnrt may return others */
} moe_nrt_status;

/* X(NAME, value, bytes of an element). 4-bit elements, E8M0 scales and words of packed elements travel as unsigned
   integers. */
#define MOE_NRT_DTYPE_LIST(X)                                                                                \
  X(UNKNOWN, 0x0, 0) X(UINT64, 0x1, 8) X(INT8, 0x2, 1) X(UINT8, 0x3, 1) X(INT16, 0x4, 2) X(UINT16, 0x5, 2)   \
  X(BFLOAT16, 0x6, 2) X(FLOAT16, 0x7, 2) X(INT32, 0x8, 4) X(UINT32, 0x9, 4) X(FLOAT32, 0xA, 4)               \
  X(FP32R, 0xB, 4) X(INT64, 0xC, 8) X(FP8_E3, 0xD, 1) X(FP8_E4, 0xE, 1) X(FP8_E5, 0xF, 1)

typedef enum moe_nrt_dtype {
#define MOE_NRT_ENUM_(name, value, bytes) MOE_NRT_DTYPE_##name = value,
  MOE_NRT_DTYPE_LIST(MOE_NRT_ENUM_)
#undef MOE_NRT_ENUM_
} moe_nrt_dtype;

/* The enums without a use for their names: X(PREFIX_NAME, value). */
#define MOE_NRT_TENSOR_PLACEMENT_LIST(X) \
  X(TENSOR_PLACEMENT_DEVICE, 0) X(TENSOR_PLACEMENT_HOST, 1) X(TENSOR_PLACEMENT_VIRTUAL, 2)
#define MOE_NRT_TENSOR_USAGE_LIST(X) X(TENSOR_USAGE_INPUT, 0) X(TENSOR_USAGE_OUTPUT, 1)
#define MOE_NRT_FRAMEWORK_TYPE_LIST(X)                                                       \
  X(FRAMEWORK_TYPE_INVALID, 0) X(FRAMEWORK_TYPE_NO_FW, 1) X(FRAMEWORK_TYPE_TENSORFLOW, 2)    \
  X(FRAMEWORK_TYPE_PYTORCH, 3) X(FRAMEWORK_TYPE_MXNET, 4) X(FRAMEWORK_TYPE_PRECHECK, 5)
#define MOE_NRT_INSTANCE_LIST(X)                                                                            \
  X(INSTANCE_UNKNOWN, 0) X(INSTANCE_INF1, 1) X(INSTANCE_TRN1, 2) X(INSTANCE_TRN1N, 3) X(INSTANCE_INF2, 4)   \
  X(INSTANCE_TRN2, 5) X(INSTANCE_TRN2N, 6) X(INSTANCE_INF2E, 7) X(INSTANCE_TRN2P, 8) X(INSTANCE_TRN2U, 9)   \
  X(INSTANCE_TRN2E, 10) X(INSTANCE_TRN2EU, 11) X(INSTANCE_TRN2AC, 12) X(INSTANCE_TRN2UAC, 13)               \
  X(INSTANCE_TRN3, 14) X(INSTANCE_TRN3PDS98, 15)

#define MOE_NRT_ENUM_(name, value) MOE_NRT_##name = value,
typedef enum moe_nrt_tensor_placement { MOE_NRT_TENSOR_PLACEMENT_LIST(MOE_NRT_ENUM_) } moe_nrt_tensor_placement;
typedef enum moe_nrt_tensor_usage { MOE_NRT_TENSOR_USAGE_LIST(MOE_NRT_ENUM_) } moe_nrt_tensor_usage;
typedef enum moe_nrt_framework_type { MOE_NRT_FRAMEWORK_TYPE_LIST(MOE_NRT_ENUM_) } moe_nrt_framework_type;
typedef enum moe_nrt_instance { MOE_NRT_INSTANCE_LIST(MOE_NRT_ENUM_) } moe_nrt_instance;
#undef MOE_NRT_ENUM_

/* ---------------------------------------------------------------------------------------------------------- structs */

typedef struct moe_nrt_model moe_nrt_model;
typedef struct moe_nrt_tensor moe_nrt_tensor;
typedef void moe_nrt_tensor_set;

typedef struct moe_nrt_instance_info {
  uint32_t family; /* moe_nrt_instance */
  uint32_t size;
  char arch_name[16];
  char device_revision[8];
} moe_nrt_instance_info;

typedef struct moe_nrt_version {
  uint64_t rt_major, rt_minor, rt_patch, rt_maintenance;
  char rt_detail[128];
  char git_hash[64];
} moe_nrt_version;

typedef struct moe_nrt_tensor_info {
  char name[256];
  moe_nrt_tensor_usage usage;
  size_t size; /* bytes */
  moe_nrt_dtype dtype;
  uint32_t *shape;
  uint32_t ndim;
} moe_nrt_tensor_info;

typedef struct moe_nrt_tensor_info_array {
  uint64_t tensor_count;
  moe_nrt_tensor_info tensor_array[1]; /* as many as there are */
} moe_nrt_tensor_info_array;

typedef struct moe_nrt_model_info {
  uint32_t vnc; /* the core that has the model */
} moe_nrt_model_info;

typedef struct moe_nrt_vnc_memory_stats {
  size_t bytes_used, bytes_limit;
} moe_nrt_vnc_memory_stats;

typedef struct moe_nrt_tensor_device_allocation_info {
  uint64_t physical_address;
  size_t size;
  int hbm_index;
} moe_nrt_tensor_device_allocation_info;

typedef struct moe_nrt_tensor_batch_op {
  uint64_t offset, size;
  void *buffer;
} moe_nrt_tensor_batch_op;

typedef struct moe_nrt_tensor_batch {
  const moe_nrt_tensor *tensor;
  const moe_nrt_tensor_batch_op *ops;
  uint32_t num_ops;
} moe_nrt_tensor_batch;

/* The first 1024 bytes of a compiled kernel; a tar archive follows. */
typedef struct moe_neff_header {
  uint64_t pkg_version, header_size, data_size, neff_version_major, neff_version_minor;
  uint8_t neff_build_version[128];
  uint32_t num_tpb;
  uint8_t hash[32];
  uint8_t uuid[16];
  char name[256];
  uint32_t requested_tpb_count;
  uint8_t tpb_per_node[64];
  uint64_t feature_bits;
  uint32_t lnc_size; /* cores that the kernel takes for one; 0: it does not say */
  uint8_t pad[468];
} moe_neff_header;

/* -------------------------------------------------------------------------------------------------------- functions */

/* R(result, name, arguments) of those that a libnrt must have, O(...) of those that it may lack. MOE_NRT_(x) is the
   type x, MOE_NRT_STATUS_ the status. */
#define MOE_NRT_FUNCTION_LIST(R, O)                                                                                    \
  R(MOE_NRT_STATUS_, nrt_init, (MOE_NRT_(framework_type) framework, const char *fw_version, const char *fal_version))  \
  R(void, nrt_close, (void))                                                                                           \
  R(MOE_NRT_STATUS_, nrt_load, (const void *neff, size_t size, int32_t vnc, int32_t vnc_count,                         \
                                MOE_NRT_(model) **model))                                                              \
  R(MOE_NRT_STATUS_, nrt_unload, (MOE_NRT_(model) *model))                                                             \
  R(MOE_NRT_STATUS_, nrt_get_model_tensor_info, (MOE_NRT_(model) *model, MOE_NRT_(tensor_info_array) **info))          \
  R(MOE_NRT_STATUS_, nrt_free_model_tensor_info, (MOE_NRT_(tensor_info_array) *info))                                  \
  R(MOE_NRT_STATUS_, nrt_allocate_tensor_set, (MOE_NRT_(tensor_set) **set))                                            \
  R(void, nrt_destroy_tensor_set, (MOE_NRT_(tensor_set) **set))                                                        \
  R(MOE_NRT_STATUS_, nrt_add_tensor_to_tensor_set, (MOE_NRT_(tensor_set) *set, const char *name,                       \
                                                    MOE_NRT_(tensor) *tensor))                                         \
  R(MOE_NRT_STATUS_, nrt_tensor_allocate, (MOE_NRT_(tensor_placement) placement, int vnc, size_t size,                 \
                                           const char *name, MOE_NRT_(tensor) **tensor))                               \
  R(void, nrt_tensor_free, (MOE_NRT_(tensor) **tensor))                                                                \
  R(MOE_NRT_STATUS_, nrt_tensor_read, (const MOE_NRT_(tensor) *tensor, void *to, size_t offset, size_t size))          \
  R(MOE_NRT_STATUS_, nrt_tensor_write, (MOE_NRT_(tensor) *tensor, const void *from, size_t offset, size_t size))       \
  R(MOE_NRT_STATUS_, nrt_execute, (MOE_NRT_(model) *model, const MOE_NRT_(tensor_set) *in, MOE_NRT_(tensor_set) *out)) \
  O(MOE_NRT_STATUS_, nrt_tensor_memset, (MOE_NRT_(tensor) *tensor, uint64_t offset, int value, size_t size))           \
  O(MOE_NRT_STATUS_, nrt_tensor_copy, (const MOE_NRT_(tensor) *from, size_t from_offset, MOE_NRT_(tensor) *to,         \
                                       size_t to_offset, size_t size))                                                 \
  O(MOE_NRT_STATUS_, nrt_tensor_allocate_slice, (const MOE_NRT_(tensor) *source, size_t offset, size_t size,           \
                                                 const char *name, MOE_NRT_(tensor) **slice))                          \
  O(MOE_NRT_STATUS_, nrt_tensor_allocate_empty, (const char *name, MOE_NRT_(tensor) **tensor))                         \
  O(MOE_NRT_STATUS_, nrt_tensor_attach_buffer, (MOE_NRT_(tensor) *tensor, void *buffer, size_t size))                  \
  O(size_t, nrt_tensor_get_size, (const MOE_NRT_(tensor) *tensor))                                                     \
  O(void *, nrt_tensor_get_va, (const MOE_NRT_(tensor) *tensor))                                                       \
  O(MOE_NRT_STATUS_, nrt_tensor_get_device_allocation_info, (const MOE_NRT_(tensor) *tensor,                           \
                                                            MOE_NRT_(tensor_device_allocation_info) *info))            \
  O(MOE_NRT_STATUS_, nrt_tensor_read_batch, (const MOE_NRT_(tensor_batch) *batches, uint64_t count, bool unsafe))      \
  O(MOE_NRT_STATUS_, nrt_tensor_write_batch, (const MOE_NRT_(tensor_batch) *batches, uint64_t count, bool unsafe))     \
  O(MOE_NRT_STATUS_, nrt_get_tensor_from_tensor_set, (MOE_NRT_(tensor_set) *set, const char *name,                     \
                                                      MOE_NRT_(tensor) **tensor))                                      \
  O(MOE_NRT_STATUS_, nrt_execute_repeat, (MOE_NRT_(model) *model, const MOE_NRT_(tensor_set) *in,                      \
                                          MOE_NRT_(tensor_set) *out, int repeat))                                      \
  O(MOE_NRT_STATUS_, nrt_get_model_info, (const MOE_NRT_(model) *model, MOE_NRT_(model_info) *info, size_t size_in,    \
                                          size_t *size_out))                                                           \
  O(MOE_NRT_STATUS_, nrt_get_instance_info, (MOE_NRT_(instance_info) *info, size_t size))                              \
  O(MOE_NRT_STATUS_, nrt_get_version, (MOE_NRT_(version) *version, size_t size))                                       \
  O(MOE_NRT_STATUS_, nrt_get_total_vnc_count, (uint32_t *count))                                                       \
  O(MOE_NRT_STATUS_, nrt_get_visible_vnc_count, (uint32_t *count))                                                     \
  O(MOE_NRT_STATUS_, nrt_get_vnc_memory_stats, (uint32_t vnc, MOE_NRT_(vnc_memory_stats) *stats, size_t size_in,       \
                                                size_t *size_out))                                                     \
  O(MOE_NRT_STATUS_, nrt_profile_start, (MOE_NRT_(model) *model, const char *file))                                    \
  O(MOE_NRT_STATUS_, nrt_profile_stop, (const char *file))                                                             \
  O(const char *, nrt_get_status_as_str, (MOE_NRT_STATUS_ status))

/* Newer ones, of which the public headers have no prototype: whether they are there is all that is known. */
#define MOE_NRT_UNDECLARED_LIST(X) X(nrt_tensor_cast) X(nrt_tensor_compute)

#define MOE_NRT_STATUS_ moe_nrt_status
#define MOE_NRT_(name)  moe_nrt_##name
typedef struct moe_nrt_functions { /* NULL: this libnrt does not have it */
#define MOE_NRT_MEMBER_(result, name, arguments) result(*name) arguments;
  MOE_NRT_FUNCTION_LIST(MOE_NRT_MEMBER_, MOE_NRT_MEMBER_)
#undef MOE_NRT_MEMBER_
#define MOE_NRT_MEMBER_(name) void (*name)(void);
  MOE_NRT_UNDECLARED_LIST(MOE_NRT_MEMBER_)
#undef MOE_NRT_MEMBER_
} moe_nrt_functions;
#undef MOE_NRT_STATUS_
#undef MOE_NRT_

#ifdef MOE_NEURON_USE_SDK_HEADERS
#include "sdk_check.h"
#endif

#endif
