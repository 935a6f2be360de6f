/* The MoE layers of real models: their shapes, without what else the model has (shared experts, biases, clamps).
   peers/compare.py reads these two tables, too. */
#ifndef MOE_BENCH_MODELS_H
#define MOE_BENCH_MODELS_H

typedef struct bench_model {
  const char *name;
  int64_t H, I, E, K;
} bench_model;

static const bench_model bench_models[] = {
    {"Mixtral 8x7B", 4096, 14336, 8, 2},     {"Qwen3-30B-A3B", 2048, 768, 128, 8}, {"OLMoE-1B-7B", 2048, 1024, 64, 8},
    {"DeepSeek-V2-Lite", 2048, 1408, 64, 6}, {"gpt-oss-20b", 2880, 2880, 32, 4},
};

enum { BENCH_MODELS = sizeof bench_models / sizeof *bench_models };

/* What is timed of each. */
typedef struct suite_case {
  const char *name, *op;
  int64_t T;
} suite_case;

static const suite_case suite_cases[] = {
    {"forward, T=1024", "fwd", 1024},
    {"backward, T=1024", "bwd", 1024},
    {"decode, T=1", "decode", 1},
    {"decode, T=4", "decode", 4},
};

enum { SUITE_CASES = sizeof suite_cases / sizeof *suite_cases };

#endif
