/* npy.h: reads .npy files, as numpy.save writes them: versions 1 to 3, C order, little-endian. bfloat16 and 8-bit floats
   are what ml_dtypes saves ("V2", "V1"). */
#ifndef EXAMPLE_NPY_H
#define EXAMPLE_NPY_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum npy_type { NPY_OTHER, NPY_F32, NPY_F16, NPY_BF16, NPY_I32, NPY_I64, NPY_U16, NPY_U8 } npy_type;

typedef struct npy {
  npy_type type;
  int64_t shape[8], count;
  int ndim;
  void *data; /* malloc'ed; NULL: could not be read, and `why` */
  const char *why;
} npy;

static npy_type npy_type_of(const char *descr, size_t *bytes) {
  static const struct {
    const char *name;
    npy_type type;
    size_t bytes;
  } known[] = {{"<f4", NPY_F32, 4}, {"<f2", NPY_F16, 2}, {"V2", NPY_BF16, 2}, {"bfloat16", NPY_BF16, 2},
               {"<i4", NPY_I32, 4}, {"<u4", NPY_I32, 4}, {"<i8", NPY_I64, 8}, {"<u2", NPY_U16, 2}, {"u1", NPY_U8, 1},
               {"V1", NPY_U8, 1}, {"f1", NPY_U8, 1}};
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (strstr(descr, known[i].name)) return *bytes = known[i].bytes, known[i].type;
  return *bytes = 0, NPY_OTHER;
}

/* The text of the header, 0-terminated; NULL if there is none. */
static char *npy_header(FILE *file) {
  unsigned char start[12] = {0};
  if (fread(start, 1, 10, file) != 10 || memcmp(start, "\x93NUMPY", 6) != 0) return NULL;
  size_t length = (size_t)start[8] | (size_t)start[9] << 8;
  if (start[6] > 1) {
    if (fread(start + 10, 1, 2, file) != 2) return NULL;
    length |= (size_t)start[10] << 16 | (size_t)start[11] << 24;
  }
  char *text = length < 1 << 20 ? calloc(length + 1, 1) : NULL;
  if (text && fread(text, 1, length, file) != length) free(text), text = NULL;
  return text;
}

/* Fills in type, shape and count from the header; *bytes: output, of an element. */
static const char *npy_parse(const char *text, npy *array, size_t *bytes) {
  const char *descr = strstr(text, "'descr':"), *order = strstr(text, "'fortran_order':");
  const char *at = strstr(text, "'shape':");
  char name[16] = {0};
  if (!descr || !order || !at || !(at = strchr(at, '('))) return "no header of numpy's";
  sscanf(descr + 8, " '%15[^']", name);
  array->type = npy_type_of(name, bytes);
  if (array->type == NPY_OTHER) return "of no type that is known here";
  if (strstr(order, "True")) return "in Fortran order";
  array->count = 1;
  for (char *end; array->ndim < 8; at = end) {
    while (*at == '(' || *at == ',' || *at == ' ') at++;
    const int64_t size = strtoll(at, &end, 10);
    if (end == at) break;
    if (size < 0 || (size > 0 && array->count > INT64_MAX / 16 / size)) return "too large";
    array->shape[array->ndim++] = size, array->count *= size;
  }
  return NULL;
}

static npy npy_read(const char *path) {
  npy array = {.why = "cannot be read"};
  size_t bytes = 0;
  FILE *file = fopen(path, "rb");
  if (!file) return array.why = "does not exist", array;
  char *text = npy_header(file);
  array.why = text ? npy_parse(text, &array, &bytes) : "no header of numpy's";
  free(text);
  if (!array.why) {
    array.data = malloc((size_t)array.count * bytes + 1);
    if (!array.data || fread(array.data, bytes, (size_t)array.count, file) != (size_t)array.count)
      array.why = "cut short", free(array.data), array.data = NULL;
  }
  fclose(file);
  return array;
}

#endif
