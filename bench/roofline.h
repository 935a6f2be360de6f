/* moe_bench.svg: arithmetic intensity against speed, both logarithmic, under the roofs this machine was measured to
   have. */
#ifndef MOE_BENCH_ROOFLINE_H
#define MOE_BENCH_ROOFLINE_H

enum {
  ROOF_WIDTH = 1110,
  ROOF_HEIGHT = 640,
  ROOF_LEFT = 84,
  ROOF_TOP = 64,
  ROOF_RIGHT = 780,
  ROOF_BOTTOM = 570,
  ROOF_MARK = 6,
  ROOF_LABEL_WIDTH = 36,
  ROOF_LABEL_HEIGHT = 14,
  ROOF_COLUMN = 36,
  ROOF_POINTS = 64
};

typedef struct roof_point {
  double intensity, gflops, percent;
  int model, kind; /* colour, mark */
} roof_point;

typedef struct roof_box {
  double x, y, width, height; /* about its middle */
} roof_box;

typedef struct roof_plot {
  const char *title;
  bench_limits limits;
  int with_dot;
  const char *const *kinds; /* names */
  int kind_count, count;
  roof_point points[ROOF_POINTS];
  double x0, x1, y0, y1; /* ranges, decimal logarithms */
} roof_plot;

static const char *const roof_colours[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#333333"};
enum { ROOF_COLOURS = sizeof roof_colours / sizeof *roof_colours };

static const char *roof_colour(int model) { return roof_colours[model % ROOF_COLOURS]; }

static double roof_x(const roof_plot *p, double intensity) {
  return ROOF_LEFT + (ROOF_RIGHT - ROOF_LEFT) * (log10(intensity) - p->x0) / (p->x1 - p->x0);
}

static double roof_y(const roof_plot *p, double gflops) {
  return ROOF_BOTTOM - (ROOF_BOTTOM - ROOF_TOP) * (log10(gflops) - p->y0) / (p->y1 - p->y0);
}

static double roof_highest(const roof_plot *p) {
  return p->with_dot && p->limits.dot > p->limits.fma ? p->limits.dot : p->limits.fma;
}

/* Room for every point and for the ridge. */
static void roof_ranges(roof_plot *p) {
  const double peak = roof_highest(p) > 0 ? roof_highest(p) : 1, read = p->limits.read > 0 ? p->limits.read : 1;
  double left = peak / read, right = left, low = peak, high = peak;
  for (int i = 0; i < p->count; i++) {
    const roof_point *q = &p->points[i];
    if (q->intensity < left) left = q->intensity;
    if (q->intensity > right) right = q->intensity;
    if (q->gflops < low) low = q->gflops;
    if (q->gflops > high) high = q->gflops;
  }
  p->x0 = log10(left / 2.5), p->x1 = log10(right * 2.5);
  p->y0 = log10(low / 2.5), p->y1 = log10(high * 1.8);
}

/* Lines and numbers at 1, 2 and 5 times the powers of ten. */
static void roof_ticks(FILE *out, const roof_plot *p, int vertical) {
  static const double steps[] = {1, 2, 5};
  const double first = vertical ? p->y0 : p->x0, last = vertical ? p->y1 : p->x1;
  for (int power = (int)floor(first); power <= (int)last; power++)
    for (int i = 0; i < 3; i++) {
      const double value = steps[i] * pow(10, power);
      if (log10(value) < first || log10(value) > last) continue;
      if (vertical) {
        fprintf(out, "<path d='M%d %.1fH%d' stroke='#e4e4e4'/>", ROOF_LEFT, roof_y(p, value), ROOF_RIGHT);
        fprintf(out, "<text x='%d' y='%.1f' text-anchor='end'>%g</text>\n", ROOF_LEFT - 8, roof_y(p, value) + 4, value);
      } else {
        fprintf(out, "<path d='M%.1f %dV%d' stroke='#e4e4e4'/>", roof_x(p, value), ROOF_TOP, ROOF_BOTTOM);
        fprintf(out, "<text x='%.1f' y='%d' text-anchor='middle'>%g</text>\n", roof_x(p, value), ROOF_BOTTOM + 18,
                value);
      }
    }
}

static void roof_axes(FILE *out, const roof_plot *p) {
  fprintf(out, "<text x='%d' y='30' font-size='18'>%s</text>\n", ROOF_LEFT, p->title);
  fprintf(out,
          "<text x='%d' y='50' fill='#555'>labels and table: percent of the limit, which is the highest roof above the "
          "point</text>\n",
          ROOF_LEFT);
  roof_ticks(out, p, 0);
  roof_ticks(out, p, 1);
  fprintf(out, "<path d='M%d %dV%dH%d' fill='none' stroke='#333'/>\n", ROOF_LEFT, ROOF_TOP, ROOF_BOTTOM, ROOF_RIGHT);
  fprintf(out, "<text x='%d' y='%d' text-anchor='middle'>arithmetic intensity, flop per byte that must move</text>\n",
          (ROOF_LEFT + ROOF_RIGHT) / 2, ROOF_BOTTOM + 42);
  fprintf(out, "<text transform='translate(24 %d) rotate(-90)' text-anchor='middle'>GFLOP/s</text>\n",
          (ROOF_TOP + ROOF_BOTTOM) / 2);
}

/* One compute roof, its name left of where it begins: above the slope there are no points. */
static void roof_roof(FILE *out, const roof_plot *p, const char *name, double peak) {
  if (peak <= 0) return;
  const double x = roof_x(p, peak / p->limits.read), y = roof_y(p, peak);
  fprintf(out, "<path d='M%.1f %.1fH%d' stroke='#333' stroke-width='1.8'/>\n", x, y, ROOF_RIGHT);
  fprintf(out, "<text x='%.1f' y='%.1f' text-anchor='end'>%s %.0f GFLOP/s</text>\n", x - 10, y + 4.5, name, peak);
}

static void roof_roofs(FILE *out, const roof_plot *p) {
  const double read = p->limits.read, peak = roof_highest(p);
  if (read <= 0 || peak <= 0) return;
  const double begin = pow(10, p->x0) * read > pow(10, p->y0) ? pow(10, p->x0) : pow(10, p->y0) / read;
  const double x0 = roof_x(p, begin), y0 = roof_y(p, begin * read);
  const double x1 = roof_x(p, peak / read), y1 = roof_y(p, peak);
  fprintf(out, "<path d='M%.1f %.1fL%.1f %.1f' stroke='#333' stroke-width='1.8'/>\n", x0, y0, x1, y1);
  fprintf(out,
          "<text transform='translate(%.1f %.1f) rotate(%.1f)' text-anchor='middle'>memory read %.1f "
          "GB/s</text>\n",
          x0 + 0.35 * (x1 - x0) - 6, y0 + 0.35 * (y1 - y0) - 8, atan2(y1 - y0, x1 - x0) * 57.29578, read);
  if (p->with_dot) roof_roof(out, p, "bf16 dot", p->limits.dot);
  roof_roof(out, p, "f32 fma", p->limits.fma);
}

/* Circle, square, triangle, diamond. */
static void roof_mark(FILE *out, double x, double y, int model, int kind) {
  static const char *const shapes[] = {"M-6 0a6 6 0 1 0 12 0a6 6 0 1 0 -12 0z", "M-5.5 -5.5h11v11h-11z",
                                       "M0 -7l6.5 12h-13z", "M0 -7.5l7 7.5l-7 7.5l-7 -7.5z"};
  fprintf(out, "<path transform='translate(%.1f %.1f)' d='%s' fill='%s' stroke='#fff' stroke-width='0.8'/>\n", x, y,
          shapes[kind % 4], roof_colour(model));
}

static int roof_apart(roof_box a, roof_box b) {
  return fabs(a.x - b.x) * 2 >= a.width + b.width || fabs(a.y - b.y) * 2 >= a.height + b.height;
}

static roof_box roof_mark_box(const roof_plot *p, int i) {
  const roof_box box = {roof_x(p, p->points[i].intensity), roof_y(p, p->points[i].gflops), 2 * ROOF_MARK,
                        2 * ROOF_MARK};
  return box;
}

/* Whether a box lies under the roofs, and on neither side of one only. */
static int roof_under(const roof_plot *p, roof_box box) {
  const double peaks[] = {p->limits.fma, p->with_dot ? p->limits.dot : 0};
  const double highest = roof_highest(p);
  for (int i = 0; i < 2; i++) {
    if (peaks[i] <= 0) continue;
    const double ridge = peaks[i] < highest ? roof_x(p, peaks[i] / p->limits.read) : ROOF_LEFT;
    const double line = roof_y(p, peaks[i]), reach = (box.height + 4) / 2;
    if (box.x + box.width / 2 > ridge && fabs(box.y - line) < reach) return 0;
    if (peaks[i] >= highest && box.y < line) return 0;
  }
  const double rate = (roof_y(p, p->limits.read) - roof_y(p, 10 * p->limits.read)) / (roof_x(p, 10) - roof_x(p, 1));
  const double slope = roof_y(p, p->limits.read) - rate * (box.x - box.width / 2 - roof_x(p, 1));
  return box.y - box.height / 2 > slope;
}

static int roof_free(const roof_plot *p, const roof_box *labels, int placed, roof_box box) {
  if (box.x + box.width / 2 > ROOF_RIGHT || box.y + box.height / 2 > ROOF_BOTTOM || !roof_under(p, box)) return 0;
  for (int i = 0; i < p->count; i++)
    if (!roof_apart(box, roof_mark_box(p, i))) return 0;
  for (int i = 0; i < placed; i++)
    if (!roof_apart(box, labels[i])) return 0;
  return 1;
}

/* The nearest free place around the point, looked for in widening circles. */
static roof_box roof_place(const roof_plot *p, const roof_box *labels, int placed, int point) {
  const roof_box mark = roof_mark_box(p, point);
  for (int radius = 14; radius < 300; radius += 6)
    for (int turn = 0; turn < 24; turn++) {
      const double angle = turn * 6.2831853 / 24;
      const roof_box box = {mark.x + (radius + 14) * cos(angle), mark.y + radius * sin(angle), ROOF_LABEL_WIDTH,
                            ROOF_LABEL_HEIGHT};
      if (roof_free(p, labels, placed, box)) return box;
    }
  return mark;
}

static void roof_points(FILE *out, const roof_plot *p) {
  roof_box labels[ROOF_POINTS];
  for (int i = 0; i < p->count; i++) {
    const roof_box mark = roof_mark_box(p, i);
    labels[i] = roof_place(p, labels, i, i);
    fprintf(out, "<path d='M%.1f %.1fL%.1f %.1f' stroke='%s' stroke-width='0.6'/>\n", mark.x, mark.y, labels[i].x,
            labels[i].y, roof_colour(p->points[i].model));
  }
  for (int i = 0; i < p->count; i++) {
    const roof_box mark = roof_mark_box(p, i);
    roof_mark(out, mark.x, mark.y, p->points[i].model, p->points[i].kind);
  }
  for (int i = 0; i < p->count; i++) {
    const roof_box box = labels[i];
    fprintf(out, "<rect x='%.1f' y='%.1f' width='%.0f' height='%.0f' fill='#fff' fill-opacity='0.85'/>",
            box.x - box.width / 2, box.y - box.height / 2, box.width, box.height);
    fprintf(out, "<text x='%.1f' y='%.1f' text-anchor='middle' fill='%s'>%.0f %%</text>\n", box.x, box.y + 4.5,
            roof_colour(p->points[i].model), p->points[i].percent);
  }
}

/* Names of marks and colours, and the percentages as a table: a row per model, a column per mark. */
static void roof_legend(FILE *out, const roof_plot *p) {
  const int x = ROOF_RIGHT + 30, columns = x + 158, row = 24;
  const int table = ROOF_TOP + 20 + row * (p->kind_count + 2);
  for (int i = 0; i < p->kind_count; i++) {
    roof_mark(out, x, ROOF_TOP + 20 + row * i, ROOF_COLOURS - 1, i);
    fprintf(out, "<text x='%d' y='%d'>%s</text>\n", x + 18, ROOF_TOP + 24 + row * i, p->kinds[i]);
    roof_mark(out, columns + ROOF_COLUMN * i, table - row, ROOF_COLOURS - 1, i);
  }
  for (int i = 0; i < BENCH_MODELS; i++) {
    fprintf(out, "<path d='M%d %dh14' stroke='%s' stroke-width='6'/>", x - 7, table + row * i, roof_colour(i));
    fprintf(out, "<text x='%d' y='%d'>%s</text>\n", x + 18, table + row * i + 4, bench_models[i].name);
  }
  for (int i = 0; i < p->count; i++)
    fprintf(out, "<text x='%d' y='%d' text-anchor='middle'>%.0f</text>\n", columns + ROOF_COLUMN * p->points[i].kind,
            table + row * p->points[i].model + 4, p->points[i].percent);
}

/* 0, or -1 with errno set. */
static int roof_write(roof_plot *p, const char *path) {
  FILE *out = fopen(path, "w");
  if (!out) return -1;
  roof_ranges(p);
  fprintf(out,
          "<svg xmlns='http://www.w3.org/2000/svg' width='%d' height='%d' viewBox='0 0 %d %d' font-family='sans-serif' "
          "font-size='13'>\n"
          "<rect width='100%%' height='100%%' fill='#fff'/>\n",
          ROOF_WIDTH, ROOF_HEIGHT, ROOF_WIDTH, ROOF_HEIGHT);
  roof_axes(out, p);
  roof_roofs(out, p);
  roof_points(out, p);
  roof_legend(out, p);
  fprintf(out, "</svg>\n");
  const int failed = ferror(out);
  return fclose(out) != 0 || failed ? -1 : 0;
}

#endif
