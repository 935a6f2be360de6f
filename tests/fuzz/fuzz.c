/* fuzz: any arguments to every converter, of routings too, to grouped GEMM and to layers of quantised weights: what is
   accepted must be right and stay inside memory of exactly the right size; what is refused must say why and write
   nothing. libFuzzer's entry; with -DFUZZ_MAIN a program that feeds it random bytes, "fuzz COUNT". */
#include "elements.h"
#include "face.h"
#include "grouped.h"
#include "layers.h"
#include "layouts.h"
#include "mlp.h"
#include "mx.h"
#include "routing.h"
#include "groups.h"
#include "scaled.h"
#include "tune.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static void (*const kinds[])(fuzz_input *, moe_context *) = {
      fuzz_elements,    fuzz_layouts, fuzz_vectors, fuzz_mx,    fuzz_mx_back,    fuzz_scaled,
      fuzz_scaled_back, fuzz_layers,  fuzz_routing, fuzz_groups, fuzz_ranks, fuzz_face_layer, fuzz_tune,
      fuzz_grouped,     fuzz_matmul,  fuzz_mlp,
  };
  fuzz_input in = {data, size, 0, 1};
  moe_context ctx;
  memset(&ctx, 0, sizeof ctx);
  kinds[fuzz_pick(&in, (int)(sizeof kinds / sizeof *kinds))](&in, &ctx);
  return 0;
}

#ifdef FUZZ_MAIN
int main(int argc, char **argv) {
  const long count = argc > 1 ? strtol(argv[1], NULL, 10) : 1000;
  uint64_t rng = 5;
  for (long i = 0; i < count; i++) {
    uint8_t data[96];
    for (size_t j = 0; j < sizeof data; j++) data[j] = (uint8_t)test_random(&rng);
    LLVMFuzzerTestOneInput(data, sizeof data);
  }
  printf("%ld inputs\n", count);
  return 0;
}
#endif
