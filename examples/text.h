/* text.h: the bytes to learn from, and which of them are held out. */
#ifndef EXAMPLE_TEXT_H
#define EXAMPLE_TEXT_H

#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { CONTEXT = 16, CHUNK = 1024, HOLD_OUT_EVERY = 10, HELD_OUT_MAX = 65536, TEXT_MAX = 1 << 30 };

/* A position is the byte to predict; the CONTEXT bytes before it are the input. Every tenth chunk is held out. Only
   positions whose context lies in the same chunk are used, so that training never sees a held-out byte. */
typedef struct text {
  uint8_t *bytes;
  size_t size, room;
  int64_t files;
  int32_t *train, *held_out; /* positions */
  int64_t train_count, held_out_count;
} text;

_Noreturn static void die(int code, const char *format, ...) {
  va_list list;
  va_start(list, format);
  fputs("train_lm: ", stderr);
  vfprintf(stderr, format, list);
  fputc('\n', stderr);
  va_end(list);
  exit(code);
}

static void *zeroed(size_t count, size_t bytes) {
  void *memory = calloc(count ? count : 1, bytes);
  if (!memory) die(1, "out of memory");
  return memory;
}

static void text_add_file(text *t, const char *path) {
  FILE *file = fopen(path, "rb");
  if (!file) die(2, "cannot open %s: %s", path, strerror(errno));
  for (size_t got = 1; got > 0; t->size += got) {
    if (t->room - t->size < 1 << 16) {
      t->room = 2 * t->room + (1 << 17);
      uint8_t *bytes = realloc(t->bytes, t->room);
      if (!bytes) die(1, "out of memory");
      t->bytes = bytes;
    }
    got = fread(t->bytes + t->size, 1, t->room - t->size, file);
    if (t->size + got > TEXT_MAX) die(2, "%s: more than %d bytes of text", path, TEXT_MAX);
  }
  if (ferror(file)) die(2, "cannot read %s: %s", path, strerror(errno));
  fclose(file);
  t->files++;
}

static int by_name(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

/* A file, or all sources in a folder and below, in the order of their names. What does not exist is passed over. */
static void text_add_tree(text *t, const char *path) {
  struct stat info;
  if (stat(path, &info) != 0) return;
  if (!S_ISDIR(info.st_mode)) {
    const char *ending = strrchr(path, '.');
    for (const char *const *known = (const char *const[]){".h", ".c", ".inl", ".md", NULL}; ending && *known; known++)
      if (!strcmp(ending, *known)) text_add_file(t, path);
    return;
  }
  DIR *folder = opendir(path);
  if (!folder) die(2, "cannot open %s: %s", path, strerror(errno));
  char **name = NULL;
  size_t count = 0;
  for (struct dirent *entry; (entry = readdir(folder));) {
    if (entry->d_name[0] == '.') continue;
    size_t bytes = strlen(path) + strlen(entry->d_name) + 2;
    name = realloc(name, (count + 1) * sizeof *name);
    if (!name) die(1, "out of memory");
    name[count] = zeroed(bytes, 1);
    snprintf(name[count++], bytes, "%s/%s", path, entry->d_name);
  }
  closedir(folder);
  if (count > 0) qsort(name, count, sizeof *name, by_name);
  for (size_t i = 0; i < count; i++) text_add_tree(t, name[i]), free(name[i]);
  free(name);
}

static void text_split(text *t) {
  t->train = zeroed(t->size, sizeof *t->train);
  t->held_out = zeroed(t->size, sizeof *t->held_out);
  for (size_t i = 0; i < t->size; i++) {
    if (i % CHUNK < CONTEXT) continue;
    if (i / CHUNK % HOLD_OUT_EVERY == HOLD_OUT_EVERY / 2) t->held_out[t->held_out_count++] = (int32_t)i;
    else t->train[t->train_count++] = (int32_t)i;
  }
  int64_t stride = (t->held_out_count + HELD_OUT_MAX - 1) / HELD_OUT_MAX;
  if (stride > 1) t->held_out_count /= stride;
  for (int64_t i = 0; i < t->held_out_count; i++) t->held_out[i] = t->held_out[i * stride];
}

/* What a model without context would reach: byte frequencies of the training positions, plus one each. */
static double text_unigram_bits(const text *t) {
  double count[256], bits = 0;
  for (int i = 0; i < 256; i++) count[i] = 1;
  for (int64_t i = 0; i < t->train_count; i++) count[t->bytes[t->train[i]]] += 1;
  for (int64_t i = 0; i < t->held_out_count; i++)
    bits -= log2(count[t->bytes[t->held_out[i]]] / ((double)t->train_count + 256));
  return bits / (double)t->held_out_count;
}

#endif
