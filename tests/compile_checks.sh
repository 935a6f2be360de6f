#!/bin/sh
# compile_checks.sh: the declarations are warning-free under every compiler found, as C99, C11 and C++11 (that the
# implementation is, bits_everywhere.sh sees); two translation units link; the symbols are ours and no others; gcc heeds
# its pragmas.
. "$(dirname "$0")/support/checks.sh"

cat >"$work/implementation.c" <<'C'
#define MOE_IMPLEMENTATION
#include "moe.h"
C
cat >"$work/neuron.c" <<'C'
#include "moe/moe_neuron.h"
#include "moe/moe_neuron.h" /* twice does no harm */
extern int nothing;
C
cp "$work/neuron.c" "$work/neuron.cc"
cat >"$work/neuron_implementation.c" <<'C'
#define MOE_NEURON_IMPLEMENTATION
#include "moe/moe_neuron.h"
C
cat >"$work/user.c" <<'C'
#include "moe.h"
#include "moe.h" /* twice does no harm */
extern int used_from_cpp(void);
int main(void) {
  moe_context ctx = {0};
  moe_router_topk_args args = {0};
  return moe_router_topk_f32(&ctx, &args) == MOE_OK || ctx.status == MOE_OK || used_from_cpp();
}
C
cat >"$work/user.cc" <<'C'
#include "moe.h"
extern "C" int used_from_cpp(void);
int used_from_cpp(void) { return moe_isa_supported(MOE_ISA_SCALAR) != 1; }
C

two_units() { # compiler
  "$1" -O1 -I"$root" -c "$work/implementation.c" -o "$work/implementation.o" &&
    "$1" -std=c99 -I"$root" -c "$work/user.c" -o "$work/user.o" &&
    "$(cxx_of "$1")" -std=c++11 -I"$root" -c "$work/user.cc" -o "$work/user_cc.o" &&
    "$(cxx_of "$1")" "$work/implementation.o" "$work/user.o" "$work/user_cc.o" -lm -o "$work/user" && "$work/user"
}

# Every symbol defined is public and ours; nothing is asked of the system that prints, allocates or exits.
symbols() {
  gcc -c "$work/implementation.s" -o "$work/implementation.o" || return 1
  defined=$(nm -g --defined-only "$work/implementation.o" | awk '{print $3}')
  for symbol in $defined; do
    case $symbol in
    moe_*_) echo "private symbol $symbol is global" && return 1 ;;
    moe_*) ;;
    *) echo "foreign symbol $symbol" && return 1 ;;
    esac
  done
  undefined=$(nm -u "$work/implementation.o" | awk '{print $2}')
  for symbol in $undefined; do
    case $symbol in
    malloc | calloc | realloc | free | printf | fprintf | puts | abort | exit | pthread_* | getenv)
      echo "uses $symbol" && return 1
      ;;
    esac
  done
}

# gcc drops the calls of a function that only fetches: what is fetched outside the tiles (rows to come, blocks of the
# right operand and of the result) is in the code. It is called with the vector registers' upper halves in use, where
# touching a vector the old way would be slow.
fetches() {
  found=$(awk '/^[a-z_0-9.]+:/ { name = $1 } /prefetch/ && name ~ /^moe_prefetches_step/ { n++ } END { print n + 0 }' \
    "$work/implementation.s")
  [ "$found" -ge 3 ] || { echo "$found of 3 fetches" && return 1; }
  ! awk '/^[a-z_0-9.]+:/ { name = $1 } /%xmm/ && name ~ /^moe_prefetches_step/' "$work/implementation.s" | grep . ||
    { echo "vectors beside the fetches" && return 1; }
}

# Every function that uses wide vectors gives up the registers' upper halves (its cold part jumps back into it): SSE
# code after it would be slow. Those of math.inl, whose arguments are vectors, cannot; only kernels call them.
clean() {
  math=$(sed -n 's/^MOE_FN .*MOE_K(\([a-z0-9]*\))(MOE_V.*/\1/p' "$root/moe/vec/math.inl" | paste -sd '|')
  awk -v math="^moe_($math)_(avx2|avx512):" '
    function done() { if (wide && !clean && name !~ /\.cold/ && name !~ math) { print name; bad++ } }
    /^[a-z_0-9.]+:/ { done(); name = $1; wide = clean = 0 }
    /%[yz]mm[0-9]/ { wide = 1; all++ } /vzeroupper/ { clean = 1 }
    END { done(); exit bad > 0 || all == 0 }' "$work/implementation.s"
}

# Elsewhere compilers make vectors of the products.
vectors() {
  aarch64-linux-gnu-gcc -O2 -I"$root" -S "$work/implementation.c" -o "$work/elsewhere.s" || return 1
  found=$(awk '/^[a-z_0-9.]+:/ { name = $1 } /fmla.*\.4s/ && name ~ /^moe_ukernel_/ { print name }' "$work/elsewhere.s")
  [ "$(echo "$found" | sort -u | wc -l)" -eq 2 ] || { echo "vectors in: $found" && return 1; }
}

# Every declared function is defined.
declared_is_defined() {
  declared >"$work/declared"
  [ "$(wc -l <"$work/declared")" -gt 30 ] || return 1
  nm -g --defined-only "$work/implementation.o" | awk '{print $3}' | sort -u >"$work/defined"
  missing=$(comm -23 "$work/declared" "$work/defined")
  extra=$(comm -13 "$work/declared" "$work/defined")
  [ -z "$missing" ] || { echo "declared, not defined: $missing" && return 1; }
  [ -z "$extra" ] || { echo "defined, not declared: $extra" && return 1; }
}

# tests/support/public.inl has every declared function.
listed() {
  printf '#include "moe.h"\n#define PUBLIC(function, form, type) ;listed function;\n#include "support/public.inl"\n' |
    gcc -E -P -I"$root" -I"$root/tests" -xc - | tr ';' '\n' | sed -n 's/^ *listed \([a-z0-9_]*\) *$/\1/p' |
    sort >"$work/listed"
  diff "$work/declared" "$work/listed"
}

# Each public header has what it needs, and is for both languages.
headers() {
  for header in "$root"/moe/api/*.h; do
    case $header in */begin.h | */end.h) continue ;; esac
    echo "#include \"$header\"" >"$work/header.c" && gcc -std=c99 $strict -c "$work/header.c" -o "$work/out.o" &&
      cp "$work/header.c" "$work/header.cc" && g++ -std=c++11 $strict -c "$work/header.cc" -o "$work/out.o" || return 1
  done
}

# The first C block of README.md, as a user would paste it; and it runs.
readme() {
  sed -n '/^```c$/,/^```$/p' "$root/README.md" | sed '1d;/^```$/q' | sed '/^```$/d' >"$work/readme.c" &&
    gcc -std=c11 $strict -I"$root" "$work/readme.c" -o "$work/readme" -lm && "$work/readme" >"$work/readme.out" &&
    grep -q '^y is the layer of x$' "$work/readme.out"
}
check "README: the example compiles and runs" readme

# The manual's example, from its heading to the end of main(); and it runs.
manual() {
  sed -n '/^   AN EXAMPLE/,/^   [A-Z][A-Z]/p' "$root/moe.h" | sed -n '2,/^     }$/s/^     //p' >"$work/manual.c" &&
    gcc -std=c11 $strict -I"$root" "$work/manual.c" -o "$work/manual" -lm && "$work/manual" >"$work/manual.out" &&
    grep -q '^y is the layer of x$' "$work/manual.out"
}
check "moe.h: the manual's example compiles and runs" manual

# gcc drops some pragmas that follow others within a macro: what a region leaves out is left out there, and only there.
cat >"$work/region.c" <<'C'
#include <stdint.h>
#include "moe/base/target.h"
MOE_EXACT_BEGIN
MOE_TARGET_BEGIN("avx2")
void inside(int *x) { for (int i = 0; i < 4096; i++) x[i]++; }
MOE_TARGET_END
MOE_EXACT_END
void outside(int *x) { for (int i = 0; i < 4096; i++) x[i]++; }
C
regions() {
  gcc -O3 -I"$root" -S "$work/region.c" -o "$work/region.s" || return 1
  vectorised=$(awk '/^[a-z]+:/ { name = $1 } /padd/ { print name }' "$work/region.s" | sort -u)
  [ "$vectorised" = "outside:" ] || { echo "vectorised: $vectorised" && return 1; }
}

for compiler in $(compilers); do
  cxx=$(cxx_of "$compiler")
  check "$compiler: declarations, C99" "$compiler" -std=c99 $strict -I"$root" -fsyntax-only -xc "$root/moe.h"
  check "$compiler: declarations, C11" "$compiler" -std=c11 $strict -I"$root" -fsyntax-only -xc "$root/moe.h"
  for standard in c99 c11; do
    check "$compiler: moe_neuron.h, $standard" "$compiler" -std=$standard $strict -I"$root" -fsyntax-only "$work/neuron.c"
  done
  check "$compiler: moe_neuron.h, implementation" "$compiler" -std=c11 $strict -I"$root" -fsyntax-only \
    "$work/neuron_implementation.c"
  if have "$cxx"; then
    for standard in c++11 c++20; do
      check "$cxx: moe_neuron.h, $standard" "$cxx" -std=$standard $strict -I"$root" -fsyntax-only "$work/neuron.cc"
      check "$cxx: declarations, $standard" "$cxx" -std=$standard $strict -I"$root" -c "$work/user.cc" -o "$work/out.o"
    done
    check "$compiler: C and C++ users and the implementation link and run" two_units "$compiler"
  else
    skip "$compiler: C++ (no $cxx)"
  fi
done
check "gcc -O2: assembly" gcc -O2 -I"$root" -S "$work/implementation.c" -o "$work/implementation.s"
check "symbols: all public, none foreign, nothing that prints, allocates or exits" symbols
check "symbols: what is declared is defined, and nothing else" declared_is_defined
check "public.inl: every declared function, which test_stack calls" listed
check "every header in moe/api compiles alone" headers
# The runtime's ABI, against what is written down apart from it and, where there is an SDK, against that.
agrees() { # compiler, folder of the headers, source
  $1 $strict -I"$root" -isystem "$2" -DMOE_NEURON_USE_SDK_HEADERS -fsyntax-only "$3"
}
disagrees() { # a change of the ABI is an error
  rm -rf "$work/other" && mkdir "$work/other" && cp -r "$root/moe" "$root/moe.h" "$work/other" &&
    sed -i "$1" "$work/other/moe/neuron/abi.h" && ! cmp -s "$work/other/moe/neuron/abi.h" "$root/moe/neuron/abi.h" &&
    ! gcc -std=c11 -I"$work/other" -isystem "$root/tests/neuron/sdk" -DMOE_NEURON_USE_SDK_HEADERS -fsyntax-only \
      "$work/neuron_implementation.c" 2>/dev/null
}
for sdk in "$root/tests/neuron/sdk" "${NEURON_SDK_INCLUDE:-/opt/aws/neuron/include}"; do
  if [ -e "$sdk/nrt/nrt.h" ]; then
    check "moe_neuron.h agrees with $sdk" agrees "gcc -std=c11" "$sdk" "$work/neuron_implementation.c"
    check "moe_neuron.h agrees with $sdk, C++" agrees "g++ -std=c++11" "$sdk" "$work/neuron.cc"
  else
    skip "moe_neuron.h against the SDK's headers (none in $sdk; see NEURON_SDK_INCLUDE)"
  fi
done
for change in 's/X(RESOURCE, 4,/X(RESOURCE, 8,/' 's/arch_name\[16\]/arch_name[17]/' 's/X(UINT16, 0x5/X(UINT16, 0x6/' \
  's/X(INSTANCE_TRN3, 14)/X(INSTANCE_TRN3, 16)/' 's/nrt_execute_repeat, (MOE/nrt_execute_repeat, (const MOE/'; do
  check "moe_neuron.h: a change of the ABI is noticed: $change" disagrees "$change"
done
alone() { ! echo '#include "moe.h"' | gcc -E -I"$root" -DMOE_IMPLEMENTATION -xc - | grep -i -e neuron/ -e dlfcn; }
check "moe.h includes nothing of moe_neuron.h" alone
case $(uname -m) in
x86_64)
  check "gcc heeds what a region for an instruction set leaves out" regions
  check "fetches outside the tiles are not dropped, and touch no vector" fetches
  check "wide vectors are left clean" clean
  ;;
esac
if have aarch64-linux-gnu-gcc; then
  check "aarch64: both products are formed in vectors" vectors
else
  skip "aarch64: products in vectors (needs aarch64-linux-gnu-gcc)"
fi
finish
