/* training.h: the loop around a model: batches, learning rate, held-out loss, progress. Needs text.h, options.h, plot.h
   and BATCH. */
#ifndef EXAMPLE_TRAINING_H
#define EXAMPLE_TRAINING_H

#include <time.h>

enum { POINTS = 20 }; /* held-out measurements on the way */

static const float LEARNING_RATE = 6e-3f;

/* A model as it is trained. */
typedef struct training {
  double (*forward)(struct training *model, const int32_t *position, int64_t count); /* mean bits per byte */
  void (*step)(struct training *model, float rate); /* gradients, and an update */
  double layer_seconds, layer_flops;
  int64_t loads, *load, *load_sum; /* tokens per expert, of all layers: of the last batch, and summed */
} training;

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Mean bits per byte over `count` held-out positions, spread evenly. load_sum then holds their experts. */
static double evaluate(training *m, const text *t, int64_t count) {
  static int32_t position[BATCH];
  if (count > t->held_out_count) count = t->held_out_count;
  memset(m->load_sum, 0, (size_t)m->loads * sizeof *m->load_sum);
  double sum = 0;
  for (int64_t done = 0; done < count;) {
    int64_t n = count - done < BATCH ? count - done : BATCH;
    for (int64_t i = 0; i < n; i++) position[i] = t->held_out[(done + i) * t->held_out_count / count];
    sum += m->forward(m, position, n) * (double)n;
    done += n;
  }
  return sum / (double)count;
}

/* On a terminal one line rewrites itself; otherwise a line for every twentieth of the way. */
static void progress(const training *m, const char *name, int64_t step, int64_t steps, double bits,
                     double step_seconds) {
  printf("%s%-5s%5" PRId64 "/%" PRId64 "  loss %.3f  %5.0f tokens/s  %3.0f GFLOP/s", isatty(1) ? "\r" : "", name, step,
         steps, bits, BATCH / step_seconds, m->layer_flops / m->layer_seconds * 1e-9);
  int64_t least = INT64_MAX, most = 0, sum = 0;
  for (int i = 0; i < m->loads; i++) {
    int64_t load = m->load[i];
    least = load < least ? load : least, most = load > most ? load : most, sum += load;
  }
  if (least < most) printf("  load %4" PRId64 "..%" PRId64 "..%-4" PRId64, least, sum / m->loads, most);
  if (!isatty(1)) putchar('\n');
  fflush(stdout);
}

static float learning_rate(int64_t step, int64_t steps) { /* up over the first twentieth, then down to a twentieth */
  int64_t warm = steps / 20 + 1;
  if (step < warm) return LEARNING_RATE * (float)(step + 1) / (float)warm;
  return LEARNING_RATE * (1 - 0.95f * (float)(step - warm) / (float)(steps - warm));
}

/* Fills the curve and returns the held-out bits per byte at the end. */
static double train(training *m, const text *t, const options *o, curve *c) {
  static int32_t position[BATCH];
  float *loss = zeroed((size_t)o->steps, sizeof *loss), *held_out = zeroed(POINTS, sizeof *held_out);
  int32_t *at = zeroed(POINTS, sizeof *at);
  c->steps = o->steps, c->train = loss, c->at = at, c->held_out = held_out;
  uint64_t random = o->seed ^ 0x64617461; /* the same data for both models */
  double shown = seconds(), bits = 0;
  int64_t shown_step = 0;
  for (int64_t step = 0; step < o->steps; step++) {
    for (int i = 0; i < BATCH; i++) position[i] = t->train[next_random(&random) % (uint64_t)t->train_count];
    loss[step] = (float)m->forward(m, position, BATCH);
    m->step(m, learning_rate(step, o->steps));
    bits = shown_step == step ? (double)loss[step] : 0.9 * bits + 0.1 * (double)loss[step];
    int point = (step + 1) * POINTS / o->steps > step * POINTS / o->steps;
    if (point || (isatty(1) && seconds() - shown > 0.25)) {
      progress(m, c->name, step + 1, o->steps, bits, (seconds() - shown) / (double)(step + 1 - shown_step));
      if (point) {
        at[c->points] = (int32_t)(step + 1);
        held_out[c->points++] = (float)evaluate(m, t, step + 1 == o->steps ? HELD_OUT_MAX : 2 * BATCH);
      }
      m->layer_seconds = m->layer_flops = 0, shown = seconds(), shown_step = step + 1;
    }
  }
  if (isatty(1)) putchar('\n');
  return (double)held_out[c->points - 1];
}

#endif
