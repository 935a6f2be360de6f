/* nrt.h: what libnrt's synchronous interface is (NRT 2.0), as far as moe_neuron.h uses it, written down from its
   documentation. It is not the SDK's header. tests/compile_checks.sh compares moe/neuron/abi.h with it, by the same
   checks that compare it with the SDK's. */
#ifndef TEST_NRT_H
#define TEST_NRT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define NRT_MAJOR_VERSION 2

typedef enum {
  NRT_SUCCESS = 0, NRT_FAILURE = 1, NRT_INVALID = 2, NRT_INVALID_HANDLE = 3, NRT_RESOURCE = 4, NRT_TIMEOUT = 5,
  NRT_HW_ERROR = 6, NRT_QUEUE_FULL = 7, NRT_LOAD_NOT_ENOUGH_NC = 9, NRT_UNSUPPORTED_NEFF_VERSION = 10,
  NRT_FAIL_HOST_MEM_ALLOC = 11, NRT_UNINITIALIZED = 13, NRT_CLOSED = 14, NRT_QUEUE_EMPTY = 15,
  NRT_EXEC_UNIT_UNRECOVERABLE = 101, NRT_EXEC_BAD_INPUT = 1002, NRT_EXEC_COMPLETED_WITH_NUM_ERR = 1003,
  NRT_EXEC_COMPLETED_WITH_ERR = 1004, NRT_EXEC_NC_BUSY = 1005, NRT_EXEC_OOB = 1006, NRT_COLL_PENDING = 1100,
  NRT_EXEC_HW_ERR_COLLECTIVES = 1200, NRT_EXEC_HW_ERR_HBM_UE = 1201, NRT_EXEC_HW_ERR_NC_UE = 1202,
  NRT_EXEC_HW_ERR_DMA_ABORT = 1203, NRT_EXEC_SW_NQ_OVERFLOW = 1204, NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE = 1205,
  NRT_NETWORK_PROXY_FAILURE = 1206
} NRT_STATUS;

typedef enum {
  NRT_DTYPE_UNKNOWN = 0, NRT_DTYPE_UINT64 = 1, NRT_DTYPE_INT8 = 2, NRT_DTYPE_UINT8 = 3, NRT_DTYPE_INT16 = 4,
  NRT_DTYPE_UINT16 = 5, NRT_DTYPE_BFLOAT16 = 6, NRT_DTYPE_FLOAT16 = 7, NRT_DTYPE_INT32 = 8, NRT_DTYPE_UINT32 = 9,
  NRT_DTYPE_FLOAT32 = 10, NRT_DTYPE_FP32R = 11, NRT_DTYPE_INT64 = 12, NRT_DTYPE_FP8_E3 = 13, NRT_DTYPE_FP8_E4 = 14,
  NRT_DTYPE_FP8_E5 = 15
} nrt_dtype_t;
typedef enum {
  NRT_TENSOR_PLACEMENT_DEVICE = 0, NRT_TENSOR_PLACEMENT_HOST = 1, NRT_TENSOR_PLACEMENT_VIRTUAL = 2
} nrt_tensor_placement_t;
typedef enum { NRT_TENSOR_USAGE_INPUT = 0, NRT_TENSOR_USAGE_OUTPUT = 1 } nrt_tensor_usage_t;
typedef enum {
  NRT_FRAMEWORK_TYPE_INVALID = 0, NRT_FRAMEWORK_TYPE_NO_FW = 1, NRT_FRAMEWORK_TYPE_TENSORFLOW = 2,
  NRT_FRAMEWORK_TYPE_PYTORCH = 3, NRT_FRAMEWORK_TYPE_MXNET = 4, NRT_FRAMEWORK_TYPE_PRECHECK = 5
} nrt_framework_type_t;
enum {
  NRT_INSTANCE_UNKNOWN = 0, NRT_INSTANCE_INF1 = 1, NRT_INSTANCE_TRN1 = 2, NRT_INSTANCE_TRN1N = 3,
  NRT_INSTANCE_INF2 = 4, NRT_INSTANCE_TRN2 = 5, NRT_INSTANCE_TRN2N = 6, NRT_INSTANCE_INF2E = 7,
  NRT_INSTANCE_TRN2P = 8, NRT_INSTANCE_TRN2U = 9, NRT_INSTANCE_TRN2E = 10, NRT_INSTANCE_TRN2EU = 11,
  NRT_INSTANCE_TRN2AC = 12, NRT_INSTANCE_TRN2UAC = 13, NRT_INSTANCE_TRN3 = 14, NRT_INSTANCE_TRN3PDS98 = 15
};

typedef struct nrt_model nrt_model_t;
typedef struct nrt_tensor nrt_tensor_t;
typedef void nrt_tensor_set_t;
typedef struct { uint32_t family, size; char arch_name[16], device_revision[8]; } nrt_instance_info_t;
typedef struct {
  uint64_t rt_major, rt_minor, rt_patch, rt_maintenance;
  char rt_detail[128], git_hash[64];
} nrt_version_t;
typedef struct {
  char name[256];
  nrt_tensor_usage_t usage;
  size_t size;
  nrt_dtype_t dtype;
  uint32_t *shape;
  uint32_t ndim;
} nrt_tensor_info_t;
typedef struct { uint64_t tensor_count; nrt_tensor_info_t tensor_array[1]; } nrt_tensor_info_array_t;
typedef struct { uint32_t vnc; } nrt_model_info_t;
typedef struct { size_t bytes_used, bytes_limit; } nrt_vnc_memory_stats_t;
typedef struct { uint64_t physical_address; size_t size; int hbm_index; } nrt_tensor_device_allocation_info_t;
typedef struct { uint64_t offset, size; void *buffer; } nrt_tensor_batch_op_t;
typedef struct {
  const nrt_tensor_t *tensor;
  const nrt_tensor_batch_op_t *ops;
  uint32_t num_ops;
} nrt_tensor_batch_t;

#ifdef __cplusplus
extern "C" {
#endif
NRT_STATUS nrt_init(nrt_framework_type_t framework, const char *fw_version, const char *fal_version);
void nrt_close(void);
NRT_STATUS nrt_load(const void *neff, size_t size, int32_t vnc, int32_t vnc_count, nrt_model_t **model);
NRT_STATUS nrt_unload(nrt_model_t *model);
NRT_STATUS nrt_get_model_tensor_info(nrt_model_t *model, nrt_tensor_info_array_t **info);
NRT_STATUS nrt_free_model_tensor_info(nrt_tensor_info_array_t *info);
NRT_STATUS nrt_get_model_info(const nrt_model_t *model, nrt_model_info_t *info, size_t size_in, size_t *size_out);
NRT_STATUS nrt_allocate_tensor_set(nrt_tensor_set_t **set);
void nrt_destroy_tensor_set(nrt_tensor_set_t **set);
NRT_STATUS nrt_add_tensor_to_tensor_set(nrt_tensor_set_t *set, const char *name, nrt_tensor_t *tensor);
NRT_STATUS nrt_get_tensor_from_tensor_set(nrt_tensor_set_t *set, const char *name, nrt_tensor_t **tensor);
NRT_STATUS nrt_execute(nrt_model_t *model, const nrt_tensor_set_t *in, nrt_tensor_set_t *out);
NRT_STATUS nrt_execute_repeat(nrt_model_t *model, const nrt_tensor_set_t *in, nrt_tensor_set_t *out, int repeat);
NRT_STATUS nrt_tensor_allocate(nrt_tensor_placement_t placement, int vnc, size_t size, const char *name,
                               nrt_tensor_t **tensor);
void nrt_tensor_free(nrt_tensor_t **tensor);
NRT_STATUS nrt_tensor_read(const nrt_tensor_t *tensor, void *to, size_t offset, size_t size);
NRT_STATUS nrt_tensor_write(nrt_tensor_t *tensor, const void *from, size_t offset, size_t size);
NRT_STATUS nrt_tensor_memset(nrt_tensor_t *tensor, uint64_t offset, int value, size_t size);
NRT_STATUS nrt_tensor_copy(const nrt_tensor_t *from, size_t from_offset, nrt_tensor_t *to, size_t to_offset,
                           size_t size);
NRT_STATUS nrt_tensor_allocate_slice(const nrt_tensor_t *source, size_t offset, size_t size, const char *name,
                                     nrt_tensor_t **slice);
NRT_STATUS nrt_tensor_allocate_empty(const char *name, nrt_tensor_t **tensor);
NRT_STATUS nrt_tensor_attach_buffer(nrt_tensor_t *tensor, void *buffer, size_t size);
size_t nrt_tensor_get_size(const nrt_tensor_t *tensor);
void *nrt_tensor_get_va(const nrt_tensor_t *tensor);
NRT_STATUS nrt_tensor_get_device_allocation_info(const nrt_tensor_t *tensor,
                                                 nrt_tensor_device_allocation_info_t *info);
NRT_STATUS nrt_tensor_read_batch(const nrt_tensor_batch_t *batches, uint64_t count, bool unsafe);
NRT_STATUS nrt_tensor_write_batch(const nrt_tensor_batch_t *batches, uint64_t count, bool unsafe);
NRT_STATUS nrt_get_instance_info(nrt_instance_info_t *info, size_t size);
NRT_STATUS nrt_get_version(nrt_version_t *version, size_t size);
NRT_STATUS nrt_get_total_vnc_count(uint32_t *count);
NRT_STATUS nrt_get_visible_vnc_count(uint32_t *count);
NRT_STATUS nrt_get_vnc_memory_stats(uint32_t vnc, nrt_vnc_memory_stats_t *stats, size_t size_in, size_t *size_out);
NRT_STATUS nrt_profile_start(nrt_model_t *model, const char *file);
NRT_STATUS nrt_profile_stop(const char *file);
const char *nrt_get_status_as_str(NRT_STATUS status);
#ifdef __cplusplus
}
#endif

#endif
