/* plot.h: train_lm.svg, the loss curves of both models and the load of every expert. */
#ifndef EXAMPLE_PLOT_H
#define EXAMPLE_PLOT_H

#include <stdint.h>
#include <stdio.h>

typedef struct curve {
  const char *name, *colour;
  int64_t steps;
  const float *train; /* [steps] bits per byte of each batch */
  int points;
  const int32_t *at;     /* [points] the step after which ... */
  const float *held_out; /* [points] ... these bits per byte were measured */
} curve;

enum { PLOT_LEFT = 70, PLOT_TOP = 60, PLOT_WIDTH = 560, PLOT_HEIGHT = 320, BARS_LEFT = 710, BARS_WIDTH = 260 };

static double plot_x(double step, double steps) { return PLOT_LEFT + PLOT_WIDTH * step / steps; }
static double plot_y(double bits, double top) { return PLOT_TOP + PLOT_HEIGHT * (1 - (bits < top ? bits : top) / top); }

static void plot_axes(FILE *out, const char *title, double steps, double top) {
  fprintf(out, "<text x='%d' y='28' font-size='17'>%s</text>\n", PLOT_LEFT, title);
  for (double bits = 0; bits <= top; bits += 1)
    fprintf(out, "<path d='M%d %.1fh%d' stroke='#ddd'/><text x='%d' y='%.1f' text-anchor='end'>%.0f</text>\n", PLOT_LEFT,
            plot_y(bits, top), PLOT_WIDTH, PLOT_LEFT - 8, plot_y(bits, top) + 4, bits);
  for (int i = 0; i <= 5; i++)
    fprintf(out, "<text x='%.1f' y='%d' text-anchor='middle'>%.0f</text>\n", plot_x(i, 5), PLOT_TOP + PLOT_HEIGHT + 18,
            steps * i / 5);
  fprintf(out, "<path d='M%d %dv%dh%d' fill='none' stroke='#333'/>\n", PLOT_LEFT, PLOT_TOP, PLOT_HEIGHT, PLOT_WIDTH);
  fprintf(out, "<text x='%d' y='%d' text-anchor='middle'>step</text>\n", PLOT_LEFT + PLOT_WIDTH / 2,
          PLOT_TOP + PLOT_HEIGHT + 40);
  fprintf(out, "<text transform='translate(%d %d) rotate(-90)' text-anchor='middle'>bits per byte</text>\n", PLOT_LEFT - 42,
          PLOT_TOP + PLOT_HEIGHT / 2);
}

/* The training line shows means of up to 150 equal stretches; held-out points are dots. */
static void plot_curve(FILE *out, const curve *c, int row, double top) {
  int64_t stretches = c->steps < 150 ? c->steps : 150;
  fprintf(out, "<path fill='none' stroke='%s' stroke-width='1.5' d='", c->colour);
  for (int64_t i = 0; i < stretches; i++) {
    int64_t begin = c->steps * i / stretches, end = c->steps * (i + 1) / stretches;
    double sum = 0;
    for (int64_t s = begin; s < end; s++) sum += (double)c->train[s];
    fprintf(out, "%c%.1f %.1f", i ? 'L' : 'M', plot_x((double)(begin + end) / 2, (double)c->steps),
            plot_y(sum / (double)(end - begin), top));
  }
  fprintf(out, "'/>\n");
  for (int i = 0; i < c->points; i++)
    fprintf(out, "<circle cx='%.1f' cy='%.1f' r='3.5' fill='white' stroke='%s' stroke-width='1.5'/>\n",
            plot_x(c->at[i], (double)c->steps), plot_y((double)c->held_out[i], top), c->colour);
  int x = PLOT_LEFT + PLOT_WIDTH - 250, y = PLOT_TOP + 20 + 44 * row;
  fprintf(out, "<path d='M%d %dh26' stroke='%s' stroke-width='1.5'/><text x='%d' y='%d'>%s, training</text>\n", x, y,
          c->colour, x + 34, y + 4, c->name);
  fprintf(out, "<circle cx='%d' cy='%d' r='3.5' fill='white' stroke='%s' stroke-width='1.5'/>", x + 13, y + 20, c->colour);
  fprintf(out, "<text x='%d' y='%d'>%s, held out: %.3f</text>\n", x + 34, y + 24, c->name,
          c->points ? (double)c->held_out[c->points - 1] : 0.0);
}

/* One panel per layer: the share of the routed tokens that each expert got; the dashed line is the even share. */
static void plot_loads(FILE *out, const int64_t *load, int layers, int experts, const char *colour) {
  double height = (double)PLOT_HEIGHT / layers - 40, width = (double)BARS_WIDTH / experts;
  fprintf(out, "<text x='%d' y='28' font-size='17'>Tokens per expert, held-out bytes</text>\n", BARS_LEFT);
  for (int l = 0; l < layers; l++, load += experts) {
    double floor = PLOT_TOP + height + (height + 58) * l, total = 0, most = 0;
    for (int e = 0; e < experts; e++) total += (double)load[e], most = (double)load[e] > most ? (double)load[e] : most;
    if (total <= 0) total = 1;
    double unit = height / (most / total * 1.15 > 2.0 / experts ? most / total * 1.15 : 2.0 / experts);
    for (int e = 0; e < experts; e++) {
      double share = (double)load[e] / total, x = BARS_LEFT + width * e;
      fprintf(out, "<rect x='%.1f' y='%.1f' width='%.1f' height='%.1f' fill='%s'/>\n", x + width * 0.12,
              floor - share * unit, width * 0.76, share * unit, colour);
      fprintf(out, "<text x='%.1f' y='%.1f' text-anchor='middle' font-size='10'>%.0f%%</text>\n", x + width / 2,
              floor - share * unit - 4, 100 * share);
      fprintf(out, "<text x='%.1f' y='%.1f' text-anchor='middle'>%d</text>\n", x + width / 2, floor + 16, e);
    }
    fprintf(out, "<path d='M%d %.1fh%d' stroke='#333'/>\n", BARS_LEFT, floor, BARS_WIDTH);
    fprintf(out, "<path d='M%d %.1fh%d' stroke='#333' stroke-dasharray='4 3'/>\n", BARS_LEFT, floor - unit / experts,
            BARS_WIDTH);
    fprintf(out, "<text x='%d' y='%.1f' text-anchor='middle'>expert (layer %d)</text>\n", BARS_LEFT + BARS_WIDTH / 2,
            floor + 34, l + 1);
  }
}

/* 0, or -1 when the file cannot be written. */
static int plot_write(const char *path, const char *title, const curve *curves, int count, const int64_t *load, int layers,
                      int experts) {
  FILE *out = fopen(path, "w");
  if (!out) return -1;
  double top = 8;
  fprintf(out, "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 1000 440' width='1000' height='440' "
               "font-family='sans-serif' font-size='12' fill='#333'>\n<rect width='1000' height='440' fill='white'/>\n");
  plot_axes(out, title, curves[0].steps > 0 ? (double)curves[0].steps : 1, top);
  for (int i = 0; i < count; i++) plot_curve(out, &curves[i], i, top);
  plot_loads(out, load, layers, experts, curves[0].colour);
  fprintf(out, "</svg>\n");
  int failed = ferror(out);
  return fclose(out) != 0 || failed ? -1 : 0;
}

#endif
