#!/bin/sh
# contact_checks.sh: what the library meets in other people's programs: macros of <windows.h>, <complex.h> and others,
# MinGW's compiler, C++, and programs that keep its symbols to themselves or export them.
. "$(dirname "$0")/support/checks.sh"

mingw=x86_64-w64-mingw32

# Words that headers of Windows, X11 and Unix define as macros. complex.h's I is among them wherever it stands.
cat >"$work/words.h" <<'C'
#define small char
#define near
#define far
#define pascal
#define cdecl
#define hyper long long
#define interface struct
#define min(a, b) (((a) < (b)) ? (a) : (b))
#define max(a, b) (((a) > (b)) ? (a) : (b))
#define major(device) ((device) >> 8)
#define minor(device) ((device) & 255)
#define howmany(x, y) (((x) + ((y) - 1)) / (y))
#define roundup(x, y) (howmany(x, y) * (y))
#define MIN(a, b) min(a, b)
#define MAX(a, b) max(a, b)
#define IN
#define OUT
#define OPTIONAL
#define CONST const
#define VOID void
#define BOOL int
#define BYTE unsigned char
#define DWORD unsigned long
#define TRUE 1
#define FALSE 0
#define True 1
#define False 0
#define Bool int
#define Status int
#define None 0L
#define Always 2
#define Success 0
#define Complex 0
#define ERROR 0
#define NO_ERROR 0
#define ERROR_INVALID_INDEX 1413
#define DELETE 0x00010000L
#define STRICT 1
#define OVERFLOW 3
#define UNDERFLOW 4
#define DOMAIN 1
C
# They are as they were behind it. Whoever wants .I from us and I from complex.h takes _Complex_I for the latter.
cat >"$work/words.c" <<'C'
#include "words.h"
#include <complex.h>
#include <tgmath.h>
#include "moe.h"
typedef char as_it_was[sizeof(small) == 1 && max(1, 2) == 2 && ERROR == 0 ? 1 : -1];
double _Complex a_root = I;
#undef I
moe_blockwise_layer a_layer = {.T = 1, .H = 64, .I = 64, .E = 1};
double _Complex b_root = _Complex_I;
#define I _Complex_I
#define MOE_IMPLEMENTATION
#include "moe.h"
double _Complex c_root = I;
C
printf '#include "words.h"\n#include <complex.h>\n#include "moe.h"\n' >"$work/words.cc"
cat >"$work/complex_after.c" <<'C'
#include "moe.h"
#include <complex.h>
#define MOE_IMPLEMENTATION
#include "moe.h"
double _Complex a_root = I;
C

printf '#define MOE_IMPLEMENTATION\n#include "moe.h"\n' >"$work/implementation.c"
cp "$work/implementation.c" "$work/implementation.cc"

# MOE_IMPLEMENTATION in a C++ file is one error, which says what to do.
cpp_error() { # compiler
  ! "$1" -I"$root" -fsyntax-only "$work/implementation.cc" 2>"$work/errors" || return 1
  cat "$work/errors"
  [ "$(grep -c 'error:' "$work/errors")" -eq 1 ] && grep -q 'error:.*MOE_IMPLEMENTATION.* C file' "$work/errors"
}

# ------------------------------------------------------------------------------------------------------- visibility

cat >"$work/program.c" <<'C'
#include "moe.h"
int main(void) {
  float x[3] = {-1.0f, 0.0f, 1.0f}, y[3];
  return moe_activation_f32(NULL, MOE_ACT_RELU, 0.0f, x, y, NULL, 3) != MOE_OK || y[0] != 0.0f || y[2] != 1.0f;
}
C
cat >"$work/static.c" <<'C'
#define MOE_STATIC
#define MOE_IMPLEMENTATION
#include "program.c"
C
printf '#define MOE_STATIC\n#define MOE_IMPLEMENTATION\n#include "moe.h"\n' >"$work/other.c"
printf 'moe_isa other(void);\nmoe_isa other(void) { return moe_isa_active(); }\n' >>"$work/other.c"

# Two files of one program, each with all of it to itself.
static_twice() {
  gcc -O2 $strict -I"$root" -c "$work/static.c" -o "$work/static.o" &&
    gcc -O0 $strict -I"$root" -c "$work/other.c" -o "$work/other.o" &&
    [ "$(nm -g --defined-only "$work/static.o" "$work/other.o" | awk 'NF == 3 {print $3}' | paste -sd' ')" = \
      "main other" ] && gcc "$work/static.o" "$work/other.o" -o "$work/static" -lm && "$work/static"
}

# Under -fvisibility=hidden a shared library exports what MOE_SHARED, or MOE_API, tells it to.
shared() { # name, flag
  gcc -O0 -fPIC -shared -fvisibility=hidden ${2+"$2"} -I"$root" "$work/implementation.c" -o "$work/lib$1.so" -lm &&
    nm -D --defined-only "$work/lib$1.so" | awk '{print $3}' | sort -u >"$work/$1"
}
hidden() { shared hidden && [ ! -s "$work/hidden" ]; }
exported() { # flag
  shared exported "$1" && declared >"$work/declared" && diff "$work/declared" "$work/exported" &&
    gcc -fvisibility=hidden "$1" -I"$root" "$work/program.c" -L"$work" -lexported "-Wl,-rpath,$work" -o "$work/user" &&
    "$work/user"
}
# Of a DLL's table of names, each behind its number; a user that takes them from there.
dll() {
  $mingw-gcc -O0 $strict -DMOE_SHARED -shared -I"$root" "$work/implementation.c" \
    -o "$work/moe.dll" "-Wl,--out-implib,$work/libmoe.dll.a" &&
    $mingw-objdump -p "$work/moe.dll" | sed -n 's/^.*\[ *[0-9]*\].* \(moe_[a-z0-9_]*\)$/\1/p' | sort -u \
      >"$work/names" &&
    declared >"$work/declared" && diff "$work/declared" "$work/names" &&
    $mingw-gcc $strict -DMOE_SHARED -I"$root" -c "$work/program.c" -o "$work/user.o" &&
    $mingw-nm "$work/user.o" | grep -q '__imp_moe_activation_f32' &&
    $mingw-gcc "$work/user.o" "$work/libmoe.dll.a" -o "$work/user.exe"
}

# ------------------------------------------------------------------------------------------------------------ MinGW

cat >"$work/windows.c" <<'C'
#include <winsock2.h>
#include <windows.h>
#include <ole2.h>
#include <shlobj.h>
#include <dlgs.h>
#include <ntsecapi.h>
#include <complex.h>
#define MOE_IMPLEMENTATION
#include "moe.h"
typedef char as_it_was[max(1, 2) == 2 && ERROR == 0 && sizeof(interface {int x;}) == 4 ? 1 : -1];
C

# Moves of wide vectors that want their memory aligned to 32 or 64 bytes. The stack's is to 16, and gcc does not align
# it further: there must be none to or from it, and as other registers may point there, none at all.
aligned() { # object
  $mingw-objdump -d --no-show-raw-insn "$1" |
    grep -c -e 'vmov\(ap[sd]\|dqa[0-9]*\)  *%[yz]mm.*(' -e 'vmov\(ap[sd]\|dqa[0-9]*\)  *.*(.*%[yz]mm'
}
# Debian's gcc is patched to write none. What others write is what it writes with aligned moves wherever memory is
# addressed by the stack's registers: the scan finds these, but none where target.h's directives are assembled, too.
moves() {
  sed '/^\.macro/!{/%[yz]mm.*(%r[sb]p\|(%r[sb]p.*%[yz]mm/{
s/\tvmovup\([sd]\)\t/\tvmovap\1\t/;s/\tvmovdqu\t/\tvmovdqa\t/;s/\tvmovdqu\(8\|16\)\t/\tvmovdqa32\t/
s/\tvmovdqu\(32\|64\)\t/\tvmovdqa\1\t/;}}' "$work/windows.s" >"$work/aligned.s"
  sed '/^\.macro/,/^\.endm/d' "$work/aligned.s" >"$work/bare.s"
  for name in windows aligned bare; do $mingw-gcc -c "$work/$name.s" -o "$work/$name.o" || return 1; done
  echo "aligned moves: $(aligned "$work/bare.o") written, $(aligned "$work/aligned.o") assembled"
  [ "$(aligned "$work/bare.o")" -gt 100 ] && [ "$(aligned "$work/aligned.o")" -eq 0 ] &&
    [ "$(aligned "$work/windows.o")" -eq 0 ]
}
# Link-time optimisation may assemble functions without these directives: it then says so, rather than be wrong.
lto() {
  if $mingw-gcc -O2 -flto -I"$root" "$work/implementation.c" "$work/program.c" -save-temps=obj -o "$work/lto.exe" \
    2>"$work/errors"; then
    ! grep -L '^\.macro vmovaps' $(grep -l '%[yz]mm' "$work"/*ltrans*.s) | grep .
  else
    cat "$work/errors"
    grep -q 'moe.h: compile the implementation with -fno-lto' "$work/errors"
  fi
}

for compiler in $(compilers); do
  check "$compiler: Windows macros, complex.h" "$compiler" -std=gnu11 $strict -I"$root" -fsyntax-only "$work/words.c"
  check "$compiler: complex.h after the declarations" "$compiler" $strict -I"$root" -fsyntax-only \
    "$work/complex_after.c"
  check "$compiler: MOE_STATIC, without warnings" "$compiler" $strict -I"$root" -fsyntax-only "$work/static.c"
  cxx=$(cxx_of "$compiler")
  have "$cxx" || { skip "$compiler: C++ (no $cxx)" && continue; }
  check "$cxx: Windows macros, complex.h" "$cxx" $strict -I"$root" -fsyntax-only "$work/words.cc"
  check "$cxx: MOE_IMPLEMENTATION is one error, which says what to do" cpp_error "$cxx"
done
check "MOE_STATIC in two files of a program: no symbol is shared" static_twice
check "hidden visibility: nothing is exported" hidden
check "hidden visibility, MOE_SHARED: what is declared is exported, and nothing else" exported -DMOE_SHARED
check "hidden visibility, MOE_API: the same" exported '-DMOE_API=__attribute__((visibility("default")))'
if have $mingw-gcc; then
  for flags in -O0 -O2; do
    check "MinGW $flags: no warnings" $mingw-gcc $flags $strict -I"$root" -S "$work/implementation.c" \
      -o "$work/windows.s" && check "MinGW $flags: no vector move relies on an aligned stack" moves
  done
  check "MinGW -flto: the directives are everywhere, or an error says so" lto
  check "MinGW: windows.h and complex.h" $mingw-gcc $strict -I"$root" -fsyntax-only "$work/windows.c"
  check "MinGW: MOE_SHARED makes a DLL and its user" dll
  if have clang; then
    check "clang for Windows: no warnings" clang --target=x86_64-w64-windows-gnu $strict -I"$root" -fsyntax-only \
      "$work/windows.c"
  fi
else
  skip "MinGW (needs $mingw-gcc)"
fi
finish
