#!/bin/sh
# neuron_examples.sh: examples/neuron_forward.c where there is no runtime, or a stand-in for it without a kernel; and
# examples/neuron_compare.c on .npy files with outputs that are right, and that are not, of every operation.
. "$(dirname "$0")/support/checks.sh"

example() { gcc -std=gnu11 -O1 $strict -I"$root" "$root/examples/$1.c" -o "$work/$1" -lm -ldl; }

without_runtime() {
  [ ! -e /opt/aws/neuron/lib/libnrt.so.1 ] || return 0
  "$work/neuron_forward" >"$work/forward.out" && grep -q 'on the CPU: libnrt was not found' "$work/forward.out"
}

# With a stand-in for the runtime: a NEFF for it, one for other logical cores, one that is cut short.
stand_in() {
  mkdir -p "$work/lib" &&
    gcc -std=gnu11 -O1 -fPIC -shared -DMOE_IMPLEMENTATION -I"$root" -I"$root/tests" -include "$root/moe.h" \
      "$root/tests/neuron/standin_nrt.c" -o "$work/lib/libnrt.so.1" -lm -lpthread &&
    gcc -std=gnu11 -O1 -I"$root" "$root/tests/neuron/save_neff.c" -o "$work/save_neff" -lm -ldl &&
    "$work/save_neff" "$work/kernel.neff" && head -c 5000 "$work/kernel.neff" >"$work/short.neff"
}
on_stand_in() { # code, words, arguments
  code=$1 words=$2
  shift 2
  LD_LIBRARY_PATH=$work/lib "$work/neuron_forward" "$@" >"$work/forward.out" 2>&1
  [ $? -eq "$code" ] && grep -q "$words" "$work/forward.out" || { cat "$work/forward.out"; false; }
}
other_cores() { NEURON_LOGICAL_NC_CONFIG=1 on_stand_in 0 'on the CPU: neff is compiled for logical cores of 2' "$@"; }

# Writes in/, right/ and wrong/ as numpy.save does, in several types and versions of the format.
cat >"$work/tensors.py" <<'PY'
import math, os, random, struct
random.seed(1)
T, H, I, E, B, N = 5, 8, 6, 2, 4, 4

def save(path, code, descr, shape, data, version=1):
    text = "{'descr': '%s', 'fortran_order': False, 'shape': (%s), }" % (descr, "".join("%d, " % s for s in shape))
    text = text + " " * (-(len(text) + 11) % 64) + "\n"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as f:
        f.write(b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(text)))
        f.write(text.encode() + struct.pack("<%d%s" % (len(data), code), *data))

def bits(values):  # bfloat16
    return [struct.unpack("<I", struct.pack("<f", v))[0] >> 16 for v in values]

def some(n):  # exact in bfloat16
    return [random.randint(-64, 64) / 64 for _ in range(n)]

x, w, d, a = some(T * H), some(E * H * 2 * I), some(E * I * H), [random.random() for _ in range(T * E)]
ids = [-1] * (N * B)
for t in range(T):
    for e in range(E):
        ids[(2 * e + t // 4) * B + t % 4] = t
save("in/hidden_states.npy", "H", "|V2", (T, H), bits(x))
save("in/gate_up_proj_weight.npy", "f", "<f4", (E, H, 2, I), w, 2)
save("in/down_proj_weight.npy", "e", "<f2", (E, I, H), d)
save("in/expert_affinities_masked.npy", "f", "<f4", (T * E, 1), a, 3)
save("in/token_position_to_id.npy", "q", "<i8", (N * B,), ids)
save("in/block_to_expert.npy", "i", "<i4", (N, 1), [0, 0, 1, 1])
y = [0.0] * (T * H)
for t in range(T):
    for e in range(E):
        def product(half, i):
            return sum(x[t * H + h] * w[((e * H + h) * 2 + half) * I + i] for h in range(H))
        m = [product(0, i) / (1 + math.exp(-product(0, i))) * product(1, i) for i in range(I)]
        for h in range(H):
            y[t * H + h] += a[t * E + e] * sum(m[i] * d[(e * I + i) * H + h] for i in range(I))
save("right/output.npy", "f", "<f4", (T, H), y)
y[7] += 1
save("wrong/output.npy", "f", "<f4", (T, H), y)
save("short/output.npy", "f", "<f4", (T, H), y[1:])
PY

compare() { cd "$work" && "$work/neuron_compare" "$@" >"$work/compare.out" 2>&1; }
right() {
  compare --type f32 forward in right && compare --type bf16 forward in right && grep -q 'they agree' compare.out
}
wrong() { compare --type "$1" forward in wrong; [ $? -eq 1 ] && grep -q '^output .* 40 *1 .* 7: ' compare.out; }
refused() { compare --type f32 "$@"; [ $? -eq 2 ]; }

# Calls of every operation, written by a program of our own.
save() {
  gcc -std=gnu11 -O1 -I"$root" -I"$root/tests" "$root/tests/neuron/save_npy.c" -o "$work/save_npy" -lcmocka -lm -ldl &&
    mkdir -p "$work/cases" && "$work/save_npy" "$work/cases"
}
case_is() { # code case outputs
  cd "$work/cases/$2" && "$work/neuron_compare" $(cat options) in "$3" >compare.out 2>&1
  [ $? -eq "$1" ] || { cat compare.out; false; }
}

for name in neuron_forward neuron_compare; do check "$name compiles" example $name; done
check "neuron_forward: without a runtime it says so, and runs on the CPU" without_runtime
if [ ! -e /opt/aws/neuron/lib/libnrt.so.1 ]; then
  check "a stand-in for the runtime, and a NEFF for it" stand_in
  check "neuron_forward: on the stand-in, compared" on_stand_in 0 'they agree' "$work/kernel.neff"
  check "neuron_forward: says that it ran there" grep -q 'on the device: the call fits the model on core 1' \
    "$work/forward.out"
  check "neuron_forward: a name that is mapped to nothing" on_stand_in 0 'on the CPU: .*output, an output of the NEFF' \
    "$work/kernel.neff" output=other
  check "neuron_forward: a NEFF for other logical cores" other_cores "$work/kernel.neff"
  check "neuron_forward: a NEFF that is cut short" on_stand_in 0 'on the CPU: neff is cut short' "$work/short.neff"
  check "neuron_forward: no such file" on_stand_in 2 'cannot read' "$work/none.neff"
fi
if echo '#include <stdarg.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>' | gcc -fsyntax-only -xc - 2>/dev/null; then
  check "calls of every operation as .npy files" save
  for name in forward forward_fp8 forward_blocks forward_mxfp4 forward_mxfp8 backward grouped grouped_dx grouped_dw \
    grouped_fp8 matmul mlp_forward mlp_backward; do
    check "neuron_compare: $name, right" case_is 0 $name right
    check "neuron_compare: $name, one element that is not" case_is 1 $name wrong
  done
else
  skip "neuron_compare on every operation (needs cmocka)"
fi
if have python3; then
  check "tensors" sh -c "cd '$work' && python3 tensors.py"
  check "neuron_compare: outputs that are right, f32 and bf16" right
  check "neuron_compare: one element that is not, f32" wrong f32
  check "neuron_compare: one element that is not, bf16" wrong bf16
  check "neuron_compare: a file that is cut short" refused forward in short
  check "neuron_compare: no outputs" refused forward in in
  check "neuron_compare: no activation of that name" refused --act sine forward in right
else
  skip "neuron_compare (needs python3)"
fi
finish
