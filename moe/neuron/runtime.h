/* libnrt: loaded, initialised, asked what it is. */
#ifndef MOE_NEURON_RUNTIME_H
#define MOE_NEURON_RUNTIME_H

MOE_FN moe_status moe_neuron_check_open_(moe_context *ctx, const moe_neuron *neuron) {
  if (!neuron) return moe_neuron_null_(ctx, "neuron");
  if (neuron->library) return MOE_OK;
  return moe_neuron_fail_(ctx, MOE_ERROR_NO_RUNTIME, "%s", neuron->why[0] ? neuron->why : "neuron is not open");
}

/* Closes the library after an error, which becomes `why`. The sentence may be in `why` already. */
MOE_FN moe_status moe_neuron_open_failed_(moe_context *ctx, moe_neuron *neuron, moe_status status) {
  char why[sizeof neuron->why];
  memcpy(why, neuron->why, sizeof why);
  if (neuron->library) (void)dlclose(neuron->library);
  memset(neuron, 0, sizeof *neuron);
  memcpy(neuron->why, why, sizeof why);
  return moe_neuron_fail_(ctx, status, "%s", why);
}

MOE_FN void *moe_neuron_library_(const char *path, char *why, size_t bytes) {
  static const char *const known[] = {"libnrt.so.1", "libnrt.so", "/opt/aws/neuron/lib/libnrt.so.1",
                                      "/opt/aws/neuron/lib/libnrt.so"};
  for (size_t i = 0; i < (path ? 1 : sizeof known / sizeof *known); i++) {
    void *library = dlopen(path ? path : known[i], RTLD_NOW | RTLD_LOCAL);
    if (library) return library;
  }
  const char *reason = dlerror();
  (void)snprintf(why, bytes, "libnrt was not found: %s", path && reason ? reason : "install aws-neuronx-runtime-lib");
  return NULL;
}

/* Fills in the functions. Returns the name of one that must be there and is not, or NULL. */
MOE_FN const char *moe_neuron_resolve_(moe_neuron *neuron) {
  const char *missing = NULL;
  void *symbol; /* becomes a function pointer by its bits, as POSIX has it */
#define MOE_NRT_OPTIONAL_(result, name, arguments) \
  symbol = dlsym(neuron->library, #name);          \
  memcpy(&neuron->nrt.name, &symbol, sizeof symbol);
#define MOE_NRT_REQUIRED_(result, name, arguments) \
  MOE_NRT_OPTIONAL_(result, name, arguments)       \
  if (!symbol && !missing) missing = #name;
#define MOE_NRT_UNDECLARED_(name) MOE_NRT_OPTIONAL_(, name, )
  MOE_NRT_FUNCTION_LIST(MOE_NRT_REQUIRED_, MOE_NRT_OPTIONAL_)
  MOE_NRT_UNDECLARED_LIST(MOE_NRT_UNDECLARED_)
#undef MOE_NRT_UNDECLARED_
#undef MOE_NRT_REQUIRED_
#undef MOE_NRT_OPTIONAL_
  return missing;
}

moe_status moe_neuron_open(moe_context *ctx, moe_neuron *neuron, const char *path) {
  if (!neuron) return moe_neuron_null_(ctx, "neuron");
  memset(neuron, 0, sizeof *neuron);
  neuron->library = moe_neuron_library_(path, neuron->why, sizeof neuron->why);
  if (!neuron->library) return moe_neuron_open_failed_(ctx, neuron, MOE_ERROR_NO_RUNTIME);
  const char *missing = moe_neuron_resolve_(neuron);
  if (missing) {
    (void)snprintf(neuron->why, sizeof neuron->why, "libnrt lacks %s: install a newer aws-neuronx-runtime-lib",
                   missing);
    return moe_neuron_open_failed_(ctx, neuron, MOE_ERROR_NO_RUNTIME);
  }
  const moe_nrt_status status = neuron->nrt.nrt_init(MOE_NRT_FRAMEWORK_TYPE_NO_FW, "", "");
  if (status == MOE_NRT_SUCCESS) return moe_neuron_succeed_(ctx);
  (void)snprintf(neuron->why, sizeof neuron->why, "nrt_init returns %s (%d): %s", moe_neuron_status_str(status),
                 (int)status, moe_neuron_advice(status));
  return moe_neuron_open_failed_(ctx, neuron, moe_neuron_status(status));
}

void moe_neuron_close(moe_neuron *neuron) {
  if (!neuron || !neuron->library) return;
  neuron->nrt.nrt_close();
  (void)dlclose(neuron->library);
  memset(neuron, 0, sizeof *neuron);
}

/* Physical cores of a logical one; 0 = not known. */
MOE_FN uint32_t moe_neuron_lnc_(uint32_t family) {
  const char *set = getenv("NEURON_LOGICAL_NC_CONFIG");
  if (set && (set[0] == '1' || set[0] == '2') && !set[1]) return (uint32_t)(set[0] - '0');
  if (set) return 0;
  switch (family) {
    case MOE_NRT_INSTANCE_TRN1:
    case MOE_NRT_INSTANCE_TRN1N:
    case MOE_NRT_INSTANCE_INF2:
    case MOE_NRT_INSTANCE_INF2E: return 1;
    default: return family >= MOE_NRT_INSTANCE_TRN2 && family <= MOE_NRT_INSTANCE_TRN2UAC ? 2 : 0;
  }
}

moe_status moe_neuron_get_info(moe_context *ctx, const moe_neuron *neuron, moe_neuron_info *info) {
  moe_nrt_instance_info instance = {0};
  moe_nrt_version version = {0};
  MOE_NEURON_TRY_(moe_neuron_check_open_(ctx, neuron));
  if (!info) return moe_neuron_null_(ctx, "info");
  memset(info, 0, sizeof *info);
  const moe_nrt_functions *nrt = &neuron->nrt;
  if (nrt->nrt_get_version) MOE_NEURON_TRY_(MOE_NEURON_CALL_(ctx, neuron, nrt_get_version, &version, sizeof version));
  if (nrt->nrt_get_instance_info)
    MOE_NEURON_TRY_(MOE_NEURON_CALL_(ctx, neuron, nrt_get_instance_info, &instance, sizeof instance));
  if (nrt->nrt_get_total_vnc_count)
    MOE_NEURON_TRY_(MOE_NEURON_CALL_(ctx, neuron, nrt_get_total_vnc_count, &info->cores));
  if (nrt->nrt_get_visible_vnc_count)
    MOE_NEURON_TRY_(MOE_NEURON_CALL_(ctx, neuron, nrt_get_visible_vnc_count, &info->visible_cores));
  info->version[0] = version.rt_major, info->version[1] = version.rt_minor;
  info->version[2] = version.rt_patch, info->version[3] = version.rt_maintenance;
  info->family = instance.family;
  memcpy(info->arch_name, instance.arch_name, sizeof instance.arch_name);
  memcpy(info->device_revision, instance.device_revision, sizeof instance.device_revision);
  info->lnc = moe_neuron_lnc_(instance.family);
  info->has_tensor_cast = nrt->nrt_tensor_cast != NULL;
  info->has_tensor_compute = nrt->nrt_tensor_compute != NULL;
  return moe_neuron_succeed_(ctx);
}

moe_status moe_neuron_memory(moe_context *ctx, const moe_neuron *neuron, uint32_t core,
                             moe_nrt_vnc_memory_stats *stats) {
  size_t written = 0;
  MOE_NEURON_TRY_(moe_neuron_check_open_(ctx, neuron));
  if (!stats) return moe_neuron_null_(ctx, "stats");
  MOE_NEURON_TRY_(MOE_NEURON_HAS_(ctx, neuron, nrt_get_vnc_memory_stats));
  memset(stats, 0, sizeof *stats);
  MOE_NEURON_TRY_(MOE_NEURON_CALL_(ctx, neuron, nrt_get_vnc_memory_stats, core, stats, sizeof *stats, &written));
  return moe_neuron_succeed_(ctx);
}

#endif
