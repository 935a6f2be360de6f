/* options.h: the command line. Needs text.h first. */
#ifndef EXAMPLE_OPTIONS_H
#define EXAMPLE_OPTIONS_H

#include <inttypes.h>
#include <unistd.h>

typedef struct options {
  const char *dtype;
  int64_t steps;
  uint64_t seed;
  int threads;
} options;

static const char USAGE[] =
    "usage: train_lm [--dtype bf16|fp16|f32|mxfp8] [--steps N] [--seed S] [--threads N] [FILE...]\n"
    "Trains on the bytes of the files; without any on the sources of this repository, from its root.";

static int64_t whole_number(const char *option, const char *value, int64_t least, int64_t most) {
  char *end;
  errno = 0;
  long long number = strtoll(value, &end, 10);
  if (errno || end == value || *end || number < least || number > most)
    die(2, "%s must be a whole number from %" PRId64 " to %" PRId64 ", not \"%s\"", option, least, most, value);
  return number;
}

static void read_option(options *o, const char *option, const char *value, int most_threads) {
  enum { DTYPE, STEPS, SEED, THREADS, KNOWN };
  static const char *const names[KNOWN] = {"--dtype", "--steps", "--seed", "--threads"};
  int which = 0;
  while (which < KNOWN && strcmp(option, names[which])) which++;
  if (which == KNOWN) die(2, "unknown option %s\n%s", option, USAGE);
  if (!value) die(2, "%s needs a value\n%s", option, USAGE);
  if (which == DTYPE) o->dtype = value;
  if (which == STEPS) o->steps = whole_number(option, value, 1, 10000000);
  if (which == SEED) o->seed = (uint64_t)whole_number(option, value, 0, INT64_MAX);
  if (which == THREADS) o->threads = (int)whole_number(option, value, 1, most_threads);
}

/* What is not given keeps its value; threads default to the processors that are online. */
static void read_arguments(int argc, char **argv, int most_threads, options *o, text *t) {
  static const char *const sources[] = {"moe.h", "README.md", "bench", "examples", "moe", "tests"};
  long cpus = sysconf(_SC_NPROCESSORS_ONLN);
  o->threads = cpus < 1 ? 1 : cpus > most_threads ? most_threads : (int)cpus;
  int i = 1;
  while (i < argc && argv[i][0] == '-' && strcmp(argv[i], "--")) {
    if (!strcmp(argv[i], "--help")) puts(USAGE), exit(0);
    read_option(o, argv[i], argv[i + 1], most_threads);
    i += 2;
  }
  if (i < argc && !strcmp(argv[i], "--")) i++;
  if (i >= argc)
    for (size_t s = 0; s < sizeof sources / sizeof *sources; s++) text_add_tree(t, sources[s]);
  for (; i < argc; i++) text_add_file(t, argv[i]);
  text_split(t);
  if (t->held_out_count == 0)
    die(2, "%zu bytes of text are too few, %d are needed%s", t->size, HOLD_OUT_EVERY / 2 * CHUNK + CONTEXT + 1,
        t->files ? "" : " (no file was named, and this is not the root of the repository)");
}

#endif
