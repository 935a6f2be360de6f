#!/bin/sh
# compile_time.sh: how long the implementation and the declarations take to compile. tests/run lets nothing else run
# meanwhile: another process on the same machine takes more of a long compilation than of a short one.
. "$(dirname "$0")/support/checks.sh"

cat >"$work/implementation.c" <<'C'
#define MOE_IMPLEMENTATION
#include "moe.h"
C
echo 'int nothing;' >"$work/empty.c"
printf '#include "moe.h"\nint nothing;\n' >"$work/declarations.c"
for i in $(seq 50); do sed "s/@/$i/g" "$root/tests/support/yardstick.c.in"; done >"$work/yardstick.c"

# The CPU time of a compilation, less that of one of nothing, in seconds of a core on which gcc takes 1.08 s for
# `yardstick`, a fixed file (and clang 19, which is quicker at it, 0.97 s). The same compiler compiles it in turns: a
# shared machine's speed differs from another's by a factor of two, and from minute to minute by a third, for each
# compiler by its own share. What disturbs it only adds time, and to a long compilation more than to a short one (single
# ones differ by a third beside their yardsticks): so the quicker half of the compilations is held against the quicker
# half of the yardsticks between them. What comes near the limit, to 2 %, is measured longer.
cpu_time() {
  python3 - "$work/yardstick.c" "$@" <<'P'
import resource, statistics, subprocess, sys
def measure(command):
    def cpu():
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime
    start = cpu()
    subprocess.run(command, check=True)
    return cpu() - start
yardstick, limit, runs, source, baseline, *command = sys.argv[1:]
reference = 0.97 if command[0] == "clang-19" else 1.08
times, cores = [], [measure(command + [yardstick])]
quicker_half = lambda seconds: statistics.mean(sorted(seconds)[: (len(seconds) + 1) // 2])
for run in range(1, int(runs) + 1):
    times.append(measure(command + [source]) - measure(command + [baseline]))
    cores.append(measure(command + [yardstick]))
    cost = quicker_half(times) / quicker_half(cores) * reference
    if run >= 3 and cost < 0.98 * float(limit):
        break
print("%.3f s of %s s allowed (the yardstick takes %.2f s)" % (cost, limit, statistics.mean(cores)))
sys.exit(cost > float(limit))
P
}

timed_check() { # description limit runs source compiler...
  description=$1
  shift
  check "$description" cpu_time "$@" && sed 's/^/# /' "$work/check.log"
}

for compiler in $(compilers); do
  timed_check "$compiler: -O2 of the implementation takes under 6 s" 6 9 \
    "$work/implementation.c" "$work/empty.c" "$compiler" -O2 -I"$root" -o "$work/out.o" -c
  timed_check "$compiler: including the declarations takes under 0.05 s" 0.05 3 \
    "$work/declarations.c" "$work/empty.c" "$compiler" -O2 -I"$root" -o "$work/out.o" -c
done
finish
