/* plot.h: train_lm.svg, the loss curves of both models and the load of every expert. */
#ifndef EXAMPLE_PLOT_H
#define EXAMPLE_PLOT_H

#include <stdint.h>
#include <stdio.h>

typedef struct curve {
  const char *name, *colour;
  int64_t steps;
  float *train; /* [steps] bits per byte of each batch */
  int points;
  int32_t *at;     /* [points] the step after which ... */
  float *held_out; /* [points] ... these bits per byte were measured */
} curve;

enum { PLOT_LEFT = 70, PLOT_TOP = 60, PLOT_WIDTH = 560, PLOT_HEIGHT = 320, BARS_LEFT = 710, BARS_WIDTH = 260 };

/* The window of the loss plot: 3 bits high, so that the ends of the curves can be read; their beginnings are above. */
typedef struct window {
  double steps, bottom, top;
} window;

static double plot_x(window w, double step) { return PLOT_LEFT + PLOT_WIDTH * step / w.steps; }
static double plot_y(window w, double bits) { return PLOT_TOP + PLOT_HEIGHT * (w.top - bits) / (w.top - w.bottom); }

static window plot_window(const curve *curves, int count) {
  double least = 8;
  for (int i = 0; i < count; i++)
    for (int64_t s = 0; s < curves[i].steps; s++)
      if ((double)curves[i].train[s] < least) least = (double)curves[i].train[s];
  double bottom = 0.5 * (double)(int)(2 * least);
  return (window){(double)curves[0].steps, bottom, bottom + 3};
}

static void plot_axes(FILE *out, const char *title, window w) {
  fprintf(out, "<text x='%d' y='28' font-size='17'>%s</text>\n", PLOT_LEFT, title);
  for (double bits = w.bottom; bits <= w.top; bits += 0.5)
    fprintf(out, "<path d='M%d %.1fh%d' stroke='#ddd'/><text x='%d' y='%.1f' text-anchor='end'>%.1f</text>\n",
            PLOT_LEFT, plot_y(w, bits), PLOT_WIDTH, PLOT_LEFT - 8, plot_y(w, bits) + 4, bits);
  for (int i = 0; i <= 5; i++)
    fprintf(out, "<text x='%.1f' y='%d' text-anchor='middle'>%.0f</text>\n", plot_x(w, w.steps * i / 5),
            PLOT_TOP + PLOT_HEIGHT + 18, w.steps * i / 5);
  fprintf(out, "<path d='M%d %dv%dh%d' fill='none' stroke='#333'/>\n", PLOT_LEFT, PLOT_TOP, PLOT_HEIGHT, PLOT_WIDTH);
  fprintf(out, "<text x='%d' y='%d' text-anchor='middle'>step</text>\n", PLOT_LEFT + PLOT_WIDTH / 2,
          PLOT_TOP + PLOT_HEIGHT + 40);
  fprintf(out, "<text transform='translate(%d %d) rotate(-90)' text-anchor='middle'>bits per byte</text>\n",
          PLOT_LEFT - 46, PLOT_TOP + PLOT_HEIGHT / 2);
}

/* The training line shows means of up to 150 equal stretches; held-out points are rings. */
static void plot_curve(FILE *out, const curve *c, int row, window w) {
  int64_t stretches = c->steps < 150 ? c->steps : 150;
  char pen = 'M';
  fprintf(out, "<path fill='none' stroke='%s' stroke-width='1.5' d='", c->colour);
  for (int64_t i = 0; i < stretches; i++) {
    int64_t begin = c->steps * i / stretches, end = c->steps * (i + 1) / stretches;
    double mean = 0;
    for (int64_t s = begin; s < end; s++) mean += (double)c->train[s] / (double)(end - begin);
    if (!(mean <= w.top)) continue;
    fprintf(out, "%c%.1f %.1f", pen, plot_x(w, (double)(begin + end) / 2), plot_y(w, mean));
    pen = 'L';
  }
  fprintf(out, "%s'/>\n", pen == 'M' ? "M0 0" : "");
  static const char ring[] = "<circle cx='%.1f' cy='%.1f' r='3.5' fill='white' stroke='%s' stroke-width='1.5'/>\n";
  for (int i = 0; i < c->points; i++)
    if ((double)c->held_out[i] <= w.top)
      fprintf(out, ring, plot_x(w, c->at[i]), plot_y(w, (double)c->held_out[i]), c->colour);
  int x = PLOT_LEFT + PLOT_WIDTH - 250, y = PLOT_TOP + 20 + 44 * row;
  fprintf(out, "<path d='M%d %dh26' stroke='%s' stroke-width='1.5'/><text x='%d' y='%d'>%s, training</text>\n", x, y,
          c->colour, x + 34, y + 4, c->name);
  fprintf(out, ring, x + 13.0, y + 20.0, c->colour);
  fprintf(out, "<text x='%d' y='%d'>%s, held out: %.3f at the end</text>\n", x + 34, y + 24, c->name,
          c->points ? (double)c->held_out[c->points - 1] : 0.0);
}

/* One panel per layer: the share of the routed tokens that each expert got; the dashed line is the even share. */
static void plot_loads(FILE *out, const int64_t *load, int layers, int experts, const char *colour) {
  double height = (double)PLOT_HEIGHT / layers - 40, width = (double)BARS_WIDTH / experts;
  fprintf(out, "<text x='%d' y='28' font-size='17'>Share of tokens per expert</text>\n", BARS_LEFT);
  fprintf(out, "<text x='%d' y='48'>on held-out bytes; dashed: the even share</text>\n", BARS_LEFT);
  for (int l = 0; l < layers; l++, load += experts) {
    double floor = PLOT_TOP + height + (height + 58) * l, total = 0, most = 0;
    for (int e = 0; e < experts; e++) total += (double)load[e], most = (double)load[e] > most ? (double)load[e] : most;
    if (total <= 0) total = 1;
    double unit = height / (most / total * 1.15 > 2.0 / experts ? most / total * 1.15 : 2.0 / experts);
    for (int e = 0; e < experts; e++) {
      double share = (double)load[e] / total, x = BARS_LEFT + width * e;
      fprintf(out, "<rect x='%.1f' y='%.1f' width='%.1f' height='%.1f' fill='%s'/>\n", x + width * 0.12,
              floor - share * unit, width * 0.76, share * unit, colour);
      int inside = share * unit > 20;
      fprintf(out, "<text x='%.1f' y='%.1f' text-anchor='middle' font-size='11' fill='%s'>%.0f%%</text>\n",
              x + width / 2, floor - (inside ? 6 : share * unit + 4), inside ? "white" : "#333", 100 * share);
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
static int plot_write(const char *path, const char *title, const curve *curves, int count, const int64_t *load,
                      int layers, int experts) {
  FILE *out = fopen(path, "w");
  if (!out) return -1;
  window w = plot_window(curves, count);
  fprintf(out, "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 1000 440' width='1000' height='440' "
               "font-family='sans-serif' font-size='12' fill='#333'>\n"
               "<rect width='1000' height='440' fill='white'/>\n");
  plot_axes(out, title, w);
  for (int i = 0; i < count; i++) plot_curve(out, &curves[i], i, w);
  plot_loads(out, load, layers, experts, curves[0].colour);
  fprintf(out, "</svg>\n");
  int failed = ferror(out);
  return fclose(out) != 0 || failed ? -1 : 0;
}

#endif
