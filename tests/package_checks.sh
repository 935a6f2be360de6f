#!/bin/sh
# package_checks.sh: the ways to get at the library: one amalgamated file alone in a directory, an installed header with
# pkg-config, CMake or Meson, a Meson subproject, and the plain compiler line for the example; and a build where the
# tests' needs are missing.
. "$(dirname "$0")/support/checks.sh"
strict="-std=c11 -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror"
single=$work/single

cat >"$work/program.c" <<'C'
#define MOE_IMPLEMENTATION
#include <moe.h>
int main(void) {
  float x[3] = {-1.0f, 0.0f, 1.0f}, y[3];
  return moe_activation_f32(NULL, MOE_ACT_RELU, 0.0f, x, y, NULL, 3) != MOE_OK || y[0] != 0.0f || y[2] != 1.0f;
}
C

amalgamate() {
  mkdir -p "$single" && python3 "$root/tools/amalgamate.py" "$single/moe.h" && ls -l "$single" &&
    ! grep -n '^ *# *include *"' "$single/moe.h" | grep -v '"moe.h"'
}
neuron_alone() {
  cd "$single" && printf '#define MOE_NEURON_IMPLEMENTATION\n#include "moe_neuron.h"\n' >neuron.c &&
    gcc -O1 $strict -c neuron.c -o neuron.o &&
    printf '#define MOE_IMPLEMENTATION\n#include "moe_neuron.h"\n' >both.c && gcc $strict -fsyntax-only both.c
}
alone() {
  cd "$single" && printf '#define MOE_IMPLEMENTATION\n#include "moe.h"\n' >one.c && gcc -O2 $strict -c one.c -o one.o
}

# What the compiler itself sees is to the last character what it sees of the tree.
preprocessed() { printf '#define MOE_IMPLEMENTATION\n#include "moe.h"\n' | "$1" -E -P -I"$2" -xc - -o "$3"; }
same_code() { # compiler
  preprocessed "$1" "$single" "$work/single.i" && preprocessed "$1" "$root" "$work/tree.i" &&
    [ "$(wc -l <"$work/tree.i")" -gt 10000 ] && cmp "$work/single.i" "$work/tree.i"
}

installed() {
  meson setup "$work/build" "$root" --prefix="$work/prefix" --libdir=lib -Dtests=disabled -Dbench=disabled \
    -Dexamples=disabled && meson install -C "$work/build" && export PKG_CONFIG_PATH="$work/prefix/lib/pkgconfig" &&
    pkg-config --modversion moe && cd "$work" && rm -rf tree &&
    gcc -O1 $(pkg-config --cflags moe) program.c -o installed $(pkg-config --libs moe) && ./installed
}

# The optional header is installed with the rest.
installed_neuron() {
  printf '#define MOE_IMPLEMENTATION\n#include <moe/moe_neuron.h>\nint main(void) { return 0; }\n' >"$work/neuron.c" &&
    gcc -O1 -I"$work/prefix/include" "$work/neuron.c" -o "$work/neuron" -lm -ldl && "$work/neuron"
}

# What is installed, then moved, is found by CMake, but not as another version.
cmake_consumer() {
  mkdir -p "$work/cmake" && cd "$work/cmake" && cp "$work/program.c" . || return 1
  cat >CMakeLists.txt <<'M'
cmake_minimum_required(VERSION 3.11)
project(consumer C)
find_package(moe 99 QUIET)
if(moe_FOUND)
  message(FATAL_ERROR "version 99 is found")
endif()
find_package(moe 0.1 REQUIRED)
find_package(moe REQUIRED)
add_executable(program program.c)
target_link_libraries(program PRIVATE moe::moe)
M
  cp -r "$work/prefix" "$work/moved" && cmake -G Ninja -B build -DCMAKE_PREFIX_PATH="$work/moved" &&
    cmake --build build --verbose >build.log && cat build.log && ./build/program &&
    grep -q -e "-isystem $work/moved/include" build.log
}

meson_consumer() { # how the dependency is found
  mkdir -p "$work/meson-$1" && cd "$work/meson-$1" && cp "$work/program.c" . || return 1
  cat >meson.build <<M
project('consumer', 'c')
executable('program', 'program.c', dependencies: dependency('moe', version: '>=0.1', method: '$1',
  modules: '$1' == 'cmake' ? ['moe::moe'] : []))
M
  PKG_CONFIG_PATH="$work/prefix/lib/pkgconfig" meson setup build --cmake-prefix-path="$work/prefix" &&
    ninja -C build && ./build/program
}

# A machine without cmocka: neither pkg-config nor CMake knows it, or there is no CMake either.
setup_without_cmocka() { # build directory, line of a machine file, option
  printf '%b\n' "$2" >"$work/machine.ini"
  PKG_CONFIG_LIBDIR=$work/nothing meson setup --buildtype=debug --native-file "$work/machine.ini" $3 "$1" "$root" \
    >"$1.log" 2>&1
  status=$?
  cat "$1.log"
  return $status
}
no_cmocka="[cmake]\\nCMAKE_DISABLE_FIND_PACKAGE_cmocka = 'ON'"
without_cmocka() { # build directory, line of a machine file
  setup_without_cmocka "$1" "$2" && grep -q 'dependency cmocka found: NO' "$1.log" &&
    grep -q 'tests are not built.*cmocka' "$1.log"
}
bare() {
  without_cmocka "$work/bare" "$no_cmocka" && ninja -C "$work/bare" && [ -x "$work/bare/train_lm" ] &&
    [ ! -e "$work/bare/tests" ]
}
barer() {
  without_cmocka "$work/barer" "[binaries]\\ncmake = 'none'" && grep -q 'CMake is not here' "$work/barer.log"
}
tests_demanded() { # enabled, they are an error that names what is missing
  ! setup_without_cmocka "$work/demanding" "$no_cmocka" -Dtests=enabled &&
    grep -q 'ERROR: Dependency.*cmocka.* not found' "$work/demanding.log"
}

subproject() {
  mkdir -p "$work/super/subprojects" && ln -s "$root" "$work/super/subprojects/moe" && cd "$work/super" &&
    cp "$work/program.c" . || return 1
  cat >meson.build <<'M'
project('super', 'c')
moe_dep = dependency('moe', fallback: ['moe', 'moe_dep'])
executable('program', 'program.c', dependencies: moe_dep)
M
  meson setup build && ninja -C build && ./build/program &&
    [ ! -e build/subprojects/moe/tests ] && [ ! -e build/subprojects/moe/train_lm ]
}

version() { # the header's and Meson's are one
  header=$(sed -n 's/^#define MOE_VERSION_[A-Z]* \([0-9]*\)$/\1/p' "$root/moe.h" | paste -sd.)
  grep -q "^project.*version: '$header'" "$root/meson.build" || { echo "$header in moe.h" && return 1; }
}

example() { # the command that README shows, in a fresh copy without anything built
  mkdir "$work/copy" && cp -r "$root/moe.h" "$root/moe" "$root/examples" "$work/copy" && cd "$work/copy" &&
    cc -O2 -I. examples/train_lm.c -o train_lm -lm && ./train_lm --steps 3 "$root/moe.h" &&
    ./train_lm --dtype mxfp8 --steps 3 "$root/moe.h"
}

gpt_oss() { # checks itself against the model's formulas
  cc -O2 -I"$root" "$root/examples/gpt_oss_layer.c" -o "$work/gpt_oss_layer" -lm && "$work/gpt_oss_layer"
}

# Operations of the bench run, and print a JSON object each; peers' times need the peers, which may be missing here.
benchmark() { # operations, threads: the limits are measured once, those of two threads take long beside other tests
  [ -x "$work/moe_bench" ] || cc -O2 -I"$root" "$root/bench/moe_bench.c" -o "$work/moe_bench" -lm || return 1
  "$work/moe_bench" --op "$1" --shape 8,64,32,4,2 --threads "$2" --repeats 1 --json >"$work/result.json" &&
    cat "$work/result.json" && python3 -c 'import json, sys
results = [json.loads(line) for line in sys.stdin]
assert [result["op"] for result in results] == sys.argv[1].split(",")
assert all(result["seconds"] > 0 and result["percent_of_limit"] > 0 for result in results)' "$1" \
      <"$work/result.json"
}
bench_ops() { sed -n 's/^    {"\([a-z_-]*\)", bench_run_.*/\1/p' "$root/bench/ops.h" | paste -sd, -; }
peers() {
  cc -O2 $strict -Wno-unused-function -shared -fPIC -I"$root" "$root/bench/peers/library.c" -o "$work/library.so" -lm \
    -lpthread &&
    if [ -n "${GGML_DIR-}" ]; then
      cc -O2 $strict -fsyntax-only -I"$GGML_DIR/include" "$root/bench/peers/ggml_peer.c" || return 1
    fi &&
    for script in "$root"/bench/peers/*.py; do
      python3 -c 'import ast, sys; ast.parse(open(sys.argv[1]).read())' "$script" || return 1
    done
}

if check "amalgamate.py makes one file without quoted includes" amalgamate; then
  check "that file compiles alone" alone
  check "moe_neuron.h next to it compiles, without and with it" neuron_alone
  for compiler in $(compilers); do check "$compiler: that file is the same code" same_code "$compiler"; done
fi
check "moe.h and meson.build agree on the version" version
check "installed header and pkg-config" installed
check "installed moe_neuron.h" installed_neuron
if have cmake; then
  check "CMake consumer: find_package(moe) finds moe::moe" cmake_consumer
else
  skip "CMake consumer (needs cmake)"
fi
check "Meson consumer, by pkg-config" meson_consumer pkg-config
if have cmake; then check "Meson consumer, by CMake's package" meson_consumer cmake; fi
check "meson setup and ninja without cmocka: the tests are off, a line says so" bare
check "meson setup without cmocka and CMake" barer
check "-Dtests=enabled without cmocka: an error that names it" tests_demanded
check "as a Meson subproject, nothing of ours is built" subproject
if [ -f "$root/examples/train_lm.c" ]; then
  check "cc -O2 -I. examples/train_lm.c -o train_lm -lm && ./train_lm" example
else
  skip "examples/train_lm.c"
fi
check "examples/gpt_oss_layer.c agrees with the model's formulas" gpt_oss
check "moe_bench --op fwd, 2 threads" benchmark fwd 2
check "moe_bench --op $(bench_ops)" benchmark "$(bench_ops)" 1
check "bench/peers compile" peers
finish
