/* tune.h: any text to moe_tune_load; what it makes of it comes back from moe_tune_save. */
#ifndef MOE_FUZZ_TUNE_H
#define MOE_FUZZ_TUNE_H

#include "input.h"
#include "support/random.h"

/* Words of the format, seldom other bytes. */
static inline size_t fuzz_text(fuzz_input *in, char *text, size_t most) {
  static const char *const words[] = {"moe-tune 1\n",
                                      "\n",
                                      "grouped_gemm ",
                                      "grouped_gemm_dx f32 avx2 Core-1-2 E=1 N=2 K=3 ",
                                      "f32 ",
                                      "bf16 ",
                                      "avx512 ",
                                      "E=",
                                      "N=",
                                      "kc=",
                                      "small_m=-",
                                      "123 ",
                                      "99999999999999999999 ",
                                      "=",
                                      "-",
                                      "x=1 "};
  size_t length = 0;
  for (int i = 0; i < 40; i++) {
    const int pick = (int)fuzz_take(in, 1);
    const char one[2] = {(char)pick, 0}, *word = i == 0 && pick < 240 ? words[0] : pick < 224 ? words[pick % 16] : one;
    const size_t size = word == one ? 1 : strlen(word);
    if (length + size > most) break;
    memcpy(text + length, word, size);
    length += size;
  }
  return length;
}

static inline void fuzz_tune(fuzz_input *in, moe_context *ctx) {
  enum { MOST = 400, ENTRIES = 5 };
  moe_tune_entry entries[ENTRIES], again[ENTRIES];
  moe_tune_table table = {entries, 0, ENTRIES}, other = {again, 0, ENTRIES};
  char words[MOST], text[4000], back[4000];
  size_t length = fuzz_text(in, words, MOST), saved, second;
  char *exact = (char *)malloc(length ? length : 1); /* one byte more would be found */
  if (exact == NULL) abort();
  memcpy(exact, words, length);
  int64_t skipped = -1;
  const moe_status status = moe_tune_load(ctx, &table, exact, length, &skipped);
  free(exact);
  if ((status != MOE_OK) != (strlen(ctx->message) > 8)) fuzz_fail("a message", ctx);
  if (status != MOE_OK && (table.count != 0 || skipped != -1)) fuzz_fail("an error that wrote", ctx);
  if (moe_tune_save(ctx, &table, text, sizeof text, &saved) != MOE_OK) fuzz_fail("save", ctx);
  if (moe_tune_load(ctx, &other, text, saved, &skipped) != MOE_OK || skipped != 0)
    fuzz_fail("load what was saved", ctx);
  if (moe_tune_save(ctx, &other, back, sizeof back, &second) != MOE_OK) fuzz_fail("save again", ctx);
  if (second != saved || memcmp(text, back, saved) != 0) fuzz_fail("another text", ctx);
}

#endif /* MOE_FUZZ_TUNE_H */
