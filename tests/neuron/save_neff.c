/* save_neff.c: the NEFF that examples/neuron_forward.c wants, for the stand-in: "save_neff FILE". It is made of the
   example itself, whose shapes it has. */
#define main example_main
#include "../../examples/neuron_forward.c"
#undef main

#include "neff.h"

static const struct {
  const char *name;
  size_t offset;
} fields[] = {
#define LAYER_(member) {#member, offsetof(moe_blockwise_mm_fwd_args, layer.member)}
    LAYER_(hidden_states), LAYER_(expert_affinities_masked), LAYER_(gate_up_proj_weight), LAYER_(down_proj_weight),
    LAYER_(token_position_to_id), LAYER_(block_to_expert), {"output", offsetof(moe_blockwise_mm_fwd_args, output)}};

int main(int argc, char **argv) {
  static standin_neff neff;
  moe_context ctx = {.allocate = take, .release = give};
  moe_neuron_table table;
  const moe_blockwise_mm_fwd_args args = {.layer = {.T = T, .H = H, .I = I, .E = E, .N = N, .B = B, .max_rows = T * K,
      .hidden_states = x, .expert_affinities_masked = affinities, .gate_up_proj_weight = gate_up,
      .down_proj_weight = down, .token_position_to_id = &ids[0][0], .block_to_expert = experts, .skip_token = 1},
      .device = {.spec = MOE_CTE_SHARD_ON_I}, .output = y};
  standin_kernel *k = &neff.kernel;
  if (argc != 2 || prepare(&ctx) || moe_neuron_describe_blockwise_mm_fwd_bf16(&ctx, &args, NULL, &table)) return 1;
  neff.header.pkg_version = 2, neff.header.header_size = sizeof neff.header;
  neff.header.data_size = sizeof neff.kernel, neff.header.lnc_size = 2;
  k->op = STANDIN_FORWARD, k->dtype = MOE_DTYPE_BF16;
  memcpy(k->args, &args, sizeof args);
  for (int32_t i = 0; i < table.count; i++) {
    const moe_neuron_operand *o = &table.operand[i];
    standin_tensor *t = &k->tensor[k->count];
    if (!o->data) continue;
    k->count++;
    snprintf(t->name, sizeof t->name, "%s", o->name);
    t->usage = o->use == MOE_NEURON_OUTPUT, t->dtype = (uint32_t)o->dtype, t->size = o->bytes;
    for (size_t f = 0; f < sizeof fields / sizeof *fields; f++)
      if (!strcmp(fields[f].name, o->name)) t->offset = (uint32_t)fields[f].offset;
    memset(k->args + t->offset, 0, sizeof(void *));
  }
  FILE *file = fopen(argv[1], "wb");
  return !file || fwrite(&neff, sizeof neff, 1, file) != 1 || fclose(file) != 0;
}
