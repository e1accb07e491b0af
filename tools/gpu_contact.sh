#!/usr/bin/env bash
# Tries tiered_zero on a machine with a GPU that may have no network, no pip and nothing installed but torch.
#
#   tools/gpu_contact.sh [--wheels DIR] [--out DIR] [--dir DIR] [--from FILE] [--minutes N] [--without-kernels] [--smoke]
#
# Unpacks carried wheels of what is missing, compiles the C libraries, runs tools/gpu_acceptance.py, whose sections are
# in the order of what decides most. The same command again goes on where it stopped. See docs/gpu.md.
#   --wheels DIR        where the wheels lie; else wheels/ in the checkout, or next to it
#   --out DIR           where records, pictures and the trace go; else $OUT, else ./gpu-contact
#   --dir DIR           where swap files are made: a local NVMe disk; else the output's folder
#   --from FILE         results.jsonl of an earlier call, where the output's folder is a new one
#   --minutes N         for this call, all in all: 8
#   --without-kernels   go on where the C libraries cannot be compiled
#   --smoke             tiny models, without a GPU too
set -euo pipefail
started=$SECONDS
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3} out=${OUT:-./gpu-contact} dir='' wheels='' from='' minutes=8 options=()
while [ $# -gt 0 ]; do
  case $1 in
    --wheels) wheels=$2; shift ;;
    --out) out=$2; shift ;;
    --dir) dir=$2; shift ;;
    --from) from=$2; shift ;;
    --minutes) minutes=$2; shift ;;
    --without-kernels | --smoke) options+=("$1") ;;
    *) sed -n '2,/^set/{/^#/p}' "$0" >&2; exit 2 ;;
  esac
  shift
done
mkdir -p "$out"
dir=${dir:-$out}
[ -z "$from" ] || cp -n "$from" "$out/results.jsonl"

site=$(mktemp -d "${TMPDIR:-/tmp}/tiered_zero-site-XXXXXX")
trap 'rm -rf "$site"' EXIT
"$python" "$root/tools/acceptance/carried.py" "$site" ${wheels:+"$wheels"} "$root/wheels" "$root/../wheels"
export PYTHONPATH=$root:$site${PYTHONPATH:+:$PYTHONPATH}

native=$root/tiered_zero/native
found='from tiered_zero.native import find_library as f; raise SystemExit(not (f("_update") and f("_direct_io")))'
if ! "$python" -c "$found"; then
  # setup.py needs a setuptools that the machine may not have; the libraries are plain C
  (cd "$root" && "$python" setup.py -q build_ext --inplace) >"$site/build.log" 2>&1 || true
  if ! "$python" -c "$found"; then
    for name in update direct_io; do
      "${CC:-cc}" -O3 -pthread -shared -fPIC "$native/$name.c" -o "$native/_$name.so" >>"$site/build.log" 2>&1 || true
    done
  fi
  if ! "$python" -c "$found"; then
    tail -3 "$site/build.log"
    echo "the C libraries could not be compiled: carry tiered_zero/native/_*.so, compiled on a like machine" \
      "(cc -O3 -pthread -shared -fPIC update.c -o _update.so; direct_io.c too)"
  fi
fi

minutes=$("$python" -c "print(max(0.5, $minutes - ($SECONDS - $started) / 60))")
"$python" "$root/tools/gpu_acceptance.py" --out "$out" --dir "$dir" --minutes "$minutes" ${options[@]+"${options[@]}"}
