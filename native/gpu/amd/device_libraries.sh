#!/bin/sh
# device_libraries.sh FOLDER COMPILER BITCODE ARCH...: fills FOLDER with AMD's device libraries (links to BITCODE/*.bc) for
# the ARCHs that COMPILER knows, and prints those.
#
# Why: Debian's device libraries are of ROCm 5.2, older than its clang 19, and have no oclc_isa_version_NNN.bc for gfx942,
# gfx950 or gfx1100. clang refuses an architecture without that file. All that it holds is one constant, the number of
# the instruction set, by which the device libraries choose among instructions. So the missing file is made from that of
# gfx940, with its own number: major * 1000 + minor * 100 + stepping. Where a ROCm has the file, it is taken as it is.
set -eu
folder=$1 compiler=$2 bitcode=$3
shift 3
tool() { echo "$compiler" | sed "s,clang++\([^/]*\)\$,$1\1,"; } # llvm-as-19 beside clang++-19

mkdir -p "$folder"
ln -sf "$(cd "$bitcode" && pwd)"/*.bc "$folder"
known=
for arch in "$@"; do
  "$compiler" -x hip --offload-arch="$arch" --cuda-device-only -nogpuinc -nogpulib -c /dev/null -o /dev/null 2>/dev/null || continue
  digits=${arch#gfx}
  stepping=${digits#"${digits%?}"} rest=${digits%?}
  minor=${rest#"${rest%?}"} major=${rest%?}
  file=$folder/oclc_isa_version_$digits.bc
  if [ ! -e "$file" ]; then
    "$(tool llvm-dis)" <"$bitcode/oclc_isa_version_940.bc" |
      sed "s/i32 9400/i32 $((major * 1000 + minor * 100 + 0x$stepping))/" | "$(tool llvm-as)" -o "$file.new"
    mv "$file.new" "$file"
  fi
  known="$known${known:+ }$arch"
done
[ -n "$known" ] || { echo "make: $compiler compiles for none of $* (it needs clang-offload-bundler)" >&2; exit 1; }
echo "$known"
