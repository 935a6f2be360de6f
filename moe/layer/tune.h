/* moe_tune_*: the tuner, and its table as text. */
#ifndef MOE_LAYER_TUNE_H
#define MOE_LAYER_TUNE_H

/* This core's name: vendor, family, model. */
MOE_FN void moe_core_name_(char name[32]) {
  memset(name, 0, 32);
#if MOE_X86
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(0, &a, &b, &c, &d)) {
    memcpy(name, &b, 4), memcpy(name + 4, &d, 4), memcpy(name + 8, &c, 4);
    for (int i = 0; i < 12; i++)
      if (name[i] <= ' ' || name[i] > '~') name[i] = '_';
    __get_cpuid(1, &a, &b, &c, &d);
    const unsigned base = a >> 8 & 15u,
                   numbers[2] = {base + (base == 15 ? a >> 20 & 255u : 0), (a >> 4 & 15u) | (a >> 12 & 0xf0u)};
    char *to = name + 12;
    for (int i = 0; i < 2; i++) {
      *to++ = '-';
      for (unsigned power = 100; power > 0; power /= 10)
        if (numbers[i] >= power || power == 1) *to++ = (char)('0' + numbers[i] / power % 10);
    }
    return;
  }
#endif
  memcpy(name, "unknown", 7);
}

MOE_FN moe_status moe_check_tune_table_(moe_context *ctx, const moe_tune_table *table) {
  if (!table) return moe_fail_(ctx, MOE_ERROR_NULL_ARGUMENT, "table", "is NULL");
  if (table->count < 0 || table->count > table->capacity)
    return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "table.count", "is outside [0,capacity]");
  return table->entries || table->capacity == 0 ? MOE_OK
                                                : moe_fail_(ctx, MOE_ERROR_NULL_ARGUMENT, "table.entries", "is NULL");
}

/* The entry with this key and core, or NULL. */
MOE_FN moe_tune_entry *moe_tune_find_(const moe_tune_table *table, const moe_tune_entry *key) {
  for (int64_t i = 0; i < table->count; i++)
    if (moe_tune_same_(&table->entries[i], key) && strncmp(table->entries[i].core, key->core, sizeof key->core) == 0)
      return &table->entries[i];
  return NULL;
}

MOE_FN void moe_tune_put_(moe_tune_table *table, const moe_tune_entry *entry) {
  moe_tune_entry *at = moe_tune_find_(table, entry);
  if (!at) at = &table->entries[table->count++];
  *at = *entry;
}

/* ------------------------------------------------------------------------------------------------------------ text */

typedef struct moe_tune_field_ {
  const char *name;
  size_t at;
} moe_tune_field_;

#define MOE_TUNE_FIELD_(name)          {#name, offsetof(moe_tune_entry, name)},
#define MOE_TUNE_BLOCKING_FIELD_(name) {#name, offsetof(moe_tune_entry, blocking) + offsetof(moe_tune_blocking, name)},
static const moe_tune_field_ moe_tune_fields_[] = {MOE_TUNE_FIELD_(flags) MOE_TUNE_FIELD_(E) MOE_TUNE_FIELD_(N)
                                                       MOE_TUNE_FIELD_(K) MOE_TUNE_LIST(MOE_TUNE_BLOCKING_FIELD_)
                                                           MOE_TUNE_FIELD_(rows) MOE_TUNE_FIELD_(default_ns)
                                                               MOE_TUNE_FIELD_(best_ns)};
#undef MOE_TUNE_FIELD_
#undef MOE_TUNE_BLOCKING_FIELD_
enum { MOE_TUNE_FIELDS_ = sizeof moe_tune_fields_ / sizeof *moe_tune_fields_ };

static const char moe_tune_title_[] = "moe-tune ";
static const char *const moe_tune_op_names_[] = {"grouped_gemm", "grouped_gemm_dx", "grouped_gemm_dw"};
#define MOE_TUNE_DTYPE_(name, type, NAME) #name,
#define MOE_TUNE_ISA_(name, NAME)         #name,
static const char *const moe_tune_dtype_names_[] = {"", MOE_DTYPE_LIST(MOE_TUNE_DTYPE_)};
static const char *const moe_tune_isa_names_[] = {MOE_ISA_LIST(MOE_TUNE_ISA_)};
#undef MOE_TUNE_DTYPE_
#undef MOE_TUNE_ISA_

/* Text that is measured, and written as far as there is room. */
typedef struct moe_text_ {
  char *to;
  size_t room, length;
} moe_text_;

MOE_FN void moe_text_add_(moe_text_ *text, const char *s, size_t most, char end) {
  for (size_t i = 0; i < most && s[i]; i++, text->length++)
    if (text->length < text->room) text->to[text->length] = s[i];
  if (text->length < text->room) text->to[text->length] = end;
  text->length++;
}

MOE_FN void moe_text_number_(moe_text_ *text, int64_t value, char end) {
  char digits[24];
  int at = sizeof digits - 1;
  uint64_t rest = value < 0 ? 0 - (uint64_t)value : (uint64_t)value;
  digits[at] = 0;
  do digits[--at] = (char)('0' + rest % 10);
  while (rest /= 10);
  if (value < 0) digits[--at] = '-';
  moe_text_add_(text, digits + at, sizeof digits, end);
}

MOE_FN void moe_tune_write_(const moe_tune_table *table, moe_text_ *text) {
  moe_text_add_(text, moe_tune_title_, sizeof moe_tune_title_ - 2, ' ');
  moe_text_number_(text, 1, '\n');
  for (int64_t i = 0; i < table->count; i++) {
    const moe_tune_entry *entry = &table->entries[i];
    moe_text_add_(text, moe_tune_op_names_[entry->op], 32, ' ');
    moe_text_add_(text, moe_tune_dtype_names_[entry->dtype], 32, ' ');
    moe_text_add_(text, moe_tune_isa_names_[entry->isa], 32, ' ');
    moe_text_add_(text, entry->core, sizeof entry->core, ' ');
    for (int f = 0; f < MOE_TUNE_FIELDS_; f++) {
      int64_t value;
      memcpy(&value, (const char *)entry + moe_tune_fields_[f].at, sizeof value);
      moe_text_add_(text, moe_tune_fields_[f].name, 32, '=');
      moe_text_number_(text, value, f + 1 < MOE_TUNE_FIELDS_ ? ' ' : '\n');
    }
  }
}

moe_status moe_tune_save(moe_context *ctx, const moe_tune_table *table, char *text, size_t room, size_t *length) {
  moe_text_ measured = {NULL, 0, 0}, written = {text, room, 0};
  MOE_TRY(moe_check_tune_table_(ctx, table));
  if (!length) return moe_fail_(ctx, MOE_ERROR_NULL_ARGUMENT, "length", "is NULL");
  if (!text && room) return moe_fail_(ctx, MOE_ERROR_NULL_ARGUMENT, "text", "is NULL");
  for (int64_t i = 0; i < table->count; i++) {
    const moe_tune_entry *e = &table->entries[i];
    if (e->op < 0 || e->op >= MOE_TUNE_OP_COUNT_ || e->dtype <= 0 || (int)e->dtype >= MOE_DTYPE_COUNT_ || e->isa < 0 ||
        (int)e->isa >= MOE_ISA_COUNT_)
      return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "table.entries",
                       "has an op, a dtype or an isa that there is not");
  }
  moe_tune_write_(table, &measured);
  if (text && measured.length >= room)
    return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "room", "is too small for the text");
  *length = measured.length;
  if (text) moe_tune_write_(table, &written), text[written.length] = 0;
  return moe_succeed_(ctx);
}

/* The next word of a line, which ends at `end` or is empty. */
MOE_FN const char *moe_word_(const char **at, const char *end, size_t *length) {
  while (*at < end && (**at == ' ' || **at == '\t' || **at == '\r')) ++*at;
  const char *word = *at;
  while (*at < end && **at != ' ' && **at != '\t' && **at != '\r') ++*at;
  *length = (size_t)(*at - word);
  return word;
}

MOE_FN int moe_word_is_(const char *word, size_t length, const char *name) {
  return strlen(name) == length && memcmp(word, name, length) == 0;
}

/* Which of these names the next word is, or -1. */
MOE_FN int moe_word_of_(const char **at, const char *end, const char *const *names, int count) {
  size_t length;
  const char *word = moe_word_(at, end, &length);
  for (int i = 0; i < count; i++)
    if (length > 0 && moe_word_is_(word, length, names[i])) return i;
  return -1;
}

/* Returns 0 if that is no number of 18 digits at most. */
MOE_FN int moe_number_of_(const char *word, size_t length, int64_t *value) {
  const size_t sign = length > 0 && word[0] == '-';
  if (length == sign || length - sign > 18) return 0;
  *value = 0;
  for (size_t i = sign; i < length; i++) {
    if (word[i] < '0' || word[i] > '9') return 0;
    *value = *value * 10 + (word[i] - '0');
  }
  if (sign) *value = -*value;
  return 1;
}

/* Returns 0 if the line is no entry. */
MOE_FN int moe_tune_read_line_(const char *at, const char *end, const char *core, moe_tune_entry *entry) {
  size_t length;
  memset(entry, 0, sizeof *entry);
  const int op = moe_word_of_(&at, end, moe_tune_op_names_, MOE_TUNE_OP_COUNT_),
            dtype = moe_word_of_(&at, end, moe_tune_dtype_names_, MOE_DTYPE_COUNT_),
            isa = moe_word_of_(&at, end, moe_tune_isa_names_, MOE_ISA_COUNT_);
  const char *word = moe_word_(&at, end, &length);
  if (op < 0 || dtype < 0 || isa < 0 || length == 0 || length >= sizeof entry->core) return 0;
  entry->op = (moe_tune_op)op, entry->dtype = (moe_dtype)dtype, entry->isa = (moe_isa)isa;
  memcpy(entry->core, word, length);
  entry->here = strcmp(entry->core, core) == 0;
  for (word = moe_word_(&at, end, &length); length > 0; word = moe_word_(&at, end, &length)) {
    const char *equals = (const char *)memchr(word, '=', length);
    int64_t value;
    if (!equals || !moe_number_of_(equals + 1, length - (size_t)(equals + 1 - word), &value)) return 0;
    for (int f = 0; f < MOE_TUNE_FIELDS_; f++)
      if (moe_word_is_(word, (size_t)(equals - word), moe_tune_fields_[f].name))
        memcpy((char *)entry + moe_tune_fields_[f].at, &value, sizeof value);
  }
  return entry->E > 0 && entry->N > 0 && entry->K > 0;
}

/* Goes through the lines behind the title: counts entries that the table lacks or, with `puts`, puts all into it.
   Returns how many lines are none. */
MOE_FN int64_t moe_tune_read_(moe_tune_table *table, const char *text, size_t length, int puts, int64_t *news) {
  const char *end = text + length, *line_end;
  int64_t skipped = 0;
  int title = 1;
  char core[32];
  moe_core_name_(core);
  *news = 0;
  for (; text < end; text = line_end + 1, title = 0) {
    moe_tune_entry entry;
    line_end = (const char *)memchr(text, '\n', (size_t)(end - text));
    if (!line_end) line_end = end;
    if (title || line_end == text) continue;
    if (!moe_tune_read_line_(text, line_end, core, &entry)) skipped++;
    else if (puts) moe_tune_put_(table, &entry);
    else *news += !moe_tune_find_(table, &entry);
  }
  return skipped;
}

moe_status moe_tune_load(moe_context *ctx, moe_tune_table *table, const char *text, size_t length, int64_t *skipped) {
  const size_t title = sizeof moe_tune_title_ - 1;
  const char *at = text;
  int64_t news = 0, none = 0;
  MOE_TRY(moe_check_tune_table_(ctx, table));
  if (!text && length) return moe_fail_(ctx, MOE_ERROR_NULL_ARGUMENT, "text", "is NULL");
  if (length > 0) {
    if (length <= title || memcmp(text, moe_tune_title_, title) != 0)
      return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "text", "does not begin with \"moe-tune \"");
    if (text[title] != '1' || (length > title + 1 && text[title + 1] != '\n' && text[title + 1] != '\r'))
      return moe_fail_(ctx, MOE_ERROR_UNSUPPORTED, "text", "is of another version");
    none = moe_tune_read_(table, at, length, 0, &news);
    if (news > table->capacity - table->count)
      return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "table.capacity", "has no room for the entries of the text");
    moe_tune_read_(table, at, length, 1, &news);
  }
  if (skipped) *skipped = none;
  return moe_succeed_(ctx);
}

/* ----------------------------------------------------------------------------------------------------------- tuner */

typedef moe_status (*moe_grouped_fn_)(moe_context *ctx, const moe_grouped_gemm_args *args);
#define MOE_TUNE_GROUPED_(name, type, NAME) \
  [MOE_DTYPE_##NAME] = {moe_grouped_gemm_##name, moe_grouped_gemm_dx_##name, moe_grouped_gemm_dw_##name},
static const moe_grouped_fn_ moe_grouped_fns_[MOE_DTYPE_COUNT_][MOE_TUNE_OP_COUNT_] = {
    MOE_DTYPE_LIST(MOE_TUNE_GROUPED_)};
#undef MOE_TUNE_GROUPED_

typedef struct moe_tuner_ {
  const moe_tune_grouped_gemm_args *args;
  moe_context ctx;      /* the caller's, with: */
  moe_tune_table table; /*   a table of one entry */
  moe_tune_entry entry;
  int64_t columns, depth, rows; /* of the product, rows per expert */
  double spent;
} moe_tuner_;

MOE_FN double moe_tune_clock_(const moe_tune_grouped_gemm_args *args) {
#ifdef TIME_UTC
  struct timespec now;
  if (!args->clock) return timespec_get(&now, TIME_UTC) ? (double)now.tv_sec + 1e-9 * (double)now.tv_nsec : 0;
#endif
  return args->clock(args->clock_user);
}

/* Runs the product once, with a blocking. */
MOE_FN moe_status moe_tune_run_(moe_tuner_ *t, const moe_tune_blocking *blocking) {
  t->entry.blocking = *blocking;
  return moe_grouped_fns_[t->args->dtype][t->args->op](&t->ctx, t->args->gemm);
}

/* Lowers *best to the seconds that it took, if they are fewer. */
MOE_FN void moe_tune_time_(moe_tuner_ *t, const moe_tune_blocking *blocking, double *best) {
  const double begin = moe_tune_clock_(t->args);
  moe_tune_run_(t, blocking);
  const double seconds = moe_tune_clock_(t->args) - begin;
  t->spent += seconds;
  if (seconds < *best) *best = seconds;
}

/* The least time of each of two, run in turn. */
MOE_FN void moe_tune_compare_(moe_tuner_ *t, const moe_tune_blocking *a, const moe_tune_blocking *b, double best[2]) {
  best[0] = best[1] = 1e30;
  for (int i = 0; i < (t->args->repeats ? t->args->repeats : 5); i++) {
    moe_tune_time_(t, a, &best[0]);
    moe_tune_time_(t, b, &best[1]);
  }
}

/* The values that are tried of the blocking's number `which`, besides the default: those that can make a difference.
   Returns how many. */
enum { MOE_TUNE_VALUES_ = 5, MOE_TUNE_NUMBERS_ = 0 MOE_TUNE_LIST(MOE_ONE_) };
MOE_FN int moe_tune_values_(const moe_tuner_ *t, int which, int64_t values[MOE_TUNE_VALUES_]) {
  static const int64_t candidates[MOE_TUNE_NUMBERS_][MOE_TUNE_VALUES_] = {
      {32, 64, 128, 256, 0}, {48, 96, 192, 0},   {2, 4, 8, 16, 32},
      {1, 2, 8, 16, 0},      {-1, 8, 16, 32, 0}, {16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10}};
  const moe_kernels *kernels = moe_kernels_();
  const moe_product_ product = t->args->dtype == MOE_DTYPE_BF16 ? MOE_PRODUCT_BF16 : MOE_PRODUCT_F32;
  const int64_t kc = moe_kc_(kernels->blocking, kernels->gemm->panel[product], t->rows, t->depth);
  const int dw = t->args->op == MOE_TUNE_GROUPED_GEMM_DW, packed = (t->entry.flags & MOE_TUNE_PACKED) != 0,
            by_rows = (t->entry.flags & MOE_TUNE_EKN) != 0, plain = !packed && !(t->entry.flags & MOE_TUNE_QUANTIZED),
            columns = plain && (t->args->op == MOE_TUNE_GROUPED_GEMM) != by_rows, few = t->rows <= MOE_SMALL_M_MAX;
  const int64_t panels = moe_ceil_div_(t->columns, MOE_NR);
  int count = 0;
  for (int i = 0; i < MOE_TUNE_VALUES_ && candidates[which][i]; i++) {
    const int64_t value = candidates[which][i];
    const int matters[MOE_TUNE_NUMBERS_] = {(4 * value >= kc) & (value < kc),
                                            !dw && value < moe_min_(t->rows, MOE_MC),
                                            value < panels,
                                            moe_workers_(&t->ctx) >= 2 && value != MOE_ITEMS_PER_WORKER,
                                            !dw && !packed && few && kernels->gemm->small_m,
                                            !dw && !columns && value != kernels->blocking->prefetch_bytes};
    if (matters[which]) values[count++] = value;
  }
  return count;
}

MOE_FN int64_t *moe_tune_number_(moe_tune_blocking *blocking, int which) {
  return (int64_t *)(void *)((char *)blocking + (size_t)which * sizeof(int64_t));
}

/* One number after the other: what takes less time than the best so far is the best. */
MOE_FN void moe_tune_search_(moe_tuner_ *t, moe_tune_blocking *best) {
  static const moe_tune_blocking none = {0};
  double seconds[2];
  for (int which = 0; which < MOE_TUNE_NUMBERS_; which++) {
    int64_t values[MOE_TUNE_VALUES_ + 1];
    int count = moe_tune_values_(t, which, values);
    if (*moe_tune_number_(best, which)) values[count++] = 0;
    for (int i = 0; i < count; i++) {
      moe_tune_blocking blocking = *best;
      if (t->args->seconds > 0 && t->spent >= t->args->seconds) break;
      *moe_tune_number_(&blocking, which) = values[i];
      moe_tune_compare_(t, best, &blocking, seconds);
      if (seconds[1] < 0.97 * seconds[0]) *best = blocking;
    }
  }
  moe_tune_compare_(t, &none, best, seconds);
  if (!(seconds[1] < seconds[0])) *best = none, seconds[1] = seconds[0];
  t->entry.default_ns = (int64_t)(seconds[0] * 1e9);
  t->entry.best_ns = (int64_t)(seconds[1] * 1e9);
}

MOE_FN moe_status moe_tune_check_(moe_context *ctx, const moe_tune_grouped_gemm_args *args) {
  if (!args) return moe_fail_(ctx, MOE_ERROR_NULL_ARGUMENT, "args", "is NULL");
  if (!args->gemm) return moe_fail_(ctx, MOE_ERROR_NULL_ARGUMENT, "gemm", "is NULL");
  MOE_TRY(moe_check_enum_(ctx, "op", (int)args->op, MOE_TUNE_OP_COUNT_));
  MOE_TRY(moe_check_enum_(ctx, "dtype", (int)args->dtype, MOE_DTYPE_COUNT_));
  if (args->dtype == MOE_DTYPE_DEFAULT)
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "dtype", "must name the function");
  MOE_TRY(moe_check_tune_table_(ctx, args->table));
  if (!(args->seconds >= 0)) return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "seconds", "must not be negative");
  if (args->repeats < 0) return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "repeats", "must not be negative");
#ifndef TIME_UTC
  if (!args->clock) return moe_fail_(ctx, MOE_ERROR_UNSUPPORTED, "clock", "is NULL and there is no timespec_get");
#endif
  return MOE_OK;
}

moe_status moe_tune_grouped_gemm(moe_context *ctx, const moe_tune_grouped_gemm_args *args) {
  moe_tuner_ t = {.args = args};
  MOE_TRY(moe_tune_check_(ctx, args));
  const moe_grouped_gemm_args *gemm = args->gemm;
  if (ctx) t.ctx = *ctx;
  moe_grouped_tune_key_(gemm, (moe_grouped_op_)args->op, args->dtype, &t.entry);
  moe_core_name_(t.entry.core);
  t.entry.isa = moe_isa_active();
  t.entry.here = 1;
  const moe_tune_entry *known = moe_tune_find_(args->table, &t.entry);
  if (!known && args->table->count == args->table->capacity)
    return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "table.capacity", "has no room for another entry");
  moe_tune_blocking best = {0};
  if (known) best = known->blocking;
  t.table = (moe_tune_table){&t.entry, 1, 1};
  t.ctx.tune = &t.table;
  const moe_status status = moe_tune_run_(&t, &best);
  if (status != MOE_OK) {
    if (ctx) memcpy(ctx->message, t.ctx.message, sizeof ctx->message), ctx->status = status;
    return status;
  }
  int64_t rows = 0, experts = 0;
  for (int64_t e = 0; e < gemm->E; e++) rows += gemm->m_sizes[e], experts += gemm->m_sizes[e] > 0;
  t.rows = t.entry.rows = moe_ceil_div_(rows, moe_max_(1, experts));
  const int outputs =
      args->op == MOE_TUNE_GROUPED_GEMM || (args->op == MOE_TUNE_GROUPED_GEMM_DW && t.entry.flags & MOE_TUNE_EKN);
  t.columns = outputs ? gemm->N : gemm->K;
  t.depth = args->op == MOE_TUNE_GROUPED_GEMM ? gemm->K : args->op == MOE_TUNE_GROUPED_GEMM_DX ? gemm->N : t.rows;
  moe_tune_search_(&t, &best);
  t.entry.blocking = best;
  moe_tune_put_(args->table, &t.entry);
  return moe_succeed_(ctx);
}

#endif
