/* The ABI in abi.h against the SDK's own headers. */
#ifndef MOE_NEURON_SDK_CHECK_H
#define MOE_NEURON_SDK_CHECK_H

#include <nrt/nrt.h>
#include <nrt/nrt_experimental.h>
#include <nrt/nrt_profile.h>
#include <nrt/nrt_status.h>
#include <nrt/nrt_version.h>

#ifdef __cplusplus
#define MOE_NRT_SAME_(ours, theirs) static_assert((long)(ours) == (long)(theirs), #theirs);
#else
#define MOE_NRT_SAME_(ours, theirs) _Static_assert((long)(ours) == (long)(theirs), #theirs);
#endif

MOE_NRT_SAME_(2, NRT_MAJOR_VERSION)

/* values */
#define MOE_NRT_CHECK_(name, value, status, advice) MOE_NRT_SAME_(MOE_NRT_##name, NRT_##name)
MOE_NRT_STATUS_LIST(MOE_NRT_CHECK_)
#undef MOE_NRT_CHECK_
#define MOE_NRT_CHECK_(name, value, bytes) MOE_NRT_SAME_(MOE_NRT_DTYPE_##name, NRT_DTYPE_##name)
MOE_NRT_DTYPE_LIST(MOE_NRT_CHECK_)
#undef MOE_NRT_CHECK_
#define MOE_NRT_CHECK_(name, value) MOE_NRT_SAME_(MOE_NRT_##name, NRT_##name)
MOE_NRT_TENSOR_PLACEMENT_LIST(MOE_NRT_CHECK_)
MOE_NRT_TENSOR_USAGE_LIST(MOE_NRT_CHECK_)
MOE_NRT_FRAMEWORK_TYPE_LIST(MOE_NRT_CHECK_)
MOE_NRT_INSTANCE_LIST(MOE_NRT_CHECK_)
#undef MOE_NRT_CHECK_

/* structs */
#define MOE_NRT_SIZE_(name) MOE_NRT_SAME_(sizeof(moe_nrt_##name), sizeof(nrt_##name##_t))
#define MOE_NRT_AT_(name, member)                                                                              \
  MOE_NRT_SAME_(offsetof(moe_nrt_##name, member), offsetof(nrt_##name##_t, member))                            \
  MOE_NRT_SAME_(sizeof(((moe_nrt_##name *)0)->member), sizeof(((nrt_##name##_t *)0)->member))
MOE_NRT_SAME_(sizeof(moe_nrt_status), sizeof(NRT_STATUS))
MOE_NRT_SIZE_(dtype)
MOE_NRT_SIZE_(tensor_placement)
MOE_NRT_SIZE_(tensor_usage)
MOE_NRT_SIZE_(framework_type)
MOE_NRT_SIZE_(instance_info)
MOE_NRT_AT_(instance_info, family)
MOE_NRT_AT_(instance_info, size)
MOE_NRT_AT_(instance_info, arch_name)
MOE_NRT_AT_(instance_info, device_revision)
MOE_NRT_SIZE_(version)
MOE_NRT_AT_(version, rt_major)
MOE_NRT_AT_(version, rt_minor)
MOE_NRT_AT_(version, rt_patch)
MOE_NRT_AT_(version, rt_maintenance)
MOE_NRT_AT_(version, rt_detail)
MOE_NRT_AT_(version, git_hash)
MOE_NRT_SIZE_(tensor_info)
MOE_NRT_AT_(tensor_info, name)
MOE_NRT_AT_(tensor_info, usage)
MOE_NRT_AT_(tensor_info, size)
MOE_NRT_AT_(tensor_info, dtype)
MOE_NRT_AT_(tensor_info, shape)
MOE_NRT_AT_(tensor_info, ndim)
MOE_NRT_AT_(tensor_info_array, tensor_count)
MOE_NRT_SAME_(offsetof(moe_nrt_tensor_info_array, tensor_array), offsetof(nrt_tensor_info_array_t, tensor_array))
MOE_NRT_AT_(model_info, vnc)
MOE_NRT_SIZE_(vnc_memory_stats)
MOE_NRT_AT_(vnc_memory_stats, bytes_used)
MOE_NRT_AT_(vnc_memory_stats, bytes_limit)
MOE_NRT_SIZE_(tensor_device_allocation_info)
MOE_NRT_AT_(tensor_device_allocation_info, physical_address)
MOE_NRT_AT_(tensor_device_allocation_info, size)
MOE_NRT_AT_(tensor_device_allocation_info, hbm_index)
MOE_NRT_SIZE_(tensor_batch_op)
MOE_NRT_AT_(tensor_batch_op, offset)
MOE_NRT_AT_(tensor_batch_op, size)
MOE_NRT_AT_(tensor_batch_op, buffer)
MOE_NRT_SIZE_(tensor_batch)
MOE_NRT_AT_(tensor_batch, tensor)
MOE_NRT_AT_(tensor_batch, ops)
MOE_NRT_AT_(tensor_batch, num_ops)
#undef MOE_NRT_AT_
#undef MOE_NRT_SIZE_
#undef MOE_NRT_SAME_

/* Prototypes: each function is declared again, with its types. A declaration that does not agree is an error. */
#ifdef __cplusplus
extern "C" {
#endif
#define MOE_NRT_STATUS_                           NRT_STATUS
#define MOE_NRT_(name)                            nrt_##name##_t
#define MOE_NRT_AGAIN_(result, name, arguments) result name arguments;
MOE_NRT_FUNCTION_LIST(MOE_NRT_AGAIN_, MOE_NRT_AGAIN_)
#undef MOE_NRT_AGAIN_
#undef MOE_NRT_
#undef MOE_NRT_STATUS_
#ifdef __cplusplus
}
#endif

#endif
